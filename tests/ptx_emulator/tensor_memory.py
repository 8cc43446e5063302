"""Tensor memory: its words, allocations, and who touched them last."""

from collections.abc import Callable

import numpy as np

from ptx_emulator.errors import EmulatorError, RaceError
from ptx_emulator.vector_clocks import MEMORY, TENSOR, Agents

# The warning about tensor memory whose order a barrier makes without tcgen05.fence.
NO_TENSOR_FENCES = "no tcgen05.fence"


class TensorMemory:
    """The tensor memory of one block: 128 lanes of 512 columns of 32 bits."""

    LANES, COLUMNS = 128, 512

    # How a message says what orders tcgen05 of different warps.
    FENCES = "tcgen05.fence::before_thread_sync, a barrier, tcgen05.fence::after_thread_sync"

    # A time that nobody knows of yet.
    PENDING = np.iinfo(np.int32).max

    def __init__(
        self,
        rank: int,
        agents: Agents,
        warps_of_a_block: int,
        excused: Callable[[str], bool] = lambda name: False,
    ):
        self.rank, self.agents, self.warps_of_a_block = rank, agents, warps_of_a_block
        # Whether a warning of this name is allowed.
        self.excused = excused
        self.words = np.full((self.LANES, self.COLUMNS), 0xFFFFFFFF, np.uint32)
        # First column -> (columns, cta_group) of what is allocated.
        self.allocated: dict[int, tuple[int, int]] = {}
        self.relinquished = False
        # Of each of these: which warp made it, when, and after how many arrivals at the cluster's
        # barrier. How often this block has executed each collective instruction for a pair.
        self.allocations: dict[int, tuple[int, int, int]] = {}
        self.collective: dict[str, int] = {}
        self.first_warp = rank * warps_of_a_block
        # When each warp read and wrote a column last, and which product wrote it and read it as its
        # first operand; whether a warp's tcgen05.ld of it has not been waited for.
        self.read_at = np.zeros((warps_of_a_block, self.COLUMNS), np.int32)
        self.written_at = np.zeros((warps_of_a_block, self.COLUMNS), np.int32)
        self.multiplied_at = np.zeros(self.COLUMNS, np.int32)
        self.operand_at = np.zeros(self.COLUMNS, np.int32)
        self.loading = np.zeros((warps_of_a_block, self.COLUMNS), bool)

    def check(self, first: int, columns: int, what: str) -> None:
        """Only allocated columns are touched."""
        for start, (length, _) in self.allocated.items():
            if start <= first and first + columns <= start + length:
                return
        raise EmulatorError(
            f"{what}: columns {first} to {first + columns - 1} of the tensor memory of block "
            f"{self.rank} are not allocated; allocated are {self.allocated}"
        )

    def free(self, columns: int) -> int | None:
        """The first column of a gap of so many columns; None if there is none."""
        begin = 0
        for start, (length, _) in sorted(self.allocated.items()):
            if start - begin >= columns:
                return begin
            begin = start + length
        return begin if begin + columns <= self.COLUMNS else None

    def loads(self, warp: int, time: int, columns: slice, clock: np.ndarray, what: str) -> None:
        """Notes a tcgen05.ld: it has to know that the products and other warps' stores are done."""
        own = warp - self.first_warp
        self._after_products(self.multiplied_at[columns], clock, "reads an accumulator", what)
        if self.written_at[own, columns].max() == self.PENDING:
            raise RaceError(f"{what} reads what a tcgen05.st without a tcgen05.wait::st wrote")
        self._after_warps(self.written_at, self._others(own), columns, clock, f"{what} reads")
        self.read_at[own, columns] = time
        self.loading[own, columns] = True

    def loaded(self, warp: int) -> None:
        """A warp has waited for its loads."""
        self.loading[warp - self.first_warp] = False

    def stores(self, warp: int, columns: slice, clock: np.ndarray, what: str) -> None:
        """Notes a tcgen05.st: products and other warps have to be done with what it overwrites."""
        own = warp - self.first_warp
        at = np.maximum(self.multiplied_at[columns], self.operand_at[columns])
        self._after_products(at, clock, "overwrites an operand", what)
        if self.loading[own, columns].any():
            raise RaceError(f"{what} overwrites what a tcgen05.ld without a tcgen05.wait::ld reads")
        for at in (self.read_at, self.written_at):
            self._after_warps(at, self._others(own), columns, clock, f"{what} writes")
        self.written_at[own, columns] = self.PENDING

    def stored(self, warp: int, time: int) -> None:
        """A warp has waited for its stores."""
        at = self.written_at[warp - self.first_warp]
        at[at == self.PENDING] = time

    def is_known(self, first: int, clock: np.ndarray) -> bool:
        """Whether a barrier orders this allocation before those who know this clock.

        A relaxed barrier of the cluster does, too: it orders execution.
        """
        agent, time, arrivals = self.allocations[first]
        barriers = clock[MEMORY][self.agents.cluster_barrier]
        return bool(clock[MEMORY][agent] >= time or barriers > arrivals)

    def frees(self, columns: slice, clock: np.ndarray) -> None:
        """Notes a tcgen05.dealloc: it has to know that nobody loads any more."""
        known = clock[MEMORY][self.first_warp : self.first_warp + self.warps_of_a_block]
        late = self.read_at[:, columns].max(1) > known
        if late.any():
            raise RaceError(
                f"tcgen05.dealloc in block {self.rank}, and nothing orders it after the tcgen05.ld "
                f"of warp {int(np.nonzero(late)[0][0])}"
            )

    def multiplies(self, sequence: int, columns: slice, clock: np.ndarray, what: str) -> None:
        """Notes a tcgen05.mma: it has to know that what it overwrites was loaded and stored."""
        every = np.arange(self.warps_of_a_block)
        for at in (self.read_at, self.written_at):
            self._after_warps(at, every, columns, clock, f"{what} writes an accumulator of")
        self.multiplied_at[columns] = sequence

    def multiplied_by(self, sequence: int, columns: slice, clock: np.ndarray, what: str) -> None:
        """Notes the first operand of a tcgen05.mma: it has to know that it was stored."""
        every = np.arange(self.warps_of_a_block)
        self._after_warps(self.written_at, every, columns, clock, f"{what} reads an operand of")
        self.operand_at[columns] = sequence

    def _others(self, own: int) -> np.ndarray:
        """The other warps that have the same lanes of tensor memory."""
        return np.array([w for w in range(own % 4, self.warps_of_a_block, 4) if w != own], int)

    def _after_products(self, at: np.ndarray, clock: np.ndarray, doing: str, what: str) -> None:
        core = self.agents.tensor_core
        if at.max() > clock[TENSOR][core] and not (
            at.max() <= clock[MEMORY][core] and self.excused(NO_TENSOR_FENCES)
        ):
            raise RaceError(
                f"{what} {doing} of block {self.rank}, and nothing orders it after the "
                "tcgen05.mma: a tcgen05.commit, a wait for its barrier and "
                "tcgen05.fence::after_thread_sync"
            )

    def _after_warps(self, at, warps: np.ndarray, columns: slice, clock, doing: str) -> None:
        """What these warps did to the columns is known."""
        if not len(warps):
            return
        done, agents = at[warps, columns].max(1), self.first_warp + warps
        late = done > clock[TENSOR][agents]
        if late.any() and not (
            (done <= clock[MEMORY][agents]).all() and self.excused(NO_TENSOR_FENCES)
        ):
            warp, name = warps[late][0], "ld" if at is self.read_at else "st"
            raise RaceError(
                f"{doing} block {self.rank} from column {columns.start} on, and nothing orders it "
                f"after the tcgen05.{name} of warp {warp}: tcgen05.wait::{name}, {self.FENCES}"
            )
