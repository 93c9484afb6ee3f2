"""Looks after a goal while no message comes: its limits, a silent enable, its feedback.

A timer of its own on a steady clock, whatever status_hz is; it runs only while there is a goal, so
that an idle node is not woken.
"""
from __future__ import annotations

from collections.abc import Callable
import threading
import traceback

from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.node import Node

from flashrt_ros.node.answers import wake
from flashrt_ros.runtime.runner import Runner

PERIOD_S = 0.1


class Poll:
    """Calls `Runner.poll` while a goal is open. `follow` may be called from any thread."""

    def __init__(self, node: Node, runner: Callable[[], Runner | None],
                 group: CallbackGroup) -> None:
        self._node = node
        self._runner = runner
        self._lock = threading.Lock()
        self._on = False
        self._timer = node.create_timer(
            PERIOD_S, self._poll, callback_group=group, autostart=False,
            clock=Clock(clock_type=ClockType.STEADY_TIME))

    def follow(self) -> None:
        """A goal may have begun or ended."""
        with self._lock:
            runner = self._runner()
            on = runner is not None and runner.goal is not None
            if on == self._on:
                return
            self._on = on
            if on:
                self._timer.reset()
            else:
                self._timer.cancel()
        if on:
            wake(self._node)                   # its wait set has the timer as it was

    def _poll(self) -> None:
        try:
            runner = self._runner()
            if runner is not None:
                runner.poll()
        except Exception:
            self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)
