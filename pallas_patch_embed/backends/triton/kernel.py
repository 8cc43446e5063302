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
def on_2_23(pixels):
    """2^23 + pixels in float32: bytes as the last ones of the fraction, in one instruction each."""
    return tl.inline_asm_elementwise(
        asm="""
        prmt.b32 $0, $4, 0x4B000000, 0x7440;
        prmt.b32 $1, $4, 0x4B000000, 0x7441;
        prmt.b32 $2, $4, 0x4B000000, 0x7442;
        prmt.b32 $3, $4, 0x4B000000, 0x7443;
        """,
        constraints="=f,=f,=f,=f,r",
        args=[pixels],
        dtype=tl.float32,
        is_pure=True,
        pack=4,
    )


@triton.jit
def encoded(pixels, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """uint8 pixels in the encoding of patches.py; `widened`, if asked for."""
    # Of each of the 256 levels this gives patchify's number, also where a compiler goes through
    # float16 to float8 (Triton 3.6 for 8.9).
    if DTYPE == "float8_e4m3fn" and not WIDEN:
        # Exact, as is the sum: 2/255 is 0x808081 * 2^-30.
        level = tl.fma(on_2_23(pixels), 2.0 / 255.0, -65794.0078125)
    else:
        level = tl.fma(pixels.to(tl.float32), 2.0 / 255.0, -1.0)
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
def loaded(pointers, real, WHOLE: tl.constexpr):
    """What is there, and zeros where nothing is; WHOLE says that all of it is there."""
    if WHOLE:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=real, other=0.0)
    return found


@triton.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()


@triton.jit
def parts_of(x, PARTS: tl.constexpr):
    """The columns in so many parts, a power of two."""
    if PARTS == 1:
        parts = (x,)
    else:
        left, right = halves(x)
        parts = parts_of(left, PARTS // 2) + parts_of(right, PARTS // 2)
    return parts


@triton.jit
def terms_at(table, rows, n, N: tl.constexpr, TILE_N: tl.constexpr, HAS_TABLE: tl.constexpr):
    """The table's numbers at rows and columns; its only row if it has one."""
    if HAS_TABLE:
        terms = loaded(table + rows[:, None] * N + n[None, :], (n < N)[None, :], N % TILE_N == 0)
    else:
        terms = loaded(table + n, n < N, N % TILE_N == 0)[None, :]
    return terms


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
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y[m, n] = (sum_k rows[m, k] * weight[n, k]) * scale[n] + table[m % PERIOD, n], rounded once.

    A program has TILE_N columns and walks the runs of row tiles that schedule.py gives its worker.

    rows is [M, K_PADDED]; or, if IMAGES, uint8 images of IMAGE bytes, in lines of LINE bytes, cut
    into GRID patches, GRID_W side by side, of PATCH lines of PATCH_LINE bytes. VECTOR divides the
    distances of lines and of patches. Beyond the ends of M and N it reads what is there, and writes
    nothing.
    """
    SLICES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    PART: tl.constexpr = TILE_N // PARTS
    # Of patches and of lines, all distances are multiples of it: loads see that they are aligned.
    UNIT: tl.constexpr = VECTOR if IMAGES else K_PADDED
    SPAN: tl.constexpr = (TILE_M // GRID + 2) * IMAGE if IMAGES else TILE_M * K_PADDED
    OFFSET: tl.constexpr = tl.int32 if SPAN < 2**31 else tl.int64
    worker = tl.program_id(0) // SLICES
    first_column = tl.program_id(0) % SLICES * TILE_N
    in_tile = tl.arange(0, TILE_M)
    in_part = tl.arange(0, PART)
    in_step = tl.arange(0, TILE_K)
    column = first_column + tl.arange(0, TILE_N)
    weights = weight + column[:, None] * K_PADDED
    no_sums = tl.full((TILE_M, TILE_N), 0, tl.int32 if DTYPE == "int8" else tl.float32)
    # Element k of a patch of an image is byte `byte` of its line that begins at `line`.
    first_line, first_byte = in_step // PATCH_LINE * LINE, in_step % PATCH_LINE

    # Not `for`: Triton makes one loop of two that are nested, not of three.
    r = 0
    while r < RUNS:
        run = runs + (worker * RUNS + r) * 4
        first, tiles = tl.load(run), tl.load(run + 1)
        stride, table_row = tl.load(run + 2), tl.load(run + 3)
        table_rows = ((table_row + in_tile) % PERIOD).to(tl.int64)
        # Where the first tile begins, in images or rows, and how much later the next one does (a
        # run's tiles begin with the same patch of different images); its rows, from there on.
        if IMAGES:
            begin, advance = first * TILE_M // GRID, stride * TILE_M // GRID
            row = first * TILE_M + in_tile
            patch = row % GRID
            place = (row // GRID - begin).to(OFFSET) * (IMAGE // UNIT)
            place += (patch // GRID_W).to(OFFSET) * (PATCH * LINE // UNIT)
            place += (patch % GRID_W).to(OFFSET) * (PATCH_LINE // UNIT)
        else:
            begin, advance = first * TILE_M, stride * TILE_M
            place = in_tile.to(OFFSET)
        line, byte = first_line, first_byte
        # As one loop over the steps of all tiles, the next tile is loaded while one is stored. But
        # then each float product of encoded pixels waits for the one before (Triton 3.6, NOTES.md).
        for t in tl.range(0, tiles, flatten=DTYPE == "int8" or not IMAGES):
            sums = no_sums
            for k in tl.range(0, STEPS, num_stages=STAGES):
                here = place
                if M % TILE_M > 0:
                    # Beyond the last row is what the tile's image or row begins with.
                    here = tl.where((first + t * stride) * TILE_M + in_tile < M, here, 0)
                here = here[:, None] * UNIT
                source = rows + (begin + t * advance).to(tl.int64) * (IMAGE if IMAGES else K_PADDED)
                step = k * TILE_K + in_step
                if IMAGES:
                    line = tl.where(k == 0, first_line, line)
                    byte = tl.where(k == 0, first_byte, byte)
                    # Beyond K is the patch's first pixel again, times nothing.
                    behind = line + byte if K % TILE_K == 0 else tl.where(step < K, line + byte, 0)
                    behind = tl.max_contiguous(tl.multiple_of(behind, VECTOR), VECTOR)
                    a = tl.load(source + (here + behind[None, :]))
                    a = encoded(a, DTYPE, WIDEN)
                    byte += TILE_K % PATCH_LINE
                    next_line = byte >= PATCH_LINE
                    byte = tl.where(next_line, byte - PATCH_LINE, byte)
                    line += TILE_K // PATCH_LINE * LINE + tl.where(next_line, LINE, 0)
                else:
                    a = tl.load(source + (here + step[None, :]))
                    a = widened(a) if WIDEN else a
                real = (column < N)[:, None] & (step < K)[None, :]
                b = loaded(weights + step[None, :], real, N % TILE_N == 0 and K % TILE_K == 0)
                b = widened(b) if WIDEN else b
                sums = tl.dot(a, b.T, sums, out_dtype=sums.dtype)
            begin_m = (first + t * stride) * TILE_M
            m = begin_m + in_tile
            # Before it is cut: cut and converted, int32 takes more registers.
            parts = parts_of(sums.to(tl.float32), PARTS)
            n = first_column + in_part
            next_scale = loaded(scale + n, n < N, N % TILE_N == 0)
            terms = terms_at(table, table_rows, n, N, TILE_N, HAS_TABLE)
            for i in tl.static_range(PARTS):
                # Both factors of widened float8 products are times 2^-8.
                factor = next_scale * 65536.0 if WIDEN else next_scale
                addend = terms
                if i + 1 < PARTS:
                    # What the next part needs comes while this one is stored.
                    following = n + PART
                    next_scale = loaded(scale + following, following < N, N % TILE_N == 0)
                    terms = terms_at(table, table_rows, following, N, TILE_N, HAS_TABLE)
                result = tl.fma(parts[i], factor[None, :], addend.to(tl.float32))
                to = y + begin_m.to(tl.int64) * N + (in_tile[:, None] * N + n[None, :])
                inside = (m < M)[:, None] & (n < N)[None, :]
                tl.store(to, result.to(y.dtype.element_ty), mask=inside)
                n += PART
        r += 1
