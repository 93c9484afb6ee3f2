"""Built-in terms that read a vector from one message, and functions that a user supplies.

A reader is built once at configure; per message it only follows attribute paths. What a message
cannot tell (an orientation that the IMU does not estimate, too few axes) refuses the message;
NaN does not: it is kept and stops the inference that would use it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
import importlib
import inspect
from operator import attrgetter
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.reader import allowed_module
from flashrt_ros.ingest.spec import TermSpec

Read = Callable[[Any], Sequence[float] | NDArray[np.float64]]

IMU = 'sensor_msgs/msg/Imu'
ODOMETRY = 'nav_msgs/msg/Odometry'
_XYZ = ('x', 'y', 'z')
_XYZW = ('x', 'y', 'z', 'w')
_INDEXED = re.compile(r'(\w+)\[(\d{1,4})\]')


@dataclass(frozen=True)
class VectorTerm:
    """Where a term's fields lie: by message type, the path before each field."""

    names: tuple[str, ...]                       # the fields, also the default selection
    paths: Mapping[str, str]                     # message type -> path before a field
    estimate: str = ''                           # Imu: whose covariance says "not estimated"




VECTOR_TERMS: Mapping[str, VectorTerm] = {
    'angular_velocity': VectorTerm(_XYZ, {IMU: 'angular_velocity', ODOMETRY: 'twist.twist.angular'},
                                   'angular_velocity'),
    'linear_acceleration': VectorTerm(_XYZ, {IMU: 'linear_acceleration'}, 'linear_acceleration'),
    'orientation': VectorTerm(_XYZW, {IMU: 'orientation', ODOMETRY: 'pose.pose.orientation',
                                      'geometry_msgs/msg/PoseStamped': 'pose.orientation'},
                              'orientation'),
    'projected_gravity': VectorTerm(_XYZ, {
        IMU: 'orientation', ODOMETRY: 'pose.pose.orientation',
        'geometry_msgs/msg/PoseStamped': 'pose.orientation'}, 'orientation'),
    'twist': VectorTerm(
        ('linear.x', 'linear.y', 'linear.z', 'angular.x', 'angular.y', 'angular.z'),
        {'geometry_msgs/msg/Twist': '', 'geometry_msgs/msg/TwistStamped': 'twist',
         ODOMETRY: 'twist.twist'}),
    'pose': VectorTerm(
        tuple(f'position.{a}' for a in _XYZ) + tuple(f'orientation.{a}' for a in _XYZW),
        {'geometry_msgs/msg/PoseStamped': 'pose', 'geometry_msgs/msg/Pose': '',
         ODOMETRY: 'pose.pose'}),
    'wrench': VectorTerm(
        tuple(f'force.{a}' for a in _XYZ) + tuple(f'torque.{a}' for a in _XYZ),
        {'geometry_msgs/msg/WrenchStamped': 'wrench', 'geometry_msgs/msg/Wrench': ''}),
}
# Terms that say where the robot is: they go into a capsule as its witness.
WITNESSES = ('projected_gravity', 'orientation', 'pose', 'wrench')
FLOAT32 = 'std_msgs/msg/Float32MultiArray'


@dataclass(frozen=True)
class VectorReader:
    """Reads one term: `names` of its values, the message type, and the function."""

    names: tuple[str, ...]
    type: str
    read: Read


def bad_term(spec: TermSpec, what: str) -> Refusal:
    """Return the refusal of a term, with its place in the policy file."""
    return Refusal(Code.INVALID_POLICY_FILE, f'{spec.path}: the term {spec.term} {what}')


def rejected(topic: str, what: str) -> Refusal:
    """Return the refusal of a message."""
    return Refusal(Code.INPUT_REJECTED, f'{topic}: {what}')


def vector_reader(spec: TermSpec, modules: Sequence[str], size: int | None) -> VectorReader:
    """Return the reader of a vector term.

    `size` is what the port leaves for an `array` or a function whose length is not written.
    """
    if spec.topic is None:
        raise bad_term(spec, 'has no topic; write topic: …')
    if spec.function is not None:
        return _custom(spec, spec.topic, modules, size)
    if spec.term == 'array':
        return _array(spec, spec.topic, size)
    if spec.term == 'joy':
        return _joy(spec, spec.topic)
    return _vector(spec, spec.topic)


def _vector(spec: TermSpec, topic: str) -> VectorReader:
    term = VECTOR_TERMS.get(spec.term)
    if term is None:
        raise bad_term(spec, f'is not built in; built in are {", ".join(VECTOR_TERMS)}')
    kind = spec.type or next(iter(term.paths))
    if kind not in term.paths:
        raise bad_term(spec, f'cannot read {kind}; it reads {", ".join(term.paths)}')
    names = spec.fields or term.names
    for name in names:
        if name not in term.names:
            raise bad_term(spec, f'has no field {name!r}; it has {", ".join(term.names)}')
    before = term.paths[kind]
    checks = []
    if kind == IMU and term.estimate:
        checks.append(_estimated(topic, term.estimate))
    if spec.term in ('orientation', 'projected_gravity'):
        checks.append(_unit(topic, before))
    elif any(name.startswith('orientation.') for name in names):
        checks.append(_unit(topic, f'{before}.orientation'.lstrip('.')))
    read = (_gravity(before, names) if spec.term == 'projected_gravity'
            else _fields(before, names))
    return VectorReader(tuple(names), kind, _checked(read, checks))


def _fields(before: str, names: Sequence[str]) -> Read:
    get: Callable[[Any], Any] = attrgetter(*(f'{before}.{name}'.lstrip('.') for name in names))
    return get if len(names) > 1 else lambda msg: (get(msg),)


def _gravity(before: str, names: Sequence[str]) -> Read:
    """Return a reader of the direction of gravity in the body frame, of length 1.

    It is R(q)^T (0, 0, -1); an upright body gives (0, 0, -1).
    """
    get = attrgetter(before)
    pick = tuple(_XYZ.index(name) for name in names)

    def read(msg: Any) -> Sequence[float]:
        q = get(msg)
        w, x, y, z = q.w, q.x, q.y, q.z
        g = (2 * (-z * x + w * y), -2 * (z * y + w * x), 1 - 2 * (w * w + z * z))
        return g if len(pick) == 3 else [g[i] for i in pick]
    return read


def _unit(topic: str, path: str) -> Callable[[Any], None]:
    get = attrgetter(path)

    def check(msg: Any) -> None:
        q = get(msg)
        norm = q.w * q.w + q.x * q.x + q.y * q.y + q.z * q.z
        if abs(norm - 1.0) > 0.05:                # NaN passes here and stops inference instead
            raise rejected(topic, f'{path} is ({q.x:g}, {q.y:g}, {q.z:g}, {q.w:g}), not a unit '
                           'quaternion; its source has no orientation yet')
    return check


def _estimated(topic: str, what: str) -> Callable[[Any], None]:
    name = f'{what}_covariance'

    def check(msg: Any) -> None:
        covariance = getattr(msg, name, None)
        if covariance is not None and len(covariance) and covariance[0] == -1.0:
            raise rejected(topic, f'carries no {what}: {name}[0] is -1; use a topic whose source '
                           'estimates it')
    return check


def _checked(read: Read, checks: Sequence[Callable[[Any], None]]) -> Read:
    if not checks:
        return read

    def both(msg: Any) -> Sequence[float] | NDArray[np.float64]:
        for check in checks:
            check(msg)
        return read(msg)
    return both


def _array(spec: TermSpec, topic: str, size: int | None) -> VectorReader:
    field = spec.field or 'data'
    n = spec.length or size
    if n is None:
        raise bad_term(spec, 'has no length, and the port does not tell it; write length: …')
    get = path_getter(field)

    def read(msg: Any) -> NDArray[np.float64]:
        values = np.asarray(get(msg), dtype=np.float64).reshape(-1)
        offset = getattr(getattr(msg, 'layout', None), 'data_offset', 0) if field == 'data' else 0
        values = values[offset:]
        if len(values) != n:
            raise rejected(topic, f'{field} holds {len(values)} values, the policy takes {n}')
        return values
    return VectorReader(tuple(f'{field}[{i}]' for i in range(n)), spec.type or FLOAT32, read)


def _joy(spec: TermSpec, topic: str) -> VectorReader:
    picks = []
    for name in spec.fields:
        match = _INDEXED.fullmatch(name)
        if match is None or match[1] not in ('axes', 'buttons'):
            raise bad_term(spec, f'has no field {name!r}; write axes[0], buttons[3], …')
        picks.append((match[1], int(match[2])))
    if not picks:
        raise bad_term(spec, 'names no fields; write fields: [axes[0], axes[1], …]')

    def read(msg: Any) -> Sequence[float]:
        values = []
        for name, i in picks:
            have = getattr(msg, name)
            if i >= len(have):
                raise rejected(topic, f'{name}[{i}] is used, but the message has {len(have)} '
                               f'{name}')
            values.append(float(have[i]))
        return values
    return VectorReader(tuple(spec.fields), spec.type or 'sensor_msgs/msg/Joy', read)


def _custom(spec: TermSpec, topic: str, modules: Sequence[str], size: int | None) -> VectorReader:
    n = spec.length or size
    if n is None:
        raise bad_term(spec, 'has no length, and the port does not tell it; write length: …')
    if spec.type is None:
        raise bad_term(spec, 'has no message type; write type: package/msg/Type')
    reference = spec.function or ''
    function = load_function(reference, modules, spec.path)
    with_spec = _parameters(function) >= 2

    def read(msg: Any) -> NDArray[np.float64]:
        try:
            result = function(msg, spec) if with_spec else function(msg)
            values = np.array(result, dtype=np.float64).reshape(-1)
        except Refusal:
            raise
        except Exception as error:
            raise rejected(topic, f'{reference} raised {type(error).__name__}: {error}') from error
        if len(values) != n:
            raise rejected(topic, f'{reference} returned {len(values)} values, its length is {n}')
        return values
    return VectorReader(tuple(f'[{i}]' for i in range(n)), spec.type, read)


def _parameters(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
               for p in parameters)


def path_getter(path: str) -> Callable[[Any], Any]:
    """Return a function that follows `a.b[2].c` through a message."""
    steps: list[str | int] = []
    for part in path.split('.'):
        match = _INDEXED.fullmatch(part)
        steps += [part] if match is None else [match[1], int(match[2])]
    if all(isinstance(step, str) for step in steps):
        return attrgetter(path)

    def get(msg: Any) -> Any:
        for step in steps:
            msg = getattr(msg, step) if isinstance(step, str) else msg[step]
        return msg
    return get


def load_function(reference: str, modules: Sequence[str], path: str) -> Callable[..., Any]:
    """Return `module:function` from a module that the node may take code from."""
    module, _, name = reference.partition(':')
    if not allowed_module(reference, modules):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{path}: {reference} is of the module {module}, '
                      'which may not supply code; add it to the parameter python_modules')
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{path}: {reference} cannot be loaded: {error}; '
                      'install the module where the node runs') from error
    if not callable(function):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{path}: {reference} is no function')
    return function  # type: ignore[no-any-return]


def encode_prompt(text: str, encoder: Callable[[str], Any] | None, length: int,
                  path: str) -> NDArray[np.float64]:
    """Return the `(length,)` values of a prompt: UTF-8 bytes or what an encoder gives, 0-padded.

    A prompt that is too long is refused, never cut.
    """
    if encoder is None:
        values = np.frombuffer(text.encode(), np.uint8).astype(np.float64)
    else:
        try:
            values = np.array(encoder(text), dtype=np.float64).reshape(-1)
        except Refusal:
            raise
        except Exception as error:
            raise Refusal(Code.INVALID_ARGUMENT, f'{path}: the encoder raised '
                          f'{type(error).__name__}: {error}') from error
    if len(values) > length:
        raise Refusal(Code.INVALID_ARGUMENT, f'the prompt takes {len(values)} values, {path} holds '
                      f'{length}; shorten it')
    padded = np.zeros(length)
    padded[:len(values)] = values
    return padded
