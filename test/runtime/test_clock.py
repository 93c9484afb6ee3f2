"""P27: ROS time that goes backward."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.policies import gate
from test.runtime.world import ARM, LOCK_STEP, NUMBERED, S, World

Make = Callable[..., World]


def back(w: World, seconds: float = 500.0) -> None:
    w.ns -= round(seconds * S)
    w.runner.clock_jumped(-round(seconds * S))


def test_p27_a_jump_back_stops_raises_the_epoch_and_returns_state_to_origin_whole(world: Make
                                                                                  ) -> None:
    w = world(ARM)
    origin = w.runner.session.digest()
    goal = w.go()
    w.steps(3)
    epoch = w.runner.epoch
    back(w)
    assert w.runner.epoch == epoch + 1
    assert goal.result is not None
    assert goal.result.code is Code.RESTORED
    assert w.phase is Phase.HOLD
    assert w.sink.kinds()[-1] == 'stop'
    assert w.runner.session.digest() == origin
    assert len(w.sink.told(EventKind.CLOCK_JUMP)) == 1
    error = w.runner.restore('origin', if_epoch=epoch).exception(0)
    assert isinstance(error, Refusal)
    assert error.code is Code.STALE_EPOCH


def test_p27_keep_leaves_state_as_it_is(world: Make) -> None:
    w = world(ARM, {'run': {'on_clock_jump': 'keep'}})
    w.go()
    w.steps(3)
    before, epoch = w.runner.session.digest(), w.runner.epoch
    back(w)
    after = w.runner.session.digest()
    flushed = {n for n in before if after[n] != before[n]}
    assert all(n.startswith('queue.') for n in flushed)   # as by any stop
    assert w.runner.status().dropped_rows == 1
    assert w.runner.epoch == epoch + 1
    assert w.phase is Phase.HOLD


def test_p27_lock_step_keep_and_continue_change_no_byte(world: Make) -> None:
    w = world(NUMBERED, {'run': {**LOCK_STEP, 'on_clock_jump': 'keep'}})
    w.go()
    w.steps(3)
    before, epoch = w.runner.session.digest(), w.runner.epoch
    back(w)
    assert w.runner.session.digest() == before
    assert w.runner.epoch == epoch + 1
    w.steps(3)
    assert w.numbers() == [1000, 1001, 1002, 1003, 1004, 2000]


def test_p27_nothing_moves_until_inputs_of_the_new_time_have_come(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.steps(2)
    back(w)
    sent = len(w.sink.log)
    w.go()
    w.advance(0.02)
    w.runner.timer()
    assert 'joint_states' in w.runner.status().waiting_for
    assert len(w.sink.log) == sent
    w.step()
    assert len(w.sink.log) > sent


@pytest.mark.parametrize('threaded', [False, True])
def test_p27_a_jump_within_a_second_after_a_restore_keeps_the_restored_bytes(
        world: Make, threaded: bool) -> None:
    w = world(NUMBERED, threaded=threaded)
    w.go()
    for n in range(3):
        w.step()
        w.sink.wait(lambda n=n: len(w.sink.actions) == n + 1)
    w.runner.save('a')
    w.step()
    w.runner.restore('a').result(5)
    before, epoch = w.runner.session.digest(), w.runner.epoch
    w.steady += 0.9
    back(w)
    assert w.runner.session.digest() == before
    assert w.runner.epoch == epoch
    w.go()
    w.step()                                     # and inputs of the new time are fresh
    w.sink.wait(lambda: w.numbers()[-1] == 2000)
    w.steady += 2
    back(w)
    assert w.runner.status().tick == 0           # a second later it is a jump again


def test_p27_a_jump_while_the_restore_is_still_waiting_keeps_the_restored_bytes(world: Make
                                                                                ) -> None:
    gate('jump')
    w = world(NUMBERED, {'policy': {'options': {'gate': 'jump', 'horizon': 1}}}, threaded=True)
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.runner.save('a')
    gate('jump').close()
    w.step()
    assert gate('jump').entered.wait(5)
    restored = w.runner.restore('a')
    w.steady += 5
    back(w)
    gate('jump').open()
    restored.result(5)
    assert w.runner.status().tick == 1
    assert w.runner.status().epoch == 3


def test_p27_a_restore_right_after_a_jump_keeps_the_restored_bytes(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(3)
    w.runner.save('a')
    w.steps(3)
    back(w)
    w.runner.restore('a').result(0)
    assert w.runner.status().tick == 1
    back(w, 1.0)                                 # the jump's second half, as simulators send it
    assert w.runner.status().tick == 1


def test_p27_lock_step_with_continue_runs_on_from_origin(world: Make) -> None:
    w = world(NUMBERED, {'run': LOCK_STEP})
    goal = w.go()
    w.steps(3)
    back(w)
    assert w.phase is Phase.RUNNING
    assert goal.result is None
    w.steps(2)
    assert w.numbers() == [1000, 1001, 1002, 1000, 1001]


def test_a_jump_forward_or_an_equal_time_changes_nothing(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(2)
    epoch = w.runner.epoch
    w.runner.clock_jumped(10 * S)
    w.runner.clock_jumped(0)
    w.steps(1)
    assert w.runner.epoch == epoch
    assert w.numbers() == [1000, 1001, 1002]
