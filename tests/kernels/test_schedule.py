"""The schedule has every tile once, in segments of tiles that share their rows of the table."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_patch_embed.backends import schedule


def tiles_of(run):
    """Lists the tiles of a segment, in order."""
    return run[schedule.FIRST_TILE] + run[schedule.STRIDE] * np.arange(run[schedule.TILES])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    M=st.integers(0, 5000),
    S=st.integers(1, 800),
    tile_m=st.sampled_from([1, 7, 64, 128, 256]),
    workers=st.integers(1, 200),
)
def test_every_tile_is_computed_once_with_its_rows_of_the_table(M, S, tile_m, workers):
    table = schedule.segments(M, S, tile_m, workers)
    assert table.dtype == np.int32 and table.shape[0] == workers and table.shape[2] == 4
    tiles = math.ceil(M / tile_m)
    counts, seen = [], []
    for runs in table:
        mine = [tiles_of(run) for run in runs]
        for run, its_tiles in zip(runs, mine):
            rows = its_tiles.astype(np.int64) * tile_m % S
            assert (rows == run[schedule.TABLE_ROW]).all()
        counts.append(sum(map(len, mine)))
        seen += [tile for its_tiles in mine for tile in its_tiles]
    assert sorted(seen) == list(range(tiles))
    assert max(counts) - min(counts) <= 1
    assert not table[table[:, :, schedule.TILES] == 0].any()


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    images=st.integers(1, 300),
    S=st.sampled_from([64, 196, 256, 576, 729, 1024]),
    workers=st.sampled_from([1, 33, 66, 132]),
)
def test_a_worker_changes_its_rows_of_the_table_as_rarely_as_possible(images, S, workers):
    M = images * S
    table = schedule.segments(M, S, 64, workers)
    phases = S // math.gcd(S, 64)
    # A phase is split only where one worker's share ends and the next one begins.
    assert np.count_nonzero(table[:, :, schedule.TILES]) <= phases + workers - 1
    for runs in table:
        rows = runs[runs[:, schedule.TILES] > 0][:, schedule.TABLE_ROW]
        assert len(set(rows)) == len(rows)


def test_the_headline_changes_its_rows_of_the_table_at_most_three_times():
    table = schedule.segments(4736 * 196, 196, 64, 33)
    assert table.shape == (33, 3, 4)
    assert set(table[:, :, schedule.STRIDE].flat) == {0, 49}


@pytest.mark.parametrize("B", [1, 3])
def test_per_image_tables_are_read_row_by_row(B):
    M = B * 196
    for runs in schedule.segments(M, M, 64, 5):
        for run in runs[runs[:, schedule.TILES] > 0]:
            assert run[schedule.TILES] == 1
            assert run[schedule.TABLE_ROW] == run[schedule.FIRST_TILE] * 64


def test_without_positions_a_worker_has_one_segment():
    table = schedule.segments(1000, 1, 64, 4)
    np.testing.assert_array_equal(
        table, [[[0, 4, 1, 0]], [[4, 4, 1, 0]], [[8, 4, 1, 0]], [[12, 4, 1, 0]]]
    )
