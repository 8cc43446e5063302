"""A signal that ends `embed` keeps every embedding, whatever the main thread is doing."""

import itertools
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.commands.shard_folders import MODEL, assert_same, by_id, encoded, expected, run, shards
from tests.encoder.goldens import checkpoint
from tests.short_suite import keep

PICTURES, BATCH = 16, 2

# The command line, with shards of three rows. `kind` is what the main thread does when it prints a
# line and waits: "compile" and "device" wait in C code for a lock that nothing releases, and with
# "write" and "hang" a shard is being written.
HELD = """
import ctypes, signal, sys, time

from pallas_patch_embed import __main__
from pallas_patch_embed.base import ending
from pallas_patch_embed.embed import embedder, folder, place

kind = sys.argv.pop(1)
libc = ctypes.CDLL(None)
mutex = ctypes.create_string_buffer(64)
libc.pthread_mutex_lock(mutex)


def held(how):
    if kind == how:
        print("held", flush=True)
        libc.pthread_mutex_lock(mutex)


starts = 0


def start(self, images, whole, start=embedder.Embedder.start):
    global starts
    starts += 1
    if starts == 6:
        held("compile")
    finish = start(self, images, whole)

    def finished(number=starts):
        if number == 4:
            held("device")
        return finish()

    return finished


def write(self, name, content, write=place.Local.write):
    if name == "embeddings/000000.parquet":
        held("hang")
        if kind == "write":
            print("held", flush=True)
            libc.pthread_mutex_timedlock(mutex, (ctypes.c_long * 2)(int(time.time()) + 2))
    return write(self, name, content)


for name in ending.WORDS:  # A shell may have started the tests with ignored signals.
    signal.signal(getattr(signal, name), signal.SIG_DFL)
embedder.Embedder.start, place.Local.write, folder.SHARD_ROWS = start, write, 3
if kind == "hang":
    ending.WRITING = 0.5
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""

WORDS = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated", signal.SIGHUP: "Hung up"}

# Number of pictures that are embedded when the main thread waits: one of the first batch, because
# its other picture is damaged, and two of each other batch. When a shard is written, which another
# thread has encoded, more may have been embedded.
EMBEDDED = {"compile": 5, "device": 5, "write": 3, "hang": 0}

CASES = [
    *itertools.product(WORDS, ("compile", "device", "write")),
    (signal.SIGTERM, "hang"),
]


@pytest.mark.parametrize(
    "number, kind",
    keep(
        CASES,
        lambda case: case == (15, "compile"),
        "a process each",
        lambda case: CASES.index(case) % 2,
    ),
)
def test_a_signal_keeps_what_is_embedded(tmp_path, number, kind):
    folder, out = tmp_path / "pictures", tmp_path / "out"
    folder.mkdir()
    contents = [(str(folder / f"{i:02}.png"), encoded(i)) for i in range(PICTURES)]
    for path, content in contents:
        with open(path, "wb") as file:
            file.write(content)
    (folder / "0.png").write_text("no picture")
    arguments = ["--checkpoint", checkpoint(MODEL), folder, "--out", out, "--batch", BATCH]
    process = subprocess.Popen(
        [sys.executable, "-c", HELD, kind, "embed", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
    )
    try:
        assert process.stdout.readline() == "held\n", process.communicate()[1]
        time.sleep(0.1)  # The main thread is in C code now.
        for _ in range(3):
            process.send_signal(number)
        said = process.communicate(timeout=10)[1].splitlines()
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert said[-1] == (
        f"{WORDS[number]}; the shards in {out} are kept; the same command resumes the work."
    )
    assert ("The latest results were not written" in said[-2]) == (kind == "hang")
    found = by_id(out) if EMBEDDED[kind] else {}
    assert list(found) == [path for path, _ in contents[: len(found)]]
    assert len(found) >= EMBEDDED[kind] and (len(found) == EMBEDDED[kind] or kind == "write")
    if EMBEDDED[kind]:
        assert shards(out, "__errors")["id"] == [str(folder / "0.png")]
    assert run([folder], out, batch=BATCH) == 1
    assert_same(by_id(out), expected(contents, batch=BATCH))
    assert not list(out.rglob("*.partial"))
