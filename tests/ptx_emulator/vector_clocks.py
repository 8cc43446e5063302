"""Vector clocks, which record the happens-before order of a cluster's actions.

Every agent of a cluster counts its own actions. An agent is

- a warp,
- the engine that reads shared memory for a warp's TMA stores,
- the engine that writes shared memory for a warp's cp.async,
- the tensor core,
- the barrier of the cluster,
- a warpgroup's wgmma,
- an mbarrier, which counts its phases and stands for the asynchronous copies that complete them.

A clock has one number for each agent: all of the agent's actions up to this number are ordered
before the holder of the clock. A clock has three rows:

MEMORY  the order of all actions on memory, except for tensor memory.
PROXY   the order of ordinary stores that a fence.proxy.async has made visible to the asynchronous
        proxy. A warp that fences another warp's stores passes this row on with its clock.
TENSOR  the order of actions on tensor memory (PTX ISA 9.7.16.6). The order of a barrier counts here
        only between tcgen05.fence::before_thread_sync and tcgen05.fence::after_thread_sync.
"""

import numpy as np

# Number of agents for the mbarriers of a cluster. Further mbarriers share these agents, which can
# hide races between the copies of two mbarriers with the same agent.
MBARRIER_AGENTS = 300

# The rows of a clock. The rows before TENSOR are always joined together.
MEMORY, PROXY, TENSOR = 0, 1, 2


class Agents:
    """The numbers of a cluster's agents, which begin with `warps` warps."""

    def __init__(self, warps: int):
        self.warps = warps
        self.tensor_core = 3 * warps
        self.cluster_barrier = self.tensor_core + 1
        self.first_warpgroup = self.cluster_barrier + 1
        self.first_mbarrier = self.first_warpgroup + -(-warps // 4)
        self.count = self.first_mbarrier + MBARRIER_AGENTS

    def store_engine(self, warp: int) -> int:
        """Returns the engine that reads shared memory for the TMA stores of a warp."""
        return self.warps + warp

    def copy_engine(self, warp: int) -> int:
        """Returns the engine that writes shared memory for the cp.async of a warp."""
        return 2 * self.warps + warp

    def wgmma(self, warp: int) -> int:
        """Returns the agent of the wgmma of a warp's warpgroup."""
        return self.first_warpgroup + warp // 4

    def mbarrier(self, number: int) -> int:
        """Returns the agent of the asynchronous copies that complete an mbarrier's phases."""
        return self.first_mbarrier + number % MBARRIER_AGENTS

    def generic_proxy_writers(self, first: int, warps: int) -> np.ndarray:
        """Returns the agents that write shared memory through the generic proxy for these warps."""
        own = np.arange(first, first + warps)
        return np.concatenate([own, 2 * self.warps + own])

    def clock(self) -> np.ndarray:
        """Makes a clock before which no action is ordered."""
        return np.zeros((3, self.count), np.int32)

    def describe(self, agent: int, warps_per_block: int) -> str:
        """Returns the name of an agent in error messages."""

        def name_warp(warp):
            return f"block {warp // warps_per_block}, warp {warp % warps_per_block}"

        if agent < self.warps:
            return name_warp(agent)
        if agent < 2 * self.warps:
            return f"the TMA stores of {name_warp(agent - self.warps)}"
        if agent < self.tensor_core:
            return f"the cp.async of {name_warp(agent - 2 * self.warps)}"
        if agent == self.tensor_core:
            return "the tensor core"
        if agent == self.cluster_barrier:
            return "the cluster's barrier"
        if agent < self.first_mbarrier:
            first = 4 * (agent - self.first_warpgroup)
            return f"wgmma of {name_warp(first)} and the 3 warps after it"
        return "an asynchronous copy whose mbarrier was not waited for"


def join(clock: np.ndarray, other: np.ndarray) -> None:
    """Also orders the holder of `clock` after all actions that are ordered before `other`."""
    np.maximum(clock, other, out=clock)
