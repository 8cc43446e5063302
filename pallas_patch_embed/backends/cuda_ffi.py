"""The kernels of ffi/, in CUDA C++, called through XLA's FFI: for Hopper and for Blackwell.

The operator is one custom call. It carries the names of two kernels, one for each chip, and the
runs of tiles of both, because a program may be lowered or exported where nobody knows the chip: the
handler takes those of the device that it runs on, and checks every operand before. What kernels
there are, and what a launch of one takes, is the library's knowledge (ffi/configs.h, ffi/plan.h).

The library is loaded at first use, and registered when the operator is first lowered. A program
that was exported and is run where nothing is lowered needs `register()` first.
"""

import ctypes
import dataclasses
import functools
import json
import math
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.backends import cuda_build, mosaic_sm90, mosaic_sm100, schedule, tiling
from pallas_patch_embed.problem import Problem, Target

EVIDENCE = (
    "every launch compared with an independent derivation, and the kernels' PTX executed by an "
    "emulator in the tests; for Hopper every element of the results compared on an H200, for "
    "Blackwell not yet run on such a GPU."
)

# The name of the custom call.
TARGET = "pallas_patch_embed_cuda"

# What the build leaves beside this file: the library, or a text that says why there is none.
LIBRARY = Path(__file__).with_name("libpatch_embed.so")
WHY_NOT = LIBRARY.with_suffix(".txt")

# Of what this module and the library say to each other; kInterface in ffi/binding.cc.
INTERFACE = 1

# As the names of the kernels have the types.
SPELLED = {"float8_e4m3fn": "e4m3", "int8": "i8", "bfloat16": "bf16", "float32": "f32"}


@dataclasses.dataclass(frozen=True)
class Chip:
    """What the kernels of one chip are for.

    Attributes:
      capability: as the kernels' names have it.
      compute_capabilities: of the GPUs that they run on.
      multiprocessors: of such a GPU, where there is none to ask.
    """

    capability: int
    compute_capabilities: tuple[tuple[int, int], ...]
    multiprocessors: int

    def blocks(self) -> int:
        """How many thread blocks run at the same time."""
        here = Target.of(jax.devices()[0]).compute_capability in self.compute_capabilities
        return tiling.multiprocessors(self.multiprocessors) if here else self.multiprocessors


CHIPS = (
    Chip(90, (mosaic_sm90.COMPUTE_CAPABILITY,), mosaic_sm90.MULTIPROCESSORS),
    Chip(100, mosaic_sm100.COMPUTE_CAPABILITIES, mosaic_sm100.MULTIPROCESSORS),
)


@dataclasses.dataclass(frozen=True)
class Config:
    """A kernel of the library; `Config` in ffi/kernel.h.

    Attributes:
      name: of the kernel, which tells the rest.
      capability: 90 or 100.
      dtype: of patches and weight, as in SPELLED.
      out_dtype: of the result, as in SPELLED.
      has_table: whether it adds rows of a table instead of one row of offsets.
      tile_n: columns of N of a worker.
      rows: of a warpgroup's (Hopper) or a thread block's (Blackwell) share of a tile.
      blocks: thread blocks of a worker.
      slots: depth of the ring of patches.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
      built: whether the library has it.
    """

    name: str
    capability: int
    dtype: str
    out_dtype: str
    has_table: bool
    tile_n: int
    rows: int
    blocks: int
    slots: int
    stream_weight: bool
    built: bool

    @property
    def chip(self) -> Chip:
        return next(chip for chip in CHIPS if chip.capability == self.capability)

    @property
    def tile_m(self) -> int:
        """Rows of a tile."""
        return self.rows * (mosaic_sm90.CONSUMERS if self.capability == 90 else self.blocks)

    def serves(self, problem: Problem) -> bool:
        """Whether it is built, and for the dtypes and the kind of table of a problem."""
        wanted = SPELLED.get(problem.dtype), SPELLED[problem.out_dtype], len(problem.table) > 1
        return self.built and (self.dtype, self.out_dtype, self.has_table) == wanted

    def slices(self, problem: Problem) -> int:
        """Into how many slices N is cut."""
        return problem.N // self.tile_n

    def tiles(self, problem: Problem) -> int:
        """Tiles of a slice of N."""
        return -(-math.prod(problem.patches[:-1]) // self.tile_m)

    def workers(self, problem: Problem) -> int:
        """Workers of a slice of N: as many as run at the same time, or as there are tiles."""
        most = self.chip.blocks() // self.blocks // max(self.slices(problem), 1)
        return max(1, min(most, self.tiles(problem)))

    def time(self, problem: Problem) -> int:
        """Of the worker with the most tiles, in products of a row and a column of a block."""
        a_tile = self.tile_m // self.blocks * self.tile_n + mosaic_sm90.TILE_OVERHEAD
        return -(-self.tiles(problem) // self.workers(problem)) * a_tile

    def check(self, problem: Problem) -> None:
        """Raises NotImplementedError with the reason if this kernel cannot serve `problem`."""
        if not self.serves(problem):
            raise NotImplementedError(f"{self.name} is another problem's kernel, or not built.")
        launch(
            self,
            M=math.prod(problem.patches[:-1]),
            N=problem.N,
            K=problem.patches[-1],
            period=tiling.table_period(problem),
            workers=self.workers(problem),
            runs=1,
        )


# The library.


@functools.cache
def _is_stale(library: Path) -> bool:
    """Whether it was built from other sources than those in ffi/; False if there is no ffi/."""
    sources = cuda_build.source_hash()
    return sources is not None and sources.encode() not in library.read_bytes()


def missing() -> str | None:
    """Why there is no library of these sources, and what builds it; None if there is one."""
    if not LIBRARY.exists():
        why = WHY_NOT.read_text() if WHY_NOT.exists() else "it was not built"
        return f"its library is missing: {why}. {cuda_build.how_to_build(why)}"
    if _is_stale(LIBRARY):
        return "its library was built from other sources than those in ffi/. `make ffi` builds it."
    return None


def ffi_version() -> tuple[int, int]:
    """The version of XLA's FFI that the installed jaxlib has."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    )
    return major, minor


@functools.cache
def library() -> ctypes.CDLL:
    """The library; loading it needs no GPU.

    Raises:
      NotImplementedError: there is none, or it is of other sources or another version. Registered,
        that could take the process down.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    again = "Build it again with `make ffi`, or install the package again."
    try:
        found = ctypes.CDLL(str(LIBRARY))
        interface = found.patch_embed_interface()
        built = found.patch_embed_ffi_major(), found.patch_embed_ffi_minor()
    except (OSError, AttributeError) as error:
        raise NotImplementedError(f"its library cannot be loaded: {error}. {again}") from error
    if interface != INTERFACE:
        raise NotImplementedError(
            f"its library has interface {interface}, this package {INTERFACE}. {again}"
        )
    try:
        here = ffi_version()
    except (OSError, TypeError) as error:
        raise NotImplementedError(
            f"the version of XLA's FFI in this jaxlib is unknown: {error}."
        ) from error
    # XLA takes handlers of its own version and of older ones.
    if built[0] != here[0] or built > here:
        versions = ["{}.{}".format(*version) for version in (built, here)]
        raise NotImplementedError(
            f"its library was built for version {versions[0]} of XLA's FFI, this jaxlib has "
            f"{versions[1]}. {again}"
        )
    return found


@functools.cache
def register() -> None:
    """Makes the kernels known to XLA; the operator's lowering does it by itself."""
    stages = {
        "initialize": jax.ffi.pycapsule(library().patch_embed_initialize),
        "execute": jax.ffi.pycapsule(library().patch_embed_execute),
    }
    jax.ffi.register_ffi_target(TARGET, stages, platform="CUDA")


def _answer(function, *arguments):
    """What a function of the library that writes JSON says."""
    function.restype = ctypes.c_int64
    size = function(*arguments, None, ctypes.c_int64(0))
    text = ctypes.create_string_buffer(size)
    function(*arguments, text, ctypes.c_int64(size))
    return json.loads(text.value)


@functools.cache
def _check_driver() -> None:
    """Raises NotImplementedError if there is a driver, and it is too old for the kernels."""
    if reason := _answer(library().patch_embed_driver).get("error"):
        raise NotImplementedError(reason)


@functools.cache
def configs() -> tuple[Config, ...]:
    """All configs, also those of kernels that are not built."""
    return tuple(Config(**fields) for fields in _answer(library().patch_embed_kernels))


def launch(
    config: Config, *, M: int, N: int, K: int, period: int, workers: int, runs: int
) -> dict[str, object]:
    """What the handler launches for these shapes: `Launch` in ffi/plan.h.

    Raises:
      NotImplementedError: the kernel cannot serve them.
    """
    shapes = map(ctypes.c_int64, (M, N, K, period, workers, runs))
    answer = _answer(library().patch_embed_plan, config.name.encode(), *shapes)
    if "error" in answer:
        raise NotImplementedError(answer["error"])
    return answer


# The backend.


def choose_config(problem: Problem, chip: Chip) -> Config:
    """The kernel for a problem: a function of shapes, dtypes, and the GPU's multiprocessors.

    Raises:
      NotImplementedError: no kernel serves the problem.
    """
    if problem.N % 64:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")
    found = [c for c in configs() if c.capability == chip.capability and c.serves(problem)]
    if not found:
        raise NotImplementedError(f"its library has no such kernels for sm_{chip.capability}.")
    fitting, reasons = [], []
    for config in found:
        try:
            config.check(problem)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            fitting.append(config)
    if not fitting:
        raise NotImplementedError(reasons[-1])
    stationary = {(c.tile_n, c.blocks) for c in fitting if not c.stream_weight}
    candidates = (
        c for c in fitting if not c.stream_weight or (c.tile_n, c.blocks) not in stationary
    )
    return min(candidates, key=lambda c: (c.time(problem), c.blocks))


def _chosen(problem: Problem, chips: tuple[Chip, ...]) -> list[Config]:
    """The kernels for those of the chips that have one; raises if none has."""
    found, reasons = [], []
    for chip in chips:
        try:
            found.append(choose_config(problem, chip))
        except NotImplementedError as error:
            reasons.append(str(error))
    if not found:
        raise NotImplementedError(reasons[0])
    return found


def why_not(problem: Problem, target: Target | None) -> str | None:
    """The reason why these kernels cannot serve; None if they can."""
    if reason := missing():
        return reason
    chips: tuple[Chip, ...] = CHIPS
    if target is not None:
        chips = tuple(c for c in CHIPS if target.compute_capability in c.compute_capabilities)
        if not chips:
            return f"it needs compute capability 9.0, 10.0 or 10.3; this is {target}."
        if target.compute_capability == (10, 3) and problem.dtype == "int8":
            return "compute capability 10.3 has no int8 tensor cores (tcgen05 kind::i8)."

    def choose(problem: Problem) -> None:
        _chosen(problem, chips)
        # The chip is known, so it is most likely this machine's.
        if target is not None:
            _check_driver()

    return tiling.why_not(problem, choose)


def why_rather_not(problem: Problem) -> tuple[str, str] | None:
    """The backend that is faster, and why; None if none is known to be."""
    return tiling.why_rather_not(problem)


def run(
    patches: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    table: jax.Array,
    *,
    out_dtype: str,
    target: Target | None = None,
    config: Config | None = None,
) -> jax.Array:
    """The operator as `mosaic.launch` has it, by a kernel of the library.

    Args:
      patches: [..., S, K] float8_e4m3fn, bfloat16 or int8.
      weight: [N, K] of the same dtype.
      scale: [N] float32.
      table: [S, N] bfloat16, with leading axes if images have tables of their own, or [N] float32.
      out_dtype: "bfloat16" or "float32".
      target: of no importance, the program has kernels for both chips.
      config: the kernel; None for that of `choose_config`, for each chip.

    Returns:
      [..., S, N] of out_dtype.
    """
    problem = Problem.of(patches, weight, scale, table, out_dtype=out_dtype)
    tiling.check_operands(problem)
    chosen = [config] if config else _chosen(problem, CHIPS)
    for one in chosen:
        one.check(problem)

    def compute(M, patches, *rest):
        # A chip without a kernel has no name, and no runs.
        kernels = {f"kernel_sm{chip.capability}": "" for chip in CHIPS}
        runs = {chip.capability: np.zeros((1, 1, 4), np.int32) for chip in CHIPS}
        period = tiling.table_period(problem)
        for one in chosen:
            kernels[f"kernel_sm{one.capability}"] = one.name
            runs[one.capability] = schedule.runs(M, period, one.tile_m, one.workers(problem))
        register()
        call = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((M, problem.N), out_dtype))
        return call(patches.reshape(M, -1), *rest, *map(jnp.asarray, runs.values()), **kernels)

    return tiling.in_rows(problem, (patches, weight, scale, table), compute)
