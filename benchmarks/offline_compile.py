"""Compiles the operator without a GPU, and reads the machine code of its kernels.

XLA compiles ahead of time for the description of a chip, and Mosaic calls ptxas and nvdisasm, so no
driver is needed. The extra `codegen` installs the compilers.

  python -m benchmarks.offline_compile --target h200 --backend mosaic_sm90 --dtype int8

With `--candidates` it compiles each config that `pallas-patch-embed tune` would try.

A process can compile for only one target, because Mosaic registers its passes once, for the first
target.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.machine_code import INSTRUCTION, MATRIX, count, cuda_root, gaps, innermost_loop
from pallas_patch_embed.base.chips import B200, B300, H200, Chip

# The chips by their names in `--target`.
CHIPS = {"h200": H200, "b200": B200, "b300": B300}


def describe(chip: Chip) -> str:
    """Describes a chip as XLA's GpuTargetConfigProto in text format."""
    major, minor = chip.capability
    return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024  threads_per_warp: 32  threads_per_core_limit: 2048
              shared_memory_per_block: 49152  shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472  registers_per_core_limit: 65536
              registers_per_block_limit: 65536  fpus_per_core: 128
              block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
              thread_dim_limit_x: 1024  thread_dim_limit_y: 1024  thread_dim_limit_z: 64
              core_count: {chip.multiprocessors}  clock_rate_ghz: {chip.clock}
              memory_bandwidth: {chip.bandwidth}  l2_cache_size: {chip.l2}
              device_memory_size: {chip.memory}  device_address_bits: 64
              cuda_compute_capability {{
                major: {major}  minor: {minor}  feature_extension: ACCELERATED_FEATURES
              }}
              name: "{chip.name}"  driver_version: "13.0.0"  runtime_version: "13.0.0"
              compile_time_toolkit_version: "13.0.0"
            }}
            platform_name: "CUDA"
            device_description_str: "{chip.name}"
        """


TENSOR_MEMORY_LOAD = re.compile(r"LDTM")
# Line in Mosaic's log of passes before the last dump in which the host function is still MLIR.
LAST_MLIR = "IR Dump Before ConvertToLLVMPass"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A compiled Mosaic kernel.

    Attributes:
      name: name of the kernel's entry.
      registers: registers per thread at launch; setmaxnreg later moves some to other warps.
      stack_bytes: bytes of stack per thread.
      spill_bytes: bytes of spill stores and spill loads per thread.
      shared_memory_bytes: shared memory of the kernel's arrays, excluding the barriers.
      tensor_memory_columns: allocated columns of tensor memory, of 32 bits each.
      instructions: opcode -> count, in the whole kernel.
      multiplications: opcode with modifiers -> count, for matrix multiplications.
      tile_loop: opcode -> count, in the innermost loop with all matrix multiplications.
      store_loop: opcode -> count, in the innermost loop with all loads of tensor memory; empty if
        there are none.
      load_gaps: instructions between consecutive loads of tensor memory in this loop.
      sass: what Mosaic printed: resources, ptxas's report and the machine code.
    """

    name: str
    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_memory_bytes: int
    tensor_memory_columns: int
    instructions: dict[str, int]
    multiplications: dict[str, int]
    tile_loop: dict[str, int]
    store_loop: dict[str, int]
    load_gaps: list[int]
    sass: str


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
      kernel: the program's Mosaic kernel; None if it has none.
      other_operations: opcode -> shapes of all device operations other than this kernel.
      hlo: the optimised HLO.
    """

    kernel: Kernel | None
    other_operations: dict[str, list[str]]
    hlo: str


@contextlib.contextmanager
def compiler() -> Iterator[None]:
    """Prepares this process for offline compilation, before JAX is imported."""
    if "jax" in sys.modules:
        raise RuntimeError(
            "XLA and Mosaic read their settings once: enter `compiler` before JAX is imported."
        )
    root = cuda_root()
    if root is None:
        raise RuntimeError("ptxas and nvdisasm are missing: pip install '.[codegen]'")
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_ENABLE_COMPILATION_CACHE="false",
        CUDA_ROOT=str(root),
        PATH=f"{root / 'bin'}{os.pathsep}{os.environ['PATH']}",
    )
    yield


def compile_offline(
    function: Callable, arguments: tuple[Any, ...], chip: Chip, *, sass: bool = True
) -> Program:
    """Compiles function(*arguments) for a chip, and reads its kernel and its HLO.

    Args:
      function, arguments, chip: as for `optimized_hlo`. There may be one Mosaic kernel.
      sass: whether the machine code is read, too, which takes half a second. Without it the counts
        of instructions are empty.
    """
    parts = ("RESOURCES", "PTXAS", "SASS") if sass else ("RESOURCES", "PTXAS")
    with tempfile.TemporaryFile("w+") as file:
        with mosaic_prints_to(file.fileno(), parts):
            hlo = optimized_hlo(function, arguments, chip)
        file.seek(0)
        printed = file.read()
    others = {}
    for shape, opcode in re.findall(r"^\s+(?:ROOT )?%?\S+ = (\S+) ([a-z][a-z0-9-]*)\(", hlo, re.M):
        if opcode not in ("parameter", "constant", "bitcast", "tuple", "get-tuple-element"):
            others.setdefault(opcode, []).append(shape)
    return Program(read_kernel(printed), others, hlo)


@contextlib.contextmanager
def mosaic_prints_to(file: int, parts: tuple[str, ...]) -> Iterator[None]:
    """Lets Mosaic print these parts of each compilation, and redirects standard output to a file.

    MOSAIC_GPU_DUMP_TO would write them to files, but also the module after each pass. That is 100
    MB and more, and compiling would take three times as long.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(file, 1)
    try:
        with mosaic_dumps(dict.fromkeys(parts, "1")):
            yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def mosaic_dumps(named: dict[str, str]) -> Iterator[None]:
    """Sets variables MOSAIC_GPU_DUMP_*, which Mosaic reads for each kernel."""
    variables = {f"MOSAIC_GPU_DUMP_{name}": value for name, value in named.items()}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def dump_kernel(function: Callable, arguments: tuple[Any, ...], chip: Chip, stem: Path) -> None:
    """Compiles the only kernel of function(*arguments); writes what the emulator needs.

    The kernel's PTX is written to `stem`.ptx, and to `stem`.mlir the module with the host function
    before it is lowered to LLVM. Mosaic dumps a kernel only once in a process.
    """
    with tempfile.TemporaryDirectory() as name:
        with mosaic_dumps({"TO": name}):
            optimized_hlo(function, arguments, chip)
        (log,) = Path(name).glob("*.mlir-passes.log")
        shutil.copy(log.with_suffix("").with_suffix(".ptx"), stem.with_suffix(".ptx"))
        text = log.read_text()
        begin = text.index("\n", text.rindex(LAST_MLIR))
        end = text.find("// -----//", begin)
        stem.with_suffix(".mlir").write_text(text[begin : end if end >= 0 else None])


def optimized_hlo(function: Callable, arguments: tuple[Any, ...], chip: Chip) -> str:
    """Compiles function(*arguments) for a chip; returns the optimised HLO.

    Args:
      function: function that JAX can trace.
      arguments: pytrees of jax.ShapeDtypeStruct.
      chip: the target; it must be the same in all calls of a process.
    """
    import jax
    from jax.experimental import topologies

    topology = topologies.get_topology_desc(
        platform="cuda",
        topology_name="",
        topology="1x1x1",
        target_config=describe(chip),
    )
    device = topology.devices[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    with jax.default_device(device):
        jitted = jax.jit(function, in_shardings=sharding, out_shardings=sharding)
        lowered = jitted.trace(*arguments).lower(lowering_platforms=("cuda",))
    return lowered.compile().as_text()


def read_kernel(text: str) -> Kernel | None:
    """Reads what Mosaic prints of a kernel: resources, ptxas's report and the machine code."""
    entries = re.findall(r"entry function '([\w$]+)'", text)
    if len(entries) > 1:
        raise ValueError(f"found the kernels {entries}, expected one: compile each on its own.")
    if not entries:
        return None
    store_loop = innermost_loop(text, TENSOR_MEMORY_LOAD)

    def number(pattern: str) -> int:
        return sum(map(int, re.findall(pattern, text)))

    return Kernel(
        name=entries[0],
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack"),
        spill_bytes=number(r"(\d+) bytes spill"),
        shared_memory_bytes=number(r"smem_scratch_bytes=(\d+)"),
        tensor_memory_columns=number(r"tmem_(?:collective_)?scratch_cols=(\d+)"),
        instructions=count(text.splitlines()),
        multiplications=dict(
            Counter(m[1] for m in INSTRUCTION.finditer(text) if MATRIX.match(m[1]))
        ),
        tile_loop=count(innermost_loop(text, MATRIX)),
        store_loop=count(store_loop),
        load_gaps=gaps(store_loop, TENSOR_MEMORY_LOAD),
        sass=text,
    )


def operands(shape: Any, B: int, dtype: str, *, table: str = "shared") -> tuple[Any, ...]:
    """Returns the shapes and dtypes of the four operands, for B images of a named shape."""
    import jax
    import jax.numpy as jnp

    from pallas_patch_embed.base.problem import padded

    struct, K = jax.ShapeDtypeStruct, padded(shape.K)
    tables = {
        "shared": struct((shape.S, shape.N), jnp.bfloat16),
        "per image": struct((B, shape.S, shape.N), jnp.bfloat16),
        "none": struct((shape.N,), jnp.float32),
    }
    return (
        struct((B, shape.S, K), jnp.dtype(dtype)),
        struct((shape.N, K), jnp.dtype(dtype)),
        struct((shape.N,), jnp.float32),
        tables[table],
    )


def programs(
    shape: Any, images: int, dtype: str, *, out_dtype: str, table: str, backend: str, chip: Chip
) -> Iterator[tuple[str, Callable]]:
    """Yields the operator with each candidate of a backend: the config as text, and a function."""
    from pallas_patch_embed.backends import BACKENDS
    from pallas_patch_embed.base.chips import Target
    from pallas_patch_embed.base.problem import Problem

    problem = Problem.of(*operands(shape, images, dtype, table=table), out_dtype=out_dtype)
    target = Target("cuda", chip)
    for config in BACKENDS[backend].candidates(problem, target):
        yield str(config), BACKENDS[backend].plan(problem, target, config=config).run


def main() -> None:
    """Compiles the operator for some shapes and prints its kernels as JSON, by shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=CHIPS, default="h200")
    parser.add_argument("--backend", default="mosaic_sm90", help="name of a backend")
    parser.add_argument("--shapes", nargs="+", default=["B/16 224"], help="names of shapes")
    parser.add_argument("--images", type=int, default=4736)
    parser.add_argument("--dtype", default="float8_e4m3fn")
    parser.add_argument("--out-dtype", default="bfloat16")
    parser.add_argument("--table", choices=["shared", "per image", "none"], default="shared")
    parser.add_argument(
        "--candidates", action="store_true", help="compiles every config of the search"
    )
    parser.add_argument("--most", type=int, help="compiles at most this many configs")
    parser.add_argument("--sass", type=Path, help="file for the machine code")
    chosen = parser.parse_args()
    found, code = {}, []
    with compiler():
        import functools

        from pallas_patch_embed.base.problem import named_shape
        from pallas_patch_embed.patch_embedding.primitive import patch_embed

        how = dict(out_dtype=chosen.out_dtype, backend=chosen.backend)
        chosen_by_heuristic = functools.partial(patch_embed, geometry=None, **how)
        for name in chosen.shapes:
            shape, chip = named_shape(name), CHIPS[chosen.target]
            ways = [("", chosen_by_heuristic)]
            if chosen.candidates:
                how |= dict(table=chosen.table, chip=chip)
                every = programs(shape, chosen.images, chosen.dtype, **how)
                ways = list(itertools.islice(every, chosen.most))
            arguments = operands(shape, chosen.images, chosen.dtype, table=chosen.table)
            for config, way in ways:
                program = compile_offline(way, arguments, chip)
                described = vars(program.kernel).copy() if program.kernel else {}
                code.append(described.pop("sass", ""))
                found[" ".join(filter(None, (name, config)))] = dict(
                    kernel=described, other_operations=program.other_operations
                )
    if chosen.sass:
        chosen.sass.write_text("\n".join(code))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
