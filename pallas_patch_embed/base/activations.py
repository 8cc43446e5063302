"""The activations of an encoder's MLPs, each in two forms.

XLA computes one form, and kernels of Pallas Mosaic GPU the other. Mosaic has no rule for erf. Its
approximate tanh has an error of 2^-11, which the GELU of a negative number magnifies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

type Function = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation.

    Attributes:
      of_array: the form for XLA: function of an array of any floating-point dtype. The result has
        the same dtype.
      in_kernel: the form for kernels: function of float32.
    """

    of_array: Function
    in_kernel: Function


def _in_float32(activation: Function) -> Function:
    """Returns the activation, computed in float32 and rounded once."""
    return lambda x: activation(x.astype(jnp.float32)).astype(x.dtype)


def _gated(slope: float, cubic: float = 0.0) -> Function:
    """Returns x * sigmoid(slope * (x + cubic * x^3)), with two instructions of the slow unit."""

    def activation(x: jax.Array) -> jax.Array:
        exponent = x * (-slope * math.log2(math.e))
        if cubic:
            exponent = exponent * (1 + cubic * (x * x))
        return x * (1 / (1 + jnp.exp2(exponent)))

    return activation


# For z >= 0, 1 - erf(z) = (a1 t + ... + a5 t^5) exp(-z^2) with t = 1 / (1 + p z) and an error of at
# most 1.5e-7 (Abramowitz and Stegun, 7.1.26).
P, A = 0.3275911, (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)


def _gelu_by_erf(x: jax.Array) -> jax.Array:
    """Computes x * (1 + erf(x / sqrt(2))) / 2 with an error of at most 7.6e-8 * |x|."""
    z = jnp.abs(x) * math.sqrt(0.5)
    t = 1 / (1 + P * z)
    tail = jnp.full_like(t, A[-1])
    for a in A[-2::-1]:
        tail = tail * t + a
    tail = tail * t * jnp.exp2(z * z * -math.log2(math.e)) * 0.5
    return x * jnp.where(x < 0, tail, 1 - tail)


_GELU_BY_TANH = Activation(
    functools.partial(jax.nn.gelu, approximate=True),
    # (1 + tanh(u)) / 2 = sigmoid(2 u)
    _gated(2 * math.sqrt(2 / math.pi), 0.044715),
)

# By their names in Hugging Face configs. big_vision uses flax's default, the first, in the form
# that XLA recognises and cuBLAS fuses. jax.nn.gelu computes the erf GELU by erfc, with 84
# instructions for an element on a Hopper GPU instead of 35; PyTorch computes it as here.
ACTIVATIONS = {
    "gelu_pytorch_tanh": _GELU_BY_TANH,
    "gelu_new": _GELU_BY_TANH,
    "gelu": Activation(
        _in_float32(lambda x: 0.5 * x * (1 + lax.erf(x * math.sqrt(0.5)))), _gelu_by_erf
    ),
    "quick_gelu": Activation(_in_float32(lambda x: x * jax.nn.sigmoid(1.702 * x)), _gated(1.702)),
    "relu": Activation(jax.nn.relu, lambda x: jnp.maximum(x, 0)),
    "silu": Activation(jax.nn.silu, _gated(1.0)),
}
