"""~/status and /diagnostics: what the node is doing, for programs and for people."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rclpy.callback_groups import CallbackGroup
from rclpy.clock import Clock, ClockType
from rclpy.event_handler import PublisherEventCallbacks
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from std_msgs.msg import Header

from flashrt_ros.msg import PolicyStatus
from flashrt_ros.node import conversions
from flashrt_ros.node.action_output import GoalCounts
from flashrt_ros.node.ros_time import RosTime
from flashrt_ros.node.telling import Telling
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import StatusSnapshot

LATCHED = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                     durability=DurabilityPolicy.TRANSIENT_LOCAL)

# rclpy adds two handlers to every publisher, each of which costs every pass of its executor; these
# topics' own readers say it when they do not fit.
NO_EVENTS = PublisherEventCallbacks(use_default_callbacks=False)


class Status:
    """Publishes on every change and at status_hz. `publish` and `diagnose` may be called from any
    thread and return at once; what they tell is put together when it is told."""

    def __init__(self, node: Node, telling: Telling, clock: RosTime,
                 runner: Callable[[], Runner | None], group: CallbackGroup) -> None:
        self._node = node
        self._telling = telling
        self._now = clock.now_ns
        self._runner = runner
        self._group = group
        self._timer: Any = None
        self.failure = ''                        # why the last configure failed
        self.mismatches: dict[str, str] = {}     # topic -> what does not fit
        self._goals: dict[str, tuple[GoalCounts, str]] = {}  # action -> counts, last trouble
        self._status = node.create_publisher(PolicyStatus, '~/status', LATCHED,
                                            event_callbacks=NO_EVENTS)
        self._diagnostics = node.create_publisher(DiagnosticArray, '/diagnostics',
                                                  QoSProfile(depth=10), event_callbacks=NO_EVENTS)

    def set_rate(self, hz: float) -> None:
        """Publish at this rate too, by a steady clock: also while simulated time stands still."""
        if self._timer is not None:
            self._node.destroy_timer(self._timer)
            self._timer = None
        if hz > 0:
            self._timer = self._node.create_timer(
                1.0 / hz, self._on_timer, callback_group=self._group,
                clock=Clock(clock_type=ClockType.STEADY_TIME))

    def _on_timer(self) -> None:
        self.publish()
        self.diagnose()

    def clear(self) -> None:
        """Forget what was said of another configuration."""
        self.failure = ''
        self.mismatches = {}
        self._goals = {}

    def goals(self, action: str, counts: GoalCounts, text: str) -> None:
        """Tell of goals that an action server did not carry out. Any thread."""
        news = action not in self._goals or self._goals[action][1] != text
        self._goals[action] = (counts, text)
        self._node.get_logger().warning(f'{action}: {text}', throttle_duration_sec=1.0)
        if news:
            self.diagnose()

    def mismatch(self, topic: str, text: str) -> None:
        """Remember that nothing is received from (or by) somebody on a topic."""
        self.mismatches[topic] = text
        self._node.get_logger().warning(f'{topic}: {text}')
        self.diagnose()

    def snapshot(self) -> StatusSnapshot:
        """Return the present status; of an unconfigured node, why the last configure failed."""
        runner = self._runner()
        if runner is not None:
            return runner.status()
        return StatusSnapshot(
            phase=Phase.UNCONFIGURED, waiting_for='', prompt='', session=0, epoch=0, tick=0, step=0,
            queue_depth=0, late_ticks=0, dropped_chunks=0, dropped_rows=0, clipped=0,
            rejected_inputs=0, tick_p50_s=0.0, tick_p99_s=0.0, restore_bound_s=0.0, capsules=0,
            capsule_bytes=0, last_refusal=self.failure, exact=False)

    def publish(self) -> None:
        """Publish the status soon, once for many calls."""
        self._telling.once(self._publish)

    def _publish(self) -> None:
        self._status.publish(conversions.policy_status(self.snapshot(), self._now()))

    def diagnose(self) -> None:
        """Publish the diagnostics soon, once for many calls."""
        self._telling.once(self._diagnose)

    def _diagnose(self) -> None:
        now_ns = self._now()
        status = self.snapshot()
        name = self._node.get_fully_qualified_name()
        self._diagnostics.publish(DiagnosticArray(
            header=Header(stamp=conversions.time(now_ns)),
            status=[self._policy(name, status), self._topics(name),
                    *(self._action(name, a, c, t) for a, (c, t) in list(self._goals.items()))]))

    def _policy(self, name: str, status: StatusSnapshot) -> DiagnosticStatus:
        level, message = DiagnosticStatus.OK, status.phase.name
        if status.phase is Phase.FAULT or self.failure:
            level, message = DiagnosticStatus.ERROR, f'{message}: {status.last_refusal}'
        elif status.waiting_for:
            level, message = DiagnosticStatus.WARN, f'{message}, waiting for {status.waiting_for}'
        fields = ('tick', 'step', 'epoch', 'queue_depth', 'late_ticks', 'dropped_chunks',
                  'dropped_rows', 'clipped', 'rejected_inputs', 'tick_p50_s', 'tick_p99_s',
                  'restore_bound_s', 'capsules', 'capsule_bytes', 'last_refusal')
        return DiagnosticStatus(
            level=level, name=f'{name}: policy', message=message, hardware_id='',
            values=[KeyValue(key=f, value=str(getattr(status, f))) for f in fields])

    def _topics(self, name: str) -> DiagnosticStatus:
        mismatches = dict(self.mismatches)       # the executor may add to it
        return DiagnosticStatus(
            level=DiagnosticStatus.WARN if mismatches else DiagnosticStatus.OK,
            name=f'{name}: topics',
            message='; '.join(f'{t}: {w}' for t, w in mismatches.items()) or 'all compatible',
            hardware_id='',
            values=[KeyValue(key=t, value=w) for t, w in mismatches.items()])

    def _action(self, name: str, action: str, counts: GoalCounts, text: str) -> DiagnosticStatus:
        return DiagnosticStatus(
            level=DiagnosticStatus.WARN, name=f'{name}: {action}', message=text, hardware_id='',
            values=[KeyValue(key=k, value=str(v)) for k, v in asdict(counts).items()])
