"""Resizing of whole pictures on the devices that embed them."""

import collections
import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
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
    padded,
    resize,
    stacked,
    taps,
    unpack,
)

# Number of pictures in a call. They are padded to the largest of them, so they are sorted by size.
CALL = 16

# Number of batches in the memory from which a device copies: one is copied while the next is
# written. It is used again, because the first access to a page of new memory takes longer than
# copying a picture: 37 MB of pictures take 23 ms into new memory and 14 ms into used memory.
KEPT = 2

# Number of threads that copy pictures into this memory, without Python's global lock. One thread
# copied 500 x 375 pixels in 0.1 ms, which alone would limit `embed` to 10000 pictures/s.
COPIERS = 4

# Memory in bytes for whole pictures on their way to the devices. Pictures whose number is so large
# that they would need more are resized on the host.
MEMORY = 2**31


def largest_whole(pictures: int) -> Whole:
    """Returns the largest picture that is resized on the device, if so many are on their way."""
    return Whole(MEMORY // pictures, MOST_SIDE)


def refusal(preprocessing: Preprocessing, batch: int) -> str:
    """Returns why a device cannot resize pictures with the pixels of the host; "" if it can.

    Args:
      preprocessing: the conversion of pictures to images.
      batch: number of images that the device computes at a time.
    """
    if preprocessing.size is None:
        return "the images of a NaFlex encoder have different sizes"
    if max(preprocessing.size) > MOST_SIDE or batch * preprocessing.most_bytes > MEMORY // 2:
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
    pictures = np.zeros((1, *noise.shape), np.uint8)
    pictures[0] = noise
    axes = [stacked([taps(noise.shape[i], to[i], "bicubic")], 1) for i in (0, 1)]
    wanted = np.asarray(Image.fromarray(noise).resize(to, Image.Resampling.BICUBIC))
    for order in (True, False):
        if np.array_equal(resize(pictures, *axes, columns_first=order)[0], wanted):
            return order
    return None


def _rounded(size: int) -> int:
    """Rounds a number of bytes up by at most an eighth, so that there are few programs."""
    step = 2 ** max(size.bit_length() - 4, 0)
    return -(-size // step) * step


@jax.jit
def _in_order(parts: Sequence[jax.Array], places: npt.NDArray[np.int32]) -> jax.Array:
    """Returns the images of several calls in the order of these places."""
    return jnp.concatenate(parts)[places]


class _Step(NamedTuple):
    """How a picture is resized.

    Attributes:
      columns_first: whether the columns are resized before the rows.
      axes: the coefficients of both axes.
    """

    columns_first: bool
    axes: list[Taps]


class Resizer:
    """Resizes the pictures of a batch on the devices, and crops or pads them.

    The pictures of a device are copied to it together, without padding.

    Args:
      preprocessing: the conversion of pictures to images, for which there is no `refusal`.
      split: the sharding of a batch.
    """

    def __init__(self, preprocessing: Preprocessing, split: NamedSharding):
        assert preprocessing.size is not None
        self._preprocessing, self._split = preprocessing, split
        self._size, self._filter = preprocessing.size, _filter(preprocessing)
        self._ever_columns_first = _order_of_pillow()
        self._threads = ThreadPoolExecutor(COPIERS)
        # For each device the memory of its last batches, and what it copied from there.
        self._kept: dict[jax.Device, collections.deque[tuple[np.ndarray, jax.Array]]]
        self._kept = collections.defaultdict(collections.deque)
        crop = preprocessing.crop
        self._fill = crop.fill if crop is not None else (0, 0, 0)

    def __call__(self, pictures: Sequence[np.ndarray], whole: Sequence[bool]) -> jax.Array:
        """Starts to resize pictures.

        Args:
          pictures: arrays [H, W, 3] uint8, equally many for each device.
          whole: for each picture, whether it is yet to be resized.

        Returns:
          [pictures, height, width, 3] uint8, divided among the devices.
        """
        devices = self._split.mesh.devices.flat
        n = len(pictures) // len(devices)
        parts = [
            self._on(device, pictures[i * n : (i + 1) * n], whole[i * n : (i + 1) * n])
            for i, device in enumerate(devices)
        ]
        shape = len(pictures), *self._size, 3
        return jax.make_array_from_single_device_arrays(shape, self._split, parts)

    def _on(
        self, device: jax.Device, pictures: Sequence[np.ndarray], whole: Sequence[bool]
    ) -> jax.Array:
        """Starts to resize pictures on one device."""
        steps = [self._step(picture, each) for picture, each in zip(pictures, whole)]

        def order_of(i: int) -> bool:
            return steps[i].columns_first

        order = sorted(range(len(pictures)), key=lambda i: (order_of(i), pictures[i].size))
        calls = [
            call
            for _, group in itertools.groupby(order, order_of)
            for call in itertools.batched(group, CALL)
        ]
        sizes = [
            tuple(padded(max(pictures[i].shape[axis] for i in call)) for axis in (0, 1))
            for call in calls
        ]
        # A row of the largest program follows the last picture.
        packed, begins = self._packed(device, pictures, 3 * max(width for _, width in sizes))
        B = min(CALL, len(pictures))
        parts, places = [], np.empty(len(pictures), np.int32)
        for number, (call, size) in enumerate(zip(calls, sizes)):
            begin, width = np.zeros((2, B), np.int32)
            begin[: len(call)] = begins[list(call)]
            width[: len(call)] = [pictures[i].shape[1] for i in call]
            axes = (stacked([steps[i].axes[axis] for i in call], B) for axis in (0, 1))
            parts.append(
                resize(
                    unpack(packed, begin, width, shape=(*size, 3)),
                    *axes,
                    columns_first=order_of(call[0]),
                    fill=self._fill,
                )
            )
            places[list(call)] = number * B + np.arange(len(call))
        return _in_order(parts, places)

    def _packed(
        self, device: jax.Device, pictures: Sequence[np.ndarray], more: int
    ) -> tuple[jax.Array, npt.NDArray[np.int32]]:
        """Starts to copy pictures and `more` bytes to a device; returns where each one begins."""
        ends = np.cumsum([picture.size for picture in pictures])
        size, kept = _rounded(int(ends[-1]) + more), self._kept[device]
        memory = np.empty(0, np.uint8)
        if len(kept) == KEPT:
            memory, copied = kept.popleft()
            copied.block_until_ready()
        if memory.size < size:
            memory = np.empty(size, np.uint8)
        begins = np.array([0, *ends[:-1]], np.int32)

        def copy(first: int) -> None:
            for i in range(first, len(pictures), COPIERS):
                memory[begins[i] : ends[i]] = pictures[i].reshape(-1)

        list(self._threads.map(copy, range(COPIERS)))
        packed = jax.device_put(memory[:size], device, may_alias=False)
        kept.append((memory, packed))
        return packed, begins

    def _step(self, picture: np.ndarray, whole: bool) -> _Step:
        """Returns how a picture is resized; one that is not whole stays as it is."""
        height, width, _ = picture.shape
        size, corner = (height, width), (0, 0)
        to = self._preprocessing.resized_from(height, width) if whole else size
        if whole and self._preprocessing.crop is not None:
            corner = self._preprocessing.crop.corner(to, self._size)
        axes = [taps(size[i], to[i], self._filter, corner[i], self._size[i]) for i in (0, 1)]
        return _Step(bool(self._ever_columns_first and columns_first(size, to)), axes)
