"""What a child process imports while the keyboard's signal reaches it."""

import multiprocessing
import os
import signal

if multiprocessing.current_process().name != "MainProcess":
    os.kill(os.getpid(), signal.SIGINT)


def goes_on(send):
    send("it goes on")
