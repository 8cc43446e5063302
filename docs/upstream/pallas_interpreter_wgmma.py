"""Shows that Pallas' GPU interpreter does not check the reads of wgmma for races.

Needs only jax. docs/upstream.md explains the fault.
"""

import contextlib
import functools
import io

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

# jax names this function in its documentation, but does not export it.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


def kernel(x, y, a, arrived, *, operation: str):
    """Copies x to shared memory and uses it before it waits for the copy."""
    plgpu.copy_gmem_to_smem(x, a, arrived)

    def multiply(accumulator):
        plgpu.wgmma(accumulator, a, a.T)
        plgpu.wgmma_wait(0)
        return accumulator[...]

    if operation == "wgmma":
        y[...] = pl.run_scoped(multiply, plgpu.ACC((64, 64), jnp.float32))
    else:
        y[...] = a[...].astype(jnp.float32)
    plgpu.barrier_wait(arrived)


def finds_race(operation: str) -> bool:
    """Returns whether the interpreter reports that the operation races with the copy."""
    tiles = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    run = plgpu.kernel(
        functools.partial(kernel, operation=operation),
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types=[plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiles), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    # jax 0.11 prints a race; jax 0.12 raises an error.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run(jnp.ones((64, 64), jnp.bfloat16)).block_until_ready()
        except RuntimeError as error:
            if "RACE DETECTED" not in str(error):
                raise
            interpret_pallas_call.reset_gpu_interpret_mode_state()
            return True
    return "RACE DETECTED" in printed.getvalue()


if __name__ == "__main__":
    print(f"jax {jax.__version__}; whether the race is found:")
    for operation in ("ordinary load", "wgmma"):
        print(f"  {operation}: {finds_race(operation)}")
