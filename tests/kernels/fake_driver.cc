// Replaces libcuda.so.1 where there is no GPU. It records the calls that it gets, and can make one
// function fail. No CUDA header is needed to build it.

#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <utility>

// The newest CUDA version that the driver supports.
#ifndef DRIVER_VERSION
#define DRIVER_VERSION 99010
#endif

namespace {

std::mutex mutex;
std::string written, failing;
int capability[2] = {9, 0};
// How many bytes can be allocated at once, the address of the next allocation, and the stream of
// each allocation that is not freed.
uint64_t available = 0;
uintptr_t next_address;
std::map<uintptr_t, uintptr_t> stream_of;
// Largest dynamic shared memory in bytes, by kernel and device.
std::map<std::pair<std::string, int>, unsigned> limits;
thread_local uintptr_t current = 0;

template <typename... Values>
int note(const char* name, Values... values) {
  std::lock_guard<std::mutex> lock(mutex);
  written += name;
  ((written += " " + std::to_string(values)), ...);
  written += "\n";
  return failing == name ? 999 : 0;
}

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared_memory;
  void* stream;
  struct Attribute {
    int id;
    char pad[4];
    unsigned value[16];
  }* attributes;
  unsigned count;
};

}  // namespace

extern "C" {

void fake_begin(int major, int minor, const char* fail, uint64_t memory) {
  capability[0] = major, capability[1] = minor;
  available = memory;
  next_address = 1 << 29;
  failing = fail;
  written.clear();
}

const char* fake_written() { return written.c_str(); }

// Returns the number of allocations that were not freed.
int fake_leaks() { return int(stream_of.size()); }

// The library calls this once per process, so it is not recorded.
int cuDriverGetVersion(int* version) { return *version = DRIVER_VERSION, 0; }

int cuGetErrorName(int, const char** text) { return *text = "CUDA_ERROR_UNKNOWN", 0; }

int cuGetErrorString(int, const char** text) { return *text = "unknown error", 0; }

// A stream's number is that of its context.
int cuStreamGetCtx(uintptr_t stream, uintptr_t* context) {
  *context = stream;
  return note("cuStreamGetCtx", stream);
}

int cuCtxPushCurrent_v2(uintptr_t context) {
  current = context;
  return note("cuCtxPushCurrent", context);
}

int cuCtxPopCurrent_v2(uintptr_t* context) {
  *context = current;
  current = 0;
  return note("cuCtxPopCurrent", *context);
}

int cuCtxGetDevice(int* device) {
  *device = int(current);
  return note("cuCtxGetDevice", current);
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = capability[attribute - 75];
  return note("cuDeviceGetAttribute");
}

int cuLibraryLoadData(uintptr_t* library, const void* image, void*, void*, unsigned, void*, void*,
                      unsigned) {
  *library = 1;
  // A fatbin begins with this word.
  return note("cuLibraryLoadData", *static_cast<const uint32_t*>(image));
}

int cuLibraryGetKernel(const char** kernel, uintptr_t, const char* name) {
  *kernel = strdup(name);
  return note("cuLibraryGetKernel");
}

int cuKernelSetAttribute(int attribute, int value, const char* kernel, int device) {
  {
    std::lock_guard<std::mutex> lock(mutex);
    limits[{kernel, device}] = value;
  }
  return note("cuKernelSetAttribute", attribute, value, device);
}

int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* data, const uint64_t* shape,
                           const uint64_t* strides, const uint32_t* box, const uint32_t* steps,
                           int interleave, int swizzle, int promotion, int fill) {
  int result = note("cuTensorMapEncodeTiled", type, rank, uintptr_t(data), interleave, swizzle,
                    promotion, fill);
  for (unsigned i = 0; i < rank; i++) {
    result |= note("dimension", shape[i], i ? strides[i - 1] : 0, box[i], steps[i]);
  }
  memcpy(map, &data, sizeof data);
  return result;
}

int cuTensorMapEncodeIm2col(void* map, int type, unsigned rank, void* data, const uint64_t* shape,
                            const uint64_t* strides, const int* lower, const int* upper,
                            unsigned channels, unsigned pixels, const uint32_t* steps,
                            int interleave, int swizzle, int promotion, int fill) {
  int result = note("cuTensorMapEncodeIm2col", type, rank, uintptr_t(data), channels, pixels,
                    interleave, swizzle, promotion, fill);
  for (unsigned i = 0; i < rank; i++) {
    result |= note("dimension", shape[i], i ? strides[i - 1] : 0, steps[i]);
  }
  for (unsigned i = 0; i < rank - 2; i++) result |= note("corners", lower[i], upper[i]);
  memcpy(map, &data, sizeof data);
  return result;
}

int cuMemAllocAsync(uintptr_t* address, size_t size, uintptr_t stream) {
  if (note("cuMemAllocAsync", size, stream) || size > available) return 2;
  std::lock_guard<std::mutex> lock(mutex);
  *address = next_address;
  next_address += 1 << 20;
  stream_of[*address] = stream;
  return 0;
}

int cuMemFreeAsync(uintptr_t address, uintptr_t stream) {
  const int result = note("cuMemFreeAsync", address, stream);
  std::lock_guard<std::mutex> lock(mutex);
  if (stream_of[address] == stream) stream_of.erase(address);
  return result;
}

int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t size, uintptr_t stream) {
  return note("cuMemcpyDtoDAsync", to, from, size, stream);
}

int cuLaunchKernelEx(const Config* config, const char* kernel, void** parameters, void**) {
  // Records the fields of the parameter: the maps of patches, weight and y, and then all other fields.
  {
    std::lock_guard<std::mutex> lock(mutex);
    const auto limit = limits.find({kernel, int(current)});
    if (config->shared_memory > (limit == limits.end() ? 48 * 1024 : limit->second)) return 1;
  }
  const char* parameter = static_cast<const char*>(parameters[0]);
  uint64_t words[7];
  for (int i = 0; i < 3; i++) memcpy(&words[i], parameter + 128 * i, 8);
  memcpy(words + 3, parameter + 384, 32);
  int32_t sizes[7];
  memcpy(sizes, parameter + 416, 28);
  note(kernel);
  note("pointers", words[0], words[1], words[2], words[3], words[4], words[5], words[6]);
  note("sizes", sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6]);
  for (unsigned i = 0; i < config->count; i++) {
    const auto& attribute = config->attributes[i];
    note("attribute", attribute.id, attribute.value[0], attribute.value[1], attribute.value[2]);
  }
  return note("cuLaunchKernelEx", config->grid[0], config->grid[1], config->grid[2],
              config->block[0], config->block[1], config->block[2], config->shared_memory,
              uintptr_t(config->stream), current);
}

}  // extern "C"
