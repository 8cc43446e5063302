"""Measures the dense layers and layer norms of an encoder, in bfloat16 and 8 bits, on a Hopper GPU.

  python -m benchmarks.dense --out bench
  python -m benchmarks.dense --models "B/16 224" --all-configs

Results of int8 are compared with XLA's, bit for bit except for roundings; others with float32.
Times are in milliseconds, in bursts and sustained; all contenders of a layer are timed in one
process, in turn. The records are written to dense.jsonl.
"""

import argparse
import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.attention import results_of
from pallas_patch_embed.backends.mosaic import SM90
from pallas_patch_embed.base.chips import Target, default_device
from pallas_patch_embed.base.dtypes import EIGHT_BITS
from pallas_patch_embed.base.problem import Epilogue
from pallas_patch_embed.commands.tune import timing
from pallas_patch_embed.encoders.program import BY_CUBLAS
from pallas_patch_embed.layers import dense, norm


class Layer(NamedTuple):
    """A dense layer [M, K] x [parts, N, K] with its epilogue in 8 bits."""

    K: int
    N: int
    epilogue: Epilogue

    def epilogue_in(self, dtype: str) -> Epilogue:
        """Returns the epilogue in this dtype: in bfloat16 without scales of rows and levels."""
        if dtype == "bfloat16":
            return self.epilogue._replace(row_scale=False, levels=False)
        return self.epilogue


def layers(D: int, hidden: int) -> dict[str, Layer]:
    """Returns the layers of a block. A hidden layer's width is padded to a multiple of 128."""
    hidden = -(-hidden // 128) * 128
    gelu = "gelu_pytorch_tanh"
    return {
        "qkv": Layer(D, D, Epilogue(row_scale=True, parts=3)),
        "out": Layer(D, D, Epilogue(residual=True, parts=1)),
        "fc1": Layer(D, hidden, Epilogue(gelu, row_scale=True, levels=True, parts=1)),
        "fc2": Layer(hidden, D, Epilogue(residual=True, parts=1)),
    }


# Rows of 512 images of B/16 and of 64 of So400m/14, and the layers.
MODELS = {
    "B/16 224": (512 * 196, layers(768, 3072)),
    "So400m/14 384": (64 * 729, layers(1152, 4304)),
}

# Largest part of the elements of two int8 results that may be neighbouring levels, because one
# fuses a multiplication and an addition and the other does not.
MOST_MOVED = 1e-3


def draw(M: int, layer: Layer, dtype: str) -> dict[str, jax.Array]:
    """Draws x, weight, scale, bias and the operands of the epilogue, which has a single layer."""
    parts = 1, layer.epilogue.parts
    keys = iter(jax.random.split(jax.random.key(0), 8))
    x = jax.random.normal(next(keys), (M, layer.K), jnp.bfloat16)
    weight = jax.random.normal(next(keys), (*parts, layer.N, layer.K), jnp.bfloat16)
    step = 1.0
    if dtype != "bfloat16":
        step = 1 / 40
        x, weight = x / step, weight / step
        if dtype == "int8":
            x, weight = (jnp.clip(jnp.round(a), -127, 127) for a in (x, weight))
    operands = dict(
        x=x.astype(dtype),
        weight=weight.astype(dtype),
        scale=jnp.full((*parts, layer.N), step**2 / layer.K**0.5, jnp.float32),
        bias=jax.random.normal(next(keys), (*parts, layer.N)),
        row_scale=jax.random.uniform(next(keys), (M,), minval=0.5, maxval=2),
        residual=jax.random.normal(next(keys), (M, layer.N), jnp.bfloat16),
        factor=jax.random.uniform(next(keys), (*parts, layer.N), minval=30, maxval=50),
        shift=jnp.full((*parts, 1), -20, jnp.float32),
        layer=jnp.zeros(1, jnp.int32),
    )
    names = ("x", "weight", "scale", "bias", *layer.epilogue.operands)
    return {name: operands[name] for name in names}


def by_cublas(x: Any, weights: Any, biases: Any, residual: Any, *, activation: str) -> Any:
    """Computes the parts of a layer in bfloat16 as the encoder does, with weights [K, N]."""
    found = [
        dense.in_steps(x, weight, bias, activation, residual)
        for weight, bias in zip(weights, biases)
    ]
    return found[0] if len(found) == 1 else tuple(found)


def contenders(M: int, layer: Layer, target: Target, *, every: bool) -> dict[str, Any]:
    """Returns XLA's bfloat16, and the kernel in each dtype."""
    found = {}
    for dtype in ("bfloat16", "int8", "float8_e4m3fn"):
        epilogue = layer.epilogue_in(dtype)
        operands = draw(M, layer._replace(epilogue=epilogue), dtype)
        if dtype == "bfloat16":
            transposed = tuple(weight.T.copy() for weight in operands["weight"][0])
            bias = tuple(operands["bias"][0].astype(dtype))
            residual = operands.get("residual")
            function = functools.partial(by_cublas, activation=epilogue.activation)
            jitted = jax.jit(function, compiler_options=BY_CUBLAS)
            arguments = (operands["x"], transposed, bias, residual)
            found["bfloat16 cublas"] = timing.Contender(jitted, arguments)
        problem = dense.problem_of(operands["x"], operands["weight"], epilogue)
        configs = SM90.candidates(problem, target)
        for config in configs if every else configs[:1]:
            plan = SM90.plan(problem, target, config=config)
            jitted = jax.jit(plan.run)
            found[f"{dtype} {config}"] = timing.Contender(jitted, tuple(operands.values()))
        formula = jax.jit(functools.partial(dense.formula, epilogue=epilogue))
        found[f"{dtype} formula"] = timing.Contender(formula, tuple(operands.values()))
    return found


def check(compared: dict[str, Any]) -> None:
    """Compares the kernel's results with those of the formula."""
    for name, found in results_of(compared):
        dtype, program = name.split(" ", 1)
        if program in ("cublas", "formula"):
            continue
        y, wanted = (
            jnp.stack(jax.tree.leaves(results))
            for results in (found, compared[f"{dtype} formula"]())
        )
        difference = jnp.abs(y.astype(jnp.float32) - wanted.astype(jnp.float32))
        if y.dtype == jnp.int8:
            wrong = difference.max() > 1 or (difference > 0).mean() > MOST_MOVED
        elif y.dtype == jnp.float8_e4m3fn:  # Sums differ, so some results are one level apart.
            wrong = (difference > 2.0**-3 * jnp.abs(wanted.astype(jnp.float32)) + 2.0**-9).any()
        else:
            wrong = (difference > 2.0**-7 * jnp.abs(wanted.astype(jnp.float32)) + 1e-2).any()
        if wrong or not jnp.isfinite(difference).all():
            raise SystemExit(f"{name} differs from the formula by {float(difference.max())}.")


def norms(M: int, D: int) -> dict[str, Any]:
    """Returns the layer norm with a result of bfloat16, and in 8 bits."""
    x = jax.random.normal(jax.random.key(0), (M, D), jnp.bfloat16)
    row = jnp.ones(D, jnp.float32)
    functions: dict[str, Any] = {"bfloat16": norm.layer_norm}
    for dtype in EIGHT_BITS:
        functions[dtype] = functools.partial(norm.layer_norm_levels, dtype=dtype)
    return {
        name: timing.Contender(jax.jit(functools.partial(function, eps=1e-6)), (x, row, row))
        for name, function in functions.items()
    }


def main() -> None:
    """Prints and records the times."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--all-configs", action="store_true", help="times every config")
    parser.add_argument("--rows", type=int, help="instead of the rows of the models")
    parser.add_argument("--seconds", type=float, default=0.6, help="of a sustained turn; 0: none")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    chosen = parser.parse_args()
    target = Target.of(default_device())
    if target.chip is None or target.chip.capability != (9, 0):
        raise SystemExit("benchmarks.dense: the kernel needs a Hopper GPU, but there is none.")
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / "dense.jsonl"
    path.write_text(json.dumps({"kind": "environment", "text": timing.environment()}) + "\n")
    print(timing.environment())
    for model in chosen.models:
        M, parts = MODELS[model]
        M = chosen.rows or M
        groups: dict[str, Any] = {"norm": lambda M=M, parts=parts: norms(M, parts["qkv"].K)}
        for name, layer in parts.items():
            groups[name] = functools.partial(contenders, M, layer, target, every=chosen.all_configs)
        for name, make in groups.items():
            compared = make()
            timing.compile_all(compared.values())
            if name != "norm":
                check(compared)
            burst = timing.burst(compared, rounds=3, rest=0.2)
            sustained: dict[str, Any] = {}
            if chosen.seconds:
                sustained = timing.sustained(compared, seconds=chosen.seconds, rounds=1)
            for program in compared:
                row = {"kind": "dense", "model": model, "rows": M, "layer": name}
                row |= {"program": program, "burst": burst[program].milliseconds}
                if chosen.seconds:
                    row["sustained"] = sustained[program].milliseconds
                text = f"{row['burst']:8.4f} {row.get('sustained', math.nan):8.4f}"
                print(f"{model:14} {name:6} {program:90} {text}", flush=True)
                with path.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
