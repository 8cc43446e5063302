"""The CUDA backend: the kernels of ffi/ for Hopper and Blackwell, called through XLA's FFI.

The operator is one custom call. It carries the names of two kernels, one for Hopper and one for
Blackwell, and the schedules of both, because a program may be lowered or exported before its chip
is known. The handler checks every operand and launches the kernel of the device that it runs on.
The library itself says which kernels it has and what a launch needs (ffi/configs.h, ffi/plan.h).

The library is loaded at first use, and registered when the operator is first lowered. A process
that only runs exported programs calls `register_cuda_kernels()` first.
"""

import contextlib
import ctypes
import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_patch_embed.backends import cuda_build, cuda_tuning, tiles
from pallas_patch_embed.backends.cuda_tuning import Tuning
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Grid
from pallas_patch_embed.chips import B200, B300, H200, Chip, Target
from pallas_patch_embed.problem import Problem

EVIDENCE = (
    "every launch compared with an independent derivation, and the kernels' PTX executed by an "
    "emulator in the tests; for Hopper every element of the results compared on an H200, for "
    "Blackwell not yet run on such a GPU."
)

# The name of the custom call.
TARGET = "pallas_patch_embed_cuda"

# The build puts one of these into this folder: the library, or a text that says why there is none.
LIBRARY = Path(__file__).with_name("libpatch_embed.so")
BUILD_FAILURE = LIBRARY.with_suffix(".txt")

# Version of the functions and JSON fields that this module expects of the library; kInterface in
# ffi/binding.cc.
INTERFACE = 3

# How the kernels' names spell dtypes.
SPELLED = {"float8_e4m3fn": "e4m3", "int8": "i8", "bfloat16": "bf16", "float32": "f32"}
IMAGES = "u8"

# The number after `sm` in a kernel's name -> the chips that run the kernel.
CHIPS = {90: (H200,), 100: (B200, B300)}


@dataclasses.dataclass(frozen=True)
class CudaConfig:
    """A kernel of the library; `Config` in ffi/kernel.h.

    Attributes:
      name: name of the kernel; it spells all other fields except `built` and `tuning`.
      capability: 90 or 100.
      dtype: dtype of patches and weight, as in SPELLED; IMAGES for images, with a weight of int8.
      out_dtype: dtype of the result, as in SPELLED.
      has_table: whether it adds rows of a table instead of one row of offsets.
      tile_m: rows of a tile.
      tile_n: columns of N of a worker.
      rows: rows of a tile that one warpgroup (Hopper) or one thread block (Blackwell) multiplies.
      blocks: thread blocks of a worker.
      slots: depth of the ring of patches.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
      built: whether the library contains it.
      tuning: tuning of a kernel that is compiled on demand; None for a kernel of the library.
    """

    name: str
    capability: int
    dtype: str
    out_dtype: str
    has_table: bool
    tile_m: int
    tile_n: int
    rows: int
    blocks: int
    slots: int
    stream_weight: bool
    built: bool
    tuning: Tuning | None = None

    def __str__(self) -> str:
        return self.name if self.tuning is None else f"{self.name} with {self.tuning}"

    def serves(self, problem: Problem) -> bool:
        """Whether it is built for the dtypes and the kind of table of a problem."""
        dtype = IMAGES if problem.cut == "kernel" else SPELLED.get(problem.dtype)
        wanted = dtype, SPELLED[problem.out_dtype], problem.has_table
        return self.built and (self.dtype, self.out_dtype, self.has_table) == wanted

    def grid(self, problem: Problem, chip: Chip) -> Grid:
        """The workers and their tiles."""
        return Grid.of(problem, chip, self.tile_m, self.tile_n, blocks=self.blocks)

    def time(self, problem: Problem, chip: Chip) -> int:
        """Estimated time of the worker with the most tiles, in products of a row and a column."""
        a_tile = self.tile_m // self.blocks * self.tile_n + tiles.TILE_OVERHEAD
        return self.grid(problem, chip).tiles_per_worker * a_tile

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this kernel cannot serve `problem`."""
        if not self.serves(problem):
            raise NotImplementedError(f"{self.name} is for other dtypes, or not built.")
        planned = launch(
            self,
            M=problem.rows,
            N=problem.N,
            K=problem.K,
            period=problem.table_period,
            workers=self.grid(problem, chip).workers,
            segments=1,
            pixels=pixels(problem),
        )
        if self.tuning is not None:
            self.check_tuning(planned["shared_memory"], chip)

    def check_tuning(self, shared_memory: int, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if the tuning does not fit the kernel.

        `shared_memory` is that of a block of the library's kernel, in bytes.
        """
        if self.capability != 100:
            raise NotImplementedError(f"{self.name} has no tuning: it is not for Blackwell.")
        self.tuning.check(self.out_dtype, self.tile_n, self.has_table)
        shared_memory += self.tuning.more_shared_memory(self.out_dtype, self.tile_n)
        if shared_memory > chip.shared_memory:
            raise NotImplementedError(
                f"{self} needs {shared_memory} bytes of shared memory, there are "
                f"{chip.shared_memory}."
            )
        cuda_tuning.check_available(self.name, self.tuning)


def pixels(problem: Problem) -> tuple[int, int]:
    """Height and width of the images that a kernel cuts; zeros if it does not."""
    if problem.cut is None or problem.images is None:
        return 0, 0
    *_, height, width, _ = problem.images
    return height, width


# The library.


@functools.cache
def _is_stale(library: Path) -> bool:
    """Whether the library's sources differ from those in ffi/; False if there is no ffi/."""
    sources = cuda_build.source_hash()
    return sources is not None and sources.encode() not in library.read_bytes()


def missing() -> str | None:
    """Why there is no library of these sources, and how to build it; None if there is one."""
    if not LIBRARY.exists():
        why = BUILD_FAILURE.read_text() if BUILD_FAILURE.exists() else "it was not built"
        return f"its library is missing: {why}. {cuda_build.how_to_build(why)}"
    if _is_stale(LIBRARY):
        return "its library was built from other sources than those in ffi/. `make ffi` builds it."
    return None


def ffi_version() -> tuple[int, int]:
    """The version of XLA's FFI in the installed jaxlib."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    )
    return major, minor


@functools.cache
def library() -> ctypes.CDLL:
    """The library; loading it needs no GPU.

    Raises:
      NotImplementedError: there is none, or it was built from other sources or for another version
        of XLA's FFI. XLA could end the process if such a library were registered.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    return _load(LIBRARY)


def _load(path: Path) -> ctypes.CDLL:
    """Loads a library; raises NotImplementedError if it is for another package or jaxlib."""
    again = "Build it again with `make ffi`, or install the package again."
    try:
        found = ctypes.CDLL(str(path))
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
def register_cuda_kernels() -> None:
    """Makes the CUDA kernels known to XLA, so that an exported program can call them.

    The operator's own lowering does it by itself. A process that only runs exported programs calls
    this function before the first of them.

    Raises:
      NotImplementedError: there is no library of kernels that fits; the message says why.
    """
    _register(library(), TARGET)


def _register(loaded: ctypes.CDLL, name: str) -> None:
    """Makes a library's kernels known to XLA as the custom call of this name."""
    stages = {
        "initialize": jax.ffi.pycapsule(loaded.patch_embed_initialize),
        "execute": jax.ffi.pycapsule(loaded.patch_embed_execute),
    }
    jax.ffi.register_ffi_target(name, stages, platform="CUDA")


@functools.cache
def _register_tuned(kernel: str, tuning: Tuning) -> str:
    """Compiles and registers a kernel with a tuning; returns the name of its custom call."""
    path = cuda_tuning.build(kernel, tuning)
    name = f"{TARGET}_{path.stem}"
    _register(_load(path), name)
    return name


def _call_json(function, *arguments):
    """Calls a function of the library that writes JSON, and returns what it wrote."""
    function.restype = ctypes.c_int64
    size = function(*arguments, None, ctypes.c_int64(0))
    text = ctypes.create_string_buffer(size)
    function(*arguments, text, ctypes.c_int64(size))
    return json.loads(text.value)


@functools.cache
def _check_driver() -> None:
    """Raises NotImplementedError if this machine has a driver that is too old for the kernels."""
    if reason := _call_json(library().patch_embed_driver).get("error"):
        raise NotImplementedError(reason)


@functools.cache
def configs() -> tuple[CudaConfig, ...]:
    """All configs, including those of kernels that are not built."""
    return tuple(CudaConfig(**fields) for fields in _call_json(library().patch_embed_kernels))


def launch(
    config: CudaConfig,
    *,
    M: int,
    N: int,
    K: int,
    period: int,
    workers: int,
    segments: int,
    pixels: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """The launch for these shapes: `Launch` in ffi/plan.h.

    `pixels` are height and width of the images that the kernel cuts, zeros if there are patches.

    Raises:
      NotImplementedError: the kernel cannot serve them.
    """
    shapes = map(ctypes.c_int64, (M, N, K, period, workers, segments, *pixels))
    answer = _call_json(library().patch_embed_plan, config.name.encode(), *shapes)
    if "error" in answer:
        raise NotImplementedError(answer["error"])
    return answer


# The backend.


def choose_config(problem: Problem, capability: int, chip: Chip) -> CudaConfig:
    """The kernel for a problem on a chip.

    Args:
      problem: shapes and dtypes.
      capability: the number after `sm` in the names of the chip's kernels.
      chip: the GPU.

    Raises:
      NotImplementedError: no kernel serves the problem.
    """
    return _by_time(problem, capability, chip)[0]


def _by_time(problem: Problem, capability: int, chip: Chip) -> list[CudaConfig]:
    """The kernels that serve a problem, the fastest by estimate first; as `choose_config`.

    Where the weight can be stationary, kernels that stream it are left out.
    """
    if problem.N % 64:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")
    if problem.cut == "kernel" and (problem.dtype != "int8" or capability != 90):
        raise NotImplementedError(
            f"it cuts images itself on Hopper and with int8 alone; this is {problem.dtype} on "
            f"sm_{capability}."
        )
    found = [c for c in configs() if c.capability == capability and c.serves(problem)]
    if not found:
        raise NotImplementedError(f"its library has no such kernels for sm_{capability}.")
    fitting, reasons = [], []
    for config in found:
        try:
            config.check(problem, chip)
        except NotImplementedError as error:
            reasons.append(str(error))
        else:
            fitting.append(config)
    if not fitting:
        raise NotImplementedError(reasons[-1])
    stationary = {(c.tile_n, c.blocks) for c in fitting if not c.stream_weight}
    kept = (c for c in fitting if not c.stream_weight or (c.tile_n, c.blocks) not in stationary)
    return sorted(kept, key=lambda c: (c.time(problem, chip), c.blocks))


def candidates(problem: Problem, target: Target) -> list[CudaConfig]:
    """The kernels that serve, the fastest by estimate first; then its tunings, if it has some."""
    if reason := missing():
        raise NotImplementedError(reason)
    chips = _chips(problem, target)
    tiles.check_operands(problem)
    capability, chip = next(iter(chips.items()))
    found = _by_time(problem, capability, chip)
    return found + _tunings(found[0], problem, chip)


def _tunings(config: CudaConfig, problem: Problem, chip: Chip) -> list[CudaConfig]:
    """A Blackwell kernel with the other tunings that can be compiled for it here.

    A tuning changes how tiles are stored. Storing does not bind where K is long; kernels narrower
    than 192 columns are for problems of one tile a worker.
    """
    if config.capability != 100 or config.tile_n < 192 or tiles.chunks(problem) > 12:
        return []
    found = []
    for tuning in Tuning.of_library(config.out_dtype, config.tile_n).variants():
        tuned = dataclasses.replace(config, tuning=tuning)
        with contextlib.suppress(NotImplementedError):
            tuned.check(problem, chip)
            found.append(tuned)
    return found


def config_of(fields: Mapping[str, Any]) -> CudaConfig:
    """The library's kernel with these fields, with a tuning if they name one."""
    known = next((c for c in configs() if c.name == fields.get("name")), None)
    tuning = fields.get("tuning")
    if known is not None and isinstance(tuning, dict):
        known = dataclasses.replace(known, tuning=tiles.config_of(Tuning, tuning))
    if known is None or dataclasses.asdict(known) | {"built": True} != dict(fields):
        raise ValueError(f"the library has no kernel {dict(fields)}.")
    return known


def _chips(problem: Problem, target: Target) -> dict[int, Chip]:
    """The chips that a program is planned for, by the number after `sm` in their kernels' names."""
    found = {c: tiles.chip_for(target, chips) for c, chips in CHIPS.items()}
    chips = {capability: chip for capability, chip in found.items() if chip is not None}
    if not chips:
        raise NotImplementedError(
            f"it needs compute capability 9.0, 10.0 or 10.3; this is {target}."
        )
    if target.known:
        (chip,) = chips.values()
        tiles.check_dtype(problem, chip)
    return chips


def plan(problem: Problem, target: Target, *, config: CudaConfig | None = None) -> Plan:
    """How a kernel of the library computes a problem.

    If the chip is not known, the program names a kernel for each of CHIPS.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: the kernel; None for `choose_config`'s, for each chip.

    Raises:
      NotImplementedError: no kernel serves the problem, or there is no library; the message is the
        reason.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    chips = _chips(problem, target)
    tiles.check_operands(problem)
    chosen: dict[int, CudaConfig] = {}
    if config is not None:
        if config.capability not in chips:
            raise NotImplementedError(f"{config.name} is not for {target}.")
        config.check(problem, chips[config.capability])
        chosen = {config.capability: config}
    else:
        reasons = []
        for capability, chip in chips.items():
            try:
                chosen[capability] = choose_config(problem, capability, chip)
            except NotImplementedError as error:
                reasons.append(str(error))
        if not chosen:
            raise NotImplementedError(reasons[0])
    if target.known:
        # The chip is most likely in this machine, and so is its driver.
        _check_driver()
    grids = {capability: c.grid(problem, chips[capability]) for capability, c in chosen.items()}

    def compute(patches, *rest):
        # A chip without a kernel gets an empty name, and the schedule of another one: XLA would
        # compute zeros by a kernel of their own, which is 0.7 us of 4 on an H200.
        names = {f"kernel_sm{c}": chosen[c].name if c in chosen else "" for c in CHIPS}
        made = {c: grid.schedule(problem.table_period) for c, grid in grids.items()}
        schedules = [made.get(c, next(iter(made.values()))) for c in CHIPS]
        if config is not None and config.tuning is not None:
            name = _register_tuned(config.name, config.tuning)
        else:
            name = TARGET
            register_cuda_kernels()
        result = jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype)
        call = jax.ffi.ffi_call(name, result)
        shape = (problem.rows, problem.K) if problem.cut is None else (-1, *problem.images[-3:])
        patches = patches.reshape(shape)
        return call(patches, *rest, *map(jnp.asarray, schedules), **names)

    names = list(map(str, chosen.values()))
    cuts = problem.cut == "kernel"
    return Plan(
        lambda *operands: tiles.flatten_leading_axes(problem, operands, compute),
        config=", ".join([*names, "cuts images itself"] if cuts else names),
        takes_images=cuts,
    )
