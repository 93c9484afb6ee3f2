"""Serves the policy's inputs and its step timer on a thread of their own.

The node's executor builds a wait set of 25 services in every turn, and whatever callback it runs,
a transition, a list of 256 capsules, a parameter, keeps all others waiting. A step that moves a
robot should wait for none of that. The entities of `group` stay the node's own, with its name,
remappings and parameters; only this thread executes them, and no other executor sees them.
"""
from __future__ import annotations

import threading
import traceback
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.executors import ExternalShutdownException, ShutdownException, SingleThreadedExecutor
from rclpy.node import Node


class Group(CallbackGroup):
    """Callbacks of one thread: to executors of other threads they are never ready."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0

    def can_execute(self, entity: Any) -> bool:
        """Whether the caller is the thread that serves this group."""
        return threading.get_ident() == self.thread

    def beginning_execution(self, entity: Any) -> bool:
        """The same; nothing to note."""
        return self.can_execute(entity)

    def ending_execution(self, entity: Any) -> None:
        """Nothing to note: one thread runs one callback at a time."""


class _Executor(SingleThreadedExecutor):
    """Sees one group of a node that belongs to another executor."""

    def __init__(self, node: Node, group: Group) -> None:
        super().__init__(context=node.context)
        self._node = node
        self._group = group

    def get_nodes(self) -> list[Node]:
        """Return the node, which was never added: it would leave its executor."""
        return [self._node]

    def can_execute(self, entity: Any) -> bool:
        """Whether an entity is of the group and idle."""
        return entity.callback_group is self._group and bool(super().can_execute(entity))


class Intake:
    """A thread that serves `group` between `start` and `stop`."""

    def __init__(self, node: Node) -> None:
        self.group = Group()
        self._node = node
        self._executor: _Executor | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve; what was created in the group before has waited until now."""
        self._executor = executor = _Executor(self._node, self.group)
        self._thread = threading.Thread(target=self._serve, args=(executor,), name='intake',
                                        daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A timer of the group was started or stopped: look again. Any thread."""
        if self._executor is not None:
            self._executor.wake()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the callback that it is in."""
        executor, self._executor = self._executor, None
        thread, self._thread = self._thread, None
        if executor is not None and thread is not None:
            executor.create_task(lambda: None)     # spin_once returns
            thread.join(timeout_s)
            executor.shutdown(timeout_sec=0)

    def _serve(self, executor: _Executor) -> None:
        self.group.thread = threading.get_ident()
        while self._executor is executor:
            try:
                executor.spin_once()
            except (ExternalShutdownException, ShutdownException):
                return
            except Exception:
                self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)
