"""The models in tests/data/text, and what transformers makes of texts with them."""

import json
import lzma
import shutil

import numpy as np

from tests.repository import DATA

TEXT = DATA / "text"

# Models with both towers and a tokenizer, and text towers alone.
WHOLE = ("siglip", "siglip2", "clip")
TOWERS = ("siglip_text", "clip_text")


def expected(name):
    """Reads the arrays of expected.npz."""
    return dict(np.load(TEXT / name / "expected.npz"))


def sentences():
    """Reads the sentences whose ids each whole model has."""
    return json.loads(lzma.decompress((TEXT / "sentences.json.xz").read_bytes()))


def unpacked(name, folder):
    """Copies a model into a folder, with its tokenizer's files as transformers wrote them."""
    path = shutil.copytree(TEXT / name, folder / name)
    for file in path.glob("*.xz"):
        file.with_suffix("").write_bytes(lzma.decompress(file.read_bytes()))
        file.unlink()
    return path


def edit(path, **fields):
    """Changes fields of a JSON file; those that are None are removed."""
    contents = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({key: x for key, x in contents.items() if x is not None}))
