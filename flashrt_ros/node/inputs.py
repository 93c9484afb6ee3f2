"""Subscriptions: serialised messages in, each handed to the runner with its digest and sequence.

They live from configure to cleanup. Sensor inputs are best effort, keep last 1; the topics of a
lock step are reliable, depth 10. Both may be overridden per topic the way ROS does it:
`qos_overrides./imu/data.subscription.reliability`. A publisher that does not fit is reported as a
diagnostic that names the topic; nothing else would ever say so.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import traceback
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.event_handler import SubscriptionEventCallbacks
from rclpy.node import Node
from rclpy.qos import (
    HistoryPolicy,
    QoSPolicyKind,
    QoSProfile,
    ReliabilityPolicy,
    qos_policy_name_from_kind,
)
from rclpy.qos_overriding_options import QoSOverridingOptions

from flashrt_ros.core.errors import Refusal
from flashrt_ros.ingest.observation import InputTopic
from flashrt_ros.node import conversions
from flashrt_ros.node.handover import Handover
from flashrt_ros.runtime.runner import Runner

OVERRIDES = QoSOverridingOptions([QoSPolicyKind.RELIABILITY, QoSPolicyKind.DEPTH,
                                  QoSPolicyKind.DURABILITY])
NO_SEQUENCE = 2**64 - 1  # of a middleware that does not count


class Inputs:
    """Owns the subscriptions of one configured policy."""

    def __init__(self, node: Node, runner: Runner, topics: Sequence[InputTopic],
                 group: CallbackGroup, mismatch: Callable[[str, str], None],
                 handover: Handover, supervise: Callable[[], None]) -> None:
        """`supervise` is called before each message.

        Raises Refusal(UNSUPPORTED) for a message type that is not installed.
        """
        self._node = node
        self._runner = runner
        self._handover = handover
        self._supervise = supervise
        self._mismatch = mismatch
        kinds = [conversions.message_class(t.type) for t in topics]
        self._subscriptions = [self._subscribe(topic, kind, group)
                               for topic, kind in zip(topics, kinds, strict=True)]

    def _subscribe(self, topic: InputTopic, kind: Any, group: CallbackGroup) -> Any:
        qos = QoSProfile(
            history=HistoryPolicy.KEEP_LAST, depth=topic.depth,
            reliability=(ReliabilityPolicy.RELIABLE if topic.reliable
                         else ReliabilityPolicy.BEST_EFFORT))

        def received(raw: bytes, info: Any) -> None:
            try:
                self._supervise()
                sequence = info.get('publication_sequence_number', NO_SEQUENCE)
                self._runner.feed(
                    topic.topic, conversions.Lazy(raw, kind),
                    digest=lambda: conversions.digest(raw),
                    seq=None if sequence == NO_SEQUENCE else sequence)
                self._handover.rest()
            except Refusal as refusal:
                self._node.get_logger().warning(str(refusal), throttle_duration_sec=1.0)
            except Exception:
                self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)

        def incompatible(event: Any) -> None:
            policy = qos_policy_name_from_kind(event.last_policy_kind).lower()
            self._mismatch(topic.topic, f'{event.total_count} publisher(s) offer an incompatible '
                           f'{policy}; nothing is received from them (set qos_overrides.'
                           f'{self._node.resolve_topic_name(topic.topic)}.subscription.{policy})')

        def other_type(event: Any) -> None:
            self._mismatch(topic.topic, f'a publisher sends another type than {topic.type}; '
                           'nothing is received from it')

        return self._node.create_subscription(
            kind, topic.topic, received, qos, callback_group=group, raw=True,
            qos_overriding_options=OVERRIDES,
            event_callbacks=SubscriptionEventCallbacks(
                incompatible_qos=incompatible, incompatible_type=other_type))

    def close(self) -> None:
        """Unsubscribe."""
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []
