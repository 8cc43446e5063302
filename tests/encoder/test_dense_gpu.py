"""The kernel for dense layers on a Hopper GPU: every element, 20 times, in poisoned memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.layers.dense import dense
from tests.encoder.test_dense import in_float64
from tests.kernels.gpu import RUNS, gpu

CHIP = Target.of(gpu()).chip if gpu() is not None else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CHIP is None or CHIP.capability != (9, 0), reason="there is no Hopper GPU"),
]

LAYERS = 3
# Rows, some fewer than a tile or no multiple of one, and widths.
SHAPES = [(2, 37, 256, 128), (1, 196, 768, 768), (5, 197, 1152, 1152), (3, 196, 3072, 768)]
# The layers of a block: parts, activation, and whether rows have scales, a residual and levels.
KINDS = {
    "qkv": (3, "", True, False, False),
    "out": (1, "", False, True, False),
    "fc1": (1, "gelu_pytorch_tanh", True, False, True),
    "fc2": (1, "", False, True, False),
}


def draw(shape, kind, dtype, seed):
    """Draws stacked operands, and the number of the layer."""
    rows, tokens, K, N = shape
    parts, activation, row_scale, residual, levels = KINDS[kind]
    rng = np.random.default_rng(seed)
    stacked = (LAYERS, parts) if parts > 1 else (LAYERS,)
    x, weight = rng.normal(size=(rows, tokens, K)), rng.normal(size=(*stacked, N, K))
    scale = rng.uniform(0.5, 2, (*stacked, N)) / K**0.5
    if dtype == "int8":
        x, weight = (np.clip(np.round(40 * a), -127, 127) for a in (x, weight))
        scale = scale / 1600
    of_rows = np.float32(rng.uniform(0.5, 2, (rows, tokens)))
    named: dict[str, Any] = dict(activation=activation)
    if row_scale and dtype != "bfloat16":
        named["row_scale"] = jnp.asarray(of_rows)
    if residual:
        named["residual"] = jnp.asarray(rng.normal(size=(rows, tokens, N)), jnp.bfloat16)
    if levels and dtype != "bfloat16":
        factor = jnp.asarray(rng.uniform(10, 30, (*stacked, N)), jnp.float32)
        named["levels"] = factor, jnp.asarray(rng.uniform(-9, 9, (*stacked, 1)), jnp.float32)
    arrays = dict(
        x=jnp.asarray(x, dtype),
        weight=jnp.asarray(weight, dtype),
        scale=jnp.asarray(scale, jnp.float32),
        bias=jnp.asarray(rng.normal(size=(*stacked, N)), jnp.float32),
    )
    return arrays, named, jnp.int32(seed % LAYERS)


@functools.cache
def program(activation):
    """Returns the compiled layer, whose results overwrite the first argument."""

    def run(poison, arrays, named, layer):
        del poison
        return dense(**arrays, **named, activation=activation, layer=layer)

    return jax.jit(run, donate_argnums=0, keep_unused=True)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twenty_fresh_inputs_are_near_float64(shape, kind, dtype):
    for seed in range(RUNS):
        arrays, named, layer = draw(shape, kind, dtype, seed)
        activation = named.pop("activation")
        run = program(activation)
        out_dtype = dtype if "levels" in named else "bfloat16"
        poison = jnp.full((*shape[:2], shape[3]), np.nan if out_dtype != "int8" else 77, out_dtype)
        poison = (poison,) * KINDS[kind][0]
        given = jax.device_put((tuple(p + 0 for p in poison), arrays, named, layer), gpu())
        if not seed and shape[2] <= 1152:  # For a larger K XLA may be faster.
            assert "mosaic_gpu" in run.lower(*given).as_text()
        found = jax.tree.leaves(run(*given))
        chosen = {name: np.asarray(a)[int(layer)] for name, a in arrays.items() if name != "x"}
        levels = named.pop("levels", None)
        for part, y in enumerate(found):
            of_part = {n: a[part] if len(found) > 1 else a for n, a in chosen.items()}
            wanted = in_float64(arrays["x"], **of_part, **named, activation=activation)
            # Sums of float32 have an error of K units of their magnitudes, about 10.
            error = 2e-5 if dtype == "int8" else 1.2 * shape[2] * 2.0**-24 * 10 + 1e-5
            if activation:  # An approximate tanh has an error of 2**-11, and x / 2 is at most 4.
                error += 2.0**-9
            y = np.asarray(y).astype(np.float64)
            if levels is not None:
                factor, shift = (np.float64(a[int(layer)]) for a in levels)
                largest = TABLE[dtype].largest
                wanted, error = np.clip(wanted * factor + shift, -largest, largest), 30 * error
                step = 1.0
                if dtype != "int8":
                    step = np.exp2(np.maximum(np.floor(np.log2(np.abs(y) + 2.0**-9)), -6) - 3)
                assert (np.abs(y - wanted) <= 0.51 * step + error).all()
            else:
                assert (np.abs(y - wanted) <= 2.0**-8 * np.abs(wanted) + error).all()
