"""Service calls in a bag are made again at their tick, and their answers compared."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from flashrt_ros.core.errors import Code
from flashrt_ros.tools.compare import Verdict
from test.tools.live_run import (
    NODE,
    TYPES,
    LiveRun,
    capsule,
    make,
)
from test.tools.replayed import (
    again,
    same,
)

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
