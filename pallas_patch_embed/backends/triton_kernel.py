"""The Triton kernel: rows of patches, or of images that it cuts itself, times the weight."""

import triton
import triton.language as tl

# float8_e4m3fn numbers as float16 ones whose exponent is less by 8: all of them, exactly.
FLOAT16_FROM_FLOAT8 = tl.constexpr(2.0**-8)


@triton.jit
def widened(x):
    """The bytes of float8_e4m3fn numbers as float16 numbers, times 2^-8."""
    bits = x.to(tl.uint16)
    nan = (bits & 0x7F) == 0x7F
    wide = ((bits & 0x80) << 8) | tl.where(nan, 0x7E00, (bits & 0x7F) << 7).to(tl.uint16)
    return wide.to(tl.float16, bitcast=True)


@triton.jit
def encoded(pixels, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 pixels in the encoding of patchify.py; `widened`, if asked for."""
    level = (2.0 * pixels.to(tl.float32) - 255.0) * (1.0 / 255.0)
    if DTYPE == "int8":
        result = (pixels ^ 0x80).to(tl.int8, bitcast=True)
    elif DTYPE == "bfloat16":
        result = level.to(tl.bfloat16)
    elif not WIDEN:
        result = level.to(tl.float8e4nv)
    else:
        # Three fraction bits, and none below 2^-9: adding 1.5 * 2^20 times the number's power of
        # two, and subtracting it, rounds half to even.
        exponent = tl.abs(level).to(tl.int32, bitcast=True) >> 23
        rounder = (tl.maximum(exponent, 121) + 20 << 23 | 0x400000).to(tl.float32, bitcast=True)
        result = ((level + rounder - rounder) * FLOAT16_FROM_FLOAT8).to(tl.float16)
    return result


@triton.jit
def patch_embed(
    rows,
    weight,
    scale,
    table,
    runs,
    y,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PERIOD: tl.constexpr,
    RUNS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    IMAGES: tl.constexpr,
    GRID_W: tl.constexpr,
    GRID: tl.constexpr,
    PATCH: tl.constexpr,
    PATCH_LINE: tl.constexpr,
    LINE: tl.constexpr,
    IMAGE: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[m, n] = (sum_k rows[m, k] * weight[n, k]) * scale[n] + table[m % PERIOD, n], rounded once.

    A program has TILE_N columns and walks the runs of row tiles that schedule.py gives its worker.

    rows is [M, K_PADDED]; or, if IMAGES, uint8 images of IMAGE bytes, in lines of LINE bytes, cut
    into GRID patches, GRID_W side by side, of PATCH lines of PATCH_LINE bytes. VECTOR divides the
    distances of lines and of patches. Beyond the ends of M and N it reads the last row and column
    again, and writes nothing.
    """
    SLICES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    worker = tl.program_id(0) // SLICES
    n = tl.program_id(0) % SLICES * TILE_N + tl.arange(0, TILE_N)
    # Contiguous where no column is beyond the end.
    column = n if N % TILE_N == 0 else tl.minimum(n, N - 1)
    in_tile = tl.arange(0, TILE_M)
    in_step = tl.arange(0, TILE_K)
    scales = tl.load(scale + column).to(tl.float32)
    if WIDEN:
        scales *= 65536.0  # Both factors are times 2^-8.
    weights = weight + column[:, None] * K_PADDED

    for r in range(RUNS):
        run = runs + (worker * RUNS + r) * 4
        first, tiles = tl.load(run), tl.load(run + 1)
        stride, table_row = tl.load(run + 2), tl.load(run + 3)
        if HAS_TABLE:
            table_rows = ((table_row + in_tile) % PERIOD).to(tl.int64)
            terms = tl.load(table + table_rows[:, None] * N + column[None, :])
        else:
            terms = tl.load(table + column)[None, :]
        for j in range(tiles):
            m = (first + j * stride) * TILE_M + in_tile
            row = m if M % TILE_M == 0 else tl.minimum(m, M - 1)
            if IMAGES:
                patch = row % GRID
                place = (row // GRID).to(tl.int64) * IMAGE
                place += (patch // GRID_W).to(tl.int64) * (PATCH * LINE)
                place += patch % GRID_W * PATCH_LINE
                place = tl.multiple_of(place, VECTOR)
                # Element k of a patch is byte `byte` of its line that begins at `line`.
                line, byte = in_step // PATCH_LINE * LINE, in_step % PATCH_LINE
            else:
                place = row.to(tl.int64) * K_PADDED
            sums = tl.full((TILE_M, TILE_N), 0, tl.int32 if DTYPE == "int8" else tl.float32)
            for k in tl.range(0, K, TILE_K, num_stages=STAGES):
                step = k + in_step
                if IMAGES:
                    # Beyond K is the patch's first pixel again, times nothing.
                    behind = line + byte if K % TILE_K == 0 else tl.where(step < K, line + byte, 0)
                    behind = tl.max_contiguous(tl.multiple_of(behind, VECTOR), VECTOR)
                    a = encoded(tl.load(rows + place[:, None] + behind[None, :]), DTYPE, WIDEN)
                    byte += TILE_K % PATCH_LINE
                    next_line = byte >= PATCH_LINE
                    byte = tl.where(next_line, byte - PATCH_LINE, byte)
                    line += TILE_K // PATCH_LINE * LINE + tl.where(next_line, LINE, 0)
                else:
                    a = tl.load(rows + place[:, None] + step[None, :])
                    a = widened(a) if WIDEN else a
                if K % TILE_K == 0:
                    b = tl.load(weights + step[None, :])
                else:
                    b = tl.load(weights + step[None, :], mask=(step < K)[None, :], other=0.0)
                b = widened(b) if WIDEN else b
                sums = tl.dot(a, b.T, sums, out_dtype=sums.dtype)
            result = tl.fma(sums.to(tl.float32), scales[None, :], terms.to(tl.float32))
            to = y + row.to(tl.int64)[:, None] * N + column[None, :]
            inside = (m < M)[:, None] & (n < N)[None, :]
            tl.store(to, result.to(y.dtype.element_ty), mask=inside)
