"""The kernel for attention on a Hopper GPU: every element, 20 times, in poisoned memory."""

import functools
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.encoders.naflex import first_fit
from pallas_patch_embed.layers import attention, attention_sm90
from pallas_patch_embed.layers.attention_sm90 import Config
from tests.encoder.test_attention import LEVELS, assert_levels, assert_near, draw
from tests.kernels.gpu import RUNS, gpu
from tests.repository import environment

CHIP = Target.of(gpu()).chip if gpu() is not None else None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        CHIP is None or CHIP.capability != attention.CAPABILITY, reason="there is no Hopper GPU"
    ),
]

CONFIGS = {
    64: [Config(2, 256, 2), Config(2, 128, 3), Config(3, 128, 3), Config(2, 64, 4)],
    72: [Config(3, 128, 2), Config(2, 128, 3), Config(2, 64, 4)],
    80: [Config(2, 128, 3), Config(3, 64, 3)],
    96: [Config(2, 64, 4), Config(3, 64, 2)],
    128: [Config(2, 64, 4)],
}


@functools.cache
def program(config, has_lengths, levels):
    """Returns the compiled kernel, whose result overwrites the first argument."""

    def run(poison, q, k, v, lengths):
        del poison
        more = (lengths,) if has_lengths else ()
        ordered = attention_sm90.with_order(config, q, k, v, *more)
        return attention_sm90.kernel(*ordered, levels=levels, config=config, chip=CHIP)

    return jax.jit(run, donate_argnums=0, keep_unused=True)


def launched(config, operands, lengths=None, levels=""):
    """Launches the kernel into memory full of NaN, or of -1 for levels."""
    given = jnp.zeros(1, jnp.int32) if lengths is None else lengths
    q, k, v, given = jax.device_put([*operands, given], gpu())
    poison = jnp.full(q.shape, -1 if levels else jnp.nan, levels or jnp.bfloat16)
    poison = jax.device_put(poison, gpu())
    place = poison.unsafe_buffer_pointer()
    y = program(config, lengths is not None, levels)(poison, q, k, v, given)
    assert y.unsafe_buffer_pointer() == place
    return y


# Remainders of tiles of keys and of passes, and one more or less than a number of either.
TOKENS = [1, 2, 7, 8, 63, 64, 65, 127, 128, 129, 191, 192, 193, 196, 197, 255, 256, 257, 383, 385]


@pytest.mark.parametrize(
    "D, config", [(D, c) for D, found in CONFIGS.items() for c in found], ids=str
)
def test_every_number_of_tokens_is_near_float64(D, config):
    for seed, S in enumerate(TOKENS):
        operands = draw((2, S, 3, D), ("normal", "large", "one", "equal")[seed % 4], seed)
        assert_near(launched(config, operands), operands)


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    "D, config", [(D, c) for D, found in CONFIGS.items() for c in found], ids=str
)
def test_levels_of_every_number_of_tokens_are_those_of_float64(D, config, levels):
    for seed, S in enumerate(TOKENS):
        kind = ("copy", "levels")[seed % 2]
        operands = draw((2, S, 3, D), kind, seed)
        assert_levels(launched(config, operands, levels=levels), operands, kind, levels)


@pytest.mark.parametrize(
    "shape",
    [(1, 4096, 1, 64), (1, 4096, 1, 72), (1, 1025, 2, 128), (64, 196, 12, 64), (4, 729, 16, 72)],
    ids=str,
)
def test_twenty_fresh_inputs_are_near_float64(shape):
    config = CONFIGS[shape[-1]][0]
    for seed in range(RUNS):
        operands = draw(shape, "normal", seed)
        y = launched(config, operands)
        again = launched(config, operands)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(again))
        if seed < (RUNS if np.prod(shape) < 1e6 else 2):
            assert_near(y, operands)
        else:  # float64 takes seconds
            wanted = attention.formula(*(jax.device_put(x, gpu()) for x in operands))
            near = jnp.abs(y.astype(jnp.float32) - wanted) <= 2**-6 * (1 + jnp.abs(wanted))
            assert near.all()


@pytest.mark.parametrize("levels", ["", *LEVELS])
@pytest.mark.parametrize("D", [64, 72])
def test_images_of_every_length_are_near_float64(D, levels):
    for config in CONFIGS[D]:
        for seed in range(RUNS):
            S = (196, 300, 1024)[seed % 3]
            rng = np.random.default_rng(seed)
            lengths = rng.integers(0, S + 1, 6)
            lengths[:3] = 0, 1, S
            lengths = lengths.astype(np.int32)
            operands = draw((6, S, 2, D), "levels" if levels else "normal", seed)
            # What padding has must not matter.
            inside = np.arange(S) < lengths[:, None]
            operands = [
                jnp.where(inside[..., None, None], x, bad)
                for x, bad in zip(operands, (jnp.nan, 1e30, 0))
            ]
            y = launched(config, operands, jnp.asarray(lengths), levels)
            clean = [jnp.where(inside[..., None, None], x, 0) for x in operands]
            if levels:
                assert_levels(y, clean, "levels", levels, lengths)
                continue
            rows = inside[..., None, None]
            assert_near(jnp.where(rows, y, 0), clean, lengths)


@pytest.mark.parametrize("levels", ["", *LEVELS])
@pytest.mark.parametrize("D", [64, 72])
def test_images_that_are_segments_of_rows_are_near_float64(D, levels):
    longest, tokens, number = 300, 1200, 9
    for config in CONFIGS[D]:
        if not config.fits(attention_sm90.Shape(number, longest, 2, D), CHIP, lengths=True):
            continue

        @jax.jit
        def kernel(*operands, config=config):
            ordered = attention_sm90.with_order(config, *operands, longest=longest)
            static = dict(longest=longest, levels=levels, config=config, chip=CHIP)
            return attention_sm90.kernel(*ordered, **static)

        for seed in range(RUNS):
            rng = np.random.default_rng(seed)
            lengths = rng.integers(0, longest + 1, number)
            lengths[:3] = 0, 1, longest
            places, rows = first_fit(lengths.tolist(), tokens)
            first = np.array([row * tokens + start for row, start in places], np.int32)
            operands = draw((rows, tokens, 2, D), "levels" if levels else "normal", seed)
            arrays = [*operands, lengths.astype(np.int32), first]
            y = np.asarray(kernel(*jax.device_put(arrays, gpu()))).reshape(1, -1, 2, D)
            q, k, v = (x.reshape(y.shape) for x in operands)
            stored = np.zeros(y.shape[1], bool)
            for begin, length in zip(first, lengths):
                image = slice(begin, begin + length)
                of_image = [x[:, image] for x in (q, k, v)]
                if length and levels:
                    assert_levels(y[:, image], of_image, "levels", levels)
                elif length:
                    assert_near(y[:, image], of_image)
                stored[begin : begin + (length if levels else length // -8 * -8)] = True
            wanted = np.zeros_like(y) if levels else np.asarray(q)
            np.testing.assert_array_equal(y[:, ~stored], wanted[:, ~stored])


def test_the_result_has_nan_only_where_the_formula_has_it():
    q, k, v = draw((4, 196, 2, 64))
    v = v.at[0, 3, 0, 5].set(jnp.nan)
    k = k.at[1, 7, 1, 2].set(jnp.nan)
    q = q.at[2, 9, 0, 1].set(jnp.inf)
    y = np.isnan(np.asarray(launched(Config(2, 256, 2), (q, k, v)), np.float32))
    wanted = np.isnan(np.asarray(attention.formula(q, k, v), np.float32))
    np.testing.assert_array_equal(y, wanted)
    assert wanted.any() and not wanted.all()


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    "shape", [(1, 5, 2, 64), (1, 196, 12, 64), (3, 197, 6, 64), (1, 729, 16, 72)], ids=str
)
def test_few_images_whose_levels_XLA_rounds_have_those_of_float64(shape, levels):
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    assert attention.program_for(q, Target.of(gpu())).name == "cudnn"
    for seed in range(RUNS):
        operands = draw(shape, "levels", seed)
        arrays = jax.device_put(operands, gpu())
        y = jax.jit(functools.partial(attention.attention, levels=levels))(*arrays)
        assert_levels(y, operands, "levels", levels, result=2.0**-8)


@pytest.mark.parametrize("D", [64, 72, 128])
def test_cudnn_takes_lengths(D):
    operands = draw((5, 300, 2, D))
    lengths = np.array([0, 1, 17, 299, 300], np.int32)
    arrays = jax.device_put([*operands, lengths], gpu())
    y = jax.jit(attention.formula)(*arrays)
    assert_near(y, operands, lengths)


def test_the_derivative_is_that_of_the_formula():
    operands = [jax.device_put(x, gpu()) for x in draw((2, 196, 2, 64))]
    found, wanted = (
        jax.jit(jax.grad(lambda q, k, v, f=f: f(q, k, v).astype(jnp.float32).sum()))(*operands)
        for f in (attention.attention, lambda q, k, v: attention._by_jax(q, k, v, fused=False))
    )
    np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


SANITIZED = """
import dataclasses
import jax
from tests.encoder import test_attention_gpu as t
from tests.encoder.test_attention import assert_near, draw
import jax.numpy as jnp, numpy as np
for D, S, lengths in ((64, 196, None), (72, 257, None), (64, 300, [0, 129]), (72, 196, [1, 150])):
    for config in t.CONFIGS[D]:
        operands = draw((2, S, 2, D))
        given = None if lengths is None else jnp.asarray(lengths, jnp.int32)
        y = t.launched(config, operands, given)
        assert_near(y, operands, None if lengths is None else np.asarray(lengths))
        t.launched(config, operands, given, "int8")
"""


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="there is no compute-sanitizer"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    result = subprocess.run(
        [*command, sys.executable, "-c", SANITIZED],
        capture_output=True,
        text=True,
        # Each buffer has its own allocation, so that any access beyond it is invalid.
        env=environment(JAX_PLATFORMS="cuda,cpu", XLA_PYTHON_CLIENT_ALLOCATOR="platform"),
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or tool == "racecheck"
