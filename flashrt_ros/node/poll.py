"""Looks after a goal while no message comes: its limits, a silent enable, its feedback.

A timer of its own on a steady clock, whatever status_hz is; it runs only while there is a goal, so
that an idle node is not woken. And the other way round: whoever steps looks whether this timer is
still served. While it is not, neither is `~/stop`, and what cannot be stopped must not move.
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

from flashrt_ros.runtime.runner import Runner

PERIOD_S = 0.1
SILENT_S = 1.0  # without a turn of the node's executor, after which motion ends


class Poll:
    """Calls `Runner.poll` while a goal is open."""

    def __init__(self, node: Node, runner: Callable[[], Runner | None],
                 group: CallbackGroup) -> None:
        self._node = node
        self._runner = runner
        self._lock = threading.Lock()
        self._on = False
        self._served = 0.0             # steady time of the newest turn
        self._timer = node.create_timer(
            PERIOD_S, self._poll, callback_group=group, autostart=False,
            clock=Clock(clock_type=ClockType.STEADY_TIME))

    def follow(self) -> None:
        """A goal may have begun or ended. Any thread."""
        with self._lock:
            runner = self._runner()
            on = runner is not None and runner.goal is not None
            if on == self._on:
                return
            self._on = on
            self._served = time.monotonic()
        # on the timer's own thread: in Jazzy one that is cancelled between being found ready and
        # being called is never ready again
        executor = self._node.executor
        try:
            if executor is not None:
                executor.create_task(self._apply)
                return
        except (AttributeError, InvalidHandle):
            pass                       # the executor was shut down
        self._apply()

    def _apply(self) -> None:
        self._served = time.monotonic()
        if self._on:
            self._timer.reset()
        else:
            self._timer.cancel()

    def supervise(self) -> None:
        """End motion where the node's executor has not been served for too long. Any thread."""
        if self._on and (silent := time.monotonic() - self._served) > SILENT_S:
            runner = self._runner()
            if runner is not None:
                runner.fail(f'the node has answered nothing for {silent:.1f} s: a callback of its '
                            'executor does not return, or nobody spins it; motion ends, for '
                            '~/stop would not be heard')

    def _poll(self) -> None:
        self._served = time.monotonic()
        try:
            runner = self._runner()
            if runner is not None:
                runner.poll()
        except Exception:
            self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)
