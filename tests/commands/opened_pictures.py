"""What processes that decode open in the tests; it imports nothing that takes long."""

import os
import signal
import sys
import threading


def crash():
    os.kill(os.getpid(), signal.SIGKILL)


def say_whether_jax_is_there():
    raise OSError(f"jax: {'jax' in sys.modules}")


def send_itself(*numbers):
    """Signals that a shell sends to a whole group."""
    for number in numbers:
        os.kill(os.getpid(), number)
    raise OSError("it goes on")


def wait():
    print("waits", flush=True)
    threading.Event().wait()


class NoProcess:
    """A preprocessing that another process cannot receive."""

    def __reduce__(self):
        return sys.exit, (7,)
