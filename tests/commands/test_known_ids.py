"""The sets of ids on disk."""

import numpy as np
import pytest

from pallas_patch_embed.embed import ids, ledger
from pallas_patch_embed.embed.units import Entry, Origin


@pytest.fixture(params=[1, 64, 2**23])
def marks(request, monkeypatch):
    """With few marks a filter soon knows of no id that it is new."""
    monkeypatch.setattr(ids, "MARKS", request.param)
    for module in (ids, ledger):
        monkeypatch.setattr(module, "TOGETHER", 7)
    return request.param


def numbers():
    return np.random.default_rng(0).integers(0, 300, 1000).tolist()


def test_an_id_is_new_once(marks):
    found, known = ids.Ids(), set()
    for number in numbers():
        assert found.add(b"%d" % number) == (number not in known)
        known.add(number)


def test_a_filter_never_says_of_a_known_id_that_it_is_new(marks):
    found, known = ids.Filter(), set()
    new = [found.add(b"%d" % i) for i in numbers() if not (i in known or known.add(i))]
    assert not any(found.add(b"%d" % i) for i in known)
    # Of 2^23 marks 600 are set, so another id has two of them by chance in one of 10^8 cases.
    assert all(new) == (marks == 2**23)


def test_a_picture_has_its_id_alone(marks):
    """Pictures of an earlier run have theirs, too."""
    found, owners = ledger.Ledger(), {}
    earlier = [Entry(f"{i}", Origin(f"/earlier/{i}")) for i in range(50)]
    found.record(earlier, 0, failed=False)
    owners |= {entry.id: entry for entry in earlier}
    for number in numbers():
        entry = Entry(f"{number}", Origin(f"/{number % 2}/{number}"))
        again = entry._replace(origin=Origin(f"/other/{number}"))
        owner = owners.setdefault(entry.id, entry)
        assert found.take_id(entry) == (owner == entry)
        assert not found.take_id(again)
