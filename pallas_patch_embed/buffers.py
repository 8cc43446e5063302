"""The one place through which the operands and results of all kernels of this package pass.

XLA may give a custom call a part of a larger buffer instead of a buffer of its own: its pass for
dynamic slice fusions (openxla/xla 43831) turns a slice in front of the call into an address, and so
does it with an update of a slice behind the call. The pass checks that the slice is contiguous, and
that its size is a multiple of the alignment of XLA's buffers, but not where the slice begins. So
operand and result may begin at any element, and if both are parts of one buffer, the kernel may
overwrite what it still has to read.

The handler of the CUDA kernels (ffi/binding.cc) checks both at run time, and copies what a kernel
cannot take. The handlers of Mosaic and jax-triton are not part of this package, so for them XLA
must not fold a slice into the call. docs/backends.md says what it costs.
"""

from collections.abc import Callable

import jax
from jax import lax


def on_whole_buffers(kernel: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Calls a kernel whose operands and result are whole buffers, aligned as XLA aligns them.

    A barrier costs nothing next to a buffer. A slice next to it is computed by XLA, in a copy.
    """
    return lax.optimization_barrier(kernel(*lax.optimization_barrier(operands)))
