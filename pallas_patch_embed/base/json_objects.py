"""Reading of JSON objects from files that may be damaged."""

import json
from collections.abc import Mapping
from typing import Any

from pallas_patch_embed.base.messages import printable

# What JSON calls the values of Python's types.
NAMES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    int: "an integer",
    float: "a number with a decimal point",
    bool: "a boolean",
    type(None): "null",
}


def parse(content: bytes) -> Any:
    """Returns the value of a JSON text; raises ValueError with the reason if it is not valid."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def expect(
    value: Any,
    fields: Mapping[str, type | tuple[type, ...]],
    what: str,
    *,
    others: bool = False,
) -> dict[str, Any]:
    """Returns a JSON value that is an object with these fields and types.

    Args:
      value: the value.
      fields: the type, or the possible types, of each field.
      what: description of the object, for the message.
      others: whether the object may have other fields, too.

    Raises:
      ValueError: the value is something else; the message says what.
    """
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {NAMES[type(value)]}, expected an object")
    if not fields.keys() <= value.keys() or not (others or value.keys() <= fields.keys()):
        found = printable(sorted(value))
        raise ValueError(f"{what} has the fields {found}, expected {sorted(fields)}")
    for name, kinds in fields.items():
        wanted = kinds if isinstance(kinds, tuple) else (kinds,)
        if type(value[name]) not in wanted:
            expected = " or ".join(NAMES[kind] for kind in wanted)
            raise ValueError(f"{name} of {what} is {NAMES[type(value[name])]}, expected {expected}")
    return value
