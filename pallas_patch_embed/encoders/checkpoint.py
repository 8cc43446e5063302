"""Loads encoders from folders and files of Hugging Face, timm, open_clip and big_vision."""

import dataclasses
import operator
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.typing import DTypeLike

from pallas_patch_embed.base.dtypes import EIGHT_BITS, LAYER_DTYPES, OUT_DTYPES
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders import big_vision, eight_bits, hugging_face, open_clip, timm
from pallas_patch_embed.encoders.arrays import (
    EXPECTED,
    Arrays,
    Tower,
    check_plain,
    config_file,
    folder_of,
    is_npz,
    open_npz,
    open_safetensors,
    read_json,
)
from pallas_patch_embed.encoders.calibration import FILES, Calibration, calibrate
from pallas_patch_embed.encoders.config import Config, TextConfig, check_config
from pallas_patch_embed.encoders.encoder import Encoder
from pallas_patch_embed.encoders.hub import find_checkpoint
from pallas_patch_embed.encoders.image_processor import normalisation
from pallas_patch_embed.encoders.layouts import by_outputs
from pallas_patch_embed.encoders.names import Names, read_encoder
from pallas_patch_embed.patch_embedding.packing import pack
from pallas_patch_embed.patch_embedding.params import check_dtype, check_grid
from pallas_patch_embed.patch_embedding.positions import (
    Interpolation,
    check_interpolation,
    resize_positions,
)

# How messages name the families.
TITLES = {
    "siglip": "SigLIP",
    "clip": "CLIP",
    "dinov2": "DINOv2",
    "dinov2_with_registers": "DINOv2 with registers",
    "dinov3_vit": "DINOv3",
    "vit": "ViT",
    "deit": "DeiT",
}

# The names of patch embeddings.
PATCHES = {names.patch for names in (*hugging_face.NAMES.values(), timm.NAMES, open_clip.NAMES)}

# A config as the user may give it.
type GivenConfig = Config | Mapping[str, Any] | str | os.PathLike[str]


def load_encoder(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike = "bfloat16",
    patch_dtype: DTypeLike | None = None,
    image_size: int | tuple[int, int] | None = None,
    interpolation: Interpolation | None = None,
    layers: int | None = None,
    config: GivenConfig | None = None,
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_cosine: float | None = None,
) -> Encoder:
    """Loads the vision encoder of a checkpoint, whose family the checkpoint states.

    The families are SigLIP, SigLIP2, CLIP, DINOv2 with and without registers, DINOv3's ViT, ViT and
    DeiT in Hugging Face's layout; SigLIP, CLIP, ViT, DeiT and DINOv2 under timm's names; CLIP and
    SigLIP under open_clip's; and SigLIP in big_vision's .npz files (docs/models.md has a table). If
    a file contains a larger model, only its vision tower is read. Nothing is unpickled.

    Args:
      source: a folder with config.json and model.safetensors or its shards (also of one variant,
        such as model.fp16.safetensors), or with open_clip_config.json and open_clip_model
        .safetensors; a single .safetensors file; a big_vision .npz file; or the name of a model on
        the Hugging Face hub, which huggingface_hub downloads.
      dtype: dtype of all layers after the patch embedding: "bfloat16", "float32", "int8" or
        "float8_e4m3fn". With the last two the dense layers of the blocks compute in 8 bits and all
        others in bfloat16, which is also the dtype of results (docs/eight_bits.md).
      patch_dtype: dtype of the patch embedding: "float32", "bfloat16", "float8_e4m3fn" or "int8".
        None for "float32" if `dtype` is float32, and otherwise for "bfloat16".
      image_size: size of the images in pixels, the side of a square or (height, width). The
        positions are resized to the grid of such images. None for the checkpoint's own size. NaFlex
        encoders accept images of any size and refuse this argument.
      interpolation: how positions are resized, as in `resize_positions`. None for what the
        checkpoint's own library does: "bicubic" in transformers, but "bicubic-antialiased" for
        DINOv2 with registers; "bicubic-antialiased" in timm and open_clip; "bilinear" in big_vision
        and for NaFlex.
      layers: number of blocks that are loaded, from the first; or negative as hidden states are
        numbered, -2 for all but the last block. The encoder then ends there, without last norm and
        pooling: its last_hidden_state is that hidden state. None for the whole tower.
      config: replacement for the config.json: a Config, the contents of a config.json, or its path.
        It is needed for a .safetensors file without a config in its folder. For a Hugging Face
        model the config decides the architecture; in timm and big_vision the arrays do, so there
        the config must agree with them. A Config also decides the mean and the standard deviation
        of pixels. Otherwise they are those of the checkpoint's image processor, the `mean` and
        `std` of timm's and open_clip's configs or the `image_mean` and `image_std` of a
        preprocessor_config.json or processor_config.json beside the weights, and without one those
        of the family's published checkpoints.
      calibration: for 8 bits: from `calibrate` for this dtype, or the path of its file. None for
        calibration.safetensors in the checkpoint's folder; without it the encoder is calibrated on
        the photographs of this package, with a warning.
      min_cosine: for 8 bits: layers stay in bfloat16, those that hurt most first, until the
        mean cosine of the calibration's pictures to float32 is expected to be this, such as 0.9998.
        With 0 no layer stays. With None one stays only if it causes more than 45% of the distance,
        and then others that cause more than a third of the rest. The encoder's repr says which
        layers stay.

    Returns:
      Encoder.

    Raises:
      FileNotFoundError: there is no such file or folder, or no such model on the hub.
      OSError: a file cannot be read.
      TypeError: source or config has another type.
      ValueError: an argument has a wrong value; or a file is damaged, is not a checkpoint of a
        supported vision tower, or its weights contradict its config. The message names the file and
        the fault.
    """
    load = _Load(
        given_patch_dtype=None if patch_dtype is None else check_dtype(patch_dtype, "patch_dtype"),
        **check_layers_dtype(dtype, calibration, min_cosine),
        config=config,
        interpolation=None if interpolation is None else check_interpolation(interpolation),
        layers=None if layers is None else _check_layers(layers),
    )
    size = None if image_size is None else _check_image_size(image_size)
    return load.run(find_checkpoint(os.fspath(source)), lambda _: size)


def load_siglip(
    path: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    interpolation: Interpolation = "bilinear",
    grid: tuple[int, int] | None = None,
    patch_dtype: DTypeLike | None = None,
    dtype: DTypeLike = "bfloat16",
    config: GivenConfig | None = None,
) -> Encoder:
    """Loads the vision encoder of a SigLIP or SigLIP2 checkpoint, as `siglip2.load_encoder`.

    It is `pallas_patch_embed.load_encoder` for these families alone, with two differences:
    positions are resized bilinearly by default, and `grid` can be given.

    Args:
      path: the folder or file, as for `pallas_patch_embed.load_encoder`.
      image_size, patch_dtype, dtype, config: as for `pallas_patch_embed.load_encoder`.
      interpolation: how positions are resized, as in `resize_positions`: "bilinear" as in
        big_vision, "bicubic" as in transformers' SigLIP, or "bicubic-antialiased" as in timm.
        NaFlex encoders are always bilinear and refuse the others.
      grid: (height, width) of the stored positions in patches, if neither the config nor the arrays
        state it: an .npz file with positions that are not a square.

    Returns:
      Encoder.

    Raises:
      FileNotFoundError, OSError, TypeError, ValueError: as for `pallas_patch_embed.load_encoder`.
    """
    load = _Load(
        given_patch_dtype=None if patch_dtype is None else check_dtype(patch_dtype, "patch_dtype"),
        dtype=check_dtype(dtype, "dtype", OUT_DTYPES),
        config=config,
        interpolation=check_interpolation(interpolation),
        grid=None if grid is None else check_grid(grid),
        family="siglip",
    )
    size = None if image_size is None else _check_image_size(image_size)
    return load.run(Path(path), lambda _: size)


def load_encoder_for_side(
    path: Path,
    side: int | None,
    patch_dtype: str | None,
    layers: int | None = None,
    *,
    dtype: str = "bfloat16",
    calibration: Calibration | str | os.PathLike[str] | None = None,
    min_cosine: float | None = None,
) -> Encoder:
    """Loads an encoder for square images, or a NaFlex encoder.

    Args:
      path: as for `load_encoder`.
      side: side of the images in pixels; None for the checkpoint's own size. It is ignored for
        NaFlex encoders, which accept images of any size.
      patch_dtype, layers, dtype, calibration, min_cosine: as for `load_encoder`.

    Raises:
      OSError, ValueError: as for `load_encoder`.
    """
    size = None if side is None else _check_image_size(side)
    load = _Load(
        given_patch_dtype=patch_dtype,
        layers=layers,
        **check_layers_dtype(dtype, calibration, min_cosine),
    )
    return load.run(path, lambda config: None if config.naflex else size)


def read_config(path: Path) -> Config:
    """Reads the config of a checkpoint, without putting anything on a device.

    Args:
      path: as for `load_encoder`.

    Raises:
      OSError, ValueError: as for `load_encoder`.
    """
    if is_npz(path):
        with open_npz(path) as arrays:
            return _normalised(path, {}, big_vision.read(arrays, None, None)[1])
    with open_safetensors(path) as arrays:
        described = json_beside(path)
        return _normalised(path, described, _find(arrays, described)[2])


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Load:
    """The arguments of a `load_encoder`, after their checks.

    Attributes:
      given_patch_dtype: the argument patch_dtype of the functions above.
      dtype, interpolation, layers, config, grid, calibration, min_cosine: as for these functions.
      family: the only family that is allowed; None for all.
    """

    given_patch_dtype: str | None
    dtype: str = "bfloat16"
    interpolation: Interpolation | None = None
    layers: int | None = None
    config: GivenConfig | None = None
    grid: tuple[int, ...] | None = None
    family: str | None = None
    calibration: Calibration | None = None
    min_cosine: float | None = None

    @property
    def patch_dtype(self) -> str:
        """The dtype of the patch embedding."""
        default = "float32" if self.dtype == "float32" else "bfloat16"
        return self.given_patch_dtype or default

    def run(self, path: Path, size_for: Callable[[Config], tuple[int, int] | None]) -> Encoder:
        """Loads the encoder in this file or folder, for images of the size `size_for(config)`."""
        try:
            weights, config, of_library = self._read(path)
            interpolation = self.interpolation or of_library
            size = size_for(config)
            if self.dtype not in EIGHT_BITS:
                return _assemble(weights, config, size, self.patch_dtype, self.dtype, interpolation)
            return self._in_eight_bits(path, weights, config, size, interpolation)
        except ValueError as error:
            raise ValueError(f"load_encoder: {str(path)!r}: {error}") from error

    def _in_eight_bits(
        self,
        path: Path,
        weights: dict[str, Any],
        config: Config,
        size: tuple[int, int] | None,
        interpolation: Interpolation,
    ) -> Encoder:
        calibration = self.calibration or calibration_in(path)
        if calibration is None:
            exact = _assemble(weights, config, size, self.patch_dtype, "float32", interpolation)
            calibration = calibrate(exact, dtype=self.dtype)
        others = _assemble(
            weights | {"blocks": {}}, config, size, self.patch_dtype, "bfloat16", interpolation
        )
        blocks = in_eight_bits(weights["blocks"], config, self.dtype, calibration, self.min_cosine)
        return dataclasses.replace(others, blocks=blocks)

    def _read(self, path: Path) -> tuple[dict[str, Any], Config, Interpolation]:
        """Returns the arrays in float32, the config, and the library's interpolation."""
        given = given_config(self.config, Config)
        if is_npz(path):
            stated = hugging_face.config_of(given) if isinstance(given, Mapping) else given
            with open_npz(path) as arrays:
                weights, config = big_vision.read(arrays, stated, self.grid, self.layers)
            return weights, _normalised(path, given or {}, config), "bilinear"
        with open_safetensors(path) as arrays:
            if not any(patch in name for patch in PATCHES for name in arrays.names):
                check_plain(arrays.names)
            described = json_beside(path) if given is None else given
            tower, names, config = _find(arrays, described, self.family)
            check_plain(tower.prefix + name for name in tower.names)
            config = _normalised(path, described, config.with_grid(self.grid))
            if self.layers is not None:
                config = config.first_blocks(self.layers)
            weights, config = read_encoder(tower, names, config)
        return weights, config, "bilinear" if config.naflex else names.interpolation


def _normalised(path: Path, described: Config | Mapping[str, Any], config: Config) -> Config:
    """Returns the config with the normalisation of the checkpoint's image processor, if any."""
    if isinstance(described, Config):
        return config
    found = normalisation(path, described, config)
    if found is None:
        return config
    return dataclasses.replace(config, image_mean=found[0], image_std=found[1])


def _find(
    arrays: Arrays, described: Config | Mapping[str, Any], family: str | None = None
) -> tuple[Tower, Names, Config]:
    """Finds the tower among the arrays; returns it, its names, and its config."""
    if isinstance(described, Config):
        config: Config | None = described
    elif {"architecture", "model_cfg"} & set(described):  # timm's and open_clip's arrays decide.
        config = None
        if "model_cfg" not in described:
            timm.check_architecture(described)
    else:
        config = hugging_face.config_of(described)
    layouts = [timm.NAMES, open_clip.NAMES]
    if config is not None:
        layouts.insert(0, hugging_face.NAMES[config.family])
    found = ((names, names.prefixes(arrays.names)) for names in layouts)
    names, prefixes = next(filter(operator.itemgetter(1), found), (layouts[0], set()))
    if config is not None:
        _check_family(config, family)
    if len(prefixes) != 1:
        check_plain(arrays.names)
        kind = "" if config is None else f"{TITLES[config.family]} "
        raise ValueError(
            f"it has {len(prefixes)} arrays named {quoted(names.patch + 'weight')}, expected one, "
            f"of a {kind}vision tower. {EXPECTED}"
        )
    prefix = prefixes.pop()
    tower = Tower(arrays, prefix)
    if names is timm.NAMES:
        names = timm.names_in(tower)
    elif config is not None and names is hugging_face.NAMES[config.family]:
        names = hugging_face.names_in(tower, config.family)
    if config is None:
        assert isinstance(described, Mapping)
        read = open_clip.config_of if "model_cfg" in described else timm.config_of
        config = read(described, tower)
        _check_family(config, family)
    return tower, names, config


def _check_family(config: Config, family: str | None) -> None:
    if family not in (None, config.family):
        raise ValueError(
            f"it is a {TITLES[config.family]} tower, expected {TITLES[family]}. Load it with "
            "pallas_patch_embed.load_encoder."
        )


def _assemble(
    weights: dict[str, Any],
    config: Config,
    size: tuple[int, int] | None,
    patch_dtype: str,
    dtype: str,
    interpolation: Interpolation,
) -> Encoder:
    """Makes an encoder with these weights. If `size` is given, its positions are resized."""
    positions = weights["positions"]
    if config.naflex and interpolation != "bilinear":
        raise ValueError(
            f"interpolation is {interpolation!r}, but this is a NaFlex encoder, which resizes its "
            "positions bilinearly. Leave interpolation out."
        )
    if size is not None:
        if config.naflex:
            raise ValueError(
                f"image_size is {size}, but this is a NaFlex encoder, which accepts images of any "
                "size. Leave image_size out."
            )
        grid = (size[0] // config.patch, size[1] // config.patch)
        if 0 in grid:
            raise ValueError(
                f"image_size is {size}, expected at least the side of a patch, {config.patch}."
            )
        if grid != config.grid and positions is not None:
            resized = resize_positions(positions, grid, interpolation=interpolation)
            positions = jax.device_get(resized)
        config = dataclasses.replace(config, grid=grid, image_size=size)
    if config.image_mean is None or config.image_std is None:
        raise ValueError(
            f"its images have {config.channels} channels, but {TITLES[config.family]} states the "
            "mean and the standard deviation of RGB alone. Put a preprocessor_config.json with "
            "image_mean and image_std into its folder, or pass a Config that has them."
        )
    optional = {
        name: None if weights[name] is None else cast(weights[name], dtype)
        for name in ("first_norm", "norm", "head", "projection")
    }
    without_grid = config.naflex or positions is None
    return Encoder(
        patch_embed=pack(
            weights["kernel"],
            weights["bias"],
            None if config.naflex else positions,
            patch_size=config.patch,
            layout=weights["layout"],
            channels=config.channels,
            grid=None if without_grid else config.grid,
            dtype=patch_dtype,
            image_mean=config.image_mean,
            image_std=config.image_std,
            prefix=weights["prefix"],
        ),
        positions=jax.device_put(positions) if config.naflex else None,
        blocks=placed(weights["blocks"], config, dtype),
        config=config,
        dtype=dtype,
        **optional,
    )


def placed(blocks: dict[str, Any], config: Config | TextConfig, dtype: str) -> Any:
    """Puts the blocks of an encoder in this dtype, "bfloat16" or "float32", on the device."""
    if dtype == "bfloat16" and blocks:
        blocks = by_outputs(blocks, config)
    return cast(blocks, dtype)


def cast(weights: Any, dtype: str) -> Any:
    """Puts the weights on the device: layer norms in float32, all others in `dtype`.

    A layer that has a "weight" stays as it is.
    """
    if not isinstance(weights, dict):
        return jax.device_put(weights.astype(dtype))
    if "weight" in weights:
        return jax.device_put(weights)
    dtype = "float32" if "scale" in weights else dtype
    return {name: cast(part, dtype) for name, part in weights.items()}


def in_eight_bits(
    blocks: dict[str, Any],
    config: Config | TextConfig,
    dtype: str,
    calibration: Calibration,
    min_cosine: float | None,
) -> tuple[dict[str, Any], ...]:
    """Returns the blocks of an encoder in 8 bits, on the device, for those in float32.

    Raises:
      ValueError: the calibration is of another encoder or dtype, or does not reach `min_cosine`.
    """
    calibration = calibration.of_first(blocks, config, dtype)
    kept = calibration.kept(min_cosine, blocks)
    smoothed = eight_bits.smoothed(blocks, calibration.divisors, config)
    runs = eight_bits.runs(smoothed, calibration.layers, kept, config)
    return tuple(cast(run, "bfloat16") for run in runs)


def calibration_beside(path: Path, tower: str = "vision") -> Path:
    """Returns the path at which an encoder's calibration is looked for beside its checkpoint."""
    return folder_of(path) / FILES[tower]


def calibration_in(path: Path, tower: str = "vision") -> Calibration | None:
    """Reads the calibration beside a checkpoint; None if there is none."""
    beside = calibration_beside(path, tower)
    return Calibration.load(beside) if beside.is_file() else None


def check_layers_dtype(
    dtype: Any, calibration: Any, min_cosine: Any, tower: str = "vision"
) -> dict[str, Any]:
    """Returns the dtype of the layers, the calibration and `min_cosine`; reads the calibration."""
    dtype = check_dtype(dtype, "dtype", LAYER_DTYPES)
    if dtype not in EIGHT_BITS and (calibration is not None or min_cosine is not None):
        names = " or ".join(map(repr, EIGHT_BITS))
        raise ValueError(
            f"dtype is {dtype!r}, but calibration and min_cosine are for {names}. Leave them out, "
            "or choose such a dtype."
        )
    if calibration is not None and not isinstance(calibration, Calibration):
        calibration = Calibration.load(calibration, tower)
    return dict(dtype=dtype, calibration=calibration, min_cosine=min_cosine)


def _check_image_size(image_size: Any) -> tuple[int, int]:
    try:
        sides = tuple(image_size) if hasattr(image_size, "__len__") else (image_size, image_size)
        height, width = (0 if isinstance(s, bool) else operator.index(s) for s in sides)
    except (TypeError, ValueError):
        height = width = 0
    if not (0 < height < 2**16 and 0 < width < 2**16):
        raise ValueError(
            f"load_encoder: image_size is {image_size!r}, expected a positive integer or "
            "(height, width), in pixels."
        )
    return height, width


def _check_layers(layers: Any) -> int:
    try:
        number = 0 if isinstance(layers, bool) else operator.index(layers)
    except TypeError:
        number = 0
    if number == 0:
        raise ValueError(
            f"load_encoder: layers is {layers!r}, expected a number of blocks, or a negative "
            "number such as -2 for all but the last."
        )
    return number


def given_config[C: (Config, TextConfig)](
    config: Any, kind: type[C]
) -> C | Mapping[str, Any] | None:
    """Returns the config that the user gave, or the contents of its file."""
    if config is None or isinstance(config, kind | Mapping):
        return config
    if isinstance(config, str | os.PathLike):
        return check_config(read_json(Path(config)))
    raise TypeError(
        f"config is {type(config).__name__}, expected a {kind.__name__}, the contents of a "
        "config.json, or its path."
    )


def json_beside(path: Path) -> Mapping[str, Any]:
    """Reads the file in the checkpoint's folder that describes the architecture."""
    if (file := config_file(path)) is None:
        raise ValueError(
            f"there is no {str(folder_of(path) / 'config.json')!r}, which describes the "
            "architecture: weights do not say which activation they need, or how many heads. Put "
            "the model's config.json there, or pass config=."
        )
    return check_config(read_json(file))
