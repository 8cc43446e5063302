"""Both forms of the activations are near float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.base.activations import ACTIVATIONS

UNIT = 2.0**-24


def exact(name, x):
    """Computes an activation in float64."""
    match name:
        case "relu":
            return np.maximum(x, 0)
        case "gelu":
            # erfc keeps the tail of negative numbers.
            return x * np.vectorize(math.erfc)(-x * math.sqrt(0.5)) / 2
        case "silu":
            exponent = x
        case "quick_gelu":
            exponent = 1.702 * x
        case _:
            exponent = 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
    with np.errstate(over="ignore"):
        return x / (1 + np.exp(-exponent))


def numbers():
    """Returns float32 of all magnitudes, dense between -12 and 12."""
    rng = np.random.default_rng(0)
    large = np.concatenate([10.0 ** rng.uniform(-30, 4, 1000), [0, 2.0**-126, 1e15]])
    return np.concatenate([np.linspace(-12, 12, 20001), large, -large]).astype(np.float32)


def bound(name, x):
    """Returns how far float32 may be from float64.

    The exponent e of a sigmoid has a relative error of 8 units, so exp2(e) has one of 8 |e| units
    besides its own, and 1 + exp2(e) has at most as much. Beyond |e| = 104 the sigmoid is 0 or 1 in
    float32. The polynomial of the erf GELU adds an absolute error of 7.5e-8 |x|.
    """
    x = np.abs(np.asarray(x, np.float64))
    if name == "relu":
        return 0 * x
    tiny = 2.0**-126 * (1 + x)
    if name == "gelu":
        return x * (7.5e-8 + 8 * UNIT) + tiny
    exponent = np.minimum(np.abs(exponent_of(name, x)), 104)
    return np.abs(exact(name, -x)) * 8 * exponent * UNIT + np.abs(exact(name, x)) * 16 * UNIT + tiny


def exponent_of(name, x):
    """Returns the exponent of an activation's sigmoid."""
    slope = {"silu": 1, "quick_gelu": 1.702}.get(name)
    return slope * x if slope else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_the_kernels_form_is_near_float64(name):
    x = numbers()
    found = jax.jit(ACTIVATIONS[name].in_kernel)(x)
    assert found.dtype == jnp.float32
    wanted = exact(name, x.astype(np.float64))
    assert (np.abs(np.asarray(found, np.float64) - wanted) <= bound(name, x)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_both_forms_round_to_neighbouring_bfloat16(name):
    x = jnp.asarray(np.linspace(-4, 6, 4001), jnp.float32)
    kernel = ACTIVATIONS[name].in_kernel(x)
    array = ACTIVATIONS[name].of_array(x)
    wanted = exact(name, np.asarray(x, np.float64))
    for found in (kernel, array):
        rounded = np.asarray(found.astype(jnp.bfloat16), np.float64)
        assert (np.abs(rounded - wanted) <= 2.0**-8 * np.abs(wanted) + 1e-6).all()
