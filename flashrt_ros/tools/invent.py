"""Messages for a policy that has no bag: seeded, of the right shape, of a plausible size.

A value is drawn so that the port sees it within its declared range or, without one, normally
distributed; joints carry every name that terms and outputs use. What only a function of the user's
reads cannot be invented: then a bag is needed.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import io
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.ingest.images import COMPRESSED, ENCODINGS, IMAGE
from flashrt_ros.ingest.schema import DEFAULT_ENCODING, JOINT_STATE, flat, term_size
from flashrt_ros.ingest.spec import PolicyFile, TermSpec
from flashrt_ros.ingest.terms import VECTOR_TERMS
from flashrt_ros.tools.labels import sized_terms, widths

_INDEXED = re.compile(r'(\w+)\[(\d{1,4})\]')
_JOINTS = ('joint_position', 'joint_velocity', 'joint_effort')


class Inventor:
    """Makes one message of each topic per step."""

    def __init__(self, file: PolicyFile, ports: Mapping[str, BufferSpec], types: Mapping[str, str],
                 seed: int) -> None:
        """`types` are message types by topic. Raises Refusal where a bag is needed."""
        self._rng = np.random.default_rng(seed)
        self._types = types
        self._terms: dict[str, list[tuple[TermSpec, int, BufferSpec]]] = {t: [] for t in types}
        dims = widths(file, ports)
        for port in file.inputs:
            for term, size in sized_terms(file, ports, port):
                parts = ([(p, term_size(p, dims) or size // (term.length or 1)) for p in term.of]
                         if term.term == 'history' else [(term, size)])
                for part, n in parts:
                    if part.topic in self._terms and part.term != 'prompt':
                        self._check(part)
                        self._terms[part.topic].append((part, n, ports[port]))
        self._joints = list(dict.fromkeys(
            [j for t in flat(tuple(t for p in file.inputs.values() for t in p)) for j in t.joints]
            + [j for o in file.outputs.values() for j in o.joints]))

    @staticmethod
    def _check(term: TermSpec) -> None:
        if term.function is not None:
            raise Refusal(Code.UNSUPPORTED, f'{term.path}: what {term.function} reads from '
                          f'{term.topic} cannot be invented; give a bag with --bag')

    def step(self, time_ns: int) -> list[tuple[str, Any]]:
        """Return `(topic, message)` of one step, all stamped alike."""
        return [(topic, self._message(topic, kind, time_ns)) for topic, kind in
                self._types.items() if self._terms[topic] or kind == JOINT_STATE]

    def _message(self, topic: str, kind: str, time_ns: int) -> Any:
        sec, nanosec = divmod(time_ns, 1_000_000_000)
        msg = SimpleNamespace(header=SimpleNamespace(
            stamp=SimpleNamespace(sec=sec, nanosec=nanosec), frame_id=''))
        if kind == JOINT_STATE:
            self._joint_state(msg, topic)
            return msg
        for term, size, port in self._terms[topic]:
            if term.term == 'image':
                self._image(msg, term, kind)
            elif term.term in ('orientation', 'projected_gravity'):
                put(msg, f'{VECTOR_TERMS[term.term].paths[kind]}', self._upright())
            else:
                values = self._values(term, size, port).tolist()
                if term.term == 'array':
                    field = term.field or 'data'
                    put(msg, field, np.array(values) if size > 1 or field == 'data'
                        else values[0])
                elif term.term == 'joy':
                    for name, value in zip(term.fields, values, strict=True):
                        put(msg, name, value)
                else:
                    self._vector(msg, term, kind, values)
        if kind.startswith('std_msgs/'):
            msg.layout = SimpleNamespace(data_offset=0, dim=[])
        return msg

    def _vector(self, msg: Any, term: TermSpec, kind: str, values: Sequence[float]) -> None:
        """Fill all fields of a built-in vector term's message, those in use with the values."""
        rule = VECTOR_TERMS[term.term]
        before = rule.paths[kind]
        used = dict(zip(term.fields or rule.names, values, strict=True))
        quaternion = self._upright()
        for name in rule.names:
            value = used.get(name, 0.0)
            if name.startswith('orientation.'):
                value = getattr(quaternion, name.rpartition('.')[2])
            put(msg, f'{before}.{name}'.lstrip('.'), value)
        if rule.estimate:
            setattr(msg, f'{rule.estimate}_covariance', np.zeros(9))

    def _upright(self) -> Any:
        """Return a unit quaternion, tilted a little."""
        q = self._rng.normal((1.0, 0.0, 0.0, 0.0), 0.3)
        w, x, y, z = (q / np.linalg.norm(q)).tolist()
        return SimpleNamespace(w=w, x=x, y=y, z=z)

    def _values(self, term: TermSpec, size: int, port: BufferSpec) -> NDArray[np.float64]:
        """Return raw values that become `(raw + offset) * scale` within the port's range."""
        if port.low is not None and port.high is not None:
            wanted = self._rng.uniform(port.low, port.high, size)
        else:
            wanted = self._rng.standard_normal(size)
        if port.storage.kind in 'iu' or port.dtype == 'BOOL':
            wanted = np.rint(wanted)
        scale = np.broadcast_to(np.asarray(term.scale, np.float64), size)
        raw: NDArray[np.float64] = wanted / np.where(scale == 0.0, 1.0, scale) - np.asarray(
            term.offset)
        return raw

    def _joint_state(self, msg: Any, topic: str) -> None:
        at = {name: i for i, name in enumerate(self._joints)}
        columns = {name: self._rng.normal(0.0, 0.3, len(at)) for name in _JOINTS}
        for term, size, port in self._terms[topic]:
            rows = [at[j] for j in term.joints]
            columns[term.term][rows] = self._values(term, size, port)
        msg.name = self._joints
        msg.position, msg.velocity, msg.effort = (columns[n] for n in _JOINTS)

    def _image(self, msg: Any, term: TermSpec, kind: str) -> None:
        height, width = term.size or (8, 8)
        if term.crop is not None:
            height, width = term.crop[0] + term.crop[2], term.crop[1] + term.crop[3]
        encoding = term.encoding or DEFAULT_ENCODING
        code, channels, _ = ENCODINGS[encoding]
        shape = (height, width, channels)
        pixels = (self._rng.uniform(0.0, 4.0, shape).astype(np.float32) if code == 'f4' else
                  self._rng.integers(0, 1 << (8 * np.dtype(code).itemsize), shape).astype(code))
        if kind == COMPRESSED:
            msg.format, msg.data = 'png', _png(pixels)
            return
        assert kind == IMAGE
        msg.height, msg.width, msg.encoding, msg.is_bigendian = height, width, encoding, 0
        msg.step = width * channels * pixels.itemsize
        msg.data = np.frombuffer(pixels.tobytes(), np.uint8)


def _png(pixels: NDArray[Any]) -> bytes:
    try:
        from PIL import Image
    except ImportError as error:
        raise Refusal(Code.UNSUPPORTED, 'inventing compressed pictures needs Pillow; install it '
                      "with pip install 'flashrt_ros[image]', or give a bag with --bag") from error
    out = io.BytesIO()
    shown = pixels[:, :, :3] if pixels.shape[2] > 1 else pixels[:, :, 0]
    Image.fromarray(np.ascontiguousarray(shown)).save(out, 'PNG')
    return out.getvalue()


def put(msg: Any, path: str, value: Any) -> None:
    """Set `a.b[2].c` in a message, making what lies on the way.

    >>> m = SimpleNamespace(); put(m, 'axes[1]', 0.5); put(m, 'pose.x', 1.0)
    >>> m
    namespace(axes=[0.0, 0.5], pose=namespace(x=1.0))
    """
    *way, last = path.split('.')
    for part in way:
        match = _INDEXED.fullmatch(part)
        name = match[1] if match else part
        if match:
            items = _grown(msg, name, int(match[2]), SimpleNamespace)
            msg = items[int(match[2])]
        else:
            if not hasattr(msg, name):
                setattr(msg, name, SimpleNamespace())
            msg = getattr(msg, name)
    match = _INDEXED.fullmatch(last)
    if match:
        _grown(msg, match[1], int(match[2]), float)[int(match[2])] = value
    else:
        setattr(msg, last, value)


def _grown(msg: Any, name: str, index: int, make: Any) -> list[Any]:
    """Return a list attribute that has the index."""
    items: list[Any] = getattr(msg, name, [])
    while len(items) <= index:
        items.append(make())
    setattr(msg, name, items)
    return items
