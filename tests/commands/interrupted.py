"""Sends the signals that end a command to the child process that imports this module."""

import multiprocessing
import os
import signal

if multiprocessing.current_process().name != "MainProcess":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)


def goes_on(send):
    send("still running")
