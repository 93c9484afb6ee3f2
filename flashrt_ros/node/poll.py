"""Looks after a goal while no message comes: its limits, a silent enable, its feedback.

A timer of its own on a steady clock, whatever status_hz is; it runs only while there is a goal, so
that an idle node is not woken. Two threads watch each other by it. Whoever steps looks whether this
timer is still served: while it is not, neither is `~/stop`, and what cannot be stopped must not
move. And this timer looks whether the thread that steps is stuck in a callback.
"""
from __future__ import annotations

from collections.abc import Callable
import threading
import time
import traceback

from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.exceptions import InvalidHandle
from rclpy.node import Node

from flashrt_ros.node.answers import wake
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.runner import Runner

PERIOD_S = 0.1
SILENT_S = 1.0  # in which the other thread has done nothing: motion ends
AGAIN_S = 0.2   # between two looks that see the same, for the whole process may have been paused


class Stall:
    """Since when another thread has done nothing, seen twice."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._seen = 0.0

    def confirmed(self, since: float | None) -> float:
        """Return the seconds since `since` once two looks at it agree that it is too long, else 0.

        None: it is at work.
        """
        now = time.monotonic()
        if since is None or now - since <= SILENT_S:
            self._since = None
        elif since != self._since:
            self._since, self._seen = since, now
        elif now - self._seen >= AGAIN_S:
            return now - since
        return 0.0


class Poll:
    """Calls `Runner.poll` while a goal is open."""

    def __init__(self, node: Node, runner: Callable[[], Runner | None],
                 stepping: Callable[[], float | None], group: CallbackGroup) -> None:
        """`stepping`: since when (steady) the thread that steps is in a callback; None: it is not.
        """
        self._node = node
        self._runner = runner
        self._stepping = stepping
        self._lock = threading.Lock()
        self._on = False
        self._served = 0.0             # steady time of the newest turn
        self._executor, self._intake = Stall(), Stall()
        self._timer = node.create_timer(
            PERIOD_S, self._poll, callback_group=group, autostart=False,
            clock=Clock(clock_type=ClockType.STEADY_TIME))

    def follow(self) -> None:
        """A goal may have begun or ended. Any thread.

        Its end the timer finds out itself: rclpy in Jazzy never serves one again that another
        thread cancels while it is being taken.
        """
        with self._lock:
            runner = self._runner()
            on = runner is not None and runner.goal is not None
            if on == self._on:
                return
            self._served = time.monotonic()
            self._on = on
            try:
                if on:
                    self._timer.reset()
            except InvalidHandle:
                return                 # the node has left
        if on:
            wake(self._node)           # its wait set has the timer as it was

    def supervise(self) -> None:
        """End motion where the node's executor has not been served for too long. Intake thread."""
        runner = self._moving() if self._on else None
        silent = self._executor.confirmed(self._served if runner is not None else None)
        if runner is not None and silent:
            runner.fail(f'the node has answered nothing for {silent:.1f} s: a callback of its '
                        'executor does not return, or nobody spins it; motion ends, for ~/stop '
                        'would not be heard')

    def _moving(self) -> Runner | None:
        runner = self._runner()
        moving = runner is not None and runner.phase in (Phase.RUNNING, Phase.SHADOW)
        return runner if moving else None

    def _poll(self) -> None:
        try:
            with self._lock:
                if not self._on:
                    self._timer.cancel()
                    return
            self._served = time.monotonic()
            runner = self._moving()
            stuck = self._intake.confirmed(self._stepping() if runner is not None else None)
            if runner is not None and stuck:
                runner.fail(f'a callback that reads inputs or steps has not returned for '
                            f'{stuck:.1f} s; motion ends')
            if (runner := self._runner()) is not None:
                runner.poll()
        except Exception:
            self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)
