"""Adds Blackwell's operations of two thread blocks to Pallas' GPU interpreter.

  copy_gmem_to_smem, partitioned  each block copies its part; the bytes of both blocks count at the
                                  barrier of the first block, the leader.
  tcgen05_mma, collective         the leader multiplies for both blocks: its product reads the
                                  patches of each block and the weight of both, writes both
                                  accumulators, and arrives at the barriers of both.
  tcgen05_commit_arrive           arrives at the barriers of both blocks.

Reads and writes go through the interpreter's own checks and vector clocks. One check is added:
tensor memory may only be handed over at a barrier that orders the tensor core. Operations that are
not listed above raise an exception.

The semantics are those of the PTX ISA for tcgen05 with .cta_group::2.
"""

import dataclasses
import functools
import threading
import time
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jax._src import callback
from jax._src.pallas.mosaic_gpu import core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret, shared_memory

from tests.kernels import interpreter
from tests.kernels.interpreter import calling

BLOCKS = 2
LEADER = 0

# Versions of jax whose interpreter has the internals that these functions replace.
KNOWN_VERSIONS = ("0.11.2", "0.12.0")
KNOWN = ".".join(jax.__version__.split(".")[:3]) in KNOWN_VERSIONS
UNKNOWN = f"the interpreter of jax {jax.__version__} is not among {KNOWN_VERSIONS}"

Key = gpu_callbacks.HostAllocationKey
SMEM = shared_memory.IDX_BY_GPU_MEMORY_SPACE[core.MemorySpace.SMEM]

# Threads that have read tensor memory and have not yet arrived at a barrier that orders it.
READERS = set()
READERS_LOCK = threading.Lock()


def of_block(key, block):
    """Returns the key of the same allocation in another block of the cluster."""
    return dataclasses.replace(key, block_id=block)


def allocated(memory, key):
    """Returns an allocation; waits until its block has made it.

    On hardware all barriers of a cluster exist when it starts.
    """
    with interpreter.watch.wait(lambda: key not in memory.mem):
        while True:
            memory.check_failed()
            with memory.lock:
                if key in memory.mem:
                    return memory.mem[key]
            time.sleep(0.0005)


def part_of(access, axis, block):
    """Returns a block's half of an access to global memory, along an axis of the value."""
    axis = axis if access.permutation is None else access.permutation[axis]
    ranges = list(access.range)
    position = [i for i, r in enumerate(ranges) if isinstance(r, slice)][axis]
    whole = ranges[position]
    size = (whole.stop - whole.start) // BLOCKS
    begin = whole.start + block * size
    ranges[position] = slice(begin, begin + size, whole.step)
    return dataclasses.replace(access, range=tuple(ranges))


def ordered_barrier(memory, key):
    """Returns a barrier; raises ValueError if it does not order the tensor core."""
    barrier = allocated(memory, key)
    if not isinstance(barrier, shared_memory.Barrier) or not barrier.orders_tensor_core:
        raise ValueError("tcgen05 arrives only at a Barrier with orders_tensor_core=True.")
    return barrier


@gpu_callbacks.fail_on_exception
def partitioned_copy(
    *, token, mesh_location, thread, source, target, barrier_key, axis, source_info
):
    """Copies one block's part; the copy arrives at the leader's barrier."""
    memory = gpu_callbacks._get_shared_memory()
    clock = memory.incr_clock(thread) if memory.detect_races else None

    def place(key, transforms):
        key = Key.from_array(key)
        transforms = gpu_callbacks._remove_noop_transforms(transforms)
        return key, memory.access(key, jax.tree.map(int, transforms))

    source_key, source_access = place(*source)
    target_key, target_access = place(*target)
    part = part_of(source_access, axis, thread.block_id)
    if part.shape != target_access.shape:
        raise ValueError(f"a part of shape {part.shape} is copied to {target_access.shape}.")
    leaders = of_block(Key.from_array(barrier_key), LEADER)
    barrier = allocated(memory, leaders)
    with barrier.cv:
        if not hasattr(barrier, "arrivals_of_a_block"):
            # The barrier expects a copy from each block.
            barrier.arrivals_of_a_block = barrier.num_arrivals
            barrier.num_arrivals *= BLOCKS
    memory.execute_async_task(
        gpu_callbacks.AsyncCopyGmemToSmemTask(
            mesh_location=mesh_location,
            thread=thread,
            src_allocation_key=source_key,
            src_access=part,
            dst_allocation_key=target_key,
            dst_access=target_access,
            barrier_allocation_key=leaders,
            source_info=source_info,
            clock=clock,
        )
    )
    return token


def interpret_copy(original, self, eqn, token, get_invals):
    """Interprets copy_gmem_to_smem, partitioned or not."""
    params = eqn.params
    if params["collective_axes"] is None:
        return original(self, eqn, token, get_invals)
    if not isinstance(partition := params["leader_tracked"], plgpu.CopyPartition.PARTITIONED):
        raise NotImplementedError(
            "collective copies are interpreted only if they are partitioned, not multicast."
        )
    trees = [params[f"{name}_transforms_treedef"] for name in ("src", "dst", "barrier")]
    (source, target, barrier), *flat = jaxpr_interpret.split_list(
        get_invals(), [3, *(tree.num_leaves for tree in trees[:2])]
    )
    ends = [
        jaxpr_interpret.resolve_ref(variable.aval, value, jax.tree.unflatten(tree, leaves))
        for variable, value, tree, leaves in zip(eqn.invars, (source, target), trees, flat)
    ]
    copy = functools.partial(partitioned_copy, axis=partition.axis, source_info=eqn.source_info)
    token = callback.io_callback(
        copy,
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        mesh_location=self.mesh_location,
        thread=self.thread,
        source=ends[0],
        target=ends[1],
        barrier_key=jaxpr_interpret._get_barrier_allocation_key_from_inval(
            barrier, trees[2], flat[2]
        ),
    )
    return token, []


def multiply(original, self, pipeline_clock, tma_thread_id):
    """Interprets TcGen05Mma, for both blocks if it is collective."""
    if self.collective_axis is None:
        return original(self, pipeline_clock, tma_thread_id)
    if self.a_scale_key or self.b_scale_key or self.a_sparse_metadata_key:
        raise NotImplementedError("scales and sparse metadata are not interpreted.")
    if self.thread.block_id != LEADER:
        raise ValueError("only the leader may issue a collective product.")
    memory = gpu_callbacks._get_shared_memory()
    log = shared_memory.GPULoggingInfo(self.mesh_location, self.thread, self.source_info)
    clock: Any = None
    if memory.detect_races:
        clock = memory.get_clock(self.thread)
        if pipeline_clock is not None:
            clock.update(pipeline_clock)
        clock.inc(tma_thread_id)

    def read(key, access):
        allocated(memory, key)
        value, _, _ = memory.get_buffer_content(key, access, None, logging_info=log)
        if clock is not None:
            proxy = clock.async_smem_clock if key.memory_space_id == SMEM else clock.generic_clock
            gpu_callbacks.get_races().check_read(
                self.thread, proxy, key, access, source_info=self.source_info
            )
        return value

    blocks = range(BLOCKS)
    b = np.concatenate([read(of_block(self.b_key, i), self.b_access) for i in blocks], axis=1)
    dtype = memory.buffer_shape_and_dtype(self.acc_key).dtype
    for i in blocks:
        a = read(of_block(self.a_key, i), self.a_access)
        key = of_block(self.acc_key, i)
        allocated(memory, key)
        result = np.matmul(a.astype(dtype), b.astype(dtype))
        if self.accumulate:
            before, _, _ = memory.get_buffer_content(key, self.acc_access, None, logging_info=log)
            result = before + result
        memory.store_buffer_content(
            key, self.acc_access, result, self.thread, increment_clock=False, logging_info=log
        )
        if clock is not None:
            gpu_callbacks.get_races().check_write(
                self.thread,
                clock.generic_clock,
                key,
                self.acc_access,
                source_info=self.source_info,
            )
    if self.barrier_key:
        for i in blocks:
            ordered_barrier(memory, of_block(self.barrier_key, i)).arrive(self.thread, clock, log)
    return clock.copy() if clock is not None else None


@gpu_callbacks.fail_on_exception
def commit_to_both(
    *, token, mesh_location, thread, barrier_key_as_array, collective_axis, source_info
):
    """Interprets tcgen05_commit_arrive at the barriers of both blocks."""
    memory = gpu_callbacks._get_shared_memory()
    if memory.detect_races:
        memory.incr_clock(thread)
    clock = memory.get_clock(thread)
    if clock is not None and (done := memory.get_tcgen05_async_clock(thread)) is not None:
        clock.update(done)
    log = shared_memory.GPULoggingInfo(mesh_location, thread, source_info)
    key = Key.from_array(barrier_key_as_array)
    for i in range(BLOCKS):
        ordered_barrier(memory, of_block(key, i)).arrive(thread, clock, log)
    return token


def commit(original, *, collective_axis=None, **arguments):
    """Interprets tcgen05_commit_arrive, collective or not."""
    if collective_axis is None:
        return original(**arguments)
    return commit_to_both(collective_axis=collective_axis, **arguments)


def load(original, *, thread, **arguments):
    """Interprets async_load_tmem; records that its thread has read tensor memory."""
    with READERS_LOCK:
        READERS.add(thread)
    return original(thread=thread, **arguments)


@gpu_callbacks.fail_on_exception
def hand_over(*, token, thread, ordered):
    """Refuses an arrival that would hand over tensor memory without ordering it."""
    with READERS_LOCK:
        if thread in READERS and not ordered:
            raise ValueError("tensor memory is handed over at a barrier that does not order it.")
        READERS.discard(thread)
    return token


def interpret_arrive(original, self, eqn, token, get_invals):
    """Interprets barrier_arrive of a thread that may have read tensor memory."""
    barrier = eqn.invars[0].aval.inner_aval.dtype
    token = callback.io_callback(
        functools.partial(hand_over, ordered=barrier.orders_tensor_core),
        gpu_callbacks.TOKEN_SHAPE_DTYPE,
        token=token,
        thread=self.thread,
    )
    return original(self, eqn, token, get_invals)


def install(monkeypatch):
    """Installs these replacements until the test ends."""
    READERS.clear()
    for owner, name, function in (
        (jaxpr_interpret.JaxprInterpreter, "_interpret_copy_gmem_to_smem_p", interpret_copy),
        (gpu_callbacks.TcGen05Mma, "__call__", multiply),
        (jaxpr_interpret.JaxprInterpreter, "_interpret_barrier_arrive_p", interpret_arrive),
    ):
        monkeypatch.setattr(owner, name, calling(function, getattr(owner, name)))
    for name, function in (("tcgen05_commit_arrive", commit), ("async_load_tmem", load)):
        original = getattr(gpu_callbacks, name)
        monkeypatch.setattr(gpu_callbacks, name, functools.partial(function, original))
