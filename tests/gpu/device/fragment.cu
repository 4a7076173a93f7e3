// Tiles and vectors in registers to and from memory. Where the elements of a tile belong is what the
// products of mma.cu say; here all ways in and out must agree on it.
struct Params {
  fw::Global<float, 2> src;          // (M, N)
  fw::Global<T, 2> rounded;          // the same in T
  fw::Global<float, 1> row, col;     // (M), (N)
  fw::Global<int, 1> whole;          // (M)
  fw::Global<T, 2> stored, stored_wide, elements, elements_wide, held, held_wide;
  fw::Global<float, 2> loaded, loaded_wide, back, back_wide, sums;
  fw::Global<float, 1> rows_out, cols_out;
  fw::Global<int, 1> whole_out;
  int rows, cols, which;             // inside
};

template <int Warps, int M, int N>
struct Case {
  static constexpr int threads = 32 * Warps;
  using Held = fw::SharedTile<T, M, N>;

  template <bool Wide, class Out>
  static __device__ void stores(Params const& p, Out stored, Out elements) {
    auto tile = fw::accumulator<M, N, Warps>();
    fw::load<Warps, Wide>(tile, p.src.tile(), M, N);
    if constexpr (sizeof(T) == 2) fw::store<Warps, Wide>(stored, tile, p.rows);
    fw::store_elements<Warps, Wide>(elements, tile, p.rows, p.cols);
  }

  template <bool Wide, class Out>
  static __device__ void loads(Params const& p, Out out) {
    auto tile = fw::accumulator<M, N, Warps>();
    fw::load<Warps, Wide>(tile, p.rounded.tile(), p.rows, p.cols);
    fw::store_elements<Warps, Wide>(out, tile, M, N);
  }

  template <bool Wide, class Out, class Back>
  static __device__ void through_shared(Params const& p, Held shared, Out out, Back back) {
    auto tile = fw::accumulator<M, N, Warps>();
    fw::load<Warps, Wide>(tile, p.src.tile(), M, N);
    fw::to_shared<Warps, Wide>(shared, tile);
    __syncthreads();
    auto const plain = shared.tensor();
    for (int i = threadIdx.x; i < M * N; i += threads) {
      *out.at(i / N, i % N) = plain(i / N, i % N);
    }
    fw::from_shared<Warps, !Wide>(tile, shared);  // held otherwise than it was put
    fw::store_elements<Warps, !Wide>(back, tile, M, N);
  }

  static __device__ void vectors(Params const& p) {
    auto tile = fw::accumulator<M, N, Warps>();
    auto row = fw::row_vector<M, Warps>();
    auto col = fw::col_vector<N>();
    auto whole = fw::row_vector<M, Warps, int>();
    fw::load_rows<Warps>(row, p.row.line(), p.rows);
    fw::load_cols<Warps>(col, p.col.line(), p.cols);
    fw::load_rows<Warps>(whole, p.whole.line(), p.rows);
    CUTE_UNROLL
    for (int m = 0; m < cute::size(row); ++m) {
      CUTE_UNROLL
      for (int n = 0; n < cute::size(col); ++n) tile(m, n) = row(m) + col(n);
    }
    fw::store_elements<Warps>(p.sums.tile(), tile, M, N);
    fw::store_rows<Warps>(p.rows_out.line(), row, p.rows);
    fw::store_cols<Warps>(p.cols_out.line(), col, p.cols);
    fw::store_rows<Warps>(p.whole_out.line(), whole, p.rows);
  }

  // One block for each, so that a thread holds one tile at a time.
  static __device__ void run(Params const& p, unsigned char* begin) {
    Held const shared = fw::shared_tile<T, M, N>(begin);
    switch (blockIdx.x) {
      case 0: return stores<false>(p, p.stored.tile(), p.elements.tile());
      case 1: return stores<true>(p, p.stored_wide.tile(), p.elements_wide.tile());
      case 2: return loads<false>(p, p.loaded.tile());
      case 3: return loads<true>(p, p.loaded_wide.tile());
      case 4: return through_shared<false>(p, shared, p.held.tile(), p.back.tile());
      case 5: return through_shared<true>(p, shared, p.held_wide.tile(), p.back_wide.tile());
      case 6: return vectors(p);
    }
  }
};

template <class... Case>
__device__ void one_of(Params const& p, unsigned char* shared) {
  int number = 0;
  ((number++ == p.which ? Case::run(p, shared) : void()), ...);
}

extern "C" __global__ void __launch_bounds__(256) attention(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  one_of<CASES>(p, shared);
}
