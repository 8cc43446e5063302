"""The choice of a backend, and how `explain` reports it."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bounds import assert_bit_equal, draw_images, draw_params
from interpreter import problem_of

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, choose, cuda, explain, xla
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import B200, H200, Target, chip_of
from pallas_patch_embed.base.problem import PatchLayout, Problem, named_shape

PARAMS = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 2), N=8, dtype="int8")
PATCHES = ppe.patchify(draw_images(np.random.default_rng(1), 3, 8, 8, 3), PARAMS)


@pytest.fixture
def a_backend_for_cuda_10():
    """Adds a backend that is tried first and serves only int8 on compute capability 10.0."""

    def plan(problem, target):
        if problem.dtype != "int8":
            raise NotImplementedError(f"it serves int8, not {problem.dtype}.")
        if target.known and (target.chip is None or target.chip.capability != (10, 0)):
            raise NotImplementedError(f"it needs compute capability 10.0; the target is {target}.")
        return Plan(lambda *operands: -xla.run(*operands, out_dtype=problem.out_dtype), "first")

    backend = types.SimpleNamespace(plan=plan)
    with mock.patch.dict(BACKENDS, {"first": backend, "xla": xla}, clear=True):
        yield
    jax.clear_caches()


def problem(params=PARAMS):
    return Problem.of(PATCHES, params.weight, params.scale, params.table, out_dtype="bfloat16")


def test_backends_are_named_in_the_order_in_which_they_are_tried():
    tried = tuple(row.backend for row in explain(problem(), Target("cpu")))
    assert ppe.backend_names() == tried and tried[-1] == "xla"


def refuses(problem, target):
    raise NotImplementedError("it was not built.")


def test_a_faster_backend_is_preferred_to_one_that_also_serves(monkeypatch):
    monkeypatch.setattr(cuda, "plan", refuses)
    h200 = Target("cuda", H200)
    shape = named_shape("B/32 256")
    few, many = (problem_of(shape, "int8", B) for B in (1, 64))
    explanation = explain(few, h200)
    row = next(row for row in explanation if row.backend == "mosaic_sm90")
    assert row.serves and "with only 64 rows" in row.reason
    assert explanation.chosen == "xla" and not choose(few, h200, None).config
    assert explain(many, h200).chosen == "mosaic_sm90"
    assert "tile_n=64" in choose(few, h200, "mosaic_sm90").config


PREFERRED = [
    # (shape, dtype, images, source, backend that is missing, chosen)
    ("B/16 224", "int8", 4736, "patches", None, "cuda"),
    ("L/16 256", "int8", 32, "patches", None, "cuda"),  # N = 1024, 8192 rows
    ("L/16 256", "int8", 33, "patches", None, "mosaic_sm90"),
    ("L/16 256", "bfloat16", 4736, "patches", None, "cuda"),
    ("So400m/16 512", "bfloat16", 8, "patches", None, "cuda"),
    ("B/32 256", "int8", 2, "patches", None, "cuda"),
    ("B/32 256", "bfloat16", 4, "patches", None, "cuda"),
    ("B/32 256", "bfloat16", 5, "patches", None, "xla"),
    ("B/32 256", "int8", 2, "patches", "cuda", "xla"),
    ("B/32 256", "int8", 4, "patches", "cuda", "triton"),
    ("B/32 256", "int8", 8, "patches", None, "triton"),
    ("B/32 256", "float8_e4m3fn", 16, "patches", None, "triton"),
    ("B/32 256", "float8_e4m3fn", 17, "patches", None, "mosaic_sm90"),
    ("B/32 256", "bfloat16", 16, "patches", None, "xla"),
    ("B/32 256", "bfloat16", 64, "patches", None, "mosaic_sm90"),
    ("B/32 256", "bfloat16", 16, "images", None, "xla"),
    ("B/32 256", "bfloat16", 17, "images", None, "cuda"),
    ("B/32 256", "int8", 4, "images", None, "cuda"),
    ("B/32 256", "int8", 5, "images", None, "mosaic_sm90"),
    ("B/32 256", "float8_e4m3fn", 16, "images", None, "mosaic_sm90"),
    ("B/32 256", "float8_e4m3fn", 17, "images", None, "cuda"),
    ("B/32 256", "bfloat16", 16, "patches", "triton", "xla"),
    ("B/32 256", "int8", 16, "patches", "triton", "mosaic_sm90"),
]


@pytest.mark.parametrize("shape, dtype, images, source, missing, chosen", PREFERRED)
def test_the_backend_that_was_measured_to_be_faster_runs(
    shape, dtype, images, source, missing, chosen, monkeypatch
):
    monkeypatch.setattr(cuda, "plan", refuses if missing == "cuda" else xla.plan)
    reason = "it is not installed." if missing == "triton" else None
    monkeypatch.setattr(BACKENDS["triton"], "missing", lambda: reason)
    asked = problem_of(named_shape(shape), dtype, images)
    if source == "images":
        layout, pixels = PatchLayout(32), (images, 256, 256, 3)
        asked = dataclasses.replace(asked, layout=layout, images=pixels)
    assert explain(asked, Target("cuda", H200)).chosen == chosen


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_for_images_the_CUDA_kernel_is_preferred_if_it_serves(dtype, monkeypatch):
    h200, b200 = Target("cuda", H200), Target("cuda", B200)
    patches = problem_of(named_shape("L/16 256"), dtype, 64)
    images = dataclasses.replace(patches, layout=PatchLayout(16), images=(64, 256, 256, 3))
    few = problem_of(named_shape("B/32 256"), dtype, 1)
    few = dataclasses.replace(few, layout=PatchLayout(32), images=(1, 256, 256, 3))
    monkeypatch.setattr(cuda, "plan", xla.plan)
    assert explain(images, h200).chosen == "cuda"
    assert explain(patches, h200).chosen == ("cuda" if dtype == "bfloat16" else "mosaic_sm90")
    assert explain(few, h200).chosen == "cuda"
    if dtype != "int8":
        assert explain(images, b200).chosen == "mosaic_sm100"
    row = next(row for row in explain(images, h200) if row.backend == "mosaic_sm90")
    assert row.serves and "cuda is 1 to 19% faster" in row.reason
    monkeypatch.setattr(cuda, "plan", refuses)
    assert explain(images, h200).chosen == "mosaic_sm90"
    assert not next(row for row in explain(images, h200) if row.backend == "mosaic_sm90").reason


@pytest.mark.parametrize("source", ["uint8 images", "float images", "patches"])
def test_what_runs_is_what_explain_says(source, monkeypatch):
    params = draw_params(np.random.default_rng(0), patch_size=16, grid=(2, 2), N=64, dtype="int8")
    pixels = np.random.default_rng(1).integers(0, 256, (3, 32, 32, 3), np.uint8)
    given = {
        "uint8 images": jnp.asarray(pixels),
        "float images": jnp.asarray(pixels / 127.5 - 1, jnp.float32),
        "patches": ppe.patchify(pixels, params),
    }[source]
    ran, h200 = [], Target("cuda", H200)

    def stand_in(name, backend):
        def plan(problem, target):
            if name != "cuda":  # The stand-in serves even without the library.
                backend.plan(problem, target)

            def run(*operands):
                ran.append((name, target))
                return xla.run(*operands, out_dtype=problem.out_dtype)

            return Plan(run)

        return types.SimpleNamespace(plan=plan)

    monkeypatch.setattr(lowering, "target_of", lambda module, platform: h200)
    stand_ins = {name: stand_in(name, backend) for name, backend in BACKENDS.items()}
    with mock.patch.dict(BACKENDS, stand_ins):
        jax.clear_caches()
        y = (ppe.patch_embed if source == "patches" else ppe.embed_images)(given, params)
        monkeypatch.setattr(Target, "of", lambda device: h200)
        chosen = ppe.explain(given, params).chosen
    jax.clear_caches()
    assert chosen == "cuda"
    assert ran == [(chosen, h200)]
    assert_bit_equal(y, ppe.patch_embed(ppe.patchify(pixels, params), params, backend="xla"))


def test_explain_accepts_images_or_their_shape():
    pixels = np.zeros((2, 8, 8, 3), np.uint8)
    for images in (pixels, pixels.shape, jax.ShapeDtypeStruct(pixels.shape, pixels.dtype)):
        explanation = ppe.explain(images, PARAMS)
        assert explanation.problem.layout == PatchLayout(4)
        assert explanation.problem.patches == (2, 4, 128)
        assert "of uint8 images" in str(explanation)
    large = ppe.explain((2, 8, 12, 3), PARAMS, position_embedding=np.zeros((2, 6, 8), np.float32))
    assert large.problem.patches == (2, 6, 128) and large.problem.table == (2, 6, 8)
    assert ppe.explain(pixels, PARAMS, out_dtype="float32").problem.out_dtype == "float32"
    floats = ppe.explain(pixels.astype(np.float32), PARAMS)
    assert floats.problem == explanation.problem.of_patches


def test_explain_accepts_patches_or_their_shape():
    for patches in (PATCHES, PATCHES.shape, jax.ShapeDtypeStruct(PATCHES.shape, PATCHES.dtype)):
        explanation = ppe.explain(patches, PARAMS, device=jax.devices()[0])
        *kernels, last = explanation.rows
        assert last == ("xla", True, "")
        for backend, serves, reason in kernels:
            assert not serves
            if backend == "cuda" and reason == cuda.missing():
                continue
            assert reason.startswith("it needs compute capability") and reason.endswith("cpu.")
        assert explanation.chosen == "xla"
        assert "-> xla" in str(explanation)


@pytest.mark.parametrize(
    "target", [Target("cpu"), Target("cuda", H200), Target("cuda", B200)], ids=str
)
def test_explain_accepts_a_symbolic_batch(target, monkeypatch):
    monkeypatch.setattr(Target, "of", lambda device: target)
    (b,) = jax.export.symbolic_shape("b")
    for shape, dtype in (((b, *PATCHES.shape[1:]), PATCHES.dtype), ((b, 8, 8, 3), np.uint8)):
        explanation = ppe.explain(jax.ShapeDtypeStruct(shape, dtype), PARAMS)
        assert explanation.chosen == "xla"
        assert all("need known sizes" in row.reason for row in explanation.rows[:-1])


def test_explain_can_be_called_while_tracing():
    def function(x):
        assert ppe.explain(x, PARAMS).chosen == "xla"
        return x

    jax.jit(function)(PATCHES)


def test_the_first_backend_that_serves_is_chosen(a_backend_for_cuda_10):
    assert choose(problem(), Target("cuda", B200), None).config == "first"
    assert choose(problem(), Target("cuda", H200), None).config == ""
    assert choose(problem(), Target.unknown(), None).config == ""
    assert choose(problem(), Target.unknown(), "first").config == "first"
    explanation = ppe.explain(PATCHES, PARAMS)
    assert explanation.chosen == "xla"
    assert explanation.rows[0].reason == "it needs compute capability 10.0; the target is cpu."
    assert "it needs compute capability 10.0" in str(explanation)


def test_a_named_backend_is_never_replaced_by_another(a_backend_for_cuda_10):
    with pytest.raises(NotImplementedError, match="'first' cannot serve this call: it needs"):
        ppe.patch_embed(PATCHES, PARAMS, backend="first")
    with pytest.raises(NotImplementedError, match="'first' cannot serve this call: it needs"):
        jax.jit(lambda x: ppe.patch_embed(x, PARAMS, backend="first")).lower(PATCHES)
    other = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 2), N=8, dtype="float32")
    with pytest.raises(NotImplementedError, match="serves int8, not float32"):
        jax.make_jaxpr(lambda x: ppe.patch_embed(x, other, backend="first"))(
            PATCHES.astype("float32")
        )


def test_an_export_uses_a_named_backend_or_xla(a_backend_for_cuda_10):
    def negations(backend):
        function = jax.jit(lambda x: ppe.patch_embed(x, PARAMS, backend=backend))
        exported = jax.export.export(function, platforms=["cuda"])(PATCHES)
        return exported.mlir_module().count("stablehlo.negate")

    assert negations("first") == 1
    assert negations(None) == negations("xla") == 0


def test_a_backend_named_inside_a_shard_map_that_leaves_axes_to_xla_is_refused(
    a_backend_for_cuda_10,
):
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec()
    function = jax.shard_map(
        lambda x: ppe.patch_embed(x, PARAMS, backend="first"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        axis_names={"a"},
    )
    with pytest.raises(NotImplementedError, match="leaves mesh axes to XLA"):
        jax.jit(function)(PATCHES)


@pytest.mark.parametrize(
    "capability, dtype, chosen",
    [
        ((7, 5), "int8", "xla"),
        ((8, 0), "int8", "triton"),
        ((9, 0), "int8", "mosaic_sm90"),
        ((10, 0), "int8", "mosaic_sm100"),
        ((10, 3), "float8_e4m3fn", "mosaic_sm100"),
        ((10, 3), "int8", "triton"),
        ((12, 0), "int8", "triton"),
    ],
)
def test_each_chip_gets_its_backend(monkeypatch, capability, dtype, chosen):
    monkeypatch.setattr(BACKENDS["triton"], "missing", lambda: None)
    asked = problem_of(named_shape("L/16 256"), dtype, 64)
    assert explain(asked, Target("cuda", chip_of(capability))).chosen == chosen


@pytest.mark.parametrize("backend", ["mosaic_sm90", "mosaic_sm100"])
def test_a_kernel_can_be_exported_without_its_GPU(backend):
    params = draw_params(np.random.default_rng(0), patch_size=8, grid=(4, 4), N=64, dtype="int8")
    # The number of images is odd, so that M is not a multiple of 8.
    patches = jax.ShapeDtypeStruct((3, 15, params.weight.shape[1]), "int8")
    params = dataclasses.replace(params, grid=(3, 5), table=params.table[:15])
    exported = jax.export.export(
        jax.jit(lambda x: ppe.patch_embed(x, params, backend=backend)),
        platforms=["cuda"],
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")],
    )(patches)
    again = jax.export.deserialize(exported.serialize())
    assert again.out_avals[0].shape == (3, 15, 64)
    assert again.mlir_module().count("stablehlo.custom_call @mosaic_gpu_v2") == 1


@pytest.mark.parametrize("rows, has_barrier", [(1024, False), (1025, True), ("b", True)])
def test_xla_may_fuse_the_product_of_few_rows(rows, has_barrier):
    if rows == "b":
        (rows,) = jax.export.symbolic_shape("b")
    shapes = [((rows, 128), "int8"), ((64, 128), "int8"), ((64,), "float32"), ((64,), "float32")]
    operands = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    program = str(jax.make_jaxpr(functools.partial(xla.run, out_dtype="bfloat16"))(*operands))
    assert ("optimization_barrier" in program) == has_barrier


def test_naming_xla_changes_nothing():
    assert_bit_equal(
        ppe.patch_embed(PATCHES, PARAMS, backend="xla"), ppe.patch_embed(PATCHES, PARAMS)
    )
