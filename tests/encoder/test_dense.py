"""Dense layers: XLA's program is exact, and the kernel computes it on a Hopper GPU."""

import functools
import json
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_patch_embed.backends import BACKENDS, ranked
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.activations import ACTIVATIONS
from pallas_patch_embed.base.chips import A100, B200, H200, Target
from pallas_patch_embed.base.problem import Epilogue
from pallas_patch_embed.layers.dense import dense, problem_of, program_for
from tests.encoder.test_activations import exact
from tests.repository import environment

B, S, K, N = 2, 37, 256, 128


def draw(dtype="int8", seed=0):
    """Draws x, weight, scale, bias and the operands of an epilogue."""
    rng = np.random.default_rng(seed)
    x, weight = rng.normal(size=(B, S, K)), rng.normal(size=(N, K))
    if dtype == "int8":
        x, weight = (np.clip(np.round(40 * a), -127, 127) for a in (x, weight))
    scale = rng.uniform(0.5, 2, N) / (1600 if dtype == "int8" else 1) / K**0.5
    arrays = dict(
        x=jnp.asarray(x, dtype),
        weight=jnp.asarray(weight, dtype),
        scale=jnp.asarray(scale, jnp.float32),
        bias=jnp.asarray(rng.normal(size=N), jnp.float32),
    )
    others = dict(
        row_scale=jnp.asarray(rng.uniform(0.5, 2, (B, S)), jnp.float32),
        residual=jnp.asarray(rng.normal(size=(B, S, N)), jnp.bfloat16),
        levels=(
            jnp.asarray(rng.uniform(10, 30, N), jnp.float32),
            jnp.asarray([-3], jnp.float32),
        ),
    )
    return arrays, others


def in_float64(x, weight, scale, bias, *, activation="", row_scale=None, residual=None):
    """Computes a dense layer in float64."""
    sums = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    y = sums * np.asarray(scale, np.float64)
    if row_scale is not None:
        y = y * np.asarray(row_scale, np.float64)[..., None]
    y = y + np.asarray(bias, np.float64)
    if activation:
        y = exact(activation, y)
    return y if residual is None else y + np.asarray(residual, np.float64)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_a_layer_is_near_float64(dtype, activation):
    arrays, others = draw(dtype)
    named = dict(row_scale=others["row_scale"], residual=others["residual"])
    y = dense(**arrays, activation=activation, **named)
    assert y.dtype == jnp.bfloat16
    wanted = in_float64(**arrays, activation=activation, **named)
    # Sums of K products of floats have an error of K units of float32 of their magnitudes, about
    # 10; int8 sums are exact. An activation's slope is at most 1.2.
    error = 1.2 * (8 if dtype == "int8" else K) * 2.0**-24 * 10
    np.testing.assert_array_less(
        np.abs(np.asarray(y, np.float64) - wanted), 2.0**-8 * np.abs(wanted) + error + 1e-5
    )


def test_an_int8_result_is_the_nearest_level():
    arrays, others = draw()
    y = dense(**arrays, activation="gelu", levels=others["levels"])
    factor, shift = map(np.float64, others["levels"])
    wanted = in_float64(**arrays, activation="gelu") * factor + shift
    found = np.asarray(y, np.float64)
    assert y.dtype == jnp.int8 and found.min() < -2 and found.max() == 127
    assert (np.abs(found - np.clip(wanted, -127, 127)) <= 0.5 + 1e-4).all()


def test_a_float8_result_is_the_nearest_one():
    arrays, _ = draw("float8_e4m3fn")
    y = dense(**arrays, activation="gelu", levels=(jnp.full(N, 200.0), jnp.full(1, 0.25)))
    wanted = in_float64(**arrays, activation="gelu") * 200 + 0.25
    assert y.dtype == jnp.float8_e4m3fn
    found = np.asarray(y).astype(np.float64)
    assert found.max() == 448 < wanted.max() and np.abs(found).min() < 2**-6
    # Half the distance of two numbers, and the errors of the sum and of rounding twice on a CPU.
    step = np.exp2(np.maximum(np.floor(np.log2(np.maximum(np.abs(found), 2**-9))), -6) - 3)
    assert (np.abs(found - np.clip(wanted, -448, 448)) <= 0.51 * step + 1e-3).all()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_hopper_and_blackwell_choose_their_kernels_and_others_say_why_not(dtype):
    x, weight = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((100352, 768), (3072, 768)))
    problem = problem_of(x, weight, Epilogue("gelu", row_scale=True))
    for chip, kernel in ((H200, "mosaic_sm90"), (B200, "mosaic_sm100")):
        options, refusals = ranked(problem, Target("cuda", chip))
        assert [option.backend for option in options] == [kernel, "xla"]
        for name in ("cuda", "triton"):
            assert "it computes no activation" in refusals[name]
    options, refusals = ranked(problem, Target("cuda", A100))
    assert [option.backend for option in options] == ["xla"]
    assert set(refusals) == set(BACKENDS) - {"xla"}


# Bytes of spills: with three consumers and 96 accumulators a thread, and with two and 192.
SPILLED = {f"B/16 224, fc1, {dtype}": 24 for dtype in ("int8", "float8_e4m3fn")}
SPILLED["100352 rows, out, bfloat16"] = 40


@pytest.mark.slow("compiles 12 or 28 kernels")
@pytest.mark.usefixtures("compilers")
@pytest.mark.parametrize("chip, number, spilled", [("h200", 28, SPILLED), ("b200", 12, {})])
def test_no_other_kernel_of_an_encoders_layers_spills(chip, number, spilled):
    command = [sys.executable, "-m", "tests.encoder.dense_kernels", chip]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == number and {n: found[n] for n in found if found[n]} == spilled


@pytest.mark.parametrize("epilogue", [Epilogue(), Epilogue("gelu", residual=True, parts=1)])
def test_without_scales_xla_computes_in_bfloat16(epilogue):
    arrays, others = draw("bfloat16")
    arrays["scale"] = jnp.ones(N)
    named = dict(activation=epilogue.activation, scaled=False)
    if epilogue.residual:
        named["residual"] = others["residual"]

    @jax.jit
    def wanted(x, weight, scale, bias, residual):
        y = x @ weight.T + bias.astype(jnp.bfloat16)[None, None]
        return residual + ACTIVATIONS["gelu"].of_array(y) if epilogue.activation else y

    y = wanted(**arrays, residual=others["residual"])
    if epilogue.parts:
        stacked = {name: jnp.stack([a, 2 * a]) for name, a in arrays.items() if name != "x"}
        arrays, named["layer"] = stacked | {"x": arrays["x"]}, jnp.int32(0)
    np.testing.assert_array_equal(dense(**arrays, **named), y)


@pytest.mark.parametrize(
    "rows, chip, K, served",
    [
        (196, H200, 768, True),
        (1568, H200, 768, True),
        (5832, H200, 768, True),
        (5833, H200, 768, False),
        (100352, H200, 768, True),
        (100353, H200, 768, False),
        (195, H200, 768, False),
        (196, B200, 768, False),
        (196, A100, 768, False),
        (196, H200, 96, False),
    ],
)
def test_in_bfloat16_hoppers_kernel_serves_few_rows_and_wide_tiles(rows, chip, K, served):
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, K), (768, K)))
    problem = problem_of(x, weight, Epilogue(residual=True))
    plan = program_for(problem, Target("cuda", chip), scaled=False)
    assert (plan is not None) == served


def calls_of_the_kernel(monkeypatch, function, *arrays):
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", H200))
    text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    return text.count("@mosaic_gpu_v2")


def layer(*operands):
    *arrays, row_scale = operands
    return dense(*arrays, row_scale=row_scale, activation="gelu")


def test_a_program_for_one_device_uses_the_kernel(monkeypatch):
    arrays, others = draw()
    operands = (*arrays.values(), others["row_scale"])
    assert calls_of_the_kernel(monkeypatch, layer, *operands) == 1
    mapped = jax.vmap(layer, (0, None, None, None, 0))
    assert calls_of_the_kernel(monkeypatch, mapped, *operands) == 1


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_xla_never_partitions_the_kernel(monkeypatch, kind):
    mesh = jax.make_mesh((2,), ("batch",), axis_types=(kind,))
    arrays, others = draw()
    specs = (P("batch"), P(), P(), P(), P("batch"))
    operands = [
        jax.device_put(x, NamedSharding(mesh, spec))
        for x, spec in zip((*arrays.values(), others["row_scale"]), specs)
    ]
    manual = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=P("batch"))
    assert calls_of_the_kernel(monkeypatch, layer, *operands) == 0
    assert calls_of_the_kernel(monkeypatch, manual, *operands) == 1
    wanted = layer(*arrays.values(), others["row_scale"])
    for function in (layer, manual):
        np.testing.assert_array_equal(jax.jit(function)(*operands), wanted)


def test_transformations_agree_with_a_loop():
    arrays, others = draw()
    x, weight, scale, bias = arrays.values()
    rows, residual = others["row_scale"], others["residual"]
    levels = others["levels"]

    def call(x, rows, residual, weight=weight, levels=levels):
        named = dict(row_scale=rows, residual=residual, levels=levels)
        return dense(x, weight, scale, bias, **named)

    wanted = call(x, rows, residual)
    np.testing.assert_array_equal(jax.vmap(call)(x, rows, residual), wanted)
    np.testing.assert_array_equal(jax.vmap(call, (0, 0, None))(x, rows, residual[0])[0], wanted[0])
    swapped = jax.vmap(call, (1, 1, 1), out_axes=1)
    moved = swapped(x[:, :, None], rows[:, :, None], residual[:, :, None])
    np.testing.assert_array_equal(moved[:, :, 0], wanted)
    weights = jnp.stack([weight, -weight])
    both = jax.vmap(functools.partial(call, x, rows, residual))(weights)
    np.testing.assert_array_equal(both[0], wanted)
    np.testing.assert_array_equal(both[1], call(x, rows, residual, -weight))


@pytest.mark.parametrize("wide", [False, True], ids=["x32", "x64"])
@pytest.mark.parametrize("rows, kernels", [((2, 98), 1), ((1, 1568), 1), ((1, 195), 0)])
def test_a_layer_in_bfloat16_calls_the_kernel_for_few_rows(monkeypatch, rows, kernels, wide):
    _, (weight, scale, bias), _ = stacked_arrays("bfloat16")
    x = jnp.ones((*rows, K), jnp.bfloat16)

    def function(x, weight, scale, bias, layer):
        return dense(x, weight, scale, bias, layer=layer, scaled=False)

    arrays = (x, weight, scale, bias, jnp.int32(1))
    with jax.enable_x64(wide):
        assert calls_of_the_kernel(monkeypatch, function, *arrays) == kernels


def stacked_arrays(dtype):
    """Draws the parameters of three layers, and operands of the layer function `of_layer`."""
    drawn = [draw(dtype, seed) for seed in range(3)]
    parameters = [[arrays[name] for name in ("weight", "scale", "bias")] for arrays, _ in drawn]
    levels = [others["levels"] for _, others in drawn]
    return drawn, [*map(jnp.stack, zip(*parameters))], [*map(jnp.stack, zip(*levels))]


def assert_same_layer(y, wanted):
    """Other programs may sum floats in another order; integers are equal."""
    error = dict(rtol=2.0**-7, atol=K * 2.0**-24 * 10) if y.dtype == jnp.bfloat16 else dict(rtol=0)
    y, wanted = (np.asarray(x, np.float32) for x in (y, wanted))
    np.testing.assert_allclose(y, wanted, **error)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_a_layer_of_several_is_computed_as_alone(dtype):
    drawn, parameters, levels = stacked_arrays(dtype)
    in_8_bits = dtype == "int8"

    def of_layer(x, row_scale, layer):
        more = dict(levels=tuple(levels)) if in_8_bits else {}
        return dense(x, *parameters, row_scale=row_scale, layer=layer, **more)

    found, wanted = [], []
    for layer, (arrays, others) in enumerate(drawn):
        x, *own = arrays.values()
        more = dict(levels=others["levels"]) if in_8_bits else {}
        wanted.append(dense(x, *own, row_scale=others["row_scale"], **more))
        found.append(of_layer(x, others["row_scale"], jnp.int32(layer)))
        mapped = jax.vmap(of_layer, (0, 0, None))(x, others["row_scale"], jnp.int32(layer))
        np.testing.assert_array_equal(mapped, wanted[-1])
    np.testing.assert_array_equal(found, wanted)
    xs = jnp.stack([arrays["x"] for arrays, _ in drawn])
    rows = jnp.stack([others["row_scale"] for _, others in drawn])
    _, scanned = jax.lax.scan(lambda i, step: (i + 1, of_layer(*step, i)), jnp.int32(0), (xs, rows))
    np.testing.assert_array_equal(scanned, wanted)
    each = jax.vmap(of_layer)(xs, rows, jnp.arange(3))
    for y, expected in zip(each, wanted, strict=True):
        assert_same_layer(y, expected)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_the_parts_of_a_layer_have_results_of_their_own(dtype):
    drawn, parameters, levels = stacked_arrays(dtype)
    x, row_scale = drawn[0][0]["x"], drawn[0][1]["row_scale"]
    in_8_bits = dtype == "int8"
    wanted = [
        dense(x, *own, row_scale=row_scale, levels=tuple(of_levels) if in_8_bits else None)
        for *own, of_levels in zip(*parameters, zip(*levels))
    ]
    # The three parts of the second of two layers.
    of_parts = [jnp.stack([-value, value]) for value in parameters]
    of_levels = tuple(jnp.stack([-value, value]) for value in levels)

    def parts(x, row_scale, weight=of_parts[0]):
        more = dict(row_scale=row_scale, levels=of_levels if in_8_bits else None)
        return dense(x, weight, *of_parts[1:], **more, layer=jnp.int32(1))

    mapped = jax.vmap(parts, (None, None, 0))(x, row_scale, of_parts[0][None])
    for found in (parts(x, row_scale), jax.vmap(parts)(x, row_scale), [y[0] for y in mapped]):
        for y, expected in zip(found, wanted, strict=True):
            assert_same_layer(y, expected)
    with pytest.raises(ValueError, match="residual"):
        dense(x, *of_parts, residual=wanted[0], layer=jnp.int32(1))


def test_a_program_copies_no_parameters_of_a_layer(monkeypatch):
    _, parameters, _ = stacked_arrays("int8")
    parts = [jnp.stack([value, value]) for value in parameters]
    arrays, others = draw()

    def of_layer(x, row_scale, layer):
        return dense(x, *parts, row_scale=row_scale, layer=layer)

    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", H200))
    traced = jax.jit(of_layer).trace(arrays["x"], others["row_scale"], jnp.int32(1))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert not re.search(r"stablehlo\.\w*(slice|gather)", text)


def test_the_gradient_of_a_layer_of_several_is_that_of_the_layer():
    _, parameters, _ = stacked_arrays("bfloat16")
    weight, scale, bias = (value.astype(jnp.float32) for value in parameters)
    x = draw("bfloat16")[0]["x"].astype(jnp.float32)

    def loss(x, weight, layer):
        y = dense(x, weight, scale, bias, layer=layer)
        return jnp.square(y.astype(jnp.float32)).sum()

    def wanted(x, weight):
        return jnp.square(dense(x, weight, scale[1], bias[1]).astype(jnp.float32)).sum()

    by_x, by_weight = jax.grad(loss, (0, 1))(x, weight, jnp.int32(1))
    expected = jax.grad(wanted, (0, 1))(x, weight[1])
    np.testing.assert_allclose(by_x, expected[0], rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(by_weight[1], expected[1], rtol=1e-6, atol=1e-4)
    assert not by_weight[0].any() and not by_weight[2].any()


def test_the_gradient_is_that_of_the_formula():
    arrays, _ = draw("bfloat16")
    arrays = {name: value.astype(jnp.float32) for name, value in arrays.items()}

    def loss(x, weight):
        y = dense(x, weight, arrays["scale"], arrays["bias"], activation="silu")
        return jnp.square(y.astype(jnp.float32)).sum()

    def wanted(x, weight):
        y = jax.nn.silu(x @ weight.T * arrays["scale"] + arrays["bias"])
        return jnp.square(y.astype(jnp.bfloat16).astype(jnp.float32)).sum()

    found, expected = (jax.grad(f, (0, 1))(arrays["x"], arrays["weight"]) for f in (loss, wanted))
    for a, b in zip(found, expected):
        np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-2 * float(jnp.abs(b).max()))


@pytest.mark.parametrize(
    "changes, error, message",
    [
        (dict(residual=jnp.zeros((B, N, S), jnp.bfloat16)), ValueError, "residual has the shape"),
        (dict(residual=jnp.zeros((B, S, N))), TypeError, "residual is float32, expected bfloat16"),
        (dict(row_scale=jnp.ones((B, S, 1))), ValueError, "row_scale has the shape"),
        (dict(scale=jnp.ones(1)), ValueError, r"scale has the shape \(1,\), expected"),
        (dict(bias=jnp.ones((S, N))), ValueError, "bias has the shape"),
        (dict(bias=jnp.ones(N, jnp.bfloat16)), TypeError, "bias is bfloat16, expected float32"),
        (dict(levels=(jnp.ones(1), jnp.ones(1))), ValueError, "factor has the shape"),
        (dict(levels=(jnp.ones(N), jnp.ones(N))), ValueError, "shift has the shape"),
        (
            dict(weight=jnp.ones((N, K), jnp.bfloat16)),
            TypeError,
            "weight is bfloat16, expected int8",
        ),
        (dict(weight=jnp.ones((N, K + 1), jnp.int8)), ValueError, "weight has the shape"),
        (dict(x=jnp.ones((B, S, K), jnp.uint8)), TypeError, "x is uint8, expected one of"),
        (
            dict(x=jnp.ones(K, jnp.int8)),
            ValueError,
            r"x has the shape .*, expected \[\.\.\., S, K\]",
        ),
        (dict(activation="swish2"), ValueError, "activation is 'swish2', expected one of"),
        (dict(scaled=False), ValueError, "without scales x is bfloat16"),
        (dict(layer=jnp.int32(0)), ValueError, r"x has the shape .* \[layers, N, K\] or"),
    ],
)
def test_wrong_operands_are_refused(changes, error, message):
    arrays, _ = draw()
    with pytest.raises(error, match=f"dense: {message}"):
        dense(**(arrays | changes))


def test_a_sum_that_int32_cannot_hold_and_levels_of_bfloat16_are_refused():
    most = (2**31 - 1) // 128**2
    one = jnp.ones(1)
    x = jnp.full((1, most + 1), -128, jnp.int8)
    assert dense(x[:, 1:], x[:, 1:], one, one).astype(int) == pytest.approx(
        128**2 * most, rel=2**-8
    )
    with pytest.raises(
        ValueError, match=f"dense: K is {most + 1}, expected at most {most} for int8"
    ):
        dense(x, x, one, one)
    arrays, others = draw("bfloat16")
    with pytest.raises(ValueError, match="levels are for x in 8 bits, but x is bfloat16"):
        dense(**arrays, levels=others["levels"])


def test_results_in_8_bits_have_no_derivative():
    arrays, others = draw()

    def loss(bias):
        return dense(**(arrays | {"bias": bias}), levels=others["levels"]).astype(float).sum()

    with pytest.raises(TypeError, match="have no derivative, because they round to levels"):
        jax.grad(loss)(arrays["bias"])
