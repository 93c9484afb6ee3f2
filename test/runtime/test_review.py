"""What went wrong between a verb and the inference, file or capsule that it met."""
from __future__ import annotations

from collections.abc import Callable
import math
from pathlib import Path
from typing import Any
import weakref

import pytest

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.live import LiveSet
from flashrt_ros.ingest.inbox import LatchEntry, Measured
from flashrt_ros.ingest.spec import WitnessLimit
from flashrt_ros.runtime.guard import compare
from flashrt_ros.runtime.phases import Phase
from test.runtime.policies import gate
from test.runtime.world import ARM, LOCK_STEP, NUMBERED, World

Make = Callable[..., World]


def test_p21_a_restore_behind_an_inference_that_fails_is_a_fault_not_a_success(world: Make) -> None:
    held = gate('failing')
    w = world(ARM, {'policy': {'options': {'gate': 'failing'}}, 'guard': ...}, threaded=True)
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.runner.save('a')
    held.close()
    w.steps(3)                              # the rest of the chunk
    w.advance(w.period)
    w.say([-200.0, 0.1, 0.2])
    w.runner.timer()                        # this inference raises
    assert held.entered.wait(5)
    restored = w.runner.restore('a')
    stops = len(w.sink.of('stop'))
    assert stops == 1
    held.open()
    error = restored.exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.FAULT
    w.sink.wait(lambda: w.phase is Phase.FAULT)
    assert len(w.sink.of('stop')) == stops, 'HOLD sends nothing'
    result = w.go().result
    assert result is not None
    assert result.code is Code.FAULT


@pytest.mark.parametrize('how', ['restore', 'goal'])
def test_p21_a_capsule_that_went_to_disk_between_the_checks_and_the_copy_is_read_back(
        world: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    w = world(NUMBERED, threaded=True, directory=tmp_path / 'capsules', device_slots=1)
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.runner.save('a', persist=True)
    w.sink.wait(lambda: bool(w.sink.told(EventKind.PERSISTED)))
    saved = w.runner.session.digest()
    for n in range(5):
        w.step()
        w.sink.wait(lambda n=n: len(w.sink.actions) == n + 2)
    session = w.runner.session
    plan = session.plan_restore

    def overtaken(*args: Any, **kw: Any) -> Any:
        found = plan(*args, **kw)
        monkeypatch.undo()
        session.save('b')                   # `a` is durable and gives its slot up
        return found
    monkeypatch.setattr(session, 'plan_restore', overtaken)
    if how == 'restore':
        assert w.runner.restore('a').result(5).info.name == 'a'
        device = {n: d for n, d in session.digest().items() if n in ('h', 'inference', 'history')}
        assert device == {n: saved[n] for n in device}
    else:
        result = w.go(capsule='a').wait(5)  # a stop came first, so it is asked for anew
        assert result is not None
        assert result.code is Code.STALE_EPOCH
        assert w.phase is Phase.HOLD


def test_p39_lock_step_with_hold_stops_at_a_restore(world: Make) -> None:
    w = world(NUMBERED, {'run': {**LOCK_STEP, 'on_restore': 'hold'}})
    w.go()
    w.steps(2)
    w.runner.save('a')
    w.runner.restore('a').result(5)
    assert w.phase is Phase.HOLD
    sent = len(w.sink.log)
    w.steps(3)
    assert len(w.sink.log) == sent


def test_p26_a_capsule_s_age_counts_from_its_observation_not_from_the_save(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.steps(2)
    w.runner.stop()
    w.advance(50)
    w.runner.save('a')
    w.advance(20)
    w.say()
    error = w.runner.restore('a').exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.TOO_OLD


def test_p26_a_capsule_stamped_in_the_future_has_no_age(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.steps(2)
    w.runner.save('a')
    w.advance(-5)                           # a clock that was set back, and nobody told
    w.say()
    error = w.runner.restore('a').exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.TOO_OLD


def test_p26_a_witness_that_the_capsule_lacks_refuses() -> None:
    with pytest.raises(Refusal, match='when the capsule was saved') as error:
        compare({'x': WitnessLimit(0.5, False)}, {}, {'x': Measured(0.0, 1, 0.0, None)})
    assert error.value.code is Code.INPUT_STALE


@pytest.mark.parametrize('then', [math.nan, math.inf])
def test_p26_a_distance_that_is_no_number_is_too_far(then: float) -> None:
    moved = compare({'x': WitnessLimit(0.5, False)}, {'x': then},
                    {'x': Measured(0.0, 1, 0.0, None)})
    assert moved.names == ('x',)


def test_p38_every_output_must_be_near_before_any_begins(world: Make) -> None:
    far = {**ARM['outputs']['arm'], 'topic': 'other/joint_trajectory', 'offset': 0.5}
    w = world(ARM, {'outputs': {'far': far}})
    goal = w.go()
    w.step()
    assert goal.result is not None
    assert goal.result.code is Code.START_DEVIATION
    assert 'output far' in goal.result.message
    assert w.sink.of('publish') == []


def test_a_goal_whose_capsule_cannot_be_copied_leaves_the_node_in_fault(
        world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(ARM)
    w.go()
    w.steps(3)
    w.runner.save('a')
    w.runner.stop()
    sent = len(w.sink.log)

    def broken(*_: Any) -> None:
        raise RuntimeError('rows are kept nowhere')
    monkeypatch.setattr(LiveSet, 'load', broken)
    goal = w.go(capsule='a')
    assert goal.result is not None
    assert goal.result.code is Code.FAULT
    assert w.phase is Phase.FAULT
    w.steps(2)
    assert 'action' not in w.sink.kinds()[sent:]


def test_a_runner_that_was_shut_down_does_not_become_active_again(world: Make) -> None:
    w = world(ARM)
    w.runner.shutdown('SIGINT')
    with pytest.raises(Refusal) as refused:
        w.runner.activate()
    assert refused.value.code is Code.WRONG_PHASE
    goal = w.go()
    assert goal.result is not None
    assert goal.result.code is Code.WRONG_PHASE


def test_a_latch_entry_lets_its_message_go_once_it_has_the_digest() -> None:
    calls: list[int] = []

    def digest() -> int:
        calls.append(1)
        return 7
    entry = LatchEntry('joint_states', 5, 9, digest)
    kept = weakref.ref(digest)
    del digest
    assert kept() is not None
    assert [entry.digest, entry.digest] == [7, 7]
    assert calls == [1]
    assert kept() is None
