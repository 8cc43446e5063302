"""Shows which slices XLA folds into a Mosaic GPU custom call.

Compiles two programs for an H200, without a GPU, and prints the fusions in the optimised HLO. Needs
the extra `codegen`. docs/upstream.md explains the faults.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import offline_compile


def main() -> None:
    with offline_compile.compiler():
        import jax
        import jax.experimental.pallas.mosaic_gpu as plgpu

        def reverse(x, y):
            block = jax.lax.axis_index("block")
            y[x.shape[0] - 1 - block, :] = x[block, :]

        def reversed_rows(x):
            kernel = plgpu.kernel(reverse, out_type=x, grid=(x.shape[0],), grid_names=("block",))
            return kernel(x)

        def odd(vector):
            return reversed_rows(vector[1 : 1 + 4 * 128].reshape(4, 128))

        def in_place(x):
            return x.at[4:8].set(reversed_rows(x[4:8]))

        print(f"jax {jax.__version__}")
        for function, shape in ((odd, (1024,)), (in_place, (16, 128))):
            x = jax.ShapeDtypeStruct(shape, "float32")
            hlo = offline_compile.optimized_hlo(function, (x,), offline_compile.CHIPS["h200"])
            (fusion,) = re.findall(r"^%dynamic-slice-fusion.*?^}", hlo, re.M | re.S)
            print(f"{function.__name__}:")
            fusion = re.sub(r", (?:operand_layout_constraints|metadata|sharding).*", "", fusion)
            print("\n".join(fusion.splitlines()[1:-1]))


if __name__ == "__main__":
    main()
