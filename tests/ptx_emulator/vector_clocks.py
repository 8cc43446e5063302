"""Who knows of what: vector clocks of everything in a cluster that acts on its own.

An agent is a warp, the engine that reads shared memory for a warp's TMA stores, the one that writes
it for a warp's cp.async, the tensor core, the cluster's barrier, a warpgroup's wgmma, or an
mbarrier, for the asynchronous copies of each of its phases. A clock has one number for each agent:
up to which of its actions one is ordered after it.

A clock has three rows. MEMORY is what was said above. PROXY says the same of those ordinary stores
that a fence.proxy.async has made visible to TMA and the tensor cores: who fences what others stored
tells it on like everything else. Tensor memory has an order of its own (PTX ISA 9.7.16.6): what a
barrier orders counts there only between tcgen05.fence::before_thread_sync and ::after_thread_sync.
"""

import numpy as np

# A cluster's barriers beyond this many share numbers, which can hide races among them.
BARRIERS = 300

# The rows of a clock; those before TENSOR are told on together.
MEMORY, PROXY, TENSOR = 0, 1, 2


class Agents:
    """The numbers of the agents of a cluster."""

    def __init__(self, warps: int):
        self.warps = warps
        self.tensor_core = 3 * warps
        self.cluster_barrier = self.tensor_core + 1
        self.first_warpgroup = self.cluster_barrier + 1
        self.first_barrier = self.first_warpgroup + -(-warps // 4)
        self.count = self.first_barrier + BARRIERS

    def store_engine(self, warp: int) -> int:
        """The engine that reads shared memory for the TMA stores of a warp."""
        return self.warps + warp

    def copy_engine(self, warp: int) -> int:
        """The engine that writes shared memory for the cp.async of a warp."""
        return 2 * self.warps + warp

    def wgmma(self, warp: int) -> int:
        """The wgmma of a warp's warpgroup."""
        return self.first_warpgroup + warp // 4

    def barrier(self, number: int) -> int:
        """The copies that arrive at a barrier."""
        return self.first_barrier + number % BARRIERS

    def storing(self, first: int, warps: int) -> np.ndarray:
        """Whoever stores to shared memory by ordinary stores, among these warps."""
        own = np.arange(first, first + warps)
        return np.concatenate([own, 2 * self.warps + own])

    def clock(self) -> np.ndarray:
        """A clock that knows of nothing."""
        return np.zeros((3, self.count), np.int32)

    def name(self, agent: int, warps_of_a_block: int) -> str:
        """What an agent is called in a message."""

        def place(warp):
            return f"block {warp // warps_of_a_block}, warp {warp % warps_of_a_block}"

        if agent < self.warps:
            return place(agent)
        if agent < 2 * self.warps:
            return f"the TMA stores of {place(agent - self.warps)}"
        if agent < self.tensor_core:
            return f"the cp.async of {place(agent - 2 * self.warps)}"
        if agent == self.tensor_core:
            return "the tensor core"
        if agent == self.cluster_barrier:
            return "the cluster's barrier"
        if agent < self.first_barrier:
            return f"wgmma of {place(4 * (agent - self.first_warpgroup))} to 3 more"
        return "an asynchronous copy for whose barrier nobody waited"


def learn(clock: np.ndarray, other: np.ndarray) -> None:
    """`clock` is ordered after all that `other` is ordered after."""
    np.maximum(clock, other, out=clock)
