"""Functions that a child process runs in the tests of `tune`; this module is fast to import."""

import os
import signal
import time


def echoes(send, *arguments):
    """Sends its arguments, and the id of its process."""
    for argument in (*arguments, os.getpid()):
        send(argument)


def hangs_or_crashes(send, name, refused):
    """Tries four candidates; one hangs, one crashes and one exits, until they are refused."""
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
    """Sends a result for the first task, and hangs on every other one."""
    from pallas_patch_embed.backends import stored
    from pallas_patch_embed.backends.stored import SearchResult

    if task.problem.rows != 196:
        send("a candidate")
        time.sleep(3600)
    described = stored.describe_problem(task.problem)
    send(SearchResult(task.backend, described, None, "2026-11-25", {}, {}))
