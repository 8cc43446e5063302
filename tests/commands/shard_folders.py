"""Makes pictures, runs `embed` and reads folders of shards."""

import io
import os
import sys
import tarfile

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from pallas_patch_embed.base.files import is_partial
from pallas_patch_embed.embed import Decoder, Embedder, command, folder
from pallas_patch_embed.embed.ledger import State
from pallas_patch_embed.embed.options import Options
from pallas_patch_embed.embed.provenance import Provenance, Settings
from pallas_patch_embed.embed.units import Entry
from tests.encoder.goldens import checkpoint

MODEL = "hf_siglip_p14_224"
COMMAND = [sys.executable, "-m", "pallas_patch_embed", "embed"]


def encoded(i, format="PNG"):
    """Encodes a picture of one colour, which is different for each number."""
    file = io.BytesIO()
    Image.new("RGB", (8, 6), (i % 256, i // 256 % 256, 77)).save(file, format)
    return file.getvalue()


def run(arguments, out, lists=(), **options):
    options = Options(**dict(batch=4, workers=2) | options)
    return command.run(checkpoint(MODEL), arguments, out, lists, options)


def opened(url, width=4, **options):
    """Opens a folder as a run with these options does."""
    settings = Settings("", "", "", False, "float32")
    provenance = Provenance("model", settings, Options(**options), 4, "cpu", lambda _: False)
    return folder.Folder(str(url), provenance, width)


def is_done(out, id):
    return out.ledger.state(Entry(id)) is not State.NEW


def shards(out, part="embeddings"):
    """Reads the columns of all shards, as lists."""
    fs, root = fsspec.url_to_fs(str(out))
    fs.invalidate_cache()
    tables = []
    for path in sorted(fs.ls(f"{root}/{part}", detail=False)):
        if is_partial(os.path.basename(path)):
            continue  # A killed run was writing it.
        with fs.open(path, "rb") as file:
            tables.append(pyarrow.parquet.read_table(file))
    return pyarrow.concat_tables(tables).to_pydict() if tables else {}


def by_id(out):
    """Maps ids to embeddings; asserts that every id occurs once."""
    columns = shards(out) or {"id": [], "embedding": []}
    assert len(set(columns["id"])) == len(columns["id"])
    return dict(zip(columns["id"], np.array(columns["embedding"], np.float32)))


def expected(ids_and_pictures, batch=4):
    """Maps ids to embeddings that the two public classes compute for all pictures at once."""
    embed = Embedder(checkpoint(MODEL), batch=batch)
    ids, contents = zip(*ids_and_pictures)
    result = embed(Decoder(embed.preprocessing)({"id": ids, "content": contents}))
    return dict(zip(result["id"], result["embedding"]))


def assert_same(found, wanted):
    assert found.keys() == wanted.keys()
    for id, embedding in found.items():
        np.testing.assert_array_equal(embedding, wanted[id])


def write_tar(path, members):
    with tarfile.open(path, "w:gz" if str(path).endswith("gz") else "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
