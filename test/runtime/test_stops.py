"""P37: every way out of RUNNING stops the robot; no other phase sends anything."""
from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.fake_controller import FakeController
from test.runtime.world import ARM, ENABLED, JOINTS, LOCK_STEP, NUMBERED, World, enable

Make = Callable[..., World]
LIVE = {**ENABLED, 'outputs': {'arm': {'start_tolerance': 10.0}}}


def stale(w: World) -> None:
    for _ in range(8):
        w.advance(0.02)
        enable(w)
        w.runner.timer()


def silence(w: World) -> None:
    w.advance(0.3)
    w.say()
    w.runner.timer()


def jump(w: World) -> None:
    w.ns -= 100_000_000_000
    w.runner.clock_jumped(-100_000_000_000)


def time_is_up(w: World) -> None:
    w.steady += 60
    enable(w)
    w.step()


def bad_action(w: World) -> None:
    w.step([101.0, 0.1, 0.2])
    w.steps(3)


# way out -> (what is done, phase afterwards, code of the goal or None where it goes on)
WAYS: dict[str, tuple[Callable[[World], object], Phase, Code | None]] = {
    'stop': (lambda w: w.runner.stop(), Phase.HOLD, Code.STOPPED),
    'cancel': (lambda w: w.runner.cancel(w.runner.goal), Phase.HOLD, Code.CANCELLED),
    'preempt': (lambda w: w.go(), Phase.RUNNING, Code.PREEMPTED),
    'preempt by a shadow goal': (lambda w: w.go(shadow=True), Phase.SHADOW, Code.PREEMPTED),
    'restore': (lambda w: w.runner.restore('a').result(0), Phase.HOLD, Code.RESTORED),
    'rollback': (lambda w: w.runner.rollback().result(0), Phase.HOLD, Code.RESTORED),
    'reset': (lambda w: w.runner.reset().result(0), Phase.HOLD, Code.RESTORED),
    'goal with a capsule': (lambda w: w.go(capsule='a'), Phase.RUNNING, Code.PREEMPTED),
    'clock jump': (jump, Phase.HOLD, Code.RESTORED),
    'pause': (lambda w: w.runner.pause(), Phase.PAUSED, None),
    'enable false': (lambda w: enable(w, False), Phase.PAUSED, None),
    'enable silent': (silence, Phase.PAUSED, None),
    'stale input': (stale, Phase.HOLD, Code.INPUT_STALE),
    'NaN input': (lambda w: w.step([0.0, float('nan'), 0.2]), Phase.HOLD, Code.INPUT_STALE),
    'NaN action': (bad_action, Phase.HOLD, Code.BACKEND),
    'the policy raises': (lambda w: (w.step([-200.0, 0, 0]), w.steps(3)), Phase.FAULT, Code.FAULT),
    'time limit': (time_is_up, Phase.HOLD, Code.LIMIT_REACHED),
    'deactivate': (lambda w: w.runner.deactivate(), Phase.HOLD, Code.STOPPED),
    'shutdown': (lambda w: w.runner.shutdown('SIGINT'), Phase.HOLD, Code.STOPPED),
}


def running(world: Make, *changes: object) -> World:
    w = world(ARM, LIVE, *changes)
    enable(w)
    w.go()
    w.step()
    w.runner.save('a')
    w.steps(2)
    assert w.phase is Phase.RUNNING
    return w


@pytest.mark.parametrize('way', WAYS)
def test_p37_every_way_out_of_running_sends_on_stop_before_silence(world: Make, way: str) -> None:
    w = running(world)
    goal = w.runner.goal
    do, phase, code = WAYS[way]
    do(w)
    assert w.phase is phase
    assert w.sink.kinds().count('stop') == 1
    assert w.sink.kinds()[-1] == 'stop'
    command = w.sink.of('stop')[0]
    assert command.names == tuple(JOINTS)
    assert command.time_s == 0.1
    assert command.points is not None
    # of a joint that is NaN by now, what was measured last
    measured = [p if np.isfinite(p) else q for p, q in zip(w.pose, [0.0, 0.1, 0.2], strict=True)]
    assert np.allclose(command.points, [measured])
    assert goal is not None
    if code is None:
        assert goal.result is None
    else:
        assert goal.result is not None
        assert goal.result.code is code
        assert [r.code for g, r in w.sink.done if g is goal] == [code]


@pytest.mark.parametrize('way', WAYS)
def test_p37_afterwards_nothing_is_sent_without_a_new_goal(world: Make, way: str) -> None:
    w = running(world)
    WAYS[way][0](w)
    if w.phase is Phase.RUNNING:
        return
    n = len(w.sink.of('publish')) + len(w.sink.of('stop'))
    for _ in range(10):
        w.advance(0.02)
        w.say([0.0, 0.1, 0.2])
        enable(w)
        w.runner.timer()
        w.runner.poll()
    assert len(w.sink.of('publish')) + len(w.sink.of('stop')) == n


@pytest.mark.parametrize('phase', ['hold', 'paused', 'shadow', 'inactive'])
def test_p37_in_every_other_phase_no_verb_sends_anything(world: Make, phase: str) -> None:
    for do in (w for name, (w, _, _) in WAYS.items() if name != 'preempt'
               and name != 'goal with a capsule'):
        w = running(world)
        {'hold': w.runner.stop, 'paused': w.runner.pause, 'inactive': w.runner.deactivate,
         'shadow': lambda w=w: w.go(shadow=True)}[phase]()
        w.step()
        sent = len(w.sink.of('publish')) + len(w.sink.of('stop'))
        try:
            do(w)
        except (Refusal, AttributeError):        # pause in HOLD; cancel without a goal
            pass
        assert len(w.sink.of('publish')) + len(w.sink.of('stop')) == sent


def follow(w: World, robot: FakeController, seen: int) -> int:
    """Give a controller what was sent since; return how much that is by now."""
    sent = [c for kind, _, c in w.sink.log if kind != 'shadow']
    for c in sent[seen:]:
        robot.message(c.names, [] if c.points is None else c.points.tolist(), c.times)
    return len(sent)


@pytest.mark.parametrize('way', ['stop', 'cancel', 'restore', 'reset', 'pause', 'enable false',
                                 'stale input', 'NaN action', 'the policy raises', 'deactivate',
                                 'shutdown', 'clock jump'])
@pytest.mark.parametrize('whole', [False, True])
def test_p37_the_controller_stays_at_the_measured_pose(world: Make, way: str, whole: bool) -> None:
    """It has accepted a trajectory of the abandoned future and would finish it."""
    w = running(world, {'outputs': {'arm': {'chunk_as_trajectory': whole}},
                        'policy': {'options': {'horizon': 40}}})
    robot = FakeController(JOINTS, w.pose)
    seen = follow(w, robot, 0)
    robot.advance(0.02)
    assert robot.accepted
    w.pose = robot.setpoint.tolist()
    w.say()
    if way == 'NaN action':                      # a new chunk is needed for that
        w.runner.stop()
        w.go()
        seen = follow(w, robot, seen)
    if way == 'the policy raises':
        w.runner.stop()
        w.go()
        seen = follow(w, robot, seen)
    WAYS[way][0](w)
    seen = follow(w, robot, seen)
    assert w.sink.kinds()[-1] == 'stop'
    pose = w.sink.of('stop')[-1].values
    samples = robot.advance(1.0)
    late = samples[round((0.1 + 2 * 0.02) / 0.01):]
    assert np.abs(late - pose).max() < 1e-9


def test_a_hold_with_joints_that_were_never_measured_sends_nothing_and_says_so(world: Make) -> None:
    w = world(ARM, {'outputs': {'arm': {'start_tolerance': 10.0}}})
    goal = w.go()
    assert 'never measured' in w.runner.stop()
    assert w.sink.log == []
    assert goal.result is not None
    assert 'never measured' in goal.result.message


def test_hold_sends_the_measured_joints_never_a_queued_row(world: Make) -> None:
    w = running(world)
    w.say([0.3, 0.4, 0.5])
    w.advance(5)                                 # past their age limit
    w.runner.stop()
    assert np.allclose(w.sink.of('stop')[0].values, [0.3, 0.4, 0.5])


@pytest.mark.parametrize('trigger', ['timer', 'lock step'])
def test_a_repeat_goes_on_until_the_next_goal(world: Make, trigger: str) -> None:
    w = world(NUMBERED, {'outputs': {'actions': {'on_stop': {'do': 'zero', 'repeat': True}}}},
              {'run': LOCK_STEP} if trigger != 'timer' else {})
    w.go()
    w.steps(2)
    w.runner.stop()
    w.steps(3)
    assert w.sink.kinds() == ['publish'] * 2 + ['stop'] * 4
    w.go(shadow=True)
    w.steps(2)
    w.runner.stop()
    w.steps(2)
    assert w.sink.kinds().count('stop') == 4     # somebody else may be driving
    w.go()
    w.steps(2)
    w.runner.stop()
    w.runner.deactivate()
    w.steps(2)
    assert w.sink.kinds()[-1] == 'stop'
    assert w.sink.kinds().count('stop') == 5


def test_one_output_that_cannot_be_sent_does_not_keep_the_others_moving(
        world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    second = {'topic': 'grip', 'type': 'std_msgs/msg/Float64MultiArray', 'kind': 'velocity',
              'port': 'actions', 'on_stop': {'do': 'zero'}}
    w = running(world, {'outputs': {'grip': second}})
    send = w.sink.stop

    def stop(output: str, command: object) -> None:
        if output == 'arm':
            raise OSError('no publisher')
        send(output, command)                    # type: ignore[arg-type]
    monkeypatch.setattr(w.sink, 'stop', stop)
    assert 'no publisher' in w.runner.stop()
    assert [o for k, o, _ in w.sink.log if k == 'stop'] == ['grip']
    assert w.phase is Phase.HOLD


def test_p36_live_the_queue_is_flushed_and_dropped_rows_are_counted(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(2)                                   # 3 rows left
    w.runner.save('a')
    w.steps(1)                                   # 2 rows left
    w.runner.restore('a').result(0)
    assert w.runner.status().dropped_rows == 2 + 3
    assert w.runner.status().queue_depth == 0
    w.go()
    w.steps(2)
    assert w.numbers() == [1000, 1001, 1002, 2000, 2001]   # not 1002 again


def test_p36_in_lock_step_the_queue_goes_on(world: Make) -> None:
    w = world(NUMBERED, {'run': LOCK_STEP})
    w.go()
    w.steps(2)
    w.runner.save('a')
    w.steps(2)
    w.runner.restore('a').result(0)
    assert w.runner.status().queue_depth == 3
    assert w.runner.status().dropped_rows == 1
    w.steps(3)
    assert w.numbers() == [1000, 1001, 1002, 1003, 1002, 1003, 1004]


def test_p36_relative_rows_are_not_resumed_live(world: Make) -> None:
    w = world(ARM, {'policy': {'options': {'to': 0.0}}, 'guard': ...,
                    'outputs': {'arm': {'relative': True}}})
    w.go()
    w.step([0.5, 0.5, 0.5])
    w.runner.save('a')
    w.step([0.5, 0.5, 0.5])
    w.runner.restore('a').result(0)
    w.go()
    w.step([0.7, 0.7, 0.7])
    assert np.allclose(w.sink.actions[-1], 0.71)   # from the pose of now, row 0 of a new chunk


def test_p41_clipped_and_rate_limited_values_are_counted(world: Make) -> None:
    w = world(ARM, {'policy': {'options': {'to': 1.0, 'horizon': 1}}, 'guard': ...,
                    'outputs': {'arm': {'start_tolerance': 10.0, 'clip': [-0.05, 0.05],
                                        'max_rate': 1.0}}})
    w.go()
    for _ in range(6):
        w.step([0.0, 0.0, 0.0])
    values = np.array(w.sink.actions)
    assert np.all(np.abs(values) <= 0.05)
    assert np.allclose(np.diff(values[:, 0])[:2], [0.02, 0.01])   # 1 rad/s at 50 Hz, then the clip
    assert w.runner.status().clipped == 18
