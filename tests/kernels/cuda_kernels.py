"""The configs of the CUDA library, and the expected launch of each."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.backends import cuda
from pallas_patch_embed.base.chips import B200, H200

CHIPS = {90: H200, 100: B200}
LONG = {short: dtype for dtype, short in cuda.SPELLED.items()} | {cuda.IMAGES: "uint8"}

built = pytest.mark.usefixtures("cuda_library")


def configs(**fields):
    """Lists the library's configs with these fields; the list is empty without a library."""
    if cuda.missing():
        return []
    return [c for c in cuda.configs() if all(getattr(c, k) == v for k, v in fields.items())]


@functools.cache
def register_on_the_cpu():
    """Also registers the handler for the CPU, where it only checks its operands."""
    handler = jax.ffi.pycapsule(cuda.library().patch_embed_execute)
    jax.ffi.register_ffi_target(cuda.TARGET, handler, platform="cpu")


def itemsize(short):
    return jnp.dtype(LONG[short]).itemsize


def matrix(short, rows, columns, box_rows, box_columns):
    size = itemsize(short)
    return dict(
        type=short,
        shape=[columns, rows],
        strides=[columns * size],
        box=[box_columns, box_rows],
        swizzle=box_columns * size,
    )


def lines_of_patches(M, rows, pixels, hopper):
    """Describes the im2col map of images: its rows are lines of one or two patches of 16 pixels."""
    height, width = pixels
    patches = 2 if hopper and width % 32 == 0 else 1
    pixels = width // 16 // patches, 48 * patches
    images = np.empty((M * 256 // height // width, height // 16, 16, *pixels), np.uint8)
    return dict(
        type="u8",
        shape=[48 * patches, width // 16 // patches, 16, len(images) * height // 16],
        strides=[images.strides[3], images.strides[2], images.strides[1]],
        box=[48 * patches, rows // patches],
        corner=[0, -15],
        swizzle=0 if hopper else 64,
    )


def lines_of_weight(N, K, rows):
    """Describes the map of an int8 weight whose lines of 48 bytes are loaded as 64."""
    weight = np.empty((N, 16, K // 16), np.int8).swapaxes(0, 1)
    return dict(
        type="i8",
        shape=list(weight.shape[::-1]),
        strides=list(weight.strides[-2::-1]),
        box=[64, rows, 1],
        swizzle=64,
    )


def expected_launch(config, M, N, K, period, workers, segments, pixels=None):
    """Derives the launch from ffi/*.cu and *.h, independently of ffi/launch.h."""
    size, out_size = itemsize(config.dtype), itemsize(config.out_dtype)
    factor = "i8" if pixels else config.dtype
    chunks, inner = K * size // 128, 128 // size
    hopper = config.capability == 90
    # Each row of a slot holds a chunk of K, or two lines of a patch, or on Blackwell one line and a
    # gap. There a row of the weight's chunks is as long.
    rows = (2 if config.cooperative else 1) * config.rows
    slot_row, weight_row = 128, 128
    if pixels and hopper:
        slot_row = 96
    elif pixels:
        slot_row = weight_row = 64
        chunks = 16
    ring = config.slots * rows * slot_row
    # If K is split, a block has a share of the weight's chunks. A pair shares the weight's rows.
    splits = config.blocks if hopper or "_split" in config.name else 1
    # Two buffers for the sums of a tile, each with a barrier for each of 8 warps.
    sums = 2 * (4 * config.tile_m * config.tile_n + 8 * 8) if splits > 1 else 0
    streamed, parts = 0, config.slots if config.stream_weight else -(-chunks // splits)
    if hopper and config.stream_weight:
        # The weight's slots fill the memory that the patches and 2 KiB leave.
        streamed = parts = (227 * 1024 - ring - 2048) // (config.tile_n * 128)
    weight_bytes = parts * config.tile_n * weight_row * splits // config.blocks
    if hopper:
        # The four threads of a row store 16 bytes each, or four columns each if K is split. The
        # axes are, from the innermost on: K, the 2 columns of a pair, threads, groups of columns,
        # pairs.
        vector = 4 if splits > 1 else 16 // out_size
        nested = np.empty((N // (4 * vector), 4, vector // 2, 2, K), f"V{size}")
        nested = nested.transpose(2, 0, 1, 3, 4)
        weight = dict(
            type=factor,
            shape=list(nested.shape[::-1]),
            strides=list(nested.strides[-2::-1]),
            box=[inner, 2, 4, config.tile_n // (4 * vector), vector // 2],
            swizzle=128,
        )
        y = None
        rest = 2 * 4 * config.tile_n + 8 * (2 * config.slots + streamed + 3) + sums
    elif splits > 1:
        weight, y = matrix(config.dtype, N, K, config.tile_n, inner), None
        # The barriers of slots and of two accumulators, and the address of tensor memory.
        rest = sums + 8 * (2 * config.slots + 4) + 4
    else:
        weight = matrix(config.dtype, N, K, config.tile_n // config.blocks, inner)
        if pixels:
            weight = lines_of_weight(N, K, config.tile_n // config.blocks)
        half = config.tile_n // 2 * out_size
        store_bytes = 128 if half % 128 == 0 else 64
        # Each warp stores its own 32 rows.
        y = matrix(config.out_dtype, M, N, 32, store_bytes // out_size)
        # With 256 columns and more than four slots there is only one buffer for each warp.
        buffers = 1 if config.tile_n == 256 and config.slots > 4 else 2
        # The barriers, the address of tensor memory and, with images, a correction of each column.
        rest = 8 * (2 * config.slots + 4) + 4 + (4 * config.tile_n if pixels else 0)
        rest += 2 * buffers * 128 * store_bytes
    shared_memory, staying = -(-(ring + rest) // 1024) * 1024 + weight_bytes, chunks
    if config.stream_weight and hopper:
        # Chunks 0, 4 and 8 of a streamed weight stay in the first slots if a warpgroup has 128 rows
        # and K has at most 16 chunks.
        some = config.rows == 128 and chunks <= 16
        staying = len(range(0, min(chunks, 12), 4)) if some else 0
    elif config.stream_weight:
        # The first chunks stay in what is left of 227 KiB.
        part = config.tile_n * 128 // config.blocks
        staying = min(chunks, (227 * 1024 - shared_memory) // part)
        shared_memory += staying * part
    return dict(
        thread_blocks=workers * N // config.tile_n * config.blocks,
        cluster=config.blocks,
        threads=384,
        shared_memory=shared_memory,
        chunks=chunks,
        patches=(
            lines_of_patches(M, config.rows, pixels, hopper)
            if pixels
            else matrix(config.dtype, M, K, rows, inner)
        ),
        weight=weight,
        y=y,
        multiplying_warps=8 if hopper else 1,
        storing_warps=8,
        # There are two accumulators. The number of allocated columns is a power of two.
        tensor_memory_columns=0 if hopper else 1 << (2 * config.tile_n - 1).bit_length(),
        staying_chunks=staying,
    )
