"""The command ends properly on signals, and when nobody reads its output."""

import ast
import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import pallas_patch_embed as ppe
from tests.encoder.goldens import checkpoint
from tests.short_suite import keep

MODEL = "hf_siglip_p14_224"
COMMAND = [sys.executable, "-m", "pallas_patch_embed", "embed"]

# Runs the command line, and sends a signal to this process when a module is imported or when a
# function is called for the nth time.
DRIVER = """
import gc, os, sys

number, moment, *sys.argv[1:] = int(sys.argv[1]), *sys.argv[2:]
kind, name, *nth = moment.split()


def strike():
    os.kill(os.getpid(), number)


class Finder:
    def find_spec(self, found, path=None, target=None):
        if found == name:
            sys.meta_path.remove(self)
            strike()


def struck(function, before=True):
    left = [int(nth[0]) if nth else 1]

    def call(*arguments, **keywords):
        left[0] -= 1
        if before and left[0] == 0:
            strike()
        result = function(*arguments, **keywords)
        if not before and left[0] == 0:
            strike()
        return result

    return call


def during_collection(phase, info):
    gc.callbacks.remove(during_collection)
    strike()


from pallas_patch_embed import __main__
from pallas_patch_embed.base import ending

if kind == "import":
    sys.meta_path.insert(0, Finder())
else:
    ending.install()
    from pallas_patch_embed.embed import command, embedder, npz, sources

    if kind == "half":
        savez = npz.np.savez

        def half(file, **arrays):
            file.write(b"half of it")
            file.flush()
            strike()
            file.seek(0)
            savez(file, **arrays)

        npz.np.savez = half
    elif kind == "collect":
        def collecting(*arguments, start=embedder.Embedder.start):
            gc.callbacks.append(during_collection)
            gc.collect()
            return start(*arguments)

        embedder.Embedder.start = collecting
    else:
        *owners, attribute = name.split(".")
        modules = dict(command=command, embedder=embedder, npz=npz, sources=sources)
        owner = (modules | dict(os=os))[owners[0]]
        for inner in owners[1:]:
            owner = getattr(owner, inner)
        setattr(owner, attribute, struck(getattr(owner, attribute), kind == "before"))
__main__.run()
"""

# Moments in every part of a run of three batches. In the last three of them the temporary file is
# already complete.
MOMENTS = (
    "import jax",
    "import pallas_patch_embed.embed",
    "before sources.find",
    "before embedder.load_encoder_for_side",
    "after embedder.load_encoder_for_side",
    "before embedder.Preprocessing.decode 2",
    "before embedder.Embedder.start 1",
    "collect start",
    "before embedder.Embedder.start 3",
    "before npz.written_atomically",
    "half savez",
    "before os.replace",
    "after os.replace",
    "before command._say",
)
WRITTEN = MOMENTS[-3:]
# From this moment on the last line says that a folder would keep what is embedded.
OPENED = MOMENTS.index("before embedder.Preprocessing.decode 2")
ENDING = {
    signal.SIGINT: "Interrupted",
    signal.SIGTERM: "Terminated",
    signal.SIGHUP: "Hung up",
}


@pytest.fixture(autouse=True)
def signals_are_not_ignored():
    """Restores default handlers: children inherit ignored signals, such as those of a shell's &."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in list(ENDING)[1:]}
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def arguments(tmp_path):
    """Returns arguments that embed five pictures in three batches into out/out.npz."""
    (tmp_path / "pictures").mkdir()
    for i in range(5):
        Image.new("RGB", (30, 20), (50 * i, 0, 0)).save(tmp_path / "pictures" / f"{i}.png")
    (tmp_path / "out").mkdir()
    out = tmp_path / "out" / "out.npz"
    return ["--checkpoint", checkpoint(MODEL), tmp_path / "pictures", "--out", out, "--batch", "2"]


def content(out):
    """Returns the paths in an output; reading each array verifies its checksum."""
    with np.load(out) as file:
        assert len(file["embeddings"]) == len(file["paths"])
        return [Path(str(path)).name for path in file["paths"]]


NEW = [f"{i}.png" for i in range(5)]


# SIGTERM and SIGHUP share SIGINT's handler, so they need fewer moments. SIGPIPE is ignored from the
# start.
STRUCK = [
    *itertools.product((signal.SIGINT, signal.SIGKILL), MOMENTS),
    *itertools.product((signal.SIGTERM, signal.SIGHUP), ("half savez", "after os.replace")),
    *itertools.product([signal.SIGPIPE], ("import jax", "half savez", "before command._say")),
]


@pytest.mark.parametrize(
    "number, moment",
    keep(
        STRUCK,
        lambda case: case in ((2, "import jax"), (15, "half savez"), (1, "after os.replace")),
        "a process each",
        # SIGINT strikes at every second moment, and SIGKILL at the others.
        lambda case: STRUCK.index(case) % 2 == (case[0] == signal.SIGKILL),
    ),
)
def test_a_signal_leaves_the_earlier_output_or_the_new_one_whole(
    tmp_path, arguments, number, moment
):
    out = tmp_path / "out" / "out.npz"
    np.savez(out, embeddings=np.ones((1, 4), np.float32), paths=np.array(["old"]))
    result = subprocess.run(
        [sys.executable, "-c", DRIVER, str(int(number)), moment, "embed", *arguments],
        capture_output=True,
        text=True,
    )
    left = [path.name for path in out.parent.iterdir()]
    assert "Traceback" not in result.stderr and "Exception" not in result.stderr
    if number == signal.SIGKILL:
        assert result.returncode == -number
        assert content(out) == (NEW if moment in WRITTEN[1:] else ["old"])
        return
    assert left == ["out.npz"]
    if number == signal.SIGPIPE:
        assert result.returncode == 0, result.stderr
        assert content(out) == NEW
        return
    assert result.returncode == 128 + number, result.stderr
    written = moment in WRITTEN
    assert content(out) == (NEW if written else ["old"])
    lines = result.stderr.splitlines()
    outcome = "the file was written" if written else "nothing was written"
    if not written and MOMENTS.index(moment) >= OPENED:
        outcome += (
            ", because an .npz file is written only at the end; if --out is a folder, the same "
            "command resumes the work"
        )
    assert lines[-1] == f"{ENDING[number]}; {outcome}."
    assert moment not in MOMENTS[:3] or len(lines) == 1


# A process that is ended by signals. `say` prints the rest of its line at the end.
PROCESS = """
import os, signal, threading, time

from pallas_patch_embed.base import ending

ending.PAUSE = 0.2


def say(*words):
    print(*words, flush=True)


def strike(number=signal.SIGTERM):
    os.kill(os.getpid(), number)


"""


def ended(code, **options):
    """Runs `code` in such a process; returns its exit code and its lines on both streams."""
    done = subprocess.run(
        [sys.executable, "-c", PROCESS + code], capture_output=True, text=True, **options
    )
    return done.returncode, done.stdout.splitlines(), done.stderr.splitlines()


LAST = ["Terminated; nothing was written."]


def test_a_signal_that_the_process_was_started_to_ignore_stays_ignored():
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
ending.install()
strike(signal.SIGHUP)
time.sleep(0.1)
say("goes on")
strike(signal.SIGTERM)
"""
    assert ended(code) == (143, ["goes on"], LAST)


def test_what_is_finished_is_written_once_although_more_signals_arrive():
    code = """
ending.install()


def write():
    say("written")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        strike(number)
    time.sleep(0.1)


with ending.written_at_end(lambda: say("too late")):
    pass
with ending.written_at_end(write):
    strike()
    time.sleep(60)
"""
    assert ended(code) == (143, ["written"], LAST)


@pytest.mark.parametrize(
    "function, why",
    [
        ("time.sleep(60)", "this takes more than 0.2 s"),
        ("raise OSError('the disk is full')", "the disk is full"),
    ],
)
def test_a_write_that_hangs_or_fails_is_said_and_the_process_ends(function, why):
    code = f"""
ending.install()
ending.WRITING = 0.2


def write():
    {function}


with ending.written_at_end(write):
    strike()
    time.sleep(60)
"""
    assert ended(code) == (143, [], [f"The latest results were not written: {why}.", *LAST])


def test_what_is_written_when_a_signal_arrives_is_completed_first():
    code = """
ending.install()
with ending.written_at_end(lambda: say("the rest")):
    with ending.deferred():
        strike()
        time.sleep(0.3)
        with ending.deferred():
            say("a part")
    say("not this")
"""
    assert ended(code) == (143, ["a part", "the rest"], LAST)


def test_a_lock_that_the_main_thread_holds_does_not_prevent_the_last_write():
    code = """
ending.install()
lock = threading.Lock()


def write():
    with lock:
        say("written")


with ending.written_at_end(write):
    with lock:
        strike()
    time.sleep(60)
"""
    assert ended(code) == (143, ["written"], LAST)


def test_signals_work_after_another_package_has_used_the_wakeup_descriptor():
    code = """
import asyncio


async def use_signals():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, print)


ending.install()
asyncio.run(use_signals())
strike()
time.sleep(60)
"""
    assert ended(code) == (143, [], LAST)


def test_a_handler_that_another_package_installs_later_is_used():
    code = """
ending.install()
signal.signal(signal.SIGINT, lambda *_: say("theirs"))
strike(signal.SIGINT)
time.sleep(0.1)
strike(signal.SIGTERM)
"""
    assert ended(code) == (143, ["theirs"], LAST)


def test_a_signal_to_a_forked_process_does_not_end_its_parent():
    code = """
import warnings

warnings.simplefilter("ignore")  # Python warns of a fork of a process with threads.
ending.install()
if child := os.fork():
    _, status = os.waitpid(child, 0)
    time.sleep(0.1)
    say(os.WTERMSIG(status))
    strike()
else:
    strike()
    time.sleep(60)
"""
    assert ended(code) == (143, ["15"], LAST)


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_signal_ends_a_process_whose_streams_are_closed(closed):
    code = "from pallas_patch_embed.base import streams\nstreams.open_missing()\nending.install()\n"
    code = f"{PROCESS}{code}strike()\ntime.sleep(60)"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", code]
    assert subprocess.run(command).returncode == 143


def test_a_standard_error_that_nobody_reads_does_not_keep_the_process():
    code = """
ending.install()
ending.PRINTING = 0.2
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * 4096)
except BlockingIOError:
    os.set_blocking(2, True)
strike()
time.sleep(60)
"""
    reader, writer = os.pipe()
    done = subprocess.run([sys.executable, "-c", PROCESS + code], stderr=writer)
    os.close(reader)
    os.close(writer)
    assert done.returncode == 143


def pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def test_the_run_goes_on_when_nobody_reads_its_progress(tmp_path, arguments):
    pipe = pipe_without_reader()
    (tmp_path / "pictures" / "bad.png").write_text("no picture")
    result = subprocess.run([*COMMAND, *arguments], stdout=pipe, stderr=pipe)
    os.close(pipe)
    assert result.returncode == 3 and content(tmp_path / "out" / "out.npz") == NEW


def test_standard_output_that_cannot_be_written_is_said_and_changes_no_exit_code(
    tmp_path, arguments
):
    with open("/dev/full", "w") as full:
        result = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE)
    error = result.stderr.decode()
    assert result.returncode == 0 and content(tmp_path / "out" / "out.npz") == NEW
    assert "Embedded 5 of 5 pictures" in error and "Standard output cannot be written" in error
    assert "Exception ignored" not in error


@pytest.mark.slow("a process each")
@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-", ">/dev/full 2>&1"])
def test_streams_that_are_closed_or_full_change_no_exit_code(tmp_path, arguments, closed):
    command = ["sh", "-c", f'"$@" {closed}', "sh", *COMMAND, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0 and content(tmp_path / "out" / "out.npz") == NEW
    assert "Exception ignored" not in result.stderr and "Embedded 5" not in closed
    assert ("Embedded 5 of 5" in result.stderr) == (closed == ">&-")


@pytest.mark.slow("a process")
def test_info_ends_quietly_where_nobody_reads_it():
    pipe = pipe_without_reader()
    command = [*COMMAND[:-1], "info"]
    result = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    os.close(pipe)
    assert result.returncode == -signal.SIGPIPE and not result.stderr


def test_a_thread_may_begin_a_file_while_a_signal_ends_the_command(tmp_path):
    code = f"""
def unlink(path, unlink=os.unlink):
    unlink(path)
    ending.state.unfinished.add(f"begun after {{path}}")


os.unlink = unlink
ending.state.unfinished |= {{{str(tmp_path / "a")!r}, {str(tmp_path / "b")!r}}}
ending.install()
strike()
time.sleep(60)
"""
    for name in "ab":
        (tmp_path / name).touch()
    assert ended(code) == (143, [], LAST) and not list(tmp_path.iterdir())


LAZY = """
import sys

import pallas_patch_embed as ppe

assert "jax" not in sys.modules
import pallas_patch_embed.backends
import pallas_patch_embed.patch_embedding.patches

assert "xla" in ppe.backend_names() and callable(ppe.patchify)
from pallas_patch_embed import *

assert pack is ppe.pack and set(ppe.__all__) <= set(dir(ppe)) and ppe.siglip2.load_encoder
print(*ppe.__all__)
"""


def test_the_package_imports_jax_when_a_public_name_is_used():
    result = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    tree = ast.parse(Path(ppe.__file__).read_text())
    (typed,) = [node for node in tree.body if ast.unparse(node).startswith("if TYPE_CHECKING")]
    imports = [node for node in ast.walk(typed) if isinstance(node, ast.ImportFrom)]
    seen_by_type_checkers = {alias.asname for line in imports for alias in line.names}
    assert {*result.stdout.split()} - {"__version__"} == seen_by_type_checkers
    assert not hasattr(ppe, "absent")


def test_the_package_is_imported_at_once_where_jax_is_for_jax_export():
    code = "import jax, pallas_patch_embed, sys; assert 'pallas_patch_embed.siglip2' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
