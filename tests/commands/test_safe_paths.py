"""Processes that the commands start import nothing from the current folder."""

import os
import sys

import pytest

from pallas_patch_embed.backends import cuda
from tests.commands.current_folder import fill, installed, ran
from tests.commands.shard_folders import MODEL, encoded
from tests.encoder.goldens import checkpoint


@pytest.fixture
def here(tmp_path):
    """Returns a folder with a module for every module of the standard library."""
    (tmp_path / "here").mkdir()
    fill(tmp_path / "here")
    return tmp_path / "here"


# Starts a child process and the resource tracker, and what multiprocessing's other start method and
# a child of the child start. It waits until all of them have imported their modules.
CHILDREN = """
import multiprocessing, subprocess, sys
from multiprocessing import resource_tracker
from pallas_patch_embed.base import child

CODE = "import pickle, json, sys; print(sys.flags.safe_path)"

def answer(send):
    import json, pickle, tempfile
    send(subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True).stdout)

def nothing():
    pass

if __name__ == "__main__":
    with child.Child(answer) as one:
        print(*one.ask(), end="")
    semaphore = multiprocessing.get_context("spawn").Semaphore()
    with child.safe_paths():
        process = multiprocessing.get_context("forkserver").Process(target=nothing)
        process.start()
    process.join()
    print(process.exitcode)
    resource_tracker._resource_tracker._stop()
    # Other programs of this process are not changed.
    print(subprocess.run([sys.executable, "-c", "import string"]).returncode)
"""


def test_children_import_nothing_from_the_current_folder(here, tmp_path):
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done, imported = ran(here, sys.executable, script)
    assert done.stdout.splitlines() == ["True", "0", "1"], done.stderr
    # Only the last program, which is the script's own, has imported one.
    assert imported == ["string"]


def test_check_and_tune_import_nothing_from_the_current_folder(here):
    command = installed("pallas-patch-embed")
    done, imported = ran(here, command, "check", "--backend", "xla", "--only", "no such case")
    assert done.returncode == 2 and "--only is 'no such case'" in done.stderr, done.stderr
    assert imported == []
    done, imported = ran(here, command, "tune", "--out", "tuned.json")
    assert done.returncode == 2 and "expected an NVIDIA GPU" in done.stderr, done.stderr
    assert imported == []


def test_embed_imports_nothing_from_the_current_folder(here, tmp_path):
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(560):  # The first 512 pictures are decoded without processes.
        (folder / f"{i}.png").write_bytes(encoded(i))
    options = ["--checkpoint", os.path.abspath(checkpoint(MODEL)), "--workers", "2", "--quiet"]
    command = installed("pallas-patch-embed"), "embed", folder, "--out", "out", "--batch", "32"
    done, imported = ran(here, *command, *options, JAX_DISABLE_MOST_OPTIMIZATIONS="1")
    assert done.returncode == 0 and "Embedded 560" in done.stdout, done.stderr
    assert imported == []


# Plans with every backend and computes, and prints each process that Python starts.
OPERATOR = """
import sys
started = []
KINDS = ("subprocess.Popen", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn")
sys.addaudithook(lambda event, _: started.append(event) if event in (*KINDS, "os.system") else None)
import numpy as np
import pallas_patch_embed as ppe
from pallas_patch_embed.backends import BACKENDS, cuda, ranked
from pallas_patch_embed.base.chips import B200, H200, Target
from pallas_patch_embed.base.problem import Problem

cuda.LIBRARY = cuda.LIBRARY.with_name("absent.so")
params = ppe.pack(np.ones((16, 16, 3, 64)), np.zeros(64), None, patch_size=16, dtype="int8")
images = np.zeros((1, 32, 32, 3), np.uint8)
print(ppe.explain(images, params))
ppe.embed_images(images, params).block_until_ready()
problem = Problem(
    patches=(1, 4, 768), weight=(64, 768), scale=(64,), table=(4, 64), dtype="int8",
    table_dtype="bfloat16", out_dtype="bfloat16",
)
for chip in (H200, B200):
    for name in BACKENDS:
        ranked(problem, Target("cuda", chip), backend=name)
for name in ("cuda", "mosaic_sm90"):
    try:
        ppe.embed_images(images, params, backend=name)
    except NotImplementedError as error:
        print(error)
print("started:", started)
"""


def test_no_call_of_the_operator_starts_a_process(here, tmp_path):
    compiler = f'#!/bin/sh\necho "$0" >> {tmp_path}/executed\nexec sleep 1000\n'
    for folder in ("path", "here/.venv/bin", "here/bin", "here"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name in ("nvcc", "c++", "gcc", "nvidia-smi", "ptxas"):
            (tmp_path / folder / name).write_text(compiler)
            (tmp_path / folder / name).chmod(0o755)
    path = f"{tmp_path}/path::.:{os.environ['PATH']}"
    (tmp_path / "operator_calls.py").write_text(OPERATOR)
    done, imported = ran(here, sys.executable, tmp_path / "operator_calls.py", PATH=path)
    assert done.returncode == 0, done.stderr
    assert "started: []" in done.stdout and not (tmp_path / "executed").exists()
    assert f"CUDACXX={tmp_path}/path/nvcc make ffi" in done.stdout
    assert imported == []


def test_the_packages_own_files_name_no_config_that_must_be_compiled():
    from pallas_patch_embed.backends import stored

    for path in stored.FOLDER.glob("*.json"):
        for result in stored.read(path).results.values():
            assert (result.config or {}).get("tuning") is None
    assert cuda.TARGET
