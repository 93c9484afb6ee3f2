"""What the policy file knows: terms with their keys, message types and sizes; output types.

A new built-in term gets one line here (a vector of message fields: one in terms.VECTOR_TERMS).
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt_ros.ingest.images import COMPRESSED, ENCODINGS, IMAGE
from flashrt_ros.ingest.spec import TermSpec
from flashrt_ros.ingest.terms import VECTOR_TERMS

BACKENDS = ('host', 'onnx', 'torch', 'tensorrt', 'tensorrt_rtx')
TOPIC_KEYS = ('topic', 'type', 'max_age_s', 'latched', 'timeout_s', 'on_timeout')
VALUE_KEYS = ('offset', 'scale')

JOINT_STATE = 'sensor_msgs/msg/JointState'
FLOAT32 = 'std_msgs/msg/Float32MultiArray'
FLOAT64 = 'std_msgs/msg/Float64MultiArray'
TWIST = 'geometry_msgs/msg/Twist'
TWIST_STAMPED = 'geometry_msgs/msg/TwistStamped'
TRAJECTORY = 'trajectory_msgs/msg/JointTrajectory'
FOLLOW = 'control_msgs/action/FollowJointTrajectory'
GRIPPER = 'control_msgs/action/GripperCommand'

DEFAULT_ENCODING = 'rgb8'
CHANNELS: Mapping[str, int] = {name: channels for name, (_, channels, _) in ENCODINGS.items()}


@dataclass(frozen=True)
class TermRule:
    """What one term takes: its keys beside `term`, its message types (the first is the usual)."""

    keys: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    types: tuple[str, ...] = ()        # empty: needs no message; ('*',): any type
    fields: tuple[str, ...] = ()       # names that `fields` may hold, and its default
    size: int | None = None            # values it gives, where fixed


def _topical(types: tuple[str, ...], *, keys: tuple[str, ...] = (), required: tuple[str, ...] = (),
             fields: tuple[str, ...] = ()) -> TermRule:
    return TermRule((*TOPIC_KEYS, *keys, *VALUE_KEYS), ('topic', *required), types, fields)


_JOINTS = _topical((JOINT_STATE,), keys=('joints',), required=('joints',))

TERMS: Mapping[str, TermRule] = {
    'joint_position': _JOINTS,
    'joint_velocity': _JOINTS,
    'joint_effort': _JOINTS,
    **{name: _topical(tuple(term.paths), keys=('fields',), fields=term.names)
       for name, term in VECTOR_TERMS.items()},
    'joy': _topical(('sensor_msgs/msg/Joy',), keys=('fields',), required=('fields',)),
    'array': _topical((FLOAT32, '*'), keys=('field', 'length')),
    'image': _topical((IMAGE, COMPRESSED), keys=(
        'size', 'crop', 'layout', 'encoding', 'resize', 'fill')),
    'constant': TermRule(('value', *VALUE_KEYS), ('value',)),
    # The topic is optional: a prompt comes in a goal, or as an event on the topic.
    'prompt': TermRule(('topic', 'encode', 'length', *VALUE_KEYS), ('encode', 'length'),
                       ('std_msgs/msg/String',)),
    'last_action': TermRule(('output', *VALUE_KEYS)),
    'prefix': TermRule(('output', 'length', *VALUE_KEYS), ('length',)),
    'prefix_rows': TermRule(('output', 'length', *VALUE_KEYS), size=1),
    'phase': TermRule(('period_s', *VALUE_KEYS), ('period_s',), size=2),
    'counter': TermRule(VALUE_KEYS, size=1),
    'episode_start': TermRule(VALUE_KEYS, size=1),
    'history': TermRule(('of', 'length', 'order', *VALUE_KEYS), ('of', 'length')),
}
OF_OUTPUT = ('last_action', 'prefix', 'prefix_rows')     # terms that speak of an output

# A term that is not built in, `term: module:function`: it may use what a built-in one may.
CUSTOM = TermRule((*TOPIC_KEYS, 'fields', 'field', 'joints', 'length', 'period_s', 'output',
                   'options', *VALUE_KEYS), (), ('*',))


@dataclass(frozen=True)
class OutputRule:
    """What one output type takes."""

    kinds: tuple[str, ...]
    joints: bool = False               # must name its joints
    fields: tuple[str, ...] = ()       # must name its components, of these
    trajectory: bool = False           # has points with times
    width: int | None = None           # exact number of values


_ARRAY = OutputRule(('raw', 'position', 'velocity', 'effort'))
OUTPUT_TYPES: Mapping[str, OutputRule] = {
    FLOAT32: _ARRAY,
    FLOAT64: _ARRAY,
    JOINT_STATE: OutputRule(('position', 'velocity', 'effort'), joints=True),
    TWIST: OutputRule(('twist',), fields=VECTOR_TERMS['twist'].names),
    TWIST_STAMPED: OutputRule(('twist',), fields=VECTOR_TERMS['twist'].names),
    TRAJECTORY: OutputRule(('position', 'velocity'), joints=True, trajectory=True),
    FOLLOW: OutputRule(('position', 'velocity'), joints=True, trajectory=True),
    GRIPPER: OutputRule(('position',), joints=True, width=1),
}
KINDS = ('raw', 'position', 'velocity', 'effort', 'twist')

# on_stop.do by kind: to hold a velocity or to send position 0 would move the robot.
STOPS: Mapping[str, tuple[str, ...]] = {
    'raw': ('none', 'zero'), 'position': ('hold', 'none'), 'velocity': ('zero', 'none'),
    'effort': ('zero', 'none'), 'twist': ('zero', 'none')}


def term_size(term: TermSpec, widths: Mapping[str, int]) -> int | None:
    """Return how many values a term gives; `widths` are those of the outputs, by name.

    None where only the message or the term's own function knows it.
    """
    if term.function is not None:
        return term.length
    rule = TERMS[term.term]
    if rule.size is not None:
        return rule.size
    if term.term == 'history':
        sizes = [term_size(t, widths) for t in term.of]
        known = [n for n in sizes if n is not None]
        return (term.length or 0) * sum(known) if len(known) == len(sizes) else None
    if term.term in ('last_action', 'prefix'):
        name = term.output if term.output is not None else next(iter(widths), '')
        width = widths.get(name)
        if width is None:
            return None
        return width * (term.length or 0) if term.term == 'prefix' else width
    if term.term == 'image':
        channels = CHANNELS[term.encoding or DEFAULT_ENCODING]
        return term.size[0] * term.size[1] * channels if term.size is not None else None
    if term.term == 'constant':
        return len(term.value)
    if term.joints:
        return len(term.joints)
    if rule.fields or term.fields:
        return len(term.fields or rule.fields)
    return term.length


def flat(terms: tuple[TermSpec, ...]) -> list[TermSpec]:
    """Return terms with those that histories are made of; a history before its parts."""
    return [t for term in terms for t in (term, *flat(term.of))]
