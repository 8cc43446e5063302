"""An encoder of SigLIP in flax, as big_vision has it, for comparison."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np


def flax_tower(folder: Path, config: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Builds the ViT of big_vision's vit.py from flax's modules; returns it and its weights.

    Attention is flax's MultiHeadDotProductAttention. Blocks are scanned. Kernels and the residual
    stream are bfloat16.

    Raises:
      ImportError: flax is not installed.
      ValueError: the checkpoint is not a SigLIP, the only family of which big_vision has encoders.
    """
    if config.family != "siglip":
        raise ValueError(f"big_vision has SigLIP encoders, but this is {config.family!r}.")
    import flax.linen as nn
    import jax
    import jax.numpy as jnp

    dtype = jnp.bfloat16

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(config.mlp, dtype=dtype, name="fc1")(x))
            return nn.Dense(config.width, dtype=dtype, name="fc2")(x)

    def attention(name):
        return nn.MultiHeadDotProductAttention(num_heads=config.heads, dtype=dtype, name=name)

    def norm(name):
        return nn.LayerNorm(epsilon=config.eps, name=name)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            y = norm("norm1")(x).astype(dtype)
            x = x + attention("attention")(y, y)
            return x + Mlp(name="mlp")(norm("norm2")(x).astype(dtype))

    class Head(nn.Module):
        @nn.compact
        def __call__(self, x):
            probe = self.param("probe", nn.initializers.zeros, (1, 1, config.width))
            query = jnp.tile(probe.astype(dtype), (len(x), 1, 1))
            x = attention("attention")(query, x)
            return (x + Mlp(name="mlp")(norm("norm")(x).astype(dtype)))[:, 0]

    class Embedding(nn.Module):
        @nn.compact
        def __call__(self, images):
            sides, p = images.shape[1:3], config.patch
            x = (images.astype(jnp.float32) / 127.5 - 1).astype(dtype)
            x = nn.Conv(config.width, (p, p), (p, p), "VALID", dtype=dtype, name="conv")(x)
            x = x.reshape(len(x), (sides[0] // p) * (sides[1] // p), config.width)
            shape = (1, x.shape[1], config.width)
            return x + self.param("positions", nn.initializers.zeros, shape).astype(dtype)

    def whole(params, images):
        x = Embedding().apply({"params": params["embedding"]}, images)

        def step(x, p):
            return Block().apply({"params": p}, x), None

        x, _ = jax.lax.scan(step, x, params["blocks"])
        x = norm(None).apply({"params": params["norm"]}, x).astype(dtype)
        return Head().apply({"params": params["head"]}, x)

    from safetensors.numpy import load_file

    stored = load_file(folder / "model.safetensors")
    arrays = {name.removeprefix("vision_model."): array for name, array in stored.items()}
    return whole, (jax.device_put(_flax_params(arrays, config, dtype)),)


def _flax_params(arrays: dict[str, np.ndarray], config: Any, dtype: Any) -> dict[str, Any]:
    """Renames and reshapes the arrays of a `SiglipVisionModel` for flax's modules."""
    D, heads = config.width, config.heads
    inner = (heads, D // heads)

    def kernel(weight, shape):
        return {"kernel": weight.T.reshape(shape).astype(dtype)}

    def dense(name):
        weight = arrays[f"{name}.weight"]
        return kernel(weight, weight.T.shape) | {"bias": arrays[f"{name}.bias"].astype(dtype)}

    def norm(name):
        return {"scale": arrays[f"{name}.weight"], "bias": arrays[f"{name}.bias"]}

    def projection(weight, bias):
        return kernel(weight, (D, *inner)) | {"bias": bias.reshape(inner).astype(dtype)}

    def out(name):
        own = dense(name)
        return own | {"kernel": own["kernel"].reshape(*inner, D)}

    def block(i):
        layer = f"encoder.layers.{i}"
        names = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
        attention = {
            name: projection(
                arrays[f"{layer}.self_attn.{own}.weight"], arrays[f"{layer}.self_attn.{own}.bias"]
            )
            for name, own in names.items()
        }
        return dict(
            norm1=norm(f"{layer}.layer_norm1"),
            attention=attention | {"out": out(f"{layer}.self_attn.out_proj")},
            norm2=norm(f"{layer}.layer_norm2"),
            mlp={name: dense(f"{layer}.mlp.{name}") for name in ("fc1", "fc2")},
        )

    import jax

    weights = np.split(arrays["head.attention.in_proj_weight"], 3)
    biases = np.split(arrays["head.attention.in_proj_bias"], 3)
    attention = {
        name: projection(*own) for name, own in zip(("query", "key", "value"), zip(weights, biases))
    }
    blocks = [block(i) for i in range(config.depth)]
    conv = arrays["embeddings.patch_embedding.weight"].transpose(2, 3, 1, 0)
    return dict(
        embedding=dict(
            conv=dict(
                kernel=conv.astype(dtype),
                bias=arrays["embeddings.patch_embedding.bias"].astype(dtype),
            ),
            positions=arrays["embeddings.position_embedding.weight"][None],
        ),
        blocks=jax.tree.map(lambda *x: np.stack(x), *blocks),
        norm=norm("post_layernorm"),
        head=dict(
            probe=arrays["head.probe"],
            attention=attention | {"out": out("head.attention.out_proj")},
            norm=norm("head.layernorm"),
            mlp={name: dense(f"head.mlp.{name}") for name in ("fc1", "fc2")},
        ),
    )
