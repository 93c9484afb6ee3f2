"""What leaves the runner, as messages: actions, chunks, events, status. Implements runtime.Sink.

The runner calls from the executor's, the intake's and the device thread. Actions are published
there and then; chunks, events and status are told on a thread of their own (telling.py). Nothing
here blocks or calls the runner, except `changed`, which comes without the runner's lock.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import functools
import time
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.duration import Duration
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.node import Node
from rclpy.qos import QoSProfile, qos_policy_name_from_kind
from rclpy.qos_overriding_options import QoSOverridingOptions

from flashrt_ros.core.capsule import Event
from flashrt_ros.ingest.output import Command
from flashrt_ros.ingest.spec import OutputSpec
from flashrt_ros.msg import ActionChunk, CapsuleEvent
from flashrt_ros.node import conversions
from flashrt_ros.node.action_output import ActionOutput
from flashrt_ros.node.goals import Goals
from flashrt_ros.node.ros_time import RosTime
from flashrt_ros.node.status import NO_EVENTS, Status
from flashrt_ros.node.telling import Telling
from flashrt_ros.runtime.sink import ChunkRecord, Feedback, Goal, GoalResult

RELIABLE = QoSProfile(depth=10)   # rclpy's default reliability: fits every subscriber
DEEP = QoSProfile(depth=50)


class Published:
    """An output that is a topic."""

    def __init__(self, node: Node, publisher: Any, build: Callable[[Command, int], Any]) -> None:
        self._node = node
        self._publisher = publisher
        self._build = build

    def send(self, command: Command, now_ns: int, *, stop: bool = False) -> None:
        """Publish a command. Any thread."""
        self._publisher.publish(self._build(command, now_ns))

    def flush(self, timeout_s: float) -> None:
        """Wait until reliable subscribers have acknowledged what was published."""
        self._publisher.wait_for_all_acked(Duration(seconds=timeout_s))

    def close(self) -> None:
        """Take the publisher back."""
        self._node.destroy_publisher(self._publisher)


class RosSink:
    """Owns the outputs and the publishers of ~/chunk and ~/capsule_events."""

    def __init__(self, node: Node, telling: Telling, clock: RosTime, status: Status,
                 goals: Goals, group: CallbackGroup, changed: Callable[[], None]) -> None:
        """`changed` hears, on any thread, that a goal may have begun or ended."""
        self._node = node
        self._telling = telling
        self._now = clock.now_ns
        self._status = status
        self._goals = goals
        self._group = group
        self._changed = changed
        self._chunks = node.create_publisher(ActionChunk, '~/chunk', DEEP,
                                             event_callbacks=NO_EVENTS)
        self._events = node.create_publisher(CapsuleEvent, '~/capsule_events', DEEP,
                                             event_callbacks=NO_EVENTS)
        self._outputs: dict[str, Published | ActionOutput] = {}

    def open(self, outputs: Mapping[str, OutputSpec]) -> None:
        """Advertise the outputs of a policy file. Raises Refusal(UNSUPPORTED) for a type."""
        builders = {name: conversions.action_builder(spec) for name, spec in outputs.items()}
        for name, spec in outputs.items():
            kind, build = builders[name]
            if conversions.is_action(spec.type):
                self._outputs[name] = ActionOutput.on(
                    self._node, kind, spec.topic, build,
                    functools.partial(self._status.goals, spec.topic), self._group)
                continue
            publisher = self._node.create_publisher(
                kind, spec.topic, RELIABLE,
                qos_overriding_options=QoSOverridingOptions.with_default_policies(),
                event_callbacks=PublisherEventCallbacks(
                    use_default_callbacks=False, incompatible_qos=self._mismatch(spec.topic)))
            self._outputs[name] = Published(self._node, publisher, build)

    def _mismatch(self, topic: str) -> Callable[[Any], None]:
        def report(event: Any) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind).lower()
            self._status.mismatch(topic, f'{event.total_count} subscriber(s) request an '
                                  f'incompatible {policy}; they receive nothing')
        return report

    def close(self) -> None:
        """Take the outputs back."""
        for output in self._outputs.values():
            output.close()
        self._outputs = {}

    def flush(self, timeout_s: float) -> None:
        """Wait until what was sent has arrived. Not from the executor's thread."""
        end = time.monotonic() + timeout_s
        for output in list(self._outputs.values()):
            output.flush(max(0.0, end - time.monotonic()))

    def publish(self, output: str, command: Command) -> None:
        """Send one action."""
        self._outputs[output].send(command, self._now())

    def stop(self, output: str, command: Command) -> None:
        """Send an output's on_stop."""
        self._outputs[output].send(command, self._now(), stop=True)

    def shadow(self, output: str, command: Command) -> None:
        """A shadow goal commands nothing; its raw rows stand in ~/chunk."""

    def chunk(self, record: ChunkRecord) -> None:
        """Publish one inference."""
        if self._telling.behind:
            for entry in record.latched:
                _ = entry.digest       # else each that waits would keep its messages, pictures too
        self._telling.tell(lambda: self._chunks.publish(conversions.action_chunk(record)))

    def event(self, event: Event) -> None:
        """Publish a change of the store or a rewind, stamped now."""
        now_ns = self._now()
        self._telling.tell(
            lambda: self._events.publish(conversions.capsule_event(event, now_ns)))

    def changed(self) -> None:
        """Publish the status soon, once for many changes."""
        self._changed()
        self._status.publish()

    def goal_done(self, goal: Goal, result: GoalResult) -> None:
        """Goals tell of their end themselves (Goal.add_done_callback)."""

    def goal_feedback(self, goal: Goal, feedback: Feedback) -> None:
        """Tell the client how the goal fares."""
        self._telling.guarded(lambda: self._goals.feedback(goal, feedback))
