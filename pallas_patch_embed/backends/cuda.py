"""The CUDA backend: the kernels of ffi/ for Hopper and Blackwell, called through XLA's FFI.

The operator is one custom call. It carries the names of two kernels, one for Hopper and one for
Blackwell, and the schedules of both, because a program may be lowered or exported before its chip
is known. The FFI handler checks every operand and launches the kernel for the device on which it
runs. The library itself lists its kernels and says what a launch needs (ffi/configs.h, ffi/plan.h).

The library is loaded at first use, and registered when the operator is first lowered. A process
that only runs exported programs must call `register_cuda_kernels()` first.
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
from pallas_patch_embed.base.chips import B200, B300, H200, Chip, Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.lowering import call_kernel
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import Problem

EVIDENCE = (
    "the tests compare every launch with an independent derivation, and execute the kernels' PTX "
    "in an emulator; on an H200 every element of the Hopper kernels' results was compared; the "
    "Blackwell kernels have not yet run on a GPU."
)

# Name of the custom call.
TARGET = "pallas_patch_embed_cuda"

# The build puts one of two files into this folder: the library, or a text that says why the library
# was not built.
LIBRARY = Path(__file__).with_name("libpatch_embed.so")
BUILD_FAILURE = LIBRARY.with_suffix(".txt")

# Version of the library's functions and JSON fields that this module expects (kInterface in
# ffi/binding.cc).
INTERFACE = 4

# Spelling of each dtype in the names of kernels.
SPELLED = {row.name: row.cuda for row in TABLE.values()}
IMAGES = "u8"

# Constants of the estimated time of a Hopper kernel, in cycles. They were fitted to bursts of 265
# problems on an H100 (docs/experiments/cuda.md).
#   START      of a launch
#   ROW        to load one chunk of a row of patches or of the weight: 64 bytes per cycle
#   COLD       of each of a block's first FIRST chunks, times the blocks that load at the same time
#   EXCHANGE   to receive 1 KiB of partial sums from other blocks
START, ROW, COLD, FIRST, EXCHANGE = 920, 2, 2.8, 12, 220

# Further constants, for ping-pong and for cooperative warpgroups.
#   products   time of the products, relative to the peak of the tensor cores
#   further    cycles of each half tile (ping-pong) or tile (cooperative) but the first, in addition
#              to its products
#   element    cycles to store an element of the last half tile or tile
PINGPONG = dict(products=0.75, further=840, element=0.37)
COOPERATIVE = dict(products=0.92, further=1100, element=0.22)

# Rows times columns whose products of one chunk the tensor cores of a Hopper multiprocessor add up
# in a cycle, at their peak.
PRODUCTS_PER_CYCLE = 32

# The chips that run a kernel, by the number after `sm` in the kernel's name.
CHIPS = {90: (H200,), 100: (B200, B300)}


@dataclasses.dataclass(frozen=True)
class CudaConfig:
    """A kernel of the library, `Config` in ffi/kernel.h.

    Attributes:
      name: name of the kernel, which contains all other fields except `built` and `tuning`.
      capability: 90 or 100, the number after `sm`.
      dtype: dtype of patches and weight, as in SPELLED; IMAGES for uint8 images, with an int8
        weight.
      out_dtype: dtype of the result, as in SPELLED.
      has_table: whether the kernel adds rows of a table (True), or one offset [N] to all rows.
      tile_m: rows of a tile.
      tile_n: columns of N of a worker.
      rows: rows of a tile that one warpgroup (Hopper) or one thread block (Blackwell) multiplies.
      cooperative: whether both warpgroups multiply at the same time. Otherwise one multiplies while
        the other one stores; always on Blackwell.
      blocks: thread blocks of a worker. On Hopper they split K among them, on Blackwell the rows of
        a tile.
      slots: number of slots of the ring of patches.
      stream_weight: whether the weight comes through the ring instead of staying in shared memory.
      built: whether the library contains the kernel.
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
    cooperative: bool
    blocks: int
    slots: int
    stream_weight: bool
    built: bool
    tuning: Tuning | None = None

    def __str__(self) -> str:
        return self.name if self.tuning is None else f"{self.name} with {self.tuning}"

    @property
    def splits(self) -> int:
        """Number of blocks among which the chunks of K are split."""
        return self.blocks if self.capability == 90 else 1

    @property
    def symbol(self) -> str:
        """Name of the kernel's machine code, which does not depend on the number of splits."""
        split = self.splits > 1
        return self.name.replace(f"_b{self.blocks}_", "_split_") if split else self.name

    def serves(self, problem: Problem) -> bool:
        """Returns whether the kernel is built, for the problem's dtypes and kind of table."""
        dtype = IMAGES if problem.cut == "kernel" else SPELLED.get(problem.dtype)
        wanted = dtype, SPELLED[problem.out_dtype], problem.has_table
        return self.built and (self.dtype, self.out_dtype, self.has_table) == wanted

    def grid(self, problem: Problem, chip: Chip) -> Grid:
        """Returns the grid of tiles and workers for a problem."""
        return Grid.of(problem, chip, self.tile_m, self.tile_n, blocks=self.blocks)

    def time(self, problem: Problem, chip: Chip) -> float:
        """Estimates the time of the worker with the most tiles.

        The unit is a cycle on Hopper, and the time to multiply one row by one column on Blackwell.
        """
        grid = self.grid(problem, chip)
        if self.capability != 90:
            a_tile = self.tile_m // self.blocks * self.tile_n + tiles.TILE_OVERHEAD
            return grid.tiles_per_worker * a_tile
        chunks = -(-tiles.chunks(problem) // self.splits)
        streamed = 0
        if self.stream_weight:
            streamed = chunks - self.launch(problem, chip)["staying_chunks"]
        # The units of work: with ping-pong the halves of tiles, each of which streams the weight.
        if self.cooperative:
            units, rows, constants = grid.tiles_per_worker, self.tile_m, COOPERATIVE
        else:
            units, rows, constants = 2 * grid.tiles_per_worker, self.rows, PINGPONG
        products = constants["products"] * chunks * rows * self.tile_n / PRODUCTS_PER_CYCLE
        first = max(ROW * chunks * (rows + self.tile_n), products)
        cold = COLD * min(grid.thread_blocks, chip.multiprocessors) * min(chunks, FIRST)
        other = max(ROW * (chunks * rows + streamed * self.tile_n), products + constants["further"])
        # A block receives the sums of 1 / splits of each tile from each other block.
        sums = 4 * self.tile_m * self.tile_n * (self.splits - 1) / self.splits
        exchange = grid.tiles_per_worker * EXCHANGE * sums / 1024
        last = constants["element"] * rows * self.tile_n
        waves = -(-grid.thread_blocks // chip.multiprocessors)
        return waves * (START + cold + first + (units - 1) * other + last + exchange)

    def launch(self, problem: Problem, chip: Chip) -> dict[str, Any]:
        """Plans a launch for a problem; see the function `launch`."""
        return launch(
            self,
            M=problem.rows,
            N=problem.N,
            K=problem.K,
            period=problem.table_period,
            workers=self.grid(problem, chip).workers,
            segments=1,
            pixels=pixels(problem),
        )

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this kernel cannot serve `problem`."""
        if not self.serves(problem):
            raise NotImplementedError(
                f"{self.name} is for other dtypes or another kind of table, or it is not built."
            )
        planned = self.launch(problem, chip)
        if self.tuning is not None:
            self.check_tuning(planned["shared_memory"], chip)

    def check_tuning(self, shared_memory: int, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if the tuning is impossible for the kernel.

        Args:
          shared_memory: bytes of shared memory that a block of the library's kernel needs.
          chip: the GPU.
        """
        if self.capability != 100:
            raise NotImplementedError(
                f"{self.name} cannot have a tuning, because only Blackwell kernels have one."
            )
        self.tuning.check(self.out_dtype, self.tile_n, self.has_table)
        shared_memory += self.tuning.more_shared_memory(self.out_dtype, self.tile_n)
        if shared_memory > chip.shared_memory:
            raise NotImplementedError(
                f"{self} needs {shared_memory} bytes of shared memory, but a thread block has "
                f"{chip.shared_memory}."
            )
        cuda_tuning.check_available(self.name, self.tuning)


def pixels(problem: Problem) -> tuple[int, int]:
    """Returns height and width of the images that a kernel cuts; zeros if it cuts none."""
    if problem.cut is None or problem.images is None:
        return 0, 0
    *_, height, width, _ = problem.images
    return height, width


# Functions that load and call the library.


@functools.cache
def _is_stale(library: Path) -> bool:
    """Returns whether the library was built from sources other than those in ffi/.

    Returns False if there is no ffi/.
    """
    sources = cuda_build.source_hash()
    return sources is not None and sources.encode() not in library.read_bytes()


def missing() -> str | None:
    """Returns why there is no up-to-date library and how to build it; None if there is one."""
    if not LIBRARY.exists():
        why = BUILD_FAILURE.read_text() if BUILD_FAILURE.exists() else "it was not built"
        return f"its library is missing: {why}. {cuda_build.how_to_build(why)}"
    if _is_stale(LIBRARY):
        return (
            "its library was built from sources other than those in ffi/. Build it again with "
            "`make ffi`."
        )
    return None


def ffi_version() -> tuple[int, int]:
    """Returns the version (major, minor) of XLA's FFI in the installed jaxlib."""
    text = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    major, minor = (
        int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text)[1]) for part in ("MAJOR", "MINOR")
    )
    return major, minor


@functools.cache
def library() -> ctypes.CDLL:
    """Loads the library, which needs no GPU.

    Raises:
      NotImplementedError: there is no library, or it was built from other sources or for another
        version of XLA's FFI. XLA could end the process if such a library were registered.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    return _load(LIBRARY)


def _load(path: Path) -> ctypes.CDLL:
    """Loads a library.

    Raises:
      NotImplementedError: it is for another version of this package or of jaxlib.
    """
    again = "Build it again with `make ffi`, or install the package again."
    try:
        found = ctypes.CDLL(str(path))
        interface = found.patch_embed_interface()
        built = found.patch_embed_ffi_major(), found.patch_embed_ffi_minor()
    except (OSError, AttributeError) as error:
        raise NotImplementedError(f"its library cannot be loaded: {error}. {again}") from error
    if interface != INTERFACE:
        raise NotImplementedError(
            f"its library has interface {interface}, but this package expects {INTERFACE}. {again}"
        )
    try:
        here = ffi_version()
    except (OSError, TypeError) as error:
        raise NotImplementedError(
            f"the version of XLA's FFI in this jaxlib is unknown: {error}."
        ) from error
    # XLA accepts handlers of its own major version whose minor version is not newer.
    if built[0] != here[0] or built > here:
        versions = ["{}.{}".format(*version) for version in (built, here)]
        raise NotImplementedError(
            f"its library was built for version {versions[0]} of XLA's FFI, but this jaxlib has "
            f"version {versions[1]}. {again}"
        )
    return found


@functools.cache
def register_cuda_kernels() -> None:
    """Registers the CUDA kernels with XLA, so that an exported program can call them.

    Lowering the operator registers them too. A process that only runs exported programs must call
    this function before it runs the first one.

    Raises:
      NotImplementedError: there is no library of kernels for this version of the package and of
        jaxlib; the message says why.
    """
    _register(library(), TARGET)


def _register(loaded: ctypes.CDLL, name: str) -> None:
    """Registers a library's kernels with XLA as the custom call with this name."""
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
    """Calls a function of the library that writes JSON, and returns the parsed JSON."""
    function.restype = ctypes.c_int64
    size = function(*arguments, None, ctypes.c_int64(0))
    text = ctypes.create_string_buffer(size)
    function(*arguments, text, ctypes.c_int64(size))
    return json.loads(text.value)


@functools.cache
def _check_driver() -> None:
    """Raises NotImplementedError if this machine's driver is too old for the kernels."""
    if reason := _call_json(library().patch_embed_driver).get("error"):
        raise NotImplementedError(reason)


@functools.cache
def configs() -> tuple[CudaConfig, ...]:
    """Returns all configs, including those of kernels that are not built."""
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
    """Plans a launch for these shapes; returns the fields of `Launch` in ffi/plan.h.

    `pixels` are height and width of the images that the kernel cuts, or zeros for patches.

    Raises:
      NotImplementedError: the kernel cannot serve these shapes.
    """
    shapes = map(ctypes.c_int64, (M, N, K, period, workers, segments, *pixels))
    answer = _call_json(library().patch_embed_plan, config.name.encode(), *shapes)
    if "error" in answer:
        raise NotImplementedError(answer["error"])
    return answer


# Functions that choose and plan a kernel.


def choose_config(problem: Problem, capability: int, chip: Chip) -> CudaConfig:
    """Chooses the kernel for a problem on a chip.

    Args:
      problem: shapes and dtypes.
      capability: the number after `sm` in the names of the chip's kernels.
      chip: the GPU.

    Raises:
      NotImplementedError: no kernel serves the problem.
    """
    return _by_time(problem, capability, chip)[0]


def _by_time(problem: Problem, capability: int, chip: Chip) -> list[CudaConfig]:
    """Returns the kernels that serve a problem, in order of their estimated times.

    A kernel that streams the weight is left out if one with as many columns keeps it in shared
    memory. Arguments and errors are those of `choose_config`.
    """
    if problem.N % 64:
        raise NotImplementedError(f"N is {problem.N}, expected a multiple of 64.")
    if problem.cut == "kernel" and (problem.dtype != "int8" or capability != 90):
        raise NotImplementedError(
            f"it cuts images itself only on Hopper and in int8, but this is {problem.dtype} on "
            f"sm_{capability}."
        )
    found = [c for c in configs() if c.capability == capability and c.serves(problem)]
    if not found:
        raise NotImplementedError(
            f"its library has no kernels for these dtypes on sm_{capability}."
        )
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
    """Returns the kernels that serve, in order of their estimated times, then tunings of the first.

    Only Blackwell kernels have tunings.
    """
    if reason := missing():
        raise NotImplementedError(reason)
    chips = _chips(problem, target)
    tiles.check_operands(problem)
    capability, chip = next(iter(chips.items()))
    found = _by_time(problem, capability, chip)
    return found + _tunings(found[0], problem, chip)


def _tunings(config: CudaConfig, problem: Problem, chip: Chip) -> list[CudaConfig]:
    """Returns copies of a Blackwell kernel with other tunings that can be compiled here.

    A tuning changes how tiles are stored. There are no candidates if K is long, because storing is
    then not the bottleneck, or if the kernel has fewer than 192 columns, because such kernels are
    for problems with one tile per worker.
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
    """Returns the library's kernel with these fields, with the tuning if they include one."""
    known = next((c for c in configs() if c.name == fields.get("name")), None)
    tuning = fields.get("tuning")
    if known is not None and isinstance(tuning, dict):
        known = dataclasses.replace(known, tuning=tiles.config_of(Tuning, tuning))
    if known is None or dataclasses.asdict(known) | {"built": True} != dict(fields):
        found = printable(dict(fields))
        raise ValueError(f"the library has no kernel with the fields {found}.")
    return known


def _chips(problem: Problem, target: Target) -> dict[int, Chip]:
    """Returns the chips for which a program is planned, by the number in their kernels' names."""
    found = {c: tiles.chip_for(target, chips) for c, chips in CHIPS.items()}
    chips = {capability: chip for capability, chip in found.items() if chip is not None}
    if not chips:
        raise NotImplementedError(
            f"it needs compute capability 9.0, 10.0 or 10.3; the target is {target}."
        )
    if target.known:
        (chip,) = chips.values()
        tiles.check_dtype(problem, chip)
    return chips


def plan(problem: Problem, target: Target, *, config: CudaConfig | None = None) -> Plan:
    """Plans a problem with a kernel of the library.

    If the chip is not known, the program names a kernel for each entry of CHIPS.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: the kernel; None to call `choose_config` for each chip.

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
        # A known chip is most likely in this machine, whose driver will then run the program.
        _check_driver()
    grids = {capability: c.grid(problem, chips[capability]) for capability, c in chosen.items()}

    def compute(patches, *rest):
        # A chip without a kernel gets an empty name and the schedule of another chip. To make a
        # schedule of zeros XLA would launch one more kernel, which takes 0.7 us of 4 us on an H200.
        names = {f"kernel_sm{c}": chosen[c].name if c in chosen else "" for c in CHIPS}
        made = {c: grid.schedule(problem.table_period) for c, grid in grids.items()}
        schedules = [made.get(c, next(iter(made.values()))) for c in CHIPS]
        if config is not None and config.tuning is not None:
            name = _register_tuned(config.name, config.tuning)
        else:
            name = TARGET
            register_cuda_kernels()
        result = jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype)
        call = functools.partial(jax.ffi.ffi_call(name, result), **names)
        shape = (problem.rows, problem.K) if problem.cut is None else (-1, *problem.images[-3:])
        operands = (patches.reshape(shape), *rest, *map(jnp.asarray, schedules))
        return call_kernel(call, *operands, accepts_slices=True)

    names = list(map(str, chosen.values()))
    cuts = problem.cut == "kernel"
    return Plan(
        lambda *operands: tiles.flatten_leading_axes(problem, operands, compute),
        config=", ".join([*names, "cuts images itself"] if cuts else names),
        takes_images=cuts,
    )
