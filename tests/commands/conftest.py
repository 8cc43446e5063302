"""A time limit for tests that would hang, instead of failing, without what they test."""

import signal

import pytest

# Tests with this limit take a few seconds.
SECONDS = 120


@pytest.fixture
def time_limit():
    def stop(number, frame):
        raise AssertionError(f"the test did not end within {SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)
