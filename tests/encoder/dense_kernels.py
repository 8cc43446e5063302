"""Compiles the Pallas kernels of an encoder's dense layers for an H200 or a B200, without a GPU.

  python -m tests.encoder.dense_kernels h200

Prints a JSON object: bytes of spills and stack by model, layer and dtype. It is a separate program
because the compilers read their settings when JAX is imported.
"""

import json
import sys

from benchmarks import offline_compile

# Layers whose parameters are stacked, as in an encoder.
LAYERS = 12


def spills(name: str) -> dict[str, int]:
    """Compiles each layer for the chip of this name, with the config that is chosen for it."""
    import jax

    from benchmarks.dense import MODELS, layers
    from pallas_patch_embed.backends.mosaic import SM90, SM100
    from pallas_patch_embed.base.chips import Target
    from pallas_patch_embed.base.dtypes import EIGHT_BITS
    from pallas_patch_embed.layers.dense import FEWEST_ROWS, MOST_ROWS, problem_of

    # DINOv2's GELU by erf has the most instructions.
    small = layers(384, 1536)["fc1"]
    by_erf = small._replace(epilogue=small.epilogue._replace(activation="gelu"))
    models = MODELS | {"DINOv2 S/14": (512 * 257, {"fc1": by_erf})}
    backend, chip = {"h200": SM90, "b200": SM100}[name], offline_compile.CHIPS[name]
    if name == "h200":  # In bfloat16 the kernel serves few rows, and wide tiles.
        few = {rows: MODELS["B/16 224"][1] for rows in (FEWEST_ROWS, MOST_ROWS)}
        few[729] = MODELS["So400m/14 384"][1]
        few[MODELS["B/16 224"][0]] = MODELS["B/16 224"][1]
        models |= {f"{rows} rows": (rows, parts) for rows, parts in few.items()}
    found = {}
    for model, (M, parts) in models.items():
        for layer, described in parts.items():
            K, N, _ = described
            dtypes = EIGHT_BITS if described.epilogue.levels else ("int8",)
            for dtype in ("bfloat16",) if "rows" in model else dtypes:
                epilogue = described.epilogue_in(dtype)
                x = jax.ShapeDtypeStruct((M, K), dtype)
                stacked = LAYERS, epilogue.parts
                weight = jax.ShapeDtypeStruct((*stacked, N, K), dtype)
                row = jax.ShapeDtypeStruct((*stacked, N), "float32")
                others = dict(
                    row_scale=jax.ShapeDtypeStruct((M,), "float32"),
                    residual=jax.ShapeDtypeStruct((M, N), "bfloat16"),
                    factor=row,
                    shift=jax.ShapeDtypeStruct((*stacked, 1), "float32"),
                    layer=jax.ShapeDtypeStruct((1,), "int32"),
                )
                operands = [x, weight, row, row, *(others[name] for name in epilogue.operands)]
                plan = backend.plan(problem_of(x, weight, epilogue), Target("cuda", chip))
                program = offline_compile.compile_offline(plan.run, operands, chip, sass=False)
                kernel = program.kernel
                found[f"{model}, {layer}, {dtype}"] = kernel.spill_bytes + kernel.stack_bytes
    return found


def main(name: str) -> None:
    with offline_compile.compiler():
        print(json.dumps(spills(name)))


if __name__ == "__main__":
    main(sys.argv[1])
