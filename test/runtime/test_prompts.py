"""P44: prompts are events, and STATE."""
from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.policies import gate
from test.runtime.world import LOCK_STEP, PROMPTED, World, result

Make = Callable[..., World]


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


def test_a_save_between_a_new_prompt_and_the_next_step_has_the_new_prompt(world: Make) -> None:
    w = world(PROMPTED)
    w.go(prompt='A')
    w.step()
    w.runner.feed('prompt', SimpleNamespace(data='B'))
    w.runner.save('b')
    w.runner.restore('origin').result(0)
    assert w.runner.status().prompt != 'B'
    w.runner.restore('b').result(0)
    assert w.runner.status().prompt == 'B'


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


def test_a_prefill_that_a_stop_cut_short_is_not_done_twice(world: Make) -> None:
    gate('prefill')
    w = world(PROMPTED, {'policy': {'factory': 'test.runtime.policies:journal',
                                    'options': {'gate': 'prefill'}}}, threaded=True)
    gate('prefill').close()
    w.go(prompt='abc')
    w.step()
    assert gate('prefill').entered.wait(5)
    w.runner.stop()
    gate('prefill').open()
    w.go(prompt='abc')
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    assert w.runner.session._live.lengths == {'kv_length': 4}
    assert w.runner.session.tick == 2
