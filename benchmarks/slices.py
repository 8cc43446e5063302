"""Measures what it costs if the operands of the operator are parts of larger arrays.

  python -m benchmarks.slices --out bench

XLA folds a slice into a call of the CUDA kernels, whose handler copies a part that does not begin
at a multiple of 16 bytes. In front of the other kernels XLA copies every slice (docs/backends.md).
Times are wall times of calls without a pause, in microseconds. Every result is compared with that
of the call with whole arrays, bit for bit. The records are written to slices.jsonl.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_patch_embed as ppe
from pallas_patch_embed.base.problem import named_shape
from pallas_patch_embed.commands.demo import draw_weights
from pallas_patch_embed.commands.tune import timing

SHAPE = named_shape("B/16 224")
BACKENDS = ("cuda", "mosaic_sm90", "triton")
# Number of parts of the larger arrays.
PARTS = 4


def contenders(
    backend: str, params: Any, patches: jax.Array
) -> dict[str, tuple[Callable[..., jax.Array], tuple[Any, ...]]]:
    """Returns functions with their arguments; `patches` are PARTS times those of one call."""
    part = patches.reshape(PARTS, -1, *patches.shape[1:])
    one, images = part[1], part.shape[1]
    call = functools.partial(ppe.patch_embed, backend=backend)
    scales = jnp.concatenate([params.scale[:1], params.scale, params.scale[:3]])

    def vector(offset: int) -> jax.Array:
        return jnp.concatenate([one.ravel()[:offset], one.ravel(), one.ravel()[:3]])

    def of_vector(x: jax.Array, params: Any, *, offset: int) -> jax.Array:
        return call(x[offset : offset + one.size].reshape(one.shape), params)

    def of_scales(x: jax.Array, params: Any, scales: jax.Array) -> jax.Array:
        return call(x, dataclasses.replace(params, scale=scales[1 : 1 + SHAPE.N]))

    return {
        "whole arrays": (call, (one, params)),
        "scale at element 1": (of_scales, (one, params, scales)),
        "part of a batch": (lambda x, p: call(x[images : 2 * images], p), (patches, params)),
        "patches at element 256": (
            functools.partial(of_vector, offset=256),
            (vector(256), params),
        ),
        "patches at element 1": (functools.partial(of_vector, offset=1), (vector(1), params)),
        "lax.map over 4 parts": (
            lambda x, p: lax.map(functools.partial(call, params=p), x),
            (part, params),
        ),
    }


def main() -> None:
    """Prints and records the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, nargs="+", default=[1, 64, 1024])
    parser.add_argument("--dtypes", nargs="+", default=["float8_e4m3fn", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of a turn")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("bench"))
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "slices.jsonl"
    path.write_text(json.dumps({"kind": "environment", "text": timing.environment()}) + "\n")
    print(timing.environment())
    drawn = draw_weights(np.random.default_rng(0), SHAPE)
    for dtype in chosen.dtypes:
        params = ppe.pack(**drawn, patch_size=SHAPE.patch, grid=SHAPE.grid, dtype=dtype)
        for images in chosen.images:
            shape = (PARTS * images, SHAPE.image, SHAPE.image, 3)
            pixels = jax.random.bits(jax.random.key(images), shape, jnp.uint8)
            patches = jax.jit(ppe.patchify)(pixels, params)
            compared, expected = {}, {}
            for backend in BACKENDS:
                for what, (function, arguments) in contenders(backend, params, patches).items():
                    jitted = jax.jit(function)
                    y = jitted(*arguments)
                    y = y[1] if "map" in what else y
                    expected.setdefault(backend, y)
                    assert (y == expected[backend]).all(), (backend, what)
                    compared[backend, what] = timing.Contender(jitted, arguments)
            options = {"seconds": chosen.seconds, "rounds": chosen.rounds}
            for (backend, what), found in timing.sustained(compared, **options).items():
                us = 1e3 * found.milliseconds
                print(f"{dtype:14} {images:5} {backend:12} {what:24} {us:9.1f} us")
                row = {"dtype": dtype, "images": images, "backend": backend, "what": what}
                with path.open("a") as file:
                    file.write(json.dumps({"kind": "slices"} | row | {"us": us}) + "\n")


if __name__ == "__main__":
    main()
