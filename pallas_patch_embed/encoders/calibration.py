"""Calibration: what an encoder's layers get on examples, from which its 8 bits follow."""

import dataclasses
import functools
import itertools
import json
import numbers
import os
import warnings
import zlib
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.typing import DTypeLike

from pallas_patch_embed.base.array_arguments import AnyArray
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.files import written_atomically
from pallas_patch_embed.base.levels import to_levels
from pallas_patch_embed.base.problem import LEVELS
from pallas_patch_embed.encoders import eight_bits
from pallas_patch_embed.encoders.config import Config, TextConfig
from pallas_patch_embed.encoders.eight_bits import Prepared, Statistics, Unit
from pallas_patch_embed.encoders.encoder import (
    LAYERS,
    Encoder,
    EncoderOutput,
    Observe,
    embedded_images,
    embedded_patches,
    mean_of_patches,
    observed_transform,
)
from pallas_patch_embed.encoders.layouts import by_inputs, padded_width, parts_of
from pallas_patch_embed.encoders.naflex import batch_naflex
from pallas_patch_embed.encoders.text_encoder import TextEncoder, embedded_tokens, ends_of
from pallas_patch_embed.layers.attention import prefix_mask
from pallas_patch_embed.layers.norm import quantised
from pallas_patch_embed.patch_embedding.params import check_dtype
from pallas_patch_embed.patch_embedding.patches import check_range

type Array = npt.NDArray[Any]
type AnyEncoder = Encoder | TextEncoder

# The names of calibrations' files in the folder of a checkpoint, which may have both towers.
FILE = "calibration.safetensors"
FILES = {"vision": FILE, "text": "text_calibration.safetensors"}
FORMAT = "pallas_patch_embed.calibration.2"

# Examples that are computed at a time, and those on which each layer's loss is measured.
BATCH, MEASURED = 8, 16

# The part of the distance for which a layer stays in bfloat16, and the part of what is left for
# which the next one stays, too. With massive activations in one to three blocks of small encoders
# the largest part was 0.38 to 0.76. Without, it was 0.09 to 0.30 in encoders of 4 blocks and more,
# and 0.35 in a B/16 with random weights.
TOO_MUCH, ALSO_TOO_MUCH = 0.45, 1 / 3

# The crops of the repository's photographs: parts of the shorter side. 3 photographs have 30 crops.
PARTS = (1.0, 0.6)

DEFAULT = "the repository's photographs"

# The end of the names that divisors have in a file.
DIVISOR = "divisor"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Calibration:
    """The dense layers of an encoder's blocks, rounded to 8 bits for given pictures or texts.

    `calibrate` makes it, and `load_encoder(..., dtype="int8", calibration=...)` needs it, or
    `load_text_encoder`.

    Attributes:
      layers: "qkv", "out", "fc1" and "fc2" of all L blocks, as `eight_bits.rounded` returns them.
      divisors: the numbers by which inputs were divided before, as for `eight_bits.smoothed`.
      losses: [L, 4], how much each of these layers in 8 bits changes an encoder's vector: the part
        of the mean cosine distance of an encoder with all layers in 8 bits that is due to it.
      bfloat16: the mean cosine distance of the encoder in bfloat16 from that in float32.
      weights: [L], a hash of each block's weights: a calibration is of one checkpoint.
      pictures: number of pictures, or of texts.
      source: where they are from.
      dtype: the dtype of 8 bits.
      tower: "vision", or "text" for that of a text encoder.
    """

    layers: dict[str, dict[str, Array]]
    divisors: dict[str, Array]
    losses: Array
    bfloat16: float
    weights: Array
    pictures: int
    source: str
    dtype: str = "int8"
    tower: str = "vision"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a safetensors file, or in a folder calibration.safetensors.

        That of a text encoder is text_calibration.safetensors. `load_encoder` and
        `load_text_encoder` find these files in the folder of their checkpoint.
        """
        from safetensors.numpy import save

        arrays = {f"{name}.{key}": x for name, p in self.layers.items() for key, x in p.items()}
        for layer in LAYERS:
            # safetensors does not read float8 into numpy.
            arrays[f"{layer}.weight"] = self.layers[layer]["weight"].view(np.uint8)
        arrays |= {f"{layer}.{DIVISOR}": by for layer, by in self.divisors.items()}
        arrays |= {"losses": self.losses, "weights": self.weights}
        names = ("bfloat16", "pictures", "source", "dtype", "tower")
        about = {name: getattr(self, name) for name in names}
        arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
        content = save(arrays, {"format": FORMAT, "calibration": json.dumps(about)})
        with written_atomically(calibration_file(path, self.tower)) as file:
            file.write(content)

    @classmethod
    def load(cls, path: str | os.PathLike[str], tower: str = "vision") -> "Calibration":
        """Reads what `save` wrote, in a folder for this tower.

        Raises:
          OSError, ValueError: the file cannot be read, or is not a calibration.
        """
        import safetensors

        file = calibration_file(path, tower)
        try:
            with safetensors.safe_open(file, "numpy") as stored:
                metadata = stored.metadata() or {}
                if metadata.get("format") != FORMAT:
                    raise ValueError(f"its format is {metadata.get('format')!r}, not {FORMAT!r}.")
                about = json.loads(metadata["calibration"])
                _check_about(about)
                layers: dict[str, dict[str, Array]] = {layer: {} for layer in LAYERS}
                for name in stored.keys():
                    layer, _, key = name.partition(".")
                    if layer in layers:
                        layers[layer][key] = stored.get_tensor(name)
                divisors = {layer: layers[layer].pop(DIVISOR) for layer in eight_bits.SMOOTHED}
                dtype = np.dtype(check_dtype(about["dtype"], "dtype", EIGHT_BITS))
                for p in layers.values():
                    p["weight"] = p["weight"].view(dtype)
                losses, weights = (stored.get_tensor(name) for name in ("losses", "weights"))
                _check_layers(layers, divisors, losses, weights)
                return cls(layers, divisors, losses, weights=weights, **about)
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"Calibration.load: {str(file)!r} is not a calibration: {str(error).rstrip('.')}. "
                "Make it with calibrate(encoder, images).save(path)."
            ) from error

    def of_first(
        self, blocks: dict[str, Any], config: Config | TextConfig, dtype: str
    ) -> "Calibration":
        """Returns the calibration of the first blocks, after a check that it is of their weights.

        Raises:
          ValueError: it is of another checkpoint or tower, or for another dtype.
        """
        exact, tower = "load_encoder(source, dtype='float32'), images", "vision"
        if isinstance(config, TextConfig):
            exact, tower = "load_text_encoder(source, dtype='float32'), ids", "text"
        if self.tower != tower:
            raise ValueError(
                f"{self!r} is of a {self.tower} encoder, but this is a {tower} encoder. Calibrate "
                f"it: calibrate({exact})."
            )
        if self.dtype != dtype:
            raise ValueError(
                f"{self!r} is for {self.dtype}, not {dtype}. Calibrate for this dtype: "
                f"calibrate({exact}, dtype={dtype!r})."
            )
        L = config.depth
        if len(self.weights) < L:
            raise ValueError(
                f"{self!r} is of {len(self.weights)} blocks, but this encoder has {L}. Calibrate "
                f"all of it: calibrate({exact})."
            )
        if not np.array_equal(self.weights[:L], _hash(blocks)):
            raise ValueError(
                f"{self!r} is of an encoder with other weights. Calibrate this checkpoint: "
                f"calibrate({exact})."
            )
        width = padded_width(config)
        for layer, p in self.layers.items():
            _, K, N = blocks[layer]["kernel"].shape
            if layer == "fc1":
                N = parts_of(layer, config) * width
            elif layer == "fc2":
                K = width
            if (found := p["weight"].shape[1:]) != (N, K):
                raise ValueError(
                    f"{self!r} has weights {list(found)} of {layer}, expected {[N, K]}. "
                    f"Calibrate this checkpoint: calibrate({exact})."
                )
        return dataclasses.replace(
            self,
            layers={name: {key: x[:L] for key, x in p.items()} for name, p in self.layers.items()},
            divisors={layer: by[:L] for layer, by in self.divisors.items()},
            losses=self.losses[:L],
            weights=self.weights[:L],
        )

    def kept(self, min_cosine: float | None, blocks: dict[str, Any]) -> set[Unit]:
        """Chooses the layers that stay in bfloat16.

        Without `min_cosine` a layer stays only if it causes more than `TOO_MUCH` of the distance,
        as one with massive activations does. Then the next one stays if it causes more than
        `ALSO_TOO_MUCH` of what is left, and so on, at most as many as there are blocks.

        With `min_cosine` those with the largest loss for each of their weights stay, as few as the
        mean cosine over the calibration's examples allows. The losses of layers add up, as the
        squares of errors do that do not depend on each other.

        Raises:
          ValueError: min_cosine is not a number in [0, 1), or bfloat16 does not reach it.
        """
        if min_cosine is None:
            losses, worst, part = self.losses.copy(), set[Unit](), TOO_MUCH
            while len(worst) < len(losses) and losses.max() > part * losses.sum():
                block, layer = divmod(int(losses.argmax()), len(LAYERS))
                worst.add((block, LAYERS[layer]))
                losses[block, layer], part = 0, ALSO_TOO_MUCH
            return worst
        given = isinstance(min_cosine, numbers.Real) and not isinstance(min_cosine, bool)
        if not given or not 0 <= min_cosine < 1:
            raise ValueError(
                f"min_cosine is {min_cosine!r}, expected a number from 0 to below 1, such as "
                "0.9995, or None."
            )
        if 1 - self.bfloat16 < min_cosine:
            raise ValueError(
                f"min_cosine is {min_cosine}, but bfloat16 has a mean cosine of "
                f"{1 - self.bfloat16:.6f} on {self!r}. Use bfloat16, or a smaller min_cosine."
            )
        size = np.array([blocks[layer]["kernel"][0].size for layer in LAYERS])
        order = np.argsort(-(self.losses / size), axis=None, kind="stable")
        total, kept = self.bfloat16 + self.losses.sum(), set()
        for index in order:
            if 1 - total >= min_cosine:
                break
            block, layer = divmod(int(index), len(LAYERS))
            total -= self.losses[block, layer]
            kept.add((block, LAYERS[layer]))
        return kept

    def __repr__(self) -> str:
        kind = "texts" if self.tower == "text" else "pictures"
        return f"Calibration({self.pictures} {kind}, {self.source})"


def is_calibration(path: Path) -> bool:
    """Returns whether `Calibration.save` wrote this file."""
    import safetensors

    try:
        with safetensors.safe_open(path, "numpy") as stored:
            return bool((stored.metadata() or {}).get("format") == FORMAT)
    except (OSError, safetensors.SafetensorError):
        return False


def calibrate(
    encoder: AnyEncoder,
    inputs: AnyArray | Sequence[AnyArray] | None = None,
    *,
    dtype: DTypeLike = "int8",
) -> Calibration:
    """Runs an encoder on examples and records what its layers get, for an encoder in 8 bits.

    A few hundred pictures or texts like those that the encoder will see are enough. It computes in
    float32, on the encoder's devices. Tokens behind the end of a CLIP's text are left out, because
    no other token attends to them.

    Args:
      encoder: from `load_encoder` or `load_text_encoder` with dtype "float32" or "bfloat16",
        possibly sharded.
      inputs: images as an encoder takes them, [N, H, W, C]; for a NaFlex encoder a sequence of
        pictures [H, W, C] uint8, as `batch_naflex` takes them; for a text encoder ids [N, L] from
        the checkpoint's tokenizer. None, but not for texts, for crops of the photographs in this
        package, with a warning: they are only three.
      dtype: "int8" or "float8_e4m3fn", for which it is made.

    Returns:
      Calibration.

    Raises:
      TypeError, ValueError: an argument has another type, shape or value.
    """
    dtype = check_dtype(dtype, "calibrate: dtype", EIGHT_BITS)
    if inputs is not None and (not hasattr(inputs, "__len__") or isinstance(inputs, dict)):
        raise TypeError(
            f"calibrate: the inputs are a {type(inputs).__name__}, expected images [N, H, W, C], "
            "for a NaFlex encoder a list of pictures [H, W, C], or ids of texts [N, L]."
        )
    if not isinstance(encoder, Encoder | TextEncoder) or isinstance(encoder.blocks, tuple):
        raise TypeError(
            f"calibrate: the encoder is {encoder!r}, expected an Encoder from load_encoder with "
            "dtype 'float32' or 'bfloat16', or such a TextEncoder from load_text_encoder."
        )
    source = "given by the user"
    if inputs is None:
        if isinstance(encoder, TextEncoder):
            raise TypeError(
                "calibrate: a text encoder needs the ids of texts like your own, a few hundred: "
                "calibrate(encoder, load_tokenizer(source)(texts))."
            )
        source = DEFAULT
        warnings.warn(
            f"calibrate: calibrated on {DEFAULT}, which are three. Pass a few hundred pictures "
            "like your own: calibrate(encoder, images).",
            stacklevel=2,
        )
        inputs = photographs(encoder.config)
    if isinstance(inputs, jax.Array):  # It may be split among devices along any axis.
        inputs = jax.device_get(inputs)
    exact = _in_float32(encoder)
    blocks = jax.device_get(exact.blocks)
    prepared = eight_bits.prepare(blocks, measured(exact, inputs), exact.config, dtype)
    layers = eight_bits.rounded(prepared)
    losses, bfloat16 = _losses(exact, prepared, layers, inputs)
    return Calibration(
        layers=layers,
        divisors=prepared.divisors,
        losses=losses,
        bfloat16=bfloat16,
        weights=_hash(blocks),
        pictures=len(inputs),
        source=source,
        dtype=dtype,
        tower="text" if isinstance(encoder, TextEncoder) else "vision",
    )


def measured(encoder: AnyEncoder, inputs: Any) -> dict[str, Statistics]:
    """Returns the statistics of the inputs of each dense layer of an encoder in float32.

    Raises:
      ValueError: there are no inputs, or a number is not finite.
    """
    total: dict[str, Statistics] | None = None
    tokens = 0.0
    for batch in _batches(encoder, inputs):
        found, number = _statistics(encoder, batch)
        total = found if total is None else _sum(total, found)
        tokens += float(number)
    if total is None:
        raise ValueError("calibrate: there are no images or texts, expected at least one.")
    statistics = {
        layer: Statistics(s.least, s.largest, s.mean / tokens, s.moment / tokens)
        for layer, s in jax.device_get(total).items()
    }
    if not all(np.isfinite(x).all() for s in statistics.values() for x in s):
        raise ValueError("calibrate: a layer's input is not finite. Check inputs and weights.")
    return statistics


def photographs(config: Config) -> Any:
    """Returns crops of the package's photographs, as `calibrate` takes them."""
    from PIL import Image

    height, width = config.image_size or (16 * config.patch, 16 * config.patch)
    folder, crops = resources.files("pallas_patch_embed") / "photos", []
    for name in ("astronaut.png", "chelsea.png", "coffee.png"):
        with (folder / name).open("rb") as file:
            picture = Image.open(file).convert("RGB")
        for part in PARTS:
            side = int(part * min(picture.size))
            corners = itertools.product(*({0, (n - side) // 2, n - side} for n in picture.size))
            for x, y in sorted(corners):
                box = (x, y, x + side, y + side)
                crop = picture.resize((width, height), Image.Resampling.BICUBIC, box)
                crops.append(np.asarray(crop))
    images = np.stack(crops)
    return np.resize(np.moveaxis(images, -1, 0), (config.channels, *images.shape[:-1])).transpose(
        1, 2, 3, 0
    )


def vectors(encoder: AnyEncoder, output: EncoderOutput) -> jax.Array:
    """Returns the vector of each input, [B, P]: the projection, the pooled one, or the mean."""
    for vector in (output.image_embeds, output.pooler_output):
        if vector is not None:
            return vector
    assert isinstance(encoder, Encoder)  # Texts are pooled.
    return mean_of_patches(output.last_hidden_state, encoder.config)


def encode(encoder: Encoder, images: Any) -> Array:
    """Returns the vectors of images as `calibrate` takes them, in float32 on the host."""
    if isinstance(images, list) and not encoder.config.naflex:
        images = np.stack(images)
    batches = _batches(encoder, images)
    return np.concatenate([np.asarray(_vectors(encoder, b), np.float32) for b in batches])


def cosine_distances(found: Array, exact: Array) -> Array:
    """Returns 1 - cosine of each pair of vectors [B, P]."""
    found, exact = found.astype(np.float64), exact.astype(np.float64)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(exact, axis=1)
    return np.asarray(1 - (found * exact).sum(1) / np.maximum(lengths, 1e-300))


def calibration_file(path: str | os.PathLike[str], tower: str = "vision") -> Path:
    """Returns the file of a calibration that is given by its path, or by that of its folder."""
    path = Path(path)
    return path / FILES[tower] if path.is_dir() else path


def _hash(blocks: dict[str, Any]) -> Array:
    """Returns a hash of each block's weights, which is the same for each dtype of an encoder.

    It is that of the norms in float32, and of the dense layers in bfloat16.
    """
    norms = [blocks[norm][name] for norm in ("norm1", "norm2") for name in ("scale", "bias")]
    dense = [blocks[layer][name] for layer in LAYERS for name in ("kernel", "bias")]

    def of_block(number: int) -> int:
        found = 0
        for x in norms:
            found = zlib.crc32(np.asarray(x[number], np.float32).tobytes(), found)
        for x in dense:
            rounded = np.asarray(x[number], np.float32).astype(jnp.bfloat16)
            found = zlib.crc32(rounded.tobytes(), found)
        return found

    return np.array([of_block(number) for number in range(len(norms[0]))], np.int64)


def _check_about(about: Any) -> None:
    """Checks what a calibration's file says about itself.

    Raises:
      ValueError: a value has another type, or is impossible.
    """
    types = dict(bfloat16=int | float, pictures=int, source=str, dtype=str, tower=str)
    for name, expected in types.items():
        if not isinstance(about[name], expected) or isinstance(about[name], bool):
            raise ValueError(f"{name} is {about[name]!r}")
    if not 0 <= about["bfloat16"] <= 2:  # A cosine distance.
        raise ValueError(f"bfloat16 is {about['bfloat16']!r}, expected a number from 0 to 2")
    if about["pictures"] < 1:
        raise ValueError(f"pictures is {about['pictures']!r}, expected at least 1")
    if about["tower"] not in FILES:
        raise ValueError(f"tower is {about['tower']!r}, expected one of {', '.join(FILES)}")


def _check_layers(
    layers: dict[str, dict[str, Array]], divisors: dict[str, Array], losses: Array, weights: Array
) -> None:
    """Checks the arrays of a calibration's file.

    Raises:
      ValueError: a name, shape or dtype is not that of a calibration, a number is not finite, a
        scale or divisor is not positive, a loss is negative, or a weight is no level.
    """

    def check(
        name: str,
        x: Array,
        shape: tuple[int, ...],
        *,
        dtype: str = "float32",
        positive: bool = False,
    ) -> None:
        if x.shape != shape or x.dtype != dtype:
            found, expected = (f"{a}{list(b)}" for a, b in ((x.dtype, x.shape), (dtype, shape)))
            raise ValueError(f"{name} is {found}, expected {expected}")
        if not np.isfinite(x).all() or (positive and (x <= 0).any()):
            wanted = "positive and finite" if positive else "finite"
            raise ValueError(f"{name} has a number that is not {wanted}")

    L = weights.size
    check("losses", losses, (L, len(LAYERS)), dtype="float64")
    if (losses < 0).any():
        raise ValueError(f"losses has a negative number, {losses.min()}")
    for layer, p in layers.items():
        names = {"weight", "scale", "bias", *(LEVELS if layer == "fc2" else ())}
        weight = p["weight"]
        if p.keys() != names or weight.ndim != 3 or len(weight) != L:
            raise ValueError(f"{layer} has {', '.join(sorted(p))} and a weight {weight.shape}")
        _, N, K = weight.shape
        shapes = {"scale": (L, N), "bias": (L, N), "factor": (L, K), "shift": (L, 1)}
        for name in names - {"weight"}:
            check(f"{layer}.{name}", p[name], shapes[name], positive=name in ("scale", "factor"))
        if layer in divisors:
            check(f"{layer}.{DIVISOR}", divisors[layer], (L, K), positive=True)
        if not _are_levels(weight):
            raise ValueError(f"{layer}.weight has a byte that is no level of {weight.dtype}")


def _are_levels(weight: Array) -> bool:
    """Returns whether `rounded` may have made it: int8 without -128, or float8 without NaN."""
    if weight.dtype == np.int8:
        return bool(weight.size == 0 or weight.min() > -128)
    return not bool((weight.view(np.uint8) & 0x7F == 0x7F).any())


def _parts(encoder: AnyEncoder, *names: str) -> dict[str, Any]:
    """Returns those of the encoder's fields that it has."""
    fields = {field.name for field in dataclasses.fields(encoder)}
    return {name: getattr(encoder, name) for name in names if name in fields}


def _in_float32[E: Encoder | TextEncoder](encoder: E) -> E:
    parts = _parts(encoder, "embedding", "norm", "head", "first_norm", "projection")
    cast = {name: jax.tree.map(lambda x: x.astype("float32"), x) for name, x in parts.items()}
    assert isinstance(encoder.blocks, dict)
    cast["blocks"] = by_inputs(encoder.blocks, encoder.config)
    return dataclasses.replace(encoder, dtype="float32", **cast)


def _batches(encoder: AnyEncoder, inputs: Any) -> Iterator[tuple[Any, ...]]:
    """Yields the arguments of `_observed` for a few images or texts at a time, checked."""
    config, longest = encoder.config, 0
    naflex = config if isinstance(config, Config) and config.naflex else None
    if naflex is not None:
        sizes = [np.shape(image) for image in inputs]
        for i, size in enumerate(sizes):
            if len(size) != 3:
                raise ValueError(
                    f"calibrate: picture {i} has the shape {list(size)}, expected [H, W, C]. Pass "
                    "a list of pictures."
                )
        patch = naflex.patch
        longest = max((h // patch * (w // patch) for h, w, *_ in sizes), default=0)
    for first in range(0, len(inputs), BATCH):
        batch = inputs[first : first + BATCH]
        if naflex is not None:
            patches, shapes, _ = batch_naflex(batch, naflex, longest)
            yield patches, shapes
        elif isinstance(encoder, TextEncoder):
            yield (encoder.checked(batch),)
        else:
            images = encoder.checked(batch)
            yield (check_range("calibrate: images", images, encoder.patch_embed.encoding),)


def _observed(
    encoder: AnyEncoder, batch: tuple[Any, ...], observe: Observe | None
) -> tuple[EncoderOutput, dict[str, Any]]:
    if isinstance(encoder, TextEncoder):
        (ids,) = batch
        x, ends = embedded_tokens(encoder, ids), ends_of(ids, encoder.config)
        return observed_transform(encoder, x, ends=ends, observe=observe)
    if len(batch) == 1:
        return observed_transform(encoder, embedded_images(encoder, *batch), observe=observe)
    x, lengths = embedded_patches(encoder, *batch), batch[1].prod(1)
    return observed_transform(encoder, x, lengths=lengths, observe=observe)


def _lengths(encoder: AnyEncoder, batch: tuple[Any, ...]) -> jax.Array | None:
    """Returns the numbers [B] of tokens, from the first, that change the vectors; None for all."""
    if isinstance(encoder, TextEncoder):
        # Without a causal mask every token changes the one at the end, padding included.
        return ends_of(batch[0], encoder.config) + 1 if encoder.config.causal else None
    return None if len(batch) == 1 else batch[1].prod(1)


@jax.jit
def _statistics(
    encoder: AnyEncoder, batch: tuple[Any, ...]
) -> tuple[dict[str, Statistics], jax.Array]:
    """Computes the statistics of a batch, with sums instead of means, and its number of tokens."""
    lengths = _lengths(encoder, batch)
    inside = None if lengths is None else prefix_mask(lengths, batch[0].shape[1])

    def observe(layer: str, x: jax.Array, _: Any) -> tuple[jax.Array, Statistics]:
        rows = x if inside is None else jnp.where(inside[..., None], x, 0)
        moment = jnp.einsum("bsj,bsk->jk", rows, rows)
        return x, Statistics(rows.min((0, 1)), rows.max((0, 1)), rows.sum((0, 1)), moment)

    output, found = _observed(encoder, batch, observe)
    sides = output.last_hidden_state.shape[:2]
    number = jnp.float32(sides[0] * sides[1]) if inside is None else inside.sum(dtype=jnp.float32)
    return found, number


@functools.partial(jax.jit, donate_argnums=0)
def _sum(total: Any, more: Any) -> dict[str, Statistics]:
    return {
        layer: Statistics(
            jnp.minimum(a.least, b.least),
            jnp.maximum(a.largest, b.largest),
            a.mean + b.mean,
            a.moment + b.moment,
        )
        for layer, (a, b) in {layer: (total[layer], more[layer]) for layer in total}.items()
    }


def _losses(
    encoder: AnyEncoder, prepared: Prepared, layers: dict[str, dict[str, Array]], inputs: Any
) -> tuple[Array, float]:
    """Measures how much each layer in 8 bits, and the encoder in bfloat16, changes the vectors."""
    config, dtype = encoder.config, prepared.dtype
    chosen = np.unique(np.linspace(0, len(inputs) - 1, MEASURED).astype(int))
    some = [inputs[i] for i in chosen]
    batches = list(_batches(encoder, some if config.naflex else np.stack(some)))
    levels = {"factor": prepared.factor, "shift": prepared.shift}
    arrays = jax.device_put((prepared.blocks, levels, {n: _numbers(p) for n, p in layers.items()}))

    def distance(*units: Unit) -> float:
        flags = {layer: np.zeros(config.depth, bool) for layer in LAYERS}
        for block, layer in units:
            flags[layer][block] = True
        found = [_with_rounded(encoder, *arrays, flags, batch, dtype=dtype) for batch in batches]
        return float(cosine_distances(np.concatenate(found), exact).mean())

    def run(encoder: AnyEncoder) -> Array:
        return np.concatenate([np.asarray(_vectors(encoder, b), np.float32) for b in batches])

    exact = run(encoder)
    units = list(itertools.product(range(config.depth), LAYERS))
    # Distances of equal vectors are not exactly 0, and may be negative.
    whole, *distances = np.maximum([distance(*units), *map(distance, units)], 0)
    parts = np.array(distances) if any(distances) else np.ones(len(units))
    losses = whole * parts / parts.sum()
    bfloat16 = max(0.0, float(cosine_distances(run(_in_bfloat16(encoder)), exact).mean()))
    return losses.reshape(config.depth, len(LAYERS)), bfloat16


def _in_bfloat16[E: Encoder | TextEncoder](encoder: E) -> E:
    def cast(p: Any) -> Any:
        if not isinstance(p, dict):
            return p if p is None else p.astype(jnp.bfloat16)
        return p if "scale" in p else {name: cast(part) for name, part in p.items()}

    parts = _parts(encoder, "embedding", "blocks", "head", "projection")
    cast_parts = {name: cast(part) for name, part in parts.items()}
    return dataclasses.replace(encoder, dtype="bfloat16", **cast_parts)


def _numbers(layer: dict[str, Array]) -> dict[str, Array]:
    """Returns the weights of a layer in 8 bits as numbers in float32."""
    weight = layer["weight"].astype(np.float32) * layer["scale"][..., None]
    return {"kernel": weight.swapaxes(1, 2), "bias": layer["bias"]}


@jax.jit
def _vectors(encoder: AnyEncoder, batch: tuple[Any, ...]) -> jax.Array:
    return vectors(encoder, _observed(encoder, batch, None)[0])


@functools.partial(jax.jit, static_argnames="dtype")
def _with_rounded(
    encoder: AnyEncoder,
    prepared: dict[str, Any],
    levels: dict[str, Any],
    rounded: dict[str, Any],
    flags: dict[str, Any],
    batch: tuple[Any, ...],
    *,
    dtype: str,
) -> jax.Array:
    """Computes the vectors with some layers in 8 bits, whose numbers are float32."""

    def choose(flag: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(lax.broadcast_in_dim(flag, x.shape, range(flag.ndim)), x, y)

    blocks = {name: prepared[name] for name in ("norm1", "norm2")} | {
        layer: {
            name: choose(flags[layer], rounded[layer][name], prepared[layer][name])
            for name in ("kernel", "bias")
        }
        for layer in LAYERS
    }
    blocks["observed"] = flags | levels

    def observe(layer: str, x: jax.Array, p: Any) -> tuple[jax.Array, None]:
        if layer == "out":
            found = to_levels(x, dtype).astype(jnp.float32)
        elif layer == "fc2":
            factor, shift = (lax.expand_dims(p[name], (0, 1)) for name in LEVELS)
            found = to_levels(x * factor + shift, dtype).astype(jnp.float32)
        else:
            found, scale = quantised(x, dtype)
            found = found.astype(jnp.float32) * scale[..., None]
        return choose(p[layer], found, x), None

    changed = dataclasses.replace(encoder, blocks=blocks)
    return vectors(changed, _observed(changed, batch, observe)[0])
