"""Sharded operands on eight virtual CPU devices: equal results, no collectives, 1/n of the work."""

import contextlib
import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_patch_embed as ppe
from tests.operator.bounds import assert_bit_equal, draw_images, draw_params

pytestmark = pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="sharding is tested on eight virtual CPU devices"
)

COLLECTIVE = re.compile(r"\b(all-gather|all-reduce|all-to-all|collective-\w+|reduce-scatter)")
S, N, K = 16, 64, 768
RNG = np.random.default_rng(0)
PARAMS = draw_params(RNG, patch_size=16, grid=(4, 4), N=N, dtype="int8")
IMAGES = draw_images(RNG, 8, 64, 64, 3)


def embed(x, params):
    return ppe.patch_embed(x, params)


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(request.param,) * 2)
    active = request.param == AxisType.Explicit
    with jax.set_mesh(mesh) if active else contextlib.nullcontext():
        yield mesh


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def put_params(mesh, n=None, s=None, k=None):
    specs = dict(weight=(n, k), scale=(n,), offset=(n,), table=(s, n))
    return dataclasses.replace(
        PARAMS, **{name: put(mesh, getattr(PARAMS, name), *spec) for name, spec in specs.items()}
    )


def compiled(function, *operands):
    program = jax.jit(function).lower(*operands).compile()
    return program, program(*operands)


# Cases that need no communication: name -> (spec of the patches, axes of the params, number of
# devices that share the work).
LOCAL: dict[str, tuple[Any, dict[str, Any], int]] = {
    "batch": (("data",), {}, 4),
    "batch over both axes": ((("data", "model"),), {}, 8),
    "batch and N": (("data",), dict(n="model"), 8),
    "N": ((), dict(n="model"), 2),
    "N over both axes": ((), dict(n=("data", "model")), 8),
    "S": ((None, "data"), dict(s="data"), 4),
    "S of the patches only": ((None, "data"), {}, 4),
    "batch, S": (("data", "model"), dict(s="model"), 8),
}


@pytest.mark.parametrize("case", LOCAL)
def test_sharded_operands_stay_sharded_without_a_collective(case, mesh):
    spec, axes, devices = LOCAL[case]
    x = ppe.patchify(IMAGES, PARAMS)
    program, y = compiled(embed, put(mesh, np.asarray(x), *spec), put_params(mesh, **axes))
    assert_bit_equal(y, reference())
    assert not COLLECTIVE.findall(program.as_text())
    flops = program.cost_analysis()["flops"]
    assert 1 <= flops / (2 * 8 * S * K * N / devices) < 1.1
    full = (*spec, *[None] * (3 - len(spec)))
    assert y.sharding.is_equivalent_to(
        NamedSharding(mesh, P(full[0], full[1], axes.get("n"))), ndim=3
    )


def reference():
    with jax.set_mesh(jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))):
        return np.asarray(ppe.embed_images(IMAGES, PARAMS))


@pytest.mark.parametrize("case", ["patches", "weight", "both"])
def test_operands_sharded_along_K_are_gathered_and_correct(case, mesh):
    x = np.asarray(ppe.patchify(IMAGES, PARAMS))
    spec = (None, None, "data") if case != "weight" else ()
    params = put_params(mesh, k="data" if case != "patches" else None)
    program, y = compiled(embed, put(mesh, x, *spec), params)
    assert_bit_equal(y, reference())
    assert set(COLLECTIVE.findall(program.as_text())) == {"all-gather"}


def test_images_and_vmap_keep_the_sharding(mesh):
    images, params = put(mesh, IMAGES, "data"), put_params(mesh, n="model")
    for function in (ppe.embed_images, jax.vmap(ppe.embed_images, (0, None))):
        program, y = compiled(function, images, params)
        assert_bit_equal(y, reference())
        assert not COLLECTIVE.findall(program.as_text())
        assert y.sharding.shard_shape(y.shape) == (2, S, N // 2)


def test_one_image_is_embedded_with_a_kernel_sharded_along_N():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(AxisType.Explicit,))
    kernel = np.random.default_rng(0).normal(0, 0.03, (16, 16, 3, 64)).astype(np.float32)
    image = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    split = jax.device_put(kernel, NamedSharding(mesh, P(None, None, None, "model")))
    params = ppe.pack(split, None, None, patch_size=16)
    found = jax.jit(ppe.embed_images)(image, params)
    assert found.shape == (16, 64) and found.sharding.spec == P(None, "model")
    params = ppe.pack(kernel, None, None, patch_size=16)
    np.testing.assert_array_equal(found, ppe.embed_images(image, params))


@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_operands_need_not_be_on_the_active_mesh(axes):
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(axes,) * 2)):
        for function in (ppe.embed_images, jax.jit(ppe.embed_images)):
            assert_bit_equal(function(IMAGES, PARAMS), reference())
        constant = jax.jit(lambda: ppe.embed_images(IMAGES, PARAMS))
        assert_bit_equal(constant(), reference())


def test_images_sharded_along_their_height_are_correct(mesh):
    rest = draw_images(RNG, 8, 68, 66, 3)
    rest[:, :64, :64] = IMAGES
    images = put(mesh, rest, "data", "model")
    _, y = compiled(ppe.embed_images, images, put_params(mesh))
    assert_bit_equal(y, reference())


def test_shard_map_runs_on_the_shards(mesh):
    x = put(mesh, np.asarray(ppe.patchify(IMAGES, PARAMS)), "data")
    params = put_params(mesh, n="model")
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    mapped = jax.shard_map(
        embed, mesh=mesh, in_specs=(P("data"), specs), out_specs=P("data", None, "model")
    )
    program, y = compiled(mapped, x, params)
    assert_bit_equal(y, reference())
    assert not COLLECTIVE.findall(program.as_text())


def test_a_shard_map_over_one_axis_leaves_the_other_to_xla(mesh):
    x = put(mesh, np.asarray(ppe.patchify(IMAGES, PARAMS)), "data")
    params = put_params(mesh)
    mapped = jax.shard_map(
        embed, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}
    )
    program, y = compiled(mapped, x, params)
    assert_bit_equal(y, reference())
    assert not COLLECTIVE.findall(program.as_text())


@pytest.mark.parametrize("platforms", [["cpu"], ["cuda"]], ids="+".join)
@pytest.mark.parametrize("how", ["plain", "shard_map", "xla"])
def test_export_of_a_sharded_program(how, platforms, mesh):
    x = put(mesh, np.asarray(ppe.patchify(IMAGES, PARAMS)), "data")
    params = put_params(mesh, n="model")
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)
    function = {
        "plain": embed,
        "xla": lambda x, params: ppe.patch_embed(x, params, backend="xla"),
        "shard_map": jax.shard_map(
            embed, mesh=mesh, in_specs=(P("data"), specs), out_specs=P("data", None, "model")
        ),
    }[how]
    export = jax.export.export(jax.jit(function), platforms=platforms)
    if how == "plain" and AxisType.Auto in mesh.axis_types:
        with pytest.raises(NotImplementedError, match="automatic sharding cannot be exported"):
            export(x, params)
        return
    restored = jax.export.deserialize(export(x, params).serialize())
    assert restored.nr_devices == 8
    if platforms == ["cpu"]:
        assert_bit_equal(jax.jit(restored.call)(x, params), reference())


def test_explicit_shardings_that_do_not_fit_are_refused():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        x = put(mesh, np.asarray(ppe.patchify(IMAGES, PARAMS)), "data")
        with pytest.raises(ValueError, match="contradict each other"):
            jax.jit(embed)(x, put_params(mesh, n="data"))
        with pytest.raises(ValueError, match="contradict each other"):
            jax.jit(embed)(put(mesh, np.asarray(x), None, "model"), put_params(mesh, s="data"))


def test_automatic_shardings_that_do_not_fit_are_correct():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    x = put(mesh, np.asarray(ppe.patchify(IMAGES, PARAMS)), "data")
    for axes in (dict(n="data"), dict(s="data"), dict(n="data", k="model")):
        _, y = compiled(embed, x, put_params(mesh, **axes))
        assert_bit_equal(y, reference())


@pytest.mark.parametrize("backend", ["mosaic_sm90", "mosaic_sm100"])
@pytest.mark.parametrize("how", ["explicit", "shard_map", "vmap"])
def test_a_kernel_for_GPUs_is_reached_once_on_each_shard(backend, how):
    """The program is lowered for a GPU without one; every kind of sharding calls one kernel."""

    def embed_by_kernel(x, params):
        return ppe.patch_embed(x, params, backend=backend)

    kind = AxisType.Explicit if how == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    x = ppe.patchify(IMAGES, PARAMS)
    function = {
        "explicit": embed_by_kernel,
        "vmap": jax.vmap(embed_by_kernel, in_axes=(0, None)),
        "shard_map": jax.shard_map(
            embed_by_kernel, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data")
        ),
    }[how]
    with jax.set_mesh(mesh) if how == "explicit" else contextlib.nullcontext():
        operands = (put(mesh, np.asarray(x), "data"), PARAMS) if how == "explicit" else (x, PARAMS)
        lowered = jax.jit(function).trace(*operands).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu") == 1
