"""Faults that a review found: a wrong answer, a leak or a call without an answer each."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import threading
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends.host import HostBlock, HostDevice
from flashrt_ros.backends.reference import Arrays, Journal, Recurrent
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space
from flashrt_ros.core.session import Options, Session
from test.conformance.cases import CASES, OWNER_STATE, Owner
from test.conformance.checks import refused

CASE = CASES[0]
JOURNAL = next(c for c in CASES if c.name == 'host-journal')


def opened(policy: Any, device: Any = None, **options: Any) -> Owner:
    events = options.pop('on_event', None)
    return Owner(Session(policy, device or HostDevice(), host_state=OWNER_STATE, on_event=events,
                         options=Options(**{'threaded': False, **options})))


def names(o: Owner) -> dict[str, str]:
    return {c.name: c.tier.name for c in o.session.list()}


# -- between a plan and its copy ------------------------------------------------------------------


@pytest.mark.parametrize('again', [False, True])
def test_p21_a_plan_whose_capsule_went_to_disk_restores_no_other_bytes(tmp_path: Path, again: bool
                                                                       ) -> None:
    o = CASE.session(directory=tmp_path, history=1, device_slots=1)
    o.run(2)
    o.session.save('a', persist=True)
    a = o.everything()
    o.run(1)
    plan = o.session.plan_restore('a')
    o.session.save('b')                     # a is durable, so it gives up its slot
    assert names(o)['a'] == 'DISK'
    o.run(4)                                # the slot is written again
    if again:
        o.session.load('a').result(5)
    free = o.session._pool.free
    try:
        o.session.apply(plan).result(5)
    except Refusal as error:
        assert error.details.get('on_disk')
        assert o.session._pool.free == free
    else:
        assert o.everything() == a
    o.run(3)
    o.session.load('a').result(5)
    o.restore('a')
    assert o.everything() == a
    o.close()


def test_p21_a_restore_behind_a_failing_inference_is_no_success() -> None:
    class Failing(Recurrent):
        gate = threading.Event()
        entered = threading.Event()
        fails = False

        def tick(self, b: Arrays) -> None:
            if self.fails:
                self.entered.set()
                assert self.gate.wait(10)
                raise RuntimeError('the engine broke')
            super().tick(b)

        def hidden(self) -> dict[str, str]:
            return {}
    policy = Failing()
    o = opened(policy, threaded=True)
    o.run(2)
    o.session.save('a')
    policy.fails = True
    o.session.submit()
    assert policy.entered.wait(10)
    future = o.session.apply(o.session.plan_restore('a'))
    policy.gate.set()
    error = future.exception(10)
    assert isinstance(error, Refusal)
    assert error.code is Code.FAULT
    o.close()


# -- journals -------------------------------------------------------------------------------------


class Rewriting(Journal):
    """A journal whose prefill begins anew at row 0, and whose ticks and prefills can be held."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(rows=16, drafts=0)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._first = first

    def initial(self) -> dict[str, Any]:
        rows = np.zeros((2, 16, 4), np.float32)
        rows[:, :self._first] = 0.25
        return {'kv_length': np.array([self._first], np.int64), 'keys': rows, 'values': rows + 0}

    def prefill(self, b: Arrays) -> None:
        b['keys'][:] = -7.0
        b['values'][:] = -8.0
        b['kv_length'][0] = b['kv_start'][0] = 0
        self._append(b, b['obs'])
        self.entered.set()
        assert self.gate.wait(20)

    def hidden(self) -> dict[str, str]:
        return {}


def test_p21_rows_that_a_prefill_rewrites_are_not_saved_as_those_before_it() -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('kept')
    o.run(2)
    policy.gate.clear()
    inference = o.session.submit(prefill=True)
    assert policy.entered.wait(10)
    refused(Code.BUSY, o.session.save, 'a')
    policy.gate.set()
    assert inference.wait(10)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.accept(inference)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.commit_step()
    o.session.save('a')
    a = o.everything()
    o.run(3)
    o.restore('a')
    assert o.everything() == a
    o.close()


def test_p21_a_save_of_what_a_kept_capsule_has_goes_on_during_a_prefill() -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('kept')
    kept = o.everything()
    policy.gate.clear()
    inference = o.session.submit(prefill=True)
    assert policy.entered.wait(10)
    o.session.save('a')
    policy.gate.set()
    assert inference.wait(10)
    o.session.accept(inference)
    o.session.commit_step()
    o.restore('a')
    assert o.everything() == kept
    o.close()


def test_p21_a_rollback_by_steps_over_a_prefill_that_rewrites_is_refused_or_exact() -> None:
    policy = Rewriting()
    o = opened(policy)
    o.run(3)
    want = o.everything()
    o.run(1)
    o.session.submit(prefill=True)          # unthreaded: it has run, and is not accepted yet
    error = None
    try:
        o.session.apply(o.session.plan_rollback(steps=1, lock_step=True)).result(10)
    except Refusal as refusal:
        error = refusal
    assert error is not None or o.everything() == want
    if error is not None:
        assert error.code is Code.NOTHING_TO_ROLL_BACK
    o.close()


def test_p1_the_rows_that_a_journal_begins_with_return_with_origin() -> None:
    o = opened(Rewriting(first=3))
    fresh = o.everything()
    o.run(2)
    inference = o.session.submit(prefill=True)
    o.session.accept(inference)
    o.session.commit_step()
    o.run(2)
    o.session.apply(o.session.plan_reset()).result(5)
    assert o.everything() == fresh
    o.close()


def test_p15_a_save_whose_second_journal_does_not_fit_evicts_nothing() -> None:
    o = opened(Journal(rows=64, drafts=0), segment_bytes=16 * 32)   # 16 rows of one journal
    o.run(5)
    o.session.save('a')                     # 5 rows of each
    o.restore('origin')
    o.run(9)                                # one journal fits where `a` is, two do not
    before = names(o)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'b')
    assert names(o) == before
    o.close()


def test_journal_rows_of_a_restored_boundary_are_counted_once() -> None:
    o = JOURNAL.session(history=1)
    o.run(4)
    o.session.save('a')
    for i in range(5):
        o.restore('a')
        o.session.save(f'c{i}')
    for c in o.session.list()[1:]:
        o.session.drop(c.name)
    o.run(3)                                # the ring lets go too
    assert o.session._segments.used == 0
    o.close()


def test_p21_a_save_right_behind_a_restore_has_the_restored_rows_though_their_capsule_is_gone(
        ) -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('a')
    a = o.everything()
    o.restore('origin')
    o.run(4, first=60)
    gate = threading.Event()
    o.session._worker.post(lambda: gate.wait(10) and None)
    future = o.session.apply(o.session.plan_restore('a'))
    o.session.drop('a')
    o.session.save('b')                     # the copy of `a` is still to come
    gate.set()
    future.result(10)
    o.run(2, first=90)
    o.restore('b')
    assert o.everything() == a
    o.close()


# -- the ring is off ------------------------------------------------------------------------------


def test_p18_history_0_a_save_does_not_wait_for_a_thread_that_waits_for_it(tmp_path: Path) -> None:
    class Slow(HostDevice):
        gate = threading.Event()
        entered = threading.Event()
        held = False

        def sync(self, event: Any = None) -> None:
            if self.held:
                self.entered.set()
                assert self.gate.wait(10)
    device = Slow()
    o = opened(Recurrent(), device, history=0, threaded=True, directory=tmp_path)
    o.run(2)
    o.session.save('a')
    device.held = True
    o.session.keep('a', persist=True)       # its bytes are brought to the host
    assert device.entered.wait(10)
    o.session.commit_step()
    done = threading.Event()

    def save() -> None:
        try:
            o.session.save('b')
        except Refusal:
            pass
        done.set()
    threading.Thread(target=save, daemon=True).start()
    done.wait(0.05)
    device.held = False
    device.gate.set()
    assert done.wait(5), 'save and the device thread wait for each other'
    o.close()


def test_p6_history_0_a_save_between_a_tick_and_its_step_mixes_nothing() -> None:
    o = opened(Recurrent(), history=0)
    o.run(2)
    o.session.inputs['obs'][...] = 0.5
    inference = o.session.submit()
    o.session.accept(inference)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.commit_step()
    o.session.save('a')
    a = o.everything()
    o.run(2)
    o.restore('a')
    assert o.everything() == a
    o.close()


# -- the end --------------------------------------------------------------------------------------


class Counting(HostDevice):
    """Knows what was taken and not given back."""

    def __init__(self) -> None:
        self.blocks: dict[int, HostBlock] = {}

    def alloc(self, nbytes: int, space: Space) -> HostBlock:
        block = super().alloc(nbytes, space)
        self.blocks[id(block)] = block
        return block

    def free(self, block: HostBlock) -> None:
        del self.blocks[id(block)]
        super().free(block)


@pytest.mark.parametrize('make', [Recurrent, Journal])
def test_close_gives_all_memory_back(make: Callable[[], Any], tmp_path: Path) -> None:
    device = Counting()
    o = opened(make(), device, directory=tmp_path, device_slots=1, history=2, live_sets=2)
    for i in range(4):
        o.step()
        o.session.save(f'c{i}', persist=i == 0)
    assert 'HOST' in names(o).values()
    o.session.load('c0').result(5)
    o.restore('c0')
    o.session.submit()
    o.close()
    assert not device.blocks


def test_a_folder_that_cannot_be_made_leaves_no_policy_open(tmp_path: Path) -> None:
    closed = []

    class Closing(Recurrent):
        def close(self) -> None:
            closed.append(1)
    (tmp_path / 'file').write_bytes(b'')
    device = Counting()
    refused(Code.IO, opened, Closing(), device, directory=tmp_path / 'file' / 'capsules')
    assert closed == [1]
    assert not device.blocks


def test_p18_a_call_on_a_closed_session_is_answered() -> None:
    o = CASE.session(threaded=True)
    o.step()
    o.session.save('a')
    plan = o.session.plan_restore('a')
    o.close()
    with pytest.raises(Refusal):
        o.session.apply(plan).result(2)
    assert o.session.close(0.1) is True
