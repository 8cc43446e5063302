"""Tables of embeddings and of errors, as parquet files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_patch_embed.messages import printable


def embeddings_table(ids: Sequence[str], embeddings: np.ndarray) -> Any:
    """Makes a table with the columns `id` and `embedding`, a fixed-size list."""
    import pyarrow

    n, width = embeddings.shape
    kind = pyarrow.from_numpy_dtype(embeddings.dtype)
    values = pyarrow.array(embeddings.reshape(n * width), kind)
    lists = pyarrow.FixedSizeListArray.from_arrays(values, width)
    return pyarrow.table({"id": pyarrow.array(ids, pyarrow.string()), "embedding": lists})


def errors_table(errors: Sequence[tuple[str, str]]) -> Any:
    """Makes a table with the columns `id` and `reason`."""
    import pyarrow

    columns = [pyarrow.array(column, pyarrow.string()) for column in zip(*errors)]
    return pyarrow.table(dict(zip(("id", "reason"), columns)))


def check_schema(part: str, schema: Any) -> None:
    """Raises ValueError if a table lacks a column of "embeddings" or "errors", or has other types.

    The types may differ from those that `embed` writes if they have the same values, because shards
    may have been merged or written again by other programs.
    """
    from pyarrow import types

    def is_text(kind: Any) -> bool:
        return types.is_string(kind) or types.is_large_string(kind)

    def is_embedding(kind: Any) -> bool:
        lists = (types.is_fixed_size_list, types.is_list, types.is_large_list)
        return any(is_list(kind) for is_list in lists) and types.is_floating(kind.value_type)

    other = {"embeddings": ("embedding", is_embedding), "errors": ("reason", is_text)}[part]
    for name, has_type in (("id", is_text), other):
        found = [field.type for field in schema if field.name == name]
        if len(found) != 1:
            raise ValueError(f"it has {len(found)} columns {name}, expected one")
        if not has_type(found[0]):
            raise ValueError(f"its column {name} has the type {printable(found[0])}")


def parquet_bytes(table: Any) -> bytes:
    """Returns the contents of a parquet file with this table."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    # Only `reason` has repeated values. For embeddings a dictionary would be built and discarded.
    pyarrow.parquet.write_table(table, sink, compression="zstd", use_dictionary=["reason"])
    return sink.getvalue().to_pybytes()
