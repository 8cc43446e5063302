"""Kernels give the same bits for parts of larger arrays as for arrays of their own."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.experimental.compute_on import compute_on
from jax.sharding import PartitionSpec

from pallas_patch_embed.backends import ranked
from pallas_patch_embed.backends.cuda import TARGET as CUDA
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.check import compare
from pallas_patch_embed.commands.check.cases import SOURCES, CheckCase
from pallas_patch_embed.layers import norm
from pallas_patch_embed.patch_embedding import primitive
from tests.kernels.gpu import RUNS, count_wrong, gpu
from tests.kernels.sliced import programs
from tests.repository import environment

SHAPE = named_shape("B/16 224")
IMAGES = 2

# (backend, dtype, whether the operand is images, kind of table).
OPERATORS = [
    ("mosaic_sm100", "bfloat16", False, "positions"),
    ("mosaic_sm90", "bfloat16", False, "positions"),
    ("mosaic_sm90", "int8", False, "no positions"),
    ("cuda", "bfloat16", False, "positions of each image"),
    ("cuda", "float8_e4m3fn", False, "no positions"),
    ("cuda", "int8", False, "positions"),
    ("cuda", "int8", True, "positions"),
    ("triton", "bfloat16", False, "positions of each image"),
    ("triton", "int8", True, "positions"),
]


def operator_of(backend, dtype, images, table):
    """Returns a kernel, and a function that draws its operands."""
    case = CheckCase(backend, SHAPE, dtype, "bfloat16", IMAGES, table, SOURCES[2 * images])
    kernel = functools.partial(
        primitive.patch_embed,
        backend=backend,
        out_dtype="bfloat16",
        geometry=case.problem.geometry,
        cut=case.cut,
    )
    return kernel, lambda seed: compare.draw(jax.random.key(seed), case.problem), case.problem


def norm_of():
    """Returns the kernel of the layer norm, and a function that draws its operands."""

    def draw(seed):
        keys = jax.random.split(jax.random.key(seed), 3)
        shapes = (norm.FEWEST_ROWS // SHAPE.S, SHAPE.S, SHAPE.N), (SHAPE.N,), (SHAPE.N,)
        x, scale, bias = map(jax.random.normal, keys, shapes)
        return x.astype("bfloat16"), scale, bias

    return functools.partial(norm.layer_norm, eps=1e-6), draw, None


KERNELS = {"layer norm": norm_of} | {
    ", ".join([backend, dtype, "images" if images else "patches", table]): functools.partial(
        operator_of, backend, dtype, images, table
    )
    for backend, dtype, images, table in OPERATORS
}
TYPES = {}
for _name, _kernel_of in KERNELS.items():
    _kernel, _draw, _ = _kernel_of()
    _operands = jax.eval_shape(_draw, 0)
    TYPES[_name] = _operands, jax.eval_shape(_kernel, *_operands)
CASES = [(kernel, name) for kernel, types in TYPES.items() for name in programs(*types)]


@pytest.fixture
def kernel(request):
    """Returns the kernel that a test names, and the function that draws; skips if it cannot run."""
    if gpu() is None:
        pytest.skip("there is no GPU")
    name = request.param
    found, draw, problem = KERNELS[name]()
    if problem is None:
        serves = norm.serves(TYPES[name][0][0], Target.of(gpu()))
        if not serves:
            pytest.skip("the kernel does not serve this GPU")
    else:
        backend = name.split(",")[0]
        options, refusals = ranked(problem, Target.of(gpu()), backend=backend)
        if not options:
            pytest.skip(refusals[backend])
    with jax.default_device(gpu()):
        yield found, draw


def assert_equal_bits(found, expected):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert x.shape == y.shape and x.dtype == y.dtype
        bits = f"uint{8 * x.dtype.itemsize}"
        np.testing.assert_array_equal(np.asarray(x).view(bits), np.asarray(y).view(bits))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel, name", CASES, indirect=["kernel"])
def test_parts_of_larger_arrays_give_the_same_bits(kernel, name):
    kernel, draw = kernel
    operands = draw(0)
    program = programs(operands, jax.eval_shape(kernel, *operands))[name]
    function, _ = program(kernel, operands)
    jitted = jax.jit(function)
    for seed in range(RUNS):
        _, arguments = program(kernel, draw(seed))
        with jax.disable_jit():
            expected = function(*arguments)
        assert_equal_bits(jitted(*arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_parts_of_larger_arrays_in_a_shard_map(kernel):
    kernel, draw = kernel
    operands = draw(0)
    program = programs(operands, jax.eval_shape(kernel, *operands))["all operands are slices"]
    function, arguments = program(kernel, operands)
    mesh = jax.sharding.Mesh([gpu()], ("batch",))
    spec = PartitionSpec()
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    assert_equal_bits(jax.jit(mapped)(*arguments), kernel(*operands))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", KERNELS, indirect=True)
def test_parts_of_larger_arrays_in_a_command_buffer(kernel):
    """The results of all runs are kept, so that XLA records calls again at new addresses.

    XLA does not record the handler of the CUDA kernels.
    """
    kernel, draw = kernel
    pairs = [(draw(seed), draw(RUNS + seed)) for seed in range(RUNS)]
    program = programs(pairs[0][0], jax.eval_shape(kernel, *pairs[0][0]))["all operands are slices"]
    function, _ = program(kernel, pairs[0][0])
    both = jax.jit(
        lambda first, second: (function(*first), function(*second)),
        compiler_options=compare.COMMAND_BUFFERS
        | {"xla_gpu_enable_command_buffer": "FUSION,CUSTOM_CALL,DYNAMIC_SLICE_FUSION"},
    )
    kept = []
    for pair in pairs:
        arguments = [program(kernel, operands)[1] for operands in pair]
        kept.append(both(*arguments))
        both(*arguments)
        assert_equal_bits(both(*arguments), kept[-1])
    for pair, found in zip(pairs, kept):
        assert_equal_bits(found, [kernel(*operands) for operands in pair])


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "layer norm"], indirect=True)
def test_parts_of_larger_arrays_on_two_streams(kernel):
    kernel, draw = kernel
    pairs = [(draw(seed), draw(RUNS + seed)) for seed in range(RUNS)]
    program = programs(pairs[0][0], jax.eval_shape(kernel, *pairs[0][0]))["all operands are slices"]
    function, _ = program(kernel, pairs[0][0])

    @jax.jit
    def both(*arguments):
        return [
            compute_on(
                function,
                compute_type=f"gpu_stream:{1 + i}",
                out_memory_spaces=jax.memory.Space.Device,
            )(*one)
            for i, one in enumerate(arguments)
        ]

    for pair in pairs:
        arguments = [program(kernel, operands)[1] for operands in pair]
        assert_equal_bits(both(*arguments), [kernel(*operands) for operands in pair])


@pytest.mark.gpu
@pytest.mark.skipif(not importlib.util.find_spec("flatbuffers"), reason="flatbuffers is missing")
@pytest.mark.parametrize("kernel", [k for k in KERNELS if k != "layer norm"], indirect=True)
def test_parts_of_larger_arrays_in_an_exported_program(kernel):
    kernel, draw = kernel
    operands = draw(0)
    names = ("mosaic_gpu_v2", CUDA, "triton_kernel_call", "triton_kernel_call_ffi")
    checks = list(map(jax.export.DisabledSafetyCheck.custom_call, names))
    found = programs(operands, jax.eval_shape(kernel, *operands))
    for name in ("all operands are slices", "the results of a loop begin at odd elements"):
        function, arguments = found[name](kernel, operands)
        with jax.disable_jit():
            expected = function(*arguments)
        exported = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=checks)
        loaded = jax.export.deserialize(exported(*arguments).serialize())
        assert_equal_bits(jax.jit(loaded.call)(*arguments), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [k for k in KERNELS if "patches" in k], indirect=True)
def test_the_operands_of_these_tests_give_right_results(kernel):
    kernel, draw = kernel
    assert count_wrong(kernel(*draw(0)), draw(0), "bfloat16") == 0


def test_every_program_computes_what_its_parts_would():
    """On a CPU nothing is folded, so this tests the programs themselves."""
    kernel = functools.partial(
        primitive.patch_embed, backend="xla", out_dtype="bfloat16", geometry=None
    )
    rng = np.random.default_rng(0)
    operands = tuple(
        jax.numpy.asarray(rng.integers(-8, 8, shape), dtype)
        for shape, dtype in (
            ((2, 3, 4), "bfloat16"),
            ((4, 4), "bfloat16"),
            ((4,), "float32"),
            ((2, 3, 4), "bfloat16"),
        )
    )
    found = programs(operands, jax.eval_shape(kernel, *operands))
    for name, program in found.items():
        function, arguments = program(kernel, operands)
        with jax.disable_jit():
            expected = function(*arguments)
        assert_equal_bits(jax.jit(function)(*arguments), expected)
        values = {np.asarray(x).tobytes() for x in jax.tree.leaves(expected)}
        assert all(len(set(value)) > 1 for value in values), name
    # Without a part the programs are the plain call.
    function, arguments = found["operand 2 begins at element 3"](kernel, operands)
    assert_equal_bits(function(*arguments), kernel(*operands))


@pytest.mark.usefixtures("compilers", "cuda_library", "triton_package")
def test_xla_folds_slices_into_calls_of_cuda_alone():
    command = [sys.executable, "-m", "tests.kernels.sliced_hlo"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # Programs without slices of their own have no copies, either: the kernel of the layer norm
    # reads its row of scale and bias out of the rows of all layers.
    whole = found.pop("whole")
    assert whole == {"embed_images": {"calls": 1, "folded": 0, "others": []}, "encoder": 0}
    assert len(found) == 5
    for kernel, answers in found.items():
        for name, answer in answers.items():
            assert answer["calls"] == 1, (kernel, name)
            assert (answer["folded"] > 0) == kernel.startswith("cuda"), (kernel, name)
    # The CUDA kernels get patches, images, weights and results without a copy. XLA copies the
    # arguments that a program updates, and fills the stack of a scan's results before the loop.
    for kernel in ("cuda", "cuda from images"):
        for name, answer in found[kernel].items():
            copies = {
                "operand 0 is a part in scan": ["fusion", "fusion"],
                "the result begins at an odd element": ["copy"],
                "the result replaces operand 0": ["copy"],
            }
            assert answer["others"] == copies.get(name, []), (kernel, name)
