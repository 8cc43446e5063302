"""The files of image processors: what is read from them, and what is refused."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import pallas_patch_embed as ppe
from pallas_patch_embed.base.center_crop import CenterCrop
from pallas_patch_embed.encoders.checkpoint import read_config
from pallas_patch_embed.encoders.config import HALF, IMAGENET, NORMALISATIONS, OPENAI
from pallas_patch_embed.encoders.image_processor import (
    BICUBIC,
    BILINEAR,
    LANCZOS,
    read_image_processor,
)
from tests.encoder.goldens import DATA
from tests.encoder.test_families import FAMILIES, NAMES, expected, load

MEAN, STD = (0.25, 0.5, 0.75), (0.125, 0.25, 0.5)
FILE = "preprocessor_config.json"
SQUARE = {"height": 32, "width": 32}
# A class that this package does not know, such as that of a larger model.
OWN = {"image_processor_type": "OwnImageProcessor"}


def copied(tmp_path, name, fields=None, file=FILE, **changes):
    """Copies a golden, and writes its image processor or changes fields of its config."""
    path = tmp_path / name
    shutil.copytree(FAMILIES / name, path)
    if fields is not None:
        (path / file).write_text(json.dumps(fields))
    for field, value in changes.items():
        config = next(path.glob("*config.json"))
        content = json.loads(config.read_text())
        content[field] |= value
        config.write_text(json.dumps(content))
    return path


def processor(path, side=None):
    config = read_config(path)
    if side is not None:
        grid = (side // config.patch,) * 2
        config = dataclasses.replace(config, image_size=(side, side), grid=grid)
    return read_image_processor(path, config, side)


# Normalisation.


@pytest.mark.parametrize(
    "fields, mean, std",
    [
        ({"image_mean": MEAN, "image_std": STD}, MEAN, STD),
        ({"image_mean": 0.25, "image_std": [0.125]}, (0.25,) * 3, (0.125,) * 3),
        ({"image_mean": MEAN}, MEAN, HALF[1]),
        ({}, *HALF),
        ({"do_normalize": False, "image_mean": MEAN}, (0.0,) * 3, (1.0,) * 3),
        ({"rescale_factor": 0.003921568859368563}, *HALF),
        ({"image_processor_type": "CLIPImageProcessorFast"}, *OPENAI),
        ({"image_processor_type": "BitImageProcessor"}, *OPENAI),
        ({"image_processor_type": "DINOv3ViTImageProcessorFast"}, *IMAGENET),
        ({"image_processor_type": "DeiTImageProcessorPil"}, *HALF),
        ({"feature_extractor_type": "CLIPFeatureExtractor"}, *OPENAI),
        ({"image_processor_type": "Siglip2ImageProcessor"}, *HALF),
        (OWN, *HALF),
        (OWN | {"image_mean": MEAN, "image_std": STD}, MEAN, STD),
    ],
)
def test_the_normalisation_is_that_of_the_image_processor(tmp_path, fields, mean, std):
    path = copied(tmp_path, "vit", fields)
    encoder = load(path)
    assert (encoder.config.image_mean, encoder.config.image_std) == (mean, std)
    assert read_config(path).image_mean == mean
    stated = dataclasses.replace(load(FAMILIES / "vit").config, image_mean=mean, image_std=std)
    images = expected("vit")["images"]
    # The goldens show that the normalisation of a Config is applied. It also replaces the file's.
    wanted = load(FAMILIES / "vit", config=stated)(images)
    for output in (encoder(images), load(path, config=stated)(images)):
        np.testing.assert_array_equal(output.pooler_output, wanted.pooler_output)
    other = dataclasses.replace(stated, image_mean=(0.375,) * 3)
    assert load(path, config=other).config.image_mean == (0.375,) * 3


@pytest.mark.parametrize("name", NAMES)
def test_without_another_image_processor_the_normalisation_is_the_familys(name):
    config = load(FAMILIES / name).config
    wanted = expected(name)["normalisation"]
    np.testing.assert_array_equal([config.image_mean, config.image_std], wanted)
    if not name.startswith("timm_clip"):
        assert (config.image_mean, config.image_std) == NORMALISATIONS[config.family]


@pytest.mark.parametrize(
    "name, field", [("timm_vit", "pretrained_cfg"), ("open_clip_clip", "preprocess_cfg")]
)
def test_timm_and_open_clip_state_the_normalisation_in_their_configs(tmp_path, name, field):
    # The file of another library beside the config is not the one of this model.
    path = copied(tmp_path, name, {"image_mean": 0.375}, **{field: {"mean": MEAN, "std": STD}})
    assert load(path).config.image_mean == MEAN
    config = "config.json" if name == "timm_vit" else "open_clip_config.json"
    given = json.loads((path / config).read_text())
    given[field]["std"] = None  # It has the library's default then.
    found = load(FAMILIES / name, config=given).config
    assert (found.image_mean, found.image_std) == (
        MEAN,
        (OPENAI if "clip" in name else IMAGENET)[1],
    )


def test_a_mapping_leaves_the_normalisation_to_the_image_processor(tmp_path):
    path = copied(tmp_path, "vit", {"image_mean": MEAN})
    config = json.loads((path / "config.json").read_text())
    assert load(path, config=config).config.image_mean == MEAN
    assert load(path / "model.safetensors").config.image_mean == MEAN


@pytest.mark.parametrize(
    "fields, text",
    [
        ([], "not a JSON object"),
        ({"image_mean": [0.5, 0.5]}, r"image_mean is \[0.5, 0.5\], expected numbers in \[0, 1\]"),
        ({"image_mean": [127, 127, 127]}, "image_mean is .127"),
        ({"image_mean": [0.5, 0.5, 10**399]}, "image_mean"),
        ({"image_mean": [0.5, 0.5, True]}, "image_mean"),
        ({"image_mean": "0.5"}, "image_mean is '0.5'"),
        ({"image_std": []}, "image_std"),
        ({"image_std": [0.5, 0.5, 0]}, "image_std is .*, expected positive numbers"),
        ({"image_std": float("nan")}, "image_std is nan"),
        ({"image_mean": None}, "image_mean is None"),
        ({"do_rescale": False}, "do_rescale is False"),
        ({"do_rescale": None}, "do_rescale is None"),
        ({"do_normalize": "no"}, "do_normalize is 'no', expected true or false"),
        ({"rescale_factor": 1 / 127.5}, "rescale_factor is 0.0078"),
        ({"rescale_factor": 10**399}, "rescale_factor"),
        ({"image_processor_type": ["a"]}, "image_processor_type is"),
        (OWN | {"image_mean": MEAN}, "image_std is None"),
    ],
)
def test_a_normalisation_that_is_not_one_is_refused(tmp_path, fields, text):
    with pytest.raises(ValueError, match=f"load_encoder: .*{FILE}.*{text}"):
        load(copied(tmp_path, "vit", fields))


def test_null_turns_a_switch_off_as_in_transformers(tmp_path):
    config = load(copied(tmp_path, "vit", {"image_mean": MEAN, "do_normalize": None})).config
    assert (config.image_mean, config.image_std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"image_mean": MEAN}, "image_mean is .*, expected 0.5 for a NaFlex encoder"),
        ({"image_std": 0.25}, "image_std is 0.25, expected 0.5 for a NaFlex encoder"),
        ({"do_normalize": False}, "do_normalize is False, expected True for a NaFlex encoder"),
    ],
)
def test_a_naflex_encoder_with_another_normalisation_is_refused(tmp_path, fields, text):
    """`batch_naflex` makes pixels in [-1, 1]."""
    path = tmp_path / "model"
    shutil.copytree(DATA / "hf_siglip2_naflex_p16", path)
    (path / FILE).write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": 0.5}))
    assert ppe.load_encoder(path).config.image_mean == HALF[0]
    (path / FILE).write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=text):
        ppe.load_encoder(path)


# Sizes and crops.


def shortest(side, torchvision=False):
    return CenterCrop("shortest", (side, side), torchvision=torchvision)


@pytest.mark.parametrize(
    "name, resample, side, crop, defaults_of",
    [
        ("clip", BICUBIC, 32, shortest(32), "transformers' CLIPImageProcessor"),
        ("dinov2", BICUBIC, 28, shortest(28), "transformers' BitImageProcessor"),
        ("dinov2_with_registers", BICUBIC, 28, shortest(28), "transformers' BitImageProcessor"),
        ("dinov3", BILINEAR, 32, None, "transformers' DINOv3ViTImageProcessor"),
        ("vit", BILINEAR, 32, None, "transformers' ViTImageProcessor"),
        ("deit", BICUBIC, 32, CenterCrop("squash", (36, 36)), "transformers' DeiTImageProcessor"),
        ("siglip_headless", BICUBIC, 32, None, "transformers' SiglipImageProcessor"),
        ("timm_vit", BICUBIC, 32, shortest(35, True), None),  # 32 / 0.9 = 35.6
        ("timm_clip", BICUBIC, 32, shortest(33, True), None),  # 32 / 0.95 = 33.7
        ("open_clip_clip", BICUBIC, 32, shortest(32, True), None),
        ("open_clip_siglip", BICUBIC, 32, None, None),
    ],
)
def test_the_image_processor_of_each_family(name, resample, side, crop, defaults_of):
    found = processor(FAMILIES / name)
    assert (found.resample, found.size, found.crop) == (resample, (side, side), crop)
    assert found.defaults_of == defaults_of


TO_36 = {"size": 36, "default_to_square": True, "crop_size": 32}
OF_256 = {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}


@pytest.mark.parametrize(
    "name, fields, side, crop",
    [
        ("dinov2", OF_256 | {"image_processor_type": "BitImageProcessor"}, 518, shortest(592)),
        ("clip", {"image_processor_type": "CLIPImageProcessor"}, 336, shortest(336)),
        ("clip", OF_256 | {"size": 225, "crop_size": 224}, 384, shortest(385)),  # 385.7
        ("deit", {}, 384, CenterCrop("squash", (438, 438))),  # 438.9
        ("vit", {"size": 224}, 384, None),
        ("timm_vit", None, 384, shortest(426, True)),  # 384 / 0.9 = 426.7
        ("open_clip_clip", None, 64, shortest(64, True)),
    ],
)
def test_a_chosen_size_scales_what_precedes_the_crop(tmp_path, name, fields, side, crop):
    path = copied(tmp_path, name, fields)
    found = processor(path, side)
    assert found.size == (side, side) and found.crop == crop


@pytest.mark.parametrize(
    "name, fields, size, crop",
    [
        ("vit", {"size": SQUARE}, (32, 32), None),
        ("vit", {"size": 32, "do_center_crop": None}, (32, 32), None),
        ("vit", {"size": [32, 32], "resample": LANCZOS}, (32, 32), None),
        ("vit", {"feature_extractor_type": "ViTFeatureExtractor", "size": 32}, (32, 32), None),
        ("deit", {"size": 37, "crop_size": 32}, (32, 32), CenterCrop("squash", (37, 37))),
        ("clip", {"size": 32, "crop_size": 32}, (32, 32), shortest(32)),
        ("clip", {"size": {"shortest_edge": 36}, "crop_size": SQUARE}, (32, 32), shortest(36)),
        # do_center_crop with the picture's own size does nothing.
        ("vit", {"size": 32, "do_center_crop": True, "crop_size": 32}, (32, 32), None),
        ("clip", TO_36, (32, 32), CenterCrop("squash", (36, 36))),
        ("clip", {"size": SQUARE, "do_center_crop": False, "do_pad": False}, (32, 32), None),
        # The remainder of less than a patch is dropped.
        ("vit", {"size": 39}, (39, 39), None),
    ],
)
def test_the_sizes_in_a_file_mean_what_they_mean_in_transformers(
    tmp_path, name, fields, size, crop
):
    found = processor(copied(tmp_path, name, fields))
    assert (found.size, found.crop, found.defaults_of) == (size, crop, None)
    assert found.resample == fields.get("resample", BILINEAR if name == "vit" else BICUBIC)


@pytest.mark.parametrize(
    "name, fields, text",
    [
        ("clip", {}, "makes images of 224 x 224 pixels, but the model expects 32 x 32. Choose"),
        ("clip", {"do_center_crop": False}, "size is .*shortest_edge.* without a centre crop"),
        ("clip", {"crop_size": {"shortest_edge": 9}}, "crop_size is"),
        ("clip", {"crop_size": [9]}, "crop_size is"),
        ("clip", {"use_square_size": True}, "use_square_size is True"),
        ("vit", {"crop_size": 32, "size": {"max_height": 9, "max_width": 9}}, "size is"),
        ("vit", {"size": {"height": 0, "width": 32}}, "height or width in pixels is 0"),
        ("vit", {"size": SQUARE, "do_resize": False}, "do_resize is False"),
        ("vit", {"size": SQUARE, "do_resize": None}, "do_resize is None"),
        ("vit", {"size": None}, "size is None"),
        ("vit", {"size": SQUARE, "resample": None}, "resample is None"),
        ("vit", {"size": SQUARE, "resample": 3.0}, "resample is 3.0, expected an integer"),
        ("vit", {"size": SQUARE, "do_flip": True}, "do_flip is True"),
        ("vit", OWN, "image_processor_type is 'OwnImageProcessor', which `embed` does not support"),
        ("vit", {"image_processor_type": "Siglip2ImageProcessor"}, "expected another class"),
    ],
)
def test_what_embed_cannot_do_is_refused(tmp_path, name, fields, text):
    path = copied(tmp_path, name, fields)
    with pytest.raises(ValueError, match=f"{FILE}.*{text}"):
        processor(path)


@pytest.mark.parametrize(
    "name, field, changes, text",
    [
        ("timm_vit", "pretrained_cfg", {"crop_mode": "random"}, "crop_mode is 'random'"),
        ("timm_vit", "pretrained_cfg", {"crop_pct": 0}, "crop_pct is 0"),
        ("timm_vit", "pretrained_cfg", {"crop_pct": 999}, "before the crop"),
        ("timm_vit", "pretrained_cfg", {"interpolation": "random"}, "interpolation is 'random'"),
        ("timm_vit", "pretrained_cfg", {"input_size": [3, 64, 64]}, "the model expects 32 x 32"),
        ("timm_vit", "pretrained_cfg", {"input_size": [3, 32]}, "input_size is"),
        ("timm_vit", "pretrained_cfg", {"input_size": [3, 32, 56]}, "only for square images"),
        ("open_clip_clip", "preprocess_cfg", {"resize_mode": "fit"}, "resize_mode is 'fit'"),
        ("open_clip_clip", "preprocess_cfg", {"interpolation": 3}, "interpolation is 3"),
        ("open_clip_clip", "preprocess_cfg", {"interpolation": "box"}, "is 'box', expected"),
        ("open_clip_clip", "preprocess_cfg", {"fill_color": 256}, "fill_color is 256"),
        ("open_clip_clip", "preprocess_cfg", {"mode": "L"}, "mode is 'L', expected 'RGB'"),
        (
            "open_clip_clip",
            "preprocess_cfg",
            {"crop": 9},
            "crop is 9, which open_clip does not have",
        ),
    ],
)
def test_what_embed_cannot_do_for_timm_and_open_clip_is_refused(
    tmp_path, name, field, changes, text
):
    path = copied(tmp_path, name, **{field: changes})
    with pytest.raises(ValueError, match=f"{field} of .*{text}"):
        processor(path)


def test_open_clip_is_bicubic_where_its_training_was_random(tmp_path):
    path = copied(tmp_path, "open_clip_clip", preprocess_cfg={"interpolation": "random"})
    assert processor(path).resample == BICUBIC


def test_a_siglip_checkpoint_loads_with_its_own_processor(tmp_path):
    """The file states the family's normalisation, so the encoder has the same bits."""
    path = copied(tmp_path, "siglip_headless", {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})
    images = expected("siglip_headless")["images"]
    found, wanted = (ppe.siglip2.load_encoder(p)(images) for p in (path, FAMILIES / path.name))
    np.testing.assert_array_equal(found.last_hidden_state, wanted.last_hidden_state)
