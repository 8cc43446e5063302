"""`pack` inside of jit, vmap, scan and shard_map, and inside of models."""

import functools
import itertools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from pallas_patch_embed.patch_embedding.weight_rounding import ROUNDINGS
from tests.kernels.gpu import gpu
from tests.operator.bounds import DTYPES, assert_bit_equal, draw_images, draw_params
from tests.repository import environment
from tests.short_suite import keep

RNG = np.random.default_rng(0)
SIZE, GRID, N = 4, (2, 3), 16
GRADIENT_REFUSED = "patch_embed is inference-only"


def draw(rng=RNG, *leading):
    """Draws kernel, bias and positions; channels have different magnitudes."""
    kernel = rng.normal(size=(*leading, SIZE, SIZE, 3, N)) * 10 ** rng.uniform(-3, 1, N)
    bias, positions = rng.normal(size=(*leading, N)), rng.normal(size=(*leading, *GRID, N))
    return tuple(map(np.float32, (kernel, bias, positions)))


def pack(kernel, bias, positions, dtype="int8"):
    return ppe.pack(kernel, bias, positions, patch_size=SIZE, dtype=dtype)


def assert_same(packed, wanted):
    assert jax.tree.structure(packed) == jax.tree.structure(wanted)
    jax.tree.map(assert_bit_equal, packed, wanted)


def stacked(params):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *params)


TRACED = {
    "jit": jax.jit,
    "jit of closed over values": lambda pack: lambda *drawn: jax.jit(lambda: pack(*drawn))(),
    "disabled jit": lambda pack: jax.disable_jit()(pack),
    "remat": lambda pack: jax.jit(jax.checkpoint(pack)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", TRACED)
def test_traced_packing_gives_the_bits_of_packing_outside(how, dtype):
    traced = TRACED[how](functools.partial(pack, dtype=dtype))
    for seed in range(5):
        drawn = draw(np.random.default_rng(seed))
        assert_same(traced(*drawn), pack(*drawn, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_vmap_and_scan_pack_each_kernel_by_itself(dtype):
    drawn = draw(RNG, 3)
    one = functools.partial(pack, dtype=dtype)
    wanted = stacked([one(*(x[i] for x in drawn)) for i in range(3)])
    assert_same(jax.vmap(one)(*drawn), wanted)
    assert_same(jax.jit(jax.vmap(one))(*drawn), wanted)
    _, scanned = jax.lax.scan(lambda carry, x: (carry, one(*x)), None, drawn)
    assert_same(scanned, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eval_shape_gives_the_types_of_packing(dtype):
    drawn = draw()
    abstract = jax.eval_shape(functools.partial(pack, dtype=dtype), *drawn)
    packed = pack(*drawn, dtype=dtype)
    assert jax.tree.structure(abstract) == jax.tree.structure(packed)
    for a, b in zip(jax.tree.leaves(abstract), jax.tree.leaves(packed)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


@pytest.mark.parametrize(
    "dtype, explicit",
    keep(
        itertools.product(DTYPES, (False, True)),
        lambda case: case[1] or case[0] == "int8",
        "compiles two sharded programs; the short suite has every dtype on explicit axes",
    ),
    ids=lambda x: x if isinstance(x, str) else ("automatic", "explicit")[x],
)
def test_a_kernel_sharded_along_N_keeps_its_sharding(dtype, explicit):
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Explicit if explicit else AxisType.Auto,))
    specs = P(None, None, None, "model"), P("model"), P(None, None, "model")
    drawn = draw()
    placed = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in zip(drawn, specs)]
    one = functools.partial(pack, dtype=dtype)
    with jax.set_mesh(mesh):
        program = jax.jit(one).lower(*placed).compile()
        for packed in (one(*placed), jax.jit(one)(*placed)):
            assert_same(packed, one(*drawn))
            assert packed.weight.sharding.spec[0] == "model"
            assert packed.offset.sharding.spec == P("model")
            # Without quantisation the scales are 1 and do not depend on an argument.
            assert dtype in ("float32", "bfloat16") or packed.scale.sharding.spec == P("model")
            assert packed.table.sharding.spec[1] == "model"
    text = program.as_text()
    collectives = ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    assert not [name for name in collectives if name in text]


def test_a_shard_map_packs_its_part_of_N():
    mesh = jax.make_mesh((4,), ("model",), (AxisType.Auto,))
    specs = P(None, None, None, "model"), P("model"), P(None, None, "model")
    drawn = draw()
    images = draw_images(RNG, 2, 8, 12, 3)

    def part(images, *drawn):
        return ppe.embed_images(images, pack(*drawn))

    sharded = jax.shard_map(
        part, mesh=mesh, in_specs=(P(), *specs), out_specs=P(None, None, "model")
    )
    assert_bit_equal(jax.jit(sharded)(images, *drawn), part(images, *drawn))


@pytest.mark.parametrize("dtype", DTYPES)
def test_new_parameters_give_new_results_from_the_same_program(dtype):
    traces = []

    @jax.jit
    def model(images, kernel, bias, positions):
        traces.append(1)
        return ppe.embed_images(images, pack(kernel, bias, positions, dtype), out_dtype="float32")

    images = draw_images(RNG, 2, 8, 12, 3)
    for _ in range(3):
        drawn = draw()
        wanted = ppe.embed_images(images, pack(*drawn, dtype=dtype), out_dtype="float32")
        assert_bit_equal(model(images, *drawn), wanted)
    assert len(traces) == 1


def loss(images, kernel, bias, positions, dtype):
    y = ppe.embed_images(images, pack(kernel, bias, positions, dtype), out_dtype="float32")
    return jnp.sum(y**2)


@pytest.mark.parametrize(
    "dtype, argument, jit",
    keep(
        itertools.product(DTYPES, ("images", "kernel", "bias", "positions"), (False, True)),
        lambda case: case[0] == "int8" or (case[1] == "images" and case[2]),
        "always the same refusal; the short suite has every argument with int8, and every dtype",
    ),
    ids=lambda x: x if isinstance(x, str) else "jit" * x,
)
def test_a_gradient_by_any_argument_is_refused(dtype, argument, jit):
    arguments = dict(zip(("kernel", "bias", "positions"), map(jnp.asarray, draw())))
    arguments["images"] = jnp.float32(draw_images(RNG, 2, 8, 12, 3) / 127.5 - 1)

    def by(x):
        return loss(**(arguments | {argument: x}), dtype=dtype)

    derivative = jax.jit(jax.grad(by)) if jit else jax.grad(by)
    with pytest.raises(TypeError, match=GRADIENT_REFUSED):
        derivative(arguments[argument])


def test_encoded_integers_refuse_a_gradient_by_pixels():
    params = pack(*draw())
    images = jnp.float32(draw_images(RNG, 8, 12, 3) / 127.5 - 1)
    cut = images.reshape(2, 4, 3, 4, 3).swapaxes(1, 2).reshape(6, 48)
    for encode, pixels in ((ppe.patchify, images), (ppe.encode_patches, cut)):

        def by(x, encode=encode):
            return jnp.sum(ppe.patch_embed(encode(x, params), params, out_dtype="float32"))

        with pytest.raises(TypeError, match=GRADIENT_REFUSED):
            jax.grad(by)(pixels)
        assert not jax.grad(lambda x, by=by: by(jax.lax.stop_gradient(x)))(pixels).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("encode", [ppe.patchify, ppe.encode_patches])
def test_encoded_pixels_have_no_gradient(encode, dtype):
    params = pack(*draw(), dtype=dtype)
    pixels = jnp.zeros((8, 12, 3) if encode is ppe.patchify else (6, 48))

    def by(x):
        return jnp.sum(encode(x, params).astype(jnp.float32))

    for derivative in (jax.grad(by), jax.jit(jax.grad(by))):
        with pytest.raises(TypeError, match=GRADIENT_REFUSED):
            derivative(pixels)
    assert not jax.grad(lambda x: by(jax.lax.stop_gradient(x)))(pixels).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_frozen_embedding_lives_inside_a_model_that_is_trained(dtype):
    images, drawn = draw_images(RNG, 2, 8, 12, 3), tuple(map(jnp.asarray, draw()))

    def model(drawn, head):
        x = ppe.embed_images(images, pack(*drawn, dtype=dtype), out_dtype="float32")
        return jnp.sum((jax.lax.stop_gradient(x) @ head) ** 2)

    head = jnp.float32(RNG.normal(size=(N, 3)))
    x = ppe.embed_images(images, pack(*drawn, dtype=dtype), out_dtype="float32")
    frozen, trained = jax.jit(jax.grad(model, (0, 1)))(drawn, head)
    assert not any(x.any() for x in jax.tree.leaves(frozen))
    np.testing.assert_allclose(
        trained, jax.grad(lambda head: jnp.sum((x @ head) ** 2))(head), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_known_values_are_checked_while_others_are_traced(place):
    kernel, bias, positions = draw()
    kernel[1, 2, 0, 3] = np.nan
    kernel = place(kernel)
    with pytest.raises(ValueError, match="kernel has 1 values"):
        jax.jit(lambda bias: pack(kernel, bias, positions))(bias)


def test_traced_values_that_are_not_finite_are_not_hidden():
    kernel, bias, positions = draw()
    bias[3] = np.inf
    packed = jax.jit(pack)(kernel, bias, positions)
    assert np.flatnonzero(~np.isfinite(packed.offset)).tolist() == [3]


def test_packing_works_under_a_transfer_guard():
    drawn = draw()
    wanted, on_device = pack(*drawn), jax.device_put(drawn)
    with jax.transfer_guard("disallow"):
        packed = pack(*drawn), pack(*on_device), jax.jit(pack)(*on_device)
    for params in packed:
        assert_same(params, wanted)


RANGES = {
    "0 to 255": lambda x: x * 127.5 + 127.5,
    "ImageNet's normalisation": lambda x: (x * 0.5 + 0.5 - 0.45) / 0.225,
    "overshoot": lambda x: x * 1.02,
    "NaN": lambda x: np.where(x == x.max(), np.float32(np.nan), x),
}


@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
@pytest.mark.parametrize("place", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize("case", RANGES)
def test_known_pixels_out_of_range_are_refused(case, place, dtype):
    params = pack(*draw(), dtype=dtype)
    good = np.float32(draw_images(RNG, 2, 8, 12, 3) / 127.5 - 1)
    good.flat[0] = 1
    bad = place(np.float32(RANGES[case](good)))
    cut = bad.reshape(4, 3, 48)
    for call in (
        lambda **clip: ppe.patchify(bad, params, **clip),
        lambda **clip: ppe.embed_images(bad, params, **clip),
        lambda **clip: jax.jit(lambda: ppe.embed_images(bad, params, **clip))(),
        lambda **clip: ppe.encode_patches(cut, params, **clip),
    ):
        with pytest.raises(ValueError, match=r"values from .*0 to 255.*ImageNet.*resampling"):
            call()
        call(clip=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_pixels_beyond_one_by_rounding_are_in_range(dtype):
    params = pack(*draw(), dtype="float32")
    beyond = 1 + float(jnp.finfo(dtype).eps)
    images = jnp.full((8, 12, 3), beyond, dtype).at[0].set(-beyond)
    patches = ppe.patchify(images, params)
    assert_bit_equal(patches, ppe.patchify(jnp.clip(images, -1, 1), params))
    assert np.abs(patches).max() == 1


@pytest.mark.parametrize("call", ["patchify", "embed_images", "encode_patches"])
def test_checkify_reports_traced_pixels_out_of_range(call):
    from jax.experimental import checkify

    params = pack(*draw())
    shape = (6, 48) if call == "encode_patches" else (8, 12, 3)
    function = jax.jit(lambda x: getattr(ppe, call)(x, params))
    checked = checkify.checkify(function, errors=checkify.user_checks)
    error, _ = checked(jnp.full(shape, 200.0))
    assert "values from 200.0 to 200.0, expected floating-point pixels" in error.get()
    assert checked(jnp.zeros(shape))[0].get() is None
    # Without checkify the program computes nothing for the check.
    hlo = function.lower(jnp.zeros(shape)).compile().as_text()
    assert "reduce(" not in hlo
    function(jnp.full(shape, 200.0))


def test_a_check_inside_of_transformations_changes_nothing():
    params = pack(*draw())
    images = jnp.float32(draw_images(RNG, 3, 2, 8, 12, 3) / 127.5 - 1)
    wanted = ppe.embed_images(images, params)
    one = functools.partial(ppe.embed_images, params=params)
    assert_bit_equal(jax.vmap(one)(images), wanted)
    assert_bit_equal(jax.jit(jax.vmap(one))(images), wanted)
    assert_bit_equal(jax.lax.map(one, images), wanted)
    assert_bit_equal(jax.checkpoint(one)(images), wanted)
    exported = jax.export.export(jax.jit(one))(images)
    assert_bit_equal(exported.call(images), wanted)
    assert_bit_equal(jax.export.deserialize(exported.serialize()).call(images), wanted)
    assert "check_range[check=range]" in str(jax.make_jaxpr(one)(images))
    mesh = jax.make_mesh((2,), ("data",), (AxisType.Auto,))
    sharded = jax.shard_map(one, mesh=mesh, in_specs=P(None, "data"), out_specs=P(None, "data"))
    assert_bit_equal(jax.jit(sharded)(images), wanted)


def test_a_clipped_program_of_floats_can_be_serialized():
    params = pack(*draw())
    images = jnp.float32(draw_images(RNG, 2, 8, 12, 3) / 127.5 - 1)
    embed = jax.jit(functools.partial(ppe.embed_images, params=params, clip=True))
    restored = jax.export.deserialize(jax.export.export(embed)(images).serialize())
    assert_bit_equal(restored.call(images), ppe.embed_images(images, params))


def test_a_range_check_waits_for_no_transfer_that_a_guard_forbids():
    params = pack(*draw())
    images = jnp.float32(draw_images(RNG, 2, 8, 12, 3) / 127.5 - 1)
    wanted = ppe.embed_images(images, params)
    with jax.transfer_guard("disallow"):
        assert_bit_equal(ppe.embed_images(images, params), wanted)
        with pytest.raises(ValueError, match="0 to 255"):
            ppe.embed_images(jax.device_put(np.full((8, 12, 3), 9, np.float32)), params)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encoded_patches_are_those_that_patchify_cuts(dtype):
    params = draw_params(RNG, patch_size=SIZE, grid=GRID, N=N, dtype=dtype)
    images = draw_images(RNG, 2, 8, 12, 3)
    for pixels in (images, np.float32(images / 127.5 - 1)):
        cut = pixels.reshape(2, 2, 4, 3, 4, 3).swapaxes(2, 3).reshape(2, 6, 48)
        encoded = ppe.encode_patches(cut, params)
        assert encoded.shape == (2, 6, 128)
        assert_bit_equal(encoded, ppe.patchify(pixels, params))


BAD_PATCHES = {
    "K": (ValueError, np.zeros((6, 47), np.float32), r"expected \[..., S, 48\]"),
    "padded": (ValueError, np.zeros((6, 128), np.float32), r"expected \[..., S, 48\]"),
    "rank": (ValueError, np.zeros(48, np.float32), r"expected \[..., S, 48\]"),
    "integers": (TypeError, np.zeros((6, 48), np.int8), "expected pixels: uint8"),
    "list": (TypeError, [[0.0] * 48], "expected a JAX or numpy array"),
}


@pytest.mark.parametrize("case", BAD_PATCHES)
def test_bad_patches_are_refused(case):
    error, patches, message = BAD_PATCHES[case]
    with pytest.raises(error, match=message):
        ppe.encode_patches(patches, pack(*draw()))


KERNELS = """
import re
from benchmarks.offline_compile import compiler, optimized_hlo

with compiler():
    import jax
    import pallas_patch_embed as ppe
    from pallas_patch_embed.base import chips

    def operands(kernel, bias, positions):
        params = ppe.pack(
            kernel, bias, positions, patch_size=16, dtype="int8", rounding="nearest"
        )
        return params.weight, params.scale, params.table

    shapes = (16, 16, 3, 768), (768,), (196, 768)
    arguments = tuple(jax.ShapeDtypeStruct(shape, "float32") for shape in shapes)
    hlo = optimized_hlo(operands, arguments, chips.H200)
entry = hlo[hlo.index("ENTRY") :].splitlines()
launched = " = .* (fusion|copy|transpose|reduce|custom-call)[(]"
print(sum(bool(re.search(launched, line)) for line in entry))
"""


@pytest.mark.usefixtures("compilers")
def test_packing_to_nearest_inside_of_a_model_is_four_kernels_on_a_gpu():
    result = subprocess.run(
        [sys.executable, "-c", KERNELS], capture_output=True, text=True, env=environment()
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[-1] == "4"


@pytest.mark.gpu
@pytest.mark.skipif(gpu() is None, reason="there is no GPU")
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_packs_the_bits_of_a_cpu(dtype, rounding):
    moved = weights = 0
    for _ in range(20):
        kernel = np.float32(RNG.normal(size=(16, 16, 3, 768)) * 10 ** RNG.uniform(-3, 1, 768))
        bias, positions = np.float32(RNG.normal(size=768)), np.float32(RNG.normal(size=(196, 768)))
        packed = []
        for device in (jax.devices("cpu")[0], gpu()):
            with jax.default_device(device):
                packed.append(
                    ppe.pack(
                        *(kernel, bias, positions),
                        patch_size=16,
                        dtype=dtype,
                        rounding=rounding,
                        image_mean=(0.485, 0.456, 0.406),
                        image_std=(0.229, 0.224, 0.225),
                    )
                )
        wanted, found = packed
        if rounding == "feedback" or dtype not in ("int8", "float8_e4m3fn"):
            jax.tree.map(assert_bit_equal, found, wanted)
            continue
        # To nearest, a GPU divides approximately, and a few weights near a tie move by one step.
        assert_bit_equal(found.scale, wanted.scale)
        a, b = (np.asarray(params.weight).astype(np.float64) for params in packed)
        step = 1.0 if dtype == "int8" else np.maximum(np.abs(a) / 8, 2.0**-9)
        assert (np.abs(a - b) <= step).all()
        moved, weights = moved + np.count_nonzero(a != b), weights + a.size
    assert moved <= 1e-5 * weights
