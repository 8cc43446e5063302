"""The one place through which the operands and results of all kernels of this package pass.

XLA may give a custom call a part of a larger buffer. Its dynamic slice fusion (on by default since
openxla/xla 43831) replaces a slice in front of the call, or an update of a slice behind it, by an
address within the larger buffer. It requires that the slice is contiguous and that its size is a
multiple of 256 bytes, but not that it begins at such a multiple. So operands and results may begin
at any element. If both are parts of the same buffer, the kernel may overwrite what it has yet to
read. docs/backends.md lists what each kernel may assume, and what that costs.
"""

from collections.abc import Callable

import jax
from jax import lax


def call_kernel(
    kernel: Callable[..., jax.Array], *operands: jax.Array, accepts_slices: bool = False
) -> jax.Array:
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
