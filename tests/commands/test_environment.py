"""Environment variables with nonsense, a package without metadata, and files of others."""

import dataclasses
import importlib.metadata
import json
import os
import re
import subprocess
import sys

import jax
import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.base import devices, versions
from pallas_patch_embed.base.files import check_place
from pallas_patch_embed.commands import demo
from pallas_patch_embed.commands.check import command as check
from pallas_patch_embed.commands.tune import command as tune
from pallas_patch_embed.embed import provenance
from tests.commands.shard_folders import MODEL, encoded, run
from tests.encoder.goldens import checkpoint

NONSENSE = ("abc", "nan", "inf", "-1", "0", "1,5", "0x1", "\x1b[2J", "x" * 10**5)


@pytest.mark.parametrize("name", devices.MEMORY_FRACTIONS)
@pytest.mark.parametrize("text", NONSENSE, ids=range(len(NONSENSE)))
def test_nonsense_for_the_part_of_the_memory_is_refused_with_the_variable(
    monkeypatch, command_line, name, text
):
    for each in devices.MEMORY_FRACTIONS:
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, text)
    code, said = command_line("info")
    assert code == 2 and said.startswith(f"{name} is '") and "expected a positive number" in said
    assert len(said) < 500
    with pytest.raises(ValueError, match=name):
        tune.share_memory(2)
    assert os.environ[name] == text


def test_a_good_part_of_the_memory_is_shared(monkeypatch):
    current, deprecated = devices.MEMORY_FRACTIONS
    for variables, wanted in (({current: "0.5"}, "0.25"), ({deprecated: ".8"}, "0.4"), ({}, "0.3")):
        for name in devices.MEMORY_FRACTIONS:
            monkeypatch.delenv(name, raising=False)
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        tune.share_memory(2, default=0.6)
        assert os.environ[current] == wanted and deprecated not in os.environ


@pytest.mark.parametrize("command", ["check", "demo", "embed", "info", "tune"])
def test_every_command_says_what_to_install_if_JAX_cannot_start(
    tmp_path, monkeypatch, command_line, command
):
    (tmp_path / "a.png").write_bytes(encoded(1))
    options = {
        "demo": ["--out", tmp_path / "demo.png"],
        "embed": ["--checkpoint", checkpoint(MODEL), tmp_path / "a.png", "--out", tmp_path / "out"],
        "tune": ["--out", tmp_path / "tuned.json"],
    }
    monkeypatch.setenv("JAX_PLATFORMS", "nonsense")
    if command not in ("check", "tune"):  # These two start JAX in a child.
        monkeypatch.setattr(jax, "devices", lambda: [][0])
    code, said = command_line(command, *options.get(command, []))
    assert code == 2 and said.count("\n") == 1 and said.startswith("JAX cannot start: "), said
    assert "JAX_PLATFORMS is 'nonsense'" in said and "set JAX_PLATFORMS=cpu" in said
    assert "pip install 'pallas_patch_embed[cuda13]'" in said
    assert [path.name for path in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("platforms", ["cuda", "x" * 10**4, "\x1b[2J"], ids=range(3))
def test_a_platform_that_JAX_does_not_have_is_named(platforms):
    code = "from pallas_patch_embed.base import devices; devices.check_devices()"
    environment = os.environ | {"JAX_PLATFORMS": platforms}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if platforms == "cuda" and done.returncode == 0:
        pytest.skip("there is a GPU")
    last = done.stderr.splitlines()[-1]
    assert "NoDeviceError: JAX cannot start: " in last and len(last) < 1000
    assert f"JAX_PLATFORMS is {platforms[:50]!r}"[:-1] in last and "JAX_PLATFORMS=cpu" in last


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no\x1b device" * 1000)])
def test_what_JAX_raises_is_put_into_words(monkeypatch, error):
    def fails():
        raise error

    monkeypatch.setattr(jax, "devices", fails)
    with pytest.raises(devices.NoDeviceError, match=r"JAX cannot start: (the plugin|no)") as raised:
        devices.check_devices()
    assert str(raised.value).isprintable() and len(str(raised.value)) < 700


def test_a_variable_that_JAX_refuses_at_its_import_is_named():
    done = subprocess.run(
        [sys.executable, "-m", "pallas_patch_embed", "--version"],
        env=os.environ | {"JAX_ENABLE_X64": "nonsense"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert re.fullmatch("JAX cannot be imported: .*nonsense.*JAX_ENABLE_X64.*\n", done.stderr)


def test_no_metadata_of_an_installation_is_needed(tmp_path, monkeypatch):
    """As for a source tree on PYTHONPATH, or a Bazel target."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = provenance.versions()
    assert found["pallas_patch_embed"] == ppe.__version__
    assert (found["jax"], found["numpy"]) == (jax.__version__, np.__version__)
    assert versions.version("jax") == jax.__version__
    assert versions.version("absent") == versions.MISSING
    (tmp_path / "a.png").write_bytes(encoded(1))
    assert run([tmp_path / "a.png"], tmp_path / "out") == 0
    manifest = json.loads((tmp_path / "out" / "_manifest.json").read_text())
    assert manifest["versions"] == found


def test_an_nvidia_smi_that_hangs_or_lies_is_left_out(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    for script, wanted in {
        "sleep 1000": "",
        "yes": "",
        "exit 1": "",
        "echo 580.1; exit 3": "",
        "echo a, b": "",
        "echo": "",
        "echo 580.1": "580.1",
    }.items():
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(versions, "NVIDIA_SMI_SECONDS", 0.3 if wanted == "" else 60.0)
        assert versions.driver() == wanted, script
        assert check.gpus() == []


# Files that a command would replace.

REPORT = {"complete": True, "all_right": True, "options": {}, "cases": []}
OTHERS = (
    b"",
    b"precious",
    b"{}",
    b"[]",
    b"null",
    b"[" * 10**5,
    b"\x89PNG\r\n\x1a\n",
    b"\xff" * 100,
)
OTHERS += (json.dumps(REPORT | {"cases": {}}).encode(), json.dumps(REPORT).encode() + b"x")
OTHERS += (json.dumps(REPORT).encode() + b" " * check.MOST_BYTES, b"pallas-patch-embed demo")


@pytest.mark.parametrize("content", OTHERS, ids=range(len(OTHERS)))
@pytest.mark.parametrize("is_link", [False, True], ids=["file", "link"])
@pytest.mark.parametrize(
    "option", [("check", "--report"), ("demo", "--out"), ("tune", "--out"), ("embed", "--out")]
)
def test_no_command_replaces_a_file_that_it_did_not_write(
    tmp_path, monkeypatch, command_line, content, is_link, option
):
    command, name = option
    suffix = {"demo": "png", "embed": "npz"}.get(command, "json")
    path = file = tmp_path / f"out.{suffix}"
    if is_link:
        file = tmp_path / "precious"
        path.symlink_to(file)
    file.write_bytes(content)
    (tmp_path / "a.png").write_bytes(encoded(1))
    more = []
    if command == "embed":
        more = [tmp_path / "a.png", "--checkpoint", checkpoint(MODEL)]
    if command == "tune":
        monkeypatch.setattr(
            tune, "machine_of", lambda _: tune.Machine("a stand-in", {"chip": "one"})
        )
    code, said = command_line(command, name, path, *more)
    assert code == 2 and str(path) in said
    assert "did not write it" in said or "is not a valid file of measured configs" in said
    assert file.read_bytes() == content and path.is_symlink() == is_link


def test_a_command_replaces_what_it_wrote(tmp_path, monkeypatch):
    (tmp_path / "report.json").write_text(json.dumps(REPORT))
    check_place(tmp_path / "report.json", "", check.is_report)
    names, images = demo.photographs()
    wanted = np.ones((len(names), 196, 8), np.float32)
    result = demo.DtypeMeasurement("bfloat16", "xla", 0.0, 0.0, 1.0, 1, 1.0, wanted)
    results = [dataclasses.replace(result, dtype=dtype) for dtype in ("float32", "bfloat16")]
    monkeypatch.setattr(demo, "_draw_errors", lambda *_: None)
    monkeypatch.setattr(demo, "_draw_neighbours", lambda *_: None)
    for _ in range(2):
        check_place(tmp_path / "demo.png", "", demo.is_own)
        demo.draw(tmp_path / "demo.png", names, images, wanted, results, 16)
    (tmp_path / "link").symlink_to("report.json")
    check_place(tmp_path / "link", "", check.is_report)


@pytest.mark.parametrize("target", ["absent/report.json", "link", "folder", "/dev/null"])
def test_a_link_to_no_regular_file_is_refused(tmp_path, target):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(ValueError, match=r"dangling link|not a regular file"):
        check_place(tmp_path / "link", "--report is link")
