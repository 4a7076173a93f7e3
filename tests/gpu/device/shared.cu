// Addresses of chunks, as chunk_address and chunk_of give them and as the plain CuTe layout does.
// Nothing is read or written in shared memory: addresses are arithmetic.
struct Params {
  fw::Global<float, 1> any;
  fw::Global<int, 2> expected, last, found, walked, staged;  // (rows, chunks of a row)
  int bytes, rows, cols;
};

template <class T, int Rows, int Cols>
__device__ void addresses(Params const& p, unsigned char* shared) {
  using Tile = fw::SharedTile<T, Rows, Cols>;
  Tile const tile = fw::shared_tile<T, Rows, Cols>(shared), next = tile.stage(1);
  auto const plain = tile.tensor();
  uint32_t const base = cute::cast_smem_ptr_to_uint(shared);
  for (int i = threadIdx.x; i < Tile::bytes / 16; i += blockDim.x) {
    int const row = i / (Cols / Tile::chunk), number = i % (Cols / Tile::chunk);
    int const atom = number / Tile::chunks, within = number % Tile::chunks;
    auto address = [&](int col) { return cute::cast_smem_ptr_to_uint(&plain(row, col)) - base; };
    *p.expected.at(row, number) = address(number * Tile::chunk);
    *p.last.at(row, number) = address(number * Tile::chunk + Tile::chunk - 1);
    *p.found.at(row, number) = tile.chunk_address(row, within) + atom * Tile::atom_bytes - base;
    *p.walked.at(row, number) =
        fw::chunk_of<Tile>(tile.chunk_address(row, number % 2), number / 2 * 2) - base;
    *p.staged.at(row, number) = next.chunk_address(row, within) + atom * Tile::atom_bytes - base;
  }
}

template <class T, int Cols, int... Rows>
__device__ void one_of(Params const& p, unsigned char* shared) {
  if (p.bytes != sizeof(T) || p.cols != Cols) return;
  ((p.rows == Rows ? addresses<T, Rows, Cols>(p, shared) : void()), ...);
}

template <class T, int... Cols>
__device__ void any_of(Params const& p, unsigned char* shared) {
  (one_of<T, Cols, ROWS>(p, shared), ...);
}

extern "C" __global__ void __launch_bounds__(128) attention(__grid_constant__ Params const p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  any_of<fw::fp16, COLS_2>(p, shared);
  any_of<fw::e4m3, COLS_1>(p, shared);
}
