"""Runs kernels in Pallas' GPU interpreter, with race detection."""

import concurrent.futures
import contextlib
import io
import threading
import types
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory

from pallas_patch_embed.base.problem import LEVELS, Epilogue, Problem, padded
from tests.operator.planned import compute


def draw_operands(seed, patches, N, dtype, table):
    """Draws operands whose product, scaling and sum are exact in float32, in any order."""
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


def draw_epilogue(seed, patches, N, epilogue):
    """Draws the operands of an epilogue for `draw_operands`, with which the result stays exact."""
    rng = np.random.default_rng(seed)
    rows = patches[:-1]
    drawn = dict(
        row_scale=jnp.asarray(np.exp2(rng.integers(-2, 3, rows)), jnp.float32),
        residual=jnp.asarray(rng.integers(-200, 200, (*rows, N)) / 4, jnp.bfloat16),
        # Many results are in the middle of two integers, and many are clipped.
        factor=jnp.asarray(np.exp2(rng.integers(-8, -5, N)), jnp.float32),
        shift=jnp.asarray([-3], jnp.float32),
        layer=jnp.asarray([1], jnp.int32),
    )
    return tuple(drawn[name] for name in Epilogue(*epilogue).operands)


def stack_parts(parts, epilogue):
    """Stacks the parameters of operands: of all layers' parts, which are in their order."""
    names, number = ("patches", "weight", "scale", "table"), Epilogue(*epilogue).parts
    names += Epilogue(*epilogue).operands
    stacked = ("weight", "scale", "table", *LEVELS)
    return tuple(
        jnp.stack(values).reshape(-1, number, *values[0].shape) if name in stacked else values[0]
        for name, values in zip(names, zip(*parts), strict=True)
    )


def check_wgmma(monkeypatch):
    """Makes the interpreter check wgmma's reads for races, which it does not do by itself."""
    wgmma = gpu_callbacks.wgmma

    def checked(*, thread, source_info=None, **named):
        memory = gpu_callbacks._get_shared_memory()
        with memory.lock:
            # A read by the asynchronous proxy advances both its clock and the thread's.
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


class Watch:
    """Detects a deadlock of all threads of a kernel, without a clock.

    A thread that waits registers a function `blocked()`, whose result only another thread can make
    false. When every running thread is blocked, none of them can ever continue.
    """

    def __init__(self):
        self.lock = threading.Lock()
        # The first thread starts all other threads.
        self.threads, self.waiting = 1, {}
        self.begun, self.deadlock = False, False

    def check(self):
        """Fails the kernel if every thread is blocked. Threads call it before they wait or end."""
        with self.lock:
            if self.deadlock or self.threads != len(self.waiting):
                return
            self.deadlock = all(blocked() for blocked in self.waiting.values())
        if self.deadlock:
            memory = gpu_callbacks._get_shared_memory()
            memory.set_failed(TimeoutError("deadlock"), top_level=False)

    @contextlib.contextmanager
    def wait(self, blocked):
        """Returns a context in which a thread waits until blocked() is false."""
        me = threading.get_ident()
        with self.lock:
            self.waiting[me] = blocked
        self.check()
        try:
            yield
        finally:
            with self.lock:
                del self.waiting[me]


def calling(function, original):
    """Returns a replacement for `original` that calls `function` with `original` first."""
    return lambda *arguments, **named: function(original, *arguments, **named)


# The watch of the kernel that is being interpreted. It is global because programs in JAX's cache
# also need the current one.
watch = Watch()


class Threads(concurrent.futures.ThreadPoolExecutor):
    """Registers the interpreter's threads with the watch; the thread that starts them waits."""

    def __init__(self, max_workers):
        super().__init__(max_workers)
        self.left = max_workers
        self.starter = watch.wait(lambda: self.left > 0)
        with watch.lock:
            watch.threads += max_workers
            watch.begun = True

    def __enter__(self):
        self.starter.__enter__()
        return super().__enter__()

    def __exit__(self, *error):
        try:
            super().__exit__(*error)
        finally:
            self.starter.__exit__(None, None, None)

    def submit(self, function, /, *arguments, **_):
        def run():
            try:
                function(*arguments)
            finally:
                with watch.lock:
                    self.left -= 1
                    watch.threads -= 1
                watch.check()

        return super().submit(run)


def _wait_at_barrier(original, self, thread, *arguments, **named):
    phases = self.last_observed_phase_by_thread
    # A warp has observed the phases that its warpgroup had observed.
    of = [thread, thread.warpgroup()] if isinstance(thread, shared_memory.Warp) else [thread]
    seen = next((phases[one] for one in of if one in phases), 0)
    with watch.wait(lambda: self.phase == seen and not self.aborted):
        return original(self, thread, *arguments, **named)


@contextlib.contextmanager
def watched():
    """Makes the interpreter's threads report to a new `watch` when they wait."""
    global watch
    watch = Watch()
    wait = calling(_wait_at_barrier, shared_memory.Barrier.wait)
    with (
        mock.patch.object(thread_map, "futures", types.SimpleNamespace(ThreadPoolExecutor=Threads)),
        mock.patch.object(shared_memory.Barrier, "wait", wait),
    ):
        yield watch


# Number of entries for asynchronous operations in the interpreter's vector clocks, more than any
# kernel of the tests issues. Two operations that share an entry can look ordered when they are not,
# which hides a race.
ASYNCHRONOUS = 1024


def interpreted(backend, operands, out_dtype, target, config, **choices):
    """Returns the result of a kernel; fails after a race, which is printed, or a deadlock.

    Args:
      backend: the kernel's backend.
      operands: patches, weight, scale, table, and those of the epilogue.
      out_dtype: dtype of the result.
      target: the chip.
      config: the kernel's config.
      choices: further arguments of `compute`.
    """
    with watched() as watch, contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            y = compute(
                backend,
                *operands,
                out_dtype=out_dtype,
                target=target,
                config=config,
                **choices,
                interpret=plgpu.InterpretGPUParams(
                    detect_races=True, num_tma_threads_per_device=ASYNCHRONOUS
                ),
            )
            jax.block_until_ready(y)
        except Exception as error:
            if watch.deadlock:
                raise TimeoutError("deadlock: all threads wait for each other") from error
            raise
    assert watch.begun, "none of the interpreter's threads has begun"
    assert "RACE" not in printed.getvalue(), printed.getvalue()
    return y


def problem_of(shape, dtype, B=8, out_dtype="bfloat16"):
    """Returns the problem of B images of a named shape; NaFlex has a table for every image."""
    K = padded(shape.K)
    table = (B, shape.S, shape.N) if shape.name.startswith("NaFlex") else (shape.S, shape.N)
    return Problem((B, shape.S, K), (shape.N, K), (shape.N,), table, dtype, "bfloat16", out_dtype)
