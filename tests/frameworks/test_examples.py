"""The programs and the notebooks of examples/ run, from the repository's root."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from tests.repository import ROOT, environment

EXAMPLES = {
    "flax_linen": "flax",
    "flax_nnx": "flax",
    "equimo_siglip2": "equimo",
    "keras_hub_siglip": "keras_hub",
}


@pytest.mark.frameworks
@pytest.mark.parametrize("name, package", EXAMPLES.items(), ids=EXAMPLES)
def test_an_example_runs(name, package, monkeypatch, capsys):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is missing: `make test-frameworks` installs it")
    monkeypatch.chdir(ROOT)
    runpy.run_path(f"examples/{name}.py", run_name="__main__")
    assert "relative difference 0.0" in capsys.readouterr().out


def test_every_example_is_run():
    files = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert files == {*EXAMPLES, "zero_shot"}


def test_the_zero_shot_example_compares_photographs_with_classes(monkeypatch, capsys):
    pytest.importorskip("tokenizers", reason="tokenizers is missing: the extra text has it")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["zero_shot.py"])
    found = runpy.run_path("examples/zero_shot.py", run_name="__main__")
    images = np.asarray(found["images"], np.float64)
    of_sentences = found["text"](found["tokenizer"](found["sentences"])).text_embeds
    texts = np.asarray(of_sentences, np.float64)
    images, texts = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (images, texts))
    classes = texts.reshape(4, 3, -1).mean(1)
    classes /= np.linalg.norm(classes, axis=1, keepdims=True)
    wanted = np.exp(float(found["similarity"].scale) * images @ classes.T)
    wanted /= wanted.sum(1, keepdims=True)
    np.testing.assert_allclose(found["probabilities"], wanted, atol=1e-5)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["astronaut", "chelsea", "coffee"]
    for line, row in zip(lines, wanted):
        best = found["CLASSES"][row.argmax()]
        assert line.split(": ")[1].startswith(f"{best} {row.max():.1%}")


def run_notebook(name, monkeypatch):
    """Runs the cells of a notebook; returns their variables, and what its commands printed."""
    notebook = json.loads((ROOT / f"examples/{name}.ipynb").read_text())
    # The file has no outputs, so they cannot be outdated.
    assert not any(c.get("outputs") for c in notebook["cells"])
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    namespace, printed = {}, []
    for number, cell in enumerate(notebook["cells"], 1):
        code = []
        for line in "".join(cell["source"]).splitlines() if cell["cell_type"] == "code" else ():
            if line.startswith("!"):  # IPython runs a command, in which {name} is a variable.
                exec(compile("\n".join(code), f"cell {number}", "exec"), namespace)
                code, command = [], line[1:].format_map(namespace)
                environ = environment(PATH=path)
                done = subprocess.run(
                    command, shell=True, capture_output=True, text=True, env=environ
                )
                assert done.returncode == 0, done.stderr
                printed.append(done.stdout)
            else:
                code.append(line)
        exec(compile("\n".join(code), f"cell {number}", "exec"), namespace)
    return namespace, printed


def test_the_notebook_of_one_photo_runs(monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra demo has it")
    found, _ = run_notebook("photo_to_embeddings", monkeypatch)
    assert found["embeddings"].shape == (1, 196, 768)
    assert found["output"].pooler_output.shape == (1, 128)
    assert "xla" in capsys.readouterr().out


@pytest.mark.slow("starts three commands")
def test_the_notebook_of_many_photos_finds_them(monkeypatch):
    for package in ("tokenizers", "pyarrow"):
        pytest.importorskip(package, reason=f"{package} is missing: the extra test has it")
    # IPython shows a picture that a cell returns.
    display = types.SimpleNamespace(Image=lambda filename: Path(filename).read_bytes())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    found, (_, by_sentence, by_picture) = run_notebook("photos_by_a_sentence", monkeypatch)
    assert found["sheet"].read_bytes().startswith(b"\x89PNG")
    names = {"astronaut.png", "chelsea.png", "coffee.png"}
    for printed in (by_sentence, by_picture):
        cosines, ids = zip(*(line.split() for line in printed.splitlines()[1:]))
        assert {Path(name).name for name in ids} == names
        assert list(map(float, cosines)) == sorted(map(float, cosines), reverse=True)
    assert "chelsea" in by_picture.splitlines()[1] and "1.0000" in by_picture.splitlines()[1]


def test_every_notebook_is_run():
    files = {path.stem for path in (ROOT / "examples").glob("*.ipynb")}
    assert files == {"photo_to_embeddings", "photos_by_a_sentence"}
