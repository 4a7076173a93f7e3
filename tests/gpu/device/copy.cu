// Every way to fill a tile in shared memory, read back from where its plain CuTe layout says.
struct Params {
  fw::Global<T, 2> src, out;
  int way, rows, valid, cols;
};

enum Way { Async, Through, Elements };

template <int Threads, int Rows>
__device__ void copied(Params const& p, unsigned char* shared) {
  using Tile = fw::SharedTile<T, Rows, Cols>;
  Tile const tile = fw::shared_tile<T, Rows, Cols>(shared);
  for (int i = threadIdx.x; i < Tile::bytes; i += Threads) shared[i] = 0x7f;  // NaN of every type
  __syncthreads();
  if (p.way == Async) {
#if __CUDA_ARCH__ >= 800
    fw::copy_async<Threads>(tile, p.src.tile(), p.valid);
    fw::commit();
    fw::wait<0>();
#endif
  } else if (p.way == Through) {
    if constexpr (Tile::bytes <= MOST_STAGED * Threads) {  // what registers hold
      fw::Staged<Threads, Tile> staged;
      staged.load(p.src.tile(), p.valid);
      __syncthreads();  // so that the tile is in registers indeed
      staged.store(tile);
    }
  } else {
    fw::copy_elements<Threads>(tile, p.src.tile(), p.valid, p.cols);
  }
  __syncthreads();
  auto const plain = tile.tensor();
  for (int i = threadIdx.x; i < Rows * Cols; i += Threads) {
    *p.out.at(i / Cols, i % Cols) = plain(i / Cols, i % Cols);
  }
}

template <int Threads, int... Rows>
__device__ void one_of(Params const& p, unsigned char* shared) {
  if (blockDim.x != Threads) return;
  ((p.rows == Rows ? copied<Threads, Rows>(p, shared) : void()), ...);
}

template <int... Threads>
__device__ void any_of(Params const& p, unsigned char* shared) {
  (one_of<Threads, ROWS>(p, shared), ...);
}

extern "C" __global__ void __launch_bounds__(256) attention(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  any_of<THREADS>(p, shared);
}
