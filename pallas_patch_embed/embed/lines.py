"""Text files with a text on each line."""

import dataclasses
import io
from collections.abc import Iterator

from pallas_patch_embed.embed.pictures import reason
from pallas_patch_embed.embed.units import (
    MOST_TEXT,
    Content,
    Origin,
    Picture,
    named_origin,
    open_source,
    opened_origin,
    readable,
    text,
    unreadable,
    unsigned,
)

# Byte-order marks of UTF-16 as surrogates. Its second line could be UTF-8 with zeros.
UTF16 = ("\udcff\udcfe", "\udcfe\udcff")


@dataclasses.dataclass(frozen=True)
class Lines:
    """A text file in UTF-8, each line of which is a text, unless it is blank.

    Texts have the ids `path#row`, as in tables; the first line is row 0.

    Attributes:
      path: path on this machine, or a URL.
      most: largest number of characters of a line.
    """

    path: str
    most: int = MOST_TEXT

    def pictures(self) -> Iterator[Picture]:
        """Yields the texts; opening one gives its UTF-8."""
        row, origin = 0, named_origin(self.path)
        try:
            with open_source(self.path) as opened:
                origin = opened_origin(self.path, opened)
                lines = io.TextIOWrapper(opened, "utf-8", errors="surrogateescape", newline="\n")
                while line := lines.readline(self.most + 2):
                    content = line.rstrip("\r\n")
                    while not line.endswith("\n") and (line := lines.readline(self.most)):
                        pass  # The rest of a line that is too long.
                    if row == 0:
                        if content.startswith(UTF16):
                            raise ValueError("it is UTF-16, expected UTF-8")
                        content = content.removeprefix("\ufeff")  # Some editors' byte-order mark.
                    if content.strip():
                        yield self._text(content, origin._replace(row=str(row)))
                    row += 1
        except Exception as error:  # Each package for URLs has its own kinds of errors.
            why = f"the file cannot be read beyond line {row}: {reason(error)}"
            yield unreadable(text(self.path), why, origin)

    def _text(self, content: str, origin: Origin) -> Picture:
        id = f"{text(unsigned(self.path))}#{origin.row}"
        if len(content) > self.most:
            return unreadable(id, f"it has more than {self.most} characters", origin)
        try:
            return readable(Picture(id, Content(content.encode()), None, origin))
        except UnicodeEncodeError:  # Of a surrogate, which stands for a byte.
            return unreadable(id, "it is not UTF-8", origin)
