"""Arrays that users pass: those of JAX and numpy, and what numpy or DLPack can view."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

# Type of an array argument of a public function. Arrays of other libraries that `as_array` accepts
# have no common type.
type AnyArray = jax.Array | npt.NDArray[Any]

# The methods of arrays of other libraries.
PROTOCOLS = ("__jax_array__", "__dlpack__", "__array__", "__array_interface__")


def as_array(value: Any, name: str) -> Any:
    """Returns an array argument as a JAX array (also a traced one) or a numpy array.

    Arrays of other libraries are viewed through DLPack or numpy's protocols, so a tensor of PyTorch
    on the CPU is accepted in every dtype that numpy or ml_dtypes has.

    Args:
      value: the argument. A parameter of a framework, such as flax.nnx.Param, counts as the array
        that it holds.
      name: name of the argument in error messages.

    Raises:
      TypeError: `value` is no such array, has masked elements, requires a gradient, is on a device
        that JAX cannot see, or its bytes are not in this machine's order.
    """
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        value = value.__jax_array__()
    if isinstance(value, jax.Array):
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name} is a masked array, expected a numpy or JAX array without a mask. Fill the "
            "masked elements with its method filled."
        )
    if not isinstance(value, np.ndarray):
        value = _viewed(value, name)
    if value.dtype.char in "gG":  # longdouble and clongdouble
        raise TypeError(
            f"{name}: the dtype is {value.dtype.name}, which JAX does not have. Convert the array "
            "with astype(numpy.float64)."
        )
    if not value.dtype.isnative:
        raise TypeError(
            f"{name} has the big-endian dtype {value.dtype.str}, which JAX cannot read. Convert "
            f"the array with astype(numpy.{value.dtype.name})."
        )
    return value


def dtype_name(array: Any) -> str:
    """Returns the name of an array's dtype, before JAX converts float64 to float32."""
    dtype = array.dtype
    return dtype.name if hasattr(dtype, "name") else str(dtype)


def has_values(value: Any) -> bool:
    """Returns whether a value is an array, rather than a description of one."""
    return isinstance(value, jax.Array) or any(hasattr(value, name) for name in PROTOCOLS)


def _viewed(value: Any, name: str) -> Any:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, type) or not has_values(value):
        raise TypeError(
            f"{name} is {kind}, expected a JAX or numpy array."
            + (" Convert it with numpy.asarray." if isinstance(value, list | tuple) else "")
        )
    try:
        if not hasattr(value, "__dlpack__"):
            return np.asarray(value)
        if hasattr(value, "resolve_neg"):
            # PyTorch negates some views only when they are read, which DLPack does not know.
            value = value.resolve_neg()
        try:
            return np.from_dlpack(value)
        except (BufferError, RuntimeError, TypeError, ValueError):
            # Through DLPack numpy reads no bfloat16 and no memory of a GPU. JAX reads both, but
            # only contiguous arrays.
            array = jnp.from_dlpack(_Contiguous(value))
    except Exception as error:
        raise TypeError(
            f"{name} is {kind}, which neither JAX nor numpy can view ({error}). Expected a JAX or "
            "numpy array, or a tensor on the CPU without a gradient. Convert it first, in PyTorch "
            "with tensor.detach().cpu()."
        ) from error
    on_cpu = all(device.platform == "cpu" for device in array.devices())
    return np.asarray(array) if on_cpu else array


class _Contiguous:
    """Exports a contiguous copy of another library's array through DLPack."""

    def __init__(self, value: Any):
        self._value = value

    def __dlpack__(self, **arguments: Any) -> Any:
        return self._value.__dlpack__(**(arguments | {"copy": True}))

    def __dlpack_device__(self) -> Any:
        return self._value.__dlpack_device__()
