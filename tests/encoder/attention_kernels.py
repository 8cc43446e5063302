"""Compiles the kernel of the attention for H200s, without a GPU.

  python -m tests.encoder.attention_kernels FOLDER < CASES

CASES is a JSON list of two objects of lists [B, S, H, D, consumers, keys, slots, images, levels].
`images` is "whole", "lengths", or [number, longest] of images that are segments of the rows.
`levels` is the dtype of a result in 8 bits, otherwise empty. The program writes what the emulator
needs of the first object's kernels to FOLDER, and prints a JSON object with the registers and the
bytes of spills and stack of the second one's. It is a separate program because the compilers read
their settings when JAX is imported.
"""

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks import offline_compile

# Multiprocessors of the emulated GPU, fewer than there are units.
MULTIPROCESSORS = 2


def main(folder: Path) -> None:
    emulated, cases = json.load(sys.stdin)
    found = {}
    with offline_compile.compiler():
        import jax

        from pallas_patch_embed.base.chips import H200
        from pallas_patch_embed.layers import attention_sm90

        chip = dataclasses.replace(H200, multiprocessors=MULTIPROCESSORS)
        for name, (*shape, consumers, keys, slots, images, levels) in (emulated | cases).items():
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

            operands = tuple(arrays)
            if name in emulated:
                offline_compile.dump_kernel(function, operands, H200, folder / name)
            else:
                program = offline_compile.compile_offline(function, operands, H200, sass=False)
                kernel = program.kernel
                found[name] = kernel.registers, kernel.spill_bytes + kernel.stack_bytes
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
