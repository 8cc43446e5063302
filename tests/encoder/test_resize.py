"""Resizing on the device: every pixel is the one that Pillow computes."""

import math
import time
from importlib import resources

import jax
import numpy as np
import PIL
import pytest
from PIL import Image
from scipy import sparse  # type: ignore[import-untyped]

from pallas_patch_embed.layers import resize as module
from pallas_patch_embed.layers.resize import (
    BITS,
    FILTERS,
    MOST_SIDE,
    SIDES,
    TAPS,
    columns_first,
    most_taps,
    padded,
    resize,
    stacked,
    taps,
)

# Pillow's versions before 13 resize the rows first, whatever the sizes are.
PILLOW_13 = int(PIL.__version__.split(".")[0]) >= 13


def order(size, to):
    return PILLOW_13 and columns_first(size, to)


def by_pillow(picture, to, name):
    """Resizes [H, W, 3], or [H, W, 1] of a grey picture, to (height, width)."""
    grey = picture.shape[2] == 1
    image = Image.fromarray(picture[..., 0] if grey else picture)
    resized = np.asarray(image.resize(to[::-1], Image.Resampling[name.upper()]))
    return resized[..., None] if grey else resized


def on_device(pictures, to, name, corner=(0, 0), size=None, **options):
    """Resizes pictures of one order of the passes, and crops them from `corner` to `size`."""
    size = size or to
    room = tuple(padded(max(p.shape[axis] for p in pictures)) for axis in (0, 1))
    C = pictures[0].shape[2]
    # What is outside of a picture must not count, so it has the pixels that would count most.
    pixels = np.full(len(pictures) * math.prod(room) * C, 255, np.uint8)
    pixels[: sum(p.size for p in pictures)] = np.concatenate([p.ravel() for p in pictures])
    begins = np.cumsum([0, *(p.size for p in pictures[:-1])], dtype=np.int32)
    widths = np.array([p.shape[1] for p in pictures], np.int32)
    axes = [
        stacked(
            [taps(p.shape[i], to[i], name, corner[i], size[i]) for p in pictures],
            len(pictures),
            most_taps(room[i], to[i], name),
        )
        for i in (0, 1)
    ]
    where = np.stack([begins, widths])
    return np.asarray(resize(pixels, where, *axes, shape=(*room, C), **options))


def noise(rng, height, width, channels=3):
    """Returns noise of black and white, for which sums are largest, or of all levels."""
    if rng.integers(2):
        return rng.choice(np.array([0, 255], np.uint8), (height, width, channels))
    return rng.integers(0, 256, (height, width, channels), np.uint8)


def random_side(rng, most):
    return int(math.exp(rng.uniform(0, math.log(most + 0.99))))


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("to", [64, pytest.param(1, marks=pytest.mark.slow("compiles"))])
def test_every_pixel_of_noise_is_that_of_pillow(name, to):
    rng, to = np.random.default_rng(0), (to, to)
    shapes = [(1, 1), (1, 128), (128, 1), to, (to[0], 50), (50, to[1]), (2, 3)]
    shapes += [(random_side(rng, 128), random_side(rng, 128)) for _ in range(40)]
    for first in (False, True):
        pictures = [noise(rng, *s) for s in shapes if order(s, to) == first]
        if pictures:
            found = on_device(pictures, to, name, columns_first=first)
            for picture, image in zip(pictures, found, strict=True):
                np.testing.assert_array_equal(image, by_pillow(picture, to, name))


@pytest.mark.parametrize("name", ["bicubic", "lanczos"])
def test_grey_pictures_are_those_of_pillow(name):
    pictures = [noise(np.random.default_rng(i), 70 + i, 100 - i, 1) for i in range(4)]
    found = on_device(pictures, (48, 64), name)
    for picture, image in zip(pictures, found, strict=True):
        np.testing.assert_array_equal(image, by_pillow(picture, (48, 64), name))


def test_a_picture_of_the_same_size_stays_as_it_is():
    picture = noise(np.random.default_rng(0), 31, 45)
    for name in FILTERS:
        np.testing.assert_array_equal(on_device([picture], (31, 45), name)[0], picture)


@pytest.mark.parametrize("corner", [(7, 12), (-5, 8), (-9, -30), (0, 60)], ids=str)
def test_crops_are_cut_from_the_whole_result_and_padded(corner):
    """The results outside of the picture have the colour."""
    picture, fill = noise(np.random.default_rng(1), 70, 90), (9, 80, 200)
    whole = by_pillow(picture, (50, 64), "bicubic")
    size = (60, 40)
    wanted = np.full((*size, 3), fill, np.uint8)
    for row in range(size[0]):
        for column in range(size[1]):
            place = corner[0] + row, corner[1] + column
            if 0 <= place[0] < 50 and 0 <= place[1] < 64:
                wanted[row, column] = whole[place]
    found = on_device([picture], (50, 64), "bicubic", corner, size, fill=fill)
    np.testing.assert_array_equal(found[0], wanted)
    assert (wanted == fill).all(-1).any()


def test_strict_settings_change_nothing():
    picture = noise(np.random.default_rng(0), 31, 45)
    with jax.numpy_rank_promotion("raise"), jax.enable_x64(True):
        found = on_device([picture], (20, 30), "bicubic")
    np.testing.assert_array_equal(found[0], by_pillow(picture, (20, 30), "bicubic"))


def test_only_the_coefficients_of_a_crop_are_computed():
    """A picture with a short side of one pixel would become very long."""
    whole, crop = taps(2048, 10**5, "lanczos"), taps(2048, 10**5, "lanczos", 49888, 224)
    np.testing.assert_array_equal(crop.first, whole.first[49888 : 49888 + 224])
    np.testing.assert_array_equal(crop.taps, whole.taps[49888 : 49888 + 224])
    begin = time.perf_counter()
    taps(2048, 10**9, "lanczos", 5 * 10**8, 224)
    assert time.perf_counter() - begin < 1


def test_the_order_of_the_passes_is_that_of_pillow_13():
    """Both orders differ here, so the rule matters."""
    pictures = [noise(np.random.default_rng(i), 128, 65) for i in range(2)]
    rows, columns = (on_device(pictures, (48, 26), "bicubic", columns_first=f) for f in (0, 1))
    assert (rows != columns).any()
    # 128 - 48 = 80 is not more than twice 65 - 25 = 40.
    for width, first in ((25, False), (26, True)):
        assert columns_first((128, 65), (48, width)) == first
        found = on_device(pictures, (48, width), "bicubic", columns_first=PILLOW_13 and first)
        for picture, image in zip(pictures, found, strict=True):
            np.testing.assert_array_equal(image, by_pillow(picture, (48, width), "bicubic"))
    assert not columns_first((20, 100), (40, 300))  # The height grows, and the width grows more.


def all_sizes():
    yield from ((size, to) for size in range(1, 41) for to in range(1, 60))
    yield from ((MOST_SIDE, to) for to in (1, 2, 3, 7, 224, 2047, 4096))
    yield from ((size, to) for size in (500, 1000) for to in (16, 224, 384, 999))


@pytest.mark.parametrize("name", FILTERS)
def test_no_sum_exceeds_int32(name):
    """The bounds in the module's docstring hold, whose largest term is sum(|c|)."""
    found = [taps(size, to, name).taps.astype(np.int64) for size, to in all_sizes()]
    most = max(np.abs(c).sum(1).max() for c in found)
    assert 2**BITS - 20 <= most < 1.6 * 2**BITS
    assert all((np.abs(c.sum(1) - 2**BITS) <= c.shape[1] / 2).all() for c in found)
    assert 255 * most + 2 ** (BITS - 1) < 2**30.7


def test_sides_hold_every_picture():
    assert [padded(side) for side in (1, 128, 129, 1025, MOST_SIDE)] == [128, 128, 192, 1536, 2048]
    assert list(SIDES) == sorted(SIDES)
    with pytest.raises(StopIteration):
        padded(MOST_SIDE + 1)


def test_sizes_of_one_bucket_share_a_program(monkeypatch):
    rng, traced = np.random.default_rng(2), []
    trace = module._resize_axis
    monkeypatch.setattr(module, "_resize_axis", lambda *x: traced.append(x) or trace(*x))
    jax.clear_caches()
    for height, width in ((128, 128), (90, 100), (128, 97)):
        on_device([noise(rng, height, width)], (32, 32), "bicubic")
    assert len(traced) == 2  # A program has two passes.


@pytest.mark.parametrize("name", FILTERS)
def test_no_result_has_more_coefficients_than_expected(name):
    for size, to in all_sizes():
        assert taps(size, to, name).taps.shape[1] <= most_taps(size, to, name)
        assert most_taps(size, to, name) <= most_taps(size + 1, to, name) <= TAPS[-1] + 1


def sum_in_another_order(weights, axis):
    return np.repeat(weights.sum(axis, keepdims=True) * (1 + 2**-20), weights.shape[axis], axis)


@pytest.mark.parametrize("changed", ["rounding", "sum", "support"])
def test_a_wrong_coefficient_is_noticed(monkeypatch, changed):
    name, to = "lanczos", (40, 50)
    pictures = [noise(np.random.default_rng(i), 100, 120) for i in range(3)]
    wanted = [by_pillow(picture, to, name) for picture in pictures]
    taps.cache_clear()
    with monkeypatch.context() as patch:
        if changed == "rounding":
            patch.setattr(module.np, "trunc", np.floor)
        elif changed == "sum":
            patch.setattr(module.np, "cumsum", sum_in_another_order)
        else:
            patch.setitem(FILTERS, name, (2.9, FILTERS[name][1]))
        taps(100, 40, name, 0, 40)
        taps(120, 50, name, 0, 50)
    try:
        first = order((100, 120), to)
        assert (on_device(pictures, to, name, columns_first=first) != np.stack(wanted)).any()
    finally:
        taps.cache_clear()


# The same arithmetic in numpy, for pictures that are too large for the device.


def matrix(size, to, name):
    """Returns the coefficients as a sparse matrix [to, size]."""
    first, found = taps(size, to, name)
    used = found != 0
    columns = first[:, None] + np.arange(found.shape[1])
    ends = np.cumsum([0, *used.sum(1)])
    return sparse.csr_array((found[used], columns[used], ends), shape=(to, size))


def in_numpy(picture, to, name):
    axes = (0, 1) if order(picture.shape[:2], to) else (1, 0)
    for axis in axes:
        moved = np.moveaxis(picture, axis, 0)
        flat = np.ascontiguousarray(moved.reshape(len(moved), -1)).astype(np.int32)
        sums = matrix(len(moved), to[axis], name) @ flat
        levels = np.clip((sums + 2 ** (BITS - 1)) >> BITS, 0, 255).astype(np.uint8)
        picture = np.moveaxis(levels.reshape(-1, *moved.shape[1:]), 0, axis)
    return picture


def photographs():
    folder = resources.files("pallas_patch_embed") / "photos"
    for name in ("astronaut", "chelsea", "coffee"):
        with Image.open(folder / f"{name}.png") as picture:
            yield picture.convert("RGB")


def random_picture(rng, most):
    """Returns a photograph or noise, in RGB or grey, of a random size."""
    height, width = (random_side(rng, side) for side in most)
    if rng.integers(3):
        photograph = list(photographs())[rng.integers(3)]
        picture = np.asarray(photograph.resize((width, height), Image.Resampling.NEAREST))
        return picture if rng.integers(3) else np.ascontiguousarray(picture[..., 1:2])
    return noise(rng, height, width, int(rng.choice([1, 3])))


def random_target(rng):
    """Returns the size of an encoder's images, or any other one."""
    if rng.integers(2):
        return (int(rng.choice([224, 256, 384, 512])),) * 2
    return random_side(rng, 1024), random_side(rng, 1024)


def check_coefficients(numbers):
    for number in numbers:
        rng = np.random.default_rng(number)
        picture, to = random_picture(rng, (6000, 8000)), random_target(rng)
        name = str(rng.choice(list(FILTERS)))
        wanted = by_pillow(picture, to, name)
        assert np.array_equal(in_numpy(picture, to, name), wanted), (number, picture.shape, to)


def check_device(numbers):
    for number in numbers:
        rng = np.random.default_rng(number)
        picture, to = random_picture(rng, (MOST_SIDE, MOST_SIDE)), random_target(rng)
        name = str(rng.choice(list(FILTERS)))
        first = order(picture.shape[:2], to)
        (found,) = on_device([picture], to, name, columns_first=first)
        assert np.array_equal(found, by_pillow(picture, to, name)), (number, picture.shape, to)


def test_coefficients_of_any_size_are_those_of_pillow():
    check_coefficients(range(8))


@pytest.mark.slow("compiles a program for each of 12 sizes")
def test_pictures_of_any_size_are_those_of_pillow():
    check_device(range(12))


@pytest.mark.exhaustive("resizes 2500 pictures of up to 8000 x 6000 pixels, for seven minutes")
def test_coefficients_of_many_sizes_are_those_of_pillow():
    check_coefficients(range(1000, 3500))


@pytest.mark.exhaustive("compiles a program for each of 400 sizes, for ten minutes")
def test_pictures_of_many_sizes_are_those_of_pillow():
    check_device(range(1000, 1400))
