"""The choice of a backend, and how `explain` reports it."""

import dataclasses
import functools
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, choose, cuda, explain, ranked, time_model, xla
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.base import lowering
from pallas_patch_embed.base.chips import B200, B300, CHIPS, H200, Target, chip_of
from pallas_patch_embed.base.problem import PatchGeometry, Problem, named_shape
from pallas_patch_embed.patch_embedding import primitive
from tests.kernels.interpreter import problem_of
from tests.operator.bounds import assert_bit_equal, draw_images, draw_params
from tests.pages import rows_of

PARAMS = draw_params(np.random.default_rng(0), patch_size=4, grid=(2, 2), N=8, dtype="int8")
PATCHES = ppe.patchify(draw_images(np.random.default_rng(1), 3, 8, 8, 3), PARAMS)


@pytest.fixture
def a_backend_for_cuda_10():
    """Adds a fast backend that serves only int8 patches on compute capability 10.0."""

    def plan(problem, target):
        if problem.dtype != "int8":
            raise NotImplementedError(f"it serves int8, not {problem.dtype}.")
        if target.known and (target.chip is None or target.chip.capability != (10, 0)):
            raise NotImplementedError(f"it needs compute capability 10.0; the target is {target}.")
        return Plan(
            lambda *operands: -xla.run(*operands, out_dtype=problem.out_dtype), "first", 1e-3
        )

    backend = types.SimpleNamespace(plan=plan)
    with mock.patch.dict(BACKENDS, {"first": backend, "xla": xla}, clear=True):
        yield
    jax.clear_caches()


def problem(params=PARAMS):
    return Problem.of(PATCHES, params.weight, params.scale, params.table, out_dtype="bfloat16")


def refuses(problem, target):
    raise NotImplementedError("it was not built.")


def stand_in(microseconds, cutting=None):
    """Returns a backend with this time from patches; it cuts images if there is a time for that."""

    def plan(problem, target):
        if problem.images is not None and cutting is None:
            raise NotImplementedError("it does not cut images itself.")
        time = microseconds if problem.images is None else cutting
        return Plan(lambda *operands: None, f"config of {time}", time)

    return types.SimpleNamespace(plan=plan)


@pytest.fixture
def three(monkeypatch):
    """Replaces the backends by three stand-ins; only `slow` cuts images."""
    backends = {"slow": stand_in(9.0, 9.1), "fast": stand_in(7.0), "equal": stand_in(7.0)}
    with mock.patch.dict(BACKENDS, backends, clear=True):
        yield


def test_the_option_with_the_least_time_is_chosen(three):
    h200 = Target("cuda", H200)
    found = explain(problem(), h200)
    assert [(row.backend, row.reason) for row in found] == [
        ("fast", ""),
        ("equal", "fast is faster."),
        ("slow", "fast is faster."),
    ]
    assert found.chosen == "fast" and "7 us predicted" in found.configs[0]
    assert choose(problem(), h200, "slow").microseconds == 9


def test_who_cuts_the_images_is_chosen_by_the_time(three):
    h200 = Target("cuda", H200)
    geometry, images = PatchGeometry(4), (3, 8, 8, 3)
    asked = dataclasses.replace(problem(), geometry=geometry, images=images)
    patchify = time_model.patchify(asked, H200)
    assert 9.1 - 7 > patchify > 0.1
    first = choose(asked, h200, None)
    assert (first.backend, first.cuts_images) == ("fast", False)
    assert first.microseconds == 7 + patchify
    # Its own kernel is faster than XLA's patchify and its kernel for patches.
    assert choose(asked, h200, "slow").cuts_images
    assert choose(asked, h200, None, cut="kernel").backend == "slow"
    # If the chip is not known, XLA cuts the images unless a kernel is asked for.
    unknown = Target("cuda", H200, known=False)
    assert not choose(asked, unknown, "slow").cuts_images
    assert choose(asked, unknown, "slow", cut="kernel").cuts_images


def test_backends_that_refuse_come_last(three, monkeypatch):
    monkeypatch.setattr(BACKENDS["fast"], "plan", refuses)
    found = explain(problem(), Target("cuda", H200))
    assert [row.backend for row in found] == ["equal", "slow", "fast"]
    assert found.rows[-1] == ("fast", False, "it was not built.") and found.configs[-1] == ""


def test_B_32_on_Blackwell_follows_the_prediction():
    """mosaic_sm100 streams the weight in a narrow slice here, and is predicted to take longer."""
    if cuda.missing():
        pytest.skip("the CUDA library is not built")
    found = ranked(problem_of(named_shape("B/32 256"), "float8_e4m3fn", 64), Target("cuda", B200))
    times = {option.backend: option.microseconds for option in found.options}
    assert min(times, key=times.get) == "cuda" and times["mosaic_sm100"] > 1.5 * times["cuda"]


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
            if problem.images is not None:
                raise NotImplementedError("it does not cut images itself.")
            if name != "cuda":  # The stand-in serves even without the library.
                backend.plan(problem, target)

            def run(*operands):
                ran.append((name, target))
                return xla.run(*operands, out_dtype=problem.out_dtype)

            return Plan(run, microseconds={"cuda": 1.0, "xla": 3.0}.get(name, 2.0))

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
        assert explanation.problem.geometry == PatchGeometry(4)
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
        first, *kernels = explanation.rows
        assert first == ("xla", True, "")
        for backend, serves, reason in kernels:
            assert not serves
            if backend == "cuda" and reason == cuda.missing():
                continue
            assert reason.startswith("it needs") and reason.endswith("; the target is cpu.")
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
        assert all("need known sizes" in row.reason for row in explanation.rows[1:])


def test_explain_can_be_called_while_tracing():
    def function(x):
        assert ppe.explain(x, PARAMS).chosen == "xla"
        return x

    jax.jit(function)(PATCHES)


def test_the_fastest_backend_that_serves_is_chosen(a_backend_for_cuda_10):
    assert choose(problem(), Target("cuda", B200), None).config == "first"
    assert choose(problem(), Target("cuda", H200), None).config == ""
    assert choose(problem(), Target.unknown(), None).config == ""
    assert choose(problem(), Target.unknown(), "first").config == "first"
    explanation = ppe.explain(PATCHES, PARAMS)
    assert explanation.chosen == "xla"
    assert explanation.rows[1].reason == "it needs compute capability 10.0; the target is cpu."
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
        ((11, 0), "int8", "triton"),
        ((12, 0), "int8", "triton"),
        ((12, 1), "float8_e4m3fn", "triton"),
    ],
)
def test_each_chip_gets_its_backend(monkeypatch, capability, dtype, chosen):
    monkeypatch.setattr(BACKENDS["triton"], "missing", lambda: None)
    monkeypatch.setattr(cuda, "plan", refuses)
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


def test_explain_says_what_to_pack_where_int8_is_slow():
    shape = named_shape("B/16 224")
    asked = {dtype: problem_of(shape, dtype, 64) for dtype in ("int8", "bfloat16")}
    (note,) = explain(asked["int8"], Target("cuda", B300)).notes
    assert note.startswith("int8 is slow on cuda 10.3: a multiprocessor adds up 256 products")
    assert "Use bfloat16" in note and note in str(explain(asked["int8"], Target("cuda", B300)))
    assert explain(asked["bfloat16"], Target("cuda", B300)).notes == ()
    for target in (Target("cuda", B200), Target("cuda", B300, known=False), Target("cpu")):
        assert explain(asked["int8"], target).notes == ()


def test_int8_is_predicted_to_be_slow_without_tcgen05():
    times = {
        (chip.name, dtype): choose(
            problem_of(named_shape("B/16 224"), dtype, 4736), Target("cuda", chip), "xla"
        ).microseconds
        for chip in (B200, B300)
        for dtype in ("int8", "bfloat16")
    }
    assert times["NVIDIA B200", "int8"] < times["NVIDIA B200", "bfloat16"]
    assert times["NVIDIA B300", "int8"] > 4 * times["NVIDIA B300", "bfloat16"]


@pytest.mark.parametrize("chip, count", [(B300, 1), (B200, 0)], ids=["B300", "B200"])
def test_a_slow_dtype_is_warned_of_once(monkeypatch, recwarn, chip, count):
    primitive._warn_once.cache_clear()
    monkeypatch.setattr(lowering, "target_of", lambda module, platform: Target("cuda", chip))
    for rows in (3, 5):
        patches = jax.ShapeDtypeStruct((rows, *PATCHES.shape[1:]), PATCHES.dtype)
        embed = jax.jit(lambda x: ppe.patch_embed(x, PARAMS, backend="xla"))
        embed.trace(patches).lower(lowering_platforms=("cuda",))
    found = [str(w.message) for w in recwarn if "patch_embed: int8 is slow" in str(w.message)]
    assert len(found) == count


ROWS = rows_of("docs/backends.md", "What a GPU gets")[2:]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_page_says_what_a_GPU_gets(monkeypatch, row):
    if cuda.missing():
        pytest.skip("the CUDA library is not built")
    monkeypatch.setattr(BACKENDS["triton"], "missing", lambda: None)
    monkeypatch.setattr(cuda, "_check_driver", lambda: None)
    _, capability, *backends, _ = row
    target = Target("cuda", chip_of(tuple(map(int, capability.split(".")))))
    dtypes = ("float8_e4m3fn", "bfloat16", "int8")
    asked = [problem_of(named_shape("B/16 256"), dtype, 64) for dtype in dtypes]
    assert [explain(x, target).chosen for x in asked] == backends


def test_the_page_has_every_listed_capability():
    assert [row[1] for row in ROWS] == ["{}.{}".format(*chip.capability) for chip in CHIPS]
