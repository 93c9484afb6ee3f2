"""P43, P24: a recorded run, done again from its latch record, gives the recorded bytes.

`LiveRun` is a live run with a slow or fast device and the bag that a recorder made of it; nothing
of the run but the bag and the policy file reaches the replay.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
import random
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.bags import Message
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.replay_report import Report
from flashrt_ros.tools.replaying import Ask, replay
from test.tools.live_run import (
    EARLY,
    LOCK_STEP,
    NODE,
    POLICY,
    TYPES,
    LiveRun,
    capsule,
    make,
    merged,
)

Drive = Callable[[LiveRun], None]


def again(run: LiveRun, *, lose: Callable[[Message], bool] = lambda _: False, **ask: Any) -> Report:
    """Replay what the recorder heard."""
    run.close()
    return replay(Ask(run.bag(lose=lose), run.policy_file, **ask)).report


def same(report: Report, chunks: int) -> None:
    """Everything was compared and is equal to the byte."""
    assert report.verdict is Verdict.SAME, report.summary()
    assert all(c.same_bytes for c in report.outputs)
    by = {c.what: c for c in report.outputs}
    assert (by['chunks'].compared, by['chunks'].recorded) == (chunks, chunks)
    assert by['actions'].compared > 0


# -- what may happen in a run ----------------------------------------------------------------------


def plain(r: LiveRun) -> None:
    r.command()
    r.go()
    r.steps(23)


def silence(r: LiveRun) -> None:
    """A command that times out to zero between two ticks, and comes back."""
    r.command()
    r.go()
    r.steps(13)
    r.command(0.7)
    r.steps(14)


def late(r: LiveRun) -> None:
    """A device that is slow for a while: a chunk misses its splice step and is dropped."""
    r.command()
    r.go()
    r.steps(12)
    r.slow()
    r.steps(6)
    r.fast()
    r.steps(20)
    if not r.lock_step:
        assert r.runner.status().late_ticks == 1


def stops(r: LiveRun) -> None:
    r.command()
    r.go()
    r.steps(7)
    r.verb().stop()
    r.steps(3)
    r.go()
    r.steps(9)
    r.go()                                   # preempts
    r.steps(6)


def stop_while_waiting(r: LiveRun) -> None:
    """A stop overtakes an inference for which a step waits: its tick counts, its chunk does not."""
    r.command()
    r.go()
    r.steps(5)
    r.slow()
    r.steps(3)
    r.verb().stop()
    r.fast()
    r.step()
    r.go()
    r.steps(9)


def rewinds(r: LiveRun) -> None:
    r.command()
    r.go()
    r.steps(7)
    r.verb().save('x')
    r.steps(6)
    r.verb().restore('x')
    r.steps(2)
    r.command(0.9)
    r.go()
    r.steps(8)
    r.verb().rollback()
    r.go()
    r.steps(4)
    r.verb().reset()
    r.go()
    r.steps(8)


def saved_between_ticks(r: LiveRun) -> None:
    """What the steps between the last tick and a rewind took in is needed to redo the capsule."""
    r.command()
    r.go()
    r.steps(8)
    r.verb().save('x')
    r.step()
    r.verb().restore('x')
    r.go()
    r.steps(9)


def steps_back(r: LiveRun) -> None:
    """Lock step: restores go on by themselves, with the queue and the inference in flight."""
    r.command()
    r.go()
    r.steps(7)
    r.verb().save('x')
    r.steps(6)
    r.verb().restore('x')
    r.steps(8)
    r.verb().rollback(steps=3)
    r.steps(9)


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


# -- from a capsule --------------------------------------------------------------------------------


def saving(tmp_path: Path, *changes: Any, before: int = 12, after: int = 15) -> LiveRun:
    """A run that saved a durable capsule `k` after some steps, and went on."""
    run = LiveRun(tmp_path, *changes, {'run': {'persist_on': ['save']}},
                  directory=tmp_path / 'capsules')
    run.command()
    run.go()
    run.steps(before)
    run.command(0.5)
    run.verb().save('k')
    run.steps(after)
    return run


@pytest.mark.parametrize('before', [11, 12, 13, 14])
@pytest.mark.parametrize('changes', [(), (EARLY,), (LOCK_STEP,), (LOCK_STEP, EARLY)],
                         ids=['timer', 'timer early', 'lock step', 'lock step early'])
def test_p24_a_capsule_and_the_recorded_inputs_give_what_followed(
        tmp_path: Path, changes: tuple[Any, ...], before: int) -> None:
    run = saving(tmp_path, *changes, before=before)
    report = again(run, start='k')
    assert report.verdict is Verdict.SAME, report.summary()
    assert report.start.startswith('k ')
    by = {c.what: c for c in report.outputs}
    assert 0 < by['chunks'].compared < len(run.chunks)
    assert all(c.same_bytes for c in report.outputs)


def test_p24_the_file_itself_may_be_given_and_the_beginning_of_the_bag_be_missing(
        tmp_path: Path) -> None:
    run = saving(tmp_path)
    told = next(m for m in run.heard if m.topic == f'{NODE}/capsule_events').time_ns
    report = again(run, lose=lambda m: m.time_ns < told - 60_000_000,
                   start=str(tmp_path / 'capsules' / 'k.capsule'))
    assert report.verdict is Verdict.SAME, report.summary()


def test_a_capsule_file_is_looked_for_where_capsules_lie_now(tmp_path: Path) -> None:
    run = saving(tmp_path)
    run.close()
    (tmp_path / 'capsules').rename(tmp_path / 'elsewhere')
    with pytest.raises(Refusal, match='--capsules'):
        replay(Ask(run.bag(), run.policy_file, start='k'))
    report = replay(Ask(run.bag('two'), run.policy_file, start='k',
                        capsules=tmp_path / 'elsewhere')).report
    assert report.verdict is Verdict.SAME


def test_a_file_that_was_saved_again_is_not_taken_for_the_recorded_one(tmp_path: Path) -> None:
    run = saving(tmp_path)
    run.verb().save('k', overwrite=True)
    run.close()
    first = [m for m in run.heard if m.topic == f'{NODE}/capsule_events'][:2]
    with pytest.raises(Refusal, match='SHA-256'):
        replay(Ask(run.bag(lose=lambda m: m.topic == f'{NODE}/capsule_events' and m not in first),
                   run.policy_file, start='k'))


def test_a_name_that_the_bag_does_not_know_lists_those_it_does(tmp_path: Path) -> None:
    run = saving(tmp_path)
    run.close()
    with pytest.raises(Refusal, match=r'tells of k\b'):
        replay(Ask(run.bag(), run.policy_file, start='q'))


def test_p8_a_capsule_of_another_policy_is_refused(tmp_path: Path) -> None:
    run = saving(tmp_path)
    run.close()
    other = tmp_path / 'other.yaml'
    other.write_text(run.policy_file.read_text().replace('scale: 0.5', 'scale: 0.25'))
    with pytest.raises(Refusal) as caught:
        replay(Ask(run.bag(), other, start='k'))
    assert caught.value.code is Code.FINGERPRINT_MISMATCH


def test_a_live_capsule_without_its_inference_in_flight_is_told_apart(tmp_path: Path) -> None:
    """Without persist_on a live boundary keeps no inputs of an inference under way."""
    run = LiveRun(tmp_path, EARLY, directory=tmp_path / 'capsules')
    run.command()
    run.go()
    run.steps(13)
    run.verb().save('k', persist=True)
    run.steps(12)
    assert run.chunks[6].step < 13
    report = again(run, start='k')
    assert report.verdict is Verdict.INCOMPLETE
    assert 'persist_on' in report.summary()


@pytest.mark.parametrize(('limit', 'ticks'), [({'until_tick': 3}, 3), ({'until_step': 10}, 2),
                                              ({'until_s': 0.25}, 3)])
def test_until_ends_early(tmp_path: Path, limit: dict[str, Any], ticks: int) -> None:
    run = LiveRun(tmp_path)
    plain(run)
    report = again(run, **limit)
    assert report.verdict is Verdict.SAME, report.summary()
    assert report.ticks == ticks


# -- service calls ---------------------------------------------------------------------------------


def call(run: LiveRun, verb: str, kind: str, number: int, answer: Callable[[], dict[str, Any]],
         **request: Any) -> None:
    """Make a call and let the recorder hear what service introspection publishes of it."""
    TYPES.need(f'{kind}_Event')

    def event(event_type: int, **parts: Any) -> None:
        info = make('service_msgs/msg/ServiceEventInfo', event_type=event_type,
                    sequence_number=number)
        run.record(f'{NODE}/{verb}/_service_event', make(
            f'{kind}_Event', info=info, **{'request': [], 'response': [], **parts}))
    event(1, request=[make(f'{kind}_Request', **request)])
    event(2, response=[make(f'{kind}_Response', **answer())])


def with_calls(tmp_path: Path) -> LiveRun:
    run = LiveRun(tmp_path)
    run.command()
    run.go()
    run.steps(7)

    def save() -> dict[str, Any]:
        info = run.verb().save('x')
        return {'success': True, 'capsule': capsule(info), 'epoch': run.runner.epoch}
    call(run, 'save_capsule', 'flashrt_ros/srv/SaveCapsule', 1, save, name='x')
    call(run, 'save_capsule', 'flashrt_ros/srv/SaveCapsule', 2,
         lambda: {'success': False, 'code': int(Code.EXISTS)}, name='x')
    run.steps(6)

    def restore() -> dict[str, Any]:
        answer = run.verb().restore('x').result()
        return {'success': True, 'capsule': capsule(answer.info), 'epoch': answer.epoch}
    call(run, 'restore_capsule', 'flashrt_ros/srv/RestoreCapsule', 3, restore, name='x')
    run.go()
    run.steps(8)

    def drop() -> dict[str, Any]:
        return {'success': True, 'capsule': capsule(run.verb().drop('x'))}
    call(run, 'drop_capsule', 'flashrt_ros/srv/DropCapsule', 4, drop, name='x')
    call(run, 'stop', 'std_srvs/srv/Trigger', 5, lambda: {'success': True, 'message': run.verb(
        ).stop()})
    run.go()
    run.steps(6)
    return run


def test_service_calls_are_made_again_at_their_tick(tmp_path: Path) -> None:
    run = with_calls(tmp_path)
    report = again(run)
    same(report, len(run.chunks))
    assert [(a.verb, a.name, a.recorded) for a in report.answers] == [
        ('save_capsule', 'x', 'OK at tick 2, step 7'), ('save_capsule', 'x', 'EXISTS'),
        ('restore_capsule', 'x', 'tick 2, step 7'), ('drop_capsule', 'x', 'OK')]
    assert all(a.same for a in report.answers)


def test_a_call_that_answers_otherwise_is_a_difference(tmp_path: Path) -> None:
    run = with_calls(tmp_path)
    call(run, 'drop_capsule', 'flashrt_ros/srv/DropCapsule', 9,
         lambda: {'success': True}, name='never')
    report = again(run)
    assert report.verdict is Verdict.DIFFERENT
    assert "drop_capsule 'never' answered OK, the replay NOT_FOUND" in report.summary()


def test_calls_without_contents_are_remarked(tmp_path: Path) -> None:
    run = LiveRun(tmp_path)
    run.command()
    run.go()
    run.steps(6)
    kind = 'flashrt_ros/srv/SaveCapsule'
    TYPES.need(f'{kind}_Event')
    run.record(f'{NODE}/save_capsule/_service_event', make(f'{kind}_Event', info=make(
        'service_msgs/msg/ServiceEventInfo', event_type=1), request=[], response=[]))
    report = again(run)
    assert any('introspection:=contents' in r for r in report.remarks)


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
