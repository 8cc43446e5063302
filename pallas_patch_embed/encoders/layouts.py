"""How the weights of the blocks' dense layers lie in memory.

A checkpoint is read with kernels [in, out], in float32. The dense layers of an encoder in bfloat16
or 8 bits have weights [out, in], because a kernel of the GPU loads rows of both operands, and qkv
and a gated fc1 have an axis for their parts, each of which has a result of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pallas_patch_embed.encoders.config import Config, TextConfig

# The width of the hidden layer is a multiple of this many units, because kernels read rows whose
# size is a multiple of 128 bytes.
MULTIPLE = 128


def parts_of(layer: str, config: Config | TextConfig) -> int:
    """Returns the number of equal parts of a dense layer's outputs."""
    return {"qkv": 3, "fc1": 2 if config.gated else 1}.get(layer, 1)


def split(x: Any, layer: str, config: Config | TextConfig) -> Any:
    """Splits outputs [L, N, ...] into parts [L, parts, N / parts, ...], if there are several."""
    parts = parts_of(layer, config)
    return x if parts == 1 else x.reshape(len(x), parts, -1, *x.shape[2:])


def padded_width(config: Config | TextConfig) -> int:
    """Returns the width of the hidden layer in bfloat16 and 8 bits."""
    return config.mlp + -config.mlp % MULTIPLE


def padded(blocks: dict[str, Any], config: Config | TextConfig) -> dict[str, Any]:
    """Makes the width of the hidden layer a multiple of MULTIPLE. The new units are 0."""
    more = padded_width(config) - config.mlp
    return blocks | _with_hidden(
        blocks, config, lambda x: np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, more)])
    )


def by_outputs(blocks: dict[str, Any], config: Config | TextConfig) -> dict[str, Any]:
    """Returns the blocks of an encoder in bfloat16, on the host, for blocks in float32."""
    return {
        name: layer_by_outputs(p, name, config) if "kernel" in p else p
        for name, p in padded(blocks, config).items()
    }


def layer_by_outputs(p: dict[str, Any], layer: str, config: Config | TextConfig) -> dict[str, Any]:
    """Returns a dense layer [L, in, out] in float32 as `by_outputs` does."""
    weight, bias = p["kernel"].swapaxes(-1, -2), p["bias"].astype(np.float32)
    parts = {"weight": weight.astype(jnp.bfloat16), "scale": np.ones_like(bias), "bias": bias}
    return {key: split(x, layer, config) for key, x in parts.items()}


def by_inputs(blocks: dict[str, Any], config: Config | TextConfig) -> dict[str, Any]:
    """Inverts `by_outputs`, for blocks on the device, in float32."""
    found = {}
    for name, p in blocks.items():
        if "weight" in p:
            *_, K = p["weight"].shape
            kernel = p["weight"].reshape(len(p["weight"]), -1, K).swapaxes(1, 2)
            p = {"kernel": kernel, "bias": p["bias"].reshape(len(kernel), -1)}
        found[name] = {key: x.astype(jnp.float32) for key, x in p.items()}

    def unpadded(x: jax.Array) -> jax.Array:
        if x.shape[-1] == config.mlp:
            return x
        # On a mesh with explicit axes JAX does not choose how a part of a split axis is split. Here
        # each device gets the whole part.
        sharding = jax.typeof(x).sharding
        whole = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1], None))
        return x.at[..., : config.mlp].get(out_sharding=whole)

    return found | _with_hidden(found, config, unpadded)


def number_of_parameters(blocks: Any, config: Config | TextConfig) -> int:
    """Counts the parameters of blocks, in bfloat16 without padding and scales of 1.

    Leaves that are no arrays, such as shardings, count as 0.
    """
    total = 0
    for path, leaf in jax.tree_util.tree_leaves_with_path(blocks):
        *_, layer, name = (getattr(key, "key", None) for key in path)
        size = getattr(leaf, "size", 0)
        if isinstance(blocks, dict) and "weight" in blocks[layer]:
            if name == "scale":
                continue
            if layer == "fc1" or (layer, name) == ("fc2", "weight"):
                size = size // padded_width(config) * config.mlp
        total += size
    return total


def _with_hidden(
    blocks: dict[str, Any], config: Config | TextConfig, change: Callable[[Any], Any]
) -> dict[str, Any]:
    """Changes the units [..., M] of the hidden layer in kernels and biases of the MLP."""
    parts = parts_of("fc1", config)

    def outputs(x: Any) -> Any:
        units = change(x.reshape(*x.shape[:-1], parts, -1))
        return units.reshape(*x.shape[:-1], -1)

    fc2 = blocks["fc2"]
    inputs = change(fc2["kernel"].swapaxes(-1, -2)).swapaxes(-1, -2)
    return {
        "fc1": jax.tree.map(outputs, blocks["fc1"]),
        "fc2": fc2 | {"kernel": inputs},
    }
