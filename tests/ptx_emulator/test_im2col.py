"""Tests TMA loads in im2col mode against the PTX ISA (9.0), 5.5.4 and 9.7.9.25.5.2.

The reference numbers the pixels of all images' bounding boxes, and computes a pixel's coordinates
from its number by division.
"""

import itertools
import random

import numpy as np
import pytest

from tests.ptx_emulator import isa
from tests.ptx_emulator.errors import EmulatorError
from tests.ptx_emulator.ptx_runner import HERE, assert_fails, run
from tests.ptx_emulator.references import swizzled_address
from tests.ptx_emulator.test_tma import (
    ARRIVAL,
    BASE,
    DECLARED,
    NOTHING,
    ROOM,
    SECTION,
    WAIT,
    dump,
    expect,
    in_cluster,
    memories,
)
from tests.ptx_emulator.tma import Im2colMap, TensorMap

GROUPS = ("", ".cta_group::1", ".cta_group::2")
LOADS = [
    f"cp.async.bulk.tensor.{rank}d.{to}.global.im2col.{ARRIVAL}{group}"
    for rank, to, group in itertools.product((3, 4, 5), ("shared::cta", "shared::cluster"), GROUPS)
]
MULTICASTS = [
    f"cp.async.bulk.tensor.{rank}d.shared::cluster.global.im2col.{ARRIVAL}.multicast::cluster{group}"
    for rank, group in itertools.product((3, 4, 5), GROUPS)
]


class Images:
    """Random images of this rank, [N, (D, H), W, C], and columns of 20 pixels of 32 channels."""

    def __init__(self, rank, lower=None, upper=None, swizzle=0):
        spatial = (7, 5, 3)[: rank - 2]
        self.dimensions = (48, *spatial, 4)
        self.lower = lower or (-1, 0, 1)[: rank - 2]
        self.upper = upper or (-2, 1, 0)[: rank - 2]
        self.swizzle, self.channels, self.pixels = swizzle, 32, 20
        sizes = [*itertools.accumulate(self.dimensions, lambda a, b: a * b, initial=1)]
        self.strides, self.content = sizes[:-1], random.Random(rank).randbytes(sizes[-1])
        self.bytes = self.channels * self.pixels
        self.sides = [
            d - low + high for d, low, high in zip(spatial, self.lower, self.upper, strict=True)
        ]

    def map(self, address, *_):
        return Im2colMap(
            base=address,
            itemsize=1,
            dimensions=self.dimensions,
            strides=tuple(self.strides),
            box=(self.channels, self.pixels),
            swizzle=self.swizzle,
            lower=tuple(self.lower),
            upper=tuple(self.upper),
        )

    def loaded(self, place, offsets):
        """Returns the shared memory behind BASE after a load; unwritten bytes are 0xFF."""
        memory = bytearray(b"\xff" * ROOM)
        first, *begin, image = place
        number, size = image, 1
        for b, low, side in reversed(list(zip(begin, self.lower, self.sides))):
            number = number * side + b - low
        for i, channel in np.ndindex(self.pixels, self.channels):
            rest, at = number + i, [first + channel]
            for low, side, offset in zip(self.lower, self.sides, offsets):
                rest, inside = divmod(rest, side)
                at.append(low + inside + offset)
            at.append(rest)
            fits = all(0 <= a < d for a, d in zip(at, self.dimensions))
            source = sum(a * s for a, s in zip(at, self.strides))
            row = i * (self.swizzle or self.channels)
            target = swizzled_address(BASE + row + channel, self.swizzle) - BASE
            memory[target : target + size] = self.content[source : source + 1] if fits else b"\0"
        return bytes(memory)

    def places(self):
        """Yields coordinates and offsets of the first pixel, an inner pixel, and the last ones."""
        spatial = len(self.lower)
        middle = [low + side // 2 for low, side in zip(self.lower, self.sides)]
        last = [low + side - 1 for low, side in zip(self.lower, self.sides)]
        yield (0, *self.lower, 0), (0,) * spatial
        yield (16, *middle, 1), (1, 2, 3)[:spatial]
        yield (-16, *last, 0), (3, 0, 1)[:spatial]
        # These channels and images are beyond the end.
        yield (32, *last, 3), (0, 255, 1)[:spatial]


def statement(opcode, place, offsets, more=""):
    """Returns a load by the thread in which %issuer is true."""
    lists = (f"{{{', '.join(map(str, x))}}}" for x in (place, offsets))
    coordinates, moved = lists
    return f"@%issuer {opcode} [%memory], [%t0, {coordinates}], [%signal], {moved}{more};{HERE}"


def rank_of(opcode):
    return int(opcode[len("cp.async.bulk.tensor.")])


@pytest.mark.parametrize("swizzle", [0, 32, 64, 128])
@pytest.mark.parametrize("rank", [3, 4, 5])
def test_pixels_of_every_rank_and_swizzle_are_loaded(rank, swizzle):
    """Bounding boxes are larger or smaller than images; columns cross images and their ends."""
    corners = [None, ((0, 0, 0), (0, 0, 0)), ((2, 1, -1), (-1, -3, -1)), ((0, 0, 0), (0, -4, 0))]
    for corner in corners:
        images = Images(rank, *([c[: rank - 2] for c in corner] if corner else ()), swizzle=swizzle)
        for place, offsets in images.places():
            opcode = f"cp.async.bulk.tensor.{rank}d.shared::cta.global.im2col.{ARRIVAL}"
            issue = statement(opcode, place, offsets).replace("@%issuer", "@%first")
            body = f"""{DECLARED} mov.u32 %signal, %bar; {expect(images.bytes)}
                {issue} {WAIT} {dump()}"""
            found = run(body, arrays=[images.content, bytes(ROOM)], maps=[images.map]).arrays
            assert found == [images.content, images.loaded(place, offsets)], (place, offsets)


@pytest.mark.parametrize("opcode", LOADS)
def test_a_load_of_one_block(opcode):
    assert isa.OPCODES[opcode].section == SECTION
    images = Images(rank_of(opcode))
    place, offsets = list(images.places())[1]
    text = f"mov.u32 %signal, %bar; {statement(opcode, place, offsets)}"
    signals = [images.bytes, 0, images.bytes, 0]
    found = memories(*in_cluster(text, signals, (0, 2)), tensor=images)
    wanted = images.loaded(place, offsets)
    assert found == [wanted, NOTHING, wanted, NOTHING]


@pytest.mark.parametrize("opcode", MULTICASTS)
def test_a_load_arrives_in_several_blocks(opcode):
    assert isa.OPCODES[opcode].section == SECTION
    images = Images(rank_of(opcode))
    place, offsets = list(images.places())[1]
    text = f"""mov.b16 %mask, 11; mapa.shared::cluster.u32 %signal, %bar, 1;
        {statement(opcode, place, offsets, ", %mask")}"""
    signals = [0] * 4
    for block in (0, 1, 3):
        signals[block | 1 if "cta_group::2" in opcode else block] += images.bytes
    wanted = images.loaded(place, offsets)
    found = memories(*in_cluster(text, signals, [2]), tensor=images)
    assert found == [wanted, wanted, NOTHING, wanted]


def test_lines_of_patches_are_loaded():
    """With the map of the kernels' images, a load copies one line of patches, across images."""
    p, grid, images = 4, (3, 5), 2
    pixels = np.random.default_rng(0).integers(0, 256, (images, 12, 20, 4), np.uint8)
    lines = lambda at, *_: Im2colMap(  # noqa: E731
        base=at,
        itemsize=1,
        dimensions=(16, 5, p, images * grid[0]),
        strides=(1, 16, 80, 320),
        box=(16, 8),
        swizzle=0,
        lower=(0, 0),
        upper=(0, 1 - p),
    )
    patches = pixels.reshape(images, 3, p, 5, 16).swapaxes(2, 3).reshape(-1, p, 16)
    opcode = f"cp.async.bulk.tensor.4d.shared::cta.global.im2col.{ARRIVAL}"
    for first, line in ((0, 0), (7, 2), (13, 3), (25, 1)):
        place = (0, first % 5, 0, first // 5)
        issue = statement(opcode, place, (0, line)).replace("@%issuer", "@%first")
        body = f"{DECLARED} mov.u32 %signal, %bar; {expect(128)} {issue} {WAIT} {dump()}"
        arrays = [pixels.tobytes(), bytes(ROOM)]
        found = np.frombuffer(run(body, arrays=arrays, maps=[lines]).arrays[1], np.uint8)[:128]
        wanted = np.zeros((8, 16), np.uint8)
        taken = patches[first : first + 8, line]
        wanted[: len(taken)] = taken
        np.testing.assert_array_equal(found.reshape(8, 16), wanted)


def failing(message, text, images, tensor):
    issue = f"{DECLARED} mov.u32 %signal, %bar; {expect(images.bytes)} {text}"
    assert_fails(EmulatorError, message, issue, arrays=[images.content], maps=[tensor])


def test_a_load_begins_inside_of_the_bounding_box():
    images = Images(4)
    opcode = f"cp.async.bulk.tensor.4d.shared::cta.global.im2col.{ARRIVAL}"
    (_, *begin, _), offsets = next(images.places())
    for i, wrong in ((0, images.lower[0] - 1), (1, images.lower[1] + images.sides[1])):
        at = [*begin]
        at[i] = wrong
        text = statement(opcode, (0, *at, 0), offsets).replace("@%issuer", "@%first")
        failing("the first pixel is not in the bounding box", text, images, images.map)


def test_a_map_is_of_the_mode_of_its_load():
    images = Images(3)
    tiled = lambda at, *_: TensorMap(at, 1, (48, 7, 4), (1, 48, 336), (32, 4, 1), 0)  # noqa: E731
    begin = f"cp.async.bulk.tensor.3d.shared::cta.global.im2col.{ARRIVAL}"
    text = statement(begin, (0, 0, 0), (0,)).replace("@%issuer", "@%first")
    failing("im2col.* with TensorMap", text, images, tiled)
    begin = begin.replace(".im2col", "")
    text = f"@%first {begin} [%memory], [%t0, {{0, 0, 0}}], [%bar];{HERE}"
    failing("with Im2colMap", text, images, images.map)
    store = "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group"
    text = f"@%first {store} [%t0, {{0, 0, 0}}], [%memory];{HERE}"
    failing("with Im2colMap", text, images, images.map)


@pytest.mark.parametrize(
    "change, rule",
    [
        (dict(base=8), "base"),
        (dict(dimensions=(48, 4), strides=(1, 48)), "rank"),
        (dict(strides=(1, 40, 336)), "a stride"),
        (dict(box=(257, 20)), "channels"),
        (dict(box=(32, 1025)), "pixels"),
        (dict(box=(24, 20)), "channels are not a multiple of 16 bytes"),
        (dict(box=(48, 20), swizzle=32), "channels are wider than the swizzle"),
        (dict(swizzle=16), "swizzle"),
        (dict(lower=(-(2**15) - 1,)), "the corners"),
        (dict(upper=(0, 0)), "the corners"),
        (dict(upper=(-7,)), "the bounding box is empty"),
    ],
    ids=str,
)
def test_a_map_that_breaks_a_rule_is_refused(change, rule):
    fine = dict(base=0, itemsize=1, dimensions=(48, 7, 4), strides=(1, 48, 336), box=(32, 20))
    fine |= dict(swizzle=0, lower=(0,), upper=(0,))
    Im2colMap(**fine)
    with pytest.raises(EmulatorError, match=f"is invalid, because .*{rule}"):
        Im2colMap(**(fine | change))


def test_every_form_has_a_test():
    assert {opcode for opcode in isa.OPCODES if ".im2col." in opcode} == {*LOADS, *MULTICASTS}
