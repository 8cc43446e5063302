"""The microbenchmark of TMA: its expected loads agree with patchify, and its kernels compile."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tma_rows
from benchmarks.machine_code import innermost_loop, read_cubin
from benchmarks.tma_rows import LOADS, PATCH, ROWS, TILE
from pallas_patch_embed.base.problem import PatchGeometry
from pallas_patch_embed.patch_embedding.patches import Encoding
from pallas_patch_embed.patch_embedding.patches import cut_into_rows as cut

OF_IMAGES = [rows for rows in ROWS if rows.mode != "kMatrix"]


@pytest.mark.parametrize("rows", OF_IMAGES, ids=lambda rows: rows.name)
def test_the_loads_of_a_tile_are_its_patches(rows):
    shape = (3, rows.side, rows.side, 3)
    images = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    levels = (
        np.asarray(cut(jnp.asarray(images), PatchGeometry(PATCH), Encoding("int8"))).astype(
            np.int16
        )
        + 128
    )
    patches = levels.reshape(-1, PATCH, 3 * PATCH)
    assert rows.phases(len(images)) * LOADS == rows.tiles(len(images)) * rows.loads
    for tile in range(rows.tiles(len(images))):
        wanted = patches[tile * TILE :][:TILE]
        for line in range(PATCH):
            loads = tile * rows.loads + line * rows.parts + np.arange(rows.parts)
            found = np.concatenate([rows.expected(images, load) for load in loads], axis=1)
            # The tile may begin inside the first row.
            begin = tile * rows.tile_bytes % rows.span
            found = found.reshape(-1)[begin:][: TILE * 3 * PATCH].reshape(-1, 3 * PATCH)
            assert len(found) == TILE
            assert (found[: len(wanted)] == wanted[:, line]).all()
            assert not found[len(wanted) :].any()


def test_swizzled_rows_are_put_in_order():
    (rows,) = (rows for rows in ROWS if rows.name == "im2col 96 swizzled")
    right = np.random.default_rng(0).integers(0, 256, (rows.box_rows, rows.row_bytes), np.uint8)
    place = np.zeros(rows.stride, np.uint8)
    for row, byte in np.ndindex(right.shape):
        at = 128 * row + byte
        # Bits 7 to 9 of an address are XORed into bits 4 to 6 (PTX ISA 5.5.7).
        place[at ^ (at >> 7 & 7) << 4] = right[row, byte]
    np.testing.assert_array_equal(rows.unswizzled(place), right)


@pytest.mark.usefixtures("nvcc")
def test_every_kernel_compiles_to_copies_by_tma_without_divisions():
    codes = {code.name: code.sass for code in read_cubin(tma_rows.compiled())}
    assert codes.keys() == {f"{rows.kernel}_{n}" for rows in ROWS for n in tma_rows.CLUSTERS}
    for name, sass in codes.items():
        assert sass.count("UTMALDG") >= LOADS // int(name[-1])
        assert ("MULTICAST" in sass) == (not name.endswith("_1"))
        assert (".IM2COL" in sass) == name.startswith("im2col")
        # A division by a number that is unknown at compile time takes as long as a load.
        loop = innermost_loop(sass, re.compile("UTMALDG"))
        assert loop and "MUFU" not in "".join(loop)
