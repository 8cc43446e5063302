"""Tests of every kernel that serves this machine's GPU."""

import ctypes
import functools
import itertools
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.compute_on import compute_on

import pallas_patch_embed as ppe
from benchmarks import cuda_launch, timeline
from pallas_patch_embed.backends import BACKENDS, cuda
from pallas_patch_embed.backends.cuda import SPELLED
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.dtypes import OUT_DTYPES
from pallas_patch_embed.base.problem import NAMED_SHAPES, PatchGeometry, Problem, named_shape
from pallas_patch_embed.commands.check import compare, memory, work
from pallas_patch_embed.commands.check.cases import ODD, SOURCES, CheckCase
from pallas_patch_embed.commands.check.compare import Counts, compared
from pallas_patch_embed.patch_embedding import primitive
from pallas_patch_embed.patch_embedding.patches import Encoding, cut_into_rows
from tests.kernels.gpu import DTYPES, RUNS, count_wrong, draw, gpu
from tests.kernels.interpreter import problem_of
from tests.operator import planned
from tests.repository import environment

TARGET = None if gpu() is None else Target.of(gpu())
CHIP = TARGET and TARGET.chip
KERNELS = tuple(name for name in BACKENDS if name != "xla")
NAMES = {id(module): name for name, module in BACKENDS.items()}

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(gpu() is None, reason="there is no GPU")]
on_hopper = pytest.mark.skipif(
    CHIP is None or CHIP.capability != (9, 0), reason="there is no GPU of compute capability 9.0"
)


@pytest.fixture(autouse=True)
def on_the_gpu():
    with jax.default_device(gpu()):
        yield


def compute(backend, *operands, **options):
    """Calls `planned.compute`; skips the test if the backend does not serve the operands."""
    try:
        return planned.compute(backend, *operands, **options)
    except NotImplementedError as reason:
        pytest.skip(f"{NAMES[id(backend)]}: {reason}")


@pytest.fixture(params=KERNELS)
def backend(request):
    """Returns each backend that serves this GPU."""
    module = BACKENDS[request.param]
    for dtype in DTYPES:
        if not (
            reason := planned.refusal(module, problem_of(named_shape("B/16 224"), dtype), TARGET)
        ):
            return module
    pytest.skip(f"{request.param}: {reason}")


# The cases of `pallas-patch-embed check --shapes all`, on one device.
CASES = []
if gpu() is not None:
    CASES, _ = work.listed(work.Options(backends=KERNELS, shapes="all"), [gpu()])

# Shapes whose images TMA can cut, each with two batch sizes, and one shape with four. A batch has
# at most 100,000 patches, which limits large images.
CUT_BATCHES = (1, 8, 64, 512)
CUT = [
    (shape, OUT_DTYPES[(i // 2 + j) % 2], min(CUT_BATCHES[(i + 2 * j) % 4], 100_000 // shape.S))
    for i, shape in enumerate([*(shape for shape in NAMED_SHAPES if shape.patch == 16), ODD])
    for j in range(2)
]
CUT += [(named_shape("B/16 224"), "bfloat16", B) for B in (8, 64, 512, 4736)]

# Images that Triton cuts. Unlike TMA it can also cut patches of 14 pixels.
WHOLE = [("B/16 224", 67), ("So400m/14 384", 5), ("B/32 256", 3), ("Gemma 3/14 896", 1)]


def positions_of(shape):
    """Returns the kind of table that models of a shape have."""
    return "positions of each image" if shape.name.startswith("NaFlex") else "positions"


def launched(run, case, cut=None):
    """Sums the counts of RUNS launches of a case."""
    found = compared(run, case.problem, seed=0, devices=[gpu()], how=case.launch, cut=cut)
    return functools.reduce(Counts.plus, itertools.islice(found, RUNS))


def runner_of(case):
    """Calls `work.runner`; skips the test if the backend does not serve the case here."""
    try:
        return work.runner(case, TARGET)
    except NotImplementedError as reason:
        pytest.skip(f"{case.backend}: {reason}")


def assert_right(case):
    """Launches a case with new operands, in poisoned memory, between guards."""
    run, cut = runner_of(case)
    counts = launched(run, case, cut)
    assert counts.all_wrong == 0, counts
    assert counts.launches == counts.guarded, counts
    # In these launches other arrays may be allocated in the result's place: the patches that XLA
    # cuts for comparison may take as much memory as a result.
    uncertain = case.backend == "xla" or (cut is not None and case.launch != "alone")
    # The slices take as much memory, too.
    uncertain |= case.launch == "on slices"
    assert uncertain or counts.launches == counts.poisoned, counts


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_agrees(case):
    assert_right(case)


@pytest.mark.parametrize(
    "shape, out_dtype, B", CUT, ids=lambda x: getattr(x, "name", str(x)).replace(" ", "-")
)
def test_every_element_agrees_where_the_kernel_cuts_images(shape, out_dtype, B):
    assert_right(CheckCase("cuda", shape, "int8", out_dtype, B, positions_of(shape), SOURCES[2]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, B", WHOLE)
def test_images_are_cut_by_triton(name, B, dtype):
    assert_right(CheckCase("triton", named_shape(name), dtype, "bfloat16", B, source=SOURCES[1]))


# Kernels for few rows that are not always the chosen ones, by a part of their names, and calls for
# them: shape, number of images and table. A worker has one or several tiles, a warpgroup may have
# no rows, and the blocks' shares of K may differ by a chunk if K is split.
COOPERATIVE = ["64x64_cooperative", "96x64_cooperative"]
FOR_FEW_ROWS = ["64x64_b2", "64x64_b4", "64x64_b8", *COOPERATIVE, "96x64_b1", "128x64_b1"]
FEW_ROWS = [
    ("B/32 256", 1, "positions"),
    ("B/32 256", 8, "no positions"),
    ("B/32 256", 67, "positions"),
    ("CLIP B/32 224", 3, "positions"),
    ("B/16 224", 1, "positions"),
    ("So400m/14 384", 3, "positions"),
    ("NaFlex B/16 256", 5, "positions of each image"),
]


def stationary_config(problem, kernel):
    """Returns this kernel's config with a weight that stays; skips the test if K does not fit."""
    wanted = cuda._operands(problem)
    named = [c for c in cuda.configs() if f"_{kernel}_" in c.name and c.built]
    found = [c for c in named if c.operands == wanted]
    (config,) = (config for config in found if not config.stream_weight)
    try:
        config.check(problem, CHIP)
    except NotImplementedError as reason:
        pytest.skip(str(reason))
    return config


def changed_elements(run, operands, expected, launches):
    """Returns how many elements differ from the expected ones, over many launches."""

    @jax.jit
    def changed(operands):
        def launch(_, count):
            inputs, count = lax.optimization_barrier((operands, count))
            return count + (run(*inputs) != expected).sum()

        return lax.fori_loop(0, launches, launch, 0)

    return changed(operands)


@on_hopper
@pytest.mark.usefixtures("cuda_library")
@pytest.mark.parametrize("kernel", FOR_FEW_ROWS)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, B, table", FEW_ROWS)
def test_every_element_agrees_with_kernels_for_few_rows(name, B, table, dtype, out_dtype, kernel):
    case = CheckCase("cuda", named_shape(name), dtype, out_dtype, B, table)
    config = stationary_config(case.problem, kernel)
    run = jax.jit(functools.partial(compute, cuda, out_dtype=out_dtype, config=config))
    counts = launched(run, case)
    assert counts.all_wrong == 0, counts
    assert counts.launches == counts.guarded == counts.poisoned == RUNS, counts


@on_hopper
@pytest.mark.usefixtures("cuda_library")
@pytest.mark.parametrize("kernel", FOR_FEW_ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_thousand_launches_for_few_rows_give_the_same_bits(dtype, kernel):
    operands = draw(6, named_shape("So400m/14 224"), dtype, 33)
    problem = Problem.of(*operands, out_dtype="float32")
    config = stationary_config(problem, kernel)
    assert config.tiling(problem, CHIP).tiles_per_worker >= 3
    run = jax.jit(functools.partial(compute, cuda, out_dtype="float32", config=config))
    expected = run(*operands)
    assert count_wrong(expected, operands, "float32") == 0
    assert changed_elements(run, operands, expected, 1_000) == 0


def test_xlas_float8_product_is_within_the_same_bound():
    assert_right(CheckCase("xla", named_shape("B/16 256"), "float8_e4m3fn", "float32", 67))


def cut_by_the_kernel(shape, images, *rest, out_dtype):
    """Computes the operator with the kernel that cuts images."""
    static = dict(
        backend="cuda", out_dtype=out_dtype, geometry=PatchGeometry(shape.patch), cut="kernel"
    )
    return primitive.patch_embed(images, *rest, **static)


@pytest.mark.parametrize("B", [1, 3, 67])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_the_kernel_that_cuts_images_gives_the_bits_of_the_one_from_patches(out_dtype, B):
    names = ("B/16 224", "L/16 384", "So400m/16 512", "NaFlex B/16 256")
    for shape in (*map(named_shape, names), ODD):
        runner_of(CheckCase("cuda", shape, "int8", out_dtype, B, positions_of(shape), SOURCES[2]))
        _, *rest = draw(B, shape, "int8", B)
        size = (B, shape.image, shape.image, 3)
        images = jax.random.bits(jax.random.key(B), size, jnp.uint8)
        patches = cut_into_rows(images, PatchGeometry(shape.patch), Encoding("int8"))
        cut = jax.jit(functools.partial(cut_by_the_kernel, shape, out_dtype=out_dtype))
        from_patches = jax.jit(functools.partial(compute, cuda, out_dtype=out_dtype))
        assert same(cut(images, *rest), from_patches(patches, *rest)), shape.name


@pytest.mark.parametrize("dtype, out_dtype", [("int8", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("B", [1, 67])
def test_a_kernel_that_forgets_elements_is_noticed(backend, dtype, out_dtype, B):
    """Tests the check itself: results are poisoned, and a single wrong element is found."""
    if CHIP.capability < (9, 0):
        pytest.skip("Pallas needs compute capability 9.0 or newer")
    shape = named_shape("B/16 224")
    case = CheckCase("none", shape, dtype, out_dtype, B)

    def forgets_all(patches, *_):
        def nothing(patches, out):
            pass

        out = jax.ShapeDtypeStruct((B * shape.S, shape.N), out_dtype)
        return plgpu.kernel(nothing, out_type=out)(patches).reshape(B, shape.S, shape.N)

    def forgets_one(*operands):
        y = compute(backend, *operands, out_dtype=out_dtype)
        return y.at[0, 195, 767].set(jnp.nan)

    found = launched(forgets_all, case)
    assert found.wrong == found.elements and found.poisoned == RUNS
    assert launched(forgets_one, case).wrong == RUNS


def test_bytes_written_behind_the_result_are_noticed():
    """Tests the guards: the driver's memset writes behind the result."""
    case = CheckCase("xla", named_shape("B/16 224"), "int8", "bfloat16", 3)
    site = memory.Site(case.problem, gpu())
    site.fill(compare.draw(jax.random.key(0), case.problem))
    assert site.guarded
    driver = cuda_launch.Driver()
    address = site.result.unsafe_buffer_pointer() + site.result.nbytes
    driver("cuMemsetD8_v2", ctypes.c_uint64(address), 7, ctypes.c_size_t(5))
    assert site.changed_bytes() == 5 and site.changed_bytes() == 0


@pytest.fixture
def small(backend):
    """Returns the kernel, operands of 3 images of So400m/14, where M % 8 = 3, and the result."""
    operands = draw(5, named_shape("So400m/14 384"), "int8", 3)
    run = jax.jit(functools.partial(compute, backend, out_dtype="bfloat16"))
    return run, operands, run(*operands)


def same(a, b):
    return bool((a == b).all())


def test_ten_thousand_launches_give_the_same_bits(small):
    assert changed_elements(*small, launches=10_000) == 0


def test_command_buffers_give_the_same_result(small):
    run, operands, expected = small

    def twice(*operands):
        y = run(*operands)
        patches, y = lax.optimization_barrier((operands[0], y))
        return y, run(patches, *operands[1:])

    options = {
        "xla_gpu_graph_min_graph_size": 1,
        "xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL",
    }
    graph = jax.jit(twice).lower(*operands).compile(options)
    for _ in range(RUNS):
        assert all(same(y, expected) for y in graph(*operands))


def in_threads(function, items):
    """Calls function(item) for each item in its own thread; raises the first exception."""
    items = list(items)
    with ThreadPoolExecutor(len(items)) as pool:
        for future in [pool.submit(function, item) for item in items]:
            future.result()


def test_two_threads_do_not_disturb_each_other(backend):
    shape = named_shape("B/16 256")
    run = jax.jit(functools.partial(compute, backend, out_dtype="bfloat16"))
    drawn = [draw(i, shape, "float8_e4m3fn", 5 + i) for i in range(2)]
    expected = [run(*operands) for operands in drawn]
    wrong = []

    def launch(i):
        with jax.default_device(gpu()):
            wrong.extend(i for _ in range(200) if not same(run(*drawn[i]), expected[i]))

    in_threads(launch, range(2))
    assert not wrong


def test_two_streams_do_not_disturb_each_other(backend):
    shape = named_shape("B/16 256")
    run = functools.partial(compute, backend, out_dtype="bfloat16")
    drawn = [draw(i, shape, "int8", 2 + i) for i in range(2)]
    expected = [jax.jit(run)(*operands) for operands in drawn]

    @jax.jit
    def both(drawn):
        streams = (
            compute_on(
                run, compute_type=f"gpu_stream:{1 + i}", out_memory_spaces=jax.memory.Space.Device
            )
            for i in range(2)
        )
        return [stream(*operands) for stream, operands in zip(streams, drawn)]

    for _ in range(10 * RUNS):
        assert all(map(same, both(drawn), expected))


@pytest.mark.skipif(gpu() is None or len(jax.devices("cuda")) < 2, reason="fewer than 2 GPUs")
def test_the_devices_of_a_process_do_not_disturb_each_other(backend):
    """Each device runs a program in its own thread; then all of them run one program."""
    devices, shape = jax.devices("cuda"), named_shape("B/16 224")
    patches, *shared = draw(1, shape, "int8", 3 * len(devices))
    target = Target.of(devices[0])
    run = jax.jit(functools.partial(compute, backend, out_dtype="bfloat16", target=target))
    expected = np.asarray(run(patches, *shared))
    parts = np.split(np.asarray(patches), len(devices))
    drawn = [jax.device_put((part, *shared), d) for part, d in zip(parts, devices)]
    wrong = []

    def launch(operands, right):
        wrong.extend(0 for _ in range(200) if (np.asarray(run(*operands)) != right).any())

    in_threads(lambda pair: launch(*pair), zip(drawn, np.split(expected, len(devices))))
    assert not wrong
    mesh = jax.make_mesh((len(devices),), ("b",), devices=devices)
    params = params_of("int8", shape)
    images = np.random.default_rng(0).integers(0, 256, (3 * len(devices), 224, 224, 3), np.uint8)
    patches = ppe.patchify(jnp.asarray(images), params)
    name = NAMES[id(backend)]
    embed = jax.jit(functools.partial(ppe.patch_embed, backend=name))
    alone = np.asarray(embed(patches, params))
    spread = jax.device_put(patches, jax.NamedSharding(mesh, jax.P("b")))
    everywhere = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
    y = embed(spread, everywhere)
    assert y.sharding.is_equivalent_to(spread.sharding, y.ndim)
    assert (np.asarray(y) == alone).all()


def test_two_calls_with_different_K_are_one_program(backend):
    """One kernel of the library may serve both calls, so its shared-memory limit must fit both."""
    drawn = [
        draw(i, named_shape(name), "int8", 3)
        for i, name in enumerate(("B/16 224", "So400m/14 224"))
    ]
    large, (patches, weight, *_) = drawn
    small = (patches[:, :196], weight[:768], large[2], large[3])
    run = functools.partial(compute, backend, out_dtype="bfloat16")
    expected = [jax.jit(run)(*operands) for operands in (large, small)]
    both = jax.jit(lambda *calls: [run(*operands) for operands in calls])(large, small)
    assert all(map(same, both, expected))


def test_donated_patches_are_read_before_they_are_written(backend):
    shape = named_shape("B/16 224")
    run = functools.partial(compute, backend, out_dtype="bfloat16")
    operands = draw(9, shape, "bfloat16", 64)
    expected = jax.jit(run)(*operands)
    for _ in range(RUNS):
        patches = operands[0] + 0
        # K equals N, so that the result has the size of the donated patches.
        assert same(jax.jit(run, donate_argnums=0)(patches, *operands[1:]), expected)
        assert patches.is_deleted()


def params_of(dtype, shape):
    rng = np.random.default_rng(3)
    kernel = rng.normal(0, 1, (shape.patch, shape.patch, 3, shape.N))
    bias, positions = rng.normal(0, 1, shape.N), rng.normal(0, 1, (shape.S, shape.N))
    return ppe.pack(kernel, bias, positions, patch_size=shape.patch, grid=shape.grid, dtype=dtype)


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_chosen_and_agrees_under_vmap_and_jit(dtype):
    shape = named_shape("So400m/14 224")
    params = jax.device_put(params_of(dtype, shape), gpu())
    images = np.random.default_rng(4).integers(0, 256, (6, 224, 224, 3), np.uint8)
    patches = ppe.patchify(jnp.asarray(images), params)
    fastest = "mosaic_sm90" if cuda.missing() else "cuda"
    assert ppe.explain(patches, params).chosen == fastest
    embed = functools.partial(ppe.patch_embed, params=params)
    y = jax.jit(embed)(patches)
    assert same(y, ppe.patch_embed(patches, params, backend=fastest))
    assert ppe.explain(images, params).chosen == fastest
    lowered = jax.jit(ppe.embed_images).lower(images, params).as_text()
    assert (cuda.TARGET in lowered) == (fastest == "cuda")
    for count in (1, 2):
        batched = patches.reshape(*(2, 3)[:count], -1, *patches.shape[1:])
        mapped = embed
        for _ in range(count):
            mapped = jax.vmap(mapped)
        assert same(jax.jit(mapped)(batched).reshape(y.shape), y)
    assert same(jax.jit(jax.vmap(embed, in_axes=1, out_axes=1))(patches[:, None])[:, 0], y)
    assert same(ppe.embed_images(jnp.asarray(images), params), y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernels_agree_under_jit_and_vmap(backend, dtype):
    shape = named_shape("So400m/14 224")
    params = jax.device_put(params_of(dtype, shape), gpu())
    images = np.random.default_rng(4).integers(0, 256, (6, 224, 224, 3), np.uint8)
    patches = ppe.patchify(jnp.asarray(images), params)
    if reason := planned.refusal(backend, problem_of(shape, dtype, 6), TARGET):
        pytest.skip(reason)
    embed = functools.partial(ppe.patch_embed, params=params, backend=NAMES[id(backend)])
    y = jax.jit(embed)(patches)
    assert same(
        jax.jit(jax.vmap(jax.vmap(embed)))(patches.reshape(2, 3, 1, *patches.shape[1:])).reshape(
            y.shape
        ),
        y,
    )


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_trace_has_the_spans_of_every_role(tmp_path, dtype):
    operands = draw(7, named_shape("B/16 224"), dtype, 67)
    problem = Problem.of(*operands, out_dtype="bfloat16")
    y, spans = timeline.traced(operands, SM90, tmp_path)
    assert same(y, compute(SM90, *operands, out_dtype="bfloat16"))
    config = SM90.choose_config(problem, CHIP)
    blocks = config.tiling(problem, CHIP).thread_blocks
    for role, warps in {"feed a tile": 1, "multiply": 8, "scale, add and store": 8}.items():
        found = {(span.block, span.warp) for span in spans if span.role == role}
        assert len(found) == blocks * warps
    assert all(span.end >= span.begin for span in spans)


@on_hopper
@pytest.mark.usefixtures("cuda_library", "nvcc")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_timeline_build_has_the_spans_of_every_warp(dtype):
    operands = draw(7, named_shape("B/16 224"), dtype, 67)
    y, stamps = cuda_launch.stamped(operands, out_dtype="bfloat16")
    assert same(y, compute(cuda, *operands, out_dtype="bfloat16"))
    spans = timeline.read_stamps(stamps)
    assert {span.role for span in spans} == set(timeline.EVENTS)
    found = {(span.block, span.warp) for span in spans}
    assert found == {(block, warp) for block in range(len(stamps)) for warp in range(9)}
    assert all(0 < span.cycles < 10**6 for span in spans)


# Value and number of the bytes between the arrays, which no kernel may touch. Operands begin at odd
# multiples of 16 bytes, the alignment that TMA requires.
CANARY, GAP = 0xA5, 4096 + 16


# The cases run the chosen kernel, and kernels that read the table for each tile. With the latter
# each worker has at least two tiles, and the last tile is partial.
@on_hopper
@pytest.mark.usefixtures("cuda_library", "nvcc")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape, out_dtype, B, kernel",
    [
        ("B/16 224", "bfloat16", 3, None),
        ("So400m/14 384", "float32", 1, None),
        ("NaFlex B/16 256", "bfloat16", 5, None),
        ("So400m/14 384", "bfloat16", 17, "192x128_b1_s5_streamed"),
        ("So400m/14 384", "float32", 17, "192x128_b1_s5_streamed"),
        ("So400m/14 384", "bfloat16", 17, "192x64_b1_s7_streamed"),
        ("So400m/14 384", "bfloat16", 17, "128x128_b1_s6_streamed"),
        ("NaFlex B/16 256", "float32", 45, "128x128_b1_s6_streamed"),
        ("So400m/14 384", "bfloat16", 17, "64x64_b2_s8_stationary"),
        ("So400m/14 384", "float32", 17, "64x64_b4_s8_stationary"),
        ("B/32 256", "bfloat16", 67, "64x64_b8_s8_stationary"),
        ("So400m/14 384", "bfloat16", 17, "64x64_cooperative_s8_stationary"),
    ],
)
def test_nothing_around_the_buffers_is_touched(shape, dtype, out_dtype, B, kernel):
    operands = draw(1, named_shape(shape), dtype, B)
    problem = Problem.of(*operands, out_dtype=out_dtype)
    config = cuda.choose_config(problem, 90, CHIP)
    if kernel:
        names = f"patch_embed_sm90_{SPELLED[dtype]}_{SPELLED[out_dtype]}_table_{kernel}"
        (config,) = (config for config in cuda.configs() if config.name == names)
        assert config.tiling(problem, CHIP).tiles_per_worker >= 2
    expected = np.asarray(compute(cuda, *operands, out_dtype=out_dtype, config=config))
    assert count_wrong(jnp.asarray(expected), operands, out_dtype) == 0
    arrays = dict(zip(("patches", "weight", "scale", "table"), map(np.asarray, operands)))
    arrays["segments"], _ = cuda_launch.prepared(config, problem, CHIP)
    arrays["y"] = np.full(expected.nbytes, CANARY, np.uint8)
    places, arena = {}, [np.full(GAP, CANARY, np.uint8)]
    for name, array in arrays.items():
        places[name] = sum(map(len, arena))
        arena += [np.ascontiguousarray(array).reshape(-1).view(np.uint8)]
        arena += [np.full(GAP + -arena[-1].nbytes % 32, CANARY, np.uint8)]
    before = np.concatenate(arena)
    memory = jax.device_put(before).block_until_ready()
    begin = memory.unsafe_buffer_pointer()
    cuda_launch.launch(config, problem, CHIP, {name: begin + at for name, at in places.items()})
    after = np.array(memory)
    y = slice(places["y"], places["y"] + expected.nbytes)
    assert (after[y] == expected.reshape(-1).view(np.uint8)).all()
    after[y] = CANARY
    assert (after == before).all()


# Only the kernel runs on the GPU; operands and references are computed on a CPU.
SANITIZED = """
import jax, sys
from pallas_patch_embed.backends import BACKENDS, cuda
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import NamedShape
from tests.kernels import gpu
from tests.operator.planned import compute, few
cpu, device = jax.devices("cpu")[0], gpu.gpu()
for dtype, out_dtype, N, patch, kernel in (
    ("int8", "bfloat16", 192, 16, ""),
    ("bfloat16", "float32", 64, 32, ""),
    ("float8_e4m3fn", "bfloat16", 128, 14, ""),
    ("bfloat16", "bfloat16", 192, 16, "bf16_bf16_table_192x128_b1_s5_streamed"),
    ("int8", "float32", 128, 16, "i8_f32_table_128x128_b1_s6_streamed"),
    ("int8", "bfloat16", 192, 16, "i8_bf16_table_192x64_b1_s7_streamed"),
    ("int8", "bfloat16", 64, 16, "i8_bf16_table_64x64_b2_s8_stationary"),
    ("bfloat16", "float32", 64, 32, "bf16_f32_table_64x64_b8_s8_stationary"),
    ("bfloat16", "bfloat16", 192, 16, "bf16_bf16_table_96x64_cooperative_s5_stationary"),
    ("int8", "float32", 64, 16, "i8_f32_table_64x64_cooperative_s8_stationary"),
):
    if kernel and (sys.argv[1] != "cuda" or Target.of(device).chip.capability != (9, 0)):
        continue
    with jax.default_device(cpu):
        operands = gpu.draw(0, NamedShape("small", patch, 5 * patch, N), dtype, 45)
    found = [c for c in cuda.configs() if c.name.endswith(kernel)] if kernel else []
    # racecheck does not end for blocks that send sums to each other (stopped after 180 s).
    if found and found[0].splits > 1 and sys.argv[2] == "racecheck":
        continue
    options = dict(config=found[0]) if found else {}
    options |= dict(out_dtype=out_dtype, target=few(Target.of(device).chip, 2))
    backend = BACKENDS[sys.argv[1]]
    run = jax.jit(lambda *operands: compute(backend, *operands, **options))
    try:
        y = jax.device_put(run(*jax.device_put(operands, device)), cpu)
    except NotImplementedError:
        continue
    with jax.default_device(cpu):
        assert gpu.count_wrong(y, operands, out_dtype) == 0
"""


@pytest.mark.skipif(
    shutil.which("compute-sanitizer") is None, reason="there is no compute-sanitizer"
)
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_compute_sanitizer_finds_nothing(backend, tool):
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "99"]
    name = NAMES[id(backend)]
    command += [sys.executable, "-c", SANITIZED, name, tool]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment(
            JAX_PLATFORMS="cuda,cpu",
            # Each buffer has its own allocation, so that any access beyond it is invalid.
            XLA_PYTHON_CLIENT_ALLOCATOR="platform",
        ),
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-3000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout or tool == "racecheck"
