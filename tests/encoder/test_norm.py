"""Layer norms are as accurate as float32 and the dtype of the result allow, with both programs."""

import functools
import json
import subprocess
import sys

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import A100, B200, H200, Target
from pallas_patch_embed.layers import norm
from tests.kernels.gpu import gpu
from tests.repository import environment

EPS = 1e-6
LAYERS = 3
HOPPER = gpu() is not None and Target.of(gpu()).chip.capability == norm.CAPABILITY


def interpreted(*operands, eps):
    (y,) = norm.kernel(*operands, eps=eps, interpret=plgpu.InterpretGPUParams())
    return y


def on_gpu(*operands, eps):
    (y,) = norm.kernel(*jax.device_put(operands, gpu()), eps=eps)
    return y


# The programs of the kernel.
KERNELS = [
    pytest.param(interpreted, id="interpreted"),
    pytest.param(
        on_gpu,
        id="on a GPU",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="there is no Hopper GPU")],
    ),
]


def draw(rows, D):
    """Draws [2, rows, D] with rows of every kind, a scale and a bias."""
    rng = np.random.default_rng(D + rows)
    x = rng.normal(size=(2, rows, D))
    x[0, 0, 7] = 3e4  # an outlier channel, as vision transformers have them
    x[0, 1, 0] = -3e4
    x[0, 2] += 50
    x[0, 3] *= 1e-4  # the variance is smaller than eps
    x[1, 0] = 3
    x[1, 1] = 3
    x[1, 1, 5] += 2**-6  # one unit in the last place of bfloat16
    x[1, 2] *= 1e4
    scale, bias = rng.normal(size=(2, D)).astype(np.float32)
    return x.astype(np.float32), scale, bias


def assert_accurate(found, x, scale, bias):
    """Compares with float64.

    Let u be the unit roundoff of float32. A sum of D values in any order has an error of at most
    (D - 1) * u times the sum of their magnitudes, so the mean has an error of at most `shift`. This
    error adds at most its square to the variance, because the deviations from the mean add up to
    zero; rounding adds a relative error of (D + 5) * u. The reciprocal of the square root has at
    most half of both, and an error of its own of at most 2**-22 (PTX ISA,
    rsqrt.approx.f32). Three more products and differences are rounded before the bias is added. The
    factor 1.01 is for products of these errors. At last the result is rounded to its dtype.
    """
    D, u = x.shape[-1], 2.0**-24
    x, scale, bias = (np.asarray(a, np.float64) for a in (x, scale, bias))
    centred = x - x.mean(-1, keepdims=True)
    variance = np.square(centred).mean(-1, keepdims=True) + EPS
    shift = 1.01 * (D + 1) * u * np.abs(x).mean(-1, keepdims=True)
    relative = (shift**2 / variance + (D + 5) * u) / 2 + 2.0**-22 + 3 * u
    y = scale * centred / np.sqrt(variance)
    shifted = np.abs(scale) * shift / np.sqrt(variance)
    float32 = 1.01 * (shifted * (1 + relative) + np.abs(y) * relative + u * np.abs(y + bias))
    wanted = y + bias
    rounding = float(jnp.finfo(found.dtype).eps) / 2
    bound = float32 + rounding * (np.abs(wanted) + float32)
    assert (np.abs(np.asarray(found, np.float64) - wanted) <= bound).all()


@pytest.mark.parametrize("D", [768, 1152])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_with_outliers_or_a_large_mean_are_accurate(dtype, D):
    x, scale, bias = draw(5, D)
    x = jnp.asarray(x, dtype)
    found = norm.layer_norm(x, scale, bias, eps=EPS)
    assert found.dtype == x.dtype
    assert_accurate(found, x, scale, bias)
    scales, biases = (np.stack([v, v + 1]) for v in (scale, bias))
    found = norm.layer_norm(x, scales, biases, eps=EPS, layer=jnp.int32(1))
    assert_accurate(found, x, scales[1], biases[1])


@pytest.mark.parametrize(
    "rows, D", [(4, 64), (4, 192), (5, 768), (5, 1152), (6, norm.MOST_COLUMNS)]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_kernel_is_as_accurate_with_any_number_of_rows(kernel, rows, D):
    x, scale, bias = draw(rows, D)
    x = jnp.asarray(x, jnp.bfloat16)
    # Rows of scale and bias for several layers, of which the kernel uses one.
    scales, biases = (np.stack([v + i for i in range(LAYERS)]) for v in (scale, bias))
    for layer, part in enumerate((x, x[:, 1:], x[:1])):
        found = kernel(part, scales, biases, jnp.int32(layer), eps=EPS)
        assert found.dtype == x.dtype
        assert_accurate(found, part, scales[layer], biases[layer])


def levels_interpreted(*operands, levels):
    return norm.kernel(*operands, eps=EPS, levels=levels, interpret=plgpu.InterpretGPUParams())


def levels_on_gpu(*operands, levels):
    return norm.kernel(*jax.device_put(operands, gpu()), eps=EPS, levels=levels)


def levels_by_xla(*operands, levels):
    return norm.formula(*operands, eps=EPS, levels=levels)


@pytest.mark.parametrize(
    "quantise",
    [
        pytest.param(levels_by_xla, id="XLA"),
        pytest.param(levels_interpreted, id="interpreted"),
        pytest.param(levels_on_gpu, id="on a GPU", marks=KERNELS[1].marks),
    ],
)
@pytest.mark.parametrize("dtype, largest", [("int8", 127), ("float8_e4m3fn", 448)])
def test_rows_are_quantised_by_their_largest_number(quantise, dtype, largest):
    x, scale, bias = draw(5, 768)
    x = jnp.asarray(x, jnp.bfloat16)
    x = x.at[1, 3].set(5)  # a row of equal numbers, whose result is the bias
    operands = (scale[None], bias[None], jnp.int32(0))
    levels, row_scale = map(np.asarray, quantise(x, *operands, levels=dtype))
    assert levels.dtype == dtype
    levels = levels.astype(np.float64)
    assert (np.abs(levels).max(-1) == largest).all()
    # A level is the nearest one; the number itself is as near to float64 as a result in float32.
    (y,) = norm.formula(x.astype(jnp.float32), *operands, eps=EPS)
    assert_accurate(y, x, scale, bias)
    error = np.abs(levels * row_scale[..., None] - np.asarray(y, np.float64))
    # Half the distance of two levels. A CPU rounds to float8 twice, which adds a 128th of it.
    step = np.float64(1)
    if dtype == "float8_e4m3fn":
        step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(levels), 2**-9))), -6) - 3)
    assert (error <= (0.5 + 1e-2) * step * row_scale[..., None]).all()
    zeros = quantise(x, 0 * scale[None], 0 * bias[None], jnp.int32(0), levels=dtype)
    assert not np.asarray(zeros[0], np.float32).any() and (np.asarray(zeros[1]) > 0).all()


@pytest.mark.usefixtures("compilers")
def test_compiled_programs_use_a_kernel_that_keeps_rows_in_registers():
    widths = [64, 768, 1152, norm.MOST_COLUMNS]
    command = [sys.executable, "-m", "tests.encoder.norm_kernels", *map(str, widths)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kernels = found["kernels"]
    assert [kernels[str(D)][1] for D in widths] == [0] * len(widths)
    for of_dtype in found["levels"]:
        assert [spilled for _, spilled in of_dtype.values()] == [0] * len(widths)
    # Four thread blocks or more share a multiprocessor with So400m's width, five or more with B's.
    assert kernels["1152"][0] <= 128 and kernels["768"][0] <= 96
    # The kernel computes the two norms of the scanned block, the last norm and that of the pooling
    # head. Another kernel computes the attention. XLA partitions the plain program for two devices,
    # without kernels.
    kernels = [4, 1, 0]
    programs = {"embed, 1": kernels, "jit, 1": kernels, "embed, 2": kernels, "jit, 2": [0, 0, 0]}
    assert found["programs"] == programs


LARGE = (512, 196, 768)


@pytest.mark.parametrize(
    "shape, dtype, chip, serves",
    [
        (LARGE, "bfloat16", H200, True),
        ((64, 729, 1152), "bfloat16", H200, True),
        (LARGE, "bfloat16", A100, False),
        (LARGE, "bfloat16", B200, False),
        (LARGE, "bfloat16", None, False),
        (LARGE, "float32", H200, False),
        ((8, 196, 768), "bfloat16", H200, True),
        ((1, 196, 768), "bfloat16", H200, True),
        ((1, 195, 768), "bfloat16", H200, False),  # so few rows were not measured
        ((0, 196, 768), "bfloat16", H200, False),
        ((512, 196, 96), "bfloat16", H200, False),
        ((512, 196, norm.MOST_COLUMNS + 64), "bfloat16", H200, False),
    ],
)
def test_the_kernel_serves_many_rows_on_hopper(shape, dtype, chip, serves):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert norm.serves(x, Target("cuda", chip)) == serves
    assert not norm.serves(x, Target("cuda", chip, known=False))


normalize = functools.partial(norm.layer_norm, eps=EPS)


def calls_of_the_kernel(monkeypatch, function, sharding=None, everywhere=None):
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", H200))
    x = jax.ShapeDtypeStruct(LARGE, "bfloat16", sharding=sharding)
    row = jax.ShapeDtypeStruct(LARGE[-1:], "float32", sharding=everywhere)
    traced = jax.jit(function).trace(x, row, row)
    return traced.lower(lowering_platforms=("cuda",)).as_text().count("@mosaic_gpu_v2")


def test_an_encoder_for_one_device_uses_the_kernel(monkeypatch):
    assert calls_of_the_kernel(monkeypatch, normalize) == 1
    assert calls_of_the_kernel(monkeypatch, jax.vmap(normalize, (0, None, None))) == 1


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_xla_never_partitions_the_kernel(monkeypatch, kind):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,))
    shardings = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
    specs = dict(in_specs=(P("batch"), P(), P()), out_specs=P("batch"))
    manual = jax.shard_map(normalize, mesh=mesh, **specs)
    assert calls_of_the_kernel(monkeypatch, normalize, *shardings) == 0
    assert calls_of_the_kernel(monkeypatch, manual, *shardings) == 1


def test_transformations_agree_with_the_formula():
    x, scale, bias = draw(4, 64)

    def formula(x, scale, bias):
        (y,) = norm.formula(x, scale[None], bias[None], jnp.int32(0), eps=EPS)
        return y

    def compare(transform):
        found, wanted = (jax.jit(transform(f))(x, scale, bias) for f in (normalize, formula))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)

    compare(lambda f: jax.vmap(f, (0, None, None)))
    compare(lambda f: jax.vmap(f, (1, None, None), out_axes=1))
    compare(lambda f: lambda x, s, b: jax.vmap(f, (None, 0, None))(x, jnp.stack([s, b]), b))
    compare(lambda f: jax.grad(lambda *a: jnp.square(f(*a)).sum(), (0, 1, 2)))
    compare(lambda f: lambda x, s, b: jax.jvp(lambda s: f(x, s, b), (s,), (b,)))
