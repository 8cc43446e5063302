"""Global and shared memory: bytes, bounds, and the last accesses to shared memory."""

import numpy as np

from tests.ptx_emulator.errors import EmulatorError, RaceError
from tests.ptx_emulator.vector_clocks import MEMORY, PROXY, Agents

# The address space. The shared memory of the block with rank r begins at r << BLOCK_SHIFT in the
# shared::cluster window; its variables begin at SHARED_BASE, after 1 KiB that the system reserves.
# The generic addresses of shared memory and of kernel parameters lie in windows of WINDOW_BYTES,
# far from global memory.
SHARED_BASE, BLOCK_SHIFT = 0x400, 24
GLOBAL_BASE = 0x7000_0000_0000
SHARED_WINDOW = 0x7F10_0000_0000
PARAMETER_WINDOW = 0x7F20_0000_0000
WINDOW_BYTES = 1 << 32

# Value of bytes that are not written yet, or are still being written. A float of such bytes is NaN,
# and a signed integer is -1.
POISON = 0xFF

# Granularity of the checks of shared memory: races are tracked for words of 4 bytes, and fences
# between the proxies for units of 16 bytes, the smallest unit of TMA.
WORD_BYTES, UNIT_BYTES = 4, 16


class GlobalMemory:
    """Arrays in global memory, far enough apart that an address past one is never in another."""

    ARRAY_SPACING = 1 << 32

    def __init__(self):
        self.bytes = np.zeros(0, np.uint8)
        # Address, offset in `bytes`, length in bytes and name of each array.
        self.arrays: list[tuple[int, int, int, str]] = []
        # The arrays' first addresses, the addresses behind their ends, and their offsets in
        # `bytes`. An empty array below all addresses comes first.
        self.starts, self.ends, self.array_offsets = np.full((3, 1), np.iinfo(np.int64).min)

    def allocate(self, array: np.ndarray, name: str = "array") -> int:
        """Copies an array into the memory and returns its address."""
        content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        address = GLOBAL_BASE + len(self.arrays) * self.ARRAY_SPACING
        self.arrays.append((address, len(self.bytes), len(content), name))
        self.starts = np.append(self.starts, address)
        self.ends = np.append(self.ends, address + len(content))
        self.array_offsets = np.append(self.array_offsets, len(self.bytes))
        self.bytes = np.concatenate([self.bytes, content])
        return address

    def read(self, address: int, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Returns a copy of an array."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        begin = self.offset_of(address, size)
        return self.bytes[begin : begin + size].copy().view(dtype).reshape(shape)

    def offsets_of(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Returns the offset in `bytes` of `size` bytes at each address, each within one array."""
        addresses = addresses.astype(np.int64)
        array = np.searchsorted(self.starts, addresses, "right") - 1
        inside = addresses + size <= self.ends[array]
        if not inside.all():
            self.offset_of(int(addresses[~inside][0]), size)
        return addresses - self.starts[array] + self.array_offsets[array]

    def offset_of(self, address: int, size: int) -> int:
        """Returns the offset in `bytes` of `size` bytes at an address, within one array."""
        for start, begin, length, _ in self.arrays:
            if start <= address and address + size <= start + length:
                return begin + address - start
        raise EmulatorError(
            f"{size} bytes of global memory at {address:#x} are outside of all arrays: "
            + ", ".join(f"{name} {start:#x} to +{size}" for start, _, size, name in self.arrays)
        )


class SharedMemory:
    """The shared memory of one block, with the last accesses to each word.

    A write must be ordered after the last write and all reads, and a read after the last write. An
    ordinary store (of the generic proxy) must be fenced before TMA or the tensor core (the
    asynchronous proxy) accesses its bytes (9.7.13.4, fence.proxy).
    """

    def __init__(self, rank: int, size: int, agents: Agents, warps_per_block: int):
        self.rank, self.size = rank, size
        self.agents, self.warps_per_block = agents, warps_per_block
        end = SHARED_BASE + size
        self.bytes = np.full(end, POISON, np.uint8)
        words, units = -(-end // WORD_BYTES), -(-end // UNIT_BYTES)
        # For each word, the agent that wrote it last, and that agent's time.
        self.last_writer = np.zeros(words, np.int16)
        self.last_write_time = np.zeros(words, np.int32)
        # A row for each agent that can read this memory, with the time of its last read of each
        # word.
        first = rank * warps_per_block
        own = range(first, first + warps_per_block)
        readers = [*own, *map(agents.store_engine, own), agents.tensor_core]
        readers += sorted({agents.wgmma(warp) for warp in own})
        self.readers = np.array(readers)
        self.reader_row = {agent: row for row, agent in enumerate(readers)}
        self.last_read_time = np.zeros((len(readers), words), np.int32)
        # For each unit of 16 bytes: the warp, or engine of cp.async, whose ordinary store may not
        # be visible to the asynchronous proxy yet (or -1), and the time of the store; the lanes
        # that stored, and the lanes among them that have not executed a fence since, as bits; the
        # time of the last such fence, and how often the warp's lanes had synchronised before it.
        self.unfenced_writer = np.full(units, -1, np.int16)
        self.unfenced_time = np.zeros(units, np.int32)
        self.storing_lanes, self.unfenced_lanes = np.zeros((2, units), np.uint32)
        self.fence_time, self.fence_lane_syncs = np.zeros((2, units), np.int32)
        # Agents whose ordinary stores a fence for this block's shared memory orders.
        self.generic_writers = agents.generic_proxy_writers(first, warps_per_block)
        # Words of mbarriers, which only the mbarrier instructions may access (9.7.13.15.1).
        self.is_mbarrier = np.zeros(words, bool)

    def check_bounds(self, offset: int, size: int, description: str) -> None:
        """Raises an error if an access is not inside of the block's shared memory."""
        if offset < SHARED_BASE or offset + size > SHARED_BASE + self.size:
            raise EmulatorError(
                f"{description}: {size} bytes at {self.describe(offset)} are outside of its "
                f"{self.size} bytes"
            )

    def describe(self, offset: int) -> str:
        """Returns the name of a byte in error messages."""
        return f"shared memory of block {self.rank} + {offset - SHARED_BASE}"

    def _raise_race(self, word: int, agent: int, description: str, verb: str) -> None:
        raise RaceError(
            f"{description} {verb} {self.describe(int(word) * WORD_BYTES)}, and nothing orders it "
            f"after {self.agents.describe(int(agent), self.warps_per_block)}"
        )

    def _check_last_write(
        self, words: np.ndarray, known: np.ndarray, description: str, verb: str
    ) -> None:
        """Checks that an access to these words is ordered after the last write to each."""
        if self.is_mbarrier[words].any():
            word = int(words[self.is_mbarrier[words]][0])
            raise EmulatorError(
                f"{description} touches the mbarrier in {self.describe(word * WORD_BYTES)}"
            )
        unordered = words[known[self.last_writer[words]] < self.last_write_time[words]]
        if len(unordered):
            word = unordered[0]
            self._raise_race(word, self.last_writer[word], description, verb)

    def record_read(
        self, agent: int, time: int, words: np.ndarray, clock: np.ndarray, description: str
    ) -> None:
        """Checks and records a read by an agent; `clock` is that of its issuer."""
        self._check_last_write(words, clock[MEMORY], description, "reads what was written to")
        row = self.reader_row.get(agent)
        if row is not None:
            self.last_read_time[row, words] = time

    def record_write(
        self, agent: int, time: int, words: np.ndarray, clock: np.ndarray, description: str
    ) -> None:
        """Checks and records a write by an agent; `clock` is that of its issuer."""
        known = clock[MEMORY]
        self._check_last_write(words, known, description, "overwrites what was written to")
        unordered = self.last_read_time[:, words] > known[self.readers][:, None]
        if unordered.any():
            row, column = np.argwhere(unordered)[0]
            verb = "overwrites what is read from"
            self._raise_race(words[column], self.readers[row], description, verb)
        self.last_writer[words], self.last_write_time[words] = agent, time

    def record_generic_store(
        self, agent: int, time: int, units: np.ndarray, lanes: np.ndarray | int
    ) -> None:
        """Records an ordinary store, which the asynchronous proxy does not see before a fence.

        Args:
          agent: a warp, or an engine of cp.async.
          time: the agent's time of the store.
          units: units of 16 bytes that the store writes, each once.
          lanes: lanes that stored, as bits; one number for all units, or one for each.
        """
        again = self.unfenced_writer[units] == agent
        for lanes_of_unit in (self.storing_lanes, self.unfenced_lanes):
            before = np.where(again, lanes_of_unit[units], np.uint32(0))
            lanes_of_unit[units] = before | np.uint32(lanes)
        self.unfenced_writer[units], self.unfenced_time[units] = agent, time

    def fence_proxies(self, warp, lanes: int) -> None:
        """Records a fence.proxy.async by these lanes of a warp, given as bits.

        The fence covers the stores of these lanes, and stores of other agents to this block's
        shared memory that are ordered before it.
        """
        others = self.generic_writers[self.generic_writers != warp.agent]
        warp.clock[PROXY][others] = warp.clock[MEMORY][others]
        units = np.nonzero(self.unfenced_writer == warp.agent)[0]
        units = units[self.unfenced_lanes[units] != 0]
        self.unfenced_lanes[units] &= ~np.uint32(lanes)
        self.fence_time[units], self.fence_lane_syncs[units] = warp.time, warp.lane_syncs

    def check_async_proxy_access(
        self, units: np.ndarray, warp, lane: int | None, description: str
    ) -> None:
        """Checks an access of the asynchronous proxy that a lane of a warp, or all (None), issued.

        Each lane that stored to these units must have fenced its store, and the fence must be
        ordered before the access. Within the issuing warp a barrier of its lanes establishes that
        order, which is not needed if only the issuing lane stored and fenced. Another warp's store
        may also have been fenced by any warp after whose clock the store is ordered.
        """
        units = units[self.unfenced_writer[units] >= 0]
        if not len(units):
            return
        agents = self.unfenced_writer[units]
        only_this_lane = (
            False if lane is None else self.storing_lanes[units] == np.uint32(1 << lane)
        )
        lanes_synced = only_this_lane | (self.fence_lane_syncs[units] < warp.lane_syncs)
        fence_known = warp.clock[MEMORY][agents] >= self.fence_time[units]
        own, fenced = agents == warp.agent, self.unfenced_lanes[units] == 0
        fenced_by_other = ~own & (warp.clock[PROXY][agents] >= self.unfenced_time[units])
        ordered = fenced & np.where(own, lanes_synced, fence_known) | fenced_by_other
        unordered = units[~ordered]
        if len(unordered):
            unit = int(unordered[0])
            name = self.agents.describe(int(self.unfenced_writer[unit]), self.warps_per_block)
            missing = "without a fence.proxy.async"
            if not self.unfenced_lanes[unit]:
                missing = "with a fence.proxy.async, but no barrier orders that before the access"
            elif self.unfenced_lanes[unit] != self.storing_lanes[unit]:
                missing += f" of the lanes {int(self.unfenced_lanes[unit]):#034b}"
            raise RaceError(
                f"{description} touches {self.describe(unit * UNIT_BYTES)}, "
                f"which {name} wrote {missing}"
            )
        self.unfenced_writer[units] = -1


def words_in_range(begin: int, size: int) -> np.ndarray:
    """Returns the words of a range of shared memory."""
    return np.arange(begin // WORD_BYTES, -(-(begin + size) // WORD_BYTES))


def units_in_range(begin: int, size: int) -> np.ndarray:
    """Returns the units of 16 bytes of a range of shared memory."""
    return np.arange(begin // UNIT_BYTES, -(-(begin + size) // UNIT_BYTES))
