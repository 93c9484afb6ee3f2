"""From a recorded message to the terms that read it: what a newcomer would write into `inputs`."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from flashrt_ros.ingest.images import COMPRESSED, ENCODINGS, IMAGE
from flashrt_ros.ingest.schema import JOINT_STATE
from flashrt_ros.ingest.terms import VECTOR_TERMS

MAX_FIELDS = 12


def terms(topic: str, kind: str, msg: Any) -> list[str]:
    """Return terms in YAML flow style that could read a message, most usual first."""
    if kind == JOINT_STATE:
        return _joints(topic, msg)
    if kind in (IMAGE, COMPRESSED):
        return _image(topic, kind, msg)
    if kind == 'std_msgs/msg/String':
        return [f'{{term: prompt, topic: {topic}, encode: bytes, length: 64}}']
    found = []
    for name, term in VECTOR_TERMS.items():
        if kind in term.paths:
            usual = kind == next(iter(term.paths))
            more = '' if usual else f', type: {kind}'
            found.append(f'{{term: {name}, topic: {topic}{more}}}')
    if found:
        return found
    return [_array(topic, kind, path, n) for path, n in list(numbers(msg))[:MAX_FIELDS]]


def _joints(topic: str, msg: Any) -> list[str]:
    names = ', '.join(str(n) or "''" for n in msg.name)
    found = []
    for quantity in ('position', 'velocity', 'effort'):
        if len(getattr(msg, quantity)):
            found.append(f'{{term: joint_{quantity}, topic: {topic}, joints: [{names}]}}')
    return found


def _image(topic: str, kind: str, msg: Any) -> list[str]:
    if kind == COMPRESSED:
        return [f'{{term: image, topic: {topic}, type: {COMPRESSED}, size: [224, 224], '
                'encoding: rgb8}']
    wanted = msg.encoding if msg.encoding in ENCODINGS else 'rgb8'
    return [f'{{term: image, topic: {topic}, size: [{msg.height}, {msg.width}], '
            f'encoding: {wanted}}}']


def _array(topic: str, kind: str, path: str, n: int) -> str:
    field = '' if path == 'data' else f', field: {path}'
    more = '' if kind == 'std_msgs/msg/Float32MultiArray' else f', type: {kind}'
    return f'{{term: array, topic: {topic}{field}{more}, length: {n}}}'


def numbers(msg: Any, path: str = '', depth: int = 0) -> Iterator[tuple[str, int]]:
    """Yield `(path, how many)` of the numbers in a message, headers and layouts apart."""
    for name in getattr(msg, '__dataclass_fields__', ()):
        if name in ('__msgtype__', 'header', 'layout', 'stamp') or depth > 6:
            continue
        value = getattr(msg, name)
        full = f'{path}.{name}' if path else name
        if isinstance(value, bool | int | float | np.number):
            yield full, 1
        elif isinstance(value, np.ndarray):
            if value.size and value.dtype.kind in 'iufb':
                yield full, int(value.size)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            for i, item in enumerate(value[:3]):
                yield from numbers(item, f'{full}[{i}]', depth + 1)
        else:
            yield from numbers(value, full, depth + 1)
