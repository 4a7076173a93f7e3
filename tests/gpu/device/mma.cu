// C = 1 + A B in every way that a product can be asked for.
struct Params {
  fw::Global<T, 2> A, B;    // (M, K); (N, K) where it is transposed, else (K, N)
  fw::Global<float, 2> P;   // (M, K): an accumulator that becomes the left operand
  fw::Global<float, 2> C;   // (M, N)
  int way, which;
};

enum Way { Turned, TurnedRolled, TurnedHeld, Plain, PlainRolled, PlainHeld, Result };

template <int Warps, int M, int N, int K>
struct Case {
  static constexpr int room = (M * K * int(sizeof(T)) + 1023) / 1024 * 1024;

  static __device__ void run(Params const& p, unsigned char* shared) {
    auto const a = fw::shared_tile<T, M, K>(shared);
    fw::copy_elements<32 * Warps>(a, p.A.tile(), M, K);
    if (p.way < Plain) {
      auto const b = fw::shared_tile<T, N, K>(shared + room);
      fw::copy_elements<32 * Warps>(b, p.B.tile(), N, K);
      __syncthreads();
      turned(p, a, b);
    } else {
      auto const b = fw::shared_tile<T, K, N>(shared + room);
      fw::copy_elements<32 * Warps>(b, p.B.tile(), K, N);
      __syncthreads();
      plain(p, a, b);
    }
  }

  template <class A, class B>
  static __device__ void turned(Params const& p, A a, B b) {
    auto acc = fw::accumulator<M, N, Warps>();
    cute::fill(acc, 1.f);
    auto const right = fw::right_transposed(b);
    if (p.way == Turned) fw::gemm<Atom>(acc, fw::left<Warps>(a), right);
    if (p.way == TurnedRolled) fw::gemm_rolled<Atom>(acc, fw::left<Warps>(a), right);
    if (p.way == TurnedHeld) fw::gemm<Atom>(acc, fw::load_operand<Warps>(a), right);
    fw::store_elements<Warps>(p.C.tile(), acc, M, N);
  }

  template <class A, class B>
  static __device__ void plain(Params const& p, A a, B b) {
    auto acc = fw::accumulator<M, N, Warps>();
    cute::fill(acc, 1.f);
    auto const right = fw::right(b);
    if constexpr (sizeof(T) == 2) {  // bytes go with a result only, whose order of k they have
      if (p.way == Plain) fw::gemm<Atom>(acc, fw::left<Warps>(a), right);
      if (p.way == PlainRolled) fw::gemm_rolled<Atom>(acc, fw::left<Warps>(a), right);
      if (p.way == PlainHeld) fw::gemm<Atom>(acc, fw::load_operand<Warps>(a), right);
    }
    if (p.way == Result) {
      auto result = fw::accumulator<M, K, Warps>();
      fw::load<Warps>(result, p.P.tile(), M, K);
      fw::gemm<Atom>(acc, fw::operand<T>(result), right);
    }
    fw::store_elements<Warps, sizeof(T) == 1>(p.C.tile(), acc, M, N);
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
