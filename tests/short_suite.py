"""Selects the cases that the short suite and CI run."""

import pytest


def keep(cases, kept, reason, in_ci=lambda case: True):
    """Returns cases for `parametrize`; those with kept(case) are in the short suite.

    Others are marked with `reason`: slow if in_ci(case) is true, else exhaustive.
    """
    cases = list(cases)

    def marks(case):
        if kept(case):
            return ()
        return pytest.mark.slow(reason) if in_ci(case) else pytest.mark.exhaustive(reason)

    # A tuple is a case with several arguments.
    values = [(case, case if isinstance(case, tuple) else (case,)) for case in cases]
    return [pytest.param(*v, marks=marks(case)) for case, v in values]


def every_second(cases, reason):
    """Returns cases for `parametrize`, of which every second one is marked exhaustive."""
    cases = list(cases)
    return keep(cases, lambda case: cases.index(case) % 2 == 0, reason, lambda case: False)
