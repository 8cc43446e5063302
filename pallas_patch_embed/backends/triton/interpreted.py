"""Runs the Triton kernel in Triton's interpreter, which executes it with numpy on a CPU."""

import importlib.util
from pathlib import Path
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

from pallas_patch_embed.backends import triton as backend

# Types whose numbers the interpreter stores as integers with the same bits.
STORED_AS_BITS = {tl.bfloat16: jnp.bfloat16, tl.float8e4nv: jnp.float8_e4m3fn}


class Buffer:
    """A copy of an array with canaries on both sides. The interpreter gets the copy's address."""

    GUARD = 256

    def __init__(self, array: np.ndarray, dtype: str | None = None):
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self.bytes = np.full(content.size + 2 * self.GUARD, 0xA5, np.uint8)
        self.inside = self.bytes[self.GUARD : self.GUARD + content.size]
        self.inside[:] = content
        self.like = array
        # The interpreter reads this attribute, as it does from a torch tensor.
        self.dtype = dtype or backend.TYPES[array.dtype.name]

    def data_ptr(self) -> int:
        """Returns the address of the first byte."""
        return self.inside.ctypes.data

    def array(self) -> np.ndarray:
        """Returns the contents after an assertion that the canaries have not changed."""
        guards = np.concatenate([self.bytes[: self.GUARD], self.bytes[-self.GUARD :]])
        assert (guards == 0xA5).all()
        return self.inside.view(self.like.dtype).reshape(self.like.shape)


def _argument(argument):
    if not isinstance(argument, Buffer):
        return tl.constexpr(argument)
    kind = tl.pointer_type(tl.str_to_ty(argument.dtype, None))
    return tl.tensor(
        interpreter.TensorHandle(np.array([argument.data_ptr()], np.uint64), kind), kind
    )


def _numbers(data, dtype):
    return data.view(STORED_AS_BITS[dtype]) if dtype in STORED_AS_BITS else data


def _dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    """Multiplies matrices in float64.

    Triton's interpreter would multiply float8 as float16, and bfloat16 as integers with its bits.
    """
    a, b = (_numbers(x.data, x.dtype).astype(np.float64) for x in (a, b))
    return interpreter.TensorHandle((a @ b + d.data).astype(d.data.dtype), d.dtype.scalar)


def _fma(self, x, y, z):
    """Multiplies and adds with one rounding, as on a GPU.

    The interpreter of Triton 3.6 would also round the product.
    """
    exact = x.data.astype(np.float64) * y.data + z.data
    return interpreter.TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)


def _convert(data, dtype, to, rounding_mode):
    """Converts with rounding to nearest, ties to even, as on a GPU.

    Triton's interpreter would truncate.
    """
    with np.errstate(invalid="ignore"):
        target = STORED_AS_BITS.get(to) or interpreter._get_np_dtype(to)
        return _numbers(data, dtype).astype(target)


def load_kernel():
    """Loads the kernel's module with functions that are interpreted."""
    path = Path(backend.__file__).with_name("kernel.py")
    spec = importlib.util.spec_from_file_location("interpreted_kernel", path)
    module: Any = importlib.util.module_from_spec(spec)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    # The interpreter cannot execute inline PTX.
    module.uint8_to_biased_float32 = lambda pixels: pixels.to(tl.float32) + 2.0**23
    return module


def call(*operands, out, grid, num_warps, num_stages, compute_capability, **arguments):
    """Calls the interpreted kernel, in place of the function that the backend's `_call` returns."""
    del num_warps, num_stages, compute_capability
    kernel = load_kernel().patch_embed
    buffers = [Buffer(np.asarray(x)) for x in operands]
    y = Buffer(np.full(out.shape, np.nan, out.dtype))
    given = dict(zip(kernel.arg_names, (*buffers, y))) | arguments
    with (
        mock.patch.object(interpreter.InterpreterBuilder, "create_dot", _dot),
        mock.patch.object(interpreter.InterpreterBuilder, "create_fma", _fma),
        mock.patch.object(interpreter, "_implicit_cvt", _argument),
        mock.patch.object(interpreter, "_convert_float", _convert),
        triton.knobs.runtime.scope(),
    ):
        triton.knobs.runtime.interpret = True
        executor = interpreter.GridExecutor(kernel.rewrite(), kernel.arg_names, (grid,), [])
        executor._init_args_hst = lambda args, kwargs: (args, kwargs)
        executor._restore_args_dev = lambda *_: None
        executor(**given)
    for buffer in buffers:
        buffer.array()
    return jnp.asarray(y.array())
