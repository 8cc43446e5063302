"""Tensor memory: its words, its allocations, and the last accesses to it."""

from collections.abc import Callable

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, RaceError
from tests.ptx_emulator.vector_clocks import MEMORY, TENSOR, Agents

# Name of the warning that a barrier orders accesses to tensor memory without the tcgen05.fence that
# the ISA requires.
NO_TCGEN05_FENCE = "no tcgen05.fence"


class TensorMemory:
    """The tensor memory of one block: 128 lanes of 512 columns of 32 bits."""

    LANES, COLUMNS = 128, 512

    # The instructions that order tcgen05 instructions of different warps, for error messages.
    FENCES = "tcgen05.fence::before_thread_sync, a barrier, tcgen05.fence::after_thread_sync"

    # The time of a store that has not been waited for, which is later than all times in clocks.
    PENDING = np.iinfo(np.int32).max

    def __init__(
        self,
        rank: int,
        agents: Agents,
        warps_per_block: int,
        allows: Callable[[str], bool] = lambda name: False,
    ):
        self.rank, self.agents, self.warps_per_block = rank, agents, warps_per_block
        # Function that returns whether the machine allows a warning.
        self.allows = allows
        self.words = np.full((self.LANES, self.COLUMNS), 0xFFFFFFFF, np.uint32)
        # First column of each allocation -> its numbers of columns and of blocks (cta_group).
        self.allocated: dict[int, tuple[int, int]] = {}
        self.relinquished = False
        # First columns of the allocations that this block and its peer share, by their number. The
        # first block of the pair has them.
        self.shared_starts: dict[int, int] = {}
        # First column of each allocation -> the warp that made it, the warp's time, and the number
        # of the warp's earlier arrivals at the cluster's barrier.
        self.allocations: dict[int, tuple[int, int, int]] = {}
        # Number of times that this block has executed each collective instruction of a pair.
        self.collective_counts: dict[str, int] = {}
        self.first_warp = rank * warps_per_block
        # The times at which each warp last read and wrote each column.
        self.read_at = np.zeros((warps_per_block, self.COLUMNS), np.int32)
        self.written_at = np.zeros((warps_per_block, self.COLUMNS), np.int32)
        # The last tcgen05.mma that wrote each column, and the last one that read it as its first
        # operand.
        self.accumulated_at = np.zeros(self.COLUMNS, np.int32)
        self.operand_at = np.zeros(self.COLUMNS, np.int32)
        # Whether each warp has a tcgen05.ld for which it has not waited.
        self.load_pending = np.zeros((warps_per_block, self.COLUMNS), bool)

    def check_allocated(self, first: int, columns: int, description: str) -> None:
        """Raises an error if an access includes columns that are not allocated."""
        for start, (length, _) in self.allocated.items():
            if start <= first and first + columns <= start + length:
                return
        raise EmulatorError(
            f"{description}: columns {first} to {first + columns - 1} of the tensor memory of "
            f"block {self.rank} are not allocated; allocated are {self.allocated}"
        )

    def free_starts(self, columns: int) -> set[int]:
        """Returns the columns from which `columns` consecutive ones are free.

        They are multiples of `columns`, a power of two, so that smaller allocations always fit
        between larger ones.
        """
        taken = set[int]()
        for start, (length, _) in self.allocated.items():
            taken |= {*range(start, start + length)}
        starts = range(0, self.COLUMNS, columns)
        return {start for start in starts if taken.isdisjoint(range(start, start + columns))}

    def record_load(
        self, warp: int, time: int, columns: slice, clock: np.ndarray, description: str
    ) -> None:
        """Checks and records a tcgen05.ld.

        It must be ordered after the products and the other warps' stores that wrote the columns.
        """
        own = warp - self.first_warp
        accumulated = self.accumulated_at[columns]
        self._check_products(accumulated, clock, "reads an accumulator", description)
        if self.written_at[own, columns].max() == self.PENDING:
            raise RaceError(
                f"{description} reads what a tcgen05.st without a tcgen05.wait::st wrote"
            )
        others = self._other_warps_of_quarter(own)
        self._check_warps(self.written_at, others, columns, clock, f"{description} reads")
        self.read_at[own, columns] = time
        self.load_pending[own, columns] = True

    def complete_loads(self, warp: int) -> None:
        """Records a tcgen05.wait::ld."""
        self.load_pending[warp - self.first_warp] = False

    def record_store(self, warp: int, columns: slice, clock: np.ndarray, description: str) -> None:
        """Checks and records a tcgen05.st.

        It must be ordered after the products and the other warps' loads and stores of the columns.
        """
        own = warp - self.first_warp
        used_at = np.maximum(self.accumulated_at[columns], self.operand_at[columns])
        self._check_products(used_at, clock, "overwrites an operand", description)
        if self.load_pending[own, columns].any():
            raise RaceError(
                f"{description} overwrites what a tcgen05.ld without a tcgen05.wait::ld reads"
            )
        others = self._other_warps_of_quarter(own)
        for times in (self.read_at, self.written_at):
            self._check_warps(times, others, columns, clock, f"{description} writes")
        self.written_at[own, columns] = self.PENDING

    def complete_stores(self, warp: int, time: int) -> None:
        """Records a tcgen05.wait::st."""
        times = self.written_at[warp - self.first_warp]
        times[times == self.PENDING] = time

    def is_allocation_known(self, first: int, clock: np.ndarray) -> bool:
        """Returns whether a barrier orders the allocation at this column before `clock`.

        A relaxed barrier of the cluster is enough, because it orders execution.
        """
        agent, time, arrivals = self.allocations[first]
        barriers_passed = clock[MEMORY][self.agents.cluster_barrier]
        return bool(clock[MEMORY][agent] >= time or barriers_passed > arrivals)

    def check_deallocation(self, columns: slice, clock: np.ndarray) -> None:
        """Checks that a tcgen05.dealloc is ordered after all tcgen05.ld of these columns."""
        known = clock[MEMORY][self.first_warp : self.first_warp + self.warps_per_block]
        unordered = self.read_at[:, columns].max(1) > known
        if unordered.any():
            raise RaceError(
                f"block {self.rank} executes tcgen05.dealloc, and nothing orders it after the "
                f"tcgen05.ld of warp {int(np.nonzero(unordered)[0][0])}"
            )

    def record_accumulation(
        self, sequence: int, columns: slice, clock: np.ndarray, description: str
    ) -> None:
        """Checks and records that the tcgen05.mma number `sequence` writes its accumulator.

        It must be ordered after all warps' loads and stores of these columns.
        """
        warps = np.arange(self.warps_per_block)
        for times in (self.read_at, self.written_at):
            doing = f"{description} writes an accumulator of"
            self._check_warps(times, warps, columns, clock, doing)
        self.accumulated_at[columns] = sequence

    def record_operand_read(
        self, sequence: int, columns: slice, clock: np.ndarray, description: str
    ) -> None:
        """Checks and records that the tcgen05.mma number `sequence` reads its first operand.

        The read must be ordered after all stores to these columns, by any warp.
        """
        warps = np.arange(self.warps_per_block)
        doing = f"{description} reads an operand of"
        self._check_warps(self.written_at, warps, columns, clock, doing)
        self.operand_at[columns] = sequence

    def _other_warps_of_quarter(self, own: int) -> np.ndarray:
        """Returns the other warps that access the same lanes of tensor memory."""
        return np.array([w for w in range(own % 4, self.warps_per_block, 4) if w != own], int)

    def _check_products(
        self, used_at: np.ndarray, clock: np.ndarray, doing: str, description: str
    ) -> None:
        """Checks that an access is ordered after the tcgen05.mma that used its columns last."""
        core = self.agents.tensor_core
        if used_at.max() > clock[TENSOR][core] and not (
            used_at.max() <= clock[MEMORY][core] and self.allows(NO_TCGEN05_FENCE)
        ):
            raise RaceError(
                f"{description} {doing} of block {self.rank}, and nothing orders it after the "
                "tcgen05.mma; it needs a tcgen05.commit, a wait for its mbarrier and "
                "tcgen05.fence::after_thread_sync"
            )

    def _check_warps(self, times, warps: np.ndarray, columns: slice, clock, doing: str) -> None:
        """Checks that an access is ordered after these warps' accesses to its columns."""
        if not len(warps):
            return
        done, agents = times[warps, columns].max(1), self.first_warp + warps
        unordered = done > clock[TENSOR][agents]
        if unordered.any() and not (
            (done <= clock[MEMORY][agents]).all() and self.allows(NO_TCGEN05_FENCE)
        ):
            warp, name = warps[unordered][0], "ld" if times is self.read_at else "st"
            raise RaceError(
                f"{doing} block {self.rank} from column {columns.start} on, and nothing orders it "
                f"after the tcgen05.{name} of warp {warp}; it needs tcgen05.wait::{name}, "
                f"{self.FENCES}"
            )
