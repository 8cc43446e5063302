"""Shows that Triton 3.6 rounds float32 to float8 through float16 for compute capability 8.9.

Compiles a conversion, without a GPU, and counts the numbers that the PTX rounds wrongly. Needs only
triton, numpy and ml_dtypes. docs/upstream.md explains the fault.
"""

import os
import re
import tempfile

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def convert(x, y):
    i = tl.arange(0, 128)
    tl.store(y + i, tl.load(x + i).to(tl.float8e4nv))


def conversions(capability: int) -> list[str]:
    """Returns the instructions that convert floating-point numbers."""
    source = ASTSource(convert, {"x": "*fp32", "y": "*fp8e4nv"}, {})
    ptx = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm["ptx"]
    return re.findall(r"cvt\.r[nz]\S+", ptx)


def truncated_to_float16(x: np.ndarray) -> np.ndarray:
    """Computes cvt.rz.f16.f32 of normal numbers, which drops the last 13 bits of the fraction."""
    return (x.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float16)


def main() -> None:
    print(f"triton {triton.__version__}")
    found = {capability: conversions(capability) for capability in (89, 90, 120)}
    for capability, instructions in found.items():
        print(f"  sm_{capability}:", ", ".join(instructions))
    if "cvt.rz.f16.f32" not in found[89]:
        return
    x = (np.arange(2**23, dtype=np.uint32) + np.float32(1).view(np.uint32)).view(np.float32)
    direct = x.astype(ml_dtypes.float8_e4m3fn)
    twice = truncated_to_float16(x).astype(ml_dtypes.float8_e4m3fn)
    wrong = np.flatnonzero(direct.view(np.uint8) != twice.view(np.uint8))
    first = wrong[0]
    print(f"  sm_89 rounds {len(wrong)} of the {len(x)} float32 numbers from 1 to 2 wrongly,")
    print(f"  for example {x[first]:.7f} to {twice[first]} instead of {direct[first]}")


if __name__ == "__main__":
    main()
