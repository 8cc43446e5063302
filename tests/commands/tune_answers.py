"""What a child process does in the tests of `tune`; it imports nothing that takes long."""

import os
import signal
import time


def echoes(*arguments):
    """Yields its arguments, and the number of its process."""
    yield from arguments
    yield os.getpid()


def hangs_or_crashes(name, refused):
    """Tries three candidates; the first hangs and the second ends the process, until refused."""
    for candidate in ("hangs", "crashes", "exits", "works"):
        if candidate in refused:
            continue
        yield candidate
        if candidate == "hangs":
            signal.pause()
        if candidate == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if candidate == "exits":
            os._exit(7)
    yield (name, refused)


def first_is_found(task, refused):
    """Finds something for the first task, and never for another one."""
    from pallas_patch_embed.backends import stored
    from pallas_patch_embed.backends.stored import Result

    if task.problem.rows != 196:
        yield "a candidate"
        time.sleep(3600)
    described = stored.describe_problem(task.problem)
    yield Result(task.backend, described, None, "2026-11-25", {}, {})
