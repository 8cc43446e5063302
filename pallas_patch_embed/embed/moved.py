"""Pictures whose folder or file was moved after they were embedded."""

import os
import re
from collections.abc import Sequence

from pallas_patch_embed.base.messages import printable
from pallas_patch_embed.embed.units import Entry, is_url, named_origin, text


class Moved:
    """Maps pictures of folders or files that were moved to their present place.

    Args:
      pairs: pairs of an earlier and a present path or URL.
    """

    def __init__(self, pairs: Sequence[tuple[str, str]] = ()):
        self._pairs = [(old, _places(old), new, _places(new)[0]) for old, new in pairs]
        self._found: set[str] = set()

    def __call__(self, entry: Entry) -> Entry:
        """Returns the picture with its present origin, whose time of change is not known."""
        for old, old_places, _, place in self._pairs:
            source, row = entry.origin[:2]
            # Of pictures that an earlier version embedded, only the ids are known.
            olds = old_places if source else (old.rstrip("/"), *old_places)
            is_nested = _rest(place, olds) is not None
            if _below(source, place) is not None and (is_nested or _rest(source, olds) is None):
                self._found.add(old)  # An earlier run was told of the move.
                continue
            if (rest := _rest(source or entry.id, olds)) is None:
                continue
            self._found.add(old)
            if not source and (table := re.fullmatch(r"(.*\.parquet)#(\d+)", rest, re.IGNORECASE)):
                rest, row = table[1], table[2]
            origin = entry.origin._replace(source=place + rest, row=row, modified="")
            entry = entry._replace(origin=origin)
        return entry

    def check(self) -> None:
        """Raises ValueError if there was no picture of a folder or file that was moved."""
        for old, _, new, _ in self._pairs:
            if old not in self._found:
                raise ValueError(
                    f"--moved {printable(old)} {printable(new)}: the output has no picture of "
                    "either. Give the earlier path as it is in the column source."
                )


def check_places(pairs: Sequence[tuple[str, str]]) -> None:
    """Raises ValueError if something was moved to a place on this machine that does not exist."""
    for old, new in pairs:
        if not is_url(new) and not os.path.exists(new):
            raise ValueError(
                f"--moved {printable(old)} {printable(new)}: the second path does not exist. Give "
                "the present path of the pictures."
            )


def _places(path: str) -> tuple[str, ...]:
    """Returns the sources that a path or a URL stands for: with links resolved, and as it is."""
    path = path.rstrip("/")
    resolved = named_origin(path).source
    return (resolved,) if is_url(path) else (resolved, text(os.path.abspath(path)))


def _rest(path: str, folders: Sequence[str]) -> str | None:
    """Returns the rest of a path in the first of these folders that contains it, or None."""
    rests = (_below(path, folder) for folder in folders)
    return next((rest for rest in rests if rest is not None), None)


def _below(path: str, folder: str) -> str | None:
    """Returns the rest of a path in a folder, with its slash; None if it is not in the folder."""
    if path == folder:
        return ""
    return path[len(folder) :] if path.startswith(f"{folder}/") else None
