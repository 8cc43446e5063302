"""The programs of encoders, which outside of a user's jit have compiler options of their own."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# JAX has no other public function that tells whether a jit traces this call.
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE as is_traced_by_jit

from pallas_patch_embed.base.chips import cuda_is_installed

# Compiler options with which XLA lets cuBLAS apply bias, GELU and residual in its matrix products.
BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}

# Fewest rows of tokens for which the options are set. Where cuBLAS computes the dense layers, 64 or
# more images of B/16 at 224 pixels take 11 to 17% less time with them on an H200, and 3136 rows, 16
# images, 10% less; but 2916 rows, four images of So400m/14 at 384 pixels, take 9% more. On Hopper
# GPUs a kernel now computes these layers for up to 5832 rows (docs/encoder.md).
FEWEST_ROWS = 3000


class Program:
    """A jitted function of an encoder and arrays, and of the static argument `kept`.

    XLA compiles all of a user's jit with the same options, which only the user can choose. A call
    outside of every transformation is a program of its own, with `BY_CUBLAS` where it pays.
    """

    def __init__(self, function: Callable[..., Any]):
        functools.update_wrapper(self, function)
        jitted = functools.partial(jax.jit, function, static_argnames="kept")
        self._inside, self._alone = jitted(), jitted(compiler_options=BY_CUBLAS)

    def __call__(self, encoder: Any, *arrays: Any, kept: tuple[int, ...], rows: int) -> Any:
        """Computes function(encoder, *arrays, kept) for so many rows of tokens."""
        # The number of rows of an exported program may be symbolic. `is_traced` comes last, because
        # it takes the longest.
        many = isinstance(rows, int) and rows >= FEWEST_ROWS
        alone = many and cuda_is_installed() and not is_traced(encoder, *arrays)
        return (self._alone if alone else self._inside)(encoder, *arrays, kept=kept)


def is_traced(*operands: Any) -> bool:
    """Returns whether a transformation traces this call.

    A jit traces it also if all operands are constants, and then refuses compiler options.
    """
    leaves = jax.tree.leaves(operands)
    return is_traced_by_jit() or any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
