"""Shows the fences that Triton leaves out in kernels for Blackwell.

Compiles two kernels for sm_100a, without a GPU, and reads their PTX. Needs only triton and numpy.
docs/upstream.md explains the fault.
"""

import os
import re
import tempfile

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def loads_by_pointers(a, b, c, K, M: tl.constexpr, N: tl.constexpr, TILE_K: tl.constexpr):
    """Computes c = a @ b. The loads are compiled to cp.async."""
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, TILE_K)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, K, TILE_K):
        x = tl.load(a + m[:, None] * K + (first + k)[None, :])
        y = tl.load(b + (first + k)[:, None] * N + n[None, :])
        total = tl.dot(x, y, total)
    tl.store(c + m[:, None] * N + n[None, :], total)


@triton.jit
def loads_by_tma(a, b, c, K, M: tl.constexpr, N: tl.constexpr, TILE_K: tl.constexpr):
    """Computes c = a @ b for tensor descriptors a and b."""
    m, n = tl.arange(0, M), tl.arange(0, N)
    total = tl.zeros((M, N), tl.float32)
    for first in range(0, K, TILE_K):
        total = tl.dot(a.load([0, first]), b.load([first, 0]), total)
    tl.store(c + m[:, None] * N + n[None, :], total)


SIZES = {"M": 128, "N": 64, "TILE_K": 64}
POINTERS = {"a": "*fp16", "b": "*fp16"}
DESCRIPTORS = {"a": "tensordesc<fp16[128,64]>", "b": "tensordesc<fp16[64,64]>"}


def ptx_of(kernel, operands: dict[str, str]) -> str:
    """Returns the PTX of a kernel for sm_100a."""
    signature = operands | {"c": "*fp32", "K": "i32"} | dict.fromkeys(SIZES, "constexpr")
    aligned = [
        (i,) for i, kind in enumerate(signature.values()) if kind in ("*fp16", "*fp32", "i32")
    ]
    attributes = {key: [["tt.divisibility", 16]] for key in aligned}
    source = ASTSource(kernel, signature, SIZES, attributes)
    options = dict(num_warps=4, num_stages=3)
    return triton.compile(source, target=GPUTarget("cuda", 100, 32), options=options).asm["ptx"]


def instructions(ptx: str, pattern: str) -> list[str]:
    """Returns the instructions that match, in order, with a count for consecutive equal ones."""
    found: list[tuple[str, int]] = []
    for name in re.findall(rf"^\s*(?:@\S+ )?((?:{pattern})[\w.:]*)", ptx, re.M):
        count = found.pop()[1] if found and found[-1][0] == name else 0
        found.append((name, count + 1))
    return [name if count == 1 else f"{count} x {name}" for name, count in found]


if __name__ == "__main__":
    print(f"triton {triton.__version__}")
    ptx = ptx_of(loads_by_pointers, POINTERS)
    print("loads by pointers, until the first product is committed:")
    waited = r"cp\.async\.wait_group|bar\.sync|fence|tcgen05\.mma|tcgen05\.commit"
    for line in instructions(ptx[ptx.index("cp.async.wait_group") :], waited):
        print("  ", line)
        if line.startswith("tcgen05.commit"):
            break
    print("loads by pointers, tensor memory:")
    for line in instructions(ptx, r"tcgen05\.(?!alloc|relinquish|dealloc)|mbarrier.try_wait"):
        print("  ", line)
    ptx = ptx_of(loads_by_tma, DESCRIPTORS)
    print("loads by TMA, barriers:")
    used = r"mbarrier\.init|mbarrier\.arrive|fence|bar\.sync|cp\.async\.bulk\.tensor"
    for line in instructions(ptx, used):
        print("  ", line)
        if "bulk.tensor" in line:
            break
