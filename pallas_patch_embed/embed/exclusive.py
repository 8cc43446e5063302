"""One run at a time writes into a folder: a lock says so on this machine, a lease at a URL."""

import contextlib
import importlib.util
import json
import socket
import threading
import time
import uuid
from types import TracebackType
from typing import Any

from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.pictures import printable

# Seconds after which a lease is renewed, after which one that nobody renews is void, and after
# which a lease of another machine is void without being watched: no two clocks differ by that much.
RENEWED, VOID, ABANDONED = 10.0, 40.0, 3600.0


class BusyError(ValueError):
    """Another run is writing there."""

    def __init__(self, url: str, host: str = ""):
        by = f" (on {printable(host)})" if host else ""
        super().__init__(
            f"--out is {printable(url)}: another run is writing there{by}. Wait for it, or choose "
            "another folder."
        )


class Lock:
    """A lock of the operating system, which ends with the process.

    Args:
      path: path of a file that stays there.
      url: URL of the folder, for messages.

    Raises:
      BusyError: on entering it, if another process has the lock.
    """

    def __init__(self, path: str, url: str):
        self._path, self._url = path, url
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Lock":
        if importlib.util.find_spec("fcntl") is not None:  # Not on Windows.
            import fcntl

            with contextlib.ExitStack() as stack:
                file = stack.enter_context(open(self._path, "w"))
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise BusyError(self._url) from None
                self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stack.close()

    def check(self) -> None:
        """Does nothing, because a lock cannot be lost."""


class Lease:
    """A small file that a run renews, on a file system without locks.

    It is created only where there is none, where the store can do so (S3 and Google's can). Where
    it cannot, two runs that begin at almost the same time notice it when they renew: the one that
    finds the other's name there stops.

    Args:
      fs: file system of fsspec.
      path: path of the file.
      url: URL of the folder, for messages.

    Raises:
      BusyError: on entering it, if another run renews its lease.
    """

    def __init__(self, fs: Any, path: str, url: str):
        self._fs, self._path, self._url = fs, path, url
        self._run = uuid.uuid4().hex
        self._taken_by: str | None = None
        self._renewed = 0.0
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> "Lease":
        found = self._holder()
        if found is not None:
            self._wait_for_the_end_of(found)
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path)
        self._renewed = time.monotonic()
        try:
            self._fs.pipe_file(self._path, self._content(), mode="create")
        except (TypeError, NotImplementedError):  # It knows no such mode.
            self._fs.pipe_file(self._path, self._content())
        except OSError:
            if self._holder() is None:
                raise
        if (holder := self._holder()) is not None and holder["run"] != self._run:
            raise BusyError(self._url, holder["host"])
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self._taken_by is None:
            with contextlib.suppress(Exception):  # It will be void.
                self._fs.rm(self._path)

    def check(self) -> None:
        """Raises an UnfinishedError if another run has taken the lease, as after a long pause."""
        if time.monotonic() - self._renewed > VOID / 2:
            with contextlib.suppress(Exception):
                self._renew()
        if self._taken_by is not None:
            raise UnfinishedError(
                f"{printable(self._url)}: another run (on {printable(self._taken_by)}) took it "
                "over, since this one did not renew its lease. What is there stays there. When "
                "that run has ended, the same command goes on with the rest."
            )

    def _content(self) -> bytes:
        lease = {"run": self._run, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(lease).encode()

    def _holder(self) -> dict[str, Any] | None:
        """What the lease says; None if there is none."""
        self._fs.invalidate_cache()
        try:
            lease = json.loads(self._fs.cat_file(self._path))
        except FileNotFoundError:
            return None
        except ValueError:
            lease = None
        known = isinstance(lease, dict) and {"run", "host", "time"} <= lease.keys()
        return lease if known else {"run": "", "host": "", "time": 0.0}

    def _wait_for_the_end_of(self, found: dict[str, Any]) -> None:
        """Watches a lease until it is void: the run may have been killed. Raises BusyError."""
        if abs(time.time() - found["time"]) > ABANDONED:
            return
        # Its time is of another clock: what counts is whether it changes.
        end = time.monotonic() + VOID
        while time.monotonic() < end:
            time.sleep(VOID / 40)
            holder = self._holder()
            if holder is None:
                return
            if holder != found:
                raise BusyError(self._url, holder["host"])

    def _renew(self) -> None:
        with self._lock:
            holder = self._holder()
            if holder is not None and holder["run"] != self._run:
                self._taken_by = holder["host"]
                return
            self._fs.pipe_file(self._path, self._content())
            self._renewed = time.monotonic()

    def _keep(self) -> None:
        while self._taken_by is None and not self._stopped.wait(RENEWED):
            # It tries again, whatever kind of error its package has.
            with contextlib.suppress(Exception):
                self._renew()
