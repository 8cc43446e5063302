"""Stand-ins for the work of `check`'s child process. They are fast to import, without JAX."""

import functools
import os
import signal
import threading

from pallas_patch_embed.commands.check.process import Ended, Found, Launches, Listed, Prepares

ABOUT = {
    "pallas_patch_embed": "0",
    "python": "3",
    "packages": {"jax": "0"},
    "driver": None,
    "devices": [{"kind": "stand-in", "target": "cpu"}],
    "interpreted": [],
    "refused": {"absent": {"int8": "it is not here."}},
}


def launch(what, launch):
    """Returns the counts of a launch, unless it hangs or crashes."""
    if what == "hangs" and launch == 2:
        threading.Event().wait()
    if what == "crashes" and launch == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wrong = int(what == "wrong")
    return dict(launches=1, elements=10, wrong=wrong, moved=0, changed=0, poisoned=1, guarded=1)


def cases(names, send, done):
    """Sends the messages of cases; a case is right or wrong, hangs or crashes, as its name says."""
    send(Listed(ABOUT, tuple(f"stand-in: {name}" for name in names)))
    for case, name in enumerate(names):
        if case in done:
            continue
        send(Prepares(case))
        for index in (1, 2):
            send(Launches(case, index))
            send(Found(case, launch(name, index)))
        send(Ended(case, "ended"))


def work(*names):
    """Returns the work of a child process that runs these cases."""
    return functools.partial(cases, names)


def ends_at_once(send, done):
    del send, done
