"""The kernel for dense layers on a Hopper GPU: every element, 20 times, in poisoned memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.problem import Epilogue
from pallas_patch_embed.layers.dense import problem_of
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
    """Draws stacked operands, and the number of the layer.

    Sums are exact: those of integers of magnitude 2 in float8 and bfloat16, too, because tensor
    cores align the addends of a step to the largest, with 13 bits behind it.
    """
    rows, tokens, K, N = shape
    parts, activation, row_scale, residual, levels = KINDS[kind]
    rng = np.random.default_rng(seed)
    stacked, largest = (LAYERS, parts), 127 if dtype == "int8" else 2
    x, weight = (
        rng.integers(-largest, largest + 1, n) for n in ((rows, tokens, K), (*stacked, N, K))
    )
    in_8_bits = dtype != "bfloat16"
    others = dict(
        row_scale=row_scale and in_8_bits and rng.uniform(0.5, 2, (rows, tokens)),
        residual=residual and rng.normal(size=(rows, tokens, N)),
        levels=levels
        and in_8_bits
        and (rng.uniform(10, 30, (*stacked, N)), rng.uniform(-9, 9, (*stacked, 1))),
    )
    kinds = dict(residual=jnp.bfloat16)
    named = {
        name: jax.tree.map(lambda a, name=name: jnp.asarray(a, kinds.get(name, jnp.float32)), value)
        for name, value in others.items()
        if value is not False
    }
    arrays = dict(
        x=jnp.asarray(x, dtype),
        weight=jnp.asarray(weight, dtype),
        scale=jnp.asarray(rng.uniform(0.5, 2, (*stacked, N)) / largest**2 / K**0.5, jnp.float32),
        bias=jnp.asarray(rng.normal(size=(*stacked, N)), jnp.float32),
    )
    return activation, arrays, named, jnp.full(1, seed % LAYERS, jnp.int32)


@functools.cache
def program(shape, kind, dtype):
    """Returns the compiled kernel, whose results overwrite its first arguments."""
    activation, arrays, named, _ = draw(shape, kind, dtype, 0)
    levels = named.pop("levels", ())
    flags = {name: name in named for name in ("row_scale", "residual")}
    parts = arrays["weight"].shape[1]
    epilogue = Epilogue(activation, **flags, levels=bool(levels), parts=parts)
    problem = problem_of(arrays["x"], arrays["weight"], epilogue)
    plan = SM90.plan(problem, Target.of(gpu()))

    def run(poison, *operands):
        del poison
        return jax.tree.leaves(plan.run(*operands))

    return jax.jit(run, donate_argnums=0, keep_unused=True), problem.out_dtype


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_twenty_fresh_inputs_are_near_float64(shape, kind, dtype):
    run, out_dtype = program(shape, kind, dtype)
    for seed in range(RUNS):
        activation, arrays, named, layer = draw(shape, kind, dtype, seed)
        others = [
            a for value in named.values() for a in (value if isinstance(value, tuple) else (value,))
        ]
        poison = 77 if out_dtype == "int8" else np.nan
        poisoned = [
            jnp.full((*shape[:2], shape[3]), poison, out_dtype, device=gpu())
            for _ in range(KINDS[kind][0])
        ]
        places = [x.unsafe_buffer_pointer() for x in poisoned]
        given = jax.device_put((*arrays.values(), *others, layer), gpu())
        found = run(poisoned, *given)
        assert sorted(y.unsafe_buffer_pointer() for y in found) == sorted(places)
        levels, number = named.pop("levels", None), int(layer[0])
        for part, y in enumerate(found):
            of_part = {n: a[number, part] for n, a in arrays.items() if n != "x"}
            wanted = in_float64(arrays["x"], **of_part, **named, activation=activation)
            # Some operations in float32 on numbers up to 30.
            error = 30 * 2.0**-21
            if activation:  # An approximate tanh has an error of 2**-11, and x / 2 is at most 8.
                error += 2.0**-8
            y = np.asarray(y).astype(np.float64)
            step = np.exp2(np.floor(np.log2(np.maximum(np.abs(wanted), 2.0**-99)))) / 2**7
            if levels is not None:
                factor, shift = (np.float64(a)[number, part] for a in levels)
                largest, error = TABLE[dtype].largest, 30 * error
                wanted = np.clip(wanted * factor + shift, -largest, largest)
                step = 1.0
                if dtype != "int8":
                    step = np.exp2(np.maximum(np.floor(np.log2(np.abs(wanted) + 2.0**-9)), -6) - 3)
            assert (np.abs(y - wanted) <= step / 2 + error).all()
