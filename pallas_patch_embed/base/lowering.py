"""What all primitives of this package need while they are lowered.

All operands and results of their kernels pass through `call_kernel`. XLA may give a custom call a
part of a larger buffer. Its dynamic slice fusion (on by default since openxla/xla 43831) replaces a
slice in front of the call, or an update of a slice behind it, by an address within the larger
buffer. It requires that the slice is contiguous and that its size is a multiple of 256 bytes, but
not that it begins at such a multiple. So operands and results may begin at any element. If both are
parts of the same buffer, the kernel may overwrite what it has yet to read. docs/backends.md lists
what each kernel may assume, and what that costs.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax.interpreters import mlir

from pallas_patch_embed.base.chips import Target


def call_kernel(
    kernel: Callable[..., Any], *operands: jax.Array, accepts_slices: bool = False
) -> Any:
    """Calls a kernel with whole, aligned buffers, unless it accepts parts of larger ones.

    A barrier costs nothing next to a buffer. Next to a slice it makes XLA copy the slice.

    Args:
      kernel: function of the operands that makes one custom call.
      operands: arrays.
      accepts_slices: whether the handler of the custom call accepts parts of larger buffers,
        because it copies those that its kernel cannot use. Only that of ffi/binding.cc does.
    """
    if accepts_slices:
        return kernel(*operands)
    return lax.optimization_barrier(kernel(*lax.optimization_barrier(operands)))


def devices_left_to_xla(module: Any) -> int:
    """Returns the number of devices over which XLA will partition this module."""
    context = module.axis_context
    if isinstance(context, mlir.SPMDAxisContext):
        left = set(context.mesh.axis_names) - context.manual_axes
        return math.prod(context.mesh.shape[name] for name in left)
    return getattr(context, "num_devices", 1)


def target_of(module: Any, platform: str | None) -> Target:
    """Returns the target on which the module will run."""
    if platform is None and len(module.platforms) == 1:
        return Target(module.platforms[0])
    if platform is not None and not module.lowering_parameters.for_export and module.backend:
        devices = module.backend.local_devices() or module.backend.devices()
        target = Target.of(devices[0])
        if target.platform == platform:
            return target
    return Target.unknown(platform or module.platforms[0])


@contextlib.contextmanager
def on_one_device(ctx: Any) -> Iterator[Any]:
    """Yields the context in which code is lowered that runs on one device.

    Pallas kernels refuse operands whose types say how they vary over a mesh, so these types are
    replaced by types without that information. The indices of kernels have 32 bits, also if a
    program enables 64.
    """
    plain = [jax.core.ShapedArray(x.shape, x.dtype) for x in ctx.avals_in]
    mesh = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))
    with mesh, jax.enable_x64(False):
        yield ctx.replace(avals_in=plain)
