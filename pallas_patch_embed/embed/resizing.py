"""Resizing of whole pictures on the devices that embed them."""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

from pallas_patch_embed.embed.preprocessing import Preprocessing, Whole
from pallas_patch_embed.layers.resize import (
    FILTERS,
    MOST_SIDE,
    Taps,
    columns_first,
    most_taps,
    padded,
    padded_taps,
    resize,
    stacked,
    taps,
)

# Largest number of pictures in a call. They are sorted by size, because a call pads them to the
# largest one.
CALL = 64

# A program takes seconds to compile, and a picture takes microseconds. So a call uses a program for
# larger pictures if that computes at most so many times as much.
MOST_WORK = 2

# Largest size in bytes of the pieces that are copied to a device, and what their number is a
# multiple of. XLA copies an array that is not in pinned memory with one thread: 36 MB of pictures
# took 6.2 ms as one array and 1.7 ms in eight pieces. To start the copy of a piece takes 50 us.
MOST_PIECE, PIECES = 2**23, 8

# Fewest bytes of the pictures in a program.
FEWEST = 2**20

# Number of batches whose pictures may still be copied when the batch after them is decoded.
HELD = 2

# Memory of the host in bytes for whole pictures on their way to a device. If pictures are so large
# that all of them would need more, the host resizes them.
MEMORY = 3 * 2**30

# Largest size in bytes of the images of a batch, whose places are int32.
MOST_BATCH = 2**30


def largest_whole(pictures: int) -> Whole:
    """Returns the largest picture that a device resizes, if so many are on their way to it."""
    return Whole(MEMORY // pictures, MOST_SIDE)


def refusal(preprocessing: Preprocessing, batch: int) -> str:
    """Returns why a device cannot resize pictures with the pixels of the host; "" if it can.

    Args:
      preprocessing: the conversion of pictures to images.
      batch: number of images that the device computes at a time.
    """
    if preprocessing.size is None:
        return "the images of a NaFlex encoder have different sizes"
    if max(preprocessing.size) > MOST_SIDE or batch * preprocessing.most_bytes > MOST_BATCH:
        return "the images of a batch are too large"
    if _filter(preprocessing) not in FILTERS:
        return f"the filter is {_filter(preprocessing)}, expected one of {', '.join(FILTERS)}"
    if _order_of_pillow() is None:
        return "the installed Pillow computes other pixels than Pillow 11 to 13"
    return ""


def _filter(preprocessing: Preprocessing) -> str:
    from PIL import Image

    return Image.Resampling(preprocessing.resample).name.lower()


@functools.cache
def _order_of_pillow() -> bool | None:
    """Returns whether the installed Pillow ever resizes the columns first.

    Pillow 13 does, and earlier versions do not. None if it computes other pixels in either order,
    as Pillow-SIMD does.
    """
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (128, 64, 3), np.uint8)
    to = 32, 32
    where = np.array([[0], [noise.shape[1]]], np.int32)
    axes = [
        stacked([taps(n, to[i], "bicubic")], 1, most_taps(n, to[i], "bicubic"))
        for i, n in enumerate(noise.shape[:2])
    ]
    wanted = np.asarray(Image.fromarray(noise).resize(to, Image.Resampling.BICUBIC))
    for order in (True, False):
        found = resize(noise.reshape(-1), where, *axes, shape=noise.shape, columns_first=order)
        if np.array_equal(found[0], wanted):
            return order
    return None


def _rounded(size: int) -> int:
    """Rounds a number of bytes up by at most an eighth, so that there are few programs."""
    step = 2 ** max(size.bit_length() - 4, 0)
    return -(-size // step) * step


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


class _Run(NamedTuple):
    """Pictures that follow each other in memory.

    Attributes:
      memory: an array of bytes.
      begin, end: where the pictures begin and end there.
      pictures: their numbers.
    """

    memory: np.ndarray
    begin: int
    end: int
    pictures: list[int]

    @property
    def size(self) -> int:
        return self.end - self.begin


def _pieces(run: _Run, size: int) -> tuple[list[np.ndarray], int]:
    """Returns pieces of a run's memory, one after another, with all of its pictures.

    They are views, unless the memory is too small for whole pieces.

    Returns:
      The pieces, and where the run begins in them.
    """
    memory, begin = run.memory, run.begin
    whole = -(-run.size // size) * size
    first = min(begin, len(memory) - whole)
    if first < 0:
        copied = np.zeros(whole, np.uint8)
        copied[: run.size] = memory[begin : run.end]
        memory, begin, first = copied, 0, 0
    return [memory[i : i + size] for i in range(first, first + whole, size)], begin - first


def _runs(pictures: Sequence[np.ndarray]) -> list[_Run]:
    """Returns runs with all pictures.

    Pictures whose memory is their own, and those of runs that are less than half as long as the
    longest, are copied into a run.
    """
    runs: list[_Run] = []
    alone: list[int] = []
    addresses: dict[int, int] = {}
    for i, picture in enumerate(pictures):
        memory = picture.base
        if not (
            isinstance(memory, np.ndarray)
            and memory.ndim == 1
            and memory.dtype == np.uint8
            and memory.flags.c_contiguous
            and picture.flags.c_contiguous
        ):
            alone.append(i)
            continue
        if id(memory) not in addresses:
            addresses[id(memory)] = _address(memory)
        begin = _address(picture) - addresses[id(memory)]
        if runs and runs[-1].memory is memory and runs[-1].end == begin:
            run = runs.pop()._replace(end=begin + picture.size)
            run.pictures.append(i)
        else:
            run = _Run(memory, begin, begin + picture.size, [i])
        runs.append(run)
    longest = max((run.size for run in runs), default=0)
    alone += itertools.chain.from_iterable(run.pictures for run in runs if 2 * run.size < longest)
    runs = [run for run in runs if 2 * run.size >= longest]
    if alone:
        joined = np.concatenate([pictures[i].reshape(-1) for i in alone])
        runs.append(_Run(joined, 0, len(joined), alone))
    return runs


@functools.partial(jax.jit, static_argnames="size")
def _joined(pieces: Sequence[jax.Array], *, size: int) -> jax.Array:
    """Returns pieces as one array of this size."""
    rest = size - sum(map(len, pieces))
    return jnp.concatenate([*pieces, jnp.zeros(rest, jnp.uint8)])


@jax.jit
def _in_order(parts: Sequence[jax.Array], places: npt.NDArray[np.int32]) -> jax.Array:
    """Returns the images of several calls in the order of these places."""
    return jnp.concatenate(parts)[places]


# The arguments of `taps` for an axis of a picture.
type Axis = tuple[int, int, str, int, int]


class _Step(NamedTuple):
    """How a picture is resized.

    Attributes:
      columns_first: whether the columns are resized before the rows.
      axes: both axes.
    """

    columns_first: bool
    axes: tuple[Axis, Axis]


class _Program(NamedTuple):
    """A program that resizes pictures.

    Attributes:
      columns_first: as in `_Step`.
      side: largest number of rows of a picture; of columns if these are resized first. The number
        of the others changes nothing but the coefficients.
      taps: number of coefficients for the rows and for the columns of a result.
    """

    columns_first: bool
    side: int
    taps: tuple[int, int]

    def serves(self, other: "_Program") -> bool:
        """Returns whether this program can do what the other one does."""
        same = self.columns_first == other.columns_first and self.side >= other.side
        return same and all(own >= needed for own, needed in zip(self.taps, other.taps))

    def work(self, size: tuple[int, int]) -> int:
        """Returns the products for each channel of an image of this size."""
        (height, width), (vertical, horizontal) = size, self.taps
        if self.columns_first:
            return height * (width * horizontal + self.side * vertical)
        return width * (height * vertical + self.side * horizontal)


class _Call(NamedTuple):
    """Pictures that a program resizes together.

    Attributes:
      program: the program.
      where: as for `resize`, on the device.
      axes: coefficients of the rows and of the columns.
    """

    program: _Program
    where: jax.Array
    axes: list[Taps]


class _Calls(NamedTuple):
    """How the pictures of a batch are resized.

    Attributes:
      calls: the calls.
      places: where the image of each picture is in their results, on the device.
      needed: number of bytes that the calls read.
    """

    calls: list[_Call]
    places: jax.Array
    needed: int


# Folders often have pictures of one size, so the coefficients of some calls stay on the device.
@functools.lru_cache(maxsize=8)
def _coefficients(axes: Sequence[Axis], pictures: int, number: int, device: jax.Device) -> Taps:
    """Returns so many coefficients of an axis of several pictures, on a device."""
    return jax.device_put(stacked([taps(*axis) for axis in axes], pictures, number), device)


def _number_of_taps(axes: Sequence[Axis]) -> int:
    """Returns the number of coefficients of an axis of several pictures.

    Sizes with the same padded side have the same number, so that there are few programs.
    """
    return padded_taps(max(most_taps(padded(size), to, name) for size, to, name, *_ in axes))


class Resizer:
    """Resizes the pictures of a batch on the devices, and crops or pads them.

    Pictures that follow each other in memory are copied to a device together, from where they are.
    So a picture must stay unchanged until `copied` says that it was copied.

    Args:
      preprocessing: the conversion of pictures to images, for which there is no `refusal`.
      split: the sharding of a batch.

    Attributes:
      size: (height, width) of the images.
    """

    def __init__(self, preprocessing: Preprocessing, split: NamedSharding):
        assert preprocessing.size is not None
        self._preprocessing, self._split = preprocessing, split
        self.size, self._filter = preprocessing.size, _filter(preprocessing)
        self._ever_columns_first = _order_of_pillow()
        # The programs that calls have used, and the number of bytes that they read: a power of two
        # that only grows, so that there are few programs.
        self._programs: list[_Program] = []
        self._bytes = FEWEST
        # What was copied to the devices in this batch and those before it.
        self._copies: collections.deque[list[jax.Array]] = collections.deque([[]])
        crop = preprocessing.crop
        self._fill = crop.fill if crop is not None else (0, 0, 0)

    def copy(
        self, pictures: Sequence[np.ndarray], whole: Sequence[bool]
    ) -> Callable[[], jax.Array]:
        """Starts to copy pictures to the devices.

        Args:
          pictures: arrays [H, W, 3] uint8, equally many for each device.
          whole: for each picture, whether it is yet to be resized.

        Returns:
          A function that starts to resize them, and returns [pictures, height, width, 3] uint8,
          divided among the devices. It waits until the host has begun all copies, so it is best
          called after other work.
        """
        devices = self._split.mesh.devices.flat
        n = len(pictures) // len(devices)
        parts = [
            self._copy_to(device, pictures[i * n : (i + 1) * n], whole[i * n : (i + 1) * n])
            for i, device in enumerate(devices)
        ]
        shape = len(pictures), *self.size, 3

        def resized() -> jax.Array:
            arrays = [part() for part in parts]
            return jax.make_array_from_single_device_arrays(shape, self._split, arrays)

        return resized

    def copied(self) -> None:
        """Ends a batch; waits until the pictures of the batch `HELD` batches before were copied."""
        self._copies.append([])
        while len(self._copies) > HELD + 1:
            jax.block_until_ready(self._copies.popleft())

    def _copy_to(
        self, device: jax.Device, pictures: Sequence[np.ndarray], whole: Sequence[bool]
    ) -> Callable[[], jax.Array]:
        """Starts to copy pictures to one device, as `copy` does."""
        runs = _runs(pictures)
        size = min(_rounded(-(-max(run.size for run in runs) // 2)), MOST_PIECE)
        pieces: list[np.ndarray] = []
        begins = np.empty(len(pictures), np.int32)
        for run in runs:
            added, begin = _pieces(run, size)
            begin += len(pieces) * size
            for i in run.pictures:
                begins[i], begin = begin, begin + pictures[i].size
            pieces += added
        steps = [self._step(p.shape[0], p.shape[1], each) for p, each in zip(pictures, whole)]
        calls = self._calls([picture.shape for picture in pictures], begins, steps, device)
        # What a program needs besides the pictures is copied before them. Otherwise its copy would
        # wait for the pictures of the next batch, and the start of the program for its copy.
        copies = jax.device_put(pieces, device, may_alias=False)
        self._copies[-1] += copies
        return functools.partial(self._resized, copies, calls)

    def _calls(
        self,
        shapes: Sequence[tuple[int, ...]],
        begins: npt.NDArray[np.int32],
        steps: Sequence[_Step],
        device: jax.Device,
    ) -> _Calls:
        """Divides pictures that begin at these bytes into calls; copies what says so."""

        def order_of(i: int) -> bool:
            return steps[i].columns_first

        def side_of(i: int) -> int:
            return shapes[i][1 if order_of(i) else 0]

        order = sorted(
            range(len(shapes)), key=lambda i: (order_of(i), side_of(i), math.prod(shapes[i]))
        )
        groups = [
            group
            for _, same in itertools.groupby(order, order_of)
            for group in itertools.batched(same, CALL)
        ]
        B = min(CALL, len(shapes))
        calls, places = [], np.empty(len(shapes), np.int32)
        for number, group in enumerate(groups):
            both = [tuple(steps[i].axes[axis] for i in group) for axis in (0, 1)]
            rows, columns = map(_number_of_taps, both)
            side = padded(max(map(side_of, group)))
            program = self._program(_Program(order_of(group[0]), side, (rows, columns)))
            where = np.zeros((2, B), np.int32)
            where[:, : len(group)] = begins[list(group)], [shapes[i][1] for i in group]
            axes = [
                _coefficients(each, B, number, device) for each, number in zip(both, program.taps)
            ]
            places[list(group)] = number * B + np.arange(len(group))
            calls.append(_Call(program, jax.device_put(where, device), axes))
        needed = max(int(begin) + math.prod(shape) for begin, shape in zip(begins, shapes))
        return _Calls(calls, jax.device_put(places, device), needed)

    def _program(self, needed: _Program) -> _Program:
        """Returns the program for a call, a new one if no other serves with little enough work."""
        serving = (program for program in self._programs if program.serves(needed))
        best = min(serving, key=lambda program: program.work(self.size), default=None)
        if best is None or best.work(self.size) > MOST_WORK * needed.work(self.size):
            self._programs.append(needed)
            return needed
        return best

    def _resized(self, pieces: list[jax.Array], calls: _Calls) -> jax.Array:
        """Starts to resize the pictures in these pieces."""
        pieces = [*pieces, *pieces[-1:] * (-len(pieces) % PIECES)]
        needed = max(self._bytes, calls.needed, len(pieces) * len(pieces[0]))
        self._bytes = 1 << (needed - 1).bit_length()
        packed = _joined(pieces, size=self._bytes)
        parts = [
            resize(
                packed,
                call.where,
                *call.axes,
                # Only one of the sides changes the program.
                shape=(call.program.side, call.program.side, 3),
                columns_first=call.program.columns_first,
                fill=self._fill,
            )
            for call in calls.calls
        ]
        return _in_order(parts, calls.places)

    def _step(self, height: int, width: int, whole: bool) -> _Step:
        """Returns how a picture is resized; one that is not whole stays as it is."""
        size, corner = (height, width), (0, 0)
        to = self._preprocessing.resized_from(height, width) if whole else size
        if whole and self._preprocessing.crop is not None:
            corner = self._preprocessing.crop.corner(to, self.size)
        rows, columns = ((size[i], to[i], self._filter, corner[i], self.size[i]) for i in (0, 1))
        return _Step(bool(self._ever_columns_first and columns_first(size, to)), (rows, columns))
