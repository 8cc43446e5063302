"""Tables of embeddings and of errors, as parquet files."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.units import Entry, Origin, Picture, unreadable

# The columns that say where a picture comes from, and all columns that `--keep` cannot name.
ORIGIN = ("source", "row", "size", "modified")
RESERVED = ("id", *ORIGIN, "embedding", "spatial_shape", "reason")

# The key in the metadata of a shard's schema with what `embed` says about the run, in JSON.
ABOUT = b"pallas_patch_embed"

# Largest size in bytes of a value that is kept.
MOST_KEPT = 2**20

# Columns with repeated values. For other ones a dictionary would be built and discarded.
REPEATED = ["source", "modified", "reason"]

# The column of numbers in embeddings of patches, which is written in parquet's encoding
# BYTE_STREAM_SPLIT. Encoders compute in bfloat16, so two bytes of a float32 are zero, and Zstandard
# finds this if equal bytes of all numbers are together: 67 MB of normally distributed bfloat16
# become 23 MB instead of 32 MB, in 0.30 s of CPU time instead of 0.83 s.
PATCHES = "embedding.list.element.list.element"

# The column of numbers in embeddings that are vectors. In float16 it is not compressed: Zstandard
# takes away 24% of its size (normally distributed bfloat16), but then a search takes twice the
# time (docs/search.md).
VECTORS = "embedding.list.element"


def with_kept(picture: Picture, types: Mapping[str, Any]) -> Picture:
    """Converts the kept values of a picture to the types of their columns.

    If that is not possible, the result is a picture that cannot be opened.
    """
    import pyarrow

    kept = []
    for value, (name, type) in zip(picture.kept, types.items()):
        scalar = pyarrow.scalar(value) if isinstance(value, str) else value
        if scalar is not None:
            try:
                scalar = _as_type(scalar, type)
            except pyarrow.ArrowException as error:
                why = f"its column {name} cannot be converted to {type}: {error}"
                return unreadable(picture.id, why, picture.origin)
            if (size := pyarrow.array([scalar], type).nbytes) > MOST_KEPT:
                why = f"its column {name} has {size} bytes, expected at most {MOST_KEPT}"
                return unreadable(picture.id, why, picture.origin)
        kept.append(scalar)
    return picture._replace(kept=tuple(kept))


def _as_type(scalar: Any, type: Any) -> Any:
    """Converts a value of Arrow; raises ArrowException if this would change it."""
    import pyarrow

    if scalar.type == type:
        return scalar
    converted = scalar.cast(type)
    if not pyarrow.types.is_string(type) and converted.cast(scalar.type) != scalar:
        raise pyarrow.ArrowInvalid(f"{printable(scalar.as_py())} would change")
    return converted


def kept_bytes(entry: Entry) -> int:
    """Returns the size in memory of the values that are kept with a picture."""
    import pyarrow

    return sum(pyarrow.array([value]).nbytes for value in entry.kept if value is not None)


def embeddings_table(
    entries: Sequence[Entry],
    embeddings: Sequence[np.ndarray],
    keep: Mapping[str, Any] | None = None,
) -> Any:
    """Makes a table of embeddings.

    Args:
      entries: the pictures.
      embeddings: an array [D], or of patches [h, w, D], for each picture.
      keep: types of the columns that are kept, by their names.

    Returns:
      A table with the columns `id` and `embedding`, those of ORIGIN, and those that are kept. An
      embedding is a fixed-size list of D numbers. Of patches it is a list of h * w such lists, row
      by row, and a column `spatial_shape` has (h, w).
    """
    import pyarrow

    def lists(values: np.ndarray, size: int) -> Any:
        return pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(values), size)

    vectors = lists(np.concatenate([each.ravel() for each in embeddings]), embeddings[0].shape[-1])
    columns = {"embedding": vectors}
    if embeddings[0].ndim == 3:
        shapes = np.array([each.shape[:2] for each in embeddings], np.int32)
        ends = np.append(0, shapes.prod(1).cumsum()).astype(np.int32)
        columns["embedding"] = pyarrow.ListArray.from_arrays(ends, vectors)
        columns["spatial_shape"] = lists(shapes.ravel(), 2)
    kept = {
        name: pyarrow.array([entry.kept[i] for entry in entries], type)
        for i, (name, type) in enumerate((keep or {}).items())
    }
    return pyarrow.table(_entries(entries) | columns | kept)


def errors_table(errors: Sequence[tuple[Entry, str]]) -> Any:
    """Makes a table with the columns `id` and `reason`, and those of ORIGIN."""
    import pyarrow

    entries, reasons = zip(*errors)
    return pyarrow.table(_entries(entries) | {"reason": pyarrow.array(reasons, pyarrow.string())})


def _entries(entries: Sequence[Entry]) -> dict[str, Any]:
    import pyarrow

    origins = [entry.origin for entry in entries]
    # What is not known is null.
    text, number = pyarrow.string(), pyarrow.int64()
    return {
        "id": pyarrow.array([entry.id for entry in entries], text),
        "source": pyarrow.array([origin.source or None for origin in origins], text),
        "row": pyarrow.array([o.row if o.source else None for o in origins], text),
        "size": pyarrow.array([origin.size for origin in origins], number),
        "modified": pyarrow.array([origin.modified or None for origin in origins], text),
    }


def entries_of(table: Any) -> list[Entry]:
    """Returns the pictures in a table, without the columns that were kept."""
    columns = [
        table[name].to_pylist() if name in table.schema.names else [None] * len(table)
        for name in ("id", *ORIGIN)
    ]
    return [
        Entry(id, Origin(source or "", row or "", size, modified or ""))
        for id, source, row, size, modified in zip(*columns)
    ]


def with_entries(table: Any, entries: Sequence[Entry]) -> Any:
    """Returns the table with other ids and origins, and its columns in the order of this module."""
    import pyarrow

    columns = _entries(entries)
    columns |= {name: table[name] for name in table.schema.names if name not in columns}
    return pyarrow.table(columns)


def check_schema(part: str, schema: Any, of_patches: bool) -> None:
    """Raises ValueError if a table lacks a column of embeddings or errors, or has other types.

    The types may differ from those that `embed` writes if they have the same values, because shards
    may have been merged or written again by other programs. The columns of ORIGIN may be missing,
    because earlier versions did not write them.

    Args:
      part: "embeddings" or "__errors".
      schema: the schema in Arrow.
      of_patches: whether an embedding is a list of vectors, and not a vector.
    """
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind)

    def is_list_of(is_value: Callable[[Any], bool]) -> Callable[[Any], bool]:
        lists = (types.is_fixed_size_list, types.is_list, types.is_large_list)
        return lambda kind: any(is_list(kind) for is_list in lists) and is_value(kind.value_type)

    is_vector = is_list_of(types.is_floating)
    others: dict[str, Callable[[Any], bool]] = {"reason": is_text}
    if part == "embeddings":
        others = {"embedding": is_list_of(is_vector) if of_patches else is_vector}
        others |= {"spatial_shape": is_list_of(types.is_integer)} if of_patches else {}
    origin = {name: types.is_integer if name == "size" else is_text for name in ORIGIN}
    for name, has_type in {"id": is_text, **others, **origin}.items():
        found = [field.type for field in schema if field.name == name]
        if len(found) != 1 and (found or name not in origin):
            raise ValueError(f"it has {len(found)} columns {name}, expected one")
        if found and not has_type(found[0]):
            raise ValueError(f"its column {name} has the type {printable(found[0])}")


def _split_columns(schema: Any) -> list[str]:
    """Returns [PATCHES] if embeddings are of patches in float32.

    DuckDB 2.0.1 cannot read float16 in this encoding.
    """
    import pyarrow

    kinds = [field.type for field in schema if field.name == "embedding"]
    values = [kind.value_type for kind in kinds if pyarrow.types.is_list(kind)]
    return [PATCHES for v in values if getattr(v, "value_type", None) == pyarrow.float32()]


def _compressions(schema: Any) -> dict[str, str]:
    """Returns the compression of each column of parquet in a table with this schema in Arrow."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(schema.empty_table(), sink)
    columns = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(sink.getvalue())).schema
    found = {column.path: "zstd" for column in map(columns.column, range(len(columns)))}
    kinds = [field.type for field in schema if field.name == "embedding"]
    if any(getattr(kind, "value_type", None) == pyarrow.float16() for kind in kinds):
        found[VECTORS] = "none"
    return found


def parquet_bytes(table: Any, about: Mapping[str, Any]) -> bytes:
    """Returns the contents of a parquet file with this table, and JSON in its schema's metadata."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    table = table.replace_schema_metadata({ABOUT: json.dumps(about)})
    pyarrow.parquet.write_table(
        table,
        sink,
        compression=_compressions(table.schema),
        use_dictionary=REPEATED,
        use_byte_stream_split=_split_columns(table.schema),
    )
    return sink.getvalue().to_pybytes()
