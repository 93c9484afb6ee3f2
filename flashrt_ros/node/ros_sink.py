"""What leaves the runner, as messages: actions, chunks, events, status. Implements runtime.Sink.

The runner calls from the executor's thread and from the device thread; publishing is safe in both.
Nothing here blocks or calls the runner, except `changed`, which comes without the runner's lock.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import time
import traceback
from typing import Any

from rclpy.duration import Duration
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.exceptions import InvalidHandle
from rclpy.node import Node
from rclpy.qos import QoSProfile, qos_policy_name_from_kind
from rclpy.qos_overriding_options import QoSOverridingOptions

from flashrt_ros.core.capsule import Event
from flashrt_ros.ingest.output import Command
from flashrt_ros.ingest.spec import OutputSpec
from flashrt_ros.msg import ActionChunk, CapsuleEvent
from flashrt_ros.node import conversions
from flashrt_ros.node.goals import Goals
from flashrt_ros.node.status import NO_EVENTS, Status
from flashrt_ros.runtime.sink import ChunkRecord, Feedback, Goal, GoalResult

RELIABLE = QoSProfile(depth=10)   # rclpy's default reliability: fits every subscriber
DEEP = QoSProfile(depth=50)


class RosSink:
    """Owns the publishers of outputs, ~/chunk and ~/capsule_events."""

    def __init__(self, node: Node, status: Status, goals: Goals) -> None:
        self._node = node
        self._status = status
        self._goals = goals
        self._chunks = node.create_publisher(ActionChunk, '~/chunk', DEEP,
                                             event_callbacks=NO_EVENTS)
        self._events = node.create_publisher(CapsuleEvent, '~/capsule_events', DEEP,
                                             event_callbacks=NO_EVENTS)
        self._outputs: dict[str, tuple[Any, Callable[[Command, int], Any]]] = {}

    def open(self, outputs: Mapping[str, OutputSpec]) -> None:
        """Advertise the outputs of a policy file. Raises Refusal(UNSUPPORTED) for a type."""
        builders = {name: conversions.action_builder(spec) for name, spec in outputs.items()}
        for name, spec in outputs.items():
            kind, build = builders[name]
            publisher = self._node.create_publisher(
                kind, spec.topic, RELIABLE,
                qos_overriding_options=QoSOverridingOptions.with_default_policies(),
                event_callbacks=PublisherEventCallbacks(
                    use_default_callbacks=False, incompatible_qos=self._mismatch(spec.topic)))
            self._outputs[name] = (publisher, build)

    def _mismatch(self, topic: str) -> Callable[[Any], None]:
        def report(event: Any) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind).lower()
            self._status.mismatch(topic, f'{event.total_count} subscriber(s) request an '
                                  f'incompatible {policy}; they receive nothing')
        return report

    def close(self) -> None:
        """Take the outputs back."""
        for publisher, _ in self._outputs.values():
            self._node.destroy_publisher(publisher)
        self._outputs = {}

    def flush(self, timeout_s: float) -> None:
        """Wait until reliable subscribers have acknowledged what was published."""
        end = time.monotonic() + timeout_s
        for publisher, _ in list(self._outputs.values()):
            publisher.wait_for_all_acked(Duration(seconds=max(0.0, end - time.monotonic())))

    def _now(self) -> int:
        return int(self._node.get_clock().now().nanoseconds)

    def publish(self, output: str, command: Command) -> None:
        """Send one action."""
        publisher, build = self._outputs[output]
        publisher.publish(build(command, self._now()))

    stop = publish

    def shadow(self, output: str, command: Command) -> None:
        """A shadow goal commands nothing; its raw rows stand in ~/chunk."""

    def _report(self, tell: Callable[[], None]) -> None:
        """Tell what nobody's motion depends on: a failure is logged and stays here. The device
        thread may still have something to say when the node has left the graph already."""
        try:
            tell()
        except InvalidHandle:
            pass
        except Exception:
            self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)

    def chunk(self, record: ChunkRecord) -> None:
        """Publish one inference."""
        self._report(lambda: self._chunks.publish(conversions.action_chunk(record)))

    def event(self, event: Event) -> None:
        """Publish a change of the store or a rewind."""
        self._report(lambda: self._events.publish(conversions.capsule_event(event, self._now())))

    def changed(self) -> None:
        """Publish the status."""
        self._report(self._status.publish)

    def goal_done(self, goal: Goal, result: GoalResult) -> None:
        """Goals tell of their end themselves (Goal.add_done_callback)."""

    def goal_feedback(self, goal: Goal, feedback: Feedback) -> None:
        """Tell the client how the goal fares."""
        self._report(lambda: self._goals.feedback(goal, feedback))
