"""Tables of embeddings and of errors, as parquet files."""

from collections.abc import Sequence
from typing import Any

import numpy as np


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


def parquet_bytes(table: Any) -> bytes:
    """Returns the contents of a parquet file with this table."""
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    # Only `reason` has repeated values. For embeddings a dictionary would be built and discarded.
    pyarrow.parquet.write_table(table, sink, compression="zstd", use_dictionary=["reason"])
    return sink.getvalue().to_pybytes()
