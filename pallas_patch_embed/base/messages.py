"""Text from files and other people in messages."""

# Largest number of characters of such a text in a message.
MOST = 200


def printable(text: object, most: int = MOST) -> str:
    """Returns the text on one line of at most `most` characters.

    Control characters and surrogates are escaped. If the text is longer, its middle is left out.
    """
    shortened = _shortened(str(text), most)  # Escaping a long text would take memory.
    return _shortened("".join(c if c.isprintable() else ascii(c)[1:-1] for c in shortened), most)


def quoted(value: object) -> str:
    """Returns the representation of a value in Python, shortened like a `printable` text."""
    return printable(repr(value))


def _shortened(text: str, most: int) -> str:
    end = most // 2
    return text if len(text) <= most else f"{text[: most - end - 3]}...{text[-end:]}"
