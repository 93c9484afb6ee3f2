"""When steps happen, which row leaves the queue, and what is recorded of it."""
from __future__ import annotations

from collections.abc import Callable
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.policies import gate
from test.runtime.world import ARM, JOINTS, LOCK_STEP, NUMBERED, World

Make = Callable[..., World]


def test_live_one_row_per_timer_tick_and_a_new_chunk_when_the_queue_is_empty(world: Make) -> None:
    w = world(NUMBERED)
    w.go()
    w.steps(12)
    assert w.numbers() == [1000, 1001, 1002, 1003, 1004, 2000, 2001, 2002, 2003, 2004, 3000, 3001]


def test_a_chunk_is_spliced_after_latency_steps_and_skips_as_many_rows(world: Make) -> None:
    w = world(NUMBERED, {'run': {'start_at': 3, 'latency_steps': 2}})
    w.go()
    w.steps(10)
    # inference 2 started with step 3 (3 rows left), 2 steps later its row 2 is that step's row
    assert w.numbers() == [1000, 1001, 1002, 1003, 2002, 2003, 3002, 3003, 4002, 4003]


def test_only_execute_rows_of_a_chunk_are_executed(world: Make) -> None:
    w = world(NUMBERED, {'run': {'execute': 2}})
    w.go()
    w.steps(5)
    assert w.numbers() == [1000, 1001, 2000, 2001, 3000]


def test_live_with_a_late_chunk_it_is_dropped_and_counted_and_the_rows_go_on(world: Make) -> None:
    gate('late')
    w = world(NUMBERED, {'run': {'start_at': 3, 'latency_steps': 1},
                         'policy': {'options': {'gate': 'late'}}}, threaded=True)
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.step()
    gate('late').close()
    w.step()                                     # 3 rows left: inference 2 starts, and is held
    assert gate('late').entered.wait(5)
    w.steps(2)
    assert w.numbers() == [1000, 1001, 1002, 1003, 1004]
    assert w.runner.status().late_ticks == 1
    gate('late').open()
    w.sink.wait(lambda: len(w.sink.chunks) == 2)
    assert [c.used for c in w.sink.chunks] == [True, False]
    assert w.runner.status().dropped_chunks == 0  # its epoch had not passed
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 6)
    assert w.numbers()[-1] == 3000               # the tick counted, its rows did not
    assert w.runner.status().tick == 3


def test_live_the_row_is_published_by_the_completion_not_by_the_next_tick(world: Make) -> None:
    gate('slow')
    w = world(NUMBERED, {'policy': {'options': {'gate': 'slow', 'horizon': 1}}}, threaded=True)
    w.go()
    gate('slow').close()
    w.step()
    assert gate('slow').entered.wait(5)
    w.steps(2)                                   # ticks that come meanwhile add no step
    assert w.numbers() == []
    gate('slow').open()
    w.sink.wait(lambda: w.numbers() == [1000])
    w.step()
    w.sink.wait(lambda: w.numbers() == [1000, 2000])
    assert w.runner.status().step == 2


def test_lock_step_waits_for_a_chunk_without_blocking_so_none_is_late(world: Make) -> None:
    gate('held')
    w = world(NUMBERED, {'run': {**LOCK_STEP, 'start_at': 3, 'latency_steps': 1},
                         'policy': {'options': {'gate': 'held'}}}, threaded=True)
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.step()
    gate('held').close()
    w.step()                                     # starts inference 2
    assert gate('held').entered.wait(5)
    assert w.numbers() == [1000, 1001, 1002]
    w.step()                                     # needs it; feed returns at once
    assert w.numbers() == [1000, 1001, 1002]
    gate('held').open()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.numbers()[-1] == 2001
    assert w.runner.status().late_ticks == 0


def test_lock_step_uses_a_set_of_messages_once(world: Make) -> None:
    w = world(NUMBERED, {'run': {'trigger': {'input': ['joint_states', 'other']}},
                         'inputs': {'obs': [
                             {'term': 'joint_position', 'topic': 'joint_states',
                              'joints': JOINTS[:2]},
                             {'term': 'array', 'topic': 'other', 'length': 1}]}})
    w.go()
    w.say()
    assert w.numbers() == []
    w.runner.feed('other', SimpleNamespace(data=[0.5]))
    assert w.numbers() == [1000]
    w.runner.feed('other', SimpleNamespace(data=[0.5]))
    assert w.numbers() == [1000]
    w.say()
    assert w.numbers() == [1000, 1001]


def test_lock_step_a_set_that_came_before_the_goal_is_its_first_step(world: Make) -> None:
    w = world(NUMBERED, {'run': LOCK_STEP})
    w.step()
    w.step()
    assert w.numbers() == []
    w.go()
    assert w.numbers() == [1000]                 # the newest set; the older one was replaced
    w.step()
    assert w.numbers() == [1000, 1001]


def test_lock_step_a_set_whose_step_was_stopped_is_the_next_goal_s_first(world: Make) -> None:
    gate('again')
    w = world(NUMBERED, {'run': LOCK_STEP, 'policy': {'options': {'gate': 'again'}}},
              threaded=True)
    w.go()
    gate('again').close()
    w.step()
    assert gate('again').entered.wait(5)
    w.runner.stop()
    gate('again').open()
    w.go()                                       # the sender still waits for this step's output
    w.sink.wait(lambda: w.numbers() == [2000])
    assert w.runner.status().step == 1


def test_lock_step_a_lost_message_is_an_error_once_motion_has_begun(world: Make) -> None:
    w = world(NUMBERED, {'run': LOCK_STEP})
    w.say(seq=4)
    w.say(seq=9)                                 # in HOLD nobody minds
    goal = w.go()
    w.say(seq=10)
    w.say(seq=12)
    assert goal.result is not None
    assert goal.result.code is Code.INPUT_REJECTED
    assert 'joint_states lost 1 message' in goal.result.message
    assert w.phase is Phase.HOLD


@pytest.mark.parametrize('trigger', ['timer', 'lock step'])
@pytest.mark.parametrize(('start_at', 'latency'), [(0, 0), (2, 2), (3, 1), (1, 3)])
@pytest.mark.parametrize('seed', range(3))
def test_p11_every_action_is_a_row_of_one_chunk_and_no_gap_goes_unreported(
        world: Make, trigger: str, start_at: int, latency: int, seed: int) -> None:
    """Random verbs; row i of inference k is 1000 k + i."""
    w = world(NUMBERED, {'run': {'start_at': start_at, 'latency_steps': latency}},
              {'run': LOCK_STEP} if trigger != 'timer' else {}, max_capsules=8)
    rng = random.Random(seed)
    w.go()
    w.runner.save('first')
    for _ in range(250):
        verb = rng.choice(['step'] * 12 + ['save', 'restore', 'rollback', 'reset', 'stop', 'pause',
                                           'preempt', 'goal', 'goal', 'goal', 'goal'])
        if verb == 'step':
            w.step()
        elif verb == 'save':
            w.runner.save()
        elif verb == 'restore':
            w.runner.restore().result(0)
        elif verb == 'rollback':
            w.runner.rollback().exception(0)
        elif verb == 'reset':
            w.runner.reset().result(0)
        elif verb == 'stop':
            w.runner.stop()
        elif verb == 'pause' and w.phase is Phase.RUNNING:
            w.runner.pause()
            w.runner.resume()
        elif verb == 'preempt' or (verb == 'goal' and w.phase is Phase.HOLD):
            w.go()
    rows = {}
    for chunk in w.sink.chunks:
        assert chunk.session == w.runner.session.id
        numbers = chunk.data[:, 0]
        assert list(numbers) == [1000 * round(numbers[0] / 1000) + i for i in range(5)]
        assert round(numbers[0] / 1000) == chunk.tick    # numbered from origin, as the tick is
        rows.update({round(n): chunk for n in numbers})
    published = w.numbers()
    assert len(published) > 60
    assert set(published) <= set(rows)
    assert sum(c.used for c in w.sink.chunks) + w.runner.status().dropped_chunks >= len(
        {(c.epoch, c.tick) for c in w.sink.chunks})


@pytest.mark.parametrize('seed', range(6))
def test_p11_between_verbs_the_rows_have_no_gap_and_no_return(world: Make, seed: int) -> None:
    """Each published row is the row of its own step: i = step - the chunk's step."""
    w = world(NUMBERED, {'run': {'start_at': 3, 'latency_steps': 2}},
              {'run': LOCK_STEP} if seed % 2 else {})
    rng = random.Random(seed)
    w.go()
    w.runner.save('a')
    chunks: dict[tuple[int, int], Any] = {}
    for _ in range(120):
        before = len(w.sink.actions)
        seen = len(w.sink.chunks)
        at = w.runner.session.step
        w.step()
        for c in w.sink.chunks[seen:]:
            chunks[c.tick, 0] = c
        if len(w.sink.actions) > before:
            k, i = divmod(w.numbers()[-1], 1000)
            assert chunks[k, 0].step + i == at
        if rng.random() < 0.1:
            w.runner.restore('a').result(0)
            if w.phase is Phase.HOLD:
                w.go()
        elif rng.random() < 0.1:
            w.runner.save('a', overwrite=True)


def test_a_chunk_tells_what_it_was_computed_from(world: Make) -> None:
    w = world(NUMBERED, {'run': {'execute': 2}})
    w.go()
    w.advance(0.02)
    digests = iter(range(100))

    def say() -> None:
        n = next(digests)
        w.say(digest=lambda: n)
    say()
    w.runner.timer()
    say()
    say()
    w.runner.timer()
    w.advance(0.02)
    say()
    w.runner.timer()
    first, second = w.sink.chunks
    assert [(e.name, e.step, e.digest) for e in first.latched] == [('joint_states', 0, 0)]
    # the message replaced before use never entered; those of the step between are in the record
    assert [(e.step, e.digest) for e in second.latched] in ([(1, 1), (1, 2), (2, 3)],
                                                            [(1, 2), (2, 3)])
    assert (first.tick, first.step, second.tick, second.step) == (1, 0, 2, 2)
    assert second.stamp_ns == w.ns
    assert second.start_ns == w.ns
    assert second.names == ('[0]', '[1]')
    assert second.data.shape == (5, 2)
    assert second.step_s == 0.02


def test_the_record_keeps_messages_of_a_step_that_was_stopped_before_it_was_executed(
        world: Make) -> None:
    gate('r')
    w = world(NUMBERED, {'policy': {'options': {'gate': 'r'}}}, threaded=True)
    gate('r').close()
    w.go()
    w.advance(0.02)
    w.say(digest=lambda: 7)
    w.runner.timer()
    assert gate('r').entered.wait(5)
    w.runner.stop()
    gate('r').open()
    w.sink.wait(lambda: len(w.sink.chunks) == 1)
    assert not w.sink.chunks[0].used
    assert [e.digest for e in w.sink.chunks[0].latched] == [7]
    assert w.runner.status().step == 0


def test_publish_hz_fills_in_between_linearly(world: Make) -> None:
    w = world(ARM, {'run': {'publish_hz': 200.0}, 'policy': {'options': {'to': 0.5}},
                    'outputs': {'arm': {'start_tolerance': None}}, 'guard': ...})
    assert w.runner.step_period_s == 0.005
    w.go()
    w.advance(0.02)
    w.say()
    for _ in range(8):
        w.runner.timer()
    values = [a[0] for a in w.sink.actions]
    assert np.allclose(values, 0.51 + 0.0025 * np.arange(8))


def test_the_soft_start_begins_at_the_measured_pose(world: Make) -> None:
    w = world(ARM, {'run': {'blend_s': 0.08}, 'policy': {'options': {'to': 0.5}},
                    'outputs': {'arm': {'start_tolerance': 2.0}}, 'guard': ...})
    w.go()
    for _ in range(6):
        w.step([0.0, 0.0, 0.0])
    rows = [0.51, 0.52, 0.53, 0.54, 0.51, 0.52]
    parts = [0.25, 0.5, 0.75, 1, 1, 1]
    assert np.allclose([a[0] for a in w.sink.actions], np.multiply(rows, parts))


def test_relative_rows_count_from_the_pose_measured_when_their_inference_latched(world: Make
                                                                                 ) -> None:
    w = world(ARM, {'policy': {'options': {'to': 0.0}},
                    'run': {'start_at': 2, 'latency_steps': 1},
                    'outputs': {'arm': {'relative': True}}, 'guard': ...})
    w.go()
    for i in range(5):
        w.step([0.1 * i, 0.0, 0.0])
    # inference 2 latched at step 2 (pose 0.2) and was spliced one step later with its row 1
    assert np.allclose([a[0] for a in w.sink.actions], [0.01, 0.02, 0.03, 0.22, 0.23])


def test_one_trajectory_per_chunk_carries_all_its_rows(world: Make) -> None:
    w = world(ARM, {'outputs': {'arm': {'chunk_as_trajectory': True}}, 'guard': ...})
    w.go()
    w.steps(5)
    sent = w.sink.of('publish')
    assert [len(c.points) for c in sent if c.points is not None] == [4, 4]


def test_start_at_without_latency_is_refused_for_a_timer(world: Make) -> None:
    with pytest.raises(Refusal, match='latency_steps') as error:
        world(NUMBERED, {'run': {'start_at': 2}})
    assert error.value.code is Code.INVALID_POLICY_FILE


def test_a_step_of_the_runner_that_fails_stops_motion_and_says_so(
        world: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    w = world(ARM)
    goal = w.go()
    w.step()

    def broken(*_: object) -> None:
        raise ZeroDivisionError('a bug')
    monkeypatch.setattr(w.runner.observation, 'set_last_action', broken)
    w.step()
    assert goal.result is not None
    assert goal.result.code is Code.INTERNAL
    assert w.sink.kinds()[-1] == 'stop'
