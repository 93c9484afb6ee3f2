"""P40: goals, their limits, and what they tell."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.world import NUMBERED, PROMPTED, World, result

Make = Callable[..., World]


def test_p40_a_new_goal_preempts_and_no_action_of_the_old_one_follows(world: Make) -> None:
    w = world(NUMBERED)
    first = w.go()
    w.steps(2)
    second = w.go()
    assert result(first)[0] is Code.PREEMPTED
    assert second.result is None
    w.steps(2)
    assert w.numbers() == [1000, 1001, 2000, 2001]
    assert w.runner.goal is second
    assert not w.runner.cancel(first)
    assert w.phase is Phase.RUNNING


@pytest.mark.parametrize(('request_', 'code'), [
    ({'if_epoch': 99}, Code.STALE_EPOCH),
    ({'capsule': 'nothing'}, Code.NOT_FOUND),
    ({'prompt': 'go'}, Code.INVALID_ARGUMENT),
    ({'max_duration_s': -1.0}, Code.INVALID_ARGUMENT),
    ({'max_duration_s': float('nan')}, Code.INVALID_ARGUMENT),
])
def test_p40_a_refused_goal_ends_at_once_and_leaves_the_running_one_alone(
        world: Make, request_: dict[str, Any], code: Code) -> None:
    w = world(NUMBERED)
    running = w.go()
    w.steps(2)
    before, epoch = w.runner.session.digest(), w.runner.epoch
    assert result(w.go(**request_))[0] is code
    assert running.result is None
    assert (w.runner.session.digest(), w.runner.epoch) == (before, epoch)
    w.steps(1)
    assert w.numbers() == [1000, 1001, 1002]
    assert code.name in w.runner.status().last_refusal


def test_a_goal_s_if_epoch_must_equal_the_present_one(world: Make) -> None:
    w = world(NUMBERED)
    epoch = w.runner.epoch
    w.runner.stop()
    assert result(w.go(if_epoch=epoch))[0] is Code.STALE_EPOCH    # a late goal starts motion
    assert w.go(if_epoch=epoch + 1).result is None


def test_the_epoch_rises_once_per_verb(world: Make) -> None:
    w = world(PROMPTED)
    w.say()
    epoch = w.runner.epoch
    verbs: list[Callable[[], Any]] = [
        lambda: w.go(), w.runner.stop, lambda: w.go(prompt='x'), w.runner.save,
        lambda: w.runner.restore('').result(0), lambda: w.go(capsule='origin', prompt='y'),
        lambda: w.go(), w.runner.pause, w.runner.resume, lambda: w.runner.reset().result(0),
        lambda: w.runner.feed('prompt', SimpleNamespace(data='z')),
        lambda: w.runner.feed('prompt', SimpleNamespace(data='z'))]
    rises = []
    for verb in verbs:
        w.advance(0.01)
        w.say()
        verb()
        rises.append(w.runner.epoch - epoch)
        epoch = w.runner.epoch
    assert rises == [1, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 0]


def test_goals_end_by_ticks_by_time_and_by_the_default_limit(world: Make) -> None:
    w = world(NUMBERED)
    by_ticks = w.go(max_ticks=2)
    w.steps(10)
    assert result(by_ticks) == (Code.OK, 'max_ticks 2 is reached')
    assert by_ticks.result.ticks == 2
    assert w.numbers() == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002, 2003, 2004]
    assert w.phase is Phase.HOLD

    by_time = w.go(max_duration_s=0.1)
    w.steps(20)
    assert result(by_time)[0] is Code.OK
    assert len(w.numbers()) == 10 + 4            # the tick at 0.1 s is too late
    default = w.runner.start()
    w.steps(2)
    w.steady += 60
    w.runner.poll()
    assert result(default)[0] is Code.LIMIT_REACHED
    assert default.result.last.name == ''
    w.runner.save('a')
    last = w.go(max_ticks=1)
    w.steps(6)
    assert last.result.last.name == 'a'


def test_a_goal_that_never_got_its_inputs_ends_by_its_limit_and_says_what_it_waited_for(
        world: Make) -> None:
    w = world(NUMBERED)
    goal = w.go(max_duration_s=1.0)
    w.runner.timer()
    assert 'joint_states' in w.runner.status().waiting_for
    w.steady += 1
    w.runner.timer()
    assert result(goal)[0] is Code.INPUT_STALE
    assert 'joint_states' in result(goal)[1]
    assert w.runner.status().waiting_for == ''


def test_a_goal_tells_its_callbacks_once_without_the_lock(world: Make) -> None:
    w = world(NUMBERED)
    held = []
    goal = w.go()
    goal.add_done_callback(lambda g: held.append((g.result.code, w.runner._hub._depth)))
    w.runner.stop()
    goal.add_done_callback(lambda g: held.append((g.result.code, w.runner._hub._depth)))
    assert held == [(Code.STOPPED, 0)] * 2
    assert goal.wait(0) is goal.result


def test_feedback_says_how_the_goal_fares(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(2)
    w.advance(0.1)
    w.runner.poll()
    f = w.sink.feedback[-1]
    assert (f.phase, f.tick, f.queue_depth, f.late_ticks) == (Phase.RUNNING, 1, 3, 0)
    assert f.input_age_s == pytest.approx(0.12)


def test_a_shadow_goal_computes_everything_and_commands_nothing(world: Make) -> None:
    w = world(NUMBERED)
    w.go(shadow=True)
    w.steps(3)
    w.runner.stop()
    assert w.phase is Phase.HOLD
    assert w.sink.kinds() == ['shadow'] * 3
    assert w.runner.status().step == 3


def test_a_goal_with_a_capsule_starts_from_it(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(6)
    w.runner.save('a')
    w.steps(6)
    w.go(capsule='a')
    w.steps(1)
    w.go(capsule='origin')
    w.steps(1)
    assert w.numbers()[-2:] == [3000, 1000]


def test_an_inactive_node_refuses_goals_and_takes_capsule_verbs(world: Make) -> None:
    w = world(NUMBERED, active=False)
    assert result(w.go())[0] is Code.WRONG_PHASE
    w.runner.save('a')
    w.runner.restore('a').result(0)
    w.runner.activate()
    assert w.phase is Phase.HOLD
    with pytest.raises(Refusal, match='WRONG_PHASE'):
        w.runner.pause()
