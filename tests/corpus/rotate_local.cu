// Rotary positions: pairs of a row are turned; a row is kept in an indexed array (local memory).
__global__ void rotate_local(const float* x, const float* angles, float* y, int rows, int offset) {
  constexpr int kDim = 16;
  __shared__ float2 turns[kDim / 2];
  if (threadIdx.x < kDim / 2) turns[threadIdx.x] = make_float2(cosf(angles[threadIdx.x]), sinf(angles[threadIdx.x]));
  __syncthreads();
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float own[kDim];
  for (int i = 0; i < kDim; ++i) own[(i + offset) % kDim] = x[row * kDim + i];
  for (int i = 0; i < kDim / 2; ++i) {
    float a = own[(2 * i + offset) % kDim], b = own[(2 * i + 1 + offset) % kDim];
    *reinterpret_cast<float2*>(&y[row * kDim + 2 * i]) =
        make_float2(a * turns[i].x - b * turns[i].y, a * turns[i].y + b * turns[i].x);
  }
}
