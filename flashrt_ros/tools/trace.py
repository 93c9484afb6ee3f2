"""What each tick read and left behind, to find where two policies, builds or machines part.

Values of INPUT, OUTPUT and HOST STATE are kept, of larger ones and of DEVICE STATE digests. A trace
can be written to a file on one machine and compared on another.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BIT_TYPES, BufferSpec, Role, Space
from flashrt_ros.core.session import COUNTERS
from flashrt_ros.tools.compare import distance
from flashrt_ros.tools.offline import Offline

MAX_VALUES = 16384         # elements of a buffer whose values are kept at every tick
GROUPS = ('input', 'state', 'output')
Value = NDArray[Any]       # values, or the 32 bytes of a digest as uint8


@dataclass
class Trace:
    """One entry per tick: `(step, {'input obs': value, …})`."""

    policy: str
    shapes: dict[str, tuple[str, tuple[int, ...], bool]] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)
    ticks: list[int] = field(default_factory=list)
    values: list[dict[str, Value]] = field(default_factory=list)


class Tracer:
    """Fills a trace while a policy runs: its `around` stands around every job of the pump."""

    def __init__(self, policy: Offline) -> None:
        self._session = session = policy.session
        self.trace = Trace(Path(policy.file.path).name)
        self._specs = [s for s in session.layout.values() if s.name not in COUNTERS]
        for spec in self._specs:
            self.trace.shapes[_key(spec)] = (spec.dtype, spec.shape, _kept(spec))

    @contextmanager
    def around(self, late: bool) -> Iterator[None]:
        """Note a tick: what it reads before it runs, what it leaves after.

        Of one that was held back, others follow before this returns: its STATE is not noted.
        """
        session = self._session
        inference = session.in_flight
        if inference is None or inference.done or inference.prefill:
            yield
            return
        values: dict[str, Value] = {}
        for spec in self._specs:
            if spec.role is Role.INPUT:
                values[_key(spec)] = _value(spec, session.inputs[spec.name])
            elif spec.role is Role.STATE and spec.space is Space.HOST:
                values[_key(spec)] = _value(spec, session.host[spec.name])
        trace = self.trace
        trace.steps.append(inference.latch.step)
        trace.ticks.append(session.tick + 1)
        trace.values.append(values)
        yield
        digests = {} if late else session.digest()
        for spec in self._specs:
            if spec.role is Role.OUTPUT and spec.name in inference.outputs:
                values[_key(spec)] = _value(spec, inference.outputs[spec.name])
            elif spec.name in digests and _key(spec) not in values:
                values[_key(spec)] = np.frombuffer(bytes.fromhex(digests[spec.name]), np.uint8)


def _kept(spec: BufferSpec) -> bool:
    """Whether values are kept, not only a digest."""
    return (spec.nbytes <= MAX_VALUES * spec.itemsize and spec.dtype not in BIT_TYPES
            and (spec.role is not Role.STATE or spec.space is Space.HOST))


def _value(spec: BufferSpec, array: NDArray[Any]) -> Value:
    if _kept(spec):
        return np.array(array)
    return np.frombuffer(hashlib.sha256(np.ascontiguousarray(array).tobytes()).digest(), np.uint8)


def _key(spec: BufferSpec) -> str:
    return f'{spec.role.name.lower()} {spec.name}'


@dataclass(frozen=True)
class Parting:
    """The first tick at which two traces differ, and in what."""

    tick: int
    step: int
    buffers: tuple[str, ...]           # 'input obs', 'state h', 'output actions', in that order
    index: int | None                  # of the first differing value of the first buffer
    largest: float | None              # difference within it; None: only digests are known
    first: tuple[float, float] | None = None


def part(a: Trace, b: Trace, tolerance: float = 0.0) -> Parting | None:
    """Return where two traces part; None where they agree as far as both go.

    Buffers are matched by name, else by shape and type where that is unambiguous.
    """
    names = _matched(a, b)
    for i, (x, y) in enumerate(zip(a.values, b.values, strict=False)):
        differ = []
        for mine, theirs in names.items():
            if mine not in x or theirs not in y:
                continue
            kept = a.shapes[mine][2] and b.shapes[theirs][2]
            if _differ(x[mine], y[theirs], tolerance, kept):
                differ.append((mine, theirs, kept))
        if tolerance and all(not kept for _, _, kept in differ):
            continue                   # digests say nothing about how far apart
        if differ:
            mine, theirs, kept = differ[0]
            labels = tuple(m if m == t else f'{m} / {t.partition(" ")[2]}' for m, t, _ in differ)
            if not kept or x[mine].shape != y[theirs].shape:
                return Parting(a.ticks[i], a.steps[i], labels, None, None)
            apart = distance(x[mine].reshape(-1), y[theirs].reshape(-1))
            at = int(np.argmax(apart > tolerance))
            return Parting(a.ticks[i], a.steps[i], labels, at, float(apart.max()),
                           (float(x[mine].reshape(-1)[at]), float(y[theirs].reshape(-1)[at])))
    return None


def _differ(a: Value, b: Value, tolerance: float, kept: bool) -> bool:
    if a.shape != b.shape:
        return a.size != b.size or _differ(a.reshape(-1), b.reshape(-1), tolerance, kept)
    if a.tobytes() == b.tobytes():
        return False
    if not kept or a.dtype.kind == 'V':
        return True
    return bool(np.any(distance(a, b) > tolerance))


def _matched(a: Trace, b: Trace) -> dict[str, str]:
    """Return b's buffer for each of a's, inputs first, then state, then outputs.

    Of several that are alike in shape, those whose names begin alike (hidden_state, h_in) are one.
    """
    found: dict[str, str] = {}
    for group in GROUPS:
        mine = [k for k in a.shapes if k.startswith(group)]
        theirs = [k for k in b.shapes if k.startswith(group)]
        for k in mine:
            if k in theirs:
                found[k] = k
                continue
            alike = [t for t in theirs if t not in mine and _alike(a.shapes[k], b.shapes[t])]
            rivals = [m for m in mine if m not in theirs and _alike(a.shapes[m], a.shapes[k])]
            if len(alike) > 1 or len(rivals) > 1:
                letter = k.partition(' ')[2][:1]
                alike = [t for t in alike if t.partition(' ')[2][:1] == letter]
            if len(alike) == 1:
                found[k] = alike[0]
    return found


def _alike(a: tuple[str, tuple[int, ...], bool], b: tuple[str, tuple[int, ...], bool]) -> bool:
    return a[0] == b[0] and [n for n in a[1] if n > 1] == [n for n in b[1] if n > 1]


# -- files ---------------------------------------------------------------------------------------


def save(trace: Trace, path: Path) -> None:
    """Write a trace as .npz. Raises Refusal(IO)."""
    head = {'policy': trace.policy, 'shapes': {k: [d, list(s), kept] for k, (d, s, kept)
                                               in trace.shapes.items()}}
    arrays: dict[str, NDArray[Any]] = {
        'head': np.frombuffer(json.dumps(head).encode(), np.uint8),
        'steps': np.array(trace.steps, np.int64), 'ticks': np.array(trace.ticks, np.int64)}
    for key in trace.shapes:
        rows = [v[key] for v in trace.values if key in v]
        if len(rows) == len(trace.values) and rows:
            arrays[f'value/{key}'] = np.stack(rows)
    try:
        with path.open('wb') as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise Refusal(Code.IO, f'{path} cannot be written: {error.strerror}') from error


def load(path: Path) -> Trace:
    """Read a trace. Raises Refusal(CORRUPT)."""
    try:
        with np.load(path, allow_pickle=False) as data:
            head: Mapping[str, Any] = json.loads(data['head'].tobytes())
            trace = Trace(head['policy'], {k: (d, tuple(s), bool(kept)) for k, (d, s, kept)
                                           in head['shapes'].items()},
                          data['steps'].tolist(), data['ticks'].tolist())
            columns = {k.removeprefix('value/'): data[k] for k in data.files
                       if k.startswith('value/')}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal(Code.CORRUPT, f'{path} is no trace: {error}; write one with --trace'
                      ) from error
    trace.values = [{k: c[i] for k, c in columns.items()} for i in range(len(trace.steps))]
    return trace
