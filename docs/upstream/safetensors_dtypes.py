"""Shows that safetensors writes numpy arrays of float8 and bfloat16 that it cannot read.

Needs safetensors, numpy and ml_dtypes. docs/upstream.md explains the fault.
"""

import json
import struct
import tempfile
from pathlib import Path

import safetensors
import safetensors.numpy


def tensor_file(dtype: str, itemsize: int) -> bytes:
    """Returns a safetensors file with two zeros."""
    tensor = {"dtype": dtype, "shape": [2], "data_offsets": [0, 2 * itemsize]}
    header = json.dumps({"x": tensor}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(2 * itemsize)


def read(when: str, folder: Path) -> None:
    """Prints the results of the readers for both dtypes."""
    for dtype, itemsize in (("BF16", 2), ("F8_E4M3", 1)):
        path = folder / "x.safetensors"
        path.write_bytes(tensor_file(dtype, itemsize))
        for reader, source in (("load", path.read_bytes()), ("load_file", path)):
            try:
                found = getattr(safetensors.numpy, reader)(source)["x"].dtype
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
            print(f"  {when}, {dtype}, {reader}: {found}")


if __name__ == "__main__":
    print(f"safetensors {safetensors.__version__}")
    with tempfile.TemporaryDirectory() as name:
        read("before import ml_dtypes", Path(name))
        import ml_dtypes
        import numpy as np

        read("after import ml_dtypes", Path(name))
    for kind in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn):
        written = safetensors.numpy.save({"x": np.zeros(2, kind)})
        (size,) = struct.unpack("<Q", written[:8])
        print(f"  save writes {kind.__name__} as {json.loads(written[8 : 8 + size])['x']['dtype']}")
