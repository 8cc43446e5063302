"""Compiles the kernel of the layer norm for an H200, without a GPU.

  python tests/encoder/norm_kernels.py WIDTH ...

Prints [registers, bytes of spills and stack] for each width. It is a separate program because the
compilers read their settings when JAX is imported.
"""

import functools
import json
import sys

from benchmarks import offline_compile


def main(widths: list[int]) -> None:
    found = {}
    with offline_compile.compiler() as folder:
        import jax

        from pallas_patch_embed.chips import H200
        from pallas_patch_embed.siglip2 import norm

        for D in widths:
            x = jax.ShapeDtypeStruct((8, 196, D), "bfloat16")
            row = jax.ShapeDtypeStruct((D,), "float32")
            function = functools.partial(norm.kernel, eps=1e-6)
            program = offline_compile.compile_offline(function, (x, row, row), H200, folder)
            (kernel,) = program.kernels
            found[D] = kernel.registers, kernel.spill_bytes + kernel.stack_bytes
    print(json.dumps(found))


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
