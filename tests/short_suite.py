"""Selects the cases that the short suite runs."""

import pytest


def keep(cases, kept, reason):
    """Returns cases for `parametrize`, marked slow with `reason` unless kept(case) is true."""
    slow = pytest.mark.slow(reason)
    # A tuple is a case with several arguments.
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*v, marks=() if kept(case) else slow) for case, v in values]
