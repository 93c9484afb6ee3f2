"""P10, P17, P18, P21, P28: order and concurrency, on the session itself."""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import threading
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.reference import HostBound, Recurrent, arrays_of
from flashrt_ros.core.capsule import Event, EventKind, Latch, Mark
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.session import Options, Session
from test.conformance.cases import OWNER_STATE, Case, Owner, parameters
from test.conformance.checks import refused


class Held(Recurrent):
    """A policy whose ticks stop before and after their work until a test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.fails = False

    def bind(self, buffers: Any, device: Any) -> HostBound:
        def tick(b: Any) -> None:
            self.entered.set()
            self.tick(b)  # half of the damage is done when the gate is reached
            if self.fails:
                raise ValueError('the engine broke')
            assert self.gate.wait(20)
        return HostBound(tick, arrays_of(buffers))

    def hidden(self) -> dict[str, str]:
        return {}


def held(**options: Any) -> tuple[Held, Owner]:
    policy = Held()
    session = Session(policy, HostDevice(), host_state=OWNER_STATE,
                      options=Options(**{'threaded': True, **options}))
    return policy, Owner(session)


def test_p10_save_answers_while_an_inference_is_held_and_names_the_boundary_before() -> None:
    policy, o = held()
    o.run(4)
    before, never = o.everything(), None
    policy.gate.clear()
    policy.entered.clear()
    o.session.inputs['obs'][...] = o._inputs[4]['obs']
    inference = o.session.submit()
    assert policy.entered.wait(20)
    info = o.session.save('a')
    assert not inference.done
    assert (info.tick, info.step) == (4, 4)
    policy.gate.set()
    assert inference.wait(20)
    never = o.session.accept(inference)['actions'].tobytes()
    o.session.commit_step()
    o.restore('a')
    assert o.everything() == before
    assert o.step().startswith(never)
    o.close()


def test_p10_two_saves_in_one_tick_share_the_slot_and_budgets_count_it_once() -> None:
    _policy, o = held(device_slots=1)
    o.run(2)
    o.session.save('a', pin=True)
    o.session.save('b', pin=True)
    o.step()
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'c')
    o.close()


def test_a_restore_discards_the_inference_in_flight_and_answers_after_it() -> None:
    policy, o = held()
    o.run(3)
    o.session.save('a')
    saved = o.everything()
    o.run(2)
    policy.gate.clear()
    policy.entered.clear()
    inference = o.session.submit()
    assert policy.entered.wait(20)
    future = o.session.apply(o.session.plan_restore('a'))
    assert not future.done(), 'success before the copy'
    assert o.session.in_flight is None
    name = o.session.save('between').name  # names the restored boundary
    policy.gate.set()
    future.result(20)
    refused(Code.WRONG_PHASE, o.session.accept, inference)
    assert o.everything() == saved
    o.run(1)
    o.restore(name)
    assert o.everything() == saved
    o.close()


def test_slots_come_back_after_discarded_inferences() -> None:
    _policy, o = held()
    o.run(2)
    o.session.save('a')
    free = None
    for _ in range(30):
        o.session.submit()
        o.session.apply(o.session.plan_restore('a')).result(20)
        o.run(1)
        o.restore('a')
        free = free or o.session._pool.free
        assert o.session._pool.free == free
    o.close()


def test_a_failing_tick_is_a_fault_and_every_verb_says_so() -> None:
    policy, o = held()
    o.run(2)
    o.session.save('a')
    policy.fails = True
    inference = o.session.submit()
    assert inference.wait(20)
    error = refused(Code.BACKEND, o.session.accept, inference)
    assert 'the engine broke' in error.message
    for call in (o.session.save, o.session.plan_restore, o.session.plan_rollback,
                 o.session.submit):
        refused(Code.FAULT, call)
    assert {c.name for c in o.session.list()} == {'origin', 'a'}
    o.close()


def test_a_device_that_fails_in_a_restore_is_a_fault_not_a_success(
        monkeypatch: pytest.MonkeyPatch) -> None:
    _policy, o = held()
    o.run(2)
    o.session.save('a')

    def broken(*args: Any) -> None:
        raise Refusal(Code.BACKEND, 'cudaMemcpyAsync: unspecified launch failure')
    monkeypatch.setattr(o.session._live.device, 'copy', broken)
    with pytest.raises(Refusal) as error:
        o.session.apply(o.session.plan_restore('a')).result(20)
    assert error.value.code is Code.FAULT
    monkeypatch.undo()
    refused(Code.FAULT, o.session.submit)
    o.close()


def test_p18_many_threads_each_get_one_definite_answer() -> None:
    _policy, o = held(max_capsules=20, device_slots=3)
    stop = threading.Event()
    answers: list[str] = []

    def verbs(seed: int) -> int:
        rng = np.random.default_rng(seed)
        n = 0
        verbs_of: list[Callable[[str, str], Any]] = [
            lambda own, _: o.session.save(own, overwrite=True),
            lambda *_: o.session.keep(pin=bool(rng.integers(2))),
            lambda own, _: o.session.drop(own),
            lambda *_: o.session.list(),
            lambda _, other: o.session.plan_restore(other)]
        for i in range(60):
            try:
                verbs_of[int(rng.integers(5))](f't{seed}-{i % 4}', f't{(seed + 1) % 4}-{i % 4}')
                answers.append('ok')
            except Refusal as error:
                answers.append(error.code.name)
            n += 1
        return n
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(verbs, s) for s in range(4)]
        steps = 0
        while not all(f.done() for f in futures):
            o.step()
            steps += 1
            if steps % 7 == 0:
                o.session.apply(o.session.plan_restore('origin')).result(20)
        stop.set()
        assert sum(f.result(30) for f in futures) == 240
    assert len(answers) == 240
    assert set(answers) <= {'ok', 'NOT_FOUND', 'EVICTED', 'BUDGET_EXCEEDED'}
    o.close()


@pytest.mark.parametrize('case', parameters())
def test_p17_nothing_is_bound_or_allocated_in_steady_state(case: Case) -> None:
    o = case.session(history=3)
    o.run(3)
    o.session.save('warm')
    o.restore('warm')
    device = o.session.device
    addresses = {n: b.ptr for n, b in o.session._live.arena.buffers.items()}
    for method in ('alloc', 'free'):
        def forbidden(*args: Any, method: str = method) -> None:
            raise AssertionError(f'{method} in steady state')
        setattr(device, method, forbidden)
    bind = o.session.policy.bind
    o.session.policy.bind = forbidden  # type: ignore[method-assign]
    try:
        for i in range(5):
            o.run(2)
            o.session.save(f'c{i}', overwrite=True)
            o.restore(f'c{i}')
        assert {n: b.ptr for n, b in o.session._live.arena.buffers.items()} == addresses
    finally:
        del device.alloc, device.free
        o.session.policy.bind = bind  # type: ignore[method-assign]
        o.close()


def test_p21_durable_is_said_only_after_the_file_is_synced(tmp_path: Path) -> None:
    events: list[Event] = []
    policy = Held()
    session = Session(policy, HostDevice(), host_state=OWNER_STATE, on_event=events.append,
                      options=Options(directory=tmp_path))
    o = Owner(session)
    o.run(1)
    policy.gate.clear()
    policy.entered.clear()
    session.submit()
    assert policy.entered.wait(20)
    info = session.save('a', persist=True)
    assert not info.durable
    assert not list(tmp_path.glob('*.capsule'))
    assert EventKind.PERSISTED not in [e.kind for e in events]
    policy.gate.set()
    session.close()
    assert events[-1].kind is EventKind.PERSISTED
    assert len(list(tmp_path.glob('*.capsule'))) == 1


def test_p28_a_repeated_request_id_gets_the_first_answer_and_has_no_second_effect() -> None:
    _policy, o = held()
    o.run(1)
    first = o.session.save('a', request_id='r1')
    o.run(1)
    assert o.session.save('a', request_id='r1') == first
    assert o.session.save('', request_id='r1') == first
    assert len(o.session.list()) == 2
    refused(Code.EXISTS, o.session.save, 'a', request_id='r2')
    o.close()


def test_p28_rollback_without_conditions_is_idempotent() -> None:
    _policy, o = held()
    o.run(2)
    o.session.save('a')
    saved = o.everything()
    o.run(2)
    for n in (0, 1, 0):
        o.session.apply(o.session.plan_rollback(n)).result(20)
        assert o.everything() == saved
    o.close()


def test_a_pending_latch_belongs_to_the_boundary() -> None:
    """What was started and not yet accepted starts again from its own inputs after a restore."""
    _policy, o = held()
    o.run(2)
    o.session.inputs['obs'][...] = o._inputs[2]['obs']
    latch = Latch({'obs': o.session.inputs['obs'].tobytes()}, step=2)
    inference = o.session.submit(latch)
    o.session.commit_step(Mark(stamp_ns=5), pending=latch)
    o.session.save('a')
    assert inference.wait(20)
    never = o.session.accept(inference)['actions'].tobytes()
    o.session.commit_step()
    o.run(2, first=60)
    o.restore('a')
    again = o.session.pending_after_restore
    assert again == latch
    inference = o.session.submit(again)
    assert inference.wait(20)
    assert o.session.accept(inference)['actions'].tobytes() == never
    o.close()


def test_history_0_saves_between_inferences_only() -> None:
    policy, o = held(history=0)
    o.run(2)
    saved = o.everything()
    o.session.save('a')
    o.run(2)
    policy.gate.clear()
    policy.entered.clear()
    inference = o.session.submit()
    assert policy.entered.wait(20)
    refused(Code.BUSY, o.session.save, 'b')
    policy.gate.set()
    assert inference.wait(20)
    o.session.accept(inference)
    o.session.commit_step()
    o.restore('a')
    assert o.everything() == saved
    o.close()
