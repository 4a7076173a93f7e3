// Attention with an online softmax: a thread for each query, tiles of keys and values in shared memory.
constexpr int kDim = 16, kTile = 32;

__global__ void attention_forward(const float* q, const float* k, const float* v, float* o, float* lse, int queries, int keys) {
  __shared__ float ks[kTile][kDim], vs[kTile][kDim];
  int query = blockIdx.x * blockDim.x + threadIdx.x;
  float own[kDim], out[kDim] = {}, largest = -INFINITY, sum = 0;
  for (int d = 0; d < kDim; ++d) own[d] = query < queries ? q[query * kDim + d] : 0;
  for (int first = 0; first < keys; first += kTile) {
    int many = min(kTile, keys - first);
    for (int i = threadIdx.x; i < many * kDim; i += blockDim.x) {
      ks[i / kDim][i % kDim] = k[first * kDim + i];
      vs[i / kDim][i % kDim] = v[first * kDim + i];
    }
    __syncthreads();
    for (int j = 0; j < many; ++j) {
      float score = 0;
      for (int d = 0; d < kDim; ++d) score += own[d] * ks[j][d];
      float before = largest;
      largest = fmaxf(largest, score);
      float scale = expf(before - largest), weight = expf(score - largest);
      sum = sum * scale + weight;
      for (int d = 0; d < kDim; ++d) out[d] = out[d] * scale + weight * vs[j][d];
    }
    __syncthreads();
  }
  if (query >= queries) return;
  for (int d = 0; d < kDim; ++d) o[query * kDim + d] = out[d] / sum;
  lse[query] = largest + logf(sum);
}
