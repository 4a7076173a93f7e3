// The gradients of attention: a block for each tile of keys; dQ is added up by atomics.
constexpr int kDim = 16, kTile = 32;

__global__ void attention_backward(const float* q, const float* k, const float* v, const float* g, const float* lse,
                                   const float* delta, float* dq, float* dk, float* dv, int queries) {
  __shared__ float qs[kTile][kDim], gs[kTile][kDim], ds[kTile][kTile + 1];
  int key = blockIdx.x * kTile + threadIdx.x;
  float kown[kDim], vown[kDim], dkown[kDim] = {}, dvown[kDim] = {};
  for (int d = 0; d < kDim; ++d) kown[d] = k[key * kDim + d], vown[d] = v[key * kDim + d];
  for (int first = 0; first < queries; first += kTile) {
    for (int i = threadIdx.x; i < kTile * kDim; i += blockDim.x) {
      qs[i / kDim][i % kDim] = q[first * kDim + i];
      gs[i / kDim][i % kDim] = g[first * kDim + i];
    }
    __syncthreads();
    for (int i = 0; i < kTile; ++i) {
      float score = 0, dp = 0;
      for (int d = 0; d < kDim; ++d) score += qs[i][d] * kown[d], dp += gs[i][d] * vown[d];
      float p = expf(score - lse[first + i]), slope = p * (dp - delta[first + i]);
      for (int d = 0; d < kDim; ++d) dvown[d] += p * gs[i][d], dkown[d] += slope * qs[i][d];
      ds[i][threadIdx.x] = slope;
    }
    __syncthreads();
    for (int d = 0; d < kDim; ++d) {
      float sum = 0;
      for (int j = 0; j < kTile; ++j) sum += ds[threadIdx.x][j] * k[(blockIdx.x * kTile + j) * kDim + d];
      atomicAdd(&dq[(first + threadIdx.x) * kDim + d], sum);
    }
  }
  for (int d = 0; d < kDim; ++d) dk[key * kDim + d] = dkown[d], dv[key * kDim + d] = dvown[d];
}
