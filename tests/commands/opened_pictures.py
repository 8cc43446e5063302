"""Stand-ins for pictures that decoding processes open; this module is fast to import."""

import os
import signal
import sys
import threading

from pallas_patch_embed.embed.preprocessing import Preprocessing
from pallas_patch_embed.embed.units import Fetched


def crash(reserved):
    os.kill(os.getpid(), signal.SIGKILL)


def say_whether_jax_is_there(reserved):
    raise OSError(f"jax: {'jax' in sys.modules}")


def send_itself(numbers, reserved):
    """Sends signals to this process, as a shell does to a whole process group."""
    for number in numbers:
        os.kill(os.getpid(), number)
    raise OSError("still running")


def fetched(content, origin, reserved):
    return Fetched(content, origin)


def wait(reserved):
    print("waits", flush=True)
    threading.Event().wait()


class NoProcess(Preprocessing):
    """A preprocessing that ends the process that unpickles it."""

    def __reduce__(self):
        return sys.exit, (7,)


class Larger(Preprocessing):
    """A preprocessing that announces a smaller image, but keeps the picture's size."""

    def resized_from(self, height, width):
        return height, width


class NotStarted(Preprocessing):
    """A preprocessing for which no process can be started, as if the system refused it."""

    def __reduce__(self):
        raise OSError("Too many open files")
