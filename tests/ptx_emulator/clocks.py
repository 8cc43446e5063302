"""Who knows of what: vector clocks of everything in a cluster that acts on its own.

An agent is a warp, the engine that reads shared memory for a warp's TMA stores, the one that writes
it for a warp's cp.async, the tensor core, a warpgroup's wgmma, or a barrier, for the asynchronous
copies of each of its phases. A clock has one number for each agent: up to which of its actions one
is ordered after it.

Tensor memory has an order of its own (PTX ISA 9.7.16.6): what a barrier orders counts there only
between tcgen05.fence::before_thread_sync and ::after_thread_sync. So a clock has two rows.
"""

import numpy as np

# A cluster's barriers beyond this many share numbers, which can hide races among them.
BARRIERS = 300

# The rows of a clock.
MEMORY, TENSOR = 0, 1


class Agents:
    """The numbers of the agents of a cluster."""

    def __init__(self, warps: int):
        self.warps = warps
        self.tensor_core = 3 * warps
        self.first_warpgroup = self.tensor_core + 1
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

    def clock(self) -> np.ndarray:
        """A clock that knows of nothing."""
        return np.zeros((2, self.count), np.int32)

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
        if agent < self.first_barrier:
            return f"wgmma of {place(4 * (agent - self.first_warpgroup))} to 3 more"
        return "an asynchronous copy for whose barrier nobody waited"


def learn(clock: np.ndarray, other: np.ndarray) -> None:
    """`clock` is ordered after all that `other` is ordered after."""
    np.maximum(clock, other, out=clock)
