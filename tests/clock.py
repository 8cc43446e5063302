"""A clock that a test controls."""


class Clock:
    """A clock in seconds that only advances when `sleep` is called."""

    def __init__(self):
        self.seconds = 0.0

    def sleep(self, seconds):
        self.seconds += seconds

    def perf_counter(self):
        return self.seconds
