"""Loads encoders from Hugging Face folders, .safetensors files and big_vision .npz files."""

import collections
import dataclasses
import math
import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.typing import DTypeLike

from pallas_patch_embed.base.dtypes import OUT_DTYPES
from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders.arrays import (
    EXPECTED,
    LARGEST_WEIGHT,
    Arrays,
    Tower,
    check_plain,
    is_npz,
    open_npz,
    open_safetensors,
    read_json,
)
from pallas_patch_embed.encoders.config import Config
from pallas_patch_embed.encoders.encoder import Encoder
from pallas_patch_embed.patch_embedding.packing import pack
from pallas_patch_embed.patch_embedding.params import check_dtype, check_grid
from pallas_patch_embed.patch_embedding.positions import (
    Interpolation,
    check_interpolation,
    resize_positions,
)

# Type of a function (name, *shape) that reads an array.
type Read = Callable[..., np.ndarray]

# The patch embedding of a Hugging Face tower, behind the tower's prefix.
MARKER = "embeddings.patch_embedding."

# Arrays of the image tower of a big_vision file, as regular expressions for the end of their names,
# behind the tower's prefix: "params/img/", or "PaliGemma/img/" inside a larger model. The tower has
# all of them; other parts of a model may have some.
BIG_VISION_MARKERS = (
    "embedding/kernel",
    "pos_embedding",
    r"Transformer/encoder_norm/\w+",
    r"Transformer/encoderblock(?:_\d{1,4})?/.*",
)
OPTIMISER = re.compile(r"(opt|opt_state|optimizer)/")

# What follows last_hidden_state and the pooling head in a big_vision tower. It is left out.
BIG_VISION_OUTPUTS = ("head/", "pre_logits/")


def load_encoder(
    path: str | os.PathLike[str],
    *,
    image_size: int | tuple[int, int] | None = None,
    interpolation: Interpolation = "bilinear",
    grid: tuple[int, int] | None = None,
    patch_dtype: DTypeLike = "bfloat16",
    dtype: DTypeLike = "bfloat16",
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> Encoder:
    """Loads the vision encoder of a SigLIP or SigLIP2 checkpoint.

    Reads Hugging Face folders (config.json and either model.safetensors, or its shards and
    model.safetensors.index.json, also of one variant such as model.fp16.safetensors), single
    .safetensors files, and big_vision .npz files. If a file contains a larger model, only its
    vision tower is read, up to the last hidden state and the pooling head. Nothing is unpickled.

    Args:
      path: the folder or file.
      image_size: size of the images in pixels, the side of a square or (height, width). The
        positions are resized to the grid of such images. None for the checkpoint's own size. NaFlex
        encoders accept images of any size and refuse this argument.
      interpolation: how positions are resized, as in `resize_positions`: "bilinear" as in
        big_vision, "bicubic" as in transformers' SigLIP, or "bicubic-antialiased" as in timm.
        NaFlex encoders are always bilinear and refuse the others.
      grid: (height, width) of the stored positions in patches, if neither the config nor the arrays
        state it: an .npz file with positions that are not a square.
      patch_dtype: dtype of the patch embedding: "float32", "bfloat16", "float8_e4m3fn" or "int8".
      dtype: dtype of all later layers: "bfloat16" or "float32".
      config: replacement for the config.json: a Config, the contents of a config.json, or its path.
        It is needed for a .safetensors file without a config.json in its folder. The arrays of an
        .npz file determine the architecture, so there the config must agree with them.

    Returns:
      Encoder.

    Raises:
      FileNotFoundError: there is no such file or folder.
      OSError: a file cannot be read.
      TypeError: path or config has another type.
      ValueError: an argument has a wrong value; or a file is damaged, is not a checkpoint of a
        SigLIP vision tower, or its weights contradict its config. The message names the file and
        the fault.
    """
    patch_dtype = check_dtype(patch_dtype, "patch_dtype")
    dtype = check_dtype(dtype, "dtype", OUT_DTYPES)
    size = None if image_size is None else _check_image_size(image_size)
    check_interpolation(interpolation)
    height_width = None if grid is None else check_grid(grid)
    return _load(
        Path(path), lambda _: size, patch_dtype, dtype, config, height_width, interpolation
    )


def load_encoder_for_side(path: Path, side: int | None, patch_dtype: str) -> Encoder:
    """Loads an encoder for square images, or a NaFlex encoder.

    Args:
      path: as for `load_encoder`.
      side: side of the images in pixels; None for the checkpoint's own size. It is ignored for
        NaFlex encoders, which accept images of any size.
      patch_dtype: as for `load_encoder`.

    Raises:
      OSError, ValueError: as for `load_encoder`.
    """
    size = None if side is None else _check_image_size(side)
    return _load(
        path, lambda config: None if config.naflex else size, patch_dtype, "bfloat16", None
    )


def read_config(path: Path) -> Config:
    """Reads the config of a checkpoint, without putting anything on a device.

    Args:
      path: as for `load_encoder`.

    Raises:
      OSError, ValueError: as for `load_encoder`.
    """
    if is_npz(path):
        with open_npz(path) as arrays:
            return _read_big_vision(arrays, None, None)[1]
    return _config_in_folder(path)


def _load(
    path: Path,
    size_for: Callable[[Config], tuple[int, int] | None],
    patch_dtype: str,
    dtype: str,
    config: Any,
    grid: tuple[int, ...] | None = None,
    interpolation: Interpolation = "bilinear",
) -> Encoder:
    """Loads the encoder in this file or folder, for images of the size `size_for(config)`."""
    try:
        config = _given_config(config)
        if is_npz(path):
            with open_npz(path) as arrays:
                weights, config = _read_big_vision(arrays, config, grid)
        else:
            with open_safetensors(path) as arrays:
                if not any(MARKER in name for name in arrays.names):
                    check_plain(arrays.names)
                config = _with_grid(config or _config_in_folder(path), grid)
                weights, config = _read_hugging_face(arrays, config)
        return _assemble(weights, config, size_for(config), patch_dtype, dtype, interpolation)
    except ValueError as error:
        raise ValueError(f"load_encoder: {str(path)!r}: {error}") from error


def _with_grid(config: Config, grid: tuple[int, ...] | None) -> Config:
    """Returns the config with the grid that the user gave, if any."""
    if grid is None or grid == config.grid:
        return config
    height, width = grid
    return dataclasses.replace(config, grid=(height, width), image_size=None)


# Both readers return a dict in float32 with "kernel", its "layout", "bias", "positions" [h, w, D],
# and the "blocks", "norm" and "head" of an Encoder.


def _hugging_face_tower(arrays: Arrays) -> Tower:
    """Finds the vision tower by the name of its patch embedding.

    Raises:
      ValueError: there is no tower or more than one, or it has quantised weights or an adapter.
    """
    prefixes = {name[: name.index(MARKER)] for name in arrays.names if MARKER in name}
    if len(prefixes) != 1:
        raise ValueError(
            f"it has {len(prefixes)} arrays named {MARKER + 'weight'!r}, expected one, of a SigLIP "
            f"vision tower. {EXPECTED}"
        )
    tower = Tower(arrays, prefixes.pop())
    check_plain(tower.prefix + name for name in tower.names)
    return tower


def _read_hugging_face(arrays: Arrays, config: Config) -> tuple[dict[str, Any], Config]:
    tower = _hugging_face_tower(arrays)
    D, M, p, C = config.width, config.mlp, config.patch, config.channels

    def each_layer(name: str, *shape: int) -> np.ndarray:
        layers = range(config.depth)
        return np.stack([tower.read(f"encoder.layers.{i}.{name}", *shape) for i in layers])

    def dense(
        name: str, inputs: int, outputs: int, read: Read = tower.read
    ) -> dict[str, np.ndarray]:
        kernel = read(f"{name}.weight", outputs, inputs).swapaxes(-1, -2)
        return {"kernel": kernel, "bias": read(f"{name}.bias", outputs)}

    def norm(name: str, read: Read = tower.read) -> dict[str, np.ndarray]:
        return {"scale": read(f"{name}.weight", D), "bias": read(f"{name}.bias", D)}

    weights: dict[str, Any] = {
        "kernel": tower.read(
            f"{MARKER}weight", *((D, C * p * p) if config.naflex else (D, C, p, p))
        ),
        "layout": "NK" if config.naflex else "OIHW",
        "bias": tower.read(f"{MARKER}bias", D),
        "positions": _read_positions(tower, config),
        "blocks": {
            "norm1": norm("layer_norm1", each_layer),
            "qkv": _concatenate(dense(f"self_attn.{n}_proj", D, D, each_layer) for n in "qkv"),
            "out": dense("self_attn.out_proj", D, D, each_layer),
            "norm2": norm("layer_norm2", each_layer),
            "fc1": dense("mlp.fc1", D, M, each_layer),
            "fc2": dense("mlp.fc2", M, D, each_layer),
        },
        "norm": norm("post_layernorm"),
        "head": None,
    }
    if tower.has("head.") if config.pooling_head is None else config.pooling_head:
        kernels = tower.read("head.attention.in_proj_weight", 3 * D, D).T
        biases = tower.read("head.attention.in_proj_bias", 3 * D)
        probe = tower.read("head.probe", 1, 1, D)
        weights["head"] = {
            "query": _project(probe, kernels[:, :D], biases[:D]),
            "kv": {"kernel": kernels[:, D:], "bias": biases[D:]},
            "out": dense("head.attention.out_proj", D, D),
            "norm": norm("head.layernorm"),
            "fc1": dense("head.mlp.fc1", D, M),
            "fc2": dense("head.mlp.fc2", M, D),
        }
    tower.check_all_read(
        "embeddings.position_ids", *(["head."] if config.pooling_head is False else [])
    )
    return weights, config


def _read_positions(tower: Tower, config: Config) -> np.ndarray:
    """Reads the positions [h, w, D] of a Hugging Face tower."""
    name, (h, w) = "embeddings.position_embedding.weight", config.grid
    S, _ = tower.shape(name, 2)
    if h * w != S:
        raise ValueError(
            f"{quoted(tower.prefix + name)} has shape {list(tower.shape(name, 2))}: {S} positions, "
            f"which do not form the {h} x {w} grid of the config or of grid=. Use the config.json "
            "that belongs to these weights, or pass their grid as grid=(height, width)."
        )
    return tower.read(name, S, config.width).reshape(h, w, config.width)


def _read_big_vision(
    arrays: Arrays, given: Config | None, grid: tuple[int, ...] | None
) -> tuple[dict[str, Any], Config]:
    tower = _big_vision_tower(arrays)
    stacked = tower.has("Transformer/encoderblock/")
    if given is None:
        config = _big_vision_config(tower, stacked, grid, channels=3)
    else:
        given = _with_grid(given, grid)
        config = _big_vision_config(tower, stacked, given.grid, given.channels)
    for field in dataclasses.fields(Config):
        mine, other = getattr(config, field.name), getattr(given or config, field.name)
        if mine != other and field.name not in ("eps", "activation", "image_size", "pooling_head"):
            raise ValueError(
                f"the config has {field.name} = {other}, but the arrays imply {mine}. Use the "
                "config that belongs to these weights."
            )
    config = given or config
    D, M, p, C = config.width, config.mlp, config.patch, config.channels
    heads = (config.heads, D // config.heads)

    def each_layer(name: str, *shape: int) -> np.ndarray:
        if stacked:
            return tower.read(f"Transformer/encoderblock/{name}", config.depth, *shape)
        layers = range(config.depth)
        return np.stack(
            [tower.read(f"Transformer/encoderblock_{i}/{name}", *shape) for i in layers]
        )

    def dense(
        name: str, inputs: tuple[int, ...], outputs: tuple[int, ...], read: Read = tower.read
    ) -> dict[str, np.ndarray]:
        kernel, bias = read(f"{name}/kernel", *inputs, *outputs), read(f"{name}/bias", *outputs)
        leading = bias.shape[: bias.ndim - len(outputs)]
        shape = (*leading, math.prod(inputs), math.prod(outputs))
        return {"kernel": kernel.reshape(shape), "bias": bias.reshape(*leading, -1)}

    def norm(name: str, read: Read = tower.read) -> dict[str, np.ndarray]:
        return {"scale": read(f"{name}/scale", D), "bias": read(f"{name}/bias", D)}

    def attention(name: str, read: Read = tower.read) -> dict[str, dict[str, np.ndarray]]:
        name = f"{name}MultiHeadDotProductAttention_0"
        inner = {n: dense(f"{name}/{n}", (D,), heads, read) for n in ("query", "key", "value")}
        return inner | {"out": dense(f"{name}/out", heads, (D,), read)}

    def mlp(name: str, read: Read = tower.read) -> dict[str, dict[str, np.ndarray]]:
        return {
            "fc1": dense(f"{name}MlpBlock_0/Dense_0", (D,), (M,), read),
            "fc2": dense(f"{name}MlpBlock_0/Dense_1", (M,), (D,), read),
        }

    inner = attention("", each_layer)
    weights: dict[str, Any] = {
        "kernel": tower.read(
            "embedding/kernel", *((C * p * p,) if config.naflex else (p, p, C)), D
        ),
        "layout": "KN" if config.naflex else "HWIO",
        "bias": tower.read("embedding/bias", D),
        "positions": tower.read(
            "pos_embedding", *(config.grid if config.naflex else (1, math.prod(config.grid))), D
        ).reshape(*config.grid, D),
        "blocks": {
            "norm1": norm("LayerNorm_0", each_layer),
            "qkv": _concatenate(inner[n] for n in ("query", "key", "value")),
            "out": inner["out"],
            "norm2": norm("LayerNorm_1", each_layer),
            **mlp("", each_layer),
        },
        "norm": norm("Transformer/encoder_norm"),
        "head": None,
    }
    if tower.has("MAPHead_0/") if config.pooling_head is None else config.pooling_head:
        inner = attention("MAPHead_0/")
        probe = tower.read("MAPHead_0/probe", 1, 1, D)
        weights["head"] = {
            "query": _project(probe, **inner["query"]),
            "kv": _concatenate(inner[n] for n in ("key", "value")),
            "out": inner["out"],
            "norm": norm("MAPHead_0/LayerNorm_0"),
            **mlp("MAPHead_0/"),
        }
    tower.check_all_read(
        *BIG_VISION_OUTPUTS, *(["MAPHead_0/"] if config.pooling_head is False else [])
    )
    return weights, config


def _big_vision_tower(arrays: Arrays) -> Tower:
    """Finds the image tower by the ends of its arrays' names.

    Raises:
      ValueError: there is no tower or more than one, or it has a class token.
    """
    # Text towers keep their blocks below Encoder_0, and optimisers keep copies of the parameters.
    markers = [re.compile(rf"((?:.*/)?){end}") for end in BIG_VISION_MARKERS]
    counted: collections.Counter[str] = collections.Counter()
    for marker in markers:
        matches = (marker.fullmatch(name) for name in arrays.names if not OPTIMISER.match(name))
        counted.update({match[1] for match in matches if match})
    most = max(counted.values(), default=0)
    prefixes = sorted(prefix for prefix, number in counted.items() if number == most)
    if len(prefixes) != 1:
        found = f": below {', '.join(map(quoted, prefixes[:5]))}" if prefixes else ""
        raise ValueError(
            f"it has {len(prefixes)} image towers{found}, expected the arrays of one big_vision "
            f"image tower, such as 'params/img/embedding/kernel'. {EXPECTED}"
        )
    tower = Tower(arrays, prefixes[0])
    if "cls" in tower.names:
        raise ValueError(
            f"{quoted(prefixes[0] + 'cls')} is a class token, to which all patches attend. The "
            "towers of SigLIP have none, so this tower cannot be loaded."
        )
    return tower


def _big_vision_config(
    tower: Tower, stacked: bool, grid: tuple[int, ...] | None, channels: int
) -> Config:
    """Derives the architecture from the shapes of the arrays.

    Args:
      tower: the image tower.
      stacked: whether its blocks are stacked.
      grid: (height, width) of the positions if the user gave it; otherwise they form a square.
      channels: channels of the images of a NaFlex tower, whose arrays do not state it.
    """
    *sides, D = tower.shape("embedding/kernel", 2, 4)
    naflex = len(sides) == 1
    positions = tower.shape("pos_embedding", 3)
    stored = positions[:2] if naflex else (math.isqrt(positions[1]),) * 2
    height, width = stored if grid is None else grid
    if naflex and (height, width) != stored:
        raise ValueError(
            f"grid is {grid}, but its positions form a {stored[0]} x {stored[1]} grid. Leave grid "
            "out."
        )
    if not naflex and height * width != positions[1]:
        shape = "square" if grid is None else f"{height} x {width} grid"
        raise ValueError(
            f"it has {positions[1]} positions, which do not form a {shape}. Pass their grid as "
            "grid=(height, width), in patches."
        )
    patch = math.isqrt(sides[0] // channels) if naflex else sides[0]
    if naflex and patch**2 * channels != sides[0]:
        raise ValueError(
            f"its patches have {sides[0]} numbers, which are not {channels} * p * p for {channels} "
            "channels. Pass config= with the number of channels."
        )
    block = "Transformer/encoderblock" + ("" if stacked else "_0")
    layers = tower.shape(f"{block}/MultiHeadDotProductAttention_0/query/kernel", 3 + stacked)
    if stacked:
        depth = layers[0]
    else:
        names = (re.match(r"Transformer/encoderblock_(\d{1,4})/", name) for name in tower.names)
        depth = 1 + max(int(name[1]) for name in names if name)
    return Config(
        width=D,
        depth=depth,
        heads=layers[-2],
        mlp=tower.shape(f"{block}/MlpBlock_0/Dense_0/kernel", 2 + stacked)[-1],
        patch=patch,
        grid=(height, width),
        naflex=naflex,
        channels=channels if naflex else sides[2],
    )


def _concatenate(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the outputs of dense layers that have the same input into one layer."""
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts], -1) for name in ("kernel", "bias")}


def _project(probe: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Computes the query of the pooling head, the projected probe, which all images share."""
    query = probe.reshape(-1).astype(np.float64) @ kernel + bias
    if np.abs(query).max() > LARGEST_WEIGHT:
        raise ValueError(
            "the query of its pooling head, probe @ kernel + bias, is beyond bfloat16's range. "
            "Check the checkpoint."
        )
    return query.astype(np.float32)


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
        if grid != config.grid:
            resized = resize_positions(positions, grid, interpolation=interpolation)
            positions = jax.device_get(resized)
        config = dataclasses.replace(config, grid=grid, image_size=size)
    head = weights["head"]
    return Encoder(
        patch_embed=pack(
            weights["kernel"],
            weights["bias"],
            None if config.naflex else positions,
            patch_size=config.patch,
            layout=weights["layout"],
            channels=config.channels,
            grid=None if config.naflex else config.grid,
            dtype=patch_dtype,
        ),
        positions=jax.device_put(positions) if config.naflex else None,
        blocks=_cast(weights["blocks"], dtype),
        norm=_cast(weights["norm"], dtype),
        head=None if head is None else _cast(head, dtype),
        config=dataclasses.replace(config, pooling_head=head is not None),
        dtype=dtype,
    )


def _cast(weights: Any, dtype: str) -> Any:
    """Puts the weights on the device: layer norms in float32, all others in `dtype`."""
    if not isinstance(weights, dict):
        return jax.device_put(weights.astype(dtype))
    dtype = "float32" if "scale" in weights else dtype
    return {name: _cast(part, dtype) for name, part in weights.items()}


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


def _given_config(config: Any) -> Config | None:
    if config is None or isinstance(config, Config):
        return config
    if isinstance(config, str | os.PathLike):
        return Config.from_hugging_face(read_json(Path(config)))
    if isinstance(config, Mapping):
        return Config.from_hugging_face(config)
    raise TypeError(
        f"load_encoder: config is {type(config).__name__}, expected a Config, the contents of a "
        "config.json, or its path."
    )


def _config_in_folder(path: Path) -> Config:
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        raise ValueError(
            f"there is no {str(file)!r}, which describes the architecture. Put the model's "
            "config.json there, or pass config=."
        )
    return Config.from_hugging_face(read_json(file))
