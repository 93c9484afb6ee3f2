"""Capsules that rest on disk: restores and goals load them first; what is persisted by itself."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import threading

import pytest

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.payload import Tier
from flashrt_ros.runtime.phases import Phase
from test.runtime.world import NUMBERED, World

Make = Callable[..., World]


def on_disk(world: Make, folder: Path) -> World:
    """A world whose capsule `a` (tick 2) is durable, restarted so that it rests on disk."""
    first = world(NUMBERED, threaded=True, directory=folder)
    first.go()
    for n in range(6):
        first.step()
        first.sink.wait(lambda n=n: len(first.sink.actions) == n + 1)
    first.runner.save('a', persist=True)
    first.sink.wait(lambda: bool(first.sink.told(EventKind.PERSISTED)))
    first.close()
    w = world(NUMBERED, threaded=True, directory=folder)
    assert {c.name: c.tier for c in w.runner.list()}['a'] is Tier.DISK
    w.say()
    return w


def test_a_restore_from_disk_answers_after_its_bytes_are_back(world: Make, tmp_path: Path) -> None:
    w = on_disk(world, tmp_path / 'capsules')
    assert w.runner.restore('a', check=True).result(5).info.tick == 2
    assert w.runner.status().tick == 0
    w.runner.restore('a').result(5)
    assert w.runner.status().tick == 2
    w.go()
    w.step()
    w.sink.wait(lambda: w.numbers() == [3000])


def test_a_goal_with_a_capsule_on_disk_starts_once_it_is_loaded(world: Make, tmp_path: Path
                                                                ) -> None:
    w = on_disk(world, tmp_path / 'capsules')
    goal = w.go(capsule='a')
    w.sink.wait(lambda: w.phase is Phase.RUNNING)
    assert goal.result is None
    w.step()
    w.sink.wait(lambda: w.numbers() == [3000])


@pytest.mark.parametrize('since', ['stop', 'goal', 'restore', 'pause'])
def test_p40_a_goal_whose_capsule_was_still_read_does_not_begin_after_what_came_since(
        world: Make, tmp_path: Path, since: str) -> None:
    w = on_disk(world, tmp_path / 'capsules')
    if since == 'pause':
        w.go()
    gate = threading.Event()
    w.runner.session._spill.post(lambda: gate.wait(10) and None)
    goal = w.go(capsule='a')
    newer = None
    if since == 'goal':
        newer = w.go()
    elif since == 'restore':
        w.runner.reset().result(5)
    else:
        getattr(w.runner, since)()
    sent, phase = len(w.sink.log), w.phase
    gate.set()
    result = goal.wait(5)
    assert result is not None
    assert result.code is Code.STALE_EPOCH
    assert w.runner.goal is (newer if since != 'pause' else w.runner.goal)
    assert w.phase is phase
    assert len(w.sink.log) == sent


def test_a_damaged_file_refuses_the_restore_and_the_goal_and_changes_nothing(
        world: Make, tmp_path: Path) -> None:
    w = on_disk(world, tmp_path / 'capsules')
    file = next(p for p in (tmp_path / 'capsules').rglob('*') if p.is_file() and 'a' in p.name)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    before = w.runner.session.digest()
    error = w.runner.restore('a').exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.CORRUPT
    result = w.go(capsule='a').wait(5)
    assert result is not None
    assert result.code is Code.CORRUPT
    assert w.runner.session.digest() == before
    assert w.phase is Phase.HOLD


def test_persist_on_saves_what_led_to_a_refusal_and_a_goal_s_end(world: Make, tmp_path: Path
                                                                 ) -> None:
    w = world(NUMBERED, {'run': {'persist_on': ['goal_end', 'refusal', 'save']}}, threaded=True,
              directory=tmp_path / 'capsules')
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 1)
    w.runner.stop()
    w.runner.restore('nothing').exception(5)
    w.runner.save('mine')
    w.sink.wait(lambda: len(w.sink.told(EventKind.PERSISTED)) == 3)
    notes = [c.note.split(':')[0] for c in w.runner.list() if c.name not in ('origin', 'mine')]
    assert notes == ['goal_end', 'refusal']


def test_persist_on_without_a_folder_is_refused_at_configure(world: Make) -> None:
    with pytest.raises(Refusal, match='persist_on'):
        world(NUMBERED, {'run': {'persist_on': ['save']}})
