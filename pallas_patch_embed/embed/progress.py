"""Progress of a run on standard error, as a bar on a terminal and as lines elsewhere."""

import collections
import sys
import time
from types import TracebackType

from pallas_patch_embed.base import ending
from pallas_patch_embed.base.messages import printable

# Seconds between lines if standard error is not a terminal.
LINE_SECONDS = 30.0

# Number of pictures without an embedding that are listed. Further ones are only counted.
NAMED = 100


class Progress:
    """Counts pictures, and shows rate, errors and remaining time.

    Args:
      quiet: whether to show nothing.
      what: what is embedded, "pictures" or "texts".

    Attributes:
      total: number of pictures of the run; None while it is not known.
      done: number of pictures that this run has embedded.
      errors: number of pictures that this run could not embed.
      before: number of pictures that earlier runs have embedded.
      failed_before: number of pictures that earlier runs could not embed.
      changed: number of pictures that were embedded, but have changed since.
      notes: numbers of pictures that were embedded, by what was wrong with them.
    """

    def __init__(self, *, quiet: bool = False, what: str = "pictures"):
        self.what = what
        self.total: int | None = None
        self.done = self.errors = self.before = self.failed_before = self.changed = 0
        self.notes: collections.Counter[str] = collections.Counter()
        self._quiet = quiet
        self._begin = self._shown = time.monotonic()
        self._bar = None

    def __enter__(self) -> "Progress":
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, unit=f" {self.what}", file=sys.stderr)
            ending.state.line_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        ending.state.line_open = False
        if self._bar is not None:
            self._bar.close()
        elif error is None:
            seconds = time.monotonic() - self._begin
            rate = (self.done + self.errors) / max(seconds, 1e-3)
            self.say(f"{rate:.1f} {self.what}/s, {seconds:.0f} s.")

    def embedded(self, pictures: int) -> None:
        """Counts pictures that were embedded."""
        self.done += pictures
        self._show(pictures)

    @property
    def met(self) -> int:
        """Number of pictures that the run has met so far."""
        return self.done + self.missing + self.before

    @property
    def missing(self) -> int:
        """Number of pictures that the run has met and that have no embedding."""
        return self.errors + self.failed_before + self.changed

    def failed(self, id: str, why: str) -> None:
        """Counts a picture that has no embedding, and says why."""
        self.errors += 1
        self._name(f"No embedding of {printable(id)}: {printable(why)}.")

    def has_changed(self, id: str) -> None:
        """Counts a picture that was embedded, but has changed since."""
        self.changed += 1
        self._name(f"{printable(id)} has changed since it was embedded.")

    def _name(self, line: str) -> None:
        named = self.errors + self.changed
        if named <= NAMED:
            self.say(line)
            if named == NAMED:
                self.say(f"Further {self.what} without an embedding are counted, but not listed.")
        self._show(1)

    def skipped(self, *, failed: bool) -> None:
        """Counts a picture that an earlier run has written."""
        self.failed_before += failed
        self.before += not failed
        self._show(1)

    def say(self, line: str) -> None:
        """Prints a line."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr)

    def _show(self, more: int) -> None:
        now = time.monotonic()
        if self._bar is not None:
            self._bar.total = self.total
            if self.errors:
                self._bar.set_postfix(errors=self.errors, refresh=False)
            self._bar.update(more)
        elif now - self._shown > LINE_SECONDS:
            self._shown = now
            rate = (self.done + self.errors) / (now - self._begin)
            left = ""
            if self.total is not None and rate:
                left = f", {max(self.total - self.met, 0) / rate / 60:.0f} minutes left"
            of = "" if self.total is None else f" of {self.total}"
            self.say(
                f"{self.done + self.before}{of} {self.what}, {self.errors} errors, "
                f"{rate:.1f} {self.what}/s{left}"
            )
