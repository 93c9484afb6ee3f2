"""Goals, prompts, what permits motion, and the first action."""
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
from test.runtime.test_stops import enable
from test.runtime.world import ARM, LOCK_STEP, NUMBERED, PROMPTED, World

Make = Callable[..., World]
ENABLED = {'enable': {'topic': 'enable', 'max_age_s': 0.2}}


def result(goal: Any) -> tuple[Code, str]:
    assert goal.result is not None
    return goal.result.code, goal.result.message


# -- P40 ----------------------------------------------------------------------------------


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
    goal.add_done_callback(lambda g: held.append((g.result.code, w.runner._hub.held)))
    w.runner.stop()
    goal.add_done_callback(lambda g: held.append((g.result.code, w.runner._hub.held)))
    assert held == [(Code.STOPPED, False)] * 2
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


# -- P44 ----------------------------------------------------------------------------------


@pytest.mark.parametrize('how', ['goal', 'topic'])
def test_p44_after_a_prompt_change_no_action_with_the_old_prompt(world: Make, how: str) -> None:
    gate('p44')
    w = world(PROMPTED, {'policy': {'options': {'gate': 'p44'}},
                         'run': {'start_at': 3, 'latency_steps': 2}}, threaded=True)
    w.go(prompt='A')
    for n in range(3):
        w.step()
        w.sink.wait(lambda n=n: len(w.sink.actions) == n + 1)
    gate('p44').close()
    w.step()                                     # an inference with the old prompt is in flight
    assert gate('p44').entered.wait(5)
    n = len(w.numbers())
    if how == 'goal':
        w.go(prompt='B')
    else:
        w.runner.feed('prompt', SimpleNamespace(data='B'))
    assert w.phase is Phase.RUNNING
    w.steps(2)
    gate('p44').open()
    w.sink.wait(lambda: len(w.sink.actions) > n)
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) > n + 1)
    assert {x // 1000 for x in w.numbers()[:n]} == {ord('A')}
    assert {x // 1000 for x in w.numbers()[n:]} == {ord('B')}
    assert w.runner.status().dropped_chunks == 1


@pytest.mark.parametrize('trigger', ['timer', 'lock step'])
def test_p44_a_step_that_has_latched_the_old_prompt_is_latched_again(world: Make, trigger: str
                                                                     ) -> None:
    gate('begun')
    w = world(PROMPTED, {'policy': {'options': {'gate': 'begun'}}},
              {'run': LOCK_STEP} if trigger != 'timer' else {}, threaded=True)
    w.go(prompt='A')
    gate('begun').close()
    w.step()
    assert gate('begun').entered.wait(5)
    w.runner.feed('prompt', SimpleNamespace(data='B'))
    gate('begun').open()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    assert w.numbers() == [1000 * ord('B') + 20]


def test_a_restore_brings_the_old_prompt_back_and_a_goal_s_prompt_wins(world: Make) -> None:
    w = world(PROMPTED)
    w.go(prompt='A')
    w.step()
    w.runner.save('a')
    w.go(prompt='B')
    w.step()
    w.runner.restore('a').result(0)
    assert w.runner.status().prompt == 'A'
    w.go()
    w.step()
    w.go(capsule='a', prompt='C')
    w.step()
    assert [x // 1000 for x in w.numbers()] == [ord(c) for c in 'ABAC']


def test_a_prompt_that_cannot_be_taken_refuses_the_goal_and_changes_nothing(world: Make) -> None:
    w = world(PROMPTED)
    w.go(prompt='A')
    w.step()
    before = w.runner.session.digest()
    assert result(w.go(prompt='far too long'))[0] is Code.INVALID_ARGUMENT
    with pytest.raises(Refusal):
        w.runner.feed('prompt', SimpleNamespace(data='far too long'))
    assert w.runner.session.digest() == before
    assert w.phase is Phase.RUNNING
    assert w.runner.status().rejected_inputs == 1


def test_a_policy_with_a_prefill_takes_a_new_prompt_in_before_its_first_tick(world: Make) -> None:
    w = world(PROMPTED, {
        'policy': {'factory': 'flashrt_ros.backends.reference:journal',
                   'options': {'obs_dim': 3, 'rows': 32, 'prompt_length': 8}}})
    w.go(prompt='abc')
    w.step()
    session = w.runner.session
    assert session.tick == 2                     # the prefill, then the first inference
    assert len(w.sink.actions) == 1
    assert [c.tick for c in w.sink.chunks] == [2]
    live = session._live
    assert live.lengths == {'kv_length': 4}
    w.step()
    w.go(prompt='abc')
    w.step()
    assert live.lengths == {'kv_length': 6}      # the same prompt is not taken in again


# -- P38, P39 -----------------------------------------------------------------------------


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


# -- P29 ----------------------------------------------------------------------------------


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
