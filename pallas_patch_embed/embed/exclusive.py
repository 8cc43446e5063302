"""Exclusive access of a run to a folder: a lock on this machine, or a lease at a URL."""

import contextlib
import importlib.util
import json
import os
import socket
import stat
import threading
import time
import uuid
from types import TracebackType
from typing import Any

from pallas_patch_embed.base import json_objects
from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.output import UnfinishedError
from pallas_patch_embed.embed.place import create
from pallas_patch_embed.embed.units import reaching

# The types of the fields of a lease, and the number of bytes that are read of one.
LEASE: dict[str, type] = {"run": str, "host": str, "time": float}
MOST_BYTES = 2**16

# Times of a lease in seconds. A run renews its lease every RENEWED seconds. A lease is void if it
# was watched for VOID seconds and not renewed, or if it is older than ABANDONED, which is more than
# the clocks of two machines can differ.
RENEWED, VOID, ABANDONED = 10.0, 40.0, 3600.0


class BusyError(ValueError):
    """Another run is writing to the folder."""

    def __init__(self, url: str, host: str = ""):
        by = f" (on {printable(host)})" if host else ""
        super().__init__(
            f"--out is {printable(url)}: another run is writing there{by}. Wait for it, or choose "
            "another folder."
        )


class Lock:
    """A lock of the operating system, which is released when the process ends.

    Args:
      path: path of the lock's file, which is neither changed nor removed.
      url: URL of the folder, for messages.

    Raises:
      BusyError: another process has the lock when this one enters the context.
      ValueError: there is something else at the path, for example a link.
    """

    def __init__(self, path: str, url: str):
        self._path, self._url = path, url
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Lock":
        if importlib.util.find_spec("fcntl") is not None:  # Windows does not have fcntl.
            import fcntl

            with contextlib.ExitStack() as stack:
                file = self._open()
                stack.callback(os.close, file)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise BusyError(self._url) from None
                self._stack = stack.pop_all()
        return self

    def _open(self) -> int:
        """Opens the lock's file, and creates it if it does not exist."""
        try:
            # A link is not followed, and nothing waits for the other end of a FIFO.
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o666)
            if stat.S_ISREG(os.fstat(file).st_mode):
                return file
            os.close(file)
            why = "it is not a regular file"
        except OSError as error:
            why = "it is a link" if os.path.islink(self._path) else str(error.strerror)
        raise ValueError(
            f"--out is {printable(self._url)}: its {os.path.basename(self._path)} cannot be used "
            f"({why}). If no other run is writing there, remove it, and run the command again."
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._stack.close()

    def check(self) -> None:
        """Does nothing, because a lock cannot be lost."""


class Lease:
    """A small file that a run renews, for file systems without locks.

    If the store supports it (as S3 and Google's do), the file is created only if it does not exist.
    In other stores two runs that start at almost the same time detect this when they renew the
    lease: the run that finds the other's name in the file stops.

    Args:
      fs: file system of fsspec.
      path: path of the file.
      url: URL of the folder, for messages.

    Raises:
      BusyError: another run has the lease when this one enters the context.
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
            self._wait_until_void(found)
            with reaching(self._url), contextlib.suppress(FileNotFoundError):
                self._fs.rm(self._path)
        self._renewed = time.monotonic()
        with reaching(self._url):
            try:
                create(self._fs, self._path, self._content())
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
            with contextlib.suppress(Exception):  # A lease that remains becomes void.
                self._fs.rm(self._path)

    def check(self) -> None:
        """Raises UnfinishedError if another run has taken the lease, for example after a pause."""
        if time.monotonic() - self._renewed > VOID / 2:
            with contextlib.suppress(Exception):
                self._renew()
        if self._taken_by is not None:
            raise UnfinishedError(
                f"{printable(self._url)}: another run (on {printable(self._taken_by)}) has taken "
                "over this folder, because this run did not renew its lease. The shards in it are "
                "kept. When the other run has ended, the same command resumes the work."
            )

    def _content(self) -> bytes:
        lease = {"run": self._run, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(lease).encode()

    def _holder(self) -> dict[str, Any] | None:
        """Reads the lease; returns None if there is none."""
        self._fs.invalidate_cache()
        with reaching(self._url):
            try:
                with self._fs.open(self._path, "rb") as file:
                    content = file.read(MOST_BYTES)
            except FileNotFoundError:
                return None
        try:
            return json_objects.expect(json_objects.parse(content), LEASE, "the lease", others=True)
        except ValueError:
            return {"run": "", "host": "", "time": 0.0}

    def _wait_until_void(self, found: dict[str, Any]) -> None:
        """Watches a lease until it is void, because its run may have been killed.

        Raises:
          BusyError: the run renews its lease.
        """
        if not abs(time.time() - found["time"]) <= ABANDONED:  # This includes NaN.
            return
        # The time in the lease is from another clock, so only a change of the lease counts.
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
            # Errors of any kind are ignored, because the next attempt follows.
            with contextlib.suppress(Exception):
                self._renew()
