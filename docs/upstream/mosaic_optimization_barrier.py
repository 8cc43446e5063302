"""Shows that lax.optimization_barrier in Mosaic GPU permutes the words of 16-bit vectors.

Compiles a kernel that copies its operand for Hopper, without a GPU, and executes the PTX in the
emulator of this repository. Needs the extra `codegen`. docs/upstream.md explains the fault.
"""

import re
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import offline_compile

# 128 threads with two vectors of 8 bfloat16 values each: more than one vector of more than one
# 32-bit word.
LENGTH, VECTOR = 2048, 8


def compile_copy(folder: Path) -> Path:
    """Compiles the kernel; returns the path of its PTX."""
    with offline_compile.compiler() as dumped:
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
        offline_compile.compile_offline(copy, (array,), offline_compile.CHIPS["h200"], dumped)
        for path in dumped.iterdir():
            if path.suffix in (".ptx", ".log"):
                shutil.copy(path, folder / path.name.replace(".mlir-passes", ""))
        print(f"jax {jax.__version__}")
    (ptx,) = folder.glob("*.ptx")
    return ptx


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        ptx = compile_copy(Path(name))
        for line in re.findall(r"(?:ld|st)\.global\.v4.*", ptx.read_text()):
            print(" ", line)

        import ml_dtypes
        import numpy as np

        from tests.ptx_emulator import mosaic

        x = np.arange(LENGTH).astype(np.uint16).view(ml_dtypes.bfloat16)
        machine, (address,) = mosaic.prepare(ptx.with_suffix(""), [x], [(x.shape, x.dtype)])
        machine.launch()
        y = machine.memory.read(address, x.shape, x.dtype).view(np.uint16)
    wrong = y != x.view(np.uint16)
    print(f"  {wrong.sum()} of {LENGTH} elements are not copied; the first 8 come from {y[:8]}")


if __name__ == "__main__":
    main()
