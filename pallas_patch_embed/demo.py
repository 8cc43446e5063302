"""The demo: three photographs through B/16 in every dtype, beside a float32 jnp.dot."""

import dataclasses
import secrets
import time
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.api import embed_images, explain
from pallas_patch_embed.params import PatchEmbedParams, pack
from pallas_patch_embed.problem import DTYPES, NamedShape, named_shape

B16 = named_shape("B/16 224")


@dataclasses.dataclass(frozen=True)
class Result:
    """One dtype against the float32 reference.

    Attributes:
      dtype: of patches and weight.
      backend: that computed it.
      max_abs_error: largest absolute difference of an element.
      relative_error: Frobenius norm of the difference over that of the reference.
      mean_cosine: cosine of embedding and reference embedding, mean over all patches.
      weight_bytes: of the packed parameters.
      milliseconds: median of one call, images to embeddings.
      embeddings: [B, S, N] float32.
    """

    dtype: str
    backend: str
    max_abs_error: float
    relative_error: float
    mean_cosine: float
    weight_bytes: int
    milliseconds: float
    embeddings: np.ndarray


def photographs(shape: NamedShape = B16) -> tuple[list[str], np.ndarray]:
    """The names of the package's photographs and their pixels, [B, H, W, 3] uint8.

    Cut to a square around the middle and resized to the shape's resolution.
    """
    from PIL import Image, ImageOps

    folder = resources.files("pallas_patch_embed") / "photos"
    files = sorted(
        (file for file in folder.iterdir() if file.name.endswith(".png")), key=lambda f: f.name
    )
    names, images = [], []
    for file in files:
        with file.open("rb") as stream, Image.open(stream) as image:
            names.append(file.name.removesuffix(".png"))
            images.append(ImageOps.fit(image.convert("RGB"), (shape.image, shape.image)))
    return names, np.stack([np.asarray(image) for image in images])


def draw_weights(rng: np.random.Generator, shape: NamedShape = B16) -> dict[str, np.ndarray]:
    """A kernel [p, p, 3, N], bias [N] and positions [S, N], normally distributed."""
    p, K = shape.patch, shape.K
    return dict(
        kernel=rng.normal(0, K**-0.5, (p, p, 3, shape.N)).astype(np.float32),
        bias=rng.normal(0, 0.02, shape.N).astype(np.float32),
        position_embedding=rng.normal(0, 0.02, (shape.S, shape.N)).astype(np.float32),
    )


def reference(images: np.ndarray, weights: dict[str, np.ndarray], patch: int) -> np.ndarray:
    """The embeddings [B, S, N] by float32 jnp.dot, without any of the package's packing."""
    B, H, W, C = images.shape
    h, w = H // patch, W // patch
    pixels = images[:, : h * patch, : w * patch].astype(np.float32) / 255 * 2 - 1
    rows = pixels.reshape(B, h, patch, w, patch, C).swapaxes(2, 3).reshape(B, h * w, -1)
    kernel = weights["kernel"].reshape(rows.shape[-1], -1)
    product = jnp.dot(rows, kernel, precision=jax.lax.Precision.HIGHEST)
    return np.asarray(product + weights["bias"] + weights["position_embedding"])


def _milliseconds(images: jax.Array, params: PatchEmbedParams) -> float:
    embed = jax.jit(embed_images)
    embed(images, params).block_until_ready()
    times = []
    for _ in range(10):
        start = time.perf_counter()
        embed(images, params).block_until_ready()
        times.append(time.perf_counter() - start)
    return 1e3 * float(np.median(times))


def compare(found: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """The relative Frobenius error of vectors [..., N], and their mean cosine."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    cosine = ((found * wanted).sum(-1) / lengths).mean()
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)), float(cosine)


def measure(
    images: np.ndarray, weights: dict[str, np.ndarray], wanted: np.ndarray, patch: int
) -> list[Result]:
    """One `Result` a dtype, against the reference embeddings `wanted`."""
    on_device = jnp.asarray(images)
    results = []
    for dtype in DTYPES:
        params = pack(
            weights["kernel"],
            weights["bias"],
            weights["position_embedding"],
            patch_size=patch,
            dtype=dtype,
        )
        found = np.asarray(embed_images(on_device, params), np.float32)
        relative_error, mean_cosine = compare(found, wanted)
        results.append(
            Result(
                dtype=dtype,
                backend=explain(on_device, params).chosen,
                max_abs_error=float(np.abs(found - wanted).max()),
                relative_error=relative_error,
                mean_cosine=mean_cosine,
                weight_bytes=params.nbytes,
                milliseconds=_milliseconds(on_device, params),
                embeddings=found,
            )
        )
    return results


def table(results: list[Result]) -> str:
    """The results as an aligned table."""
    header = (
        f"{'dtype':<14}  {'backend':<12}  {'max abs error':>13}  {'relative error':>14}  "
        f"{'mean cosine':>11}  {'weight bytes':>12}  {'time':>10}"
    )
    lines = [
        f"{r.dtype:<14}  {r.backend:<12}  {r.max_abs_error:>13.5f}  {r.relative_error:>13.3%}  "
        f"{r.mean_cosine:>12.6f}  {r.weight_bytes:>12,}  {r.milliseconds:>7.2f} ms"
        for r in results
    ]
    return "\n".join([header, *lines])


def draw(
    path: Path, names: list[str], images: np.ndarray, wanted: np.ndarray, results: list[Result]
) -> None:
    """Draws each photograph beside its embeddings as colours, and writes a PNG.

    Red, green and blue are the first three principal components of the reference embeddings of
    that photograph; every dtype is projected on the same ones.
    """
    from matplotlib.figure import Figure

    columns = [("float32 jnp.dot", wanted), *((r.dtype, r.embeddings) for r in results)]
    figure = Figure(figsize=(2.1 * (1 + len(columns)), 2.3 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), 1 + len(columns), squeeze=False)
    for row, name, image, reference_row in zip(axes, names, images, range(len(names))):
        base = wanted[reference_row]
        mean = base.mean(0)
        components = np.linalg.svd(base - mean, full_matrices=False)[2][:3]
        low, high = np.percentile((base - mean) @ components.T, (2, 98), axis=0)
        row[0].imshow(image)
        row[0].set_title(name, fontsize=9)
        side = int(len(base) ** 0.5)
        for axis, (title, embeddings) in zip(row[1:], columns):
            colours = ((embeddings[reference_row] - mean) @ components.T - low) / (high - low)
            axis.imshow(np.clip(colours, 0, 1).reshape(side, side, 3), interpolation="nearest")
            axis.set_title(title, fontsize=9)
        for axis in row:
            axis.set_axis_off()
    figure.suptitle("Patch embeddings: first three principal components as red, green, blue")
    figure.savefig(path, dpi=110)


def run(out: Path, seed: int | None) -> None:
    """Prints the table and writes the picture to `out`."""
    seed = secrets.randbits(32) if seed is None else seed
    weights = draw_weights(np.random.default_rng(seed))
    names, images = photographs()
    wanted = reference(images, weights, B16.patch)
    results = measure(images, weights, wanted, B16.patch)
    print(
        f"{len(names)} photographs ({', '.join(names)}) at {B16.image} x {B16.image}, {B16.name} "
        f"weights drawn with --seed={seed}, on {jax.devices()[0].device_kind}.\n"
        "Errors are those of bfloat16 embeddings against a float32 jnp.dot.\n"
    )
    print(table(results))
    draw(out, names, images, wanted, results)
    print(f"\nWrote {out}.")
