"""Reads the towers of big_vision's .npz files, whose arrays determine the architecture."""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders.arrays import EXPECTED, Arrays, Tower
from pallas_patch_embed.encoders.config import Config, TextConfig
from pallas_patch_embed.encoders.names import Read, projected

# Arrays of the image tower of a big_vision file, as regular expressions for the end of their names,
# behind the tower's prefix: "params/img/", or "PaliGemma/img/" inside a larger model. The tower has
# all of them; other parts of a model may have some.
MARKERS = (
    "embedding/kernel",
    "pos_embedding",
    r"Transformer/encoder_norm/\w+",
    r"Transformer/encoderblock(?:_\d{1,4})?/.*",
)
# The array that only a text tower has, behind its prefix such as "params/txt/".
TEXT_MARKER = re.compile(r"((?:.*/)?)Embed_0/embedding")
OPTIMISER = re.compile(r"(opt|opt_state|optimizer)/")

# What follows last_hidden_state and the pooling head in a big_vision tower. It is left out.
OUTPUTS = ("head/", "pre_logits/")

# What precedes the names of the blocks and the last norm in an image tower and in a text tower.
IMAGE_BLOCKS, TEXT_BLOCKS = "Transformer/", "Encoder_0/"

# Fields of a config that the arrays do not show. SigLIP's towers have none of the other features.
UNSTATED = ("eps", "activation", "image_size", "pooling", "image_mean", "image_std")


def read(
    arrays: Arrays, given: Config | None, grid: tuple[int, ...] | None, layers: int | None = None
) -> tuple[dict[str, Any], Config]:
    """Reads the image tower of a file.

    Args:
      arrays: the file's arrays.
      given: the config that the user gave, or None.
      grid: (height, width) of the positions that the user gave, or None.
      layers: number of the first blocks that are read, as for `Config.first_blocks`; None for all.

    Returns:
      The arrays, as from `names.read_encoder`, and the config.

    Raises:
      ValueError: there is not one such tower, or its arrays contradict the config.
    """
    tower = _tower(arrays)
    if given is None:
        config = _config(tower, grid, channels=3)
    else:
        given = given.with_grid(grid)
        config = _agreed(_config(tower, given.grid, given.channels), given)
    stored = config.depth
    if layers is not None:
        config = config.first_blocks(layers)
    reader = _Reader(tower, IMAGE_BLOCKS, config, stored)
    D, p, C = config.width, config.patch, config.channels
    weights: dict[str, Any] = {
        "kernel": tower.read(
            "embedding/kernel", *((C * p * p,) if config.naflex else (p, p, C)), D
        ),
        "layout": "KN" if config.naflex else "HWIO",
        "bias": tower.read("embedding/bias", D),
        "positions": tower.read(
            "pos_embedding", *(config.grid if config.naflex else (1, math.prod(config.grid))), D
        ).reshape(*config.grid, D),
        "blocks": reader.blocks(),
        "prefix": None,
        "first_norm": None,
        "norm": reader.norm(f"{IMAGE_BLOCKS}encoder_norm") if config.last_norm else None,
        "head": None,
        "projection": None,
    }
    has_head = tower.has("MAPHead_0/") if config.pooling is None else config.pooling == "attention"
    if has_head:
        inner = reader.attention("MAPHead_0/")
        probe = tower.read("MAPHead_0/probe", 1, 1, D)
        weights["head"] = {
            "query": projected(probe, **inner["query"]),
            "kv": _concatenate(inner[n] for n in ("key", "value")),
            "out": inner["out"],
            "norm": reader.norm("MAPHead_0/LayerNorm_0"),
            **reader.mlp("MAPHead_0/"),
        }
    unused = [] if config.pooling is None else ["MAPHead_0/"]
    if config.pooling is None:
        config = dataclasses.replace(config, pooling="attention" if has_head else "none")
    if not config.last_norm:
        unused += ["Transformer/encoder_norm/", "Transformer/encoderblock_"]
    tower.check_all_read(*OUTPUTS, *unused)
    return weights, config


def read_text(arrays: Arrays, given: TextConfig | None) -> tuple[dict[str, Any], TextConfig]:
    """Reads the text tower of a file.

    Args:
      arrays: the file's arrays.
      given: the config that the user gave, or None.

    Returns:
      The arrays, as from `names.read_text_encoder`, and the config.

    Raises:
      ValueError: there is not one such tower, or its arrays contradict the config.
    """
    matches = (TEXT_MARKER.fullmatch(name) for name in arrays.names if not OPTIMISER.match(name))
    prefixes = sorted({match[1] for match in matches if match})
    if len(prefixes) != 1:
        raise ValueError(
            f"it has {len(prefixes)} text towers, expected the arrays of one big_vision text "
            f"tower, such as 'params/txt/Embed_0/embedding'. {EXPECTED}"
        )
    tower = Tower(arrays, prefixes[0])
    vocabulary, D = tower.shape("Embed_0/embedding", 2)
    length = tower.shape("pos_embedding", 3)[1]
    config = TextConfig(width=D, vocabulary=vocabulary, length=length, **_sizes(tower, TEXT_BLOCKS))
    if given is not None:
        config = _agreed(config, given)
    reader = _Reader(tower, TEXT_BLOCKS, config, config.depth)
    weights = {
        "embedding": tower.read("Embed_0/embedding", vocabulary, D),
        "positions": tower.read("pos_embedding", 1, length, D)[0],
        "blocks": reader.blocks(),
        "norm": reader.norm(f"{TEXT_BLOCKS}encoder_norm"),
        "projection": reader.dense("head", (D,), tower.shape("head/bias", 1)),
    }
    tower.check_all_read()
    return weights, config


class _Reader:
    """Reads the layers of a tower.

    Args:
      tower: the tower.
      start: what precedes the names of its blocks.
      config: its config.
      stored: the number of blocks in the file, of which the first `config.depth` are read.
    """

    def __init__(self, tower: Tower, start: str, config: Config | TextConfig, stored: int):
        self.tower, self.start, self.config, self.stored = tower, start, config, stored

    def of_blocks(self, name: str, *shape: int) -> np.ndarray:
        """Reads an array of every block, with the blocks as first axis."""
        read, depth = self.tower.read, self.config.depth
        if _are_stacked(self.tower, self.start):
            return read(f"{self.start}encoderblock/{name}", self.stored, *shape)[:depth]
        return np.stack(
            [read(f"{self.start}encoderblock_{i}/{name}", *shape) for i in range(depth)]
        )

    def blocks(self) -> dict[str, Any]:
        inner = self.attention("", self.of_blocks)
        return {
            "norm1": self.norm("LayerNorm_0", self.of_blocks),
            "qkv": _concatenate(inner[n] for n in ("query", "key", "value")),
            "out": inner["out"],
            "norm2": self.norm("LayerNorm_1", self.of_blocks),
            **self.mlp("", self.of_blocks),
        }

    def dense(
        self,
        name: str,
        inputs: tuple[int, ...],
        outputs: tuple[int, ...],
        read: Read | None = None,
    ) -> dict[str, np.ndarray]:
        read = read or self.tower.read
        kernel, bias = read(f"{name}/kernel", *inputs, *outputs), read(f"{name}/bias", *outputs)
        leading = bias.shape[: bias.ndim - len(outputs)]
        shape = (*leading, math.prod(inputs), math.prod(outputs))
        return {"kernel": kernel.reshape(shape), "bias": bias.reshape(*leading, -1)}

    def norm(self, name: str, read: Read | None = None) -> dict[str, np.ndarray]:
        read, D = read or self.tower.read, self.config.width
        return {"scale": read(f"{name}/scale", D), "bias": read(f"{name}/bias", D)}

    def attention(self, name: str, read: Read | None = None) -> dict[str, dict[str, np.ndarray]]:
        D = self.config.width
        heads = (self.config.heads, D // self.config.heads)
        name = f"{name}MultiHeadDotProductAttention_0"
        inner = {n: self.dense(f"{name}/{n}", (D,), heads, read) for n in ("query", "key", "value")}
        return inner | {"out": self.dense(f"{name}/out", heads, (D,), read)}

    def mlp(self, name: str, read: Read | None = None) -> dict[str, dict[str, np.ndarray]]:
        D, M = self.config.width, self.config.mlp
        return {
            "fc1": self.dense(f"{name}MlpBlock_0/Dense_0", (D,), (M,), read),
            "fc2": self.dense(f"{name}MlpBlock_0/Dense_1", (M,), (D,), read),
        }


def _tower(arrays: Arrays) -> Tower:
    """Finds the image tower by the ends of its arrays' names.

    Raises:
      ValueError: there is no tower or more than one, or it has a class token.
    """
    # Text towers keep their blocks below Encoder_0, and optimisers keep copies of the parameters.
    markers = [re.compile(rf"((?:.*/)?){end}") for end in MARKERS]
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


def _are_stacked(tower: Tower, start: str) -> bool:
    """Returns whether an array contains all blocks, as flax's scan stores them."""
    return tower.has(f"{start}encoderblock/")


def _sizes(tower: Tower, start: str) -> dict[str, Any]:
    """Derives the number and the sizes of the blocks, whose names begin with `start`."""
    stacked = _are_stacked(tower, start)
    block = f"{start}encoderblock" + ("" if stacked else "_0")
    layers = tower.shape(f"{block}/MultiHeadDotProductAttention_0/query/kernel", 3 + stacked)
    return {
        "depth": layers[0] if stacked else tower.blocks(f"{start}encoderblock_{{}}/"),
        "heads": layers[-2],
        "mlp": tower.shape(f"{block}/MlpBlock_0/Dense_0/kernel", 2 + stacked)[-1],
    }


def _agreed[C: (Config, TextConfig)](implied: C, given: C) -> C:
    """Returns the config that the user gave, unless it contradicts what the arrays imply."""
    for field in dataclasses.fields(implied):
        mine, other = getattr(implied, field.name), getattr(given, field.name)
        if mine != other and field.name not in UNSTATED:
            raise ValueError(
                f"the config has {field.name} = {other}, but the arrays imply {mine}. Use the "
                "config that belongs to these weights."
            )
    return given


def _config(tower: Tower, grid: tuple[int, ...] | None, channels: int) -> Config:
    """Derives the architecture from the shapes of the arrays.

    Args:
      tower: the image tower.
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
    return Config(
        width=D,
        patch=patch,
        grid=(height, width),
        naflex=naflex,
        channels=channels if naflex else sides[2],
        **_sizes(tower, IMAGE_BLOCKS),
    )


def _concatenate(parts: Iterable[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Concatenates the outputs of dense layers that have the same input into one layer."""
    parts = list(parts)
    return {name: np.concatenate([part[name] for part in parts], -1) for name in ("kernel", "bias")}
