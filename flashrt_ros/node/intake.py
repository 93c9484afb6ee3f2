"""Serves the policy's inputs and its step timer on a thread of their own.

The node's executor builds a wait set of 25 services in every turn, and whatever callback it runs,
a transition, a list of 256 capsules, a parameter, keeps all others waiting. A step that moves a
robot should wait for none of that. The entities of `group` stay the node's own, with its name,
remappings and parameters; only this thread executes them, and no other executor sees them.

/clock is served here too, before all inputs: the first message after a jump of simulated time must
not overtake the jump.
"""
from __future__ import annotations

from collections.abc import Callable
import threading
import time
import traceback
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.exceptions import InvalidHandle
from rclpy.executors import ExternalShutdownException, ShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rosgraph_msgs.msg import Clock

MAX_FAILURES = 100  # of the executor in a row


class Group(CallbackGroup):
    """Callbacks of one thread: to executors of other threads they are never ready."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = 0
        self.since: float | None = None    # steady; None: in no callback

    def can_execute(self, entity: Any) -> bool:
        """Whether the caller is the thread that serves this group."""
        return threading.get_ident() == self.thread

    def beginning_execution(self, entity: Any) -> bool:
        """The same; a callback begins."""
        mine = self.can_execute(entity)
        if mine:
            self.since = time.monotonic()
        return mine

    def ending_execution(self, entity: Any) -> None:
        """It has ended."""
        self.since = None


class _Entities:
    """A group as the executor sees it, in place of the node, whose lists change meanwhile."""

    clients = services = guards = ()

    def __init__(self) -> None:
        self.subscriptions: tuple[Any, ...] = ()
        self.timers: tuple[Any, ...] = ()
        self.waitables: tuple[Any, ...] = ()

    def collect(self, node: Node, group: Group) -> None:
        """Take what the node has in the group now. On the thread that creates and destroys."""
        mine = [s for s in node.subscriptions if s.callback_group is group]
        self.subscriptions = tuple(sorted(mine, key=lambda s: not is_clock(s)))
        self.timers = tuple(t for t in node.timers if t.callback_group is group)
        self.waitables = tuple(w for w in node.waitables if w.callback_group is group)


class _Executor(SingleThreadedExecutor):
    """Serves a group's entities; the node itself belongs to another executor."""

    def __init__(self, node: Node, entities: _Entities) -> None:
        super().__init__(context=node.context)
        self._entities = entities

    def get_nodes(self) -> list[Any]:
        """Return what stands for the node."""
        return [self._entities]


class Intake:
    """A thread that serves `group` between `start` and `stop`."""

    def __init__(self, node: Node, failed: Callable[[str], None]) -> None:
        """`failed` hears, on this thread, why it cannot go on: nothing is received then."""
        self.group = Group()
        self._node = node
        self._failed = failed
        self._entities = _Entities()
        self._executor: _Executor | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve; what was created in the group before has waited until now."""
        self._clock(self.group)
        self._entities.collect(self._node, self.group)
        self._executor = executor = _Executor(self._node, self._entities)
        self._thread = threading.Thread(target=self._serve, args=(executor,), name='intake',
                                        daemon=True)
        self._thread.start()

    def run(self, job: Callable[[], None]) -> None:
        """Run a job on this thread. A timer that another thread cancels between being found ready
        and being called is never ready again (rclpy in Jazzy); so it is cancelled here."""
        executor = self._executor
        if executor is not None:
            executor.create_task(job)

    def refresh(self) -> None:
        """Simulated time was switched on or off: /clock has come or gone."""
        executor = self._executor
        if executor is not None:
            self._clock(self.group)
            self._entities.collect(self._node, self.group)
            executor.wake()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the callback that it is in."""
        executor, self._executor = self._executor, None
        thread, self._thread = self._thread, None
        if executor is None or thread is None:
            return
        executor.create_task(lambda: None)         # spin_once returns
        thread.join(timeout_s)
        executor.shutdown(timeout_sec=0)
        self._clock(self._node.default_callback_group)
        if self._node.executor is not None:
            self._node.executor.wake()

    def _clock(self, group: CallbackGroup) -> None:
        """Let `group` serve /clock, which the node subscribed to by itself."""
        for subscription in self._node.subscriptions:
            if is_clock(subscription):
                subscription.callback_group = group
                group.add_entity(subscription)

    def _serve(self, executor: _Executor) -> None:
        self.group.thread = threading.get_ident()
        failures = 0
        try:
            while self._executor is executor and executor.context.ok() and failures < MAX_FAILURES:
                try:
                    executor.spin_once()
                    failures = 0
                except (ExternalShutdownException, ShutdownException):
                    return
                except InvalidHandle:
                    failures += 1                  # destroyed while it was waited for
                except Exception:
                    if not executor.context.ok():
                        return                     # shut down while a wait set was built
                    failures += 1
                    self._node.get_logger().error(traceback.format_exc(),
                                                  throttle_duration_sec=1.0)
        finally:
            if self.group.thread == threading.get_ident():   # else it came late, another serves
                self.group.thread = 0
            if self._executor is executor and executor.context.ok():
                self._failed('the thread that receives inputs has ended; the log says why')


def is_clock(subscription: Any) -> bool:
    """Whether it is the node's own subscription to simulated time."""
    return subscription.msg_type is Clock
