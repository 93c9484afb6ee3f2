"""The promises as functions of a case and a session class, so that mutants can be put through them.

Each raises AssertionError where its promise is broken.
"""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.session import Session
from test.conformance.cases import Case, Owner


@contextmanager
def owner(case: Case, kind: type[Session], **options: Any) -> Iterator[Owner]:
    """Open a session and close it whatever happens."""
    o = case.session(kind, **options)
    try:
        yield o
    finally:
        o.close()


def refused(code: Code, call: Any, *args: Any, **kw: Any) -> Refusal:
    """Call and expect a refusal with this code."""
    try:
        call(*args, **kw)
    except Refusal as error:
        assert error.code is code, f'{error.code.name} instead of {code.name}: {error}'
        return error
    raise AssertionError(f'{code.name} expected, nothing was refused')


def p1_every_byte_returns(case: Case, kind: type[Session] = Session) -> None:
    """P1, P6: save, overwrite every STATE buffer, restore: all bytes as at save time."""
    with owner(case, kind) as o:
        o.run(5)
        o.session.save('a')
        saved = o.everything()
        o.run(3, first=60)
        o.dirty()
        changed = o.everything()
        for name, spec in o.session.layout.items():
            if name in changed and not spec.is_journal and spec.length is None and (
                    name not in {b.spec.length for b in o.session._live.journals}):
                assert changed[name] != saved[name], f'{name} was not overwritten'
        o.restore('a')
        assert o.everything() == saved


def p2_the_future_is_the_same(case: Case, kind: type[Session] = Session) -> None:
    """P2: after a restore the next outputs are those of the run that was never interrupted.

    Disturbed for 1 to 5 steps: a length that is a period of something hides what is missing.
    """
    with owner(case, kind) as o:
        o.run(6)
        o.session.save('a')
        never = o.run(9)
        for disturbance in (1, 2, 3, 5):
            o.restore('a')
            o.run(disturbance, first=70)
            o.restore('a')
            assert o.run(9) == never, f'differs after a disturbance of {disturbance} steps'


def p4_restoring_never_changes_a_capsule(case: Case, kind: type[Session] = Session) -> None:
    """P4: one capsule restores any number of times."""
    with owner(case, kind) as o:
        o.run(4)
        o.session.save('a')
        saved = o.everything()
        futures = []
        for i in range(4):
            o.restore('a')
            assert o.everything() == saved
            futures.append(o.run(3))
            o.run(i, first=50)
        assert futures.count(futures[0]) == 4


def p5_branches(case: Case, kind: type[Session] = Session) -> None:
    """P5: equal inputs agree, different ones diverge, neither changes the other."""
    with owner(case, kind, live_sets=2) as o:
        o.run(4)
        o.session.save('a')
        first = o.run(5)
        o.session.save('b')
        b = o.everything()
        o.restore('a')
        assert o.run(5, first=80) != first
        o.restore('a')
        assert o.run(5) == first
        o.restore('b')
        assert o.everything() == b
        present = o.everything()
        inputs = [o._inputs[i] for i in (4, 5, 6)]
        seen = o.session.preview('a', inputs)
        again = o.session.preview('a', inputs)
        assert o.everything() == present, 'a preview changed the present'
        for x, y, step in zip(seen, again, first, strict=False):
            for n in x:
                assert x[n].tobytes() == y[n].tobytes()
            assert step.startswith(b''.join(x[n].tobytes() for n in sorted(x)))


def p6_host_state_returns_with_the_device(case: Case, kind: type[Session] = Session) -> None:
    """P6: counters and the owner's queue return with the device state, as of the same step."""
    with owner(case, kind) as o:
        o.run(5)
        o.session.save('a')
        queue = o.session.host['owner.queue'].tobytes()
        assert (o.session.tick, o.session.step, int(o.session.host['owner.counter'][0])) == (
            5, 5, 5)
        o.run(4)
        o.restore('a')
        assert (o.session.tick, o.session.step) == (5, 5)
        assert int(o.session.host['owner.counter'][0]) == 5
        assert o.session.host['owner.queue'].tobytes() == queue


def p7_refusals_change_nothing(case: Case, kind: type[Session] = Session) -> None:
    """P7: any refusal leaves every buffer, the epoch and the store as they were."""
    with owner(case, kind) as o:
        s = o.session
        o.run(3)
        s.save('a')
        o.run(2)
        before, epoch, names = o.everything(), s.epoch, s.list()
        refused(Code.NOT_FOUND, s.plan_restore, 'nobody')
        refused(Code.NOT_FOUND, s.plan_restore, 'a', if_id='0' * 32)
        refused(Code.STALE_EPOCH, s.plan_restore, 'a', if_epoch=epoch + 7)
        refused(Code.NOTHING_TO_ROLL_BACK, s.plan_rollback, 2)
        refused(Code.INVALID_ARGUMENT, s.plan_rollback, 1, steps=1, lock_step=True)
        refused(Code.INVALID_ARGUMENT, s.plan_rollback, seconds=float('nan'), lock_step=True)
        refused(Code.UNSUPPORTED, s.plan_rollback, steps=1)
        refused(Code.UNSUPPORTED, s.plan_rollback, seconds=1.0)
        refused(Code.EXISTS, s.save, 'a')
        refused(Code.INVALID_NAME, s.save, '../a')
        refused(Code.INVALID_NAME, s.save, 'origin')
        refused(Code.INVALID_NAME, s.drop, '')
        refused(Code.INVALID_NAME, s.drop, 'origin')
        refused(Code.INVALID_ARGUMENT, s.save, 'b', lease_s=-1.0)
        s.plan_restore('a')     # a plan alone is a check
        s.plan_rollback()
        assert o.everything() == before
        assert (s.epoch, s.list()) == (epoch, names)


def p11_epochs_rise_with_every_rewind(case: Case, kind: type[Session] = Session) -> None:
    """P11, P28: each rewind raises the epoch once, and what was asked before it is stale."""
    with owner(case, kind) as o:
        s = o.session
        o.run(2)
        s.save('a')
        epoch = s.epoch
        s.apply(s.plan_restore('a', if_epoch=epoch)).result()
        assert s.epoch == epoch + 1
        refused(Code.STALE_EPOCH, s.plan_restore, 'a', if_epoch=epoch)
        refused(Code.STALE_EPOCH, s.plan_rollback, if_epoch=epoch)
        refused(Code.STALE_EPOCH, s.drop, 'a', if_epoch=epoch)
        s.raise_epoch()  # a stop makes nothing stale
        s.apply(s.plan_rollback(if_epoch=epoch + 1)).result()
        assert s.epoch == epoch + 3


def p22_outputs_are_those_of_the_bare_backend(case: Case, kind: type[Session] = Session) -> None:
    """P22: the ring, and whether it is on, change no output."""
    runs = []
    for history in (0, 1, 4):
        with owner(case, kind, history=history) as o:
            runs.append(o.run(8))
    assert runs[0] == runs[1] == runs[2]


def rollback_by_steps(case: Case, kind: type[Session] = Session) -> None:
    """P16 and the ring: back by steps in lock step, exactly, and no further than is kept."""
    with owner(case, kind, history=4) as o:
        s = o.session
        o.run(6)
        six = o.everything()
        later = o.run(3)
        s.apply(s.plan_rollback(steps=3, lock_step=True)).result()
        assert o.everything() == six
        assert o.run(3) == later
        refused(Code.NOTHING_TO_ROLL_BACK, s.plan_rollback, steps=7, lock_step=True)


def lineage_with_overwritten_rows(case: Case, kind: type[Session] = Session) -> None:
    """P34's sequence: save A, tick, roll back, tick (overwrites A's rows), restore A."""
    with owner(case, kind) as o:
        s = o.session
        o.run(3)
        s.save('base')
        o.run(4)
        s.save('A')
        a = o.everything()
        o.run(1)
        s.apply(s.plan_rollback(2)).result()
        o.run(6, first=90)
        s.save('B')
        b = o.everything()
        for name, want in (('A', a), ('B', b), ('A', a)):
            o.restore(name)
            assert o.everything() == want, name
            o.run(2, first=30)


CHECKS = {f.__name__: f for f in (
    p1_every_byte_returns, p2_the_future_is_the_same, p4_restoring_never_changes_a_capsule,
    p5_branches, p6_host_state_returns_with_the_device, p7_refusals_change_nothing,
    p11_epochs_rise_with_every_rewind, p22_outputs_are_those_of_the_bare_backend,
    rollback_by_steps, lineage_with_overwritten_rows)}
