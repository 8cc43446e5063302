"""The CUDA backend: the kernels of ffi/ for Hopper and Blackwell, called through XLA's FFI.

The operator is one custom call. It carries the name and the schedule of a kernel for each
architecture that may run it, because a program may be lowered or exported before its chip is known.
The FFI handler checks every operand and launches the kernel for the device on which it runs. The
library itself lists its kernels and says what a launch needs (ffi/architectures.h, ffi/launch.h).

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

from pallas_patch_embed.backends import cuda_build, cuda_tuning, tiles, time_model
from pallas_patch_embed.backends.cuda_tuning import Tuning
from pallas_patch_embed.backends.plan import Plan
from pallas_patch_embed.backends.tiles import Tiling
from pallas_patch_embed.backends.time_model import Work, work_of
from pallas_patch_embed.base.chips import CHIPS, Chip, Target
from pallas_patch_embed.base.dtypes import TABLE
from pallas_patch_embed.base.lowering import call_kernel
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import Problem

# Name of the custom call.
TARGET = "pallas_patch_embed_cuda"

# The build puts one of two files into this folder: the library, or a text that says why the library
# was not built.
LIBRARY = Path(__file__).with_name("libpatch_embed.so")
BUILD_FAILURE = LIBRARY.with_suffix(".txt")

# Version of the library's functions and JSON fields that this module expects (kInterface in
# ffi/binding.cc).
INTERFACE = 5

# Spelling of each dtype in the names of kernels.
SPELLED = {row.name: row.cuda for row in TABLE.values()}
IMAGES = "u8"

# Cycles in which TMA loads a chunk of a patch from an image on Hopper, in rows of 96 bytes (the
# lines of two patches) or of 48 bytes (kernel.h). On Blackwell all rows have 48 bytes.
PIXELS, ODD_PIXELS = 4.3 * 128 / 96, 3.2 * 128 / 48

# Products of Blackwell's kernel relative to those of patches, if it cuts images: a line of a patch
# has 48 bytes, and is multiplied as 64.
PADDED_LINE = 64 / 48

# The architecture for which times are estimated in detail. For others only tiles are counted.
HOPPER = 90

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


@dataclasses.dataclass(frozen=True)
class CudaConfig:
    """A kernel of the library, `Config` in ffi/kernel.h.

    Attributes:
      name: name of the kernel, which contains all other fields except `built` and `tuning`.
      capability: the kernel's architecture, the number after `sm`.
      dtype: dtype of patches and weight, as in SPELLED; IMAGES for uint8 images, with an int8
        weight.
      out_dtype: dtype of the result, as in SPELLED.
      has_table: whether the kernel adds rows of a table (True), or one offset [N] to all rows.
      tile_m: rows of a tile.
      tile_n: columns of N of a worker.
      rows: rows of a tile that one warpgroup (Hopper) or one thread block (Blackwell) multiplies.
      cooperative: whether both warpgroups multiply at the same time. Otherwise one multiplies while
        the other one stores; always on Blackwell.
      blocks: thread blocks of a worker. They split K among them; on Blackwell two of them can be a
        pair instead, which shares the rows of a tile.
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
        return _splits()[self.name]

    @property
    def symbol(self) -> str:
        """Name of the kernel's machine code, which does not depend on the number of splits."""
        return re.sub(r"_(b|split)\d_", "_split_", self.name) if self.splits > 1 else self.name

    @property
    def operands(self) -> tuple[str, str, bool]:
        """The kernel's dtypes and kind of table, as `_operands` has those of a problem."""
        return self.dtype, self.out_dtype, self.has_table

    def tiling(self, problem: Problem, chip: Chip) -> Tiling:
        """Returns the tiles and workers for a problem."""
        return Tiling.of(problem, chip, self.tile_m, self.tile_n, blocks=self.blocks)

    def time(self, problem: Problem, chip: Chip) -> float:
        """Estimates the time of the worker with the most tiles.

        The unit is a cycle on Hopper. On others it is the time to multiply one row by one column,
        and a split of K does not count.
        """
        tiling = self.tiling(problem, chip)
        if self.capability != HOPPER:
            return tiling.tiles_per_worker * (self.rows * self.tile_n + tiles.TILE_OVERHEAD)
        chunks = -(-tiles.chunks(problem) // self.splits)
        streamed = 0
        if self.stream_weight:
            streamed = chunks - self.launch(problem, chip)["staying_chunks"]
        # The units of work: with ping-pong the halves of tiles, each of which streams the weight.
        if self.cooperative:
            units, rows, constants = tiling.tiles_per_worker, self.tile_m, COOPERATIVE
        else:
            units, rows, constants = 2 * tiling.tiles_per_worker, self.rows, PINGPONG
        products = constants["products"] * chunks * rows * self.tile_n / PRODUCTS_PER_CYCLE
        first = max(ROW * chunks * (rows + self.tile_n), products)
        cold = COLD * min(tiling.thread_blocks, chip.multiprocessors) * min(chunks, FIRST)
        other = max(ROW * (chunks * rows + streamed * self.tile_n), products + constants["further"])
        # A block receives the sums of 1 / splits of each tile from each other block.
        sums = 4 * self.tile_m * self.tile_n * (self.splits - 1) / self.splits
        exchange = tiling.tiles_per_worker * EXCHANGE * sums / 1024
        last = constants["element"] * rows * self.tile_n
        waves = -(-tiling.thread_blocks // chip.multiprocessors)
        return waves * (START + cold + first + (units - 1) * other + last + exchange)

    def work(self, problem: Problem, chip: Chip) -> Work:
        """Returns the work of a launch, from which its time is predicted."""
        hopper = self.capability == HOPPER
        passes = 2 if hopper and not self.cooperative else 1
        tiling, chunks = self.tiling(problem, chip), tiles.chunks(problem)
        streamed = pixels = 0.0
        if self.stream_weight:
            streamed = 1 - self.launch(problem, chip)["staying_chunks"] / chunks
        if problem.images is not None:
            *_, width, _ = problem.images
            odd = width // problem.geometry.patch_size % 2 or not hopper
            rows = self.tile_m if hopper else self.rows
            pixels = rows * chunks * (ODD_PIXELS if odd else PIXELS)
        work = work_of(
            problem,
            chip,
            tiling,
            tile_n=self.tile_n,
            slots=self.slots,
            rows=self.tile_m // passes if hopper else self.rows,
            columns=self.tile_n * self.splits // self.blocks,
            passes=passes,
            splits=self.splits,
            streamed=streamed,
            pixels=pixels,
        )
        if problem.images is None or hopper:
            return work
        # The corrections of the pixels take as many products as a tile.
        factor = PADDED_LINE * (1 + 1 / tiling.tiles_per_worker)
        return dataclasses.replace(work, products=factor * work.products)

    def microseconds(self, problem: Problem, chip: Chip) -> float:
        """Predicts the time of a launch."""
        hopper = self.capability == HOPPER
        constants = time_model.CUDA_SM90 if hopper else time_model.CUDA_SM100
        return time_model.microseconds(self.work(problem, chip), constants, problem.dtype)

    def launch(self, problem: Problem, chip: Chip) -> dict[str, Any]:
        """Plans a launch for a problem; see the function `launch`."""
        return launch(
            self,
            M=problem.rows,
            N=problem.N,
            K=problem.K,
            period=problem.table_period,
            workers=self.tiling(problem, chip).workers,
            segments=1,
            pixels=pixels(problem),
        )

    def check(self, problem: Problem, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if this kernel cannot serve `problem`."""
        if not self.built or self.operands != _operands(problem):
            raise NotImplementedError(
                f"{self.name} is for other dtypes or another kind of table, or it is not built."
            )
        planned = self.launch(problem, chip)
        if self.tuning is not None:
            shared_memory = planned["shared_memory"]
            if self.stream_weight:
                # With a tuning, chunks of the weight stay only if there is room for them.
                part = self.tile_n * self.splits // self.blocks * tiles.ROW_BYTES
                shared_memory -= planned["staying_chunks"] * part
            self.check_tuning(shared_memory, chip)

    def check_tuning(self, shared_memory: int, chip: Chip) -> None:
        """Raises NotImplementedError with the reason if the tuning is impossible for the kernel.

        Args:
          shared_memory: bytes of shared memory that a block of the library's kernel needs, without
        the chunks of a streamed weight that stay.
          chip: the GPU.
        """
        if self.capability != cuda_tuning.CAPABILITY:
            raise NotImplementedError(
                f"{self.name} cannot have a tuning, because only Blackwell kernels have one."
            )
        self.tuning.check(self.out_dtype, self.tile_n, self.has_table)
        shared_memory += self.tuning.more_shared_memory(self.out_dtype, self.tile_n, self.slots)
        if shared_memory > chip.shared_memory:
            raise NotImplementedError(
                f"{self} needs {shared_memory} bytes of shared memory, but a thread block has "
                f"{chip.shared_memory}."
            )
        cuda_tuning.check_available(self.name, self.tuning)


def _operands(problem: Problem) -> tuple[str | None, str, bool]:
    """Returns the spelling of the problem's dtypes, and whether it has a table."""
    dtype = SPELLED.get(problem.dtype) if problem.images is None else IMAGES
    return dtype, SPELLED[problem.out_dtype], problem.has_table


def pixels(problem: Problem) -> tuple[int, int]:
    """Returns height and width of the images that a kernel cuts; zeros if it cuts none."""
    if problem.images is None:
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


def _kernels() -> list[dict[str, Any]]:
    return _call_json(library().patch_embed_kernels)


@functools.cache
def configs() -> tuple[CudaConfig, ...]:
    """Returns all configs, including those of kernels that are not built."""
    names = {field.name for field in dataclasses.fields(CudaConfig)}
    return tuple(CudaConfig(**{k: v for k, v in x.items() if k in names}) for x in _kernels())


@functools.cache
def _splits() -> dict[str, int]:
    """Returns the number of blocks among which each kernel splits K, by the kernel's name."""
    return {kernel["name"]: kernel["splits"] for kernel in _kernels()}


@functools.cache
def architectures() -> dict[int, tuple[Chip, ...]]:
    """Returns the chips that run kernels, by the number after `sm` in the kernels' names.

    There is one chip for each compute capability.
    """
    kernels, found = _kernels(), {}
    for number in sorted({kernel["capability"] for kernel in kernels}):
        own = [kernel for kernel in kernels if kernel["capability"] == number]
        capabilities = {divmod(x, 10) for kernel in own for x in kernel["capabilities"]}
        if chips := tuple(chip for chip in CHIPS if chip.capability in capabilities):
            found[number] = chips
    return found


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
    """Describes a launch for these shapes by the fields of `Launch` in ffi/launch.h.

    `pixels` are height and width of the images that the kernel cuts, or zeros for patches.

    Raises:
      NotImplementedError: the kernel cannot serve these shapes.
    """
    answer = _planned_launch(config.name, M, N, K, period, workers, segments, *pixels)
    if "error" in answer:
        raise NotImplementedError(answer["error"])
    return answer


@functools.lru_cache(maxsize=1024)
def _planned_launch(name: str, *shapes: int) -> dict[str, Any]:
    """Returns the library's answer about a launch: its fields, or an error."""
    arguments = map(ctypes.c_int64, shapes)
    return _call_json(library().patch_embed_launch, name.encode(), *arguments)


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
    cutting = {c.capability for c in configs() if c.dtype == IMAGES}
    if problem.images is not None and (problem.dtype != "int8" or capability not in cutting):
        names = " and ".join(f"sm_{c}" for c in sorted(cutting))
        raise NotImplementedError(
            f"it cuts images itself only in int8, on {names}, but this is {problem.dtype} on "
            f"sm_{capability}."
        )
    wanted = _operands(problem)
    of_chip = [c for c in configs() if c.capability == capability and c.built]
    found = [config for config in of_chip if config.operands == wanted]
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
    shared = lambda c: (c.tile_n, c.blocks, c.splits)  # noqa: E731
    stationary = {shared(c) for c in fitting if not c.stream_weight}
    kept = (c for c in fitting if not c.stream_weight or shared(c) not in stationary)
    ranked = sorted(kept, key=lambda c: (c.time(problem, chip), c.blocks))
    return ranked if capability == HOPPER else _by_prediction(ranked, problem, chip)


def _by_prediction(ranked: list[CudaConfig], problem: Problem, chip: Chip) -> list[CudaConfig]:
    """Returns the kernels with those that split K in the places that their predictions give them.

    `ranked` is in order of `CudaConfig.time`, which does not count a split of K. So a kernel that
    splits K comes first if it is predicted to be faster than the first one that does not.
    """
    whole = [config for config in ranked if config.splits == 1]
    predicted = {c: c.microseconds(problem, chip) for c in ranked if c.splits > 1}
    split = sorted(predicted, key=lambda c: predicted[c])
    most = whole[0].microseconds(problem, chip)
    faster = [config for config in split if predicted[config] < most]
    return faster + whole + split[len(faster) :]


def candidates(problem: Problem, target: Target) -> list[CudaConfig]:
    """Returns the kernels that serve, in order of their estimated times, then tunings of the first.

    Only Blackwell kernels have tunings.
    """
    tiles.check_operands(problem)
    chips = _chips(problem, target)
    capability, chip = next(iter(chips.items()))
    found = _by_time(problem, capability, chip)
    return found + _tunings(found[0], problem, chip)


def _tunings(config: CudaConfig, problem: Problem, chip: Chip) -> list[CudaConfig]:
    """Returns copies of a Blackwell kernel with other tunings that can be compiled here.

    A tuning changes how tiles are stored. There are no candidates if K is long, because storing is
    then not the bottleneck, or if the kernel has fewer than 192 columns, because such kernels are
    for problems with one tile per worker.
    """
    if (
        config.capability != cuda_tuning.CAPABILITY
        or config.tile_n < 192
        or tiles.chunks(problem) > 12
    ):
        return []
    found = []
    of_library = Tuning.of_library(config.out_dtype, config.tile_n, config.slots)
    for tuning in of_library.variants():
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
    """Returns the chips for which a program is planned, by the number in their kernels' names.

    Raises:
      NotImplementedError: the target has no such chip, or there is no library.
    """
    if target.known and target.chip is None:
        # Whoever has no GPU needs no library, which `architectures` loads.
        raise NotImplementedError(f"it needs an NVIDIA GPU; the target is {target}.")
    found = {c: tiles.chip_for(target, known) for c, known in architectures().items()}
    chips = {capability: chip for capability, chip in found.items() if chip is not None}
    if not chips:
        capabilities = [chip.capability for known in architectures().values() for chip in known]
        *others, last = map("{0[0]}.{0[1]}".format, capabilities)
        raise NotImplementedError(
            f"it needs compute capability {', '.join(others)} or {last}; the target is {target}."
        )
    if target.known:
        (chip,) = chips.values()
        tiles.check_dtype(problem, chip)
    return chips


def plan(problem: Problem, target: Target, *, config: CudaConfig | None = None) -> Plan:
    """Plans a problem with a kernel of the library.

    If the chip is not known, the program names a kernel for each architecture.

    Args:
      problem: shapes and dtypes.
      target: where the program runs.
      config: the kernel; None to call `choose_config` for each chip.

    Raises:
      NotImplementedError: no kernel serves the problem, or there is no library; the message is the
        reason.
    """
    tiles.check_operands(problem)
    chips = _chips(problem, target)
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
    tilings = [c.tiling(problem, chips[capability]) for capability, c in chosen.items()]

    def compute(patches, *rest):
        schedules = [tiling.schedule(problem.table_period) for tiling in tilings]
        if config is not None and config.tuning is not None:
            name = _register_tuned(config.name, config.tuning)
        else:
            name = TARGET
            register_cuda_kernels()
        result = jax.ShapeDtypeStruct((problem.rows, problem.N), problem.out_dtype)
        kernels = ",".join(c.name for c in chosen.values())
        call = functools.partial(jax.ffi.ffi_call(name, result), kernels=kernels)
        images = problem.images
        shape = (problem.rows, problem.K) if images is None else (-1, *images[-3:])
        operands = (patches.reshape(shape), *rest, *map(jnp.asarray, schedules))
        return call_kernel(call, *operands, accepts_slices=True)

    time = None
    if target.known:
        ((capability, chosen_config),) = chosen.items()
        time = chosen_config.microseconds(problem, chips[capability])
    return Plan(
        lambda *operands: tiles.flatten_leading_axes(problem, operands, compute),
        config=", ".join(map(str, chosen.values())),
        microseconds=time,
    )
