// The functions of the driver, as programs find them that are not linked with it.
#include <cuda.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>

void* driver;

#define CALL(name, ...)                                                                   \
  do {                                                                                    \
    auto call = reinterpret_cast<decltype(&name)>(dlsym(driver, TEXT(name)));             \
    if (call == nullptr || call(__VA_ARGS__) != CUDA_SUCCESS) std::exit(3);               \
  } while (0)
#define TEXT(name) TEXT_OF(name)
#define TEXT_OF(name) #name

int main(int, char** arguments) {
  driver = dlopen("libcuda.so.1", RTLD_NOW);
  CUdevice device;
  CUcontext context;
  CUmodule module;
  CUfunction add, none;
  CALL(cuInit, 0);
  CALL(cuDeviceGet, &device, 0);
  CALL(cuDevicePrimaryCtxRetain, &context, device);
  CALL(cuCtxSetCurrent, context);
  CALL(cuModuleLoad, &module, arguments[1]);
  CALL(cuModuleGetFunction, &add, module, "add");
  auto get = reinterpret_cast<decltype(&cuModuleGetFunction)>(dlsym(driver, "cuModuleGetFunction"));
  std::printf("no kernel %d\n", get(&none, module, "nothing"));

  float host[100], value = 2.5f;
  int n = 100, level;
  CUdeviceptr x, variable;
  size_t size;
  for (int i = 0; i < n; ++i) host[i] = i;
  CALL(cuMemAlloc, &x, sizeof host);
  CALL(cuMemcpyHtoD, x, host, sizeof host);
  void* given[] = {&x, &value, &n};
  CALL(cuLaunchKernel, add, 4, 1, 1, 32, 1, 1, 0, nullptr, given, nullptr);
  struct {
    CUdeviceptr x;
    float value;
    int n;
  } packed{x, 1, n};
  size = sizeof packed;
  void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &packed, CU_LAUNCH_PARAM_BUFFER_SIZE, &size, CU_LAUNCH_PARAM_END};
  CALL(cuLaunchKernel, add, 4, 1, 1, 32, 1, 1, 0, nullptr, nullptr, extra);
  CALL(cuMemcpyDtoH, host, x, sizeof host);
  CALL(cuModuleGetGlobal, &variable, &size, module, "level");
  CALL(cuMemcpyDtoH, &level, variable, size);
  std::printf("%g %g, level %d\n", host[0], host[99], level);

  decltype(&cuTensorMapEncodeTiled) encode;
  CUdriverProcAddressQueryResult found;
  CALL(cuGetProcAddress, "cuTensorMapEncodeTiled", reinterpret_cast<void**>(&encode), 12000, 0, &found);
  CUtensorMap map;
  cuuint64_t sizes[] = {64, 64}, strides[] = {128};
  cuuint32_t box[] = {64, 8}, steps[] = {1, 1};
  auto make = [&] {
    return encode(&map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, reinterpret_cast<void*>(x), sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  };
  int right = make();
  strides[0] = 100;
  std::printf("map %d, then %d\n", right, make());
}
