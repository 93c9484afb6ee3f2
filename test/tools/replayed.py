"""Runs of all kinds, and what a replay of their bags is asked for."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashrt_ros.tools.bags import Message
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.replay_report import Report
from flashrt_ros.tools.replaying import Ask, replay
from test.tools.live_run import LiveRun

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
