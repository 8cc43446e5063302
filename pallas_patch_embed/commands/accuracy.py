"""`accuracy`: compares an encoder in bfloat16 and in 8 bits with float32 on the user's pictures."""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from pallas_patch_embed.base.devices import check_devices
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.files import check_place, open_regular, written_atomically
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed import sources
from pallas_patch_embed.embed.embedder import Decoder
from pallas_patch_embed.embed.parquet import pictures_of
from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.encoders.calibration import (
    FILE,
    Calibration,
    calibrate,
    calibration_file,
    cosine_distances,
    encode,
    is_calibration,
)
from pallas_patch_embed.encoders.checkpoint import calibration_beside, load_encoder_for_side
from pallas_patch_embed.encoders.encoder import described_layers
from pallas_patch_embed.encoders.hub import find_checkpoint

type Array = npt.NDArray[Any]

# The text in the header of a PNG by which the command recognizes its own pictures.
CREATOR = "pallas-patch-embed accuracy"

# Where a calibration of this command is from.
SOURCE = "every second picture given to `accuracy`"

# Pictures that are drawn, those with the smallest cosine.
WORST = 6


@dataclasses.dataclass(frozen=True)
class Accuracy:
    """How near the vectors of a dtype are to those in float32.

    Attributes:
      dtype: dtype of the dense layers.
      cosines: cosine of each picture's vector and that in float32, [N].
      same: share of pictures whose nearest other picture, by cosine, is that of float32.
      layers: says which layers are in 8 bits; empty if none is.
    """

    dtype: str
    cosines: Array
    same: float
    layers: str = ""

    def cells(self) -> tuple[str, ...]:
        numbers = self.cosines.mean(), np.quantile(self.cosines, 0.01), self.cosines.min()
        return self.dtype, *(f"{x:.5f}" for x in numbers), f"{self.same:.1%}"

    @classmethod
    def of(cls, dtype: str, found: Array, exact: Array, layers: str = "") -> "Accuracy":
        same = nearest(found) == nearest(exact)
        return cls(dtype, 1 - cosine_distances(found, exact), float(same.mean()), layers)


def nearest(vectors: Array) -> Array:
    """Returns the index of each vector's nearest other one, by cosine."""
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-30)
    cosines = unit @ unit.T
    np.fill_diagonal(cosines, -np.inf)
    return np.asarray(cosines.argmax(1))


def table(results: Sequence[Accuracy]) -> str:
    """Formats the results as an aligned table."""
    rows = [
        ("dtype", "cosine mean", "1%", "least", "same neighbour"),
        *(r.cells() for r in results),
    ]
    widths = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths)) for row in rows)


def add_parser(commands: Any) -> None:
    """Adds the command to the command line."""
    parser = commands.add_parser(
        "accuracy",
        help="compare an encoder in bfloat16 and in 8 bits with float32 on your own pictures",
    )
    parser.add_argument("pictures", nargs="+", help="pictures, folders, tars and parquet files")
    parser.add_argument("--checkpoint", required=True, help="as the source of load_encoder")
    parser.add_argument(
        "--calibration",
        type=Path,
        help=f"file of a calibration (default: {FILE} in the checkpoint's folder; without it every "
        "second picture calibrates, and the others are compared)",
    )
    parser.add_argument(
        "--save-calibration",
        type=Path,
        metavar="FILE",
        help="write the calibration of every second picture, for embed --calibration",
    )
    parser.add_argument(
        "--dtype",
        choices=EIGHT_BITS,
        default="int8",
        help="dtype that is compared besides bfloat16 (default: int8)",
    )
    parser.add_argument(
        "--min-cosine",
        type=float,
        help="mean cosine for which layers stay in bfloat16, such as 0.9998; 0 for none (default: "
        "one that causes more than 45%% of the distance, then others that cause a third of the "
        "rest)",
    )
    parser.add_argument("--size", type=int, help="side of the images in pixels")
    parser.add_argument(
        "--allow-truncated", action="store_true", help="compare pictures whose end is missing"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("accuracy.png"),
        help="path of the picture to write (default: accuracy.png)",
    )
    parser.set_defaults(main=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table and writes the picture.

    Raises:
      OSError, ValueError: an argument is wrong, or fewer than three pictures can be read.
    """
    check_place(arguments.out, f"--out is {printable(arguments.out)}", is_own)
    if arguments.save_calibration is not None:
        _check_saved(arguments)
    sources.check(arguments.pictures)
    check_devices()
    checkpoint = find_checkpoint(arguments.checkpoint)
    preprocessing = dataclasses.replace(
        Decoder.of(checkpoint, arguments.size).preprocessing,
        allow_truncated=arguments.allow_truncated,
    )
    names, images = read(arguments.pictures, preprocessing)
    file, first = arguments.calibration, []
    beside = calibration_beside(checkpoint)
    if file is None and arguments.save_calibration is None and beside.is_file():
        file = beside
    if file is None:
        names, images, first = names[1::2], images[1::2], images[::2]
    if len(images) < 3:
        raise ValueError(
            f"accuracy: {len(images)} of the pictures can be compared, expected at least 3. Give "
            "6, of which every second one calibrates, or --calibration and 3."
        )
    load = functools.partial(load_encoder_for_side, checkpoint, arguments.size)
    exact = load(patch_dtype="float32", dtype="float32")
    if file is not None:
        calibration = Calibration.load(file)
    else:
        given = first if exact.config.naflex else np.stack(first)
        found = calibrate(exact, given, dtype=arguments.dtype)
        calibration = dataclasses.replace(found, source=SOURCE)
    if arguments.save_calibration is not None:
        calibration.save(arguments.save_calibration)
        print(f"Wrote {printable(arguments.save_calibration)}.")
    wanted = encode(exact, images)
    results = []
    for dtype in ("bfloat16", arguments.dtype):
        options: dict[str, Any] = {}
        if dtype in EIGHT_BITS:
            options = dict(calibration=calibration, min_cosine=arguments.min_cosine)
        encoder = load(patch_dtype=None, dtype=dtype, **options)
        layers = described_layers(encoder.blocks)
        results.append(Accuracy.of(dtype, encode(encoder, images), wanted, layers))
    print(
        f"{len(images)} pictures, compared with float32 on {jax.devices()[0].device_kind}; "
        f"{calibration!r}; {results[-1].layers}.\n"
    )
    print(table(results))
    draw(arguments.out, names, images, results)
    print(f"\nWrote {printable(arguments.out)}.")
    sys.stdout.flush()
    return 0


def _check_saved(arguments: argparse.Namespace) -> None:
    """Refuses a place for the calibration at which it cannot be written."""
    path, what = calibration_file(arguments.save_calibration), "--save-calibration"
    if arguments.calibration is not None:
        raise ValueError(
            f"{what} is {printable(path)}, but with --calibration nothing is calibrated. Leave one "
            "of them out."
        )
    check_place(path, f"{what} is {printable(path)}", is_calibration)


def read(pictures: Sequence[str], preprocessing: Preprocessing) -> tuple[Array, list[Array]]:
    """Returns the names and images of all pictures; says which cannot be read."""

    def say(name: str, why: str) -> None:
        print(f"{printable(name)}: {why}", file=sys.stderr)

    names, images = [], []
    for unit in sources.find(pictures, sources.Columns(), say):
        for picture in pictures_of(unit):
            try:
                images.append(preprocessing.image(picture.in_memory()))
                names.append(os.path.basename(picture.id))
            except Exception as error:  # Pillow raises many kinds of errors.
                say(picture.id, reason(error))
    return np.array(names, object), images


def is_own(path: Path) -> bool:
    """Returns whether this command wrote the file, which is a PNG."""
    with open_regular(str(path)) as file:
        header = file.read(2**12)
    return header.startswith(b"\x89PNG") and f"tEXtCreator\0{CREATOR}".encode() in header


def draw(path: Path, names: Array, images: list[Array], results: Sequence[Accuracy]) -> None:
    """Draws the cosine distances of all pictures, and the pictures that 8 bits change most."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7), layout="constrained")
    (above,), (below,) = figure.subfigures(2, 1, squeeze=False, height_ratios=[2, 1])
    axis = above.subplots()
    for result in results:
        distances = np.sort(np.maximum(1 - result.cosines, 1e-8))
        share = 100 * (np.arange(len(distances)) + 1) / len(distances)
        axis.plot(share, distances, label=f"{result.dtype}: mean {result.cosines.mean():.5f}")
    axis.set(yscale="log", xlabel="pictures, %", ylabel="cosine distance from float32")
    axis.grid(alpha=0.3)
    axis.legend()
    worst = np.argsort(results[-1].cosines)[:WORST]
    axes = below.subplots(1, WORST, squeeze=False)[0]
    below.suptitle(f"the pictures that {results[-1].dtype} changes most, with their cosines")
    for axis in axes:
        axis.set_axis_off()
    for axis, i in zip(axes, worst):
        axis.imshow(images[i])
        title = f"{results[-1].cosines[i]:.5f}\n{names[i][:20]}"
        axis.set_title(title, fontsize=9, parse_math=False)
    with written_atomically(path) as file:
        figure.savefig(file, format="png", dpi=110, metadata={"Creator": CREATOR})
