"""P29, P38, P39: what permits motion and what forbids it; the first action."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.sink import GoalRequest
from test.runtime.policies import gate
from test.runtime.world import ARM, ENABLED, LOCK_STEP, World, enable, result

Make = Callable[..., World]


def test_p38_publishing_does_not_begin_far_from_the_measured_joints(world: Make) -> None:
    w = world(ARM, {'policy': {'options': {'to': 0.5}}})
    goal = w.go()
    w.step([0.5, 0.5, 0.2])
    code, message = result(goal)
    assert code is Code.START_DEVIATION
    assert 'c' in message
    assert '0.1' in message
    assert w.sink.of('publish') == []
    assert w.phase is Phase.HOLD
    w.go()
    w.step([0.5, 0.5, 0.5])
    assert len(w.sink.of('publish')) == 1


def test_p38_the_rule_holds_again_after_resume_preempt_and_restore_not_within(world: Make) -> None:
    w = world(ARM, {'policy': {'options': {'to': 0.5}}, 'guard': ...})
    begin: dict[str, Callable[[], Any]] = {
        'resume': lambda: (w.runner.pause(), w.runner.resume()),
        'preempt': lambda: w.go(),
        'restore': lambda: (w.runner.restore('').result(0), w.go())}
    for how, again in begin.items():
        w.go()
        w.step([0.5, 0.5, 0.5])
        w.runner.save()
        w.step([0.9, 0.5, 0.5])                  # within motion there is no such rule
        assert w.phase is Phase.RUNNING
        again()
        n = len(w.sink.of('publish'))
        w.step([0.9, 0.5, 0.5])
        assert w.phase is Phase.HOLD, how
        assert len(w.sink.of('publish')) == n


def test_p38_a_shadow_goal_may_start_anywhere(world: Make) -> None:
    w = world(ARM, {'policy': {'options': {'to': 0.5}}})
    w.go(shadow=True)
    w.step()
    assert w.sink.kinds() == ['shadow']


def test_p38_after_a_start_the_rate_limit_counts_from_the_measured_joints(world: Make) -> None:
    w = world(ARM, {'outputs': {'arm': {'max_rate': 0.5}}, 'guard': ...})
    w.go()
    w.steps(2)
    w.runner.stop()
    w.step([2.0, 2.0, 2.0])                      # somebody else moved the robot
    w.go()
    w.step()
    assert np.allclose(w.sink.actions[-1], 2.01)


def test_p39_nothing_but_a_goal_starts_motion(world: Make) -> None:
    w = world(ARM, ENABLED)
    enable(w)
    w.go()
    w.step()
    w.runner.save('a')
    sent = len(w.sink.log)
    for event in (lambda: w.runner.restore('a').result(0), lambda: w.runner.reset().result(0),
                  lambda: enable(w), lambda: (w.runner.deactivate(), w.runner.activate()),
                  lambda: w.runner.restore('origin').result(0)):
        event()
        for _ in range(3):
            enable(w)
            w.step()
        assert w.phase is Phase.HOLD
    assert len(w.sink.log) == sent + 1           # one on_stop


def test_p39_a_returning_enable_does_not_resume_by_itself(world: Make) -> None:
    w = world(ARM, ENABLED)
    enable(w)
    goal = w.go()
    w.step()
    enable(w, False)
    assert w.phase is Phase.PAUSED
    enable(w, True)
    w.steps(3)
    assert w.phase is Phase.PAUSED
    assert goal.result is None
    assert 'enable' in w.runner.status().waiting_for
    enable(w)
    w.runner.resume()
    w.step()
    assert w.phase is Phase.RUNNING
    assert w.sink.kinds()[-1] == 'publish'


def test_enable_that_falls_silent_while_a_step_waits_for_its_chunk_keeps_it_unpublished(
        world: Make) -> None:
    gate('silent')
    w = world(ARM, ENABLED, {'policy': {'options': {'gate': 'silent'}}}, threaded=True)
    enable(w)
    goal = w.go()
    gate('silent').close()
    w.step()
    assert gate('silent').entered.wait(5)
    w.advance(0.3)
    gate('silent').open()
    w.sink.wait(lambda: w.phase is Phase.PAUSED)
    assert w.sink.kinds() == ['stop']
    assert goal.result is None


def test_the_enable_topic_is_among_those_to_subscribe_to(world: Make) -> None:
    w = world(ARM, ENABLED, {'qos': {'enable': {'reliable': True}}})
    found = {t.topic: (t.type, t.reliable) for t in w.runner.topics()}
    assert found == {'joint_states': ('sensor_msgs/msg/JointState', False),
                     'enable': ('std_msgs/msg/Bool', True)}


def test_without_enable_neither_goal_nor_resume_is_possible_but_a_shadow_goal_is(world: Make
                                                                                 ) -> None:
    w = world(ARM, ENABLED)
    assert result(w.go())[0] is Code.PAUSED
    assert w.go(shadow=True).result is None
    enable(w)
    w.go()
    w.step()
    w.runner.pause()
    w.advance(1)
    w.say()
    with pytest.raises(Refusal, match='PAUSED: enable is silent'):
        w.runner.resume()
    enable(w, False)
    with pytest.raises(Refusal, match='PAUSED: enable is false'):
        w.runner.resume()


def test_resume_needs_fresh_inputs_and_the_same_goal(world: Make) -> None:
    w = world(ARM)
    goal = w.go()
    w.step()
    w.runner.pause()
    w.advance(1)
    with pytest.raises(Refusal, match='INPUT_STALE'):
        w.runner.resume()
    w.say()
    w.runner.resume()
    w.step()
    assert goal.result is None
    w.runner.pause()
    w.runner.restore('origin').result(0)
    assert result(goal)[0] is Code.RESTORED
    with pytest.raises(Refusal, match='WRONG_PHASE'):
        w.runner.resume()


def test_a_paused_goal_s_time_runs_on(world: Make) -> None:
    w = world(ARM)
    goal = w.go(max_duration_s=1.0)
    w.step()
    w.runner.pause()
    sent = len(w.sink.log)
    w.steady += 1
    w.runner.timer()
    assert result(goal)[0] is Code.OK
    assert w.phase is Phase.HOLD
    assert len(w.sink.log) == sent


def test_autorun_leads_to_running_once(world: Make) -> None:
    w = world(ARM, {'run': {'autorun': True}})
    assert w.phase is Phase.RUNNING
    w.steps(2)
    w.steady += 1000                             # no default limit for a base policy
    w.steps(2)
    assert w.phase is Phase.RUNNING
    w.runner.stop()
    w.steps(2)
    assert w.phase is Phase.HOLD
    w.runner.start()
    assert w.phase is Phase.RUNNING


def test_p29_nan_in_a_used_input_stops_that_inference_in_an_unused_one_does_not(world: Make
                                                                                ) -> None:
    w = world(ARM, {'inputs': {'q': [{'term': 'joint_position', 'topic': 'joint_states',
                                      'joints': ['a', 'b']}]},
                    'policy': {'options': {'joints': 2}},
                    'outputs': {'arm': {'joints': ['a', 'b']}}, 'guard': ...})
    w.go()
    w.step([0.0, 0.1, float('nan')])
    assert len(w.sink.actions) == 1
    w.step([0.0, float('nan'), 0.2])
    assert w.phase is Phase.HOLD
    assert len(w.sink.chunks) == 1


def test_p29_before_the_first_row_a_goal_waits_instead(world: Make) -> None:
    w = world(ARM)
    goal = w.go()
    w.step([0.0, float('inf'), 0.2])
    assert w.phase is Phase.RUNNING
    assert 'b' in w.runner.status().waiting_for
    w.step([0.0, 0.1, 0.2])
    assert w.runner.status().waiting_for == ''
    assert len(w.sink.actions) == 1
    assert goal.result is None


@pytest.mark.parametrize('trigger', ['timer', 'lock step'])
def test_p29_a_nan_action_is_never_published(world: Make, trigger: str) -> None:
    w = world(ARM, {'outputs': {'arm': {'start_tolerance': None}}, 'guard': ...},
              {'run': LOCK_STEP} if trigger != 'timer' else {})
    goal = w.go()
    w.steps(4)
    w.step([101.0, 0.1, 0.2])
    assert result(goal)[0] is Code.BACKEND
    assert all(np.isfinite(a).all() for a in w.sink.actions)
    assert w.phase is Phase.HOLD


def test_fresh_after_a_live_restore_means_arrived_and_stamped_after_it(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.step()
    w.runner.save('a')
    w.advance(0.01)
    w.say()
    w.advance(0.01)
    before = w.ns
    w.advance(0.01)
    w.runner.restore('a').result(0)
    goal = w.go()
    sent = len(w.sink.log)
    w.advance(0.02)
    w.runner.timer()                             # what came before the restore is young enough
    assert len(w.sink.log) == sent
    assert 'fresh' in w.runner.status().waiting_for
    w.say(ns=before)                             # arrives now, but was measured before it
    w.runner.timer()
    assert len(w.sink.log) == sent
    w.say()
    w.runner.timer()
    assert len(w.sink.log) == sent + 1
    assert goal.result is None


def test_a_rejected_message_is_counted_and_changes_nothing(world: Make) -> None:
    w = world(ARM)
    with pytest.raises(Refusal, match='INPUT_REJECTED'):
        w.runner.feed('nobody/reads/this', SimpleNamespace(data=1))
    with pytest.raises(Refusal, match='twice'):
        w.runner.feed('joint_states', SimpleNamespace(
            header=SimpleNamespace(stamp=SimpleNamespace(sec=1, nanosec=0)), name=['a', 'a'],
            position=[1, 2], velocity=[], effort=[]))
    assert w.runner.status().rejected_inputs == 2
    assert 'twice' in w.runner.status().last_refusal


def test_a_cancel_ends_the_goal_once(world: Make) -> None:
    w = world(ARM)
    goal = w.runner.execute(GoalRequest())
    w.step()
    assert w.runner.cancel(goal)
    assert result(goal)[0] is Code.CANCELLED
    assert not w.runner.cancel(goal)
