"""Global, shared, parameter and tensor memory: bytes, bounds, and who touched them last."""

import numpy as np

from ptx_emulator.errors import EmulatorError, RaceError
from ptx_emulator.vector_clocks import MEMORY, PROXY, Agents

# Addresses. Shared memory of block r of a cluster begins at r << BLOCK_SHIFT, plus what the system
# reserves; the generic windows of shared and parameter memory are far from global memory.
SHARED_BEGIN, BLOCK_SHIFT = 0x400, 24
GLOBAL_BEGIN = 0x7000_0000_0000
SHARED_WINDOW = 0x7F10_0000_0000
PARAMETER_WINDOW = 0x7F20_0000_0000
WINDOW = 1 << 32

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
