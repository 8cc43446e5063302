"""Images to embeddings: XLA's convolution, patches and a product, and the kernel that cuts images.

  python -m benchmarks.images [--shape "B/16 224"] [--images 1 64 1024 4736] [--dtypes int8]

Prints the burst time of each way from uint8 images to embeddings with positions, by every backend
that serves here; before, each one's whole output is compared with the convolution in float32.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_patch_embed as ppe
from benchmarks import timing
from benchmarks.timing import Contender, Timing
from pallas_patch_embed.params import PatchEmbedParams
from pallas_patch_embed.problem import NAMED_SHAPES, NamedShape, named_shape

# Relative errors beyond these are no rounding (README: the dtypes' errors).
LARGEST_ERROR = {"float32": 1e-5, "bfloat16": 0.01, "float8_e4m3fn": 0.045, "int8": 0.015}

# Images a step of the comparison in float32.
COMPARED = 64

PEER = "patchify + xla"


def convolution(images: jax.Array, kernel: jax.Array, table: jax.Array, dtype: str) -> jax.Array:
    """What models do: pixels to [-1, 1], a convolution without overlap, bias and positions."""
    pixels = (images.astype(jnp.float32) * (2 / 255) - 1).astype(dtype)
    y = lax.conv_general_dilated(
        pixels,
        kernel.astype(dtype),
        window_strides=kernel.shape[:2],
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision="highest" if dtype == "float32" else None,
    )
    return y.reshape(len(images), -1, kernel.shape[-1]) + table.astype(dtype)


def draw(shape: NamedShape, images: int) -> tuple[jax.Array, ...]:
    """Random images [B, H, W, 3] on the device; a kernel [p, p, 3, N], and positions [S, N]."""
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(shape.patch, shape.patch, 3, shape.N)).astype(np.float32)
    positions = rng.normal(size=(shape.S, shape.N)).astype(np.float32)
    pixels = (images, shape.image, shape.image, 3)
    return jax.random.bits(jax.random.key(0), pixels, jnp.uint8), kernel, positions


def ways(params: PatchEmbedParams) -> dict[str, object]:
    """A function of images and params for every way that serves here, by name."""
    shape = (1, *params.table.shape[:1], params.K_padded)
    serving = [row.backend for row in ppe.explain(shape, params) if row.serves]

    def patches_first(images, params, backend):
        return ppe.patch_embed(ppe.patchify(images, params), params, backend=backend)

    found = {f"patchify + {b}": functools.partial(patches_first, backend=b) for b in serving}
    if "triton" in serving:
        found["triton, images"] = functools.partial(ppe.embed_images, backend="triton")
    return {"embed_images": ppe.embed_images} | found


def error(contender: Contender, images: jax.Array, kernel: jax.Array, table: jax.Array) -> float:
    """Relative Frobenius error of a contender's whole output against float32."""

    @jax.jit
    def squares(y, images):
        wanted = convolution(images, kernel, table, "float32")
        return jnp.square(y.astype(jnp.float32) - wanted).sum(), jnp.square(wanted).sum()

    y = contender()
    parts = [
        squares(y[i : i + COMPARED], images[i : i + COMPARED])
        for i in range(0, len(images), COMPARED)
    ]
    wrong, all_of_it = np.sum(np.asarray(parts, np.float64), axis=0)
    return float(np.sqrt(wrong / all_of_it))


def contenders(shape: NamedShape, dtype: str, images: int) -> dict[str, Contender]:
    """Everything that is compared, after its output was.

    Raises:
      RuntimeError: an output is wrong.
    """
    pixels, kernel, positions = draw(shape, images)
    params = ppe.pack(kernel, None, positions, patch_size=shape.patch, grid=shape.grid, dtype=dtype)
    kernel, table = jnp.asarray(kernel), jnp.asarray(positions)
    convolved = jax.jit(functools.partial(convolution, dtype="bfloat16"))
    found = {"convolution, bfloat16": Contender(convolved, (pixels, kernel, table))}
    for name, function in ways(params).items():
        found[f"{dtype} {name}"] = Contender(jax.jit(function), (pixels, params))
    for name, contender in found.items():
        largest = LARGEST_ERROR["bfloat16" if name.startswith("conv") else dtype]
        if not (off := error(contender, pixels, kernel, table)) <= largest:
            raise RuntimeError(f"{name}: relative error {off:.4f}, expected at most {largest}.")
    return found


def show(title: str, found: dict[str, Timing], dtype: str) -> None:
    """Prints one table: times, and how much faster they are than two peers."""
    print(f"\n{title}", flush=True)
    peers = {"convolution": "convolution, bfloat16", PEER: f"{dtype} {PEER}"}
    for name, measured in found.items():
        ratios = (
            f"  {found[peer].milliseconds / measured.milliseconds:5.2f}x of {short}"
            for short, peer in peers.items()
        )
        print(f"{name:36} {measured}{''.join(ratios)}")


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [shape.name for shape in NAMED_SHAPES]
    parser.add_argument("--shape", choices=names, default="B/16 224", metavar="NAME")
    parser.add_argument("--images", type=int, nargs="+", default=[1, 64, 1024, 4736])
    parser.add_argument("--dtypes", nargs="+", default=["int8", "float8_e4m3fn", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rest", type=float, default=1.0, help="seconds before a turn")
    chosen = parser.parse_args()
    print(timing.versions())
    for images in chosen.images:
        for dtype in chosen.dtypes:
            compared = contenders(named_shape(chosen.shape), dtype, images)
            found = timing.burst(compared, rounds=chosen.rounds, rest=chosen.rest)
            show(f"{chosen.shape}, {images} images, {dtype}", found, dtype)


if __name__ == "__main__":
    main()
