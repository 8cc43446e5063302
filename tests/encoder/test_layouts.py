"""Blocks of an encoder in bfloat16 are those of the checkpoint, in another layout."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_patch_embed.encoders.layouts import (
    MULTIPLE,
    by_inputs,
    by_outputs,
    number_of_parameters,
)
from pallas_patch_embed.siglip2 import Config


def draw(config):
    rng, L, D = np.random.default_rng(0), config.depth, config.width
    M = config.mlp

    def dense(K, N):
        # Numbers of bfloat16.
        kernel, bias = (rng.integers(-99, 99, n) / 64 for n in ((L, K, N), (L, N)))
        return {"kernel": np.float32(kernel), "bias": np.float32(bias)}

    vector = np.float32(rng.normal(size=(L, D)))
    fc1 = dense(D, 2 * M if config.gated else M)
    norm = {"scale": vector, "bias": -vector}
    return dict(norm1=norm, qkv=dense(D, 3 * D), out=dense(D, D), fc1=fc1, fc2=dense(M, D))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("mlp", [MULTIPLE, 3 * MULTIPLE + 8])
def test_weights_by_outputs_are_the_kernels(mlp, gated):
    config = dataclasses.replace(Config(32, 2, 2, mlp, 16, (2, 2)), gated=gated)
    blocks = draw(config)
    found = jax.device_put(by_outputs(blocks, config))
    assert found["norm1"]["scale"].dtype == jnp.float32
    width, parts = -(-mlp // MULTIPLE) * MULTIPLE, (2,) if gated else ()
    shapes = {"qkv": (2, 3, 32, 32), "out": (2, 32, 32)}
    shapes |= {"fc1": (2, *parts, width, 32), "fc2": (2, 32, width)}
    for name, shape in shapes.items():
        p = found[name]
        assert p["weight"].shape == shape and p["weight"].dtype == jnp.bfloat16
        assert p["scale"].shape == p["bias"].shape == shape[:-1]
        assert (p["scale"] == 1).all() and p["bias"].dtype == jnp.float32
    q, k, v = np.split(blocks["qkv"]["kernel"], 3, -1)
    for i, kernel in enumerate((q, k, v)):
        np.testing.assert_array_equal(
            np.float32(found["qkv"]["weight"][:, i]), kernel.swapaxes(1, 2)
        )
    assert not np.float32(found["fc2"]["weight"])[..., mlp:].any()
    assert not np.float32(found["fc1"]["weight"])[..., mlp:, :].any()
    again = by_inputs(found, config)
    jax.tree.map(np.testing.assert_array_equal, again, blocks)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(again))
    number = sum(leaf.size for leaf in jax.tree.leaves(blocks))
    assert number_of_parameters(found, config) == number_of_parameters(again, config) == number
    nothing = jax.tree.map(lambda leaf: "a sharding", found)
    assert number_of_parameters(nothing, config) == 0
