"""What the emulator raises."""


class EmulatorError(Exception):
    """What a kernel must not do; the message says which warp did it, where, and against whom."""


class UnsupportedError(EmulatorError):
    """PTX that the emulator does not know; it is never ignored."""


class RaceError(EmulatorError):
    """Two accesses whose order nothing establishes."""


class DeadlockError(EmulatorError):
    """Nothing can go on; the message says who waits for what."""
