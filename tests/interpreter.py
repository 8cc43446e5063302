"""Kernels in Pallas' GPU interpreter, with race detection."""

import contextlib
import io
import threading
import time

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

from pallas_patch_embed.problem import Problem, padded


def draw_operands(seed, patches, N, dtype, table):
    """Operands whose product, scale and sum are exact in float32, in any order."""
    rng = np.random.default_rng(seed)
    low, high = (-128, 128) if dtype == "int8" else (-8, 9)
    *leading, S, K = patches
    positions = {"shared": (S, N), "per image": (*leading, S, N), "none": (N,)}[table]
    table_dtype = jnp.float32 if table == "none" else jnp.bfloat16
    return (
        jnp.asarray(rng.integers(low, high, patches).astype(dtype)),
        jnp.asarray(rng.integers(low + 1, high, (N, K)).astype(dtype)),
        jnp.asarray(np.exp2(rng.integers(-3, 3, N)), jnp.float32),
        jnp.asarray(rng.integers(-200, 200, positions) / 4, table_dtype),
    )


def check_wgmma(monkeypatch):
    """Lets the interpreter check what wgmma reads for races, which it does not by itself."""
    wgmma = gpu_callbacks.wgmma

    def checked(*, thread, source_info=None, **named):
        memory = gpu_callbacks._get_shared_memory()
        with memory.lock:
            # A read by the asynchronous proxy is an event of both its clock and the thread's.
            memory.clocks[thread].inc(memory.thread_to_vc_position(thread))
            clock = memory.clocks[thread].copy()
        for operand in "ab":
            key = gpu_callbacks.HostAllocationKey.from_array(
                named[f"{operand}_allocation_key_as_array"]
            )
            transforms = gpu_callbacks._remove_noop_transforms(named[f"{operand}_transforms"])
            access = memory.access(key, jax.tree.map(int, transforms))
            gpu_callbacks.get_races().check_read(
                thread, clock.async_smem_clock, key, access, source_info=source_info
            )
        return wgmma(thread=thread, source_info=source_info, **named)

    monkeypatch.setattr(gpu_callbacks, "wgmma", checked)


# Seconds in which nothing was computed, after which all threads wait for each other, and seconds
# after which it takes too long.
IDLE, PATIENCE = 1, 120


def interpreted(run, operands, out_dtype, config):
    """What a kernel gives; fails if there was a race, which the interpreter prints, or a deadlock.

    Args:
      run: of the kernel's module.
      operands: patches, weight, scale, table.
      out_dtype: of the result.
      config: of the kernel.
    """

    done, given_up = threading.Event(), threading.Event()

    def watch():
        begin, computed = time.monotonic(), time.process_time()
        while not done.wait(IDLE):
            before, computed = computed, time.process_time()
            if computed - before < 0.05 * IDLE or time.monotonic() - begin > PATIENCE:
                given_up.set()
                gpu_callbacks._get_shared_memory().set_failed(TimeoutError())
                return

    threading.Thread(target=watch, daemon=True).start()
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            y = run(
                *operands,
                out_dtype=out_dtype,
                config=config,
                interpret=plgpu.InterpretGPUParams(detect_races=True),
            ).block_until_ready()
    except Exception as error:
        if given_up.is_set():
            raise TimeoutError("deadlock: all threads wait, or it takes too long") from error
        raise
    finally:
        done.set()
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    return y


def problem_of(shape, dtype, B=8, out_dtype="bfloat16"):
    """The problem of B images of a named shape; NaFlex has a table for every image."""
    K = padded(shape.K)
    table = (B, shape.S, shape.N) if shape.name.startswith("NaFlex") else (shape.S, shape.N)
    return Problem((B, shape.S, K), (shape.N, K), (shape.N,), table, dtype, "bfloat16", out_dtype)
