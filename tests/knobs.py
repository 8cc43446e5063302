"""Workers of the hand-written Blackwell kernel with other template arguments than those built."""


def instance(*arguments) -> str:
    """Source of one kernel, `chosen`, whose worker has these template arguments.

    Args:
      arguments: of a config as the names of kernels spell them, and of the knobs behind it.
    """
    return f"""
#define PATCH_EMBED_DTYPE kNone
#define PATCH_EMBED_SM100_kNone(X)
#include "patch_embed_sm100.cu"
using namespace patch_embed;
using namespace patch_embed::sm100;
using namespace patch_embed::spelled;
using Chosen = Worker<{", ".join(map(str, arguments))}>;
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    chosen(const __grid_constant__ Arguments args) {{
  Chosen(args, *reinterpret_cast<Chosen::Memory*>(shared_memory)).run();
}}
"""
