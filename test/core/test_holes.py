"""Room for journal rows that has fallen into holes is used before anything is evicted."""
from __future__ import annotations

from pathlib import Path
from typing import Any

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.reference import Journal
from flashrt_ros.core.errors import Code
from flashrt_ros.core.session import Options, Session
from test.conformance.cases import OWNER_STATE, Owner
from test.conformance.checks import refused


def opened(**options: Any) -> Owner:
    """Return a session of a policy with two journals, 32 bytes a row."""
    return Owner(Session(Journal(rows=64, drafts=0), HostDevice(), host_state=OWNER_STATE,
                         options=Options(**{'threaded': False, **options})))


def names(o: Owner) -> list[str]:
    return [c.name for c in o.session.list()]


def holed(**options: Any) -> Any:
    """Return a session whose room for journal rows is 4 holes of 2 rows among pinned capsules."""
    o = opened(segment_bytes=16 * 32, device_slots=16, **options)
    for i in range(8):
        o.restore('origin')
        o.run(1)                            # a row of each journal, shared with nobody
        o.session.save(f'c{i}', pin=True)
    for i in range(0, 8, 2):
        o.session.drop(f'c{i}')
    return o


def test_rows_that_no_hole_holds_are_spread_over_several_and_nothing_is_evicted() -> None:
    o = holed()
    o.restore('origin')
    o.run(4)
    before = [*names(o), 'big']
    o.session.save('big')
    big = o.everything()
    assert names(o) == before
    o.restore('c1')
    o.run(4)                                # other rows over those of `big`
    o.restore('big')
    assert o.everything() == big
    o.run(1)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'one_more')
    assert names(o) == before
    o.session.drop('big')
    o.restore('origin')                     # the present lets go of its rows too
    assert o.session._segments.used == 4 * 2 * 32
    o.close()


def test_p13_rows_from_a_file_are_spread_over_holes_too(tmp_path: Path) -> None:
    o = opened(directory=tmp_path)
    o.run(4)
    o.session.save('big', persist=True)
    big = o.everything()
    o.close()
    o = holed(directory=tmp_path)
    o.session.load('big').result(5)
    o.restore('big')
    assert o.everything() == big
    o.close()
