"""Global, shared, parameter and tensor memory: bytes, bounds, and who touched them last."""

from collections.abc import Callable

import numpy as np

from ptx_emulator.clocks import MEMORY, PROXY, TENSOR, Agents
from ptx_emulator.errors import EmulatorError, RaceError

# Addresses. Shared memory of block r of a cluster begins at r << BLOCK_SHIFT, plus what the system
# reserves; the generic windows of shared and parameter memory are far from global memory.
SHARED_BEGIN, BLOCK_SHIFT = 0x400, 24
GLOBAL_BEGIN = 0x7000_0000_0000
SHARED_WINDOW = 0x7F10_0000_0000
PARAMETER_WINDOW = 0x7F20_0000_0000
WINDOW = 1 << 32

# The warning about tensor memory whose order a barrier makes without tcgen05.fence.
NO_TENSOR_FENCES = "no tcgen05.fence"

# A poisoned byte: of floats it makes NaN, of integers -1.
POISON = 0xFF

# Races are looked for in words, proxies in units of 16 bytes.
WORD, UNIT = 4, 16


class GlobalMemory:
    """Arrays, so far from each other that an address beyond one is not in the next."""

    DISTANCE = 1 << 32

    def __init__(self):
        self.bytes = np.zeros(0, np.uint8)
        # (address, where it begins in `bytes`, length, name)
        self.arrays: list[tuple[int, int, int, str]] = []
        # Of the arrays: first address, address behind the last, place in `bytes`; and of an empty
        # one before all others.
        self.firsts, self.ends, self.places = np.full((3, 1), np.iinfo(np.int64).min)

    def place(self, array: np.ndarray, name: str = "array") -> int:
        """Copies an array into the memory; its address."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = GLOBAL_BEGIN + len(self.arrays) * self.DISTANCE
        self.arrays.append((address, len(self.bytes), len(content), name))
        self.firsts = np.append(self.firsts, address)
        self.ends = np.append(self.ends, address + len(content))
        self.places = np.append(self.places, len(self.bytes))
        self.bytes = np.concatenate([self.bytes, content])
        return address

    def read(self, address: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """A copy of an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin = self.offset(address, size)
        return self.bytes[begin : begin + size].copy().view(dtype).reshape(shape)

    def offsets(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Where the bytes at each address are; they have to be inside of one array."""
        addresses = addresses.astype(np.int64)
        array = np.searchsorted(self.firsts, addresses, "right") - 1
        inside = addresses + size <= self.ends[array]
        if not inside.all():
            self.offset(int(addresses[~inside][0]), size)
        return addresses - self.firsts[array] + self.places[array]

    def offset(self, address: int, size: int) -> int:
        """Where these bytes are; they have to be inside of one array."""
        for start, begin, length, _ in self.arrays:
            if start <= address and address + size <= start + length:
                return begin + address - start
        raise EmulatorError(
            f"{size} bytes of global memory at {address:#x} are outside of all arrays: "
            + ", ".join(f"{name} {start:#x} to +{size}" for start, _, size, name in self.arrays)
        )


class SharedMemory:
    """The shared memory of one block, which knows who wrote and read each word last.

    A write has to be ordered after the last write and all reads, a read after the last write. What
    the tensor core and TMA touch has to have passed a fence between the proxies, if an ordinary
    store wrote it (9.7.13.4 fence.proxy).
    """

    def __init__(self, rank: int, size: int, agents: Agents, warps_of_a_block: int):
        self.rank, self.size = rank, size
        self.agents, self.warps_of_a_block = agents, warps_of_a_block
        end = SHARED_BEGIN + size
        self.bytes = np.full(end, POISON, np.uint8)
        words, units = -(-end // WORD), -(-end // UNIT)
        self.writer = np.zeros(words, np.int16)
        self.written = np.zeros(words, np.int32)
        first = rank * warps_of_a_block
        own = range(first, first + warps_of_a_block)
        readers = [*own, *map(agents.store_engine, own), agents.tensor_core]
        readers += sorted({agents.wgmma(warp) for warp in own})
        self.readers = np.array(readers)
        self.row_of = {agent: row for row, agent in enumerate(readers)}
        self.read_at = np.zeros((len(readers), words), np.int32)
        # The warp (or engine of cp.async) whose ordinary store is not known to be visible to the
        # asynchronous proxy yet, -1 for none, and when it stored; as bits the lanes that stored,
        # and those among them without a fence since; of the last such fence, its time, and how
        # often the lanes of the warp had met before.
        self.unfenced = np.full(units, -1, np.int16)
        self.unfenced_at = np.zeros(units, np.int32)
        self.storing, self.owing = np.zeros((2, units), np.uint32)
        self.fenced_at, self.fenced_meeting = np.zeros((2, units), np.int32)
        # Whose ordinary stores a fence of this block's shared memory covers.
        self.stores_of = agents.storing(first, warps_of_a_block)
        # Words of mbarriers, which nothing but their instructions may touch (9.7.13.15.1).
        self.barriers = np.zeros(words, bool)

    def check(self, offset: int, size: int, what: str) -> None:
        """Bounds."""
        if offset < SHARED_BEGIN or offset + size > SHARED_BEGIN + self.size:
            raise EmulatorError(
                f"{what}: {size} bytes at {self.place(offset)} are outside of its {self.size} bytes"
            )

    def place(self, offset: int) -> str:
        """How a message names a byte."""
        return f"shared memory of block {self.rank} + {offset - SHARED_BEGIN}"

    def _race(self, word: int, agent: int, doing: str, to: str) -> None:
        raise RaceError(
            f"{doing} {to} {self.place(int(word) * WORD)}, and nothing orders it after "
            f"{self.agents.name(int(agent), self.warps_of_a_block)}"
        )

    def _after_its_writer(self, words: np.ndarray, known: np.ndarray, what: str, to: str) -> None:
        """These words may be touched by who knows of the last write to them."""
        if self.barriers[words].any():
            word = int(words[self.barriers[words]][0])
            raise EmulatorError(f"{what} touches the mbarrier in {self.place(word * WORD)}")
        unknown = words[known[self.writer[words]] < self.written[words]]
        if len(unknown):
            self._race(unknown[0], self.writer[unknown[0]], what, to)

    def reads(self, agent: int, time: int, words: np.ndarray, clock: np.ndarray, what: str) -> None:
        """Notes a read by an agent whose knowledge is `clock`."""
        self._after_its_writer(words, clock[MEMORY], what, "reads what was written to")
        row = self.row_of.get(agent)
        if row is not None:
            self.read_at[row, words] = time

    def writes(
        self, agent: int, time: int, words: np.ndarray, clock: np.ndarray, what: str
    ) -> None:
        """Notes a write by an agent whose knowledge is `clock`."""
        known = clock[MEMORY]
        self._after_its_writer(words, known, what, "overwrites what was written to")
        late = self.read_at[:, words] > known[self.readers][:, None]
        if late.any():
            row, column = np.argwhere(late)[0]
            self._race(words[column], self.readers[row], what, "overwrites what is read from")
        self.writer[words], self.written[words] = agent, time

    def stored(self, agent: int, time: int, units: np.ndarray, lanes: np.ndarray | int) -> None:
        """Notes an ordinary store, which the asynchronous proxy does not see yet.

        Args:
          agent, time: a warp or an engine of cp.async, and when it stored.
          units: what it stored to, each once.
          lanes: which lanes stored, as bits, to all of them or to each.
        """
        again = self.unfenced[units] == agent
        for kept in (self.storing, self.owing):
            kept[units] = np.where(again, kept[units], np.uint32(0)) | np.uint32(lanes)
        self.unfenced[units], self.unfenced_at[units] = agent, time

    def fence(self, warp, lanes: int) -> None:
        """A fence between the proxies, by these lanes of a warp, as bits.

        It covers what these lanes stored, and what the warp knows of other warps' stores to the
        shared memory of this block.
        """
        others = self.stores_of[self.stores_of != warp.agent]
        warp.clock[PROXY][others] = warp.clock[MEMORY][others]
        units = np.nonzero(self.unfenced == warp.agent)[0]
        units = units[self.owing[units] != 0]
        self.owing[units] &= ~np.uint32(lanes)
        self.fenced_at[units], self.fenced_meeting[units] = warp.time, warp.meetings

    def asynchronous(self, units: np.ndarray, warp, lane: int | None, what: str) -> None:
        """An access of the asynchronous proxy, issued by a lane of a warp, or by all (None).

        Each lane that stored there has to have fenced its store, and the fence has to be ordered
        before this: within a warp by a barrier of its lanes, unless one lane did all. What another
        warp stored may also have been fenced by whoever knew of it.
        """
        units = units[self.unfenced[units] >= 0]
        if not len(units):
            return
        agents = self.unfenced[units]
        alone = False if lane is None else self.storing[units] == np.uint32(1 << lane)
        met = alone | (self.fenced_meeting[units] < warp.meetings)
        known = warp.clock[MEMORY][agents] >= self.fenced_at[units]
        own, fenced = agents == warp.agent, self.owing[units] == 0
        covered = ~own & (warp.clock[PROXY][agents] >= self.unfenced_at[units])
        bad = units[~(fenced & np.where(own, met, known) | covered)]
        if len(bad):
            unit = int(bad[0])
            name = self.agents.name(int(self.unfenced[unit]), self.warps_of_a_block)
            lacking = "without a fence.proxy.async"
            if not self.owing[unit]:
                lacking = "with a fence.proxy.async, and no barrier orders that before"
            elif self.owing[unit] != self.storing[unit]:
                lacking += f" of the lanes {int(self.owing[unit]):#034b}"
            raise RaceError(
                f"{what} touches {self.place(unit * UNIT)}, which {name} wrote {lacking}"
            )
        self.unfenced[units] = -1


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
