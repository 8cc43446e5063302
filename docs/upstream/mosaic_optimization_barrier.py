"""Shows that lax.optimization_barrier in Mosaic GPU permutes the words of 16-bit vectors.

Compiles a kernel that copies its operand for Hopper, without a GPU, and executes the PTX in the
emulator of this repository. Needs the extra `codegen`. docs/upstream.md explains the fault.
"""

import re
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import offline_compile

# 128 threads with two vectors of 8 bfloat16 values each: more than one vector of more than one
# 32-bit word.
LENGTH, VECTOR = 2048, 8


def compile_copy(stem: Path) -> None:
    """Compiles the kernel, and writes what the emulator needs of it."""
    with offline_compile.compiler():
        import jax
        import jax.experimental.pallas.mosaic_gpu as plgpu
        import jax.numpy as jnp
        from jax import lax

        def kernel(x, y):
            values = plgpu.layout_cast(x[...], plgpu.Layout.WG_STRIDED((LENGTH,), VECTOR))
            y[...] = lax.optimization_barrier(values)

        array = jax.ShapeDtypeStruct((LENGTH,), jnp.bfloat16)
        semantics = plgpu.LoweringSemantics.Warpgroup
        copy = plgpu.kernel(
            kernel,
            out_type=array,
            compiler_params=plgpu.CompilerParams(lowering_semantics=semantics),
        )
        offline_compile.dump_kernel(copy, (array,), offline_compile.CHIPS["h200"], stem)
        print(f"jax {jax.__version__}")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        stem = Path(name, "copy")
        compile_copy(stem)
        for line in re.findall(r"(?:ld|st)\.global\.v4.*", stem.with_suffix(".ptx").read_text()):
            print(" ", line)

        import ml_dtypes
        import numpy as np

        from tests.ptx_emulator import mosaic

        x = np.arange(LENGTH).astype(np.uint16).view(ml_dtypes.bfloat16)
        machine, (address,) = mosaic.prepare(stem, [x], [(x.shape, x.dtype)])
        machine.launch()
        y = machine.memory.read(address, x.shape, x.dtype).view(np.uint16)
    wrong = y != x.view(np.uint16)
    print(f"  {wrong.sum()} of {LENGTH} elements are not copied; the first 8 come from {y[:8]}")


if __name__ == "__main__":
    main()
