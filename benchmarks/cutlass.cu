// The operator in CUTLASS: its GEMM for Hopper with an epilogue visitor tree, called through XLA's
// FFI.
//
//   y[b, s, n] = bf16((sum_k patches[b, s, k] * weight[n, k]) * scale[n] + table[s, n])
//
// The table is the GEMM's operand C, and scale is a row that is broadcast. CUTLASS cannot repeat
// the rows of C within a GEMM, but the GEMMs of a batch can share one C. So the table has the rows
// of G images, and B / G GEMMs of M = G * S rows are one launch. With G = 1 the last tile of each
// image is partly empty. With G = B there is one GEMM, which reads two more bytes for each element.
// With a G in between, the table fills the tiles and stays in the L2 cache.

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>

#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/epilogue/fusion/operations.hpp"
#include "cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

using namespace cute;
namespace epilogue = cutlass::epilogue;
namespace fusion = cutlass::epilogue::fusion;
namespace gemm = cutlass::gemm;

// Each build has one dtype, PATCH_EMBED_DTYPE, spelled as in JAX, and one schedule,
// PATCH_EMBED_SCHEDULE.

struct float8_e4m3fn {
  using DataType = std::integral_constant<ffi::DataType, ffi::DataType::F8E4M3FN>;
  using Element = cutlass::float_e4m3_t;
  using Accumulator = float;
  // "FastAccum" accumulates in the tensor cores; CUTLASS's default for float8 also adds partial
  // sums in registers.
  using CooperativeMainloop = gemm::KernelTmaWarpSpecializedCooperativeFP8FastAccum;
  using PingpongMainloop = gemm::KernelTmaWarpSpecializedPingpongFP8FastAccum;
};

struct bfloat16 {
  using DataType = std::integral_constant<ffi::DataType, ffi::DataType::BF16>;
  using Element = cutlass::bfloat16_t;
  using Accumulator = float;
  using CooperativeMainloop = gemm::KernelTmaWarpSpecializedCooperative;
  using PingpongMainloop = gemm::KernelTmaWarpSpecializedPingpong;
};

struct int8 : bfloat16 {
  using DataType = std::integral_constant<ffi::DataType, ffi::DataType::S8>;
  using Element = int8_t;
  using Accumulator = int32_t;
};

using Type = PATCH_EMBED_DTYPE;

// Alignment that TMA requires, in bytes.
constexpr int kAlignment = 16;

// Both consumer warpgroups share one tile.
struct cooperative {
  using TileMN = Shape<_128, _256>;
  using Mainloop = Type::CooperativeMainloop;
  using Epilogue = epilogue::TmaWarpSpecializedCooperative;
};

// Each consumer warpgroup has its own tile: one multiplies while the other one stores.
struct pingpong {
  using TileMN = Shape<_128, _128>;
  using Mainloop = Type::PingpongMainloop;
  using Epilogue = epilogue::TmaWarpSpecialized;
};

using Schedule = PATCH_EMBED_SCHEDULE;

struct Kernel {
  using Element = Type::Element;
  using Accumulator = Type::Accumulator;
  using Output = cutlass::bfloat16_t;
  using Cluster = Shape<_2, _1, _1>;
  // A row of a stage has the 128 bytes of a row of TMA's swizzle.
  using Tile = decltype(append<3>(Schedule::TileMN{}, Int<128 / sizeof(Element)>{}));
  // Strides between rows, columns and GEMMs. All GEMMs share weight and table.
  using Strides = Stride<int64_t, _1, int64_t>;
  using Shared = Stride<int64_t, _1, _0>;
  static constexpr int kAlignmentAB = kAlignment / sizeof(Element);
  static constexpr int kAlignmentCD = kAlignment / sizeof(Output);
  static constexpr auto kRound = cutlass::FloatRoundStyle::round_to_nearest;

  // scale[n] * accumulator + C, in float32.
  using Tree =
      fusion::Sm90EVT<fusion::Sm90Compute<cutlass::homogeneous_multiply_add, Output, float, kRound>,
                      fusion::Sm90RowBroadcast<0, Tile, float>, fusion::Sm90AccFetch,
                      fusion::Sm90SrcFetch<Output>>;
  using Epilogue = epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      epilogue::collective::EpilogueTileAuto, Accumulator, float, Output, Shared, kAlignmentCD,
      Output, Strides, kAlignmentCD, Schedule::Epilogue, Tree>::CollectiveOp;
  using Stages = gemm::collective::StageCountAutoCarveout<int(sizeof(Epilogue::SharedStorage))>;
  using Mainloop = gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, Strides, kAlignmentAB, Element,
      Shared, kAlignmentAB, Accumulator, Tile, Cluster, Stages, Schedule::Mainloop>::CollectiveOp;
  using Gemm = gemm::device::GemmUniversalAdapter<gemm::kernel::GemmUniversal<
      Shape<int, int, int, int>, Mainloop, Epilogue, gemm::PersistentScheduler>>;
};

ffi::Error error(ffi::ErrorCode code, const std::string& message) {
  return ffi::Error(code, "patch_embed_cutlass: " + message);
}

struct Problem {
  int M, N, K, L;
  const void* patches = nullptr;
  const void* weight = nullptr;
  const void* scale = nullptr;
  const void* table = nullptr;
  void* y = nullptr;
};

ffi::Error launch(const Problem& p, cudaStream_t stream, ffi::ScratchAllocator& scratch) {
  using Gemm = Kernel::Gemm;
  using Element = Kernel::Element;
  using Output = Kernel::Output;
  const auto failed = [](const char* what, const char* why) {
    return error(ffi::ErrorCode::kInternal, std::string(what) + ": " + why + ".");
  };
  cutlass::KernelHardwareInfo chip;
  cudaError_t found = cudaGetDevice(&chip.device_id);
  if (found == cudaSuccess) {
    constexpr auto kWanted = cudaDevAttrMultiProcessorCount;
    found = cudaDeviceGetAttribute(&chip.sm_count, kWanted, chip.device_id);
  }
  if (found != cudaSuccess) return failed("query of the device", cudaGetErrorString(found));
  const Gemm::Arguments arguments{gemm::GemmUniversalMode::kGemm,
                                  {p.M, p.N, p.K, p.L},
                                  {static_cast<const Element*>(p.patches),
                                   {p.K, _1{}, int64_t{p.M} * p.K},
                                   static_cast<const Element*>(p.weight),
                                   {p.K, _1{}, _0{}}},
                                  {{{static_cast<const float*>(p.scale)}, {}, {}, {}},
                                   static_cast<const Output*>(p.table),
                                   {p.N, _1{}, _0{}},
                                   static_cast<Output*>(p.y),
                                   {p.N, _1{}, int64_t{p.M} * p.N}},
                                  chip};
  cutlass::Status status = Gemm::can_implement(arguments);
  if (status != cutlass::Status::kSuccess) {
    return failed("can_implement", cutlassGetStatusString(status));
  }
  void* workspace = nullptr;
  if (const size_t bytes = Gemm::get_workspace_size(arguments)) {
    const std::optional<void*> room = scratch.Allocate(bytes, 128);
    if (!room) return failed("workspace", "out of memory");
    workspace = *room;
  }
  status = Gemm().run(arguments, workspace, stream);
  if (status == cutlass::Status::kSuccess) return ffi::Error::Success();
  return failed(cutlassGetStatusString(status), cudaGetErrorString(cudaGetLastError()));
}

ffi::Error run(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::AnyBuffer patches,
               ffi::AnyBuffer weight, ffi::BufferR1<ffi::F32> scale, ffi::BufferR3<ffi::BF16> table,
               ffi::ResultBufferR3<ffi::BF16> y) {
  const auto wrong = [](const char* what) { return error(ffi::ErrorCode::kInvalidArgument, what); };
  const auto a = patches.dimensions(), w = weight.dimensions();
  const auto c = table.dimensions(), d = y->dimensions();
  constexpr auto kType = Type::DataType::value;
  if (patches.element_type() != kType || weight.element_type() != kType) {
    return wrong("the dtype of patches or weight differs from the one in the handler's name.");
  }
  if (a.size() != 3 || w.size() != 2) {
    return wrong("expected patches [B, S, K] and weight [N, K].");
  }
  const int64_t B = a[0], S = a[1], K = a[2], N = w[0], G = c[0];
  if (std::min({B, S, N, K, G}) < 1 || std::max({B * S, N, K}) > INT_MAX) {
    return wrong("an axis is empty or too long.");
  }
  if (w[1] != K || scale.dimensions()[0] != N || B % G || c[1] != S || c[2] != N || d[0] != B ||
      d[1] != S || d[2] != N) {
    return wrong("the shapes of patches, weight, scale, table and y do not fit each other.");
  }
  if (N * sizeof(cutlass::bfloat16_t) % kAlignment || K * sizeof(Type::Element) % kAlignment) {
    return wrong("the rows of y or of patches are not a multiple of 16 bytes.");
  }
  Problem problem{int(G * S), int(N), int(K), int(B / G)};
  problem.patches = patches.untyped_data();
  problem.weight = weight.untyped_data();
  problem.scale = scale.untyped_data();
  problem.table = table.untyped_data();
  problem.y = y->untyped_data();
  return launch(problem, stream, scratch);
}

}  // namespace

#define PATCH_EMBED_JOINED(dtype, schedule) patch_embed_cutlass_##dtype##_##schedule
#define PATCH_EMBED_NAME(dtype, schedule) PATCH_EMBED_JOINED(dtype, schedule)
#define PATCH_EMBED_HANDLER PATCH_EMBED_NAME(PATCH_EMBED_DTYPE, PATCH_EMBED_SCHEDULE)

extern "C" __attribute__((visibility("default")))
XLA_FFI_Error* PATCH_EMBED_HANDLER(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(PATCH_EMBED_HANDLER, run,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::ScratchAllocator>()
                                  .Arg<ffi::AnyBuffer>()             // patches
                                  .Arg<ffi::AnyBuffer>()             // weight
                                  .Arg<ffi::BufferR1<ffi::F32>>()    // scale
                                  .Arg<ffi::BufferR3<ffi::BF16>>()   // table
                                  .Ret<ffi::BufferR3<ffi::BF16>>(),  // y
                              {ffi::Traits::kCmdBufferCompatible});
