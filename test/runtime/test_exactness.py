"""P2 and P6 with the real queue and observation: the future after a restore is the same future."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from test.runtime.policies import gate
from test.runtime.world import JOINTS, LOCK_STEP, NUMBERED, World

Make = Callable[..., World]
OBS: dict[str, Any] = {
    'policy': {'factory': 'test.runtime.policies:numbered',
               'options': {'obs_dim': 12, 'action_dim': 2, 'horizon': 7}},
    'inputs': {'obs': [
        {'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS},
        {'term': 'last_action', 'scale': 0.001},
        {'term': 'phase', 'period_s': 0.26},
        {'term': 'counter', 'scale': 0.01},
        {'term': 'history', 'length': 4, 'of': [
            {'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS[:1]}]}]},
}


def pose(i: int) -> list[float]:
    return [np.sin(0.37 * i), np.cos(0.21 * i), 0.01 * i]


def play(w: World, first: int, last: int) -> list[bytes]:
    """Send the inputs of steps first to last - 1; return the bytes of the actions."""
    before = len(w.sink.actions)
    for i in range(first, last):
        w.advance(0.02)
        w.say(pose(i))
    actions = w.sink.actions[before:]
    assert len(actions) == last - first
    return [a.tobytes() for a in actions]


RUNS: list[dict[str, Any]] = [
    {}, {'start_at': 2, 'latency_steps': 2}, {'start_at': 3, 'latency_steps': 1, 'execute': 5},
    {'start_at': 1, 'latency_steps': 3}, {'start_at': 4, 'latency_steps': 2, 'blend': 'ensemble'}]


@pytest.mark.parametrize('run', RUNS, ids=str)
@pytest.mark.parametrize('disturb', [1, 11])
def test_p2_lock_step_goes_on_byte_for_byte_at_every_cursor_position(
        world: Make, run: dict[str, Any], disturb: int) -> None:
    w = world(NUMBERED, OBS, {'run': {**LOCK_STEP, **run}}, max_capsules=64, device_slots=40)
    w.go()
    flights = 0
    reference = []
    saved = {}
    for i in range(18):
        reference += play(w, i, i + 1)
        saved[i] = w.runner.save().name
        flights += w.runner._hub.flight is not None
    reference += play(w, 18, 34)
    assert bool(flights) is bool(run)            # with and without an inference in flight
    for i, name in saved.items():
        play(w, 100, 100 + disturb)
        w.runner.restore(name).result(0)
        assert play(w, i + 1, i + 16) == reference[i + 1:i + 16], f'saved after step {i}'


@pytest.mark.parametrize('at_once', [False, True])
def test_p2_through_hold_and_a_new_goal_the_restored_queue_goes_on(world: Make, at_once: bool
                                                                   ) -> None:
    w = world(NUMBERED, OBS, {'run': {**LOCK_STEP, 'on_restore': 'hold', 'start_at': 2,
                                      'latency_steps': 2}})
    w.go()
    reference = play(w, 0, 6)
    w.runner.save('a')
    assert w.runner._hub.flight is not None
    reference += play(w, 6, 20)
    w.runner.restore('a').result(0)
    w.advance(0.02)
    w.say(pose(99))                              # in HOLD: nothing moves, nothing is used up
    w.runner.reset().result(0)
    if at_once:
        w.go(capsule='a')
    else:
        w.runner.restore('a').result(0)
        w.go()
    assert play(w, 6, 20) == reference[6:]


def test_p2_rollback_by_steps_returns_to_the_step(world: Make) -> None:
    w = world(NUMBERED, OBS, {'run': LOCK_STEP}, history=3)
    w.go()
    reference = play(w, 0, 20)
    w.runner.rollback(steps=9).result(0)
    assert play(w, 11, 20) == reference[11:]


@pytest.mark.parametrize('threaded', [False, True])
def test_p2_live_the_first_inference_after_a_restore_is_the_same(world: Make, threaded: bool
                                                                 ) -> None:
    w = world(NUMBERED, {**OBS, 'inputs': {'obs': [
        {'term': 'joint_position', 'topic': 'joint_states', 'joints': JOINTS, 'max_age_s': 1.0},
        {'term': 'last_action', 'scale': 0.001}, {'term': 'phase', 'period_s': 0.26},
        {'term': 'counter'}, {'term': 'constant', 'value': [0.0] * 4}]}},
        {'run': {'execute': 1}}, threaded=threaded)

    def play_live(first: int, last: int) -> list[bytes]:
        before = len(w.sink.actions)
        for n, i in enumerate(range(first, last), before + 1):
            w.step(pose(i))
            w.sink.wait(lambda n=n: len(w.sink.actions) >= n)
        return [a.tobytes() for a in w.sink.actions[before:]]
    w.go()
    play_live(0, 5)
    w.runner.save('a')
    reference = play_live(5, 12)
    w.runner.restore('a').result(5)
    w.go()
    assert play_live(5, 12) == reference


def test_p6_a_step_that_was_begun_and_stopped_is_no_step(world: Make) -> None:
    """Phase, counter and history do not advance for a step whose chunk never came."""
    gate('x')
    w = world(NUMBERED, OBS, {'run': {**LOCK_STEP, 'on_restore': 'hold'},
                              'policy': {'options': {'gate': 'x'}}}, threaded=True)
    before = {n: a.tobytes() for n, a in w.runner.session.host.items()}
    gate('x').close()
    w.go()
    w.say(pose(0))
    assert w.runner._hub.begun
    w.runner.stop()
    assert {n: a.tobytes() for n, a in w.runner.session.host.items()} == before


def test_p2_saved_while_an_inference_is_held_in_the_middle(world: Make) -> None:
    """The boundary keeps what that inference latched; it is run again, on the same bytes."""
    gate('held')
    w = world(NUMBERED, OBS, {'run': {**LOCK_STEP, 'start_at': 3, 'latency_steps': 3},
                              'policy': {'options': {'gate': 'held'}}}, threaded=True)
    w.go()

    def play_threaded(first: int, last: int) -> list[bytes]:
        before = len(w.sink.actions)
        for n, i in enumerate(range(first, last), before + 1):
            w.advance(0.02)
            w.say(pose(i))
            w.sink.wait(lambda n=n: len(w.sink.actions) >= n)
        return [a.tobytes() for a in w.sink.actions[before:]]
    reference = play_threaded(0, 4)
    gate('held').close()
    reference += play_threaded(4, 6)             # step 4 starts inference 2, which is held
    assert gate('held').entered.wait(5)
    w.runner.save('a')
    assert w.runner.status().tick == 1
    gate('held').open()
    reference += play_threaded(6, 20)
    play_threaded(100, 105)
    w.runner.restore('a').result(5)
    assert play_threaded(6, 20) == reference[6:]
