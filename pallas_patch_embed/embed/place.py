"""Access to the folder of an output, on this machine or at a URL.

A person may name a link as the folder. Inside of the folder no link is followed, only regular files
are opened, and nothing that exists is replaced, because anybody may have put something there.
"""

import os
import posixpath
import stat
from collections.abc import Sequence
from typing import Any, BinaryIO, Protocol

from pallas_patch_embed.base.files import open_regular, rename_new, written_atomically
from pallas_patch_embed.embed.units import is_url, reaching

# Possible results of `Place.kind`; None means that there is nothing.
FOLDER, FILE, LINK, SPECIAL = "a folder", "a file", "a link", "a special file"


class Place(Protocol):
    """A folder. Names are relative to it; the name "" is the folder itself."""

    def kind(self, name: str = "") -> str | None:
        """Returns what has this name."""

    def names(self, folder: str = "") -> list[str]:
        """Returns the names in a folder, if there is one.

        Raises:
          OSError: it is no folder, or a link to one.
        """

    def open(self, name: str) -> BinaryIO:
        """Opens a regular file for reading."""

    def write(self, name: str, content: bytes) -> None:
        """Writes a file that appears only when it is complete; it must not exist yet."""

    def rename(self, old: str, new: str) -> None:
        """Renames a file; there must be nothing with the new name."""

    def remove(self, names: Sequence[str]) -> None:
        """Removes files; raises OSError with the name of a file that cannot be removed."""

    def make_folder(self, name: str = "") -> None:
        """Makes a folder if there is none.

        Raises:
          OSError: there is something else with this name.
        """


class Local:
    """A folder on this machine."""

    def __init__(self, path: str):
        self.root = os.path.realpath(path)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name) if name else self.root

    def kind(self, name: str = "") -> str | None:
        try:
            mode = os.lstat(self.path(name)).st_mode
        except FileNotFoundError:
            return None
        kinds = {stat.S_IFDIR: FOLDER, stat.S_IFREG: FILE, stat.S_IFLNK: LINK}
        return kinds.get(stat.S_IFMT(mode), SPECIAL)

    def names(self, folder: str = "") -> list[str]:
        return [] if self._is_absent(folder) else os.listdir(self.path(folder))

    def _is_absent(self, folder: str) -> bool:
        """Returns whether there is no such folder; raises OSError if there is something else."""
        if (kind := self.kind(folder)) not in (None, FOLDER):
            raise NotADirectoryError(f"it is {kind}, expected a folder")
        return kind is None

    def open(self, name: str) -> BinaryIO:
        return open_regular(self.path(name), follow=False)

    def write(self, name: str, content: bytes) -> None:
        with written_atomically(self.path(name), new=True) as file:
            file.write(content)

    def rename(self, old: str, new: str) -> None:
        rename_new(self.path(old), self.path(new))

    def remove(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                os.unlink(self.path(name))
            except OSError as error:
                raise OSError(error.errno, error.strerror, name) from None

    def make_folder(self, name: str = "") -> None:
        if self._is_absent(name):
            os.makedirs(self.path(name), exist_ok=True)


class Remote:
    """A folder at a URL that fsspec supports."""

    def __init__(self, url: str):
        import fsspec

        self._url = url
        with reaching(url):
            self.fs, self._root = fsspec.url_to_fs(url)

    def path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}" if name else self._root

    def kind(self, name: str = "") -> str | None:
        with reaching(self._url):
            if not self.fs.exists(self.path(name)):
                return None
            return FOLDER if self.fs.isdir(self.path(name)) else FILE

    def names(self, folder: str = "") -> list[str]:
        with reaching(self._url):
            self.fs.invalidate_cache()
            try:
                paths = self.fs.ls(self.path(folder), detail=False)
            except FileNotFoundError:  # Object stores have no empty folders.
                return []
        # A store may list the folder itself.
        others = (path for path in paths if path.strip("/") != self.path(folder).strip("/"))
        return [posixpath.basename(path.rstrip("/")) for path in others]

    def open(self, name: str) -> BinaryIO:
        with reaching(self._url):
            self.fs.invalidate_cache()  # A cached listing would not contain a new file.
            return self.fs.open(self.path(name), "rb")

    def write(self, name: str, content: bytes) -> None:
        create(self.fs, self.path(name), content)  # A single PUT is atomic.

    def rename(self, old: str, new: str) -> None:
        _check_new(self.fs, self.path(new))
        self.fs.mv(self.path(old), self.path(new))

    def remove(self, names: Sequence[str]) -> None:
        if names:
            self.fs.rm([self.path(name) for name in names])

    def make_folder(self, name: str = "") -> None:
        with reaching(self._url):
            self.fs.makedirs(self.path(name), exist_ok=True)


def place_of(url: str) -> Place:
    """Returns the folder at a path on this machine, or at a URL."""
    from fsspec.implementations.local import LocalFileSystem

    if is_url(url) and not url.startswith(("file://", "local://")):
        return Remote(url)
    # fsspec.url_to_fs would take some paths, such as "data:x", for URLs.
    return Local(LocalFileSystem._strip_protocol(url))


def create(fs: Any, path: str, content: bytes) -> None:
    """Writes a new file to a file system of fsspec.

    Raises:
      FileExistsError: the file exists. In some stores it may be created between the check and the
        write; then it is replaced.
    """
    _check_new(fs, path)
    try:
        fs.pipe_file(path, content, mode="create")
    except (TypeError, NotImplementedError):  # The file system does not support this mode.
        fs.pipe_file(path, content)


def _check_new(fs: Any, path: str) -> None:
    if fs.exists(path):
        raise FileExistsError(f"there is already a file {posixpath.basename(path)}")
