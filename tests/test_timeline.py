"""The trace of a kernel: reading it, its table and its picture."""

import json

import pytest

from benchmarks import timeline
from benchmarks.timeline import Span


@pytest.fixture
def trace(tmp_path):
    """A trace as Mosaic's profiler writes it: nested spans of two warps of block 1."""
    path = tmp_path / "body-trace.json"
    events = [
        ("multiply", "B", 5.0, 4),
        ("wait for a turn", "B", 5.5, 4),
        ("wait for a turn", "E", 6.0, 4),
        ("multiply", "E", 7.0, 4),
        ("feed a tile", "B", 5.0, 8),
        ("feed a tile", "E", 5.25, 8),
        ("feed a tile", "B", 6.0, 8),
        ("feed a tile", "E", 6.75, 8),
    ]
    path.write_text(
        json.dumps(
            {
                "traceEvents": [
                    {"name": name, "ph": ph, "ts": ts, "pid": 3, "tid": 1 + 12 + warp}
                    for name, ph, ts, warp in events
                ]
            }
        )
    )
    return path


def test_spans_are_read_with_their_warps(trace):
    assert timeline.read(trace) == [
        Span(1, 4, "wait for a turn", 5500, 6000),
        Span(1, 4, "multiply", 5000, 7000),
        Span(1, 8, "feed a tile", 5000, 5250),
        Span(1, 8, "feed a tile", 6000, 6750),
    ]


def test_the_table_has_mean_and_spread_of_each_role(trace):
    rows = [line.split() for line in timeline.table(timeline.read(trace)).splitlines()]
    assert ["multiply", "1", "2000", "2000"] in rows
    feed = next(row for row in rows if row[0] == "feed")
    assert feed[3:5] == ["2", "500"]


def test_the_picture_is_drawn(trace, tmp_path):
    out = tmp_path / "timeline.png"
    timeline.draw(timeline.read(trace), "a title", out)
    assert out.read_bytes().startswith(b"\x89PNG")
