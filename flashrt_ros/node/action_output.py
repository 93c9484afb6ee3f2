"""An output that is sent as the goals of an action: FollowJointTrajectory, GripperCommand.

Each command is a goal, and a newer goal replaces the one before it; that is what these action
servers do by themselves, so nothing is cancelled first. on_stop is a goal too, one point at the
measured position; where the server rejects it, whatever still runs there is cancelled instead.
Nothing waits for an answer: rejections and failures are counted and stand in the diagnostics.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import threading
import time
import traceback
from typing import Any

from action_msgs.msg import GoalStatus
from rclpy.action import ActionClient
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node

from flashrt_ros.ingest.output import Command

ENDINGS = {GoalStatus.STATUS_CANCELED: 'cancelled', GoalStatus.STATUS_ABORTED: 'aborted'}


class GoalClient(ActionClient):
    """rclpy's client, for goals that are sent from another thread than the executor's.

    rclpy registers a goal after it has sent it, so the answer could come before; here it waits.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._sending = threading.Lock()
        super().__init__(*args, **kwargs)

    def send_goal_async(self, *args: Any, **kwargs: Any) -> Any:
        """Send a goal from any thread."""
        with self._sending:
            return super().send_goal_async(*args, **kwargs)

    async def execute(self, taken_data: Any) -> None:
        """Handle answers, once the goal that is just being sent is registered."""
        with self._sending:
            pass
        await super().execute(taken_data)


@dataclass
class GoalCounts:
    """What became of an output's goals since configure; shown in the diagnostics."""

    sent: int = 0
    unsent: int = 0                    # no server was there
    unanswered: int = 0                # a newer one was answered: it was lost on the way
    rejected: int = 0
    failed: int = 0                    # ended otherwise than well, though nothing replaced them


Tell = Callable[[GoalCounts, str], None]


class ActionOutput:
    """Sends commands as goals. `send` may be called from any thread, the rest from the executor's.
    """

    def __init__(self, client: Any, build: Callable[[Command, int], Any], tell: Tell,
                 log: Any) -> None:
        """`client` is an ActionClient; `tell` hears of every trouble, on any thread."""
        self._client = client
        self._build = build
        self._tell = tell
        self._log = log
        self._changed = threading.Condition()
        self._newest = 0
        self._asked: set[int] = set()          # sent and not yet answered
        self._running: dict[int, Any] = {}     # accepted and not yet ended
        self.counts = GoalCounts()

    @classmethod
    def on(cls, node: Node, kind: Any, topic: str, build: Callable[[Command, int], Any],
           tell: Tell, group: CallbackGroup) -> ActionOutput:
        """Return an output of a node."""
        return cls(GoalClient(node, kind, topic, callback_group=group), build, tell,
                   node.get_logger())

    def send(self, command: Command, now_ns: int, *, stop: bool = False) -> None:
        """Send a command; `stop` says that it ends motion. Does not wait."""
        if not self._client.server_is_ready():
            self.counts.unsent += 1
            self._tell(self.counts, 'no action server is there; nothing was sent')
            return
        goal = self._build(command, now_ns)
        with self._changed:
            self._newest += 1
            number = self._newest
            self._asked.add(number)
            self.counts.sent += 1
        try:
            future = self._client.send_goal_async(goal)
        except Exception:
            self._answered(number)
            raise
        future.add_done_callback(lambda f: self._safely(self._on_answer, number, f, stop))

    def _safely(self, handler: Callable[..., None], *arguments: Any) -> None:
        try:
            handler(*arguments)
        except Exception:                      # it would end the executor
            self._log.error(traceback.format_exc(), throttle_duration_sec=1.0)

    def _answered(self, number: int) -> None:
        with self._changed:
            lost = {n for n in self._asked if n < number}   # a server keeps the newest ten only
            self.counts.unanswered += len(lost)
            self._asked -= lost | {number}
            self._changed.notify_all()

    def _on_answer(self, number: int, future: Any, stop: bool) -> None:
        try:
            handle = future.result()
            if handle is None:                 # the client was destroyed
                return
            if handle.accepted:
                with self._changed:
                    self._running[number] = handle
                handle.get_result_async().add_done_callback(
                    lambda f: self._safely(self._on_result, number, f))
                return
            self.counts.rejected += 1
            if not stop:
                self._tell(self.counts, 'a goal was rejected')
                return
            with self._changed:
                running = list(self._running.values())
            for other in running:
                other.cancel_goal_async()
            self._tell(self.counts, 'the goal of on_stop was rejected; what ran was cancelled')
        finally:
            self._answered(number)

    def _on_result(self, number: int, future: Any) -> None:
        with self._changed:
            self._running.pop(number, None)
            replaced = number != self._newest
        answer = future.result()
        if answer is None or answer.status == GoalStatus.STATUS_SUCCEEDED:
            return
        code = getattr(answer.result, 'error_code', 0)
        if replaced and (answer.status != GoalStatus.STATUS_ABORTED or not code):
            return                             # as a replaced goal ends
        self.counts.failed += 1
        words = [f'a goal was {ENDINGS.get(answer.status, f"ended with status {answer.status}")}']
        if code:
            words.append(f'error_code {code}')
        if text := getattr(answer.result, 'error_string', ''):
            words.append(text)
        self._tell(self.counts, ', '.join(words))

    def flush(self, timeout_s: float) -> None:
        """Wait until the server has answered what was sent. Not from the executor's thread."""
        end = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._asked, max(0.0, end - time.monotonic()))

    def close(self) -> None:
        """Take the client back; goals that run go on."""
        self._client.destroy()
