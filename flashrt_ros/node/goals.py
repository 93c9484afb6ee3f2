"""The action server ~/execute: ROS goal handles on one side, the runner's goals on the other.

Every goal is accepted: a rejection carries no reason, a result does. A goal reaches the runner only
after its acknowledgement was sent, so a client that vanishes before it blocks nothing; one that
vanishes later leaves a goal that ends by its limit, a stop or the next goal.
"""
from __future__ import annotations

from collections.abc import Callable
import traceback
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.task import Future

from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.node import conversions
from flashrt_ros.node.answers import not_configured, wake
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import Feedback, Goal, GoalResult


class _Entry:
    """A goal handle, its goal in the runner, and the result that the client waits for."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.goal: Goal | None = None
        self.result: Future = Future()  # of GoalResult


class Goals:
    """Owns the action server. All methods but `feedback` run on the executor's thread."""

    def __init__(self, node: Node, runner: Callable[[], Runner | None],
                 group: CallbackGroup) -> None:
        self._node = node
        self._runner = runner
        self._entries: dict[bytes, _Entry] = {}
        self._by_goal: dict[int, _Entry] = {}
        self._server = ActionServer(
            node, ExecutePolicy, '~/execute', self._execute, callback_group=group,
            goal_callback=lambda _: GoalResponse.ACCEPT, cancel_callback=self._cancel,
            handle_accepted_callback=self._accepted, result_timeout=60)

    @property
    def waiting(self) -> bool:
        """Whether a client still waits for a result."""
        return bool(self._entries)

    def _accepted(self, handle: Any) -> None:
        """Start the goal in the order of acceptance; `_execute` then waits for its end."""
        entry = _Entry(handle)
        self._entries[bytes(handle.goal_id.uuid)] = entry
        try:
            runner = self._runner()
            if runner is None:
                raise not_configured(self._node)
            entry.goal = goal = runner.execute(conversions.goal_request(handle.request))
            self._by_goal[id(goal)] = entry
            goal.add_done_callback(lambda g: self._ended(entry, g))
        except Refusal as error:
            entry.result.set_result(GoalResult(error.code, error.message, epoch=self._epoch()))
        except Exception as error:
            self._node.get_logger().error(traceback.format_exc())
            entry.result.set_result(GoalResult(Code.INTERNAL, f'{type(error).__name__}: {error}',
                                               epoch=self._epoch()))
        handle.execute()

    def _epoch(self) -> int:
        runner = self._runner()
        return 0 if runner is None else runner.epoch

    def _ended(self, entry: _Entry, goal: Goal) -> None:
        """Any thread: hand the result to the executor."""
        entry.result.set_result(goal.result)
        wake(self._node)

    async def _execute(self, handle: Any) -> ExecutePolicy.Result:
        entry = self._entries[bytes(handle.goal_id.uuid)]
        result: GoalResult = await entry.result
        del self._entries[bytes(handle.goal_id.uuid)]
        if entry.goal is not None:
            del self._by_goal[id(entry.goal)]
        try:
            if result.code is Code.OK:
                handle.succeed()
            elif handle.is_cancel_requested:
                handle.canceled()
            else:
                handle.abort()
        except Exception:
            self._node.get_logger().error(traceback.format_exc())
        return conversions.goal_result(result)

    def _cancel(self, handle: Any) -> CancelResponse:
        try:
            entry = self._entries.get(bytes(handle.goal_id.uuid))
            runner = self._runner()
            if entry is None or entry.goal is None or runner is None:
                return CancelResponse.REJECT  # it has ended
            runner.cancel(entry.goal)
            return CancelResponse.ACCEPT
        except Exception:
            self._node.get_logger().error(traceback.format_exc())
            return CancelResponse.REJECT

    def feedback(self, goal: Goal, feedback: Feedback) -> None:
        """Tell the goal's client how it fares."""
        entry = self._by_goal.get(id(goal))
        if entry is not None:
            entry.handle.publish_feedback(conversions.goal_feedback(feedback))

    def close(self) -> None:
        """Destroy the server."""
        self._server.destroy()
