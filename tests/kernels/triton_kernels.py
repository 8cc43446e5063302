"""Typical Triton kernels, compiled for sm_100 without a GPU."""

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

BLACKWELL = GPUTarget("cuda", 100, 32)

DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "fp8e4nv": ml_dtypes.float8_e4m3fn,
    "fp8e5": ml_dtypes.float8_e5m2,
    "fp32": np.float32,
    "i8": np.int8,
    "i32": np.int32,
}


@triton.jit
def pointers(a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr):
    """Computes c = a @ b through pointers, whose loads become cp.async."""
    m = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    n = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    total = tl.zeros((TILE_M, TILE_N), c.dtype.element_ty)
    for first in range(0, K, TILE_K):
        x = tl.load(a + m[:, None] * K + (first + k)[None, :], mask=m[:, None] < M)
        y = tl.load(b + (first + k)[:, None] * N + n[None, :])
        total = tl.dot(x, y, total, out_dtype=total.dtype)
    tl.store(c + m[:, None] * N + n[None, :], total, mask=m[:, None] < M)


@triton.jit
def descriptors(
    a,
    b,
    c,
    M,
    N,
    K,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    SPECIALIZED: tl.constexpr,
):
    """Computes c = a @ b^T through the host's tensor descriptors in a persistent kernel."""
    tiles_n = tl.cdiv(N, TILE_N)
    tiles = tl.cdiv(M, TILE_M) * tiles_n
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=True, warp_specialize=SPECIALIZED
    ):
        m, n = tile // tiles_n * TILE_M, tile % tiles_n * TILE_N
        total = tl.zeros((TILE_M, TILE_N), tl.float32)
        for k in range(0, K, TILE_K):
            total = tl.dot(a.load([m, k]), b.load([n, k]).T, total)
        c.store([m, n], total.to(c.dtype))


@triton.jit
def columns_first(
    a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """Computes c = a @ b through the host's tensor descriptors; the tensor core transposes b."""
    m, n = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        total = tl.dot(a.load([m, k]), b.load([k, n]), total)
    c.store([m, n], total.to(c.dtype))


@triton.jit
def own_descriptors(
    a, b, c, M, N, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr
):
    """Computes c = a @ b^T through tensor descriptors that the kernel makes."""
    of_a = tl.make_tensor_descriptor(a, [M, K], [K, 1], [TILE_M, TILE_K])
    of_b = tl.make_tensor_descriptor(b, [N, K], [K, 1], [TILE_N, TILE_K])
    of_c = tl.make_tensor_descriptor(c, [M, N], [N, 1], [TILE_M, TILE_N])
    m, n = tl.program_id(0) * TILE_M, tl.program_id(1) * TILE_N
    total = tl.zeros((TILE_M, TILE_N), tl.float32)
    for k in range(0, K, TILE_K):
        total = tl.dot(of_a.load([m, k]), of_b.load([n, k]).T, total)
    of_c.store([m, n], total.to(of_c.dtype))


@triton.jit
def chained(a, b, c, d, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, K: tl.constexpr):
    """Computes d = relu(a @ b^T) @ c; the intermediate operand stays in tensor memory."""
    m = tl.program_id(0) * TILE_M
    rows = a.load([m, 0])
    total = tl.zeros((TILE_M, K), tl.float32)
    for n in range(0, N, TILE_N):
        between = tl.maximum(tl.dot(rows, b.load([n, 0]).T), 0).to(c.dtype)
        total = tl.dot(between, c.load([n, 0]), total)
    d.store([m, 0], total.to(d.dtype))


@dataclasses.dataclass(frozen=True)
class TritonCase:
    """A kernel for small operands.

    Attributes:
      kernel: one of the functions above.
      dtypes: dtypes of operands and result.
      shape: M, N, K; for `chained` only M and N.
      tile: size of a tile in each dimension of `shape`.
      grid: number of programs.
      constants: further constants of the kernel.
      options: options of the compiler.
    """

    kernel: Any
    dtypes: tuple[str, str]
    shape: tuple[int, ...]
    tile: tuple[int, int, int]
    grid: tuple[int, ...]
    constants: dict = dataclasses.field(default_factory=dict)
    options: dict = dataclasses.field(default_factory=dict)

    @property
    def operands(self) -> list[tuple[int, int]]:
        """Returns the shapes of the operands and, last, of the result."""
        if self.kernel is chained:
            (M, N), K = self.shape, self.tile[2]
            return [(M, K), (N, K), (N, K), (M, K)]
        M, N, K = self.shape
        second = (K, N) if self.kernel in (pointers, columns_first) else (N, K)
        return [(M, K), second, (M, N)]

    @property
    def boxes(self) -> list[tuple[int, int]]:
        """Returns the tile sizes of the operands and of the result."""
        M, N, K = self.tile
        if self.kernel is chained:
            return [(M, K), (N, K), (N, K), (M, K)]
        return [(M, K), (K, N) if self.kernel is columns_first else (N, K), (M, N)]

    def draw(self, seed: int) -> list[np.ndarray]:
        """Draws small integers, mostly 0 so that sums are exact; adds an array for the result."""
        generator, (kind, result) = np.random.default_rng(seed), self.dtypes
        values = [generator.integers(-2, 3, shape) for shape in self.operands[:-1]]
        values = [x * (generator.random(x.shape) < 0.3) for x in values]
        arrays = [x.astype(DTYPES[kind]) for x in values]
        return [*arrays, np.zeros(self.operands[-1], DTYPES[result])]

    def expected(self, *operands) -> np.ndarray:
        """Computes the result with numpy; fails if it is not exact."""
        a, b, *more = (x.astype(np.float64) for x in operands)
        exact = a @ (b if self.kernel in (pointers, columns_first) else b.T)
        if self.kernel is chained:
            exact = np.maximum(exact, 0) @ more[0]
        result = exact.astype(DTYPES[self.dtypes[1]])
        if not (result.astype(np.float64) == exact).all():
            raise ValueError("the result is not exactly representable")
        return result

    def compiled(self):
        """Compiles the kernel."""
        kernel, (kind, result) = self.kernel, self.dtypes
        names = [x for x in kernel.arg_names if x not in self.constexprs]
        numbers = [x for x in names if x.isupper()]
        arrays = [x for x in names if x not in numbers]
        kinds = [kind] * (len(arrays) - 1) + [result]
        types = [f"*{x}" for x in kinds]
        if kernel not in (pointers, own_descriptors):
            types = [f"tensordesc<{x}[{r},{c}]>" for x, (r, c) in zip(kinds, self.boxes)]
        known = dict(zip(arrays, types)) | dict.fromkeys(numbers, "i32")
        signature = {x: known.get(x, "constexpr") for x in kernel.arg_names}
        # Triton's launcher would detect that these arguments are multiples of 16.
        divisible = [x for x in names if not known[x].startswith("tensordesc")]
        attributes = {(kernel.arg_names.index(x),): [["tt.divisibility", 16]] for x in divisible}
        source = ASTSource(kernel, signature, self.constexprs, attributes)
        return triton.compile(source, target=BLACKWELL, options=self.options)

    @property
    def constexprs(self) -> dict:
        """Returns all constants of the kernel."""
        sides = dict(zip(("TILE_M", "TILE_N", "TILE_K"), self.tile))
        if self.kernel is chained:
            sides["K"] = sides.pop("TILE_K")
        return sides | self.constants


def matmul(kernel, dtypes, shape, tile, grid, *, constants=None, stages=3, **options):
    """Makes a case whose loads are pipelined in `stages` stages."""
    options = dict(num_warps=4, num_stages=stages) | options
    return TritonCase(kernel, dtypes, shape, tile, grid, constants or {}, options)


persistent = functools.partial(matmul, descriptors, grid=(2,), constants={"SPECIALIZED": False})
specialized = functools.partial(matmul, descriptors, grid=(2,), constants={"SPECIALIZED": True})

CASES = {
    "pointers, float16": matmul(pointers, ("fp16", "fp32"), (112, 128, 256), (128, 64, 64), (1, 2)),
    "pointers, bfloat16, 8 warps": matmul(
        pointers, ("bf16", "fp32"), (128, 128, 192), (128, 128, 64), (1, 1), stages=2, num_warps=8
    ),
    "pointers, float8_e4m3": matmul(
        pointers, ("fp8e4nv", "fp32"), (112, 64, 256), (128, 64, 64), (1, 1)
    ),
    "pointers, float8_e5m2, 64 rows": matmul(
        pointers, ("fp8e5", "fp32"), (112, 64, 256), (64, 64, 128), (2, 1), stages=2
    ),
    "pointers, int8": matmul(pointers, ("i8", "i32"), (112, 64, 256), (128, 64, 64), (1, 1)),
    "pointers, TF32, 64 rows": matmul(
        pointers, ("fp32", "fp32"), (64, 64, 64), (64, 64, 32), (1, 1), stages=2
    ),
    "pointers, float16, 256 rows": matmul(
        pointers, ("fp16", "fp32"), (240, 64, 128), (256, 64, 64), (1, 1), stages=2
    ),
    "descriptors, float16": persistent(("fp16", "fp16"), (200, 128, 256), (128, 64, 64)),
    "descriptors, bfloat16": persistent(("bf16", "bf16"), (200, 128, 256), (128, 64, 64), stages=2),
    "descriptors, float8": persistent(("fp8e4nv", "fp16"), (200, 128, 384), (128, 64, 128)),
    "descriptors, two blocks a program": persistent(
        ("fp16", "fp16"), (300, 128, 192), (256, 128, 64), num_ctas=2
    ),
    "specialised warps, float16": specialized(("fp16", "fp16"), (200, 128, 256), (128, 64, 64)),
    "specialised warps, float8": specialized(("fp8e4nv", "fp16"), (200, 128, 384), (128, 64, 128)),
    "columns first, bfloat16": matmul(
        columns_first, ("bf16", "bf16"), (200, 128, 192), (128, 64, 64), (2, 2)
    ),
    "columns first, float8": matmul(
        columns_first, ("fp8e4nv", "fp16"), (200, 64, 256), (128, 64, 128), (2, 1)
    ),
    "own descriptors, float16": matmul(
        own_descriptors, ("fp16", "fp16"), (200, 128, 192), (128, 64, 64), (2, 2), stages=2
    ),
    "own descriptors, float8": matmul(
        own_descriptors, ("fp8e4nv", "fp16"), (128, 64, 256), (128, 64, 128), (1, 1), stages=2
    ),
    "chained, float16": matmul(chained, ("fp16", "fp16"), (256, 192), (128, 64, 64), (2,)),
    "chained, bfloat16": matmul(chained, ("bf16", "fp16"), (128, 128), (128, 64, 64), (1,)),
}
