"""Recorded values beside replayed ones: what was compared, how far apart, where first."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.ingest.schema import FLOAT32
from flashrt_ros.ingest.spec import OutputSpec
from flashrt_ros.tools.offline import Sent

Rows = NDArray[np.float64]
_POINTS = {'position': 'positions', 'velocity': 'velocities'}


class Verdict(Enum):
    """What a replay says."""

    SAME = 'same'
    DIFFERENT = 'different'
    INCOMPLETE = 'incomplete'          # something is missing; what was compared is the same


class Row(NamedTuple):
    """The values of one action `(dim,)` or chunk `(horizon, dim)`, and whence."""

    step: int
    tick: int
    time_ns: int
    values: Rows


@dataclass
class Series:
    """One output, recorded and replayed, index by index the same thing."""

    output: str
    what: str                          # actions, chunks
    names: tuple[str, ...]
    recorded: list[Row] = field(default_factory=list)
    replayed: list[Row] = field(default_factory=list)
    unmatched: int = 0                 # recorded rows that have no replayed one


@dataclass(frozen=True)
class Difference:
    """One value that is not what was recorded."""

    step: int
    tick: int
    time_ns: int
    value: str
    recorded: float
    replayed: float


@dataclass(frozen=True)
class Comparison:
    """The result for one series."""

    output: str
    what: str
    recorded: int
    replayed: int
    compared: int
    same_bytes: bool
    largest: float                     # difference; nan where nothing was compared
    beyond: int                        # rows with a difference above the tolerance
    first: Difference | None           # of those


def compare(series: Series, tolerance: float) -> Comparison:
    """Compare row by row; NaN equals NaN."""
    largest, beyond, same = 0.0, 0, True
    first = None
    n = min(len(series.recorded), len(series.replayed))
    for a, b in zip(series.recorded, series.replayed, strict=False):
        if a.values.shape != b.values.shape:
            same, beyond, largest = False, beyond + 1, math.inf
            first = first or Difference(b.step, b.tick, a.time_ns, 'the number of values',
                                        a.values.size, b.values.size)
            continue
        if a.values.tobytes() == b.values.tobytes():
            continue
        same = False
        apart = distance(a.values, b.values)
        most = float(apart.max(initial=0.0))
        largest = max(largest, most)
        if most > tolerance:
            beyond += 1
            if first is None:
                where = np.unravel_index(int(np.argmax(apart > tolerance)), apart.shape)
                first = Difference(b.step, b.tick, a.time_ns, _name(series.names, where),
                                   float(a.values[where]), float(b.values[where]))
    return Comparison(series.output, series.what, len(series.recorded) + series.unmatched,
                      len(series.replayed), n, same and n > 0, largest if n else math.nan, beyond,
                      first)


def distance(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    """Return |a - b| for each element; 0 for two NaNs or equal infinities, else infinite."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    with np.errstate(invalid='ignore'):
        apart = np.abs(x - y)
    apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
    apart[np.isnan(apart)] = math.inf
    return apart


def _name(names: Sequence[str], where: Sequence[Any]) -> str:
    column = int(where[-1])
    name = names[column] if column < len(names) else f'[{column}]'
    return name if len(where) < 2 else f'{name}, row {int(where[0])}'


# -- values of messages --------------------------------------------------------------------------


def recorded_values(message: Any, spec: OutputSpec) -> Rows:
    """Return the values that a recorded output message carries. Raises AttributeError, KeyError
    or ValueError where it is another contract's."""
    if spec.type.startswith('std_msgs/'):
        return np.array(message.data, np.float64)[message.layout.data_offset:]
    if spec.type.startswith('sensor_msgs/'):
        values = np.array(getattr(message, spec.kind), np.float64)
        names = list(message.name)
        return values[[names.index(n) for n in spec.joints]] if spec.joints else values
    if spec.type.startswith('trajectory_msgs/'):
        names = list(message.joint_names)
        order = [names.index(n) for n in spec.joints]
        field_ = _POINTS[spec.kind]
        return np.array([np.asarray(getattr(p, field_), np.float64)[order]
                         for p in message.points])
    twist = message.twist if spec.type.endswith('Stamped') else message
    return np.array([getattr(getattr(twist, part), axis) for part, _, axis in
                     (f.partition('.') for f in spec.fields)], np.float64)


def sent_values(sent: Sent, spec: OutputSpec) -> Rows:
    """Return the values that a command would carry as a message."""
    command = sent.command
    values = command.values if command.points is None else command.points
    if spec.type == FLOAT32:
        return values.astype(np.float32).astype(np.float64)
    return np.asarray(values, np.float64)


# -- which recorded row is which replayed one ----------------------------------------------------


def pair_by_time(series: Series) -> list[int]:
    """Pair rows by time: a recorded one belongs to the newest replayed one before it.

    Return the steps without a recorded row. Does nothing where the numbers agree.
    """
    recorded, replayed = series.recorded, series.replayed
    if len(recorded) == len(replayed):
        return []
    pairs: dict[int, Row] = {}
    i = -1
    for row in recorded:
        while i + 1 < len(replayed) and replayed[i + 1].time_ns <= row.time_ns:
            i += 1
        if i >= 0:
            pairs.setdefault(i, row)
    series.unmatched = len(recorded) - len(pairs)
    lost = [r.step for i, r in enumerate(replayed) if i not in pairs]
    series.recorded = [pairs[i] for i in sorted(pairs)]
    series.replayed = [replayed[i] for i in sorted(pairs)]
    return lost


def pair_in_order(series: Series, tolerance: float) -> None:
    """Pair each replayed row with the next recorded one that equals it.

    Recorded rows in between (on_stop, rows of a tick that a rewind discarded) stay unmatched. A
    replayed row that is found nowhere is paired with whatever comes next: a difference.
    """
    recorded, replayed = series.recorded, series.replayed

    def equal(a: Row, b: Row) -> bool:
        return a.values.shape == b.values.shape and bool(
            (distance(a.values, b.values) <= tolerance).all())

    def find(i: int, first: int) -> int | None:
        return next((k for k in range(first, len(recorded)) if equal(recorded[k], replayed[i])),
                    None)
    pairs: list[tuple[Row, Row]] = []
    at = 0
    for i, row in enumerate(replayed):
        k = find(i, at)
        if k is None:
            if at >= len(recorded):
                break
            k = at
        pairs.append((recorded[k], row))
        at = k + 1
    series.unmatched = len(recorded) - len(pairs)
    series.recorded = [a for a, _ in pairs]
    series.replayed = [b for _, b in pairs]
