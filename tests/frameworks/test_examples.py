"""The programs and the notebook of examples/ run, from the repository's root."""

import importlib.util
import json
import runpy

import pytest
from repository import ROOT

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
    assert files == set(EXAMPLES)


def test_the_notebooks_cells_run(monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="matplotlib is missing: the extra demo has it")
    notebook = json.loads((ROOT / "examples/photo_to_embeddings.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    namespace = {}
    for number, cell in enumerate(cells, 1):
        exec(compile(cell, f"cell {number}", "exec"), namespace)
    assert namespace["embeddings"].shape == (1, 196, 768)
    assert namespace["output"].pooler_output.shape == (1, 128)
    assert "xla" in capsys.readouterr().out
    # The file has no outputs, so they cannot be outdated.
    assert not any(c.get("outputs") for c in notebook["cells"])
