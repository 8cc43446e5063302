"""Reading of the outputs that `embed` wrote: a folder of shards, or an .npz file."""

import contextlib
import dataclasses
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from pallas_patch_embed.base import json_objects
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.folder import (
    EMBEDDINGS,
    FORMAT,
    MOST_BYTES,
    OLD_FORMAT,
    SHARD,
    manifest_name,
    read_manifest,
)
from pallas_patch_embed.embed.npz import open_array
from pallas_patch_embed.embed.options import check_output
from pallas_patch_embed.embed.parquet_pages import plain_values
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.place import FOLDER, Place, place_of
from pallas_patch_embed.embed.provenance import ABSENT
from pallas_patch_embed.embed.tables import ORIGIN, check_schema, entries_of
from pallas_patch_embed.embed.units import Entry, Origin, open_source, path_in

# Size in bytes of shards that are read as a whole, which `embed` exceeds only with a single batch.
# Larger ones, which other programs may have merged, are read by ROWS embeddings.
WHOLE, ROWS = 2**26, 4096

# Types of the fields of a manifest, and of the settings, that are read.
FIELDS: dict[str, Any] = {"model": str, "settings": dict}
SETTINGS: dict[str, Any] = {
    "checkpoint_sha256": str,
    "preprocessing": str,
    "patch_dtype": str,
    "dtype": str,
    "calibration_sha256": (str, type(None)),
    "min_cosine": (float, type(None)),
    "output": str,
    "tower": str,
}

# Types of the options that are read, and may be missing.
OPTIONS = {
    "size": (int, type(None)),
    "calibration": (str, type(None)),
    "image_column": (str, type(None)),
    "id_column": (str, type(None)),
}


class Part(Protocol):
    """A file of embeddings."""

    def vectors(self) -> Iterator[np.ndarray]:
        """Yields the embeddings, in order, as arrays [n, D] of floating-point numbers."""

    def entries(self, rows: Sequence[int]) -> list[Entry]:
        """Returns the pictures of these rows, whose numbers increase."""


@dataclasses.dataclass(frozen=True)
class Written:
    """An output that `embed` wrote.

    Attributes:
      url: its path or URL.
      model: name of the checkpoint, as the user gave it to `embed`.
      settings: fields of `provenance.Settings`.
      options: those of the options in OPTIONS.
      parts: its files, in the order in which they were written.
    """

    url: str
    model: str
    settings: Mapping[str, Any]
    options: Mapping[str, Any]
    parts: Sequence[Part]

    @property
    def has_texts(self) -> bool:
        """Whether it has embeddings of texts, and not of pictures."""
        return bool(self.settings["tower"] == "text")

    @classmethod
    def open(cls, url: str) -> Self:
        """Opens an output.

        Args:
          url: path or URL of a folder, or of a file whose name ends in .npz.

        Raises:
          OSError, ValueError: `embed` did not write it, or it is damaged.
        """
        with _readable(url):
            about, parts = (_npz if path_in(url).endswith(".npz") else _folder)(url)
            about = json_objects.expect(about, FIELDS, "its manifest", others=True)
            settings = ABSENT | about["settings"]
            json_objects.expect(settings, SETTINGS, "settings", others=True)
            check_output(settings["output"])
            options = dict.fromkeys(OPTIONS) | about.get("options", {})
            json_objects.expect(options, OPTIONS, "options", others=True)
        return cls(url, about["model"], settings, options, parts)


@contextlib.contextmanager
def _readable(url: str, name: str = "it") -> Iterator[None]:
    """Converts exceptions that are raised by an output, or by the file `name` in it."""
    try:
        yield
    except ImportError:
        raise  # It says what to install.
    except Exception as error:  # pyarrow and packages for URLs have their own kinds of errors.
        why = (isinstance(error, OSError) and error.strerror) or reason(error)
        raise ValueError(
            f"{printable(url)}: {printable(name)} cannot be read ({printable(why)}). Expected the "
            "--out of a run of `embed`: a folder of shards, or an .npz file."
        ) from error


def _folder(url: str) -> tuple[Any, Sequence[Part]]:
    """Returns the manifest and the shards of a folder."""
    place = place_of(url)
    if (kind := place.kind()) != FOLDER:
        raise ValueError("there is no such folder" if kind is None else f"it is {kind}")
    if manifest_name(place) is None:
        raise ValueError("it has no manifest")
    about = read_manifest(place)
    if not isinstance(about, dict) or about.get("format") not in (FORMAT, OLD_FORMAT):
        raise ValueError("this version of `embed` did not write its manifest")
    json_objects.expect(about, {"width": int}, "its manifest", others=True)
    names = [name for name in place.names(EMBEDDINGS) if not name.startswith(".")]
    shards = sorted((int(found[1]), name) for name in names if (found := SHARD.fullmatch(name)))
    if others := [x for x in names if x.endswith(".parquet") and not SHARD.fullmatch(x)]:
        raise ValueError(f"`embed` gives other names to its shards than {printable(others[0])}")
    parts = [Shard(url, place, f"{EMBEDDINGS}/{name}", about["width"]) for _, name in shards]
    return about, parts


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard of a folder, with embeddings of `width` elements."""

    url: str
    place: Place
    name: str
    width: int

    def vectors(self) -> Iterator[np.ndarray]:
        import pyarrow
        import pyarrow.parquet

        with _readable(self.url, self.name), self.place.open(self.name) as file:
            content = None
            source: Any = file
            if file.seek(0, os.SEEK_END) <= WHOLE:
                file.seek(0)
                content = file.read()
                source = pyarrow.BufferReader(content)
            with _table(source) as table:
                check_schema(EMBEDDINGS, table.schema_arrow, of_patches=False)
                for group in range(table.num_row_groups):
                    whole = None if content is None else self._plain(table, group, content)
                    if whole is not None:
                        yield whole
                        continue
                    groups = dict(row_groups=[group], columns=["embedding"])
                    for batch in table.iter_batches(ROWS, **groups):
                        yield _vectors(batch["embedding"], self.width)

    def _plain(self, table: Any, group: int, content: bytes) -> np.ndarray | None:
        """Reads the embeddings of a row group if they are stored as `embed` does; None otherwise.

        4096 x 768 float16 take 3 ms of CPU time, and 15 ms with pyarrow, which decodes the length
        of each list.
        """
        import pyarrow

        kind = table.schema_arrow.field("embedding").type
        if not pyarrow.types.is_fixed_size_list(kind) or kind.list_size != self.width:
            return None
        metadata = table.metadata.row_group(group)
        columns = map(metadata.column, range(metadata.num_columns))
        column = next(c for c in columns if c.path_in_schema.split(".")[0] == "embedding")
        n = metadata.num_rows * self.width
        dtype = np.dtype(kind.value_type.to_pandas_dtype())
        codecs: dict[str, Any] = {
            "UNCOMPRESSED": lambda page, size: page,
            "ZSTD": pyarrow.Codec("zstd").decompress,
        }
        if column.compression not in codecs or n * dtype.itemsize > 2 * WHOLE:
            return None
        values = np.empty(n, dtype)
        begin = column.data_page_offset
        pages = memoryview(content)[begin : begin + column.total_compressed_size]
        is_plain = plain_values(pages, codecs[column.compression], values)
        return values.reshape(-1, self.width) if is_plain else None

    def entries(self, rows: Sequence[int]) -> list[Entry]:
        import pyarrow

        wanted = np.asarray(rows, np.int64)
        found: list[Entry] = []
        begin = 0
        with (
            _readable(self.url, self.name),
            self.place.open(self.name) as file,
            _table(file) as table,
        ):
            columns = [name for name in ("id", *ORIGIN) if name in table.schema_arrow.names]
            for batch in table.iter_batches(columns=columns):
                end = begin + len(batch)
                inside = wanted[(begin <= wanted) & (wanted < end)]
                found += entries_of(batch.take(pyarrow.array(inside - begin)))
                begin = end
        return found


def _table(source: Any) -> Any:
    """Opens a parquet file so that reading it page by page takes little memory."""
    import pyarrow.parquet

    return pyarrow.parquet.ParquetFile(source, buffer_size=2**20, pre_buffer=False)


def _vectors(column: Any, width: int) -> np.ndarray:
    """Returns the embeddings in a column of lists of any kind, as an array [n, width]."""
    import pyarrow.compute as compute

    lengths = compute.list_value_length(column).to_numpy(zero_copy_only=False)
    if not (lengths == width).all():
        raise ValueError(f"it has embeddings that do not have {width} elements")
    return column.flatten().to_numpy(zero_copy_only=False).reshape(-1, width)


def _npz(url: str) -> tuple[Any, Sequence[Part]]:
    """Returns what an .npz file says about its run, and the file as the only part."""
    with open_source(url) as file, zipfile.ZipFile(file) as archive:
        if "about.npy" not in archive.namelist():
            raise ValueError("it does not say which checkpoint wrote it")
        if archive.getinfo("about.npy").file_size > 4 * MOST_BYTES:
            raise ValueError(f"its description has more than {MOST_BYTES} characters")
        about = np.lib.format.read_array(archive.open("about.npy"), allow_pickle=False)
    return json.loads(str(about)), [_Npz(url)]


@dataclasses.dataclass(frozen=True)
class _Npz:
    """An .npz file."""

    url: str

    def vectors(self) -> Iterator[np.ndarray]:
        with self._opened() as archive, open_array(archive, "embeddings") as (file, shape, dtype):
            if dtype.kind != "f" or len(shape) != 2:
                raise ValueError(f"its embeddings are {dtype} {shape}, expected numbers [n, D]")
            for begin in range(0, shape[0], ROWS):
                rows = min(ROWS, shape[0] - begin)
                content = file.read(rows * shape[1] * dtype.itemsize)
                yield np.frombuffer(content, dtype).reshape(rows, shape[1])

    def entries(self, rows: Sequence[int]) -> list[Entry]:
        with self._opened() as archive:
            ids = _texts(archive, "paths", rows)
            if "sources.npy" not in archive.namelist():
                return list(map(Entry, ids))
            origins = map(Origin, _texts(archive, "sources", rows), _texts(archive, "rows", rows))
            return list(map(Entry, ids, origins))

    @contextlib.contextmanager
    def _opened(self) -> Iterator[zipfile.ZipFile]:
        with _readable(self.url), open_source(self.url) as file, zipfile.ZipFile(file) as archive:
            yield archive


def _texts(archive: zipfile.ZipFile, name: str, rows: Sequence[int]) -> list[str]:
    """Returns the texts in these rows of an array, whose numbers increase."""
    found = []
    with open_array(archive, name) as (file, _, dtype):
        begin = file.tell()
        for row in rows:
            file.seek(begin + row * dtype.itemsize)
            found.append(str(np.frombuffer(file.read(dtype.itemsize), dtype)[0]))
    return found
