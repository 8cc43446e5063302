"""Compiles the kernel of the attention for H200s, without a GPU.

  python -m tests.encoder.attention_kernels FOLDER < CASES

CASES is a JSON object of lists [B, S, H, D, consumers, keys, slots, images, levels]. `images` is
"whole", "lengths", or [number, longest] of images that are segments of the rows. `levels` is the
dtype of a result in 8 bits, otherwise empty. For each name it writes the
PTX and the log of passes to FOLDER, and prints a JSON object with the registers and the bytes of
spills and stack. It is a separate program because the compilers read their settings when JAX is
imported.
"""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

from benchmarks import offline_compile

# Multiprocessors of the emulated GPU, fewer than there are units.
MULTIPROCESSORS = 2


def main(folder: Path) -> None:
    cases, found = json.load(sys.stdin), {}
    with offline_compile.compiler() as dumped:
        import jax

        from pallas_patch_embed.base.chips import H200
        from pallas_patch_embed.layers import attention_sm90

        chip = dataclasses.replace(H200, multiprocessors=MULTIPROCESSORS)
        for name, (*shape, consumers, keys, slots, images, levels) in cases.items():
            arrays, longest = [jax.ShapeDtypeStruct(shape, "bfloat16")] * 3, None
            if images == "lengths":
                arrays.append(jax.ShapeDtypeStruct(shape[:1], "int32"))
            elif images != "whole":
                number, longest = images
                arrays += [jax.ShapeDtypeStruct((number,), "int32")] * 2
            config = attention_sm90.Config(consumers, keys, slots)
            static = dict(longest=longest, levels=levels, config=config, chip=chip)

            def function(*operands, config=config, static=static):
                ordered = attention_sm90.with_order(config, *operands, longest=static["longest"])
                return attention_sm90.kernel(*ordered, **static)

            before = set(dumped.iterdir())
            program = offline_compile.compile_offline(function, tuple(arrays), H200, dumped)
            (kernel,) = program.kernels
            found[name] = kernel.registers, kernel.spill_bytes + kernel.stack_bytes
            for path in set(dumped.iterdir()) - before:
                if path.suffix in (".ptx", ".log"):
                    shutil.copy(path, folder / f"{name}{path.suffix}")
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
