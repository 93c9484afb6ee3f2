"""P43, P24: a recorded run, done again from its latch record, gives the recorded bytes.

`LiveRun` is a live run with a slow or fast device and the bag that a recorder made of it; nothing
of the run but the bag and the policy file reaches the replay.
"""
from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
import random
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.replaying import Ask, replay
from test.tools.live_run import (
    EARLY,
    LOCK_STEP,
    NODE,
    POLICY,
    LiveRun,
    merged,
)
from test.tools.replayed import (
    Drive,
    again,
    late,
    plain,
    rewinds,
    same,
    saved_between_ticks,
    silence,
    steps_back,
    stop_while_waiting,
    stops,
)


@pytest.mark.parametrize('changes', [(), (EARLY,), ({'run': {'execute': 3}},)],
                         ids=['plain', 'early', 'execute'])
@pytest.mark.parametrize(('drive', 'chunks'), [
    (plain, 1), (silence, 1), (stops, 3), (stop_while_waiting, 2), (rewinds, 5),
    (saved_between_ticks, 2)], ids=lambda v: getattr(v, '__name__', ''))
def test_p43_a_timer_driven_run_is_repeated_to_the_byte(tmp_path: Path, changes: tuple[Any, ...],
                                                        drive: Drive, chunks: int) -> None:
    run = LiveRun(tmp_path, *changes)
    drive(run)
    assert len(run.chunks) >= chunks
    same(again(run), len(run.chunks))


def test_p43_a_late_chunk_is_dropped_again(tmp_path: Path) -> None:
    run = LiveRun(tmp_path, EARLY)
    late(run)
    assert [c.used for c in run.chunks].count(False) == 1
    same(again(run), len(run.chunks))


@pytest.mark.parametrize('changes', [(LOCK_STEP,), (LOCK_STEP, EARLY), (
    {'run': {'trigger': {'input': ['joint_states']}}}, EARLY)], ids=['', 'early', 'hold'])
@pytest.mark.parametrize('drive', [plain, stops, rewinds, steps_back], ids=lambda v: v.__name__)
def test_p43_a_lock_step_run_is_repeated_to_the_byte(tmp_path: Path, changes: tuple[Any, ...],
                                                     drive: Drive) -> None:
    run = LiveRun(tmp_path, *changes, history=8)
    drive(run)
    same(again(run), len(run.chunks))


CONFIGURATIONS: list[tuple[dict[str, Any], ...]] = [
    (), (EARLY,), (LOCK_STEP,), (LOCK_STEP, EARLY),
    ({'run': {'trigger': {'input': ['joint_states']}}}, EARLY), ({'run': {'execute': 3}},),
    ({'run': {'start_at': 4, 'latency_steps': 1, 'execute': 3}},)]


def at_random(r: LiveRun, rng: random.Random, n: int = 30) -> None:
    """Thirty random verbs."""
    names: list[str] = []
    slow = False
    r.command()
    r.go()
    for _ in range(n):
        k = rng.random()
        if k < 0.62:
            r.steps(rng.randint(1, 6))
        elif k < 0.68:
            r.command(rng.choice([0.1, 0.3, 0.9]))
        elif k < 0.74:
            if not r.lock_step:
                (r.fast if slow else r.slow)()
                slow = not slow
        elif k < 0.78:
            r.verb().stop()
        elif k < 0.84:
            r.go()
        elif k < 0.90:
            names.append(r.verb().save().name)
        else:
            if k < 0.95 and names:
                r.verb().restore(rng.choice(names))
            elif k < 0.97:
                r.verb().reset()
            else:
                r.verb().rollback(steps=rng.randint(1, 3) if r.lock_step else 0)
            if rng.random() < 0.8:
                r.go()
    r.fast()


def random_run(tmp_path: Path, seed: int) -> None:
    """Drive a run at random and replay it."""
    folder = tmp_path / str(seed)
    folder.mkdir()
    run = LiveRun(folder, *CONFIGURATIONS[seed % len(CONFIGURATIONS)], history=8)
    at_random(run, random.Random(seed))
    if run.chunks:
        report = again(run)
        assert report.verdict is Verdict.SAME, (seed, report.summary(), report.missing)
        assert {c.what: c.compared for c in report.outputs}['chunks'] == len(run.chunks)


@pytest.mark.parametrize('seeds', [range(7), (36, 62, 78, 85, 99, 125, 178)],
                         ids=['any', 'awkward'])
def test_p43_random_runs_are_repeated_to_the_byte(tmp_path: Path, seeds: Sequence[int]) -> None:
    for seed in seeds:
        random_run(tmp_path, seed)


@pytest.mark.long
def test_p43_many_random_runs(tmp_path: Path) -> None:
    for seed in range(600):
        random_run(tmp_path, seed)


# -- what a recorder may miss ----------------------------------------------------------------------


def test_p43_a_message_that_the_recorder_missed_is_named_and_the_verdict_is_incomplete(
        tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    used = {e.digest for e in run.chunks[2].latched}
    (lost,) = [m for m in run.heard if m.digest in used and m.topic == '/robot/joint_states'
               and m.digest == run.chunks[2].latched[-1].digest]
    report = again(run, lose=lambda m: m is lost)
    assert report.verdict is Verdict.INCOMPLETE
    (missing,) = report.missing
    assert 'joint_states' in missing
    assert f'{lost.digest:016x}' in missing
    assert 'tick 3' in missing
    by = {c.what: c for c in report.outputs}
    assert (by['chunks'].compared, by['chunks'].beyond) == (2, 0)      # up to there it is the same


def test_a_message_that_no_step_took_in_may_be_missing(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    used = {e.digest for c in run.chunks for e in c.latched}
    unused = [m for m in run.heard if m.topic == '/robot/joint_states' and m.digest not in used]
    assert unused
    same(again(run, lose=lambda m: m in unused), len(run.chunks))


def test_equal_messages_stand_for_each_other(tmp_path: Path) -> None:
    """An unstamped command that is sent again and again: one copy is enough."""
    run = LiveRun(tmp_path)
    run.go()
    for _ in range(12):
        run.command()
        run.step()
    copies = [m for m in run.heard if m.topic == '/robot/cmd_vel']
    assert len({m.digest for m in copies}) == 1
    same(again(run, lose=lambda m: m in copies[1:]), len(run.chunks))


def test_p43_a_chunk_that_the_recorder_missed_is_named(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    chunks = [m for m in run.heard if m.topic == f'{NODE}/chunk']
    report = again(run, lose=lambda m: m is chunks[2])
    assert report.verdict is not Verdict.SAME
    assert '~/chunk of tick 3' in report.missing


def test_p43_a_run_without_status_is_repeated_where_nothing_must_be_guessed(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    report = again(run, lose=lambda m: m.topic == f'{NODE}/status')
    same(report, len(run.chunks))
    assert any('/status' in r for r in report.remarks)


def test_a_bag_that_begins_in_the_middle_asks_for_a_capsule(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    run.close()
    middle = run.heard[len(run.heard) // 2].time_ns
    with pytest.raises(Refusal, match='--from') as caught:
        replay(Ask(run.bag(lose=lambda m: m.time_ns < middle), run.policy_file))
    assert caught.value.code is Code.NOT_FOUND


def test_a_bag_that_begins_in_the_middle_is_followed_from_a_reset_on(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    middle = run.heard[len(run.heard) // 2].time_ns
    run.verb().reset()
    run.command()
    run.go()
    run.steps(11)
    report = again(run, lose=lambda m: m.time_ns < middle)
    assert report.verdict is Verdict.SAME, report.summary()
    assert any('not replayed' in r for r in report.remarks)


def test_another_policy_is_different_and_the_first_difference_is_named(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    run.close()
    other = tmp_path / 'other.yaml'
    other.write_text(run.policy_file.read_text().replace('scale: 0.5', 'scale: 0.25'))
    report = replay(Ask(run.bag(), other)).report
    by = {c.what: c for c in report.outputs}
    assert report.verdict is Verdict.DIFFERENT
    assert by['chunks'].same_bytes           # the raw chunks are the same, what is published is not
    assert by['actions'].first is not None
    assert by['actions'].first.step == 0


def test_the_policy_of_these_tests_reads_everything(tmp_path: Path) -> None:
    """Nothing of this is worth much if the chunks did not depend on history, phase, last action."""
    run = LiveRun(tmp_path)
    plain(run)
    chunks = [c.data.tobytes() for c in run.chunks]
    run.close()
    for i, what in enumerate(('last_action', 'phase', 'history')):
        terms = [t for t in POLICY['inputs']['obs'] if t['term'] != what]
        size = {'last_action': 2, 'phase': 2, 'history': 6}[what]
        folder = tmp_path / str(i)
        folder.mkdir()
        other = LiveRun(folder, {'inputs': {'obs': [*terms, {
            'term': 'constant', 'value': [0.0] * size}]}}, policy=merged(POLICY))
        plain(other)
        assert [c.data.tobytes() for c in other.chunks] != chunks, what
        other.close()


# -- prompts ---------------------------------------------------------------------------------------


PROMPTED: dict[str, Any] = {
    'policy': {'backend': 'host', 'factory': 'flashrt_ros.backends.reference:journal',
               'period_s': 0.02, 'options': {'obs_dim': 3}},
    'run': {'trigger': 'timer'},
    'inputs': {
        'obs': [{'term': 'joint_position', 'topic': 'joint_states', 'joints': ['a', 'b', 'c']}],
        'prompt': [{'term': 'prompt', 'encode': 'bytes', 'length': 16}]},
    'outputs': POLICY['outputs']}


@pytest.mark.parametrize('changes', [(), (LOCK_STEP,)], ids=['timer', 'lock step'])
def test_p44_prompts_come_back_with_their_goals_and_with_a_rewind(
        tmp_path: Path, changes: tuple[Any, ...]) -> None:
    """A prompt is taken in by a program of its own, which counts as a tick without a chunk."""
    run = LiveRun(tmp_path, *changes, policy=PROMPTED)
    run.go(prompt='left')
    run.steps(5)
    run.verb().save('x')
    run.go(prompt='right')
    run.steps(4)
    run.verb().restore('x')
    run.go()
    run.steps(5)
    run.verb().stop()
    run.go(prompt='ahead')
    run.steps(4)
    assert run.runner.observation.prompt == 'ahead'
    same(again(run), len(run.chunks))


# -- outputs ---------------------------------------------------------------------------------------


ARM: dict[str, Any] = {'arm': {
    'topic': 'arm', 'type': 'std_msgs/msg/Float32MultiArray', 'kind': 'position', 'port': 'actions',
    'columns': [0, 1], 'joints': ['a'], 'start_tolerance': None, 'on_stop': {'do': 'hold'}},
    'hand': {'topic': 'hand', 'type': 'std_msgs/msg/Float32MultiArray', 'kind': 'raw',
             'port': 'actions', 'columns': [1, 2]}}
OF_ARM: dict[str, Any] = merged(POLICY, {'outputs': ARM, 'inputs': {'obs': [
    t if t['term'] != 'last_action' else {'term': 'constant', 'value': [0.0, 0.0]}
    for t in POLICY['inputs']['obs']]}})
del OF_ARM['outputs']['actions']


@pytest.mark.parametrize('changes', [
    {}, {'run': {'publish_hz': 150.0}}, {'outputs': {'arm': {'relative': True}}},
    {'outputs': {'arm': {'max_rate': 5.0}}}, {'run': {'blend': 'ensemble', 'start_at': 4,
                                                     'latency_steps': 1}}],
    ids=['two', 'in between', 'relative', 'limited', 'ensemble'])
def test_p43_two_outputs_whatever_becomes_of_their_rows(tmp_path: Path, changes: dict[str, Any]
                                                        ) -> None:
    run = LiveRun(tmp_path, changes, policy=OF_ARM)
    stops(run)
    rewinds(run)
    report = again(run)
    assert report.verdict is Verdict.SAME, report.summary()
    chunks = {c.output: c for c in report.outputs if c.what == 'chunks'}
    assert chunks['arm'].compared == chunks['hand'].compared == len(run.chunks) // 2
    assert all(c.same_bytes for c in report.outputs)
    assert {c.output for c in report.outputs if c.what == 'actions'} == {'arm', 'hand'}
