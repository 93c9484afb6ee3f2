"""ROS time, which a step reads several times, and its jumps."""
from __future__ import annotations

from collections.abc import Callable
import time
import traceback
from typing import Any

from rclpy.clock import ClockChange, JumpThreshold
from rclpy.duration import Duration
from rclpy.node import Node

Jumped = Callable[[int, bool], None]   # ns, and whether time comes from another source now


class RosTime:
    """The clock of a node. While nobody simulates time it is the system's, and asking that is ten
    times cheaper than asking rclpy."""

    def __init__(self, node: Node, jumped: Jumped) -> None:
        """`jumped` hears of every step backward and change of the source, on the executor."""
        self._node = node
        self._jumped = jumped
        self._clock = node.get_clock()
        self._handle = self._clock.create_jump_callback(
            JumpThreshold(min_forward=None, min_backward=Duration(nanoseconds=-1)),
            post_callback=self._on_jump)
        self._simulated = bool(self._clock.ros_time_is_active)

    def now_ns(self) -> int:
        """Return ROS time in ns. Any thread."""
        return int(self._clock.now().nanoseconds) if self._simulated else time.time_ns()

    def _on_jump(self, jump: Any) -> None:
        switched = jump.clock_change in (ClockChange.ROS_TIME_ACTIVATED,
                                         ClockChange.ROS_TIME_DEACTIVATED)
        if switched:
            self._simulated = jump.clock_change == ClockChange.ROS_TIME_ACTIVATED
        try:
            self._jumped(jump.delta.nanoseconds, switched)
        except Exception:
            self._node.get_logger().error(traceback.format_exc())

    def close(self) -> None:
        """Hear of jumps no longer."""
        self._handle.unregister()
