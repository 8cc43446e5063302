"""The demo: embeds three photographs with B/16 in every dtype, and compares with float32."""

import dataclasses
import itertools
import time
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.dtypes import DTYPES
from pallas_patch_embed.base.files import check_place, open_regular, written_atomically
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.base.problem import NamedShape, named_shape
from pallas_patch_embed.patch_embedding.api import embed_images, explain
from pallas_patch_embed.patch_embedding.packing import pack
from pallas_patch_embed.patch_embedding.params import PatchEmbedParams

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

B16 = named_shape("B/16 224")

# The text in the header of a PNG by which the demo recognizes its own pictures.
CREATOR = "pallas-patch-embed demo"


@dataclasses.dataclass(frozen=True)
class DtypeMeasurement:
    """Errors and time of one dtype, compared with the float32 reference.

    Attributes:
      dtype: dtype of patches and weight.
      backend: name of the backend that computed the embeddings.
      max_abs_error: largest absolute difference of an element.
      relative_error: Frobenius norm of the difference divided by that of the reference.
      mean_cosine: cosine of embedding and reference embedding, mean over all patches.
      weight_bytes: size of the packed parameters in bytes.
      milliseconds: median time of one call, from images to embeddings.
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
    """Returns the names of the package's photographs and their pixels, [B, H, W, 3] uint8.

    Each photograph is cropped to a square in its middle and resized to the shape's resolution.
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
    """Draws a kernel [p, p, 3, N], bias [N] and positions [S, N] from normal distributions."""
    p, K = shape.patch, shape.K
    return dict(
        kernel=rng.normal(0, K**-0.5, (p, p, 3, shape.N)).astype(np.float32),
        bias=rng.normal(0, 0.02, shape.N).astype(np.float32),
        position_embedding=rng.normal(0, 0.02, (shape.S, shape.N)).astype(np.float32),
    )


def reference(images: np.ndarray, weights: dict[str, np.ndarray], patch: int) -> np.ndarray:
    """Computes the embeddings [B, S, N] with a float32 jnp.dot, independently of the package."""
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
    """Returns the relative Frobenius error of vectors [..., N], and their mean cosine."""
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    lengths = np.linalg.norm(found, axis=-1) * np.linalg.norm(wanted, axis=-1)
    cosine = ((found * wanted).sum(-1) / lengths).mean()
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted)), float(cosine)


def measure(
    images: np.ndarray, weights: dict[str, np.ndarray], wanted: np.ndarray, patch: int
) -> list[DtypeMeasurement]:
    """Returns a `DtypeMeasurement` for each dtype, compared with the reference `wanted`."""
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
            DtypeMeasurement(
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


def table(results: list[DtypeMeasurement]) -> str:
    """Formats the results as an aligned table."""
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


def patch_errors(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the relative error [...] of each patch's embedding; both arguments are [..., N]."""
    difference = np.linalg.norm(found - wanted, axis=-1)
    return np.asarray(difference / np.linalg.norm(wanted, axis=-1))


def cut(images: np.ndarray, patch: int) -> np.ndarray:
    """Cuts images into patches of pixels, [B, h, w, patch, patch, 3]."""
    B, H, W, C = images.shape
    h, w = H // patch, W // patch
    pixels = images[:, : h * patch, : w * patch]
    return pixels.reshape(B, h, patch, w, patch, C).swapaxes(2, 3)


def patches_with_contrast(images: np.ndarray, patch: int) -> list[tuple[int, int, int]]:
    """Chooses two patches of each image, one in each half; returns their (image, row, column).

    Each has more contrast than four fifths of the patches in its half. The patches of highest
    contrast are not chosen, because few other patches resemble them.
    """
    contrast = cut(images, patch).std((3, 4)).mean(-1)
    B, _, w = contrast.shape
    found = []
    for image, first in itertools.product(range(B), (0, w // 2)):
        half = contrast[image, :, first : first + w // 2]
        order = np.argsort(half, axis=None, kind="stable")
        row, column = np.unravel_index(order[half.size * 4 // 5], half.shape)
        found.append((image, int(row), first + int(column)))
    return found


def nearest(
    embeddings: np.ndarray, queries: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the nearest neighbours of some embeddings among all others, by cosine similarity.

    Args:
      embeddings: [M, N].
      queries: [Q] integer, indices of the embeddings whose neighbours are wanted.
      count: number of neighbours of each.

    Returns:
      Indices [Q, count] and cosines [Q, count] of the neighbours, the nearest first.
    """
    unit = embeddings / np.linalg.norm(embeddings, axis=-1, keepdims=True)
    cosines = unit[queries] @ unit.T
    cosines[np.arange(len(queries)), queries] = -np.inf
    order = np.argsort(-cosines, axis=-1, kind="stable")[:, :count]
    return order, np.take_along_axis(cosines, order, axis=-1)


# The dtype of the embeddings whose neighbours are drawn; the number of neighbours of each patch.
NEIGHBOUR_DTYPE, NEIGHBOURS = "int8", 5
# Range of the colour scale in percent. It contains bfloat16's rounding, 0.2%, and float8's error,
# 4%.
ERROR_RANGE = 0.1, 10.0


def draw(
    path: Path,
    names: list[str],
    images: np.ndarray,
    wanted: np.ndarray,
    results: list[DtypeMeasurement],
    patch: int,
) -> None:
    """Writes a picture with the photographs, each patch's error by dtype, and nearest patches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.5, 13.5), layout="constrained")
    # With these heights the maps and the patches are square and fill the width.
    parts = figure.subfigures(2, 1, squeeze=False, height_ratios=[2.4, 1.35])
    chosen = patches_with_contrast(images, patch)
    _draw_errors(parts[0, 0], names, images, wanted, results, patch, chosen)
    _draw_neighbours(parts[1, 0], names, images, results, patch, chosen)
    format = path.suffix[1:] or "png"
    metadata = {"Creator": CREATOR} if format == "png" else None
    with written_atomically(path) as file:
        figure.savefig(file, format=format, dpi=110, metadata=metadata)


def _draw_photograph(axis: "Axes", image: np.ndarray, patch: int) -> None:
    """Draws a photograph with a grid around its patches."""
    H, W = image.shape[:2]
    axis.imshow(image)
    axis.set_xticks(np.arange(0, W, patch) - 0.5)
    axis.set_yticks(np.arange(0, H, patch) - 0.5)
    axis.grid(color="white", linewidth=0.5, alpha=0.6)
    axis.tick_params(length=0, labelbottom=False, labelleft=False)


def _mark(axis: "Axes", row: int, column: int, patch: int, number: int) -> None:
    """Draws a frame around a patch of a photograph, with its number beside it."""
    from matplotlib.patches import Rectangle

    corner = (column * patch - 0.5, row * patch - 0.5)
    axis.add_patch(Rectangle(corner, patch, patch, fill=False, color="red", linewidth=2))
    # The number is at the left of the patch; at the photograph's left edge it is at the right.
    x = column - 0.7 if column > 0 else 1.7
    box = dict(facecolor="red", edgecolor="none", pad=1)
    text = axis.text(x * patch, (row + 0.5) * patch, str(number), bbox=box, fontsize=9)
    text.set(color="white", fontweight="bold", ha="center", va="center")


def _draw_errors(
    figure: "SubFigure",
    names: list[str],
    images: np.ndarray,
    wanted: np.ndarray,
    results: list[DtypeMeasurement],
    patch: int,
    chosen: list[tuple[int, int, int]],
) -> None:
    """Draws a row for each photograph: its patches, and a map of their errors for each dtype."""
    from matplotlib.colors import LogNorm

    h, w = images.shape[1] // patch, images.shape[2] // patch
    axes = figure.subplots(len(names), 1 + len(results), squeeze=False)
    for i, (photograph, *maps) in enumerate(axes):
        _draw_photograph(photograph, images[i], patch)
        photograph.set_title(f"{names[i]}: {h} x {w} patches", fontsize=10)
        for axis, result in zip(maps, results):
            errors = 100 * patch_errors(result.embeddings[i], wanted[i]).reshape(h, w)
            shown = axis.imshow(errors, norm=LogNorm(*ERROR_RANGE), cmap="magma")
            axis.set_title(f"{result.dtype}: {np.median(errors):.2f}%", fontsize=10)
            axis.set_xlabel(f"{errors.min():.2f}% to {errors.max():.2f}%", fontsize=9)
            axis.set(xticks=[], yticks=[])
    for number, (image, row, column) in enumerate(chosen, 1):
        _mark(axes[image, 0], row, column, patch, number)
    bar = figure.colorbar(shown, ax=axes[:, 1:], ticks=[0.1, 0.2, 0.5, 1, 2, 5, 10], shrink=0.7)
    bar.ax.set_yticklabels([f"{tick:g}%" for tick in bar.get_ticks()])
    bar.set_label("relative error of a patch's embedding")
    figure.suptitle(
        "Relative error of each patch's embedding against float32\n"
        "above each map: the median of its patches; below it: the smallest and the largest error",
        fontsize=13,
    )


def _draw_neighbours(
    figure: "SubFigure",
    names: list[str],
    images: np.ndarray,
    results: list[DtypeMeasurement],
    patch: int,
    chosen: list[tuple[int, int, int]],
) -> None:
    """Draws each chosen patch with its nearest neighbours among the patches of all photographs."""
    patches = cut(images, patch)
    B, h, w = patches.shape[:3]
    patches = patches.reshape(-1, patch, patch, 3)
    queries = np.array([(image * h + row) * w + column for image, row, column in chosen])
    embeddings = {r.dtype: r.embeddings.reshape(len(patches), -1) for r in results}
    found, cosines = nearest(embeddings[NEIGHBOUR_DTYPE], queries, NEIGHBOURS)
    # Each row has two of the chosen patches, with a gap between them.
    tiles = [1.0] * (1 + NEIGHBOURS)
    grid = figure.add_gridspec(B, 2 * len(tiles) + 1, width_ratios=[*tiles, 0.3, *tiles])
    for i, query in enumerate(queries):
        first = i % 2 * (len(tiles) + 1)
        for k, index in enumerate([query, *found[i]]):
            axis = figure.add_subplot(grid[i // 2, first + k])
            axis.imshow(patches[index])
            axis.set(xticks=[], yticks=[])
            if k == 0:
                axis.set_title(f"patch {i + 1}", fontsize=9, color="red", fontweight="bold")
                axis.spines[:].set(color="red", linewidth=2)
            else:
                axis.set_title(f"{cosines[i, k - 1]:.3f}", fontsize=9)
                axis.set_xlabel(names[index // (h * w)], fontsize=8)
    every = np.arange(len(patches))
    neighbour = {dtype: nearest(e, every, 1)[0] for dtype, e in embeddings.items()}
    same = ", ".join(
        f"{dtype} {(neighbour[dtype] == neighbour['float32']).mean():.1%}"
        for dtype in embeddings
        if dtype != "float32"
    )
    figure.suptitle(
        f"The nearest patches of all photographs, by the cosine of {NEIGHBOUR_DTYPE} embeddings\n"
        f"share of patches whose nearest patch is the same as in float32: {same}",
        fontsize=13,
    )


def is_own(path: Path) -> bool:
    """Returns whether the demo wrote this file, which is a PNG."""
    with open_regular(str(path)) as file:
        header = file.read(2**12)
    return header.startswith(b"\x89PNG") and f"tEXtCreator\0{CREATOR}".encode() in header


def run(out: Path, seed: int) -> None:
    """Prints the table and writes the picture to `out`.

    Raises:
      ValueError: the picture cannot be written there.
    """
    check_place(out, f"--out is {printable(out)}", is_own)
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if out.suffix[1:] not in ("", *formats):
        raise ValueError(f"--out is {printable(out)}, expected a name that ends in .png.")
    check_devices()
    weights = draw_weights(np.random.default_rng(seed))
    names, images = photographs()
    wanted = reference(images, weights, B16.patch)
    results = measure(images, weights, wanted, B16.patch)
    print(
        f"{len(names)} photographs ({', '.join(names)}) of {B16.image} x {B16.image} pixels, "
        f"random {B16.name} weights (--seed={seed}), on {jax.devices()[0].device_kind}.\n"
        "Errors are those of bfloat16 embeddings against a float32 jnp.dot.\n"
    )
    print(table(results))
    draw(out, names, images, wanted, results, B16.patch)
    print(f"\nWrote {printable(out)}.")
