"""Image processors of transformers, timm and open_clip, as a checkpoint's files describe them."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pallas_patch_embed.base.center_crop import CenterCrop
from pallas_patch_embed.encoders.arrays import config_file, folder_of, is_npz, read_json
from pallas_patch_embed.encoders.config import (
    IMAGENET,
    OPENAI,
    Config,
    check_size,
    is_number,
    short,
)

# Pillow's filters by the names in timm and open_clip, and their numbers in PIL.Image.Resampling.
NEAREST, LANCZOS, BILINEAR, BICUBIC, BOX, HAMMING = range(6)
RESAMPLINGS = {
    "nearest": NEAREST,
    "lanczos": LANCZOS,
    "bilinear": BILINEAR,
    "bicubic": BICUBIC,
    "box": BOX,
    "hamming": HAMMING,
}

# Fields of transformers' image processors with the defaults of their base class.
BASE: dict[str, Any] = {
    "do_resize": True,
    "size": None,
    "default_to_square": True,
    "do_center_crop": False,
    "crop_size": None,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
}
SHORTEST: dict[str, Any] = BASE | {
    "resample": BICUBIC,
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": OPENAI[0],
    "image_std": OPENAI[1],
}
SQUARE: dict[str, Any] = BASE | {
    "resample": BILINEAR,
    "size": {"height": 224, "width": 224},
    "image_mean": 0.5,
    "image_std": 0.5,
}
# The classes with their defaults. Source: transformers 5.24.
CLASSES = {
    "CLIPImageProcessor": SHORTEST,
    "BitImageProcessor": SHORTEST,
    "ViTImageProcessor": SQUARE,
    "DeiTImageProcessor": SQUARE
    | {
        "resample": BICUBIC,
        "size": {"height": 256, "width": 256},
        "do_center_crop": True,
        "crop_size": {"height": 224, "width": 224},
    },
    "DINOv3ViTImageProcessor": SQUARE | {"image_mean": IMAGENET[0], "image_std": IMAGENET[1]},
    "SiglipImageProcessor": SQUARE | {"resample": BICUBIC, "default_to_square": False},
    "Siglip2ImageProcessor": SQUARE | {"max_num_patches": 256, "patch_size": 16},
}
NAFLEX = "Siglip2ImageProcessor"

# The class of each family, which is used if a file names none, or if there is no file.
OF_FAMILY = {
    "siglip": "SiglipImageProcessor",
    "clip": "CLIPImageProcessor",
    "dinov2": "BitImageProcessor",
    "dinov2_with_registers": "BitImageProcessor",
    "dinov3_vit": "DINOv3ViTImageProcessor",
    "vit": "ViTImageProcessor",
    "deit": "DeiTImageProcessor",
}

# Fields of transformers' image processors that change no pixel of a picture: names of classes,
# types of inputs and outputs, and sizes that are used only if a do_... field is true.
# do_convert_rgb is here because this package always converts pictures to RGB.
HARMLESS = {
    "_processor_class",
    "_valid_processor_keys",
    "data_format",
    "device",
    "disable_grouping",
    "do_convert_rgb",
    "feature_extractor_type",
    "image_processor_type",
    "image_seq_length",
    "input_data_format",
    "pad_size",
    "processor_class",
    "return_tensors",
    "transformers_version",
    "use_fast",
}

# The fields that timm and open_clip have, with their defaults. timm ignores all others. open_clip
# takes the size from the model. Source: `resolve_data_config` of timm 1.0.31, and `PreprocessCfg`
# of open_clip 3.3.
LIBRARIES: dict[str, dict[str, Any]] = {
    "timm": {
        "input_size": (3, 224, 224),
        "interpolation": "bicubic",
        "crop_pct": 0.875,
        "crop_mode": "center",
        "mean": IMAGENET[0],
        "std": IMAGENET[1],
    },
    "open_clip": {
        "size": 224,
        "mode": "RGB",
        "interpolation": "bicubic",
        "resize_mode": "shortest",
        "fill_color": 0,
        "mean": OPENAI[0],
        "std": OPENAI[1],
    },
}
# How timm's crop_mode and open_clip's resize_mode resize pictures.
FITS: dict[str, dict[str, Any]] = {
    "timm": {"center": "shortest", "squash": "squash", "border": "longest"},
    "open_clip": {fit: fit for fit in ("shortest", "squash", "longest")},
}

# The normalisation of each channel: (mean, standard deviation) of pixels of 0 to 1.
type Normalisation = tuple[tuple[float, ...], tuple[float, ...]]


@dataclasses.dataclass(frozen=True)
class ImageProcessor:
    """What an image processor does to a picture before it normalises it.

    Attributes:
      resample: the filter, a number of PIL.Image.Resampling.
      size: (height, width) of the images in pixels; None for NaFlex, which keeps the aspect ratio.
      crop: how pictures are resized and cropped to `size`; None if they are only resized to it.
      max_num_patches: largest number of patches of a NaFlex image.
      defaults_of: name of the software whose defaults these are; None if the checkpoint has an
        image processor.
    """

    resample: int
    size: tuple[int, int] | None
    crop: CenterCrop | None = None
    max_num_patches: int = CLASSES[NAFLEX]["max_num_patches"]
    defaults_of: str | None = None


def read_image_processor(checkpoint: Path, config: Config, side: int | None) -> ImageProcessor:
    """Reads the image processor that belongs to the config of a checkpoint.

    It is the `pretrained_cfg` of timm's config.json, or the `preprocess_cfg` of an
    open_clip_config.json. Otherwise it is the `image_processor` of a processor_config.json, or else
    a preprocessor_config.json, of one of the classes in CLASSES, with or without the suffix Fast or
    Pil; fields that are missing have the defaults of the class. Without any of them, it is that of
    transformers for the family, or big_vision's for an .npz file.

    If `side` is given, or if there is no file, crops get the size of the model, and the size before
    the crop is scaled by the same factor and rounded down: the short side 256 and the crop 224
    become 438 and 384.

    Args:
      checkpoint: the folder of the image processor's file, or a file in that folder.
      config: config of the encoder.
      side: side of the images in pixels that the user chose, which config.image_size then has; None
        for the size in the checkpoint.

    Raises:
      ValueError: the file is damaged; a field is neither applied nor known to change no pixel; or
        the images have another size than the model expects.
    """
    file = None if is_npz(checkpoint) else config_file(checkpoint)
    described = read_json(file) if file is not None else {}
    found = _find(checkpoint, described if isinstance(described, dict) else {}, config)
    target = config.image_size if found.where is None or side is not None else None
    if found.library is not None:
        processor = _of_library(found, target, config)
    elif config.naflex or found.name == NAFLEX:
        processor = _of_naflex(found, side, config)
    else:
        _check_fields(found)
        size, crop = _resizing(found, target)
        processor = ImageProcessor(_resample(found), size, crop)
    if processor.size is not None:
        _check_grid(processor.size, found, config)
    if found.where is not None:
        return processor
    if is_npz(checkpoint):
        return dataclasses.replace(processor, resample=BILINEAR, defaults_of="big_vision")
    return dataclasses.replace(processor, defaults_of=f"transformers' {found.name}")


def normalisation(
    checkpoint: Path, described: Mapping[str, Any], config: Config
) -> Normalisation | None:
    """Reads the normalisation of a checkpoint's image processor.

    A pixel u in [0, 1] becomes (u - mean) / std.

    Args:
      checkpoint: as for `read_image_processor`.
      described: the contents of the config.json or open_clip_config.json; empty for big_vision.
      config: config of the encoder, of which the family and the number of channels are used.

    Returns:
      The mean and the standard deviation of each channel, 0 and 1 if the processor does not
      normalise. None if there is no image processor, or one of an unknown class that states
      neither.

    Raises:
      ValueError: the file is damaged, does not rescale pixels to [0, 1], or has a wrong mean or
        standard deviation. Both have to be 0.5 for a NaFlex encoder.
    """
    found = _find(checkpoint, described, config)
    if found.where is None:
        return None
    names = ("image_mean", "image_std") if found.library is None else ("mean", "std")
    if found.library is None:
        _check_rescaling(found)
        if not found.flag("do_normalize"):
            if config.naflex:
                raise found.wrong("do_normalize", "True for a NaFlex encoder")
            return (0.0,) * config.channels, (1.0,) * config.channels
        if not any(name in found.fields for name in names):
            return None
    mean, std = (found.channels(name, config.channels) for name in names)
    if min(std) <= 0:
        raise found.wrong(names[1], "positive numbers")
    if config.naflex:
        for name, values in zip(names, (mean, std)):
            if set(values) != {0.5}:
                raise found.wrong(name, "0.5 for a NaFlex encoder, whose pixels are in [-1, 1]")
    return mean, std


class _Found(NamedTuple):
    """The image processor of a checkpoint.

    Attributes:
      where: its file and, for timm and open_clip, the field of the file; None for the defaults.
      name: its class in transformers, or the library.
      library: one of LIBRARIES, or None for transformers.
      given: the fields in the file; of timm and open_clip those that are not null.
      fields: the same, with the defaults of those that are missing.
    """

    where: str | None
    name: str
    library: str | None
    given: Mapping[str, Any]
    fields: Mapping[str, Any]

    def wrong(self, field: str, expected: str) -> ValueError:
        value = short(self.fields.get(field))
        return ValueError(f"{self.where}: {field} is {value}, expected {expected}.")

    def flag(self, field: str) -> bool:
        """Returns a switch, which null turns off, as in transformers."""
        if not isinstance(value := self.fields[field], bool | None):
            raise self.wrong(field, "true or false")
        return bool(value)

    def channels(self, field: str, channels: int) -> tuple[float, ...]:
        """Returns a number in [0, 1] for each channel. A single one is that of all channels."""
        value = self.fields.get(field)
        values = value if isinstance(value, list | tuple) else [value]
        values = list(values) * (channels if len(values) == 1 else 1)
        valid = all(map(is_number, values))
        if len(values) != channels or not valid or not all(0 <= v <= 1 for v in values):
            raise self.wrong(
                field, f"numbers in [0, 1], one for each of the {channels} channels of the model"
            )
        return tuple(map(float, values))


def _find(checkpoint: Path, described: Mapping[str, Any], config: Config) -> _Found:
    """Finds the image processor of the library to which the config belongs."""
    libraries = {"open_clip": ("model_cfg", "preprocess_cfg")}
    libraries["timm"] = ("architecture", "pretrained_cfg")
    for library, (mark, field) in libraries.items():
        if mark not in described:
            continue
        fields = described.get(field)
        if fields is None and library == "timm":
            fields = described  # Files of earlier versions have the fields beside the architecture.
        if fields is not None:
            where = f"{field} of {library}'s config"
            fields = _object(where, fields)
            given = {name: value for name, value in fields.items() if value is not None}
            return _Found(where, library, library, given, LIBRARIES[library] | given)
    name = NAFLEX if config.naflex else OF_FAMILY[config.family]
    folder = folder_of(checkpoint)
    # As in transformers, the image_processor of a processor_config.json goes first.
    for file in (folder / "processor_config.json", folder / "preprocessor_config.json"):
        if not file.is_file():
            continue
        fields, where = _object(str(file), read_json(file)), str(file)
        if file.name == "processor_config.json":
            if (inner := fields.get("image_processor")) is None:
                continue
            fields = _object(f"{file}: image_processor", inner)
        name = _class(where, fields, name)
        return _Found(where, name, None, fields, CLASSES.get(name, BASE) | fields)
    return _Found(None, name, None, {}, CLASSES[name])


def _object(where: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, dict):
        raise ValueError(f"{where} is not a JSON object of fields.")
    return fields


def _class(where: str, fields: Mapping[str, Any], of_family: str) -> str:
    """Returns the class that the fields name, without Fast and Pil, or else that of the family."""
    field = "image_processor_type"
    if fields.get(field) is None:
        field = "feature_extractor_type"
    name = of_family if fields.get(field) is None else fields[field]
    if not isinstance(name, str):
        raise ValueError(f"{where}: {field} is {short(name)}, expected the name of a class.")
    # As in transformers: an image processor was once called a feature extractor.
    name = name.replace("FeatureExtractor", "ImageProcessor")
    return name.removesuffix("Fast").removesuffix("Pil")


def _check_fields(found: _Found) -> None:
    """Refuses fields of transformers' image processors that are neither applied nor harmless."""
    if found.name not in CLASSES:
        raise ValueError(
            f"{found.where}: image_processor_type is {short(found.name)}, which `embed` does not "
            f"support, expected one of {', '.join(CLASSES)}."
        )
    _check_rescaling(found)
    if not found.flag("do_resize"):
        raise found.wrong("do_resize", "True, because all images of a batch have the same size")
    for field, value in found.given.items():
        supported = field in HARMLESS | CLASSES[found.name].keys()
        if not supported and value not in (None, False):
            raise ValueError(
                f"{found.where}: {field} is {short(value)}, which `embed` does not support. Remove "
                "this field if it does not change pictures."
            )


def _check_rescaling(found: _Found) -> None:
    if not found.flag("do_rescale"):
        raise found.wrong(
            "do_rescale", "True: `image_mean` and `image_std` are for pixels of 0 to 1"
        )
    factor = found.fields["rescale_factor"]
    # A comparison does not convert an integer to float, for which it may be too large.
    if not is_number(factor) or not 1 - 1e-6 <= factor * 255 <= 1 + 1e-6:
        raise found.wrong("rescale_factor", "1 / 255")


def _resample(found: _Found) -> int:
    number = found.fields["resample"]
    integer = isinstance(number, int) and not isinstance(number, bool)
    if not integer or number not in RESAMPLINGS.values():
        raise found.wrong("resample", "an integer of PIL.Image.Resampling, 0 to 5")
    return number


def _of_naflex(found: _Found, side: int | None, config: Config) -> ImageProcessor:
    if found.name != NAFLEX or not config.naflex:
        kind = "a NaFlex encoder" if config.naflex else "an encoder of images of one size"
        raise ValueError(
            f"{found.where}: image_processor_type is {short(found.name)}, but this is {kind}, "
            f"expected {NAFLEX if config.naflex else 'another class'}."
        )
    _check_fields(found)
    if found.flag("do_center_crop"):
        raise found.wrong("do_center_crop", "False for a NaFlex encoder")
    if found.given.get("patch_size", config.patch) != config.patch:
        raise found.wrong("patch_size", f"{config.patch}, the side of the model's patches")
    L = found.fields["max_num_patches"]
    check_size(f"{found.where}: max_num_patches", L)
    if side is not None:
        check_size(f"--size {side} in patches of {config.patch} pixels", side // config.patch)
        L = (side // config.patch) ** 2
    return ImageProcessor(_resample(found), None, max_num_patches=L)


def _resizing(
    found: _Found, target: tuple[int, int] | None
) -> tuple[tuple[int, int], CenterCrop | None]:
    """Returns the size of the images and their crop, of transformers' image processors."""
    sides = _sides(found, "size", found.flag("default_to_square"))
    if not found.flag("do_center_crop"):
        if len(sides) == 1:
            raise found.wrong(
                "size", '{"height": ..., "width": ...} without a centre crop: images need one size'
            )
        return target or (sides[0], sides[1]), None
    height, width = _sides(found, "crop_size", True)
    size = target or (height, width)
    if len(sides) == 1:
        side = sides[0] * min(size) // min(height, width)
        return size, _crop(found, CenterCrop("shortest", (side, side)), size)
    resized = sides[0] * size[0] // height, sides[1] * size[1] // width
    return size, _crop(found, CenterCrop("squash", resized), size)


def _crop(found: _Found, crop: CenterCrop, size: tuple[int, int]) -> CenterCrop | None:
    """Returns the crop after a check, or None if it does nothing."""
    for side in crop.resized:
        check_size(f"{found.where}: the side before the crop to {size[0]} x {size[1]} pixels", side)
    return None if crop.fit == "squash" and crop.resized == size else crop


def _sides(found: _Found, field: str, square: bool) -> tuple[int, ...]:
    """Reads (height, width), or (short side,).

    A single number is the side of a square, or if not `square`, the short side.
    """
    value = found.fields[field]
    sides = {}
    if isinstance(value, dict):
        sides = {name: side for name, side in value.items() if side is not None}
    elif isinstance(value, list) and len(value) == 2:
        sides = {"height": value[0], "width": value[1]}
    elif isinstance(value, int) and not isinstance(value, bool):
        sides = {"height": value, "width": value} if square else {"shortest_edge": value}
    short_side = field == "size" and sides.keys() == {"shortest_edge"}
    if not short_side and sides.keys() != {"height", "width"}:
        choices = '{"height": ..., "width": ...}'
        choices += ' or {"shortest_edge": ...}' if field == "size" else ""
        raise found.wrong(field, choices)
    for side in sides.values():
        check_size(f"{found.where}: {field} is {short(value)}; its height or width in pixels", side)
    return (sides["shortest_edge"],) if short_side else (sides["height"], sides["width"])


def _of_library(found: _Found, target: tuple[int, int] | None, config: Config) -> ImageProcessor:
    """Returns the image processor of timm and of open_clip, which both use torchvision."""
    fields, library, size = found.fields, found.library, config.image_size
    assert library is not None and size is not None  # Neither has NaFlex encoders here.
    resampling, mode = fields["interpolation"], "resize_mode"
    if library == "open_clip":
        choices = ["bicubic", "bilinear", "random"]
        for field, value in found.given.items():
            if field not in LIBRARIES[library]:
                raise ValueError(
                    f"{found.where}: {field} is {short(value)}, which open_clip does not have."
                )
        if fields["mode"] != "RGB":
            raise found.wrong("mode", "'RGB'")
        colour = fields["fill_color"]
        if isinstance(colour, bool) or not isinstance(colour, int) or not 0 <= colour < 256:
            raise found.wrong("fill_color", "a grey level of 0 to 255")
        fill, resized = (colour,) * 3, size
    else:
        mode, choices = "crop_mode", list(RESAMPLINGS)
        if target is None:
            size = _input_size(found)
        crop_pct = fields["crop_pct"]
        if not is_number(crop_pct) or not 1e-3 <= crop_pct <= 1e3:
            raise found.wrong("crop_pct", "a positive number such as 0.9")
        red, green, blue = (round(255 * mean) for mean in found.channels("mean", 3))
        fill = red, green, blue
        resized = math.floor(size[0] / crop_pct), math.floor(size[1] / crop_pct)
    if not isinstance(resampling, str) or resampling not in choices:
        raise found.wrong("interpolation", f"one of {', '.join(choices)}")
    if resampling == "random":  # It is for training. open_clip's inference is bicubic then.
        resampling = "bicubic"
    fit = fields[mode]
    if not isinstance(fit, str) or fit not in FITS[library]:
        raise found.wrong(mode, f"one of {', '.join(FITS[library])}")
    fit = FITS[library][fit]
    if fit == "shortest" and resized[0] != resized[1]:
        raise ValueError(
            f"{found.where}: {mode} is {fields[mode]!r}, which `embed` supports only for square "
            f"images, but they have {size[0]} x {size[1]} pixels. Choose a square with --size."
        )
    if fit != "longest":
        fill = (0, 0, 0)
    crop = _crop(found, CenterCrop(fit, resized, fill, torchvision=True), size)
    return ImageProcessor(RESAMPLINGS[resampling], size, crop)


def _input_size(found: _Found) -> tuple[int, int]:
    """Reads timm's input_size, (channels, height, width)."""
    size = found.fields["input_size"]
    if not isinstance(size, list | tuple) or len(size) != 3:
        raise found.wrong("input_size", "[channels, height, width]")
    for side in size[1:]:
        check_size(f"{found.where}: input_size is {short(size)}; its height or width", side)
    return size[1], size[2]


def _check_grid(size: tuple[int, int], found: _Found, config: Config) -> None:
    wanted = config.image_size
    assert wanted is not None  # NaFlex encoders have no size.
    if tuple(side // config.patch for side in size) != config.grid:
        raise ValueError(
            f"{found.where} makes images of {size[0]} x {size[1]} pixels, but the model expects "
            f"{wanted[0]} x {wanted[1]}. Choose a size with --size."
        )
