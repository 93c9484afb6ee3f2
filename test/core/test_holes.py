"""Room for journal rows that has fallen into holes is used before anything is evicted."""
from __future__ import annotations

import itertools
from pathlib import Path
import random
from typing import Any

import pytest

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.reference import Journal
from flashrt_ros.core.errors import Code
from flashrt_ros.core.payload import Segment, SegmentPool
from flashrt_ros.core.session import Options, Session
from test.conformance.cases import OWNER_STATE, Owner
from test.conformance.checks import refused


def opened(**options: Any) -> Owner:
    """Return a session of a policy with two journals, 32 bytes a row."""
    return Owner(Session(Journal(rows=64, drafts=0), HostDevice(), host_state=OWNER_STATE,
                         options=Options(**{'threaded': False, **options})))


def names(o: Owner) -> list[str]:
    return [c.name for c in o.session.list()]


def test_p15_a_save_that_eviction_would_not_make_room_for_evicts_nothing() -> None:
    # rows of 24 bytes take 32 alone and 120 by five: bytes that suffice are not room that suffices
    o = Owner(Session(Journal(rows=64, heads=1, width=6, drafts=0), HostDevice(),
                      host_state=OWNER_STATE,
                      options=Options(threaded=False, segment_bytes=512, device_slots=20)))
    for i in range(8):
        o.restore('origin')
        o.run(1)
        o.session.save(f'c{i}', pin=i % 2 == 1)
    o.restore('origin')
    o.run(5)
    before = names(o)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'big')
    assert names(o) == before
    o.close()


@pytest.mark.parametrize('seed', range(30))
def test_segments_never_overlap_and_are_had_whenever_the_rows_fit(seed: int) -> None:
    rng = random.Random(seed)
    pool = SegmentPool(HostDevice(), 2048)
    live: list[list[Segment]] = []
    for _ in range(150):
        if live and rng.random() < 0.45:
            for s in live.pop(rng.randrange(len(live))):
                s.release()
            continue
        row, rows = rng.choice((1, 3, 16, 24, 40, 100, 257)), rng.randint(1, 12)
        held = [s for segments in live for s in segments]
        had = pool.fits(held, [(row, rows)])
        segments = pool.take(row, 7, rows)
        assert (segments is not None) == had
        if segments is None:
            continue
        live.append(segments)
        assert [s.first for s in segments] == [
            7 + sum(b.rows for b in segments[:i]) for i in range(len(segments))]
        assert sum(s.rows for s in segments) == rows
        assert all(s.nbytes >= s.rows * row for s in segments)
        spans = sorted((s.offset, s.offset + s.nbytes) for x in live for s in x)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        assert spans[-1][1] <= pool.nbytes
        assert pool.used == sum(b - a for a, b in spans)
    for segments in live:
        for s in segments:
            s.release()
    assert pool.used == 0
    assert pool.take(2048, 0, 1) is not None
    pool.close()


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
