"""`embed` shows its progress as a bar on a terminal, as lines elsewhere; --quiet disables both."""

import io
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from pallas_patch_embed.embed import progress
from pallas_patch_embed.embed.progress import Progress
from tests.commands.shard_folders import COMMAND, MODEL, encoded
from tests.encoder.goldens import checkpoint
from tests.short_suite import keep


@pytest.fixture
def clock(monkeypatch):
    """Replaces the clock by one that only the test advances."""

    class Clock:
        now = 1000.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_without_a_terminal_there_is_a_line_now_and_then(clock, capsys):
    with Progress() as shown:
        shown.total, shown.before = 1000, 100
        clock.now += 20
        shown.embedded(50)
        assert capsys.readouterr().err == ""
        clock.now += 20
        shown.embedded(50)
        assert capsys.readouterr().err == (
            "200 of 1000 pictures, 0 errors, 2.5 pictures/s, 5 minutes left\n"
        )
        shown.failed("a\nb.png", "it is\nbroken")
        assert capsys.readouterr().err == "No embedding of a\\nb.png: it is\\nbroken.\n"
        clock.now += 40
        shown.skipped(failed=False)
        assert "201 of 1000 pictures, 1 errors, 1.3 pictures/s" in capsys.readouterr().err
    assert capsys.readouterr().err == "1.3 pictures/s, 80 s.\n"


def test_a_hundred_errors_are_named_and_the_others_counted(clock, capsys):
    with Progress() as shown:
        for i in range(150):
            shown.failed(f"{i}.png", "broken")
        lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "No embedding of 0.png: broken." and len(lines) == 101
    assert (
        lines[-1] == "Further pictures without an embedding are counted, but not listed."
        and shown.errors == 150
    )


def test_a_terminal_shows_a_bar_with_rate_errors_and_time_left(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "120")
    with Progress() as shown:
        bar: Any = shown._bar
        bar.mininterval = bar.miniters = 0
        shown.total = 40
        for _ in range(10):
            shown.embedded(2)
        shown.failed("a.png", "broken")
    text = sys.stderr.getvalue()
    assert "No embedding of a.png: broken." in text
    last = text.split("\r")[-1]
    # The bar shows time spent < time left, then the rate.
    assert re.search(r"21/40 \[\d\d:\d\d<\d\d:\d\d, .* pictures/s, errors=1\]", last), text


@pytest.mark.parametrize(
    "kind",
    keep(
        ["pipe", "terminal"],
        lambda kind: kind == "terminal",
        "starts a process for each case; the short suite keeps the terminal, where a bar would be",
    ),
)
def test_quiet_shows_nothing_but_what_went_wrong(tmp_path, kind):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "a.png").write_bytes(encoded(1))
    (pictures / "bad.png").write_text("no picture")
    reader, writer = os.openpty() if kind == "terminal" else os.pipe()
    command = [*COMMAND, "--checkpoint", checkpoint(MODEL), pictures]
    command = [*map(str, command), "--out", str(tmp_path / "out.npz"), "--quiet"]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    assert result.returncode == 3
    assert result.stdout == f"Embedded 1 of 2 pictures into {tmp_path / 'out.npz'}.\n"
    said = os.read(reader, 10**5).decode()
    os.close(writer)
    os.close(reader)
    assert said.strip() == "1 pictures could not be read or embedded."
