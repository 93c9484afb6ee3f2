"""ROS messages <-> the plain data of core and runtime. No node in sight, no decisions either.

Times are int ns on our side. Message fields that hold numbers want exact Python types, so values
from numpy are converted here and nowhere else.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
import hashlib
import importlib
import math
import os
import re
from typing import Any

from builtin_interfaces.msg import Duration, Time
import numpy as np
from numpy.typing import NDArray
from rclpy.serialization import deserialize_message
from std_msgs.msg import Float32MultiArray, Header, MultiArrayDimension
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from flashrt_ros import msg as ours
from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.capsule import CapsuleInfo, Event
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.output import Command
from flashrt_ros.ingest.spec import OutputSpec
from flashrt_ros.runtime.sink import ChunkRecord, Feedback, GoalRequest, GoalResult, StatusSnapshot

_TYPE = re.compile(r'([a-z][a-z0-9_]*)/(msg|action)/([A-Z][A-Za-z0-9]*)')
SECOND = 1_000_000_000


def message_class(name: str) -> Any:
    """Return the class of `package/msg/Name`. Raises Refusal(UNSUPPORTED)."""
    match = _TYPE.fullmatch(name)
    if match is None:
        raise Refusal(Code.UNSUPPORTED, f'{name!r} is no message type; write package/msg/Name')
    package, kind, word = match.groups()
    try:
        found = getattr(importlib.import_module(f'{package}.{kind}'), word)
    except (ImportError, AttributeError):
        raise Refusal(Code.UNSUPPORTED, f'message type {name} is not installed here; install the '
                      f'package {package} (with an apt ROS: apt install ros-'
                      f'{os.environ.get("ROS_DISTRO", "jazzy")}-{package.replace("_", "-")})'
                      ) from None
    if not hasattr(found, '__import_type_support__'):
        raise Refusal(Code.UNSUPPORTED, f'{name} is no ROS message type')
    return found


class Lazy:
    """A serialised message that is read when its first field is."""

    __slots__ = ('_kind', '_message', '_raw')

    def __init__(self, raw: bytes, kind: Any) -> None:
        self._raw = raw
        self._kind = kind
        self._message: Any = None

    def __getattr__(self, name: str) -> Any:
        if self._message is None:
            self._message = deserialize_message(self._raw, self._kind)
        return getattr(self._message, name)


def digest(raw: bytes) -> int:
    """Return the first 8 bytes, big endian, of SHA-256 of a serialised message.

    >>> hex(digest(b''))
    '0xe3b0c44298fc1c14'
    """
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], 'big')


def time(ns: int) -> Time:
    """Return a stamp; times before 0 become 0."""
    sec, nanosec = divmod(max(0, int(ns)), SECOND)
    return Time(sec=min(sec, 2**31 - 1), nanosec=nanosec)


def nanoseconds(stamp: Time) -> int:
    """Return a stamp in ns."""
    return int(stamp.sec) * SECOND + int(stamp.nanosec)


def duration(seconds: float) -> Duration:
    """Return a duration, not negative."""
    sec, nanosec = divmod(max(0, round(seconds * SECOND)), SECOND)
    return Duration(sec=sec, nanosec=nanosec)


def capsule_info(info: CapsuleInfo) -> ours.CapsuleInfo:
    """Return the message of a capsule's description."""
    return ours.CapsuleInfo(
        name=info.name, id=info.id, parent_id=info.parent_id, note=info.note, tick=int(info.tick),
        step=int(info.step), session=int(info.session), epoch=int(info.epoch),
        stamp=time(info.stamp_ns), tier=int(info.tier), nbytes=int(info.nbytes),
        pinned=bool(info.pinned), durable=bool(info.durable), exact=bool(info.exact),
        fingerprint=info.fingerprint, witness_names=list(info.witness),
        witness=[float(v) for v in info.witness.values()])


def capsule_event(event: Event, now_ns: int) -> ours.CapsuleEvent:
    """Return the message of a change of the store or a rewind."""
    return ours.CapsuleEvent(
        header=Header(stamp=time(now_ns)), kind=int(event.kind), capsule=capsule_info(event.info),
        epoch=int(event.epoch), code=int(event.code), message=event.message,
        duration_s=float(event.duration_s), uri=event.uri, sha256=event.sha256)


def policy_status(status: StatusSnapshot, now_ns: int) -> ours.PolicyStatus:
    """Return the message of a status."""
    return ours.PolicyStatus(
        header=Header(stamp=time(now_ns)), phase=int(status.phase),
        waiting_for=status.waiting_for, prompt=status.prompt, session=int(status.session),
        epoch=int(status.epoch), tick=int(status.tick), step=int(status.step),
        queue_depth=int(status.queue_depth), late_ticks=int(status.late_ticks),
        dropped_chunks=int(status.dropped_chunks), dropped_rows=int(status.dropped_rows),
        clipped=int(status.clipped), rejected_inputs=int(status.rejected_inputs),
        tick_p50_s=float(status.tick_p50_s), tick_p99_s=float(status.tick_p99_s),
        restore_bound_s=float(status.restore_bound_s), capsules=int(status.capsules),
        capsule_bytes=int(status.capsule_bytes), last_refusal=status.last_refusal,
        exact=bool(status.exact), nominal_step_hz=float(status.nominal_step_hz),
        step_hz=float(status.step_hz), step_hz_wall=float(status.step_hz_wall),
        missed_steps=int(status.missed_steps), inference_s=float(status.inference_s),
        max_tick_s=float(status.max_tick_s), guard_process=status.guard_process,
        ended_code=int(status.ended_code), ended=status.ended,
        dropped_logs=int(status.dropped_logs))


def action_chunk(record: ChunkRecord) -> ours.ActionChunk:
    """Return the message of one output of one inference."""
    return ours.ActionChunk(
        header=Header(stamp=time(record.stamp_ns)), output=record.output,
        start=time(record.start_ns), session=int(record.session), epoch=int(record.epoch),
        tick=int(record.tick), step=int(record.step), step_s=float(record.step_s),
        horizon=int(record.data.shape[0]), names=list(record.names),
        data=doubles(record.data), used=bool(record.used),
        input_names=[e.name for e in record.latched],
        input_stamps=[time(e.stamp_ns) for e in record.latched],
        input_steps=[int(e.step) for e in record.latched],
        input_digests=[int(e.digest) for e in record.latched])


def goal_request(goal: ExecutePolicy.Goal) -> GoalRequest:
    """Return a goal as the runner takes it."""
    return GoalRequest(goal.prompt, goal.capsule, goal.max_duration_s, goal.max_ticks, goal.shadow,
                       goal.if_epoch)


def goal_result(result: GoalResult) -> ExecutePolicy.Result:
    """Return the message of a goal's end."""
    return ExecutePolicy.Result(code=int(result.code), message=result.message,
                                ticks=int(result.ticks), epoch=int(result.epoch),
                                last=capsule_info(result.last))


def goal_feedback(feedback: Feedback) -> ExecutePolicy.Feedback:
    """Return the message of how a goal fares."""
    return ExecutePolicy.Feedback(
        phase=int(feedback.phase), tick=int(feedback.tick), epoch=int(feedback.epoch),
        queue_depth=int(feedback.queue_depth), input_age_s=float(feedback.input_age_s),
        late_ticks=int(feedback.late_ticks), waiting_for=feedback.waiting_for)


# -- actions ------------------------------------------------------------------------------

Builder = Callable[[Command, int], Any]
FIELD_OF_KIND: Mapping[str, str] = {'position': 'position', 'velocity': 'velocity',
                                    'effort': 'effort'}
POINT_OF_KIND: Mapping[str, str] = {'position': 'positions', 'velocity': 'velocities'}


def action_builder(spec: OutputSpec) -> tuple[Any, Builder]:
    """Return an output's message class and what makes a message of `(command, now_ns)`.

    Where the type is an action, the class is the action's and what is made is its goal. Raises
    Refusal(UNSUPPORTED) for a type that this build cannot send, or that is not installed.
    """
    build = _BUILDERS.get(spec.type)
    if build is None:
        raise Refusal(Code.UNSUPPORTED, f'{spec.path}: outputs of type {spec.type} cannot be sent '
                      f'by this build; use one of {", ".join(_BUILDERS)}')
    kind = message_class(spec.type)
    return kind, lambda command, now_ns: build(kind, command, now_ns)


def is_action(type_name: str) -> bool:
    """Whether an output of this type is sent as the goals of an action."""
    return '/action/' in type_name


def doubles(values: NDArray[np.float64]) -> array[float]:
    """Return values of any shape, flat, as rclpy takes them without looking at each."""
    return array('d', values.tobytes())


def _multi_array(kind: Any, command: Command, now_ns: int) -> Any:
    data = doubles(command.values)
    if kind is Float32MultiArray:
        data = array('f', data)
        if not math.isfinite(sum(data)):
            raise Refusal(Code.BACKEND, f'output {command.output}: a value does not fit into '
                          f'float32; nothing was sent ({command.values.tolist()})')
    message = kind(data=data)
    if command.names:
        n = len(command.names)
        message.layout.dim = [MultiArrayDimension(label=','.join(command.names), size=n, stride=n)]
    return message


def _joint_state(kind: Any, command: Command, now_ns: int) -> Any:
    return kind(header=Header(stamp=time(now_ns), frame_id=command.frame_id),
                name=list(command.names),
                **{FIELD_OF_KIND[command.kind]: doubles(command.values)})


def _twist(kind: Any, command: Command, now_ns: int) -> Any:
    message = kind()
    for name, value in zip(command.names, command.values.tolist(), strict=True):
        part, _, axis = name.partition('.')
        setattr(getattr(message, part), axis, value)
    return message


def _twist_stamped(kind: Any, command: Command, now_ns: int) -> Any:
    message = kind(header=Header(stamp=time(now_ns), frame_id=command.frame_id))
    message.twist = _twist(type(message.twist), command, now_ns)
    return message


def _trajectory(kind: Any, command: Command, now_ns: int) -> Any:
    # Stamp 0 means "from now on" to a controller, whatever its clock says.
    assert command.points is not None
    field = POINT_OF_KIND[command.kind]
    return kind(header=Header(frame_id=command.frame_id), joint_names=list(command.names),
                points=[JointTrajectoryPoint(time_from_start=duration(t), **{field: doubles(row)})
                        for t, row in zip(command.times, command.points, strict=True)])


def _follow_joint_trajectory(kind: Any, command: Command, now_ns: int) -> Any:
    return kind.Goal(trajectory=_trajectory(JointTrajectory, command, now_ns))


def _gripper_command(kind: Any, command: Command, now_ns: int) -> Any:
    goal = kind.Goal()                 # max_effort stays 0, for position controllers
    goal.command.position = float(command.values[0])
    return goal


_BUILDERS: Mapping[str, Callable[[Any, Command, int], Any]] = {
    'std_msgs/msg/Float32MultiArray': _multi_array,
    'std_msgs/msg/Float64MultiArray': _multi_array,
    'sensor_msgs/msg/JointState': _joint_state,
    'geometry_msgs/msg/Twist': _twist,
    'geometry_msgs/msg/TwistStamped': _twist_stamped,
    'trajectory_msgs/msg/JointTrajectory': _trajectory,
    'control_msgs/action/FollowJointTrajectory': _follow_joint_trajectory,
    'control_msgs/action/GripperCommand': _gripper_command,
}
