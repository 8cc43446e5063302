"""How far a run is, on standard error: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from types import TracebackType

from pallas_patch_embed import ending
from pallas_patch_embed.embed.pictures import printable

# Seconds between lines where there is no terminal.
LINE_SECONDS = 30.0

# Pictures without an embedding that are named; the others are counted.
NAMED = 100


class Progress:
    """Counts pictures and shows rate, errors and time left.

    Args:
      quiet: whether nothing but errors of the whole run is shown.

    Attributes:
      total: pictures of the run; None while nobody knows.
      done: pictures that this run has embedded.
      errors: pictures that it could not embed.
      before: pictures that earlier runs have written.
    """

    def __init__(self, *, quiet: bool = False):
        self.total: int | None = None
        self.done = self.errors = self.before = 0
        self._quiet = quiet
        self._begin = self._shown = time.monotonic()
        self._bar = None

    def __enter__(self) -> "Progress":
        if not self._quiet and sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self.total, unit=" pictures", file=sys.stderr)
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
            self.say(f"{rate:.1f} pictures/s, {seconds:.0f} s.")

    def embedded(self, pictures: int) -> None:
        """So many more pictures are embedded."""
        self.done += pictures
        self._show(pictures)

    def failed(self, id: str, why: str) -> None:
        """A picture has no embedding."""
        self.errors += 1
        if self.errors <= NAMED:
            self.say(f"No embedding of {printable(id)}: {printable(why)}.")
            if self.errors == NAMED:
                self.say("Further ones are counted.")
        self._show(1)

    def skipped(self) -> None:
        """A picture is in a shard of an earlier run."""
        self.before += 1
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
                rest = self.total - self.done - self.errors - self.before
                left = f", {max(rest, 0) / rate / 60:.0f} minutes left"
            of = "" if self.total is None else f" of {self.total}"
            self.say(
                f"{self.done + self.before}{of} pictures, {self.errors} errors, "
                f"{rate:.1f} pictures/s{left}"
            )
