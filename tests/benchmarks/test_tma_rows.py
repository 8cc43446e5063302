"""The microbenchmark of TMA: what it expects of a load is what patchify cuts, and it compiles."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import tma_rows
from benchmarks.machine_code import read_cubin
from benchmarks.tma_rows import LOADS, ROWS, SIDE, TILE, all_phases
from pallas_patch_embed.patches import rows as cut

NAMED = {rows.name: rows for rows in ROWS}


@pytest.mark.parametrize("name", ["im2col 16", "im2col 48", "im2col 96", "lines"])
def test_the_loads_of_a_tile_are_its_patches(name):
    rows = NAMED[name]
    images = np.random.default_rng(0).integers(0, 256, (3, SIDE, SIDE, 3), np.uint8)
    patches = np.asarray(cut(jnp.asarray(images), rows.patch, "int8")).astype(np.int16) + 128
    K = 3 * rows.patch**2
    patches = patches[..., :K].reshape(-1, K)
    loads = rows.lines * rows.parts
    tiles = all_phases(rows, len(images)) * LOADS // loads
    assert tiles == -(-len(patches) // TILE)
    for tile in range(tiles):
        wanted = patches[tile * TILE :][:TILE]
        found = [rows.expected(images, tile * loads + u) for u in range(loads)]
        if rows.kernel == "lines":
            # Whole lines hold the tile's patches from the first one's place in its line on.
            begin = tile * TILE % rows.width
            found = [x.reshape(-1, 3 * rows.patch)[begin:][:TILE] for x in found]
        found = np.concatenate(found, axis=1)
        assert (found[: len(wanted)] == wanted).all()
        assert not found[len(wanted) :].any()


@pytest.mark.usefixtures("nvcc")
def test_every_kernel_compiles_to_one_copy_by_tma():
    codes = {code.name: code.sass for code in read_cubin(tma_rows.compiled())}
    assert codes.keys() == {f"{rows.kernel}_{n}" for rows in ROWS for n in tma_rows.CLUSTERS}
    for name, sass in codes.items():
        assert "UTMALDG" in sass and ("MULTICAST" in sass) == (not name.endswith("_1"))
        assert (".IM2COL" in sass) == name.startswith("im2col")
