"""P24: a replay goes on from a saved capsule at its place in the bag, and ends where it is told."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.replaying import Ask, replay
from test.tools.live_run import (
    EARLY,
    LOCK_STEP,
    NODE,
    LiveRun,
)
from test.tools.replayed import (
    again,
    plain,
)

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
