"""The Triton kernel, which multiplies patches, or patches that it cuts from images, by the weight.

Each program computes TILE_N columns of y for its worker's segments of row tiles (schedule.py):

  for each segment, for each tile of it, for each TILE_K elements of K:
      load patches, or load pixels and encode them
      load the weight, multiply, accumulate
  scale the sums, add the table, round once, store

Names in capital letters are compile-time constants.
"""

import triton
import triton.language as tl

# A float16 number that is made from the bits of a float8_e4m3fn number is too small by this factor.
FLOAT16_FROM_FLOAT8 = tl.constexpr(2.0**-8)


@triton.jit
def float8_to_float16(x):
    """Converts bytes of float8_e4m3fn numbers to float16 numbers times 2^-8, exactly."""
    bits = x.to(tl.uint16)
    nan = (bits & 0x7F) == 0x7F
    wide = ((bits & 0x80) << 8) | tl.where(nan, 0x7E00, (bits & 0x7F) << 7).to(tl.uint16)
    return wide.to(tl.float16, bitcast=True)


@triton.jit
def uint8_to_biased_float32(pixels):
    """Returns 2^23 + pixel in float32. One instruction puts the byte into the fraction bits."""
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
def encode_pixels(pixels, DTYPE: tl.constexpr, WIDEN: tl.constexpr):
    """Encodes uint8 pixels as patches.py does; if WIDEN, float8 becomes float16 times 2^-8.

    The result equals that of patches.py for each of the 256 pixel values, even if the compiler
    converts to float8 through float16 (as Triton 3.6 does for compute capability 8.9).
    """
    if DTYPE == "float8_e4m3fn" and not WIDEN:
        # Product and sum are exact: 2/255 in float32 is 0x808081 * 2^-30.
        level = tl.fma(uint8_to_biased_float32(pixels), 2.0 / 255.0, -65794.0078125)
    else:
        level = tl.fma(pixels.to(tl.float32), 2.0 / 255.0, -1.0)
    if DTYPE == "int8":
        result = (pixels ^ 0x80).to(tl.int8, bitcast=True)
    elif DTYPE == "bfloat16":
        result = level.to(tl.bfloat16)
    elif not WIDEN:
        result = level.to(tl.float8e4nv)
    else:
        # float8_e4m3fn has three fraction bits, and no bits below 2^-9. Adding and subtracting
        # 1.5 * 2^20 times the number's power of two rounds to nearest, ties to even.
        exponent = tl.abs(level).to(tl.int32, bitcast=True) >> 23
        rounder = (tl.maximum(exponent, 121) + 20 << 23 | 0x400000).to(tl.float32, bitcast=True)
        result = ((level + rounder - rounder) * FLOAT16_FROM_FLOAT8).to(tl.float16)
    return result


@triton.jit
def load_masked(pointers, inside, WHOLE: tl.constexpr):
    """Loads values where `inside` is true, and zeros elsewhere. WHOLE means that all are inside."""
    if WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0.0)
    return values


@triton.jit
def next_pixels(
    line, byte, TILE_K: tl.constexpr, PATCH_LINE_BYTES: tl.constexpr, LINE_BYTES: tl.constexpr
):
    """Advances (offset of a patch's line, byte in that line) by TILE_K bytes without division."""
    byte += TILE_K % PATCH_LINE_BYTES
    next_line = byte >= PATCH_LINE_BYTES
    byte = tl.where(next_line, byte - PATCH_LINE_BYTES, byte)
    line += TILE_K // PATCH_LINE_BYTES * LINE_BYTES + tl.where(next_line, LINE_BYTES, 0)
    return line, byte


@triton.jit
def split_columns(x, PARTS: tl.constexpr):
    """Splits the columns into PARTS equal parts; PARTS is a power of two."""
    if PARTS == 1:
        parts = (x,)
    else:
        left, right = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        parts = split_columns(left, PARTS // 2) + split_columns(right, PARTS // 2)
    return parts


@triton.jit
def load_table(table, rows, n, N: tl.constexpr, TILE_N: tl.constexpr, HAS_TABLE: tl.constexpr):
    """Loads the table at these rows and columns n, or the offsets at n if there is no table."""
    if HAS_TABLE:
        pointers = table + rows[:, None] * N + n[None, :]
        values = load_masked(pointers, (n < N)[None, :], N % TILE_N == 0)
    else:
        values = load_masked(table + n, n < N, N % TILE_N == 0)[None, :]
    return values


@triton.jit
def store_tile(
    y,
    sums,
    first_row,
    first_column,
    scale,
    table,
    table_rows,
    in_tile,
    in_part,
    M: tl.constexpr,
    N: tl.constexpr,
    TILE_N: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Stores y = sums * scale + table, rounded once, for rows below M and columns below N.

    It stores one part of the columns at a time, to save registers. The scale and the table of the
    next part are loaded while one part is stored.
    """
    PART: tl.constexpr = TILE_N // PARTS
    m = first_row + in_tile
    # The sums are converted before they are split, because int32 parts take more registers.
    parts = split_columns(sums.to(tl.float32), PARTS)
    n = first_column + in_part
    next_scale = load_masked(scale + n, n < N, N % TILE_N == 0)
    next_table = load_table(table, table_rows, n, N, TILE_N, HAS_TABLE)
    for i in tl.static_range(PARTS):
        # With WIDEN both factors of each product are 2^-8 times their true values.
        factor = next_scale * 65536.0 if WIDEN else next_scale
        addend = next_table
        if i + 1 < PARTS:
            following = n + PART
            next_scale = load_masked(scale + following, following < N, N % TILE_N == 0)
            next_table = load_table(table, table_rows, following, N, TILE_N, HAS_TABLE)
        result = tl.fma(parts[i], factor[None, :], addend.to(tl.float32))
        to = y + first_row.to(tl.int64) * N + (in_tile[:, None] * N + n[None, :])
        inside = (m < M)[:, None] & (n < N)[None, :]
        tl.store(to, result.to(y.dtype.element_ty), mask=inside)
        n += PART


@triton.jit
def patch_embed(
    source,
    weight,
    scale,
    table,
    segments,
    y,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    K_PADDED: tl.constexpr,
    PERIOD: tl.constexpr,
    SEGMENTS: tl.constexpr,
    DTYPE: tl.constexpr,
    WIDEN: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    IMAGES: tl.constexpr,
    PATCHES: tl.constexpr,
    PATCHES_PER_LINE: tl.constexpr,
    PATCH_LINES: tl.constexpr,
    PATCH_LINE_BYTES: tl.constexpr,
    LINE_BYTES: tl.constexpr,
    IMAGE_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes y, rounded once:

    y[m, n] = (sum_k patch[m, k] * weight[n, k]) * scale[n] + table[m % PERIOD, n]

    `source` is patches [M, K_PADDED] or, if IMAGES, uint8 images of IMAGE_BYTES bytes each, with
    lines of LINE_BYTES bytes. An image has PATCHES patches, PATCHES_PER_LINE side by side. A patch
    has PATCH_LINES lines of PATCH_LINE_BYTES bytes. The offsets of lines and of patches in bytes
    are multiples of VECTOR.

    The kernel reads nothing outside its operands. For rows of a tile beyond M it reads other rows,
    for columns beyond N it uses zeros, and it stores neither.
    """
    SLICES: tl.constexpr = (N + TILE_N - 1) // TILE_N
    STEPS: tl.constexpr = (K + TILE_K - 1) // TILE_K
    WHOLE: tl.constexpr = N % TILE_N == 0 and K % TILE_K == 0
    # Offsets of rows are computed in units of UNIT elements. So the compiler knows that they are
    # aligned, and uses wide loads.
    UNIT: tl.constexpr = VECTOR if IMAGES else K_PADDED
    # Upper bound of the distance between two rows of a tile, in elements or in bytes of images.
    SPAN: tl.constexpr = (TILE_M // PATCHES + 2) * IMAGE_BYTES if IMAGES else TILE_M * K_PADDED
    OFFSET: tl.constexpr = tl.int32 if SPAN < 2**31 else tl.int64
    worker = tl.program_id(0) // SLICES
    first_column = tl.program_id(0) % SLICES * TILE_N
    in_tile = tl.arange(0, TILE_M)
    in_part = tl.arange(0, TILE_N // PARTS)
    in_step = tl.arange(0, TILE_K)
    column = first_column + tl.arange(0, TILE_N)
    weight_rows = weight + column[:, None] * K_PADDED
    zeros = tl.full((TILE_M, TILE_N), 0, tl.int32 if DTYPE == "int8" else tl.float32)
    # Element k of a patch in an image is `byte` of the line that begins at `line`.
    first_line, first_byte = in_step // PATCH_LINE_BYTES * LINE_BYTES, in_step % PATCH_LINE_BYTES

    # This is a `while` loop because Triton flattens two nested `for` loops, but not three.
    s = 0
    while s < SEGMENTS:
        segment = segments + (worker * SEGMENTS + s) * 4
        first_tile, tiles = tl.load(segment), tl.load(segment + 1)
        stride, table_row = tl.load(segment + 2), tl.load(segment + 3)
        table_rows = ((table_row + in_tile) % PERIOD).to(tl.int64)
        # All tiles of a segment begin with the same patch of an image. So a row's offset from the
        # first row (or first image) of its tile is the same in all tiles of the segment.
        if IMAGES:
            origin = first_tile * TILE_M // PATCHES
            origin_stride = stride * TILE_M // PATCHES
            row = first_tile * TILE_M + in_tile
            patch = row % PATCHES
            offsets = (row // PATCHES - origin).to(OFFSET) * (IMAGE_BYTES // UNIT)
            offsets += (patch // PATCHES_PER_LINE).to(OFFSET) * (PATCH_LINES * LINE_BYTES // UNIT)
            offsets += (patch % PATCHES_PER_LINE).to(OFFSET) * (PATCH_LINE_BYTES // UNIT)
        else:
            origin, origin_stride = first_tile * TILE_M, stride * TILE_M
            offsets = in_tile.to(OFFSET)
        line, byte = first_line, first_byte
        # If the two loops are flattened, the next tile is loaded while one is stored. They are not
        # flattened for images in float dtypes, because then each product would wait for the
        # previous one (Triton 3.6).
        for t in tl.range(0, tiles, flatten=DTYPE == "int8" or not IMAGES):
            sums = zeros
            for k in tl.range(0, STEPS, num_stages=STAGES):
                row_offsets = offsets
                if M % TILE_M > 0:
                    # For rows beyond M the first image or row of the tile is read.
                    m = (first_tile + t * stride) * TILE_M + in_tile
                    row_offsets = tl.where(m < M, row_offsets, 0)
                row_offsets = row_offsets[:, None] * UNIT
                size = IMAGE_BYTES if IMAGES else K_PADDED
                begin = source + (origin + t * origin_stride).to(tl.int64) * size
                step = k * TILE_K + in_step
                if IMAGES:
                    line = tl.where(k == 0, first_line, line)
                    byte = tl.where(k == 0, first_byte, byte)
                    # For elements beyond K the patch's first pixel is read; their weight is zero.
                    in_patch = line + byte
                    if K % TILE_K > 0:
                        in_patch = tl.where(step < K, in_patch, 0)
                    in_patch = tl.max_contiguous(tl.multiple_of(in_patch, VECTOR), VECTOR)
                    pixels = tl.load(begin + (row_offsets + in_patch[None, :]))
                    a = encode_pixels(pixels, DTYPE, WIDEN)
                    line, byte = next_pixels(line, byte, TILE_K, PATCH_LINE_BYTES, LINE_BYTES)
                else:
                    a = tl.load(begin + (row_offsets + step[None, :]))
                    a = float8_to_float16(a) if WIDEN else a
                inside = (column < N)[:, None] & (step < K)[None, :]
                b = load_masked(weight_rows + step[None, :], inside, WHOLE)
                b = float8_to_float16(b) if WIDEN else b
                sums = tl.dot(a, b.T, sums, out_dtype=sums.dtype)
            store_tile(
                y,
                sums,
                (first_tile + t * stride) * TILE_M,
                first_column,
                scale,
                table,
                table_rows,
                in_tile,
                in_part,
                M,
                N,
                TILE_N,
                PARTS,
                HAS_TABLE,
                WIDEN,
            )
        s += 1
