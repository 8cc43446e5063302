"""A run that is killed at any moment, or whose disk is full, loses no embedding of a shard."""

import os
import random
import shutil
import signal
import subprocess
import sys

import pytest

from tests.commands.shard_folders import COMMAND, MODEL, assert_same, by_id, encoded, expected
from tests.encoder.goldens import checkpoint

PICTURES, KILLS = 750, 5

# The command line with small shards. A thread kills the process at a random moment after `kill`
# pictures were decoded, and the run cannot end before that.
KILLED = """
import os, random, signal, sys, threading, time

from pallas_patch_embed import __main__
from pallas_patch_embed.embed import decoders, folder, preprocessing

kill, seed = int(sys.argv.pop(1)), int(sys.argv.pop(1))
decoded = threading.Semaphore(0)


def decode(self, *arguments, decode=preprocessing.Preprocessing.decode):
    decoded.release()
    return decode(self, *arguments)


def strike():
    for _ in range(kill):
        decoded.acquire()
    time.sleep(random.Random(seed).uniform(0, 0.2))
    os.kill(os.getpid(), signal.SIGKILL)


def finish(self, finish=folder.Folder.finish):
    if kill:
        threading.Event().wait()
    return finish(self)


folder.SHARD_ROWS, folder.Folder.finish, decoders.ASKED = 16, finish, 4
preprocessing.Preprocessing.decode = decode
if kill:
    threading.Thread(target=strike, daemon=True).start()
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""


def make_pictures(folder, n):
    folder.mkdir()
    for i in range(n):
        (folder / f"{i:05}.png").write_bytes(encoded(i))
    return [(str(path), path.read_bytes()) for path in sorted(folder.iterdir())]


@pytest.mark.slow("starts 6 processes and embeds 750 pictures twice")
def test_a_run_killed_at_random_moments_has_every_id_once_and_the_same_numbers(tmp_path):
    contents = make_pictures(tmp_path / "pictures", PICTURES)
    out = tmp_path / "out"
    arguments = ["embed", "--checkpoint", checkpoint(MODEL), tmp_path / "pictures"]
    arguments = [*map(str, arguments), "--out", str(out), "--batch", "8", "--quiet"]
    seed = random.SystemRandom().randrange(2**31)
    moments = random.Random(seed)
    before = 0
    for i in range(KILLS):
        # Ten batches are begun before the first two are in a shard: three are decoded ahead, three
        # are computed, and a shard is written one or two batches after it is full. So each run
        # makes progress.
        kill = moments.randrange(90, PICTURES // KILLS)
        driver = [sys.executable, "-c", KILLED, str(kill), str(seed + i), *arguments]
        result = subprocess.run(driver, capture_output=True, text=True)
        assert result.returncode == -signal.SIGKILL, result.stderr
        found = len(by_id(out)) if (out / "embeddings").exists() else 0
        assert before <= found < PICTURES, f"seed {seed}, run {i}"
        before = found
    assert before > 0, f"seed {seed}"
    driver = [sys.executable, "-c", KILLED, "0", "0", *arguments]
    result = subprocess.run(driver, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert f"Earlier runs had embedded {before}." in result.stdout
    assert_same(by_id(out), expected(contents, batch=8))
    assert not list(out.rglob("*.partial"))


@pytest.fixture
def small_disk(tmp_path):
    """Returns a function that runs a command line with a file system of 256 KiB at `disk`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = f"mount -t tmpfs -o size=256k none '{disk}'"
    # The mount is in a separate namespace, which disappears with the process.
    for namespace in (["unshare", "--mount"], ["unshare", "--mount", "--map-root-user"]):
        if shutil.which("unshare") is None:
            break
        tried = subprocess.run([*namespace, "sh", "-c", mount], capture_output=True)
        if tried.returncode == 0:
            break
    else:
        namespace = None
    if shutil.which("unshare") is None or namespace is None:
        pytest.skip("this machine does not let tests mount a small file system")

    def run(command, kept):
        """Runs the command and copies `disk` to `kept`; returns exit code and output."""
        script = f"{mount} && ( \"$@\"; code=$?; cp -r '{disk}' '{kept}'; exit $code )"
        whole = [*namespace, "sh", "-c", script, "sh", *map(str, command)]
        return subprocess.run(whole, capture_output=True, text=True)

    return run


# A tmpfs stores each shard in a page of 4 KiB at least, so 94 shards need more than it has.
SMALL_SHARDS = """
import sys
from pallas_patch_embed import __main__
from pallas_patch_embed.embed import folder
folder.SHARD_ROWS = 16
sys.argv[0] = "pallas-patch-embed"
__main__.run()
"""


@pytest.mark.slow("starts two processes and embeds 1500 pictures twice")
def test_a_disk_that_gets_full_keeps_its_shards_and_the_run_goes_on_elsewhere(tmp_path, small_disk):
    contents = make_pictures(tmp_path / "pictures", PICTURES)
    arguments = ["--checkpoint", checkpoint(MODEL), tmp_path / "pictures", "--batch", "16"]
    command = [sys.executable, "-c", SMALL_SHARDS, "embed", *arguments]
    result = small_disk([*command, "--out", tmp_path / "disk" / "out"], tmp_path / "kept")
    assert result.returncode == 4, result.stderr
    assert "No space left on device" in result.stderr
    assert "run the same command again to resume the work" in result.stderr
    out = tmp_path / "kept" / "out"
    found = by_id(out)
    assert 0 < len(found) < PICTURES and not list(out.rglob("*.partial"))
    result = subprocess.run([*map(str, command), "--out", str(out)], capture_output=True, text=True)
    assert result.returncode == 0 and f"Earlier runs had embedded {len(found)}." in result.stdout
    assert_same(by_id(out), expected(contents, batch=16))


@pytest.mark.slow("starts a process")
def test_an_npz_for_which_a_disk_is_too_small_is_elsewhere(tmp_path, small_disk):
    import numpy as np

    contents = make_pictures(tmp_path / "pictures", 800)  # The embeddings take 300 KiB.
    (tmp_path / "temporary").mkdir()
    command = [*COMMAND, "--checkpoint", checkpoint(MODEL), tmp_path / "pictures"]
    command = ["env", f"TMPDIR={tmp_path / 'temporary'}", *command, "--batch", "16"]
    result = small_disk([*command, "--out", tmp_path / "disk" / "out.npz"], tmp_path / "kept")
    assert result.returncode == 4 and "No space left on device" in result.stderr, result.stderr
    (elsewhere,) = (tmp_path / "temporary").glob("*/out.npz")
    assert f"The embeddings are in {elsewhere}" in result.stderr
    assert os.listdir(tmp_path / "kept") == []
    with np.load(elsewhere) as file:
        found = dict(zip(map(str, file["paths"]), file["embeddings"]))
    assert_same(found, expected(contents, batch=16))
