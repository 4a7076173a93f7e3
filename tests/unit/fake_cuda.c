/* A libcuda.so.1 without a GPU: it remembers what it was asked to launch, for the tests of the launcher. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PARAMETERS 1024
#define MAPS 4

struct Launch {
  unsigned grid[3], block[3], shared;
  void* stream;
  void* kernel;
  unsigned char parameters[PARAMETERS];
};

struct Map { /* what it was asked to encode */
  uint64_t address, sizes[5], strides[4];
  uint32_t rank, box[5], steps[5];
  int type, interleave, swizzle, promotion, fill;
};

static struct Launch last;
static struct Map maps[MAPS];
static int encoded; /* maps, since the last launch */
static char zeros[16] __attribute__((aligned(16)));
static int launches, loads, pushed, retained, synchronized_, shared_set, image_is_ptx;
static int refuse_cubin, fail_launch, fail_ptx, fail_map, fail_pool, max_threads = 1024;
static int counters[64], had, freed, counted_at_launch; /* memory from pools */
static int mode = 0, size = 0;
static void* current; /* the context of this thread */
static int contexts[4];

/* What tests ask and set. */
struct Launch* fake_last(void) { return &last; }
struct Map* fake_maps(void) { return maps; }
void* fake_zeros(void) { return zeros; }
int fake_count(const char* what) {
  if (!strcmp(what, "launches")) return launches;
  if (!strcmp(what, "loads")) return loads;
  if (!strcmp(what, "pushed")) return pushed;
  if (!strcmp(what, "retained")) return retained;
  if (!strcmp(what, "synchronized")) return synchronized_;
  if (!strcmp(what, "shared_set")) return shared_set;
  if (!strcmp(what, "ptx")) return image_is_ptx;
  if (!strcmp(what, "mode")) return mode;
  if (!strcmp(what, "had")) return had;
  if (!strcmp(what, "freed")) return freed;
  if (!strcmp(what, "counted_at_launch")) return counted_at_launch;
  return -1;
}
void fake_set(const char* what, int value) {
  if (!strcmp(what, "refuse_cubin")) refuse_cubin = value;
  if (!strcmp(what, "fail_launch")) fail_launch = value;
  if (!strcmp(what, "fail_ptx")) fail_ptx = value;
  if (!strcmp(what, "fail_map")) fail_map = value, encoded = 0;
  if (!strcmp(what, "fail_pool")) fail_pool = value;
  if (!strcmp(what, "max_threads")) max_threads = value;
  if (!strcmp(what, "size")) size = value < PARAMETERS ? value : PARAMETERS; /* of the parameters */
}

int cuInit(unsigned flags) { return flags; }
int cuDeviceGetCount(int* count) { return *count = 2, 0; }
int cuDeviceGet(int* device, int number) {
  if (number > 1) return 101;
  return *device = number, 0;
}
int cuDeviceGetName(char* name, int size, int device) {
  return snprintf(name, size, "Fake GPU %d", device), 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 97 ? 100 * 1024 : attribute == 16 ? 5 : attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  return ++retained, *context = &contexts[device], 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxPushCurrent_v2(void* context) { return ++pushed, current = context, 0; }
int cuCtxPopCurrent_v2(void** context) { return *context = current, current = NULL, 0; }
int cuModuleLoadDataEx(void** module, const char* image, unsigned n, int* options, void** values) {
  if (mode != 2 || current == NULL) return 900; /* capture would be broken; no context */
  image_is_ptx = image[0] == '.';
  if (!image_is_ptx && refuse_cubin) return 209;
  if (image_is_ptx && fail_ptx) {
    if (n == 2 && options[0] == 5) strcpy(values[0], "ptxas: line 7: no such instruction");
    return 218;
  }
  return ++loads, *module = &loads, 0;
}
int cuModuleGetFunction(void** kernel, void* module, const char* name) {
  (void)module;
  if (strcmp(name, "attention")) return 500;
  return *kernel = current, 0; /* so that a launch shows for which device it was loaded */
}
int cuFuncGetAttribute(int* value, int attribute, void* kernel) {
  (void)kernel;
  return *value = attribute == 0 ? max_threads : 0, 0;
}
int cuFuncSetAttribute(void* kernel, int attribute, int value) {
  (void)kernel;
  if (attribute == 8) shared_set = value;
  return 0;
}
int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, void* stream, void** parameters, void** extra) {
  if (fail_launch) return 1;
  if (current != kernel || extra != NULL) return 400;
  ++launches, encoded = 0;
  counted_at_launch = had > freed ? counters[(had - 1) % 64] : -1;
  last = (struct Launch){{gx, gy, gz}, {bx, by, bz}, shared, stream, kernel, {0}};
  memcpy(last.parameters, parameters[0], size);
  return 0;
}
int cuMemPoolCreate(void** pool, const int* props) {
  if (mode != 2) return 900; /* capture would be broken */
  return props[0] == 1 && props[1] == 0 && props[2] == 1 ? *pool = &contexts[props[3]], 0 : 1;
}
int cuMemPoolSetAttribute(void* pool, int attribute, uint64_t* value) {
  return pool == NULL || attribute != 4 || *value != UINT64_MAX;
}
int cuMemAllocFromPoolAsync(void** address, size_t bytes, void* pool, void* stream) {
  if (fail_pool) return 2;
  if (bytes != 4 || pool != current || stream != NULL) return 1;
  counters[had % 64] = 77; /* what was there before */
  return *address = &counters[had++ % 64], 0;
}
int cuMemsetD32Async(int* address, unsigned value, size_t count, void* stream) {
  if (count != 1 || stream != NULL) return 1;
  return *address = (int)value, 0;
}
int cuMemFreeAsync(int* address, void* stream) {
  if (*address < 0 || stream != NULL) return 1;
  return *address = -1, ++freed, 0;
}
int cuModuleGetGlobal_v2(void** address, size_t* bytes, void* module, const char* name) {
  (void)module;
  if (bytes != NULL || strcmp(name, "zeros")) return 500;
  return *address = zeros, 0;
}
#ifndef WITHOUT_MAPS
/* Refuses what the driver refuses, as far as the launcher could get it wrong; map n is 128 times 0xc0 + n. */
int cuTensorMapEncodeTiled(void* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  if (current == NULL) return 201;
  if (fail_map || encoded == MAPS || rank < 1 || rank > 5) return 1;
  if ((uintptr_t)map % 64 || address == NULL || (uintptr_t)address % 16) return 1;
  struct Map* one = &maps[encoded];
  *one = (struct Map){(uintptr_t)address, {0}, {0}, rank, {0}, {0}, type, interleave, swizzle, promotion, fill};
  for (uint32_t i = 0; i < rank; ++i) {
    one->sizes[i] = sizes[i], one->box[i] = box[i], one->steps[i] = steps[i];
    if (sizes[i] < 1 || sizes[i] > UINT64_C(1) << 32 || box[i] < 1 || box[i] > 256) return 1;
    if (i + 1 == rank) continue;
    one->strides[i] = strides[i];
    if (strides[i] % 16 || strides[i] >= UINT64_C(1) << 40) return 1;
  }
  return memset(map, 0xc0 + encoded++, 128), 0;
}
#endif
int cuStreamSynchronize(void* stream) { return (void)stream, ++synchronized_, 0; }
int cuThreadExchangeStreamCaptureMode(int* wanted) {
  int before = mode;
  return mode = *wanted, *wanted = before, 0;
}
int cuGetErrorName(int result, const char** name) {
  return *name = result == 1 ? "CUDA_ERROR_INVALID_VALUE" : "CUDA_ERROR_FAKE", 0;
}
int cuGetErrorString(int result, const char** text) { return (void)result, *text = "as asked", 0; }
