"""Tests of BUILD, the README, the demo and the command line."""

import ast
import pkgutil
import re
import subprocess
import sys

import numpy as np
import pytest
from repository import ROOT

import pallas_patch_embed as ppe
from pallas_patch_embed.commands import demo

SOURCES = ("pallas_patch_embed", "tests", "benchmarks", "examples", "ffi")


def build_targets():
    """Maps names to attributes of the targets in BUILD, which is Python except for `glob`."""
    found = {}

    def target(name, **attributes):
        assert name not in found, f"BUILD has two targets {name}"
        found[name] = attributes

    def glob(include, exclude=()):
        paths = {str(path) for pattern in include for path in _matching(pattern)}
        return sorted(paths - {str(path) for pattern in exclude for path in _matching(pattern)})

    rules = dict.fromkeys(("py_binary", "py_library", "py_test", "filegroup"), target)
    others = dict.fromkeys(("load", "package", "licenses", "exports_files"), lambda *_, **__: None)
    exec((ROOT / "BUILD").read_text(), rules | others | {"glob": glob})
    return found


def _matching(pattern):
    """Lists the files that a Bazel pattern matches; `**` at its end matches files at any depth."""
    pattern = pattern + "/*" if pattern.endswith("**") else pattern
    return (path.relative_to(ROOT) for path in ROOT.glob(pattern) if path.is_file())


def test_BUILD_covers_every_source_file():
    targets = build_targets()
    covered = {file for a in targets.values() for file in (*a.get("srcs", ()), *a.get("data", ()))}
    endings = {".py", ".cu", ".cuh", ".cc", ".h"}
    present = {
        str(path.relative_to(ROOT))
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in endings
    }
    assert present <= covered
    assert {label[1:] for label in covered if label.startswith(":")} <= set(targets)


def test_BUILD_runs_every_test_by_one_program():
    rules = [a for a in build_targets().values() if "args" in a]
    run = [file for attributes in rules for file in attributes["args"]]
    tests = {str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(run) == len(set(run)) and set(run) == tests
    assert len({attributes["main"] for attributes in rules}) == 1


@pytest.mark.slow("starts two processes of pytest")
def test_the_program_of_BUILD_fails_if_a_test_does(tmp_path):
    (main,) = {a["main"] for a in build_targets().values() if "args" in a}
    for outcome, code in (("True", 0), ("False", 1)):
        (tmp_path / "test_it.py").write_text(f"def test_it():\n    assert {outcome}\n")
        command = [sys.executable, ROOT / main, "-n", "0", tmp_path / "test_it.py"]
        assert subprocess.run(command, capture_output=True, cwd=tmp_path).returncode == code


def test_BUILD_depends_on_what_is_imported():
    targets = build_targets()
    names = {"absl": "absl_py", "PIL": "pillow", "xdist": "pytest_xdist"}
    own = {"pallas_patch_embed", "benchmarks", "ptx_emulator"}
    own |= {path.stem for path in (ROOT / "tests").rglob("*.py")}
    # Optional packages, which not every jax has; jaxlib comes with jax.
    optional = {
        "jax_triton",
        "triton",
        "nvidia",
        "pynvml",
        "ray",
        "timm",
        "torch",
        "transformers",
        "torchvision",
        "cutlass",
        "cv2",
        "huggingface_hub",
        "equimo",
        "equinox",
        "flax",
        "gemma",
        "keras",
        "keras_hub",
    }
    for name, attributes in targets.items():
        sources = [ROOT / file for file in attributes.get("srcs", ()) if file.endswith(".py")]
        imported = set()
        for node in (node for file in sources for node in ast.walk(ast.parse(file.read_text()))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module.split(".")[0])
        known = set(sys.stdlib_module_names) | own | optional
        needed = {names.get(module, module) for module in imported - known}
        reached, waiting = set(), [name]
        while waiting:
            for dependency in targets[waiting.pop()].get("deps", ()):
                if dependency.startswith(":"):
                    waiting.append(dependency[1:])
                reached.add(dependency.rsplit("/", 1)[-1])
        assert needed <= reached, name


def test_the_README_lists_all_backends():
    section = (ROOT / "README.md").read_text().split("## Where it runs")[1].split("##")[0]
    assert tuple(re.findall(r"^\| (\w+) \|", section, re.MULTILINE)[1:]) == ppe.backend_names()


@pytest.mark.parametrize("package", [ppe, ppe.backends], ids=lambda package: package.__name__)
def test_no_function_hides_the_module_of_its_name(package):
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    assert {
        name for name in modules & set(dir(package)) if callable(getattr(package, name))
    } == set()


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "pallas_patch_embed", *arguments], capture_output=True, text=True
    )


@pytest.mark.slow("runs everything that `make demo` runs")
def test_the_demo_prints_a_table_and_writes_a_picture(tmp_path):
    from PIL import Image

    result = command("demo", "--out", str(tmp_path / "demo.png"), "--seed", "3")
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()]
    errors = {row[0]: float(row[3].rstrip("%")) for row in rows if len(row) == 8}
    assert list(errors) == ["float32", "bfloat16", "float8_e4m3fn", "int8"]
    # Rounding the result to bfloat16 contributes at most 2^-9 = 0.2%.
    for dtype, largest in dict(float32=0.2, bfloat16=0.5, int8=1.0, float8_e4m3fn=4.0).items():
        assert 0.1 < errors[dtype] < largest
    with Image.open(tmp_path / "demo.png") as picture:
        assert min(picture.size) > 500
        assert len(np.unique(np.asarray(picture.convert("RGB")).reshape(-1, 3), axis=0)) > 500


def test_the_demo_notices_wrong_embeddings(monkeypatch):
    monkeypatch.setattr(demo, "embed_images", lambda x, params: ppe.embed_images(x[::-1], params))
    names, images = demo.photographs()
    assert names == ["astronaut", "chelsea", "coffee"]
    weights = demo.draw_weights(np.random.default_rng(0))
    monkeypatch.setattr(demo, "_milliseconds", lambda *_: 0.0)
    wanted = demo.reference(images, weights, 16)
    results = demo.measure(images, weights, wanted, 16)
    assert len(results) == 4 and all(result.relative_error > 0.5 for result in results)


def test_the_demos_neighbours_are_similar_patches():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (2, 32, 32, 3), np.uint8)
    # The last patches of both images are equal.
    images[1, 16:, 16:] = images[0, 16:, 16:]
    embeddings = demo.cut(images, 16).reshape(8, -1).astype(np.float32) / 255 * 2 - 1
    found, cosines = demo.nearest(embeddings, np.array([3, 7, 0]), 2)
    assert found[0, 0] == 7 and found[1, 0] == 3 and 0 not in found[2]
    np.testing.assert_allclose(cosines[:2, 0], 1, rtol=1e-6)
    assert (cosines[:, 0] >= cosines[:, 1]).all()


def test_the_demos_map_has_the_error_of_each_patch():
    wanted = np.array([[3.0, 4.0], [0.0, 2.0], [1.0, 0.0]])
    found = wanted + np.array([[0.0, 0.5], [0.0, 0.0], [0.2, 0.0]])
    np.testing.assert_allclose(demo.patch_errors(found, wanted), [0.1, 0.0, 0.2])


def test_the_demo_marks_patches_with_contrast_in_both_halves():
    images = np.zeros((1, 64, 64, 3), np.uint8)
    # Columns 0 and 3 of the grid have patches with more and more contrast from top to bottom.
    for row in range(4):
        images[0, 16 * row : 16 * row + 16, [0, 63]] = 50 * (row + 1)
    assert demo.patches_with_contrast(images, 16) == [(0, 2, 0), (0, 2, 3)]


def test_info_prints_the_backends_and_shapes():
    result = command("info")
    assert result.returncode == 0, result.stderr
    for text in ("jax ", "device 0", "B/16 224", "Gemma 3/14 896", "xla"):
        assert text in result.stdout


@pytest.mark.parametrize(
    "arguments, text",
    [
        ([], "required"),
        (["train"], "invalid choice"),
        (["demo", "--seed", "-3"], "expected 0 or more"),
        (["demo", "--out", "no/such/folder/demo.png"], "no such folder"),
    ],
    ids=["none", "unknown", "seed", "folder"],
)
def test_a_bad_command_line_is_refused(command_line, arguments, text):
    code, error = command_line(*arguments)
    assert code == 2
    assert text in error
