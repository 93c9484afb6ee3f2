"""P15, P16: budgets, pins, leases, eviction, lineage."""
from __future__ import annotations

from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.errors import Code
from flashrt_ros.core.payload import Tier
from test.conformance.cases import CASES
from test.conformance.checks import refused

CASE = CASES[0]


def tiers(o: object) -> dict[str, str]:
    """Return tier names by capsule, origin excluded."""
    return {c.name: c.tier.name for c in o.session.list() if c.name != 'origin'}  # type: ignore[attr-defined]


def test_the_least_recently_used_go_to_the_host_and_then_leave_a_mark() -> None:
    events: list[Event] = []
    o = CASE.session(device_slots=2, host_bytes=0, on_event=events.append)
    n = o.session._live.plain.nbytes
    o.close()
    o = CASE.session(device_slots=2, host_bytes=2 * n, on_event=events.append)
    want = {}
    for i in range(6):
        o.step()
        o.session.save(f'c{i}')
        want[f'c{i}'] = o.everything()
        if i == 1:
            o.session.keep('c0')  # a use
        usage = o.session.usage()
        assert usage.host <= 2 * n
        assert usage.device <= 3 * n
    assert tiers(o) == {'c0': 'NONE', 'c1': 'NONE', 'c2': 'HOST', 'c3': 'HOST', 'c4': 'DEVICE',
                        'c5': 'DEVICE'}
    assert [e.info.name for e in events if e.kind is EventKind.EVICTED] == ['c1', 'c0']
    for name in ('c2', 'c3', 'c4', 'c5'):
        o.restore(name)
        assert o.everything() == want[name]
    refused(Code.EVICTED, o.session.plan_restore, 'c0')
    o.close()


def test_pinned_leased_and_origin_are_never_evicted_and_a_full_store_refuses() -> None:
    now = [100.0]
    o = CASE.session(device_slots=2, host_bytes=0, steady=lambda: now[0])
    o.step()
    o.session.save('pinned', pin=True)
    o.step()
    o.session.save('leased', lease_s=10)
    o.step()
    before = o.session.list()
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'c')
    assert o.session.list() == before, 'a refused save has no side effect'
    now[0] += 11
    o.session.save('c')
    assert tiers(o) == {'pinned': 'DEVICE', 'leased': 'NONE', 'c': 'DEVICE'}
    o.session.keep('pinned', pin=False)
    o.step()
    o.session.save('d')
    assert tiers(o) == {'pinned': 'DEVICE', 'leased': 'NONE', 'c': 'NONE', 'd': 'DEVICE'}
    o.step()
    o.session.save('e')
    assert tiers(o)['pinned'] == 'NONE', 'an unpinned capsule may go'
    assert o.session.list()[0].name == 'origin'
    assert o.session.list()[0].tier is Tier.DEVICE
    o.close()


def test_the_count_has_a_limit() -> None:
    o = CASE.session(max_capsules=3)
    for i in range(8):
        o.session.save(f'c{i}')
    assert [n for n, t in tiers(o).items() if t != 'NONE'] == ['c5', 'c6', 'c7']
    o.close()


def test_lineage_rollback_and_its_limits() -> None:
    o = CASE.session()
    refused(Code.NOTHING_TO_ROLL_BACK, o.session.plan_rollback)
    want = []
    for i in range(3):
        o.step()
        o.session.save(f'c{i}')
        want.append(o.everything())
    o.step()
    for n, i in ((2, 1), (1, 1), (2, 0)):
        o.session.apply(o.session.plan_rollback(n)).result()
        assert o.everything() == want[i]
    refused(Code.NOTHING_TO_ROLL_BACK, o.session.plan_rollback, 2)
    o.step()
    o.session.save('side')
    parents = {c.name: c.parent_id for c in o.session.list()}
    ids = {c.name: c.id for c in o.session.list()}
    assert parents['side'] == ids['c0']
    assert parents['c1'] == ids['c0']
    assert parents['c0'] == ids['origin']
    o.close()


def test_a_dropped_capsule_leaves_the_tree_and_an_evicted_one_stays_as_a_mark() -> None:
    o = CASE.session(device_slots=8, host_bytes=0)
    o.step()
    o.session.save('a')
    a = o.everything()
    o.step()
    o.session.save('b')
    o.step()
    o.session.save('c')
    o.session.drop('b')
    refused(Code.NOT_FOUND, o.session.plan_restore, 'b')
    o.session.apply(o.session.plan_rollback(2)).result()
    assert o.everything() == a
    with o.session._lock:
        o.session._evict(o.session._store.find('a'))  # type: ignore[arg-type]
    refused(Code.EVICTED, o.session.plan_rollback)
    o.close()


def test_overwriting_gives_a_new_id_and_the_old_one_is_not_found() -> None:
    o = CASE.session()
    first = o.session.save('a')
    o.step()
    second = o.session.save('a', overwrite=True)
    assert first.id != second.id
    refused(Code.NOT_FOUND, o.session.plan_restore, 'a', if_id=first.id)
    refused(Code.NOT_FOUND, o.session.drop, 'a', if_id=first.id)
    assert o.session.plan_restore('a', if_id=second.id).info.step == 1
    o.close()


def test_an_automatic_name_is_free_and_the_newest_is_the_default() -> None:
    o = CASE.session()
    o.session.save('capsule-1')
    o.step()
    info = o.session.save()
    assert info.name not in ('', 'capsule-1')
    assert o.session.plan_restore().info.id == info.id
    o.close()


def test_two_sessions_in_one_process_share_nothing() -> None:
    a, b = CASE.session(), CASE.session()
    a.run(3)
    a.session.save('x')
    assert [c.name for c in b.session.list()] == ['origin']
    assert b.run(3) == CASE.session().run(3)
    assert a.session.id != b.session.id
    a.close()
    b.run(1)
    b.close()


def test_what_descends_from_a_dropped_capsule_rolls_back_to_its_parent() -> None:
    o = CASE.session()
    o.step()
    o.session.save('a')
    a = o.everything()
    o.step()
    o.session.save('b')
    o.run(2)
    o.session.drop('b')                     # the present and the ring descend from it
    assert o.session.plan_rollback().info.name == 'a'
    o.session.apply(o.session.plan_rollback(steps=1, lock_step=True)).result()
    o.session.apply(o.session.plan_rollback()).result()
    assert o.everything() == a
    o.close()


def test_p16_the_ring_keeps_as_many_ticks_as_history_says_and_no_more() -> None:
    o = CASE.session(history=3, device_slots=2)
    for name in ('a', 'b'):
        o.step()
        o.session.save(name, pin=True)
    o.session.drop('a')
    o.session.drop('b')
    o.run(9)
    o.session.plan_rollback(steps=2, lock_step=True)
    refused(Code.NOTHING_TO_ROLL_BACK, o.session.plan_rollback, steps=3, lock_step=True)
    o.close()


def test_a_rollback_by_steps_over_a_save_leaves_its_lineage() -> None:
    o = CASE.session()
    o.step()
    o.session.save('a')
    o.run(2)
    o.session.save('b')
    o.session.apply(o.session.plan_rollback(steps=1, lock_step=True)).result()
    assert o.session.plan_rollback().info.name == 'a'
    assert o.session.save('c').parent_id == o.session.plan_restore('a').info.id
    o.close()
