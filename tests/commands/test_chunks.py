"""An embedding has the same bits whatever other pictures a run embeds, and after a resumed run."""

import functools

import numpy as np
import pytest
from PIL import Image

from pallas_patch_embed.base.dtypes import DTYPES
from pallas_patch_embed.embed import Embedder, command
from pallas_patch_embed.embed.embedder import BATCH_ON_CPU
from tests.commands.shard_folders import assert_same, by_id, run
from tests.encoder.goldens import FIXED, NAFLEX, checkpoint
from tests.short_suite import keep

CASES = [(name, dtype) for name in (FIXED[0], NAFLEX[0]) for dtype in DTYPES]


@pytest.mark.parametrize(
    "name, dtype", keep(CASES, lambda case: case[1] == "int8", "a compile each")
)
def test_an_embedding_depends_neither_on_its_place_nor_on_other_pictures(name, dtype):
    embedder = Embedder(checkpoint(name), patch_dtype=dtype)
    rng = np.random.default_rng(0)
    size = embedder.encoder.config.image_size
    # NaFlex images of any size; the second one has as many patches as an image may have.
    sizes = [size] * 5 if size else [(64, 48), (128, 128), (16, 16), (32, 256), (48, 16)]
    images = [rng.integers(0, 256, (*size, 3), np.uint8) for size in sizes]
    alone = np.concatenate([embedder.start([image])() for image in images])
    assert len(np.unique(alone, axis=0)) == len(images)
    for order in (rng.permutation(len(images)) for _ in range(4)):
        for part in (order[: embedder.rows], order[embedder.rows :]):
            together = embedder.start([images[i] for i in part])()
            np.testing.assert_array_equal(together, alone[part])


def test_a_CPU_computes_few_pictures_at_a_time_unless_the_user_says_otherwise():
    assert Embedder(checkpoint(FIXED[0])).rows == BATCH_ON_CPU
    assert Embedder(checkpoint(FIXED[0]), batch=7).rows == 7


@pytest.fixture
def one_embedder(monkeypatch):
    """Compiles only once for all runs with the same options."""
    made = functools.cache(lambda path, options: Embedder(path, **dict(options)))
    monkeypatch.setattr(
        command, "Embedder", lambda path, **options: made(path, tuple(options.items()))
    )


@pytest.mark.parametrize("batch", keep([None, 64], lambda batch: batch == 64, "many runs"))
def test_the_number_of_pictures_of_a_run_does_not_change_embeddings(tmp_path, one_embedder, batch):
    """With this checkpoint, programs for 64 images and for 4 or fewer give different bits."""
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{i:02}.png" for i in range(65)]
    for path in paths:
        Image.fromarray(rng.integers(0, 256, (9, 12, 3), np.uint8)).save(path)
    assert run(paths, tmp_path / "all", batch=batch) == 0
    wanted = by_id(tmp_path / "all")
    assert list(wanted) == [str(path) for path in paths]
    for n in (1, 3, 5, 64) if batch is None else (3, 64):
        chosen = [paths[i] for i in rng.permutation(65)[:n]]
        out = tmp_path / f"{n}.npz"
        assert run(chosen, out, batch=batch) == 0
        with np.load(out) as file:
            found = dict(zip(map(str, file["paths"]), file["embeddings"], strict=True))
        assert_same(found, {str(path): wanted[str(path)] for path in chosen})
        # Later runs resume what the runs before them embedded.
        assert run(chosen, tmp_path / "resumed", batch=batch) == 0
    assert run(paths, tmp_path / "resumed", batch=batch) == 0
    assert_same(by_id(tmp_path / "resumed"), wanted)
