"""The CUDA kernel for Blackwell with a `Tuning` that differs from the built kernels."""


def instance(*arguments, **tuning) -> str:
    """Returns the source of one kernel, `chosen`, whose worker has these template arguments.

    Args:
      arguments: template arguments, as the names of kernels spell them.
      tuning: members of `Tuning` (ffi/patch_embed_sm100.h) that differ from the built kernels.
    """
    _, out_dtype, _, tile_n, _, slots, _ = arguments
    members = "".join(f"  static constexpr auto {k} = {v};\n" for k, v in tuning.items())
    return f"""
#define PATCH_EMBED_DTYPE kNone
#define PATCH_EMBED_SM100_kNone(X)
#include "patch_embed_sm100.cu"
using namespace patch_embed;
using namespace patch_embed::sm100;
using namespace patch_embed::spelled;
struct Tuned : Tuning<{out_dtype}, {tile_n}, {slots}> {{
{members}}};
using Chosen = Worker<{", ".join(map(str, arguments))}, Tuned>;
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    chosen(const __grid_constant__ Arguments args) {{
  Chosen(args, *reinterpret_cast<Chosen::Memory*>(shared_memory)).run();
}}
"""
