"""A tree that ticks in the thread that spins its client's node, and leaves for it.

Nothing sleeps: the tree is ticked by a timer, and tests wait for the tick after which something is
so.
"""
from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any

from py_trees.behaviour import Behaviour
from py_trees.blackboard import Blackboard
from py_trees.common import Status
from py_trees.composites import Selector
import pytest

from test.node.harness import WAIT_S, Probe

PERIOD_S = 0.004


class Ticker:
    """Ticks a tree at a rate in the probe's thread while somebody waits for it."""

    def __init__(self, probe: Probe, root: Behaviour) -> None:
        self.probe = probe
        self.root = root
        self.ticks = 0
        self._ticked = threading.Condition()

    def _tick(self) -> None:
        self.root.tick_once()
        with self._ticked:
            self.ticks += 1
            self._ticked.notify_all()

    def once(self) -> Status:
        """Tick once, now."""
        self.probe.inside(self._tick)
        return self.root.status

    def halt(self) -> None:
        """Halt as the executive of a tree does."""
        self.probe.inside(lambda: self.root.stop(Status.INVALID))

    def until(self, condition: Callable[[], Any], what: str, timeout: float = WAIT_S) -> None:
        """Tick until something is so, and not once more."""
        done = False

        def tick() -> None:
            nonlocal done
            if not done:
                self._tick()
                done = bool(condition())
                with self._ticked:
                    self._ticked.notify_all()
        timer = self.probe.inside(lambda: self.probe.node.create_timer(PERIOD_S, tick))
        try:
            with self._ticked:
                if not self._ticked.wait_for(lambda: done, timeout):
                    pytest.fail(f'{what} not within {self.ticks} ticks; {self.describe()}')
        finally:
            self.probe.inside(lambda: self.probe.node.destroy_timer(timer))

    def end(self) -> Status:
        """Tick until the tree has succeeded or failed; return which."""
        self.until(lambda: self.root.status in (Status.SUCCESS, Status.FAILURE), 'the end')
        return self.root.status

    def describe(self) -> str:
        """Say how each behaviour fares."""
        return '; '.join(f'{b.name} {b.status.name} {b.feedback_message}'
                         for b in self.root.iterate())


class Leaf(Behaviour):
    """Does what the test says: `says` is what it returns, `ticks` how often it was asked."""

    def __init__(self, name: str = 'leaf', says: Status = Status.RUNNING,
                 then: Callable[[], None] | None = None) -> None:
        super().__init__(name)
        self.says = says
        self.then = then
        self.entered = 0
        self.ticks = 0
        self.halted = 0

    def initialise(self) -> None:
        """Count."""
        self.entered += 1

    def update(self) -> Status:
        """Do it."""
        self.ticks += 1
        if self.then is not None:
            self.then()
        return self.says

    def terminate(self, new_status: Status) -> None:
        """Count halts."""
        self.halted += new_status is Status.INVALID


class Hasty(Selector):
    """Halts its only child and fails, in one tick, once `now` is set; as a Timeout does."""

    def __init__(self, child: Any) -> None:
        super().__init__('hasty', memory=False, children=[child])
        self.now = False

    def tick(self) -> Any:
        """Fail at once where it is time."""
        if not self.now:
            yield from super().tick()
            return
        self.stop(Status.INVALID)
        self.status = Status.FAILURE
        yield self


def board(name: str, key: str = 'code') -> Any:
    """Read what a behaviour left on the blackboard; None where there is nothing."""
    return Blackboard.storage.get(f'/capsules/{name}/{key}')
