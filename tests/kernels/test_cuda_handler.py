"""The handlers of the XLA FFI: their checks, and their calls of the driver."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.backends import cuda
from tests.kernels.cuda_kernels import LONG, built, configs, register_on_the_cpu
from tests.repository import TESTS, environment

# The handler checks its operands before it asks for a GPU, so the checks can be tested on a CPU.

KERNEL = "patch_embed_sm90_i8_bf16_table_64x64_b1_s8_stationary"
OFFSET = KERNEL.replace("table", "offset")
IMAGES = "patch_embed_sm90_u8_bf16_table_64x64_b1_s16_stationary"
BLACKWELL = "patch_embed_sm100_i8_bf16_table_64x128_b2_s8_stationary"


def operands_of(kernel=KERNEL, M=40, N=128, K=256, period=20, side=224):
    """Maps each operand's name to the (dtype, shape) that the handler expects."""
    *_, dtype, out_dtype, kind = kernel.split("_")[:6]
    images = dtype == cuda.IMAGES
    return dict(
        patches=(LONG[dtype], (M * 256 // side**2, side, side, 3) if images else (M, K)),
        weight=("int8" if images else LONG[dtype], (N, K)),
        scale=("float32", (N,)),
        table=("bfloat16", (period, N)) if kind == "table" else ("float32", (N,)),
        segments=("int32", (1, 2, 4)),
        y=(LONG[out_dtype], (M, N)),
    )


def with_segments(operands, *more):
    """Adds further operands with segments, before y."""
    *names, y = operands
    added = {f"more segments {i}": segments for i, segments in enumerate(more)}
    return {name: operands[name] for name in names} | added | {y: operands[y]}


def call(operands, kernels=KERNEL, **attributes):
    """Runs the custom call with zeros, on a CPU."""
    register_on_the_cpu()
    *arguments, (out_dtype, shape) = operands.values()
    function = jax.ffi.ffi_call(cuda.TARGET, jax.ShapeDtypeStruct(shape, out_dtype))
    arrays = [jnp.zeros(shape, dtype) for dtype, shape in arguments]
    attributes |= {} if kernels is None else dict(kernels=kernels)
    return jax.block_until_ready(function(*arrays, **attributes))


def error_of(*args, **named):
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        call(*args, **named)
    return str(error.value)


@built
@pytest.mark.parametrize(
    "operand, given, message",
    [
        ("patches", ("bfloat16", (40, 256)), "patches is bfloat16[40, 256], expected int8[M, K]"),
        ("patches", ("int8", (2, 20, 256)), "patches is int8[2, 20, 256], expected int8[M, K]"),
        ("patches", ("int8", (40, 128)), "weight is int8[128, 256], expected int8[N, 128]"),
        ("patches", ("int8", (41, 256)), "y is bfloat16[40, 128], expected bfloat16[41, 128]"),
        ("weight", ("float8_e4m3fn", (128, 256)), "weight is float8_e4m3fn[128, 256], expected"),
        ("weight", ("int8", (256,)), "weight is int8[256], expected int8[N, 256]"),
        ("weight", ("int8", (64, 256)), "scale is float32[128], expected float32[64]"),
        ("scale", ("bfloat16", (128,)), "scale is bfloat16[128], expected float32[128]"),
        ("scale", ("float32", (1, 128)), "scale is float32[1, 128], expected float32[128]"),
        ("table", ("float32", (20, 128)), "table is float32[20, 128], expected bfloat16[period, 1"),
        ("table", ("bfloat16", (20, 64)), "table is bfloat16[20, 64], expected bfloat16[period, 1"),
        ("table", ("bfloat16", (128,)), "table is bfloat16[128], expected bfloat16[period, 128]"),
        ("segments", ("float32", (1, 2, 4)), "segments is float32[1, 2, 4], expected"),
        ("segments", ("int32", (2, 4)), "expected int32[workers, segments, 4]"),
        ("segments", ("int32", (1, 2, 3)), "segments is int32[1, 2, 3], expected"),
        ("y", ("float32", (40, 128)), "y is float32[40, 128], expected bfloat16[40, 128]"),
        ("y", ("bfloat16", (40, 64)), "y is bfloat16[40, 64], expected bfloat16[40, 128]"),
        ("scale", ("float16", (128,)), "scale is XLA's type 10[128], expected float32[128]"),
        ("segments", ("int32", (0, 2, 4)), "the schedule has 0 workers"),
        ("table", ("bfloat16", (0, 128)), "the table has 0 rows"),
    ],
    ids=str,
)
def test_wrong_operands_are_refused(operand, given, message):
    error = error_of(operands_of() | {operand: given})
    assert "INVALID_ARGUMENT: patch_embed: " in error and message in error, error
    assert KERNEL in error or "Use the segments of" in error


@built
def test_offsets_are_one_row_of_float32():
    operands = operands_of(OFFSET)
    message = "table is bfloat16[20, 128], expected float32[128] for kernel"
    wrong = operands | dict(table=("bfloat16", (20, 128)))
    assert message in error_of(wrong, OFFSET)
    assert "table is float32[64], expected float32[128]" in error_of(
        operands | dict(table=("float32", (64,))), OFFSET
    )


@built
@pytest.mark.parametrize(
    "operand, given, message",
    [
        (
            "patches",
            ("int8", (2, 224, 224, 3)),
            "images is int8[2, 224, 224, 3], expected uint8[im",
        ),
        (
            "patches",
            ("uint8", (392, 768)),
            "images is uint8[392, 768], expected uint8[images, H, W",
        ),
        ("patches", ("uint8", (2, 224, 224, 4)), "expected uint8[images, H, W, 3] for kernel"),
        ("patches", ("uint8", (3, 224, 224, 3)), "y is bfloat16[392, 128], expected bfloat16[588,"),
        ("patches", ("uint8", (2, 224, 240, 3)), "y is bfloat16[392, 128], expected bfloat16[420,"),
        ("patches", ("uint8", (2, 230, 224, 3)), "images have 230 x 224 pixels, expected multi"),
        ("weight", ("int8", (128, 640)), "weight is int8[128, 640], expected int8[N, 768] for"),
        ("weight", ("uint8", (128, 768)), "weight is uint8[128, 768], expected int8[N, 768] for"),
    ],
    ids=str,
)
def test_wrong_images_are_refused(operand, given, message):
    operands = operands_of(IMAGES, M=392, K=768)
    error = error_of(operands | {operand: given}, IMAGES)
    assert "INVALID_ARGUMENT: patch_embed: " in error and message in error, error


@built
def test_the_segments_of_every_kernel_are_checked():
    right, wrong = ("int32", (1, 2, 4)), ("int32", (1, 2, 3))
    operands = with_segments(operands_of(), wrong)
    message = "segments is int32[1, 2, 3], expected int32[workers, segments, 4] for kernel "
    assert message + BLACKWELL in error_of(operands, f"{KERNEL},{BLACKWELL}")
    operands = with_segments(operands_of() | dict(segments=wrong), right)
    assert message + KERNEL in error_of(operands, f"{KERNEL},{BLACKWELL}")


@built
@pytest.mark.parametrize(
    "sizes, message",
    [
        (dict(N=96), "N is 96, expected a multiple of the kernel's 64 columns"),
        (dict(K=100), "K is 100, expected a multiple of 128 bytes"),
        (dict(K=0), "K is 0, expected a multiple of 128 bytes"),
        (dict(K=4096), "K = 4096 needs 328704 bytes of shared memory"),
    ],
    ids=str,
)
def test_operands_that_the_kernel_does_not_fit_are_refused(sizes, message):
    assert f"INVALID_ARGUMENT: patch_embed: {message}" in error_of(operands_of(**sizes))


AGAIN = "exported by another version of pallas_patch_embed: export it again."


@built
def test_unknown_kernel_names_are_refused():
    one, two = operands_of(), with_segments(operands_of(), ("int32", (1, 2, 4)))
    for operands, kernels, message in (
        (one, "patch_embed", f"this library has no kernel patch_embed. The program was {AGAIN}"),
        (one, KERNEL[:-1], f"this library has no kernel {KERNEL[:-1]}."),
        (two, f"{KERNEL},{OFFSET}?", f"this library has no kernel {OFFSET}?."),
        (one, "", "the program names no kernel"),
        (two, ",", "the program names no kernel"),
    ):
        assert f"INVALID_ARGUMENT: patch_embed: {message}" in error_of(operands, kernels)


@built
def test_as_many_operands_with_segments_as_kernels_are_expected():
    three = with_segments(operands_of(), *[("int32", (1, 2, 4))] * 2)
    none = {name: operand for name, operand in operands_of().items() if name != "segments"}
    for operands, kernels, names, found in (
        (none, KERNEL, 1, 0),
        (three, KERNEL, 1, 3),
        (three, f"{KERNEL},{BLACKWELL}", 2, 3),
        (operands_of(), f"{KERNEL},{BLACKWELL}", 2, 1),
        (operands_of(), f"{KERNEL},", 2, 1),
    ):
        message = f"has {found} operands with segments, expected one for each of its kernels, of"
        message += f" which it names {names}. The program was {AGAIN}"
        assert message in error_of(operands, kernels)
    assert "Wrong number of arguments" in error_of(dict(list(none.items())[1:]))


@built
def test_other_attributes_are_refused():
    old = dict(kernel_sm90=KERNEL, kernel_sm100="")
    for kernels, attributes in (
        (None, {}),
        (None, dict(names=KERNEL)),
        (None, dict(kernel_sm90=KERNEL)),
        (None, old | dict(kernel_sm110="")),
        (KERNEL, old),
        (KERNEL, dict(more="")),
        (np.int32(3), {}),
        (None, dict(kernel_sm90=np.int32(3), kernel_sm100=np.int32(3))),
    ):
        error = error_of(operands_of(), kernels, **attributes)
        assert "INVALID_ARGUMENT: patch_embed: the attributes of the call are unknown" in error
        assert AGAIN in error


@built
def test_a_program_that_was_exported_by_interface_4_is_checked_like_a_new_one():
    """Such a program always has two names, of which one may be empty, and two operands."""
    operands = with_segments(operands_of(), ("int32", (1, 2, 4)))
    wrong = operands | {"more segments 0": ("int32", (1, 2, 3))}
    for names in ((KERNEL, BLACKWELL), (KERNEL, ""), ("", BLACKWELL)):
        old = dict(zip(("kernel_sm90", "kernel_sm100"), names))
        # The handler asks for a GPU only if everything else is right.
        assert "UNAVAILABLE" in error_of(operands, None, **old)
        expected = "segments is int32[1, 2, 3]" if names[1] else "UNAVAILABLE"
        assert expected in error_of(wrong, None, **old)


@built
def test_without_rows_nothing_is_launched():
    assert call(operands_of(M=0)).shape == (0, 128)


@built
def test_without_a_driver_the_error_is_UNAVAILABLE_with_the_reason():
    with contextlib.suppress(OSError):
        __import__("ctypes").CDLL("libcuda.so.1")
        pytest.skip("there is a driver")
    assert re.search(
        r"UNAVAILABLE: patch_embed: the NVIDIA driver cannot be loaded: libcuda.so.1: ",
        error_of(operands_of()),
    )


# The handlers with a driver that records its calls (fake_driver.cc).

STREAM, CODES = (
    3,
    dict(
        INVALID_ARGUMENT=3, RESOURCE_EXHAUSTED=8, FAILED_PRECONDITION=9, INTERNAL=13, UNAVAILABLE=14
    ),
)
COMPILER = shutil.which("c++") or shutil.which("g++")

with_driver = pytest.mark.usefixtures("cuda_library", "handle")


@pytest.fixture(scope="session")
def handle(tmp_path_factory):
    """Returns a function that makes calls in another process.

    It returns ([error of each thread], recorded lines) for each call.
    """
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path_factory.mktemp("driver")

    def compiled(*flags):
        target = folder / "-".join(["driver", *flags]) / "libcuda.so.1"
        if not target.exists():
            target.parent.mkdir()
            source = TESTS / "kernels" / "fake_driver.cc"
            command = [COMPILER, "-std=c++17", "-shared", "-fPIC", *flags, source, "-o", target]
            subprocess.run(command, check=True)
        return target.parent

    def handled(*calls, flags=()):
        defaults = dict(
            stage="execute", stream=STREAM, threads=1, capability=(9, 0), fail=""
        ) | dict(attributes=dict(kernels=KERNEL))
        calls = [defaults | one for one in calls]
        result = subprocess.run(
            [sys.executable, "-m", "tests.kernels.fake_cuda", cuda.LIBRARY],
            input=json.dumps(calls),
            capture_output=True,
            text=True,
            env=environment(LD_LIBRARY_PATH=str(compiled(*flags))),
        )
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)

    handled.compiled = compiled  # type: ignore[attr-defined]
    return handled


# Addresses of the operands and of the result, so far apart that they never overlap.
PLACES = [2**24 * (i + 1) for i in range(6)]


def placed(operands):
    """Adds an address to each operand."""
    return [(*operand, place) for operand, place in zip(operands.values(), PLACES)]


TYPE_NUMBERS = {"e4m3": 0, "i8": 0, "u8": 0, "bf16": 9, "f32": 7}
SWIZZLES = {0: 0, 64: 2, 128: 3}


def lines_of_map(description, address):
    """Yields the record of a map's encoding: not interleaved, L2 promotion 256 bytes, zero fill."""
    kind, rank = TYPE_NUMBERS[description["type"]], len(description["shape"])
    swizzle = SWIZZLES[description["swizzle"]]
    strides = [0, *description["strides"]]
    if "corner" in description:
        channels, pixels = description["box"]
        yield f"cuTensorMapEncodeIm2col {kind} {rank} {address} {channels} {pixels} 0 {swizzle} 2 0"
        for shape, stride in zip(description["shape"], strides):
            yield f"dimension {shape} {stride} 1"
        for corner in description["corner"]:
            yield f"corners 0 {corner}"
        return
    yield f"cuTensorMapEncodeTiled {kind} {rank} {address} 0 {swizzle} 3 0"
    for shape, stride, box in zip(description["shape"], strides, description["box"]):
        yield f"dimension {shape} {stride} {box} 1"


PROLOGUE = [
    f"cuStreamGetCtx {STREAM}",
    f"cuCtxPushCurrent {STREAM}",
    f"cuCtxGetDevice {STREAM}",
    "cuDeviceGetAttribute",
    "cuDeviceGetAttribute",
]
# Largest shared memory of a block, in bytes.
MOST_SHARED = 227 * 1024
LOAD = f"cuLibraryLoadData {0xBA55ED50}"


@with_driver
def test_every_built_kernel_is_launched_as_planned(handle):
    calls, expected = [], []
    for config in configs(built=True):
        if 768 % config.tile_n:
            continue
        # If K is split, each of up to eight blocks needs 128 bytes of it. A weight of 128 columns
        # of bfloat16 stays in shared memory only with a shorter K.
        K = 768 if config.splits == 1 else 1024
        if config.name.startswith("patch_embed_sm90_bf16") and "_128x64_b1_s8_" in config.name:
            K = 640
        shapes = dict(M=392, N=768, K=K, period=196)
        # Lines of patches are loaded in pairs from images of 14 x 14 patches, and one by one from
        # images of 7 x 7.
        side = 112 if config.out_dtype == "f32" else 224
        operands = operands_of(config.name, **shapes, side=side)
        common = dict(
            operands=placed(operands),
            attributes=dict(kernels=config.name),
            capability=divmod(config.capability, 10),
        )
        calls += [common | dict(stage=stage) for stage in ("initialize", "execute")]
        period = 196 if config.has_table else 1
        pixels = (side, side) if config.dtype == cuda.IMAGES else (0, 0)
        launched = dict(workers=1, segments=2, pixels=pixels)
        plan = cuda.launch(config, **(shapes | dict(period=period)), **launched)
        y = plan["y"]
        patches, weight, scale, table, segments, result = PLACES
        maps = [*lines_of_map(plan["patches"], patches), *lines_of_map(plan["weight"], weight)]
        maps += lines_of_map(y, result) if y else []
        expected += [
            [f"cuKernelSetAttribute 8 {MOST_SHARED} {STREAM}"],
            [
                *maps,
                config.symbol,
                f"pointers {patches} {weight} {result if y else 0} {scale} {table} {result} "
                f"{segments}",
                f"sizes 392 768 {plan['chunks']} {period} 2 {pixels[1] // 16} "
                f"{1 if pixels[1] == 112 else 2}",
                *([f"attribute 4 {config.blocks} 1 1"] if config.blocks > 1 else []),
                f"cuLaunchKernelEx {plan['thread_blocks']} 1 1 384 1 1 {plan['shared_memory']} "
                f"{STREAM} {STREAM}",
            ],
        ]
    answers = handle(*calls)
    assert len(answers) == len(expected) > 50
    for (errors, written), lines in zip(answers, expected):
        assert errors == [None]
        written = [line for line in written if line != LOAD]
        assert written == [*PROLOGUE, "cuLibraryGetKernel", *lines, f"cuCtxPopCurrent {STREAM}"]


@with_driver
def test_a_library_image_is_loaded_once_by_all_threads_and_devices(handle):
    operands = placed(operands_of())
    calls = [
        dict(operands=operands, stage=stage, threads=threads, stream=stream)
        for stage, threads, stream in (
            ("initialize", 16, 3),
            ("execute", 16, 3),
            ("initialize", 1, 4),
        )
    ]
    answers = handle(*calls)
    assert [error for errors, _ in answers for error in errors] == [None] * 33
    assert [written.count(LOAD) for _, written in answers] == [1, 0, 0]
    assert sum(line.startswith("cuLaunchKernelEx") for line in answers[1][1]) == 16
    # Each device has its own limit of shared memory, so the limit is set again.
    assert f"cuKernelSetAttribute 8 {MOST_SHARED} 4" in answers[2][1]


@with_driver
def test_calls_of_one_kernel_with_different_K_do_not_disturb_each_other(handle):
    """XLA initialises all calls of a program before it executes the first."""
    large, small = (placed(operands_of(K=K)) for K in (768, 640))
    calls = [("initialize", large), ("initialize", small), ("execute", large), ("execute", small)]
    answers = handle(*(dict(stage=stage, operands=operands) for stage, operands in calls))
    assert [errors for errors, _ in answers] == [[None]] * 4
    launches = [line for _, lines in answers for line in lines if "cuLaunchKernelEx" in line]
    assert len(launches) == len({line.split()[7] for line in launches}) == 2


@with_driver
def test_loading_is_tried_again_after_a_failure(handle):
    once = dict(operands=placed(operands_of()), stage="initialize")
    (refused, _), (errors, written) = handle(once | dict(fail="cuLibraryLoadData"), once)
    assert refused[0] and errors == [None] and LOAD in written


FAILURES = [
    "cuStreamGetCtx",
    "cuCtxPushCurrent",
    "cuCtxGetDevice",
    "cuDeviceGetAttribute",
    "cuLibraryLoadData",
    "cuLibraryGetKernel",
    "cuKernelSetAttribute",
    "cuTensorMapEncodeTiled",
    "cuLaunchKernelEx",
]


@with_driver
@pytest.mark.parametrize("function", FAILURES)
def test_a_failing_driver_call_is_an_error_and_leaves_no_context(handle, function):
    stage = "initialize" if function == "cuKernelSetAttribute" else "execute"
    ((errors, written),) = handle(dict(operands=placed(operands_of()), stage=stage, fail=function))
    ((code, message),) = errors
    assert code == CODES["INTERNAL"]
    assert re.match(r"patch_embed: .*: CUDA_ERROR_UNKNOWN, unknown error\.$", message)
    versions = r"a driver for CUDA 99\.1 cannot load the kernels, compiled by CUDA 1\d\.\d:"
    assert function != "cuLibraryLoadData" or re.search(versions, message)
    pushed, popped = (
        sum(line.startswith(name) for line in written) for name in ("cuCtxPush", "cuCtxPop")
    )
    assert popped == (pushed and function != "cuCtxPushCurrent")
    assert function == "cuLaunchKernelEx" or not any("cuLaunch" in line for line in written)


def of_both(operands):
    """Returns placed operands with the segments of a second kernel."""
    *others, y = placed(operands)
    return [*others, ("int32", (1, 3, 4), 2**28), y]


@with_driver
@pytest.mark.parametrize(
    "attributes",
    [
        dict(kernels=f"{KERNEL},{BLACKWELL}"),
        dict(kernels=f"{BLACKWELL},{KERNEL}"),
        dict(kernel_sm90=KERNEL, kernel_sm100=BLACKWELL),
        dict(kernel_sm90=KERNEL, kernel_sm100=""),
        dict(kernel_sm90="", kernel_sm100=BLACKWELL),
    ],
    ids=["list", "reversed", "interface 4", "interface 4, Hopper", "interface 4, Blackwell"],
)
def test_the_kernel_for_the_device_gets_its_own_segments(handle, attributes):
    names = ",".join(attributes.values()).split(",")
    common = dict(operands=of_both(operands_of()), attributes=attributes)
    chips = [(9, 0), (10, 0)]
    answers = handle(
        *(
            common | dict(capability=chip, stage=stage)
            for chip in chips
            for stage in ("initialize", "execute")
        )
    )
    for kernel, (errors, written) in zip((KERNEL, BLACKWELL), answers[1::2]):
        if kernel not in names:
            assert errors[0][0] == CODES["FAILED_PRECONDITION"]
            continue
        assert errors == [None] and kernel in written
        second = names.index(kernel) == 1
        assert pointers_of(written)["segments"] == (2**28 if second else PLACES[4])
        assert any(line.startswith(f"sizes 40 128 2 20 {3 if second else 2} ") for line in written)


@with_driver
def test_a_device_without_kernels_is_refused(handle):
    both = dict(kernels=f"{KERNEL},{BLACKWELL}")
    one, two = placed(operands_of()), of_both(operands_of())
    answers = handle(
        dict(operands=two, capability=(8, 0), attributes=both),
        dict(operands=two, capability=(12, 0), attributes=both),
        dict(operands=one, capability=(10, 0)),
        dict(operands=one, capability=(9, 0), attributes=dict(kernels=BLACKWELL)),
        dict(operands=two, capability=(10, 3), attributes=both),
    )
    assert {errors[0][0] for errors, _ in answers} == {CODES["FAILED_PRECONDITION"]}
    expected = [("8.0", "9.0, 10.0"), ("12.0", "9.0, 10.0"), ("10.0", "9.0"), ("9.0", "10.0")]
    for (errors, written), (found, known) in zip(answers, [*expected, ("10.3", "9.0, 10.0")]):
        message = f"has compute capability {found}, but the program's kernels for int8 are for"
        assert (
            f"{message} {known}. Lower the program for this device, pack the params with an"
            in (errors[0][1])
        )
        assert not any(line.startswith("cuLibraryLoadData") for line in written)


@with_driver
def test_a_kernel_that_was_not_built_is_refused(handle):
    missing = configs(built=False)
    if not missing:
        pytest.skip("all are built")
    config = missing[0]
    names = dict(kernels=config.name)
    operands = placed(operands_of(config.name, N=768))
    capability = divmod(config.capability, 10)
    ((errors, _),) = handle(dict(operands=operands, attributes=names, capability=capability))
    assert errors == [
        [CODES["UNAVAILABLE"], f"patch_embed: this library was built without {config.name}."]
    ]


@with_driver
def test_without_a_stream_the_error_is_UNAVAILABLE(handle):
    ((errors, written),) = handle(dict(operands=placed(operands_of()), stream=None))
    assert errors == [[CODES["UNAVAILABLE"], "patch_embed: XLA passed no stream of a GPU."]]
    assert not written


OLD = ("-DDRIVER_VERSION=11080",)
TOO_OLD = (
    r"the driver is for CUDA 11\.8; the kernels were compiled by CUDA (1[23])\.\d and need a "
    r"driver for CUDA \1\.0 or newer\. Update the driver, or build the kernels"
)


@with_driver
def test_a_driver_too_old_for_the_kernels_is_refused_before_they_are_loaded(handle):
    calls = [dict(operands=placed(operands_of()), stage=x) for x in ("initialize", "execute")]
    for ((code, message),), written in handle(*calls, flags=OLD):
        assert code == CODES["UNAVAILABLE"] and re.search(TOO_OLD, message)
        assert not written


@with_driver
@pytest.mark.parametrize("flags", [OLD, ()], ids=["old", "new"])
def test_the_backend_refuses_a_chip_whose_driver_is_too_old(handle, flags):
    code = """if True:
        from tests.kernels.interpreter import problem_of
        from tests.operator.planned import refusal
        from pallas_patch_embed.backends import cuda
        from pallas_patch_embed.base.chips import H200, Target
        from pallas_patch_embed.base.problem import named_shape
        problem = problem_of(named_shape("B/16 224"), "int8")
        # An export for a chip that nobody knows yet does not depend on this machine's driver.
        assert refusal(cuda, problem) is None
        print(refusal(cuda, problem, Target("cuda", H200)))
    """
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment(
            LD_LIBRARY_PATH=str(handle.compiled(*flags)),
            JAX_PLATFORMS="cpu",
        ),
    )
    assert result.returncode == 0, result.stderr
    assert re.search(TOO_OLD if flags else "^None$", result.stdout)


@with_driver
def test_a_driver_that_lacks_a_function_is_reported_as_UNAVAILABLE(handle):
    # This driver exports the missing function under a different name.
    flags = ["-DcuLaunchKernelEx=cuLaunchKernel"]
    ((errors, _),) = handle(dict(operands=placed(operands_of())), flags=flags)
    ((code, message),) = errors
    assert code == CODES["UNAVAILABLE"]
    assert "the driver has no cuLaunchKernelEx; 525 or newer is needed." in message


@with_driver
def test_wrong_operands_never_reach_the_driver(handle):
    wrong = operands_of() | dict(scale=("float32", (64,)))
    for stage in ("initialize", "execute"):
        ((errors, written),) = handle(dict(operands=placed(wrong), stage=stage))
        ((code, message),) = errors
        assert code == CODES["INVALID_ARGUMENT"] and "scale is float32[64]" in message
        assert not written


@with_driver
def test_no_rows_never_reach_the_driver(handle):
    operands = placed(operands_of(M=0, period=0))
    for stage in ("initialize", "execute"):
        assert handle(dict(operands=operands, stage=stage)) == [[[None], []]]


# Operands and results that are parts of larger arrays.


def executed(handle, *calls):
    """Initializes the kernel and executes calls of it; returns their errors and records."""
    return handle(dict(operands=calls[0]["operands"], stage="initialize"), *calls)[1:]


def bytes_of(operand):
    dtype, shape, _ = operand
    return jnp.dtype(dtype).itemsize * int(np.prod(shape))


def moved(operands, **distances):
    """Returns placed operands, some of them this number of bytes after their usual addresses."""
    names = list(operands_of())
    return [
        (dtype, shape, address + distances.get(name, 0))
        for name, (dtype, shape, address) in zip(names, operands)
    ]


def copies_of(written):
    """Returns the copies in a record as (to, from, bytes), and where among them the launch is."""
    steps = [x.split() for x in written if x.startswith(("cuMemcpyDtoDAsync", "cuLaunchKernelEx"))]
    assert all(step[-1] == str(STREAM) for step in steps)
    launch = [step[0] for step in steps].index("cuLaunchKernelEx")
    copied = [tuple(map(int, step[1:4])) for step in steps if step[0] == "cuMemcpyDtoDAsync"]
    return copied, launch


def pointers_of(written):
    """Returns the addresses that the kernel got: patches, weight, scale, table, y, segments."""
    (line,) = (line for line in written if line.startswith("pointers"))
    patches, weight, _, scale, table, y, segments = map(int, line.split()[1:])
    return dict(patches=patches, weight=weight, scale=scale, table=table, y=y, segments=segments)


COPY, DISTANCE = 2**29, 2**20
READ = ("patches", "weight", "scale", "table", "segments")


@with_driver
@pytest.mark.parametrize("past", [1, 2, 4, 8, 12, 15])
@pytest.mark.parametrize("name", READ)
def test_an_operand_at_an_odd_address_is_copied_before_the_launch(handle, name, past):
    operands = moved(placed(operands_of()), **{name: past})
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None]
    assert written[-2:] == [f"cuMemFreeAsync {COPY} {STREAM}", f"cuCtxPopCurrent {STREAM}"]
    index = list(operands_of()).index(name)
    begin, size = operands[index][2], bytes_of(operands[index])
    assert copies_of(written) == ([(COPY, begin, size)], 1)
    usual = dict(zip(operands_of(), (address for *_, address in placed(operands_of()))))
    assert pointers_of(written) == usual | {name: COPY}


@with_driver
@pytest.mark.parametrize("past", [1, 2, 4, 8, 15])
def test_a_result_at_an_odd_address_is_copied_after_the_launch(handle, past):
    operands = moved(placed(operands_of()), y=past)
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None]
    assert copies_of(written) == ([(operands[-1][2], COPY, bytes_of(operands[-1]))], 0)
    assert pointers_of(written)["y"] == COPY


@with_driver
def test_every_operand_and_the_result_may_be_at_odd_addresses(handle):
    operands = moved(placed(operands_of()), **dict.fromkeys([*READ, "y"], 4))
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None]
    copied, launch = copies_of(written)
    assert launch == 5 and [to for to, *_ in copied] == [
        *(COPY + DISTANCE * i for i in range(5)),
        operands[-1][2],
    ]


@with_driver
@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("distance", ["the same", "the last byte", "the first byte", "next to it"])
def test_a_result_that_overlaps_an_operand_is_copied_after_the_launch(handle, name, distance):
    """XLA lets a result replace the slice that the kernel reads."""
    operands = placed(operands_of(M=160, K=128))
    index = list(operands_of()).index(name)
    begin, size = operands[index][2], bytes_of(operands[index])
    y = {
        "the same": begin,
        "the last byte": begin + size - 16,
        "the first byte": begin - bytes_of(operands[-1]) + 16,
        "next to it": begin + size,
    }[distance]
    operands[-1] = (*operands[-1][:2], y)
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None]
    copied, launch = copies_of(written)
    expected = [(y, COPY, bytes_of(operands[-1]))]
    assert launch == 0 and copied == ([] if distance == "next to it" else expected)


@with_driver
def test_a_result_that_overlaps_only_operands_that_are_copied_stays_where_it_is(handle):
    operands = moved(placed(operands_of()), patches=4)
    operands[-1] = (*operands[-1][:2], operands[0][2] + 12)
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None]
    assert copies_of(written) == ([(COPY, operands[0][2], bytes_of(operands[0]))], 1)
    assert pointers_of(written)["y"] == operands[-1][2]


@with_driver
def test_operands_at_multiples_of_16_bytes_are_never_copied(handle):
    operands = moved(placed(operands_of()), **dict.fromkeys([*READ, "y"], 16))
    ((errors, written),) = executed(handle, dict(operands=operands))
    assert errors == [None] and copies_of(written) == ([], 0)
    assert not any(line.startswith("cuMemAlloc") for line in written)


@with_driver
@pytest.mark.parametrize(
    "name, past, memory", [("patches", 4, 100), ("y", 2, 100), ("table", 1, 0), ("scale", 12, 8)]
)
def test_without_memory_for_a_copy_the_error_says_which_operand_is_odd(handle, name, past, memory):
    operands = moved(placed(operands_of()), **{name: past})
    ((errors, written),) = executed(handle, dict(operands=operands, memory=memory))
    ((code, message),) = errors
    assert code == CODES["RESOURCE_EXHAUSTED"]
    assert f"{name} is a part of a larger array and begins {past} bytes after a multiple of 16" in (
        message
    )
    size = bytes_of(operands[list(operands_of()).index(name)])
    assert f"no memory for a copy of {size} bytes" in message
    assert "apply jax.lax.optimization_barrier to the slice" in message
    assert not any(line.startswith("cuLaunchKernelEx") for line in written)


@with_driver
def test_without_memory_a_result_that_overlaps_an_operand_is_refused(handle):
    operands = placed(operands_of())
    operands[-1] = (*operands[-1][:2], operands[0][2])
    ((errors, written),) = executed(handle, dict(operands=operands, memory=0))
    ((code, message),) = errors
    assert code == CODES["RESOURCE_EXHAUSTED"]
    assert "y is a part of a larger array and overlaps an operand" in message
    assert not any(line.startswith("cuLaunchKernelEx") for line in written)


@with_driver
def test_after_the_first_operand_without_memory_nothing_is_copied(handle):
    operands = moved(placed(operands_of()), **dict.fromkeys([*READ, "y"], 4))
    size = bytes_of(operands[0])
    ((errors, written),) = executed(handle, dict(operands=operands, memory=size - 1))
    assert "patches is a part" in errors[0][1]
    assert not any(line.startswith(("cuMemcpy", "cuLaunch")) for line in written)
    assert sum(line.startswith("cuMemAllocAsync") for line in written) == 1


@with_driver
@pytest.mark.parametrize("function", ["cuMemcpyDtoDAsync"])
def test_a_copy_that_fails_is_an_error(handle, function):
    for name in ("weight", "y"):
        operands = moved(placed(operands_of()), **{name: 8})
        ((errors, written),) = executed(handle, dict(operands=operands, fail=function))
        ((code, message),) = errors
        assert code == CODES["INTERNAL"] and "CUDA_ERROR_UNKNOWN" in message
        assert any(line.startswith("cuCtxPopCurrent") for line in written)
