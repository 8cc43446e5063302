"""The names of the arrays of an encoder in a checkpoint with PyTorch's layout.

A family or a library is a `Names`, which is data; `read_encoder` and `read_text_encoder` read the
arrays of all of them.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from pallas_patch_embed.base.messages import quoted
from pallas_patch_embed.encoders.arrays import LARGEST_WEIGHT, Tower
from pallas_patch_embed.encoders.config import Config, TextConfig
from pallas_patch_embed.patch_embedding.positions import Interpolation

# Type of a function (name, *shape) that reads an array.
type Read = Callable[..., np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names:
    """The names of an encoder's arrays, behind the tower's prefix.

    A name of a dense layer or a norm ends where "weight" and "bias" follow. Several names are dense
    layers whose outputs follow each other, such as query, key and value.

    Attributes:
      patch: the patch embedding's convolution, or dense layer of a NaFlex tower; or the table of
        a text tower's tokens.
      positions: [P, D]. Without a position for each token in front, the last tokens in front have
        none: P is S, class_tokens + S or prefix + S.
      class_tokens, registers: the tokens in front of the patches.
      first_norm, norm: the norms in front of and behind the blocks.
      block: what precedes a block's names, with {} for its number.
      norm1, qkv, out, norm2, fc1, fc2: the layers of a block.
      gated_fc1, gated_fc2: those of a gated MLP, the gate first.
      scale1, scale2: LayerScale's vectors.
      query, head_qkv, head_out, head_norm, head_mlp: SigLIP's attention pooling head.
      pooler: the dense layer of the class token, or of the token that summarises a text.
      projection: the kernel behind the pooled vector, [P, D], beside the part of the prefix named
        `parent`.
      transposed_projection: whether it is [D, P].
      parent: the last part of the prefix that does not belong to the projection's name.
      unused: beginnings of the names of arrays that inference does not need.
      interpolation: how the library resizes positions.
    """

    patch: str
    positions: str
    class_tokens: tuple[str, ...] = ()
    registers: str = ""
    first_norm: str = ""
    block: str
    norm1: str
    qkv: tuple[str, ...]
    out: str
    scale1: str = ""
    norm2: str
    fc1: tuple[str, ...]
    fc2: str
    gated_fc1: tuple[str, ...] = ()
    gated_fc2: str = ""
    scale2: str = ""
    norm: str
    query: str = ""
    head_qkv: tuple[str, ...] = ()
    head_out: str = ""
    head_norm: str = ""
    head_mlp: tuple[str, str] = ("", "")
    pooler: str = ""
    projection: str = ""
    transposed_projection: bool = False
    parent: str = ""
    unused: tuple[str, ...] = ()
    interpolation: Interpolation = "bicubic"

    def prefixes(self, names: Iterable[str]) -> set[str]:
        """Returns the prefixes of the towers among the names of a checkpoint's arrays."""
        prefixes = {name[: name.index(self.patch)] for name in names if self.patch in name}
        return {prefix for prefix in prefixes if not prefix or prefix.endswith(".")}


def read_encoder(tower: Tower, names: Names, config: Config) -> tuple[dict[str, Any], Config]:
    """Reads all arrays of an encoder.

    Returns:
      A dict in float32 with "kernel", its "layout", "bias", "positions" [h, w, D] or None, "prefix"
      [R, D], and the "blocks", "first_norm", "norm", "head" and "projection" of an Encoder.

    Raises:
      ValueError: an array is missing, is not used, or has another shape or bad values.
    """
    reader = _Reader(tower, config)
    D, p, C = config.width, config.patch, config.channels
    shape = (D, C * p * p) if config.naflex else (D, C, p, p)
    kernel = tower.read(f"{names.patch}weight", *shape)
    positions, prefix = _positions(tower, names, config)
    weights: dict[str, Any] = {
        "kernel": kernel,
        "layout": "NK" if config.naflex else "OIHW",
        "bias": reader.bias(f"{names.patch}bias", "patch", D, tower.read),
        "positions": positions,
        "prefix": prefix,
        "blocks": _blocks(reader, names, config),
        "first_norm": reader.norm(names.first_norm) if config.first_norm else None,
        "norm": None,
        "head": None,
        "projection": None,
    }
    unused = [*names.unused]
    if config.last_norm:
        weights["norm"] = reader.norm(names.norm)
    else:  # The tower lacks its last blocks.
        unused += [names.norm, names.block.partition("{")[0]]
    head = names.query.rpartition(".")[0] + "."
    pooling = config.pooling
    if pooling is None:
        pooling = "class" if config.class_tokens else "none"
        found = {"attention": names.query and head, "dense": names.pooler}
        pooling = next((kind for kind, name in found.items() if name and tower.has(name)), pooling)
    if pooling == "attention":
        weights["head"] = _attention_head(reader, names, config)
    elif pooling == "dense":
        weights["head"] = _pooler(reader, names, config)
    if pooling != "none":
        weights["projection"] = _projection(tower, names, config)
    if config.pooling is not None:
        unused += [head, names.pooler, names.projection]
    tower.check_all_read(*(name for name in unused if name not in ("", ".")))
    return weights, dataclasses.replace(config, pooling=pooling)


def read_text_encoder(tower: Tower, names: Names, config: TextConfig) -> dict[str, Any]:
    """Reads all arrays of a text encoder.

    Returns:
      A dict in float32 with the children of a TextEncoder.

    Raises:
      ValueError: as for `read_encoder`.
    """
    reader, D = _Reader(tower, config), config.width
    if names.pooler:
        outputs, _ = tower.shape(f"{names.pooler}weight", 2)
        projection: Any = reader.dense((names.pooler,), D, (outputs,))
    else:
        projection = _projection(tower, names, config)
    weights = {
        "embedding": tower.read(f"{names.patch}weight", config.vocabulary, D),
        "positions": tower.read(names.positions, config.length, D),
        "blocks": _blocks(reader, names, config),
        "norm": reader.norm(names.norm),
        "projection": projection,
    }
    tower.check_all_read(*names.unused)
    return weights


class _Reader:
    """Reads the layers of a tower."""

    def __init__(self, tower: Tower, config: Config | TextConfig):
        self.tower, self.config = tower, config

    def of_blocks(self, names: Names) -> Read:
        """Returns a function that reads an array of every block, with the blocks as first axis."""
        prefixes = [names.block.format(i) for i in range(self.config.depth)]
        return lambda name, *shape: np.stack([self.tower.read(b + name, *shape) for b in prefixes])

    def bias(self, name: str, layer: str, size: int, read: Read) -> np.ndarray:
        if layer not in self.config.without_bias:
            return read(name, size)
        return np.zeros(size, np.float32)

    def norm(self, name: str, read: Read | None = None) -> dict[str, np.ndarray]:
        read = read or self.tower.read
        D = self.config.width
        return {"scale": read(f"{name}weight", D), "bias": read(f"{name}bias", D)}

    def dense(
        self,
        names: tuple[str, ...],
        inputs: int,
        outputs: tuple[int, ...],
        layers: tuple[str, ...] = (),
        read: Read | None = None,
    ) -> dict[str, np.ndarray]:
        """Reads dense layers with the same input as one.

        Args:
          names: their names.
          inputs: the size of their input.
          outputs: the size of the output of each.
          layers: the name of each in BIASES if it may lack a bias.
          read: the function that reads an array.
        """
        read = read or self.tower.read
        kernels, biases = [], []
        for i, (name, size) in enumerate(zip(names, outputs, strict=True)):
            kernels.append(read(f"{name}weight", size, inputs))
            biases.append(self.bias(f"{name}bias", "".join(layers[i : i + 1]), size, read))
        leading = kernels[0].shape[:-2]
        biases = [np.broadcast_to(bias, (*leading, bias.shape[-1])) for bias in biases]
        return {
            "kernel": np.concatenate(kernels, -2).swapaxes(-1, -2),
            "bias": np.concatenate(biases, -1),
        }


def _thirds(names: tuple[str, ...], D: int) -> tuple[int, ...]:
    """Returns the sizes of query, key and value, in one to three layers."""
    return {1: (3 * D,), 2: (D, 2 * D), 3: (D, D, D)}[len(names)]


def _blocks(reader: _Reader, names: Names, config: Config | TextConfig) -> dict[str, Any]:
    D, M, read = config.width, config.mlp, reader.of_blocks(names)
    fc1, fc2, inner = names.fc1, names.fc2, M
    if config.gated:
        fc1, fc2, inner = names.gated_fc1, names.gated_fc2, 2 * M
    blocks = {
        "norm1": reader.norm(names.norm1, read),
        "qkv": reader.dense(names.qkv, D, _thirds(names.qkv, D), ("query", "key", "value"), read),
        "out": reader.dense((names.out,), D, (D,), ("out",), read),
        "norm2": reader.norm(names.norm2, read),
        "fc1": reader.dense(fc1, D, (inner // len(fc1),) * len(fc1), ("mlp",) * 2, read),
        "fc2": reader.dense((fc2,), M, (D,), ("mlp",), read),
    }
    if config.layer_scale:
        for layer, name in (("out", names.scale1), ("fc2", names.scale2)):
            blocks[layer] = _scaled(blocks[layer], read(name, D))
    return blocks


def _scaled(dense: dict[str, np.ndarray], scale: np.ndarray) -> dict[str, np.ndarray]:
    """Multiplies the results of dense layers by a vector each: LayerScale."""
    kernel, bias = dense["kernel"] * scale[:, None, :], dense["bias"] * scale
    if not all((np.abs(x) <= LARGEST_WEIGHT).all() for x in (kernel, bias)):
        raise ValueError(
            "the product of a layer's weights and its LayerScale is beyond bfloat16's range. Check "
            "the checkpoint."
        )
    return {"kernel": kernel, "bias": bias}


def _attention_head(reader: _Reader, names: Names, config: Config) -> dict[str, Any]:
    D, M = config.width, config.mlp
    qkv = reader.dense(names.head_qkv, D, _thirds(names.head_qkv, D))
    fc1, fc2 = names.head_mlp
    probe = reader.tower.read(names.query, 1, 1, D)
    return {
        "query": projected(probe, qkv["kernel"][:, :D], qkv["bias"][:D]),
        "kv": {"kernel": qkv["kernel"][:, D:], "bias": qkv["bias"][D:]},
        "out": reader.dense((names.head_out,), D, (D,)),
        "norm": reader.norm(names.head_norm),
        "fc1": reader.dense((fc1,), D, (M,)),
        "fc2": reader.dense((fc2,), M, (D,)),
    }


def projected(probe: np.ndarray, kernel: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Computes the query of the pooling head, the projected probe, which all images share."""
    query = probe.reshape(-1).astype(np.float64) @ kernel + bias
    if np.abs(query).max() > LARGEST_WEIGHT:
        raise ValueError(
            "the query of its pooling head, probe @ kernel + bias, is beyond bfloat16's range. "
            "Check the checkpoint."
        )
    return query.astype(np.float32)


def _pooler(reader: _Reader, names: Names, config: Config) -> dict[str, np.ndarray]:
    if not reader.tower.has(names.pooler):
        raise ValueError(
            f"its config names a class with a pooler, but {quoted(names.pooler + 'weight')} is "
            "missing. Pass a config with pooling='class' to use the class token."
        )
    outputs, _ = reader.tower.shape(f"{names.pooler}weight", 2)
    return reader.dense((names.pooler,), config.width, (outputs,))


def _projection(
    tower: Tower, names: Names, config: Config | TextConfig
) -> dict[str, np.ndarray] | None:
    """Reads the projection of the pooled vector, which may lie beside the tower."""
    outer = Tower(tower.arrays, tower.prefix.removesuffix(names.parent))
    if not names.projection or not outer.has(names.projection):
        return None
    shape = outer.shape(names.projection, 2)
    size = shape[1 if names.transposed_projection else 0]
    wanted = (config.width, size) if names.transposed_projection else (size, config.width)
    kernel = outer.read(names.projection, *wanted)
    if outer.prefix == tower.prefix:
        tower.unread.discard(names.projection)
    return {"kernel": kernel if names.transposed_projection else kernel.T}


def _positions(
    tower: Tower, names: Names, config: Config
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """Reads the positions [h, w, D], and the tokens in front with their positions, [R, D]."""
    D, (h, w), R = config.width, config.grid, config.prefix
    tokens = [_rows(tower, name, D) for name in names.class_tokens[: config.class_tokens]]
    if config.registers:
        tokens.append(_rows(tower, names.registers, D))
    elif names.registers and tower.has(names.registers):
        tokens.append(_rows(tower, names.registers, D))  # An empty array.
    prefix = np.concatenate(tokens) if tokens else np.zeros((0, D), np.float32)
    if len(prefix) != R:
        raise ValueError(
            f"it has {len(prefix)} class and register tokens, but its config implies {R}. Use the "
            "config that belongs to these weights."
        )
    if config.rope_theta is not None:
        return None, prefix if R else None
    rows = _rows(tower, names.positions, D)
    front = len(rows) - h * w
    if front not in (0, config.class_tokens, R):
        raise ValueError(
            f"{quoted(tower.prefix + names.positions)} has shape {list(rows.shape)}: {len(rows)} "
            f"positions, which do not form the {h} x {w} grid of the config or of grid=. Use the "
            "config.json that belongs to these weights, or pass their grid as grid=(height, width)."
        )
    prefix[:front] += rows[:front]
    return rows[front:].reshape(h, w, D), prefix if R else None


def _rows(tower: Tower, name: str, D: int) -> np.ndarray:
    """Reads an array [D], [n, D] or [1, n, D] as [n, D]."""
    shape = tower.shape(name, 1, 2, 3)
    n = math.prod(shape[:-1])
    wanted = {1: (D,), 2: (n, D), 3: (1, n, D)}[len(shape)]
    return tower.read(name, *wanted).reshape(n, D)
