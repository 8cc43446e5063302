"""Compiles or reads the kernels of every backend, and describes what each does for one tile.

The Pallas kernels are compiled by `benchmarks.offline_compile`, the CUDA kernels are read from the
built library, and the Triton kernel is compiled as the backend calls it.
"""

import collections
import functools
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks import cuda_launch
from benchmarks.cycle_budget import CHIP_OF, OUT_DTYPE, Kernel, Loop, Tile
from benchmarks.machine_code import (
    MATRIX,
    Code,
    cubins,
    cuda_root,
    executed,
    read_cubin,
)
from benchmarks.offline_compile import CHIPS, operands
from pallas_patch_embed.backends import cuda, tiles, triton
from pallas_patch_embed.backends.mosaic import SM90, SM100, sm100
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import ROW_BYTES
from pallas_patch_embed.base.chips import Target
from pallas_patch_embed.base.problem import NamedShape, PatchGeometry, Problem

ROOT = Path(__file__).parent.parent

# The architectures for which each family is audited; Triton's kernel also serves newer chips.
SERVED = {
    "Pallas": ("sm_90", "sm_100"),
    "CUDA": ("sm_90", "sm_100"),
    "Triton": ("sm_80", "sm_86", "sm_89", "sm_90"),
}


@functools.cache
def library_kernels() -> dict[tuple[int, str], Code]:
    """Reads every kernel of the built library, by (capability, name).

    Raises:
      NotImplementedError: the library cannot be read; the message says why.
    """
    if reason := cuda.missing():
        raise NotImplementedError(reason)
    found = {}
    for capability, cubin in cubins(cuda.LIBRARY.read_bytes()):
        found |= {(capability, code.name): code for code in read_cubin(cubin)}
    if not found:
        raise NotImplementedError("all cubins of the library are compressed.")
    return found


# One function per family returns the kernel for a problem, or raises NotImplementedError with the
# reason if there is none.


def resident_kernel(
    family: str,
    architecture: str,
    problem: Problem,
    config,
    code: Code,
    steps: int,
    launch: dict,
    splits: int = 1,
) -> Kernel:
    """Describes a Pallas or CUDA kernel; `launch` has the fields of `cuda.launch`."""
    tiling = config.tiling(problem, CHIP_OF[architecture])
    chunks, columns = tiles.chunks(problem), launch["tensor_memory_columns"]
    streamed = launch.get("chunks", chunks) - launch["staying_chunks"]
    streamed *= config.tile_n * ROW_BYTES
    patch_bytes = config.tile_m * chunks * ROW_BYTES
    # From images, a row of a box is one line of one or two patches. A pixel's channels are bytes,
    # so the first size of the box is the row's length in bytes.
    row_bytes = ROW_BYTES if problem.images is None else launch["patches"]["box"][0]
    K, fills = problem.patches[-1], -(-chunks // splits)
    if columns:
        multiply = executed(code.sass, "UTCBAR|UTC[HIQ]MMA", steps)
        store = "LDTM"
        if problem.images is not None:
            # A line has a slot of its own, and is multiplied as a whole row of its swizzle. Half of
            # the products, and some loads of tensor memory, are for the corrections, which only a
            # worker's first tile computes.
            fills = launch["chunks"]
            K = fills * launch["patches"]["swizzle"]
            multiply = {x: n // 2 if MATRIX.match(x) else n for x, n in multiply.items()}
            store = "UTMASTG"
        loops = (
            Loop("multiply", launch["multiplying_warps"], multiply),
            Loop("store", launch["storing_warps"], executed(code.sass, store, 1)),
        )
    else:
        warps = launch["multiplying_warps"]
        # The streamed weight is loaded again for each warpgroup's half of a tile.
        streamed *= warps // 4
        loops = (Loop("multiply and store", warps, executed(code.sass, "STG|[HIQ]G?MMA", steps)),)
    tile = Tile(
        rows=config.tile_m,
        columns=config.tile_n,
        K=K,
        blocks=tiling.blocks,
        slices=tiling.slices,
        multiprocessors=tiling.thread_blocks,
        patch_bytes=patch_bytes,
        tma_bytes=patch_bytes + streamed,
        tma_rows=patch_bytes // row_bytes + streamed // ROW_BYTES,
        slots=config.slots if columns else 0,
        fills=fills if columns else 0,
    )
    shared = launch["shared_memory"]
    described = (problem.dtype, str(config), code, shared, columns, tile, loops)
    return Kernel(family, architecture, *described)


def pallas_kernel(architecture: str, shape: NamedShape, images: int, dtype: str) -> Kernel:
    """Compiles the Pallas kernel for a shape in a separate process."""
    if cuda_root() is None:
        raise NotImplementedError("ptxas and nvdisasm are missing: pip install '.[codegen]'")
    name = "mosaic_sm90" if architecture == "sm_90" else "mosaic_sm100"
    target = next(name for name, chip in CHIPS.items() if chip == CHIP_OF[architecture])
    problem = Problem.of(*operands(shape, images, dtype), out_dtype=OUT_DTYPE)
    choose_config = {"mosaic_sm90": SM90, "mosaic_sm100": SM100}[name].choose_config
    config = choose_config(problem, CHIP_OF[architecture])
    with tempfile.NamedTemporaryFile(suffix=".sass") as file:
        command = [sys.executable, "-m", "benchmarks.offline_compile", "--target", target]
        command += ["--backend", name, "--sass", file.name]
        command += ["--shapes", shape.name, "--images", str(images), "--dtype", dtype]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode:
            raise NotImplementedError(f"it did not compile: {done.stderr.strip()[-200:]}")
        sass = Path(file.name).read_text()
    found = json.loads(done.stdout)[shape.name]["kernel"]
    names = ("name", "registers", "stack_bytes", "spill_bytes")
    code = Code(*(found[name] for name in names), sass=sass)
    launch = dict(shared_memory=found["shared_memory_bytes"])
    launch["staying_chunks"] = 0 if config.stream_weight else tiles.chunks(problem)
    if architecture == "sm_90":
        launch |= dict(multiplying_warps=4 * config.consumers, tensor_memory_columns=0)
    else:
        launch |= dict(multiplying_warps=1, storing_warps=4 * sm100.STORERS)
        launch["tensor_memory_columns"] = config.tensor_memory_columns()
    # The loop over K is unrolled.
    how = dict(problem=problem, config=config, code=code, steps=1, launch=launch)
    return resident_kernel("Pallas", architecture, **how)


def image_problem(shape: NamedShape, images: int, dtype: str) -> Problem:
    """Returns the problem of uint8 images that a kernel cuts into patches itself."""
    source = jax.ShapeDtypeStruct((images, shape.image, shape.image, 3), jnp.uint8)
    _, *rest = operands(shape, images, dtype)
    return Problem.of(source, *rest, out_dtype=OUT_DTYPE, geometry=PatchGeometry(shape.patch))


def cuda_kernel(
    architecture: str, shape: NamedShape, images: int, dtype: str, *, uncut: bool = False
) -> Kernel:
    """Returns the library's kernel for a shape, for patches or for images that it cuts itself."""
    library = library_kernels()
    problem = Problem.of(*operands(shape, images, dtype), out_dtype=OUT_DTYPE)
    if uncut:
        problem = image_problem(shape, images, dtype)
    capability = int(architecture.removeprefix("sm_"))
    config = cuda.choose_config(problem, capability, CHIP_OF[architecture])
    launch = cuda_launch.prepared(config, problem, CHIP_OF[architecture])[1]
    return resident_kernel(
        "CUDA images" if uncut else "CUDA",
        architecture,
        problem=problem,
        config=config,
        code=library[capability, config.symbol],
        # For images Hopper's loop over K is unrolled.
        steps=1 if uncut and capability == 90 else -(-launch["chunks"] // config.splits),
        launch=launch,
        splits=config.splits,
    )


def triton_call(plan: Plan, *arguments) -> dict[str, object]:
    """Returns the arguments and options with which a plan calls its Triton kernel."""
    found = {}

    def call(*operands, out, **options):
        found.update(options, operands=operands, out=out)
        return jnp.zeros(out.shape, out.dtype)

    with mock.patch.object(triton, "_call", lambda: call):
        jax.eval_shape(plan.run, *arguments)
    return found


def compile_triton(call: dict[str, object]):
    """Compiles the result of `triton_call` with Triton for the compute capability in it."""
    import triton as compiler
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pallas_patch_embed.backends.triton import kernel

    function, constants = kernel.patch_embed, dict(call)
    arrays = (*constants.pop("operands"), constants.pop("out"))
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    target = GPUTarget("cuda", constants.pop("compute_capability"), 32)
    del constants["grid"]
    types = ("*" + triton.TYPES[x.dtype.name] for x in arrays)
    signature = dict(zip(function.arg_names, types)) | dict.fromkeys(constants, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(arrays))}
    source = ASTSource(function, signature, constants, aligned)
    return compiler.compile(source, target=target, options=options)


def stack_bytes(kernel, folder: Path) -> int:
    """Returns the bytes of stack per thread of a Triton kernel, to which registers spill.

    Args:
      kernel: result of `compile_triton`.
      folder: folder to which the kernel's machine code is written.
    """
    import triton as compiler

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    tool = Path(compiler.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    said = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True)
    ((stack, local),) = re.findall(r"STACK:(\d+) .* LOCAL:(\d+)", said.stdout)
    return int(stack) + int(local)


def triton_kernel(
    architecture: str, shape: NamedShape, images: int, dtype: str, *, uncut: bool = False
) -> Kernel:
    """Compiles the Triton kernel for a shape, for patches or for images that it cuts itself."""
    if importlib.util.find_spec("triton") is None:
        raise NotImplementedError("triton is missing: pip install '.[codegen]'")
    chip, itemsize = CHIP_OF[architecture], jnp.dtype(dtype).itemsize
    first, *rest = operands(shape, images, dtype)
    problem = Problem.of(first, *rest, out_dtype=OUT_DTYPE)
    if uncut:
        problem = image_problem(shape, images, dtype)
        first, itemsize = jax.ShapeDtypeStruct(problem.images, jnp.uint8), 1
    call = triton_call(triton.plan(problem, Target("cuda", chip)), first, *rest)
    compiled = compile_triton(call)
    (code,) = read_cubin(compiled.asm["cubin"])
    steps = -(-call["K"] // call["TILE_K"])
    found = executed(code.sass, "STG|[HIQ]G?MMA", steps)
    tile = Tile(
        rows=call["TILE_M"],
        columns=call["TILE_N"],
        K=steps * call["TILE_K"],
        blocks=1,
        slices=-(-call["N"] // call["TILE_N"]),
        multiprocessors=min(call["grid"], chip.multiprocessors),
        patch_bytes=call["TILE_M"] * call["K"] * itemsize,
        tma_bytes=0,
        tma_rows=0,
    )
    return Kernel(
        family="Triton images" if uncut else "Triton",
        architecture=architecture,
        dtype=dtype,
        config="{TILE_M}x{TILE_N}x{TILE_K}, {num_warps} warps, {STAGES} stages".format(**call),
        code=code,
        shared_memory_bytes=compiled.metadata.shared,
        tensor_memory_columns=0,
        tile=tile,
        loops=(Loop("multiply and store", call["num_warps"], found),),
    )


def every_kernel(
    shape: NamedShape, images: int, dtypes: list[str]
) -> tuple[list[Kernel], list[str]]:
    """Returns all kernels for a shape, and a line for each reason why kernels are left out."""
    makers = {"Pallas": pallas_kernel, "CUDA": cuda_kernel}
    makers["CUDA images"] = functools.partial(cuda_kernel, uncut=True)
    makers |= {
        "Triton": triton_kernel,
        "Triton images": functools.partial(triton_kernel, uncut=True),
    }
    kernels, missing = [], collections.defaultdict(list)
    for family, make in makers.items():
        for architecture in CHIP_OF:
            if architecture not in SERVED[family.split()[0]]:
                continue
            for dtype in dtypes:
                try:
                    kernels.append(make(architecture, shape, images, dtype))
                except NotImplementedError as error:
                    missing[f"{family}: {error}"].append(f"{architecture} {dtype}")
    return kernels, [f"Left out: {reason} ({', '.join(of)})" for reason, of in missing.items()]
