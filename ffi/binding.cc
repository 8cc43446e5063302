// The XLA FFI handlers of the CUDA kernels, and the functions that Python calls (backends/cuda.py).
//
// The library contains the kernels' machine code. It looks up the driver's functions at run time,
// so that it can be loaded on any machine. Between calls it keeps only the addresses of these
// functions and the loaded kernels.

#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "architectures.h"
#include "launch.h"
#include "xla/ffi/api/ffi.h"

#define PATCH_EMBED_EXPORT extern "C" __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace patch_embed {

// XLA's stream. It is null on platforms without streams, so that operands are checked everywhere.
struct Stream {};

}  // namespace patch_embed

template <>
struct xla::ffi::CtxDecoding<patch_embed::Stream> {
  using Type = CUstream;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine&) {
    XLA_FFI_Stream_Get_Args args{};
    args.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE;
    args.ctx = ctx;
    XLA_FFI_Error* error = api->XLA_FFI_Stream_Get(&args);
    if (!error) return static_cast<CUstream>(args.stream);
    // The error's message is not read, because newer runtimes write more into the arguments of the
    // call that returns it than an older struct has room for (docs/backends.md).
    XLA_FFI_Error_Destroy_Args destroy{};
    destroy.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
    destroy.error = error;
    api->XLA_FFI_Error_Destroy(&destroy);
    return CUstream{nullptr};
  }
};

namespace patch_embed {
namespace {

// The version of the interface between Python and this library: its operands, attributes and
// functions.
constexpr int kInterface = 5;

// The kernels.

using namespace spelled;

// Returns the numbers of blocks that the workers of a kernel can have.
std::vector<int> block_counts(Sharing sharing) {
  if (sharing == split) return {2, 4, kMostSplits};
  return {sharing == b2 ? 2 : 1};
}

#define PATCH_EMBED_ADD(dtype, out_dtype, terms, tile_n, rows, sharing, slots, weight)        \
  for (int blocks : block_counts(sharing)) {                                                  \
    all->push_back(                                                                           \
        {{&own::kArchitecture, dtype, out_dtype, terms, tile_n, rows, sharing, blocks, slots, \
          weight},                                                                            \
         own::SharedOf<dtype, out_dtype, terms, tile_n, rows, sharing, slots, weight>::bytes, \
         own::SharedOf<dtype, out_dtype, terms, tile_n, rows, sharing, slots,                 \
                       weight>::staying_chunks,                                               \
         capabilities});                                                                      \
  }
#define PATCH_EMBED_ADD_ALL(architecture, dtype, ...)       \
  {                                                         \
    namespace own = sm##architecture;                       \
    const std::vector<int> capabilities = {__VA_ARGS__};    \
    PATCH_EMBED_SM##architecture##_##dtype(PATCH_EMBED_ADD) \
  }

const std::vector<Kernel>& kernels() {
  static const auto* all = [] {
    auto* all = new std::vector<Kernel>;
    PATCH_EMBED_ARCHITECTURES(PATCH_EMBED_ADD_ALL)
    return all;
  }();
  return *all;
}

const Kernel* find_kernel(std::string_view name) {
  const auto found = std::find_if(kernels().begin(), kernels().end(),
                                  [&](const Kernel& kernel) { return kernel.name == name; });
  return found == kernels().end() ? nullptr : &*found;
}

// A library of a tuned kernel (backends/cuda_tuning.py) contains only one row of the list.
#ifndef PATCH_EMBED_FATBINS
#define PATCH_EMBED_FATBINS PATCH_EMBED_ARCHITECTURES
#endif

// Embeds the machine code of an architecture's kernels for one dtype.
// clang-format off
#define PATCH_EMBED_DATA(architecture, dtype, ...)                                           \
  asm(".section .rodata\n.balign 64\npatch_embed_fatbin_" #architecture "_" #dtype ":\n"   \
      ".incbin \"sm" #architecture "_" #dtype ".fatbin\"\n.previous\n");                    \
  extern "C" const char patch_embed_fatbin_##architecture##_##dtype[];
// clang-format on
PATCH_EMBED_FATBINS(PATCH_EMBED_DATA)

struct Image {
  int architecture;
  Type dtype;
  const char* fatbin;
  std::mutex loading;
  CUlibrary library;
};

#define PATCH_EMBED_IMAGE(architecture, dtype, ...) \
  {architecture, Type::dtype, patch_embed_fatbin_##architecture##_##dtype, {}, nullptr},
Image images[] = {PATCH_EMBED_FATBINS(PATCH_EMBED_IMAGE)};

Image* find_image(const Config& config) {
  for (Image& image : images) {
    if (image.architecture == config.architecture->number && image.dtype == config.dtype) {
      return &image;
    }
  }
  return nullptr;
}

// The driver.

// clang-format off
#define PATCH_EMBED_DRIVER(X)                                                              \
  X(cuGetErrorName) X(cuGetErrorString) X(cuStreamGetCtx) X(cuCtxPushCurrent)             \
  X(cuCtxPopCurrent) X(cuCtxGetDevice) X(cuDeviceGetAttribute) X(cuLibraryLoadData)       \
  X(cuLibraryGetKernel) X(cuKernelSetAttribute) X(cuTensorMapEncodeTiled)                   \
  X(cuTensorMapEncodeIm2col) X(cuLaunchKernelEx) X(cuDriverGetVersion)                     \
  X(cuMemcpyDtoDAsync) X(cuMemAllocAsync) X(cuMemFreeAsync)
// clang-format on

// cuda.h defines some of these names as macros that expand to a versioned name, such as
// cuCtxPushCurrent_v2. PATCH_EMBED_TEXT expands them, so that this version is looked up.
#define PATCH_EMBED_TEXT(name) #name
#define PATCH_EMBED_POINTER(name) decltype(&::name) name##_fn = nullptr;
#define PATCH_EMBED_LOOK_UP(name)                                                         \
  name##_fn = reinterpret_cast<decltype(&::name)>(dlsym(handle, PATCH_EMBED_TEXT(name))); \
  if (!name##_fn) too_old = "the driver has no " PATCH_EMBED_TEXT(name) "; 525 or newer is needed.";

// CUDA encodes a version as 1000 * major + 10 * minor.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

struct Driver {
  std::string missing;  // the reason why the driver cannot be loaded, or empty
  std::string too_old;  // the reason why the driver cannot run the kernels, or empty
  int version = 0;      // the newest version of CUDA that the driver supports

  PATCH_EMBED_DRIVER(PATCH_EMBED_POINTER)

  Driver() {
    void* handle = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!handle) {
      missing = std::string("the NVIDIA driver cannot be loaded: ") + dlerror() + ".";
      return;
    }
    PATCH_EMBED_DRIVER(PATCH_EMBED_LOOK_UP)
    if (!too_old.empty()) return;
    // A driver loads machine code from every toolkit of its own major version or of an older one.
    if (cuDriverGetVersion_fn(&version) == CUDA_SUCCESS && version / 1000 < CUDA_VERSION / 1000) {
      too_old =
          "the driver is for CUDA " + version_text(version) +
          "; the kernels were compiled by CUDA " + version_text(CUDA_VERSION) +
          " and need a driver for CUDA " + version_text(CUDA_VERSION / 1000 * 1000) +
          " or newer. Update the driver, or build the kernels with nvcc 12.9 for a driver of CUDA 12.";
    }
  }
};

const Driver& driver() {
  static const Driver loaded;
  return loaded;
}

// Loads an image once per process, for all devices.
CUresult load(Image& image) {
  const std::lock_guard<std::mutex> lock(image.loading);
  if (image.library) return CUDA_SUCCESS;
  CUlibrary library;
  const CUresult result = driver().cuLibraryLoadData_fn(&library, image.fatbin, nullptr, nullptr, 0,
                                                        nullptr, nullptr, 0);
  if (result == CUDA_SUCCESS) image.library = library;
  return result;
}

ffi::Error error(ffi::ErrorCode code, const std::string& text) {
  return ffi::Error(code, "patch_embed: " + text);
}

ffi::Error driver_error(const std::string& what, CUresult result) {
  const char *name = nullptr, *text = nullptr;
  driver().cuGetErrorName_fn(result, &name);
  driver().cuGetErrorString_fn(result, &text);
  return error(ffi::ErrorCode::kInternal, what + ": " + (name ? name : std::to_string(result)) +
                                              (text ? std::string(", ") + text : "") + ".");
}

#define PATCH_EMBED_RETURN_IF_ERROR(what, call)                 \
  if (const CUresult result = (call); result != CUDA_SUCCESS) { \
    return driver_error(what, result);                          \
  }

// Makes the context of XLA's stream current in this thread for the lifetime of the object.
class Context {
 public:
  explicit Context(CUstream stream) {
    CUcontext context;
    result = driver().cuStreamGetCtx_fn(stream, &context);
    if (result == CUDA_SUCCESS) result = driver().cuCtxPushCurrent_fn(context);
    pushed_ = result == CUDA_SUCCESS;
  }
  ~Context() {
    CUcontext context;
    if (pushed_) driver().cuCtxPopCurrent_fn(&context);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  CUresult result;

 private:
  bool pushed_;
};

// The operands.

ffi::DataType element_type(Type type) {
  switch (type) {
    case Type::kFloat8E4M3FN:
      return ffi::DataType::F8E4M3FN;
    case Type::kInt8:
      return ffi::DataType::S8;
    case Type::kBFloat16:
      return ffi::DataType::BF16;
    case Type::kFloat32:
      return ffi::DataType::F32;
    case Type::kUInt8:
      return ffi::DataType::U8;
  }
  return ffi::DataType::INVALID;
}

std::string dtype_name(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::F8E4M3FN:
      return "float8_e4m3fn";
    case ffi::DataType::S8:
      return "int8";
    case ffi::DataType::U8:
      return "uint8";
    case ffi::DataType::BF16:
      return "bfloat16";
    case ffi::DataType::F32:
      return "float32";
    case ffi::DataType::S32:
      return "int32";
    default:
      return "XLA's type " + std::to_string(static_cast<int>(type));
  }
}

constexpr int64_t kAny = -1;

std::string shape_text(const ffi::AnyBuffer& buffer) {
  std::string text;
  for (int64_t size : buffer.dimensions())
    text += (text.empty() ? "" : ", ") + std::to_string(size);
  return dtype_name(buffer.element_type()) + "[" + text + "]";
}

// The operands of a call. `patches` are images if the kernel cuts images.
struct Operands {
  ffi::AnyBuffer patches, weight, scale, table, y;

  // Fills `shapes`. Returns an error message if the operands or the kernel's segments of the schedule
  // are wrong, or an empty text.
  std::string check(const Kernel& kernel, const ffi::AnyBuffer& segments, Shapes* shapes) const {
    const Config& config = kernel.config;
    const bool images = config.dtype == Type::kUInt8;
    const std::string source = images ? "images" : "patches";
    std::string wrong;
    // `sizes` lists the names of the axes for which `wanted` is kAny.
    const auto expect = [&](const char* name, const ffi::AnyBuffer& buffer, ffi::DataType type,
                            std::vector<int64_t> wanted, const char* sizes) {
      const auto given = buffer.dimensions();
      bool fits = buffer.element_type() == type && given.size() == wanted.size();
      for (size_t i = 0; fits && i < wanted.size(); i++) {
        fits = wanted[i] == kAny || wanted[i] == given[i];
      }
      if (fits || !wrong.empty()) return;
      std::string axes;
      for (int64_t size : wanted) {
        axes += axes.empty() ? "" : ", ";
        if (size != kAny) {
          axes += std::to_string(size);
          continue;
        }
        const char* end = strchr(sizes, ' ');
        axes += end ? std::string(sizes, end) : sizes;
        sizes = end ? end + 1 : "";
      }
      wrong = std::string(name) + " is " + shape_text(buffer) + ", expected " + dtype_name(type) +
              "[" + axes + "] for kernel " + kernel.name +
              (&buffer == &patches ? "" : " and " + source + " " + shape_text(patches)) +
              ". Call it through pallas_patch_embed.patch_embed, which passes matching operands.";
    };
    const auto dtype = element_type(config.dtype);
    int64_t M, K, height = 0, width = 0;
    if (images) {
      expect("images", patches, dtype, {kAny, kAny, kAny, 3}, "images H W");
      if (!wrong.empty()) return wrong;
      height = patches.dimensions()[1];
      width = patches.dimensions()[2];
      M = patches.dimensions()[0] * (height / kPatchSide) * (width / kPatchSide);
      K = 3 * kPatchSide * kPatchSide;
    } else {
      expect("patches", patches, dtype, {kAny, kAny}, "M K");
      if (!wrong.empty()) return wrong;
      M = patches.dimensions()[0];
      K = patches.dimensions()[1];
    }
    expect("weight", weight, element_type(factor_type(config.dtype)), {kAny, K}, "N");
    if (!wrong.empty()) return wrong;
    const int64_t N = weight.dimensions()[0];
    expect("scale", scale, ffi::DataType::F32, {N}, "");
    if (config.has_table) {
      expect("table", table, ffi::DataType::BF16, {kAny, N}, "period");
    } else {
      expect("table", table, ffi::DataType::F32, {N}, "");
    }
    expect("segments", segments, ffi::DataType::S32, {kAny, kAny, 4}, "workers segments");
    expect("y", y, element_type(config.out_dtype), {M, N}, "");
    if (!wrong.empty()) return wrong;
    const auto sizes = segments.dimensions();
    *shapes = {M,        N,        K,      config.has_table ? table.dimensions()[0] : 1,
               sizes[0], sizes[1], height, width};
    return "";
  }
};

// A kernel that a program names, its segments of the schedule, and its launch.
struct Choice {
  const Kernel* kernel;
  ffi::AnyBuffer segments;
  Shapes shapes;
  Launch launch;
};

// Returns the names of a program's kernels, each of which has an operand with its segments. They are
// in the attribute `kernels`, separated by commas. A program that was exported by interface 4 has two
// other attributes, of which one may be empty. The list is empty if the attributes are unknown.
std::vector<std::string_view> kernel_names(const ffi::Dictionary& attributes) {
  std::vector<std::string_view> names;
  const auto get = [&](const char* name) { return attributes.get<std::string_view>(name); };
  if (attributes.size() == 1 && attributes.contains("kernels")) {
    if (const auto all = get("kernels"); all.has_value()) {
      for (size_t begin = 0, end = 0; end != all->npos; begin = end + 1) {
        end = all->find(',', begin);
        names.push_back(all->substr(begin, end - begin));
      }
    }
  } else if (attributes.size() == 2 && attributes.contains("kernel_sm90")) {
    const auto hopper = get("kernel_sm90"), blackwell = get("kernel_sm100");
    if (hopper.has_value() && blackwell.has_value()) names = {*hopper, *blackwell};
  }
  return names;
}

constexpr char kExportAgain[] =
    " The program was exported by another version of pallas_patch_embed: export it again.";

// Fills `choices`. Returns an error message if the program or its operands are wrong, or an empty
// text.
std::string choose(const ffi::Dictionary& attributes, const Operands& operands,
                   const ffi::RemainingArgs& segments, std::vector<Choice>* choices) {
  const std::vector<std::string_view> names = kernel_names(attributes);
  if (names.empty()) {
    return std::string("the attributes of the call are unknown, expected only `kernels`, a text.") +
           kExportAgain;
  }
  if (names.size() != segments.size()) {
    return "the call has " + std::to_string(segments.size()) +
           " operands with segments, expected one for each of its kernels, of which it names " +
           std::to_string(names.size()) + "." + kExportAgain;
  }
  for (size_t i = 0; i < names.size(); i++) {
    if (names[i].empty()) continue;
    const Kernel* kernel = find_kernel(names[i]);
    if (!kernel) return "this library has no kernel " + std::string(names[i]) + "." + kExportAgain;
    const auto buffer = segments.get<ffi::AnyBuffer>(i);
    if (!buffer.has_value()) return "an operand with segments is not an array.";
    choices->push_back({kernel, *buffer, {}, {}});
    Choice& choice = choices->back();
    std::string wrong = operands.check(*kernel, *buffer, &choice.shapes);
    if (wrong.empty()) wrong = launch_of(*kernel, choice.shapes, &choice.launch);
    if (!wrong.empty()) return wrong;
  }
  return choices->empty()
             ? "the program names no kernel. Call it through pallas_patch_embed.patch_embed."
             : "";
}

// Returns the choice whose kernel runs on GPUs of this compute capability, or null.
const Choice* choice_for(int capability, const std::vector<Choice>& choices) {
  for (const Choice& choice : choices) {
    const auto& accepted = choice.kernel->capabilities;
    if (std::find(accepted.begin(), accepted.end(), capability) != accepted.end()) return &choice;
  }
  return nullptr;
}

std::string capability_text(int capability) {
  return std::to_string(capability / 10) + "." + std::to_string(capability % 10);
}

// Addresses that a kernel does not accept.

// Operands and results of a kernel begin at multiples of this number of bytes. TMA requires it (CUDA
// driver API, cuTensorMapEncodeTiled, globalAddress), and so do the widest loads.
constexpr size_t kAlignment = 16;

// The addresses at which the kernel of one call reads its operands and writes its result.
//
// XLA may pass a part of a larger buffer (pallas_patch_embed/base/lowering.py). An operand that is not
// aligned is copied before the launch. A result that is not aligned, or that overlaps an operand, is
// copied after the launch. All other buffers are used where they are.
class KernelAddresses {
 public:
  KernelAddresses(CUstream stream, const ffi::AnyBuffer& y)
      : stream_(stream), y_(y), result_(y.untyped_data()) {}
  // The driver frees the memory once the stream has reached this point. XLA's own allocator for
  // handlers does not know the stream, and would give the memory to a call on another stream.
  ~KernelAddresses() {
    for (CUdeviceptr memory : allocated_) driver().cuMemFreeAsync_fn(memory, stream_);
  }
  KernelAddresses(const KernelAddresses&) = delete;
  KernelAddresses& operator=(const KernelAddresses&) = delete;

  // Sets `address` to where the kernel reads an operand.
  ffi::Error read(const char* name, const ffi::AnyBuffer& buffer, const void** address) {
    *address = buffer.untyped_data();
    const auto begin = uintptr_t(buffer.untyped_data()), y = uintptr_t(y_.untyped_data());
    if (begin % kAlignment == 0) {
      overlaps_ |= begin < y + y_.size_bytes() && y < begin + buffer.size_bytes();
      return ffi::Error::Success();
    }
    void* copied;
    if (ffi::Error error = allocate(name, buffer, &copied); error.failure()) return error;
    *address = copied;
    return copy(name, copied, buffer.untyped_data(), buffer.size_bytes());
  }

  // Sets `address` to where the kernel writes the result, once all operands have an address.
  ffi::Error write(void** address) {
    if (overlaps_ || uintptr_t(y_.untyped_data()) % kAlignment) {
      if (ffi::Error error = allocate("y", y_, &result_); error.failure()) return error;
    }
    *address = result_;
    return ffi::Error::Success();
  }

  // Copies the result to where XLA expects it, after the launch.
  ffi::Error finish() {
    if (result_ == y_.untyped_data()) return ffi::Error::Success();
    return copy("y", y_.untyped_data(), result_, y_.size_bytes());
  }

 private:
  ffi::Error allocate(const char* name, const ffi::AnyBuffer& buffer, void** address) {
    const size_t size = buffer.size_bytes();
    CUdeviceptr memory = 0;
    if (driver().cuMemAllocAsync_fn(&memory, size, stream_) == CUDA_SUCCESS) {
      allocated_.push_back(memory);
      *address = reinterpret_cast<void*>(memory);
      return ffi::Error::Success();
    }
    const size_t remainder = uintptr_t(buffer.untyped_data()) % kAlignment;
    const std::string reason =
        remainder ? "begins " + std::to_string(remainder) + " bytes after a multiple of " +
                        std::to_string(kAlignment) + ", which the kernel does not support"
                  : "overlaps an operand";
    return error(ffi::ErrorCode::kResourceExhausted,
                 std::string(name) + " is a part of a larger array and " + reason +
                     ", and there is no memory for a copy of " + std::to_string(size) +
                     " bytes. Leave more memory to others than XLA (XLA_CLIENT_MEM_FRACTION), or "
                     "let XLA make an array of its own: apply jax.lax.optimization_barrier to the "
                     "slice.");
  }

  ffi::Error copy(const char* name, void* to, const void* from, size_t size) {
    PATCH_EMBED_RETURN_IF_ERROR(
        std::string("copying ") + name,
        driver().cuMemcpyDtoDAsync_fn(CUdeviceptr(to), CUdeviceptr(from), size, stream_));
    return ffi::Error::Success();
  }

  CUstream stream_;
  const ffi::AnyBuffer& y_;
  void* result_;
  bool overlaps_ = false;
  std::vector<CUdeviceptr> allocated_;
};

// Encodes a tensor map. launch_of() checks everything that the driver checks, except the address, which
// is a multiple of kAlignment.
CUresult encode(const TensorMap& map, const void* begin, CUtensorMap* encoded) {
  void* data = const_cast<void*>(begin);
  const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
  const auto type = map.type == Type::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                    : map.type == Type::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                  : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const auto swizzle = map.swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                       : map.swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                           : CU_TENSOR_MAP_SWIZZLE_NONE;
  if (map.im2col) {
    const int first_corner[3] = {};
    // For images an L2 promotion to 256 bytes, which is best for patches, takes 1.4% longer on Hopper.
    return driver().cuTensorMapEncodeIm2col_fn(
        encoded, type, map.rank, data, map.shape, map.strides, first_corner, map.corner, map.box[0],
        map.box[1], steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
        CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  }
  return driver().cuTensorMapEncodeTiled_fn(encoded, type, map.rank, data, map.shape, map.strides,
                                            map.box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                            CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

// Handles one of XLA's two stages. Both stages check everything. The Initialize stage then loads
// the kernel onto the device. The Execute stage launches the kernel.
template <ffi::ExecutionStage stage>
ffi::Error handle(CUstream stream, ffi::AnyBuffer patches, ffi::AnyBuffer weight,
                  ffi::AnyBuffer scale, ffi::AnyBuffer table, ffi::RemainingArgs segments,
                  ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes) {
  const Operands operands{patches, weight, scale, table, *y};
  std::vector<Choice> choices;
  if (const std::string wrong = choose(attributes, operands, segments, &choices); !wrong.empty()) {
    return error(ffi::ErrorCode::kInvalidArgument, wrong);
  }
  if (choices[0].shapes.M == 0) return ffi::Error::Success();

  const Driver& cuda = driver();
  for (const std::string& reason : {cuda.missing, cuda.too_old}) {
    if (!reason.empty()) return error(ffi::ErrorCode::kUnavailable, reason);
  }
  if (!stream) return error(ffi::ErrorCode::kUnavailable, "XLA passed no stream of a GPU.");
  const Context context(stream);
  PATCH_EMBED_RETURN_IF_ERROR("the stream's context", context.result);
  CUdevice device;
  int major = 0, minor = 0;
  PATCH_EMBED_RETURN_IF_ERROR("cuCtxGetDevice", cuda.cuCtxGetDevice_fn(&device));
  for (auto [value, attribute] :
       {std::pair{&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR},
        std::pair{&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR}}) {
    PATCH_EMBED_RETURN_IF_ERROR("cuDeviceGetAttribute",
                                cuda.cuDeviceGetAttribute_fn(value, attribute, device));
  }
  const int capability = 10 * major + minor;
  const Choice* choice = choice_for(capability, choices);
  if (!choice) {
    std::string accepted;
    for (const Choice& other : choices) {
      for (int one : other.kernel->capabilities) {
        accepted += (accepted.empty() ? "" : ", ") + capability_text(one);
      }
    }
    return error(ffi::ErrorCode::kFailedPrecondition,
                 "the device has compute capability " + capability_text(capability) +
                     ", but the program's kernels for " + dtype_name(patches.element_type()) +
                     " are for " + accepted +
                     ". Lower the program for this device, pack the params with another dtype, or "
                     "use another backend.");
  }
  const Config& config = choice->kernel->config;
  const std::string& name = choice->kernel->name;
  Image* image = find_image(config);
  if (!image) {
    return error(ffi::ErrorCode::kUnavailable, "this library was built without " + name + ".");
  }
  PATCH_EMBED_RETURN_IF_ERROR("a driver for CUDA " + version_text(cuda.version) +
                                  " cannot load the kernels, compiled by CUDA " +
                                  version_text(CUDA_VERSION),
                              load(*image));
  CUkernel kernel;
  PATCH_EMBED_RETURN_IF_ERROR(
      name, cuda.cuLibraryGetKernel_fn(&kernel, image->library, choice->kernel->symbol.c_str()));
  if constexpr (stage == ffi::ExecutionStage::kInitialize) {
    PATCH_EMBED_RETURN_IF_ERROR(
        "the kernel's shared memory",
        cuda.cuKernelSetAttribute_fn(CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                     kMostSharedBytes, kernel, device));
    return ffi::Error::Success();
  }

  const Launch& launch = choice->launch;
  Arguments arguments{};
  KernelAddresses addresses(stream, operands.y);
  const void *read_patches, *read_weight, *read_scale, *read_table, *read_segments;
  void* write_y = nullptr;
  struct Operand {
    const char* name;
    const ffi::AnyBuffer* buffer;
    const void** address;
  };
  for (const Operand& operand :
       {Operand{"patches", &patches, &read_patches}, Operand{"weight", &weight, &read_weight},
        Operand{"scale", &scale, &read_scale}, Operand{"table", &table, &read_table},
        Operand{"segments", &choice->segments, &read_segments}}) {
    ffi::Error error = addresses.read(operand.name, *operand.buffer, operand.address);
    if (error.failure()) return error;
  }
  if (ffi::Error error = addresses.write(&write_y); error.failure()) return error;
  arguments.scale = static_cast<const float*>(read_scale);
  arguments.table = read_table;
  arguments.out = write_y;
  arguments.segments = static_cast<const Segment*>(read_segments);
  arguments.M = int32_t(choice->shapes.M);
  arguments.N = int32_t(choice->shapes.N);
  arguments.chunks = launch.chunks;
  arguments.period = int32_t(choice->shapes.period);
  arguments.segment_count = int32_t(choice->shapes.segments);
  arguments.grid_width = int32_t(choice->shapes.width / kPatchSide);
  arguments.row_patches = row_patches(arguments.grid_width);
  PATCH_EMBED_RETURN_IF_ERROR("the tensor map of patches",
                              encode(launch.patches, read_patches, &arguments.patches));
  PATCH_EMBED_RETURN_IF_ERROR("the tensor map of weight",
                              encode(launch.weight, read_weight, &arguments.weight));
  if (launch.y.rank) {
    PATCH_EMBED_RETURN_IF_ERROR("the tensor map of y", encode(launch.y, write_y, &arguments.y));
  }
  CUlaunchAttribute cluster{};
  cluster.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
  cluster.value.clusterDim.x = launch.cluster;
  cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
  CUlaunchConfig how{};
  how.gridDimX = launch.thread_blocks;
  how.blockDimX = launch.threads;
  how.gridDimY = how.gridDimZ = how.blockDimY = how.blockDimZ = 1;
  how.sharedMemBytes = unsigned(launch.shared_memory);
  how.hStream = stream;
  how.attrs = &cluster;
  how.numAttrs = launch.cluster > 1;
  void* parameters[] = {&arguments};
  PATCH_EMBED_RETURN_IF_ERROR(
      "launching " + name,
      cuda.cuLaunchKernelEx_fn(&how, reinterpret_cast<CUfunction>(kernel), parameters, nullptr));
  return addresses.finish();
}

template <ffi::ExecutionStage stage>
auto binding() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<Stream>()
      .template Arg<ffi::AnyBuffer>()  // patches
      .template Arg<ffi::AnyBuffer>()  // weight
      .template Arg<ffi::AnyBuffer>()  // scale
      .template Arg<ffi::AnyBuffer>()  // table
      .RemainingArgs()                 // segments of each kernel
      .template Ret<ffi::AnyBuffer>()  // y
      .Attrs();
}

// Copies a text and its terminating zero to the caller's buffer if they fit. Returns their total
// size.
int64_t copy_to_caller(const std::string& text, char* buffer, int64_t size) {
  const int64_t needed = int64_t(text.size()) + 1;
  if (needed <= size) memcpy(buffer, text.c_str(), needed);
  return needed;
}

}  // namespace
}  // namespace patch_embed

PATCH_EMBED_EXPORT XLA_FFI_Error* patch_embed_initialize(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(patch_embed_initialize,
                              patch_embed::handle<ffi::ExecutionStage::kInitialize>,
                              patch_embed::binding<ffi::ExecutionStage::kInitialize>());

// XLA does not record this handler into command buffers. They would be executed after the call, when
// the memory of its copies is free again, and the handler would not learn when they are destroyed.
PATCH_EMBED_EXPORT XLA_FFI_Error* patch_embed_execute(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(patch_embed_execute,
                              patch_embed::handle<ffi::ExecutionStage::kExecute>,
                              patch_embed::binding<ffi::ExecutionStage::kExecute>());

PATCH_EMBED_EXPORT int patch_embed_interface() { return patch_embed::kInterface; }

// Returns the hash of the sources that this library was built from. backends/cuda.py searches the
// library's bytes for it, without loading the library.
PATCH_EMBED_EXPORT const char* patch_embed_sources() { return PATCH_EMBED_SOURCES; }

PATCH_EMBED_EXPORT int patch_embed_ffi_major() { return XLA_FFI_API_MAJOR; }

PATCH_EMBED_EXPORT int patch_embed_ffi_minor() { return XLA_FFI_API_MINOR; }

// Writes JSON: {"error": the reason why this machine's driver cannot run the kernels}, or {} if it
// can or if there is no driver.
PATCH_EMBED_EXPORT int64_t patch_embed_driver(char* buffer, int64_t size) {
  const std::string& wrong = patch_embed::driver().too_old;
  return patch_embed::copy_to_caller(wrong.empty() ? "{}" : "{\"error\": \"" + wrong + "\"}",
                                     buffer, size);
}

// Writes JSON: a list of all configs. Each says whether this library contains its kernel.
PATCH_EMBED_EXPORT int64_t patch_embed_kernels(char* buffer, int64_t size) {
  std::string text;
  for (const auto& kernel : patch_embed::kernels()) {
    const bool built = patch_embed::find_image(kernel.config);
    text += (text.empty() ? "[" : ", ") + patch_embed::to_json(kernel, built);
  }
  return patch_embed::copy_to_caller(text + "]", buffer, size);
}

// Writes JSON: the launch of a kernel for these shapes, or {"error": the reason why there is none}.
// `segments` is the number of segments of a worker; height and width are those of images, or 0 for
// patches.
PATCH_EMBED_EXPORT int64_t patch_embed_launch(const char* kernel, int64_t M, int64_t N, int64_t K,
                                              int64_t period, int64_t workers, int64_t segments,
                                              int64_t height, int64_t width, char* buffer,
                                              int64_t size) {
  patch_embed::Launch launch;
  const auto* found = patch_embed::find_kernel(kernel);
  const std::string wrong =
      found ? patch_embed::launch_of(*found, {M, N, K, period, workers, segments, height, width},
                                     &launch)
            : "there is no kernel of this name.";
  const std::string text =
      wrong.empty() ? patch_embed::to_json(launch) : "{\"error\": \"" + wrong + "\"}";
  return patch_embed::copy_to_caller(text, buffer, size);
}
