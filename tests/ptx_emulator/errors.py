"""The exceptions that the emulator raises."""


class EmulatorError(Exception):
    """The kernel performs an invalid action. The message names the warp and the line."""


class UnsupportedError(EmulatorError):
    """The PTX has a feature that the emulator does not support."""


class RaceError(EmulatorError):
    """Nothing orders two conflicting accesses."""


class DeadlockError(EmulatorError):
    """No warp can continue. The message says for what each warp waits."""
