"""The searches of docs/search.md find the nearest pictures in the shards that `embed` writes.

The extra `test-search` installs the packages that the page uses.
"""

import importlib.util
import re
import shlex
import shutil
import subprocess
import sys

import numpy as np
import pyarrow.parquet
import pytest

from tests.pages import blocks
from tests.repository import DATA, ROOT, environment

PAGE = (ROOT / "docs" / "search.md").read_text()
PACKAGES = ["duckdb", "faiss", "lancedb"]

# A program that prints the number of rows and the columns of a dataset.
LOADED = """
import datasets
found = datasets.load_dataset("output", cache_dir="cache")["train"]
print(len(found), *sorted(found.column_names))
"""
PHOTOS = "pallas_patch_embed/photos"
CHECKPOINT = "tests/data/hf_siglip_p16_224"


@pytest.fixture
def folder(tmp_path):
    """Returns a folder with the photos and the checkpoint, where the page's command can run."""
    # A package that is installed but cannot be imported is a failure.
    if not all(map(importlib.util.find_spec, PACKAGES)):
        pytest.skip("the extra test-search is missing")
    shutil.copytree(ROOT / PHOTOS, tmp_path / PHOTOS)
    (tmp_path / CHECKPOINT).parent.mkdir(parents=True)
    (tmp_path / CHECKPOINT).symlink_to(DATA / "hf_siglip_p16_224")
    return tmp_path


def embed(folder, *options, pictures=PHOTOS):
    """Runs the page's command with more options; `pictures` replaces the folder of photos."""
    (text,) = re.findall(r"^    pallas-patch-embed (embed (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    arguments = shlex.split(text.replace("\\\n", " "))
    arguments[arguments.index(PHOTOS)] = pictures
    command = [sys.executable, "-m", "pallas_patch_embed", *arguments, *options]
    return subprocess.run(command, cwd=folder, env=environment()).returncode


def printed(folder, programs):
    """Lists the lines that programs print, one after the other in a new process."""
    command = [sys.executable, "-c", "import sys\nfor program in sys.argv[1:]: exec(program, {})"]
    result = subprocess.run(
        [*command, *programs], cwd=folder, env=environment(), capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def shown(code):
    """Lists the lines that a block prints according to its comments."""
    return [line.removeprefix("# ") for line in code.splitlines() if line.startswith("# ")]


def check_blocks(folder):
    """Runs the page's blocks; returns the embeddings in the shards, by id."""
    read, *searches = (block.code for block in blocks(PAGE))
    assert [package for code in searches for package in PACKAGES if package in code] == PACKAGES
    table = pyarrow.parquet.read_table(folder / "output/embeddings")
    written = dict(zip(table["id"].to_pylist(), np.array(table["embedding"].to_pylist(), float)))
    unit = {id: embedding / np.linalg.norm(embedding) for id, embedding in written.items()}
    cosines = {id: unit[f"{PHOTOS}/astronaut.png"] @ unit[id] for id in unit}
    nearest = sorted(cosines, key=cosines.__getitem__, reverse=True)
    assert shown(read) == ["(3, 128)"]
    for code in searches:
        assert shown(code) == [f"{cosines[id]:.3f} {id}" for id in nearest]
    # A search uses only its own names and those of the first block, and DuckDB only its own.
    duckdb, *others = searches
    programs = [read, duckdb, *(f"{read}\n{code}" for code in others)]
    assert printed(folder, programs) == [line for code in programs for line in shown(code)]
    return written


@pytest.mark.search
@pytest.mark.parametrize(
    "options", [[], ["--embedding-dtype", "float16"], ["--normalize"]], ids=" ".join
)
def test_the_blocks_of_the_page_print_what_their_comments_say(folder, options):
    assert embed(folder, *options) == 0
    written = check_blocks(folder)
    # The page says that inner products without normalisation find another picture first.
    query = written[f"{PHOTOS}/astronaut.png"]
    first = max(written, key=lambda id: query @ written[id])
    assert first == f"{PHOTOS}/{'astronaut' if '--normalize' in options else 'chelsea'}.png"


@pytest.mark.search
def test_the_blocks_of_the_page_read_all_shards_and_no_errors(folder):
    assert embed(folder, pictures=f"{PHOTOS}/coffee.png") == 0
    (folder / PHOTOS / "broken.png").write_bytes(b"not a picture")
    assert embed(folder) == 3
    assert len(list((folder / "output/embeddings").glob("*.parquet"))) == 2
    assert len(list((folder / "output/__errors").glob("*.parquet"))) == 1
    check_blocks(folder)
    assert printed(folder, [LOADED]) == ["3 embedding id modified row size source"]


def test_the_page_states_the_size_of_an_exact_index():
    rows = re.findall(r"^\| (\d+) \| .* \| ([\d.]+) \| ([\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 4
    for width, single, half in rows:
        # GB of a million embeddings, in float32 and in float16.
        assert single == f"{4e-3 * int(width):.2f}"
        assert half == f"{2e-3 * int(width):.2f}"
