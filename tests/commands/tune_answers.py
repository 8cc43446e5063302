"""What a child process does in the tests of `tune`; it imports nothing that takes long."""

import os
import signal
import time


def echoes(send, *arguments):
    """Sends its arguments, and the number of its process."""
    for argument in (*arguments, os.getpid()):
        send(argument)


def hangs_or_crashes(send, name, refused):
    """Tries three candidates; the first hangs and the second ends the process, until refused."""
    for candidate in ("hangs", "crashes", "exits", "works"):
        if candidate in refused:
            continue
        send(candidate)
        if candidate == "hangs":
            signal.pause()
        if candidate == "crashes":
            os.kill(os.getpid(), signal.SIGSEGV)
        if candidate == "exits":
            os._exit(7)
    send((name, refused))


def first_is_found(send, task, refused):
    """Finds something for the first task, and never for another one."""
    from pallas_patch_embed.backends import stored
    from pallas_patch_embed.backends.stored import Result

    if task.problem.rows != 196:
        send("a candidate")
        time.sleep(3600)
    described = stored.describe_problem(task.problem)
    send(Result(task.backend, described, None, "2026-11-25", {}, {}))
