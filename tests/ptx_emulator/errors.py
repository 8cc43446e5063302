"""The errors that the emulator raises."""


class EmulatorError(Exception):
    """The kernel does something forbidden. The message names the warp and the line."""


class UnsupportedError(EmulatorError):
    """The PTX has something that the emulator does not know."""


class RaceError(EmulatorError):
    """Nothing orders two conflicting accesses."""


class DeadlockError(EmulatorError):
    """No warp can continue. The message says what each one waits for."""
