"""Shows that Pallas' GPU interpreter misses a race after waits for five later copies.

Needs only jax. docs/upstream.md explains the fault.
"""

import contextlib
import io

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

# jax names this function in its documentation, but does not export it.
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call


def finds_race(later_copies: int, **options: int) -> bool:
    """Returns whether the interpreter reports the race of the first copy with the last read."""

    def kernel(x, y, target, unrelated, never_awaited, awaited):
        plgpu.copy_gmem_to_smem(x, target, never_awaited)
        for _ in range(later_copies):
            plgpu.copy_gmem_to_smem(x, unrelated, awaited)
            plgpu.barrier_wait(awaited)
        y[...] = target[...]

    memory = plgpu.SMEM((128,), jnp.float32)
    run = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
        scratch_types=[memory, memory, plgpu.Barrier(), plgpu.Barrier()],
        interpret=plgpu.InterpretGPUParams(detect_races=True, **options),
    )
    # jax 0.11 prints a race; jax 0.12 raises an error.
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            run(jnp.zeros(128, jnp.float32)).block_until_ready()
        except RuntimeError as error:
            if "RACE DETECTED" not in str(error):
                raise
            interpret_pallas_call.reset_gpu_interpret_mode_state()
            return True
    return "RACE DETECTED" in printed.getvalue()


if __name__ == "__main__":
    print(f"jax {jax.__version__}; whether the race is found, with 1 to 8 later copies:")
    print("  by default                  ", [finds_race(n) for n in range(1, 9)])
    clocks = {"num_tma_threads_per_device": 64}
    print("  num_tma_threads_per_device=64", [finds_race(n, **clocks) for n in range(1, 9)])
