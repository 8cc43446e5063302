"""A kernel's trace is read, tabulated and drawn."""

import json

import numpy as np
import pytest

from benchmarks import timeline
from benchmarks.timeline import Span


@pytest.fixture
def trace(tmp_path):
    """Writes a trace like Mosaic's profiler, with nested spans of two warps of block 1."""
    path = tmp_path / "body-trace.json"
    events = [
        ("multiply", "B", 5.0, 4),
        ("wait for the others' products", "B", 5.5, 4),
        ("wait for the others' products", "E", 6.0, 4),
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
        Span(1, 4, "wait for the others' products", 5500, 6000),
        Span(1, 4, "multiply", 5000, 7000),
        Span(1, 8, "feed a tile", 5000, 5250),
        Span(1, 8, "feed a tile", 6000, 6750),
    ]


def test_the_table_has_mean_and_spread_of_each_role_and_means_by_warp(trace):
    spans = [*timeline.read(trace), Span(1, 5, "multiply", 0, 1000)]
    rows = [line.split() for line in timeline.table(spans).splitlines()]
    assert rows[0][-6:] == ["warp", "4", "warp", "5", "warp", "8"]
    assert ["multiply", "2", "1500", "1950", "2000", "1000"] in rows
    assert ["feed", "a", "tile", "2", "500", "725", "500"] in rows


def stamp(cycles, event):
    """Returns a stamp in the format of ffi/timeline.cuh."""
    return cycles % 2**28 << 4 | timeline.EVENTS.index(event) + 1


def test_stamps_are_read_also_where_the_clock_wraps():
    stamps = np.zeros((2, 3, 8), np.uint32)
    stamps[1, 2, :6] = [
        stamp(2**28 - 100, "issue loads"),
        stamp(2**28 - 70, "wait: free slot"),
        stamp(2**28 + 30, "issue loads"),
        stamp(2**28 + 32, "tile"),
        stamp(2**28 + 35, "epilogue store"),
        stamp(2**28 + 36, "tile"),
    ]
    begin = 2**28 - 100
    assert timeline.read_stamps(stamps) == [
        Span(1, 2, "wait: free slot", begin, begin + 30, 0),
        Span(1, 2, "issue loads", begin + 30, begin + 130, 0),
        Span(1, 2, "tile", begin, begin + 132, 0),
        Span(1, 2, "epilogue store", begin + 132, begin + 135, 1),
        Span(1, 2, "tile", begin + 132, begin + 136, 1),
    ]


def test_the_picture_is_drawn(trace, tmp_path):
    out = tmp_path / "timeline.png"
    timeline.draw(timeline.read(trace), "a title", out)
    assert out.read_bytes().startswith(b"\x89PNG")
