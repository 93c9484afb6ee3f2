"""One INPUT port: its terms laid side by side, computed once per step, written per inference.

All values that come from numbers lie in one float64 vector `raw`, histories' parts included; an
unmeasured value is NaN. A step computes (raw + offset) * scale over the whole vector, in float64,
with the offset rounded to float32 as robot-learning code keeps it, and rounds the result once to
the port's type: so observations equal those of the training code to the last bit. Pictures, the
prefix and the cast to types that numpy lacks wait until an inference reads the port.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role, Space, dtype_name
from flashrt_ros.ingest.images import ImageTerm, Picture
from flashrt_ros.ingest.inbox import Missing
from flashrt_ros.ingest.spec import Numbers, TermSpec
from flashrt_ros.ingest.terms import bad_term

Array = NDArray[Any]
Fill = Callable[[Array, int], None]     # writes a term's raw values for a step, counted from 1


class Leaf:
    """A term that is no history: where its values lie and how they come there."""

    __slots__ = ('fill', 'image', 'joint_rows', 'joint_values', 'latched_picture', 'limit_ns',
                 'names', 'picture', 'quantity', 'raw', 'size', 'spec', 'start', 'topic',
                 'zero_ns')

    def __init__(self, spec: TermSpec, size: int, *, names: Sequence[str] = (),
                 image: ImageTerm | None = None, fill: Fill | None = None) -> None:
        self.spec = spec
        self.size = size
        self.names = tuple(names) or tuple(f'[{i}]' for i in range(size))
        self.topic = spec.topic or ''
        self.image = image
        self.fill = fill                                 # None: a message writes `raw`
        self.start = 0                                   # in the port's raw vector
        self.raw: Array = np.empty(0)                    # view of it, (size,) f64
        self.picture: Picture | None = None              # the newest that arrived
        self.latched_picture: Picture | None = None      # the one of this step
        self.quantity = -1                               # JointState: row of the joint table
        self.joint_rows: NDArray[np.intp] | slice = slice(0)
        self.joint_values: Array = np.empty(0)           # view of that row
        self.limit_ns: int | None = None                 # older than this stops inference
        self.zero_ns: int | None = None                  # after this silence the values are zero

    @property
    def measured(self) -> bool:
        """Whether its values come from messages."""
        return bool(self.topic) and self.fill is None


def working_type(spec: BufferSpec) -> np.dtype[Any]:
    """Return the numpy type in which a port is computed: float32 for all small floats."""
    if spec.dtype in ('F16', 'BF16'):
        return np.dtype(np.float32)
    if spec.dtype.startswith('F8'):
        raise Refusal(Code.UNSUPPORTED, f'input {spec.name} has the type {spec.dtype}, which terms '
                      'cannot fill; give the model a float input')
    return spec.storage


class History:
    """The last `length` values of some terms, STATE: `(length, size)`, padded by repetition."""

    def __init__(self, name: str, spec: TermSpec, leaves: Sequence[Leaf], kind: np.dtype[Any]
                 ) -> None:
        self.leaves = leaves
        self.size = sum(leaf.size for leaf in leaves)
        self.length = spec.length or 0
        if self.length < 1 or not leaves:
            raise bad_term(spec, 'needs length: of at least 1 and of: with at least one term')
        self._newest_first = spec.order == 'newest_first'
        self.state = BufferSpec(name, (self.length, self.size), dtype_name(kind), Role.STATE,
                                Space.HOST)
        self._row: Array = np.zeros(self.size, kind)
        self._kept: Array = np.zeros((self.length, self.size), kind)
        total = self.length * self.size
        self._offset = np.broadcast_to(numbers(spec, spec.offset, total, np.float32), total)
        self._scale = np.broadcast_to(numbers(spec, spec.scale, total, np.float32), total)
        self._plain = not self._offset.any() and bool((self._scale == 1).all())

    def bind(self, host: Mapping[str, Array]) -> None:
        """Use the session's memory."""
        self._kept = host[self.state.name]

    def push(self, values: Array, first: bool) -> None:
        """Take in this step's values; the first step fills the whole length with them."""
        row, at = self._row, 0
        for leaf in self.leaves:
            part = row[at:at + leaf.size]
            at += leaf.size
            if leaf.image is None:
                store(part, values[leaf.start:leaf.start + leaf.size])
            elif leaf.latched_picture is not None:
                leaf.image.write(leaf.latched_picture, part)
        kept = self._kept
        if first:
            kept[:] = row
        elif self._newest_first:
            kept[1:] = kept[:-1]
            kept[0] = row
        else:
            kept[:-1] = kept[1:]
            kept[-1] = row

    def read(self, out: Array) -> None:
        """Write the whole history into the flat `out`."""
        flat = self._kept.reshape(-1)
        if self._plain:
            out[:] = flat
        else:
            store(out, (flat.astype(np.float32) + self._offset) * self._scale)


Part = Leaf | History


class Port:
    """One INPUT buffer and the parts that fill it, in order."""

    def __init__(self, spec: BufferSpec, parts: Sequence[Part]) -> None:
        self.spec = spec
        self.kind = working_type(spec)
        self.parts = tuple(parts)
        self.histories = [p for p in parts if isinstance(p, History)]
        self.leaves = [leaf for p in parts
                       for leaf in (p.leaves if isinstance(p, History) else (p,))]
        self._lay_out()

    def _lay_out(self) -> None:
        vectors = [leaf for leaf in self.leaves if leaf.image is None]
        n = sum(leaf.size for leaf in vectors)
        self.raw: Array = np.full(n, np.nan)
        self.latched: Array = self.raw.copy()            # raw as of this step, SI units
        self._offset, self._scale, self._values = np.empty(n), np.empty(n), np.empty(n)
        self._finite = np.empty(n, np.bool_)
        at = 0
        for leaf in vectors:
            end = at + leaf.size
            leaf.start, leaf.raw = at, self.raw[at:end]
            # x + -0.0 is x for every x; x + 0.0 would turn -0.0 into 0.0.
            offset = numbers(leaf.spec, leaf.spec.offset, leaf.size,
                             np.float32 if self.kind == np.float32 else np.float64)
            self._offset[at:end] = np.where(offset == 0, -0.0, offset)
            self._scale[at:end] = numbers(leaf.spec, leaf.spec.scale, leaf.size, np.float64)
            if not leaf.measured:
                leaf.raw[:] = leaf.spec.value or 0.0
            at = end
        self.joints = [leaf for leaf in vectors if leaf.quantity >= 0]
        self.fills = [leaf for leaf in vectors if leaf.fill is not None]
        self.images = [leaf for leaf in self.leaves if leaf.image is not None]
        self.prefixes = [leaf for leaf in vectors if leaf.spec.term in PREFIXES]
        self.flat: Array = np.zeros(math.prod(self.spec.shape), self.kind)
        self._float = self.kind.kind == 'f'
        runs: list[tuple[slice, slice]] = []             # of plain vector terms
        self._reads: list[tuple[History, slice]] = []
        self._pictures: list[tuple[Leaf, slice]] = []
        self._places: dict[int, int] = {}
        to = 0
        for part in self.parts:
            place = slice(to, to + _width(part))
            to = place.stop
            if isinstance(part, History):
                self._reads.append((part, place))
            elif part.image is not None:
                self._pictures.append((part, place))
            else:
                self._places[part.start] = place.start
                run = slice(part.start, part.start + part.size)
                last = runs[-1] if runs else None
                if last and last[0].stop == run.start and last[1].stop == place.start:
                    runs[-1] = (slice(last[0].start, run.stop), slice(last[1].start, place.stop))
                else:
                    runs.append((run, place))
        self._copies = [(self.flat[place], self._values[run]) for run, place in runs]

    def gather(self) -> None:
        """Fetch the joints' newest values from their tables."""
        for leaf in self.joints:
            leaf.raw[:] = leaf.joint_values[leaf.joint_rows]

    def complete(self) -> bool:
        """Whether every used value was measured and is finite."""
        if not _all(np.isfinite(self.raw, self._finite)):
            return False
        return not self.images or all(leaf.picture is not None and leaf.picture.finite
                                      for leaf in self.images)

    def not_finite(self) -> list[Missing]:
        """Return the terms that hold NaN or infinity, or no picture, naming the value."""
        found = []
        for leaf in self.leaves:
            if leaf.image is not None:
                if leaf.picture is None or not leaf.picture.finite:
                    why = ('never received' if leaf.picture is None else
                           'the picture holds NaN or infinity; write fill: for a depth camera')
                    found.append(Missing(leaf.spec.term, leaf.topic, None, None, why))
                continue
            bad = ~np.isfinite(leaf.raw)
            if bad.any():
                i = int(bad.argmax())
                found.append(Missing(leaf.spec.term, leaf.topic, None, None,
                                     f'{leaf.names[i]} is {leaf.raw[i]}'))
        return found

    def latch(self, step: int) -> None:
        """Compute the values of a step, counted from 1, and push them into histories."""
        raw, values = self.raw, self._values
        for leaf in self.fills:
            leaf.fill(leaf.raw, step)  # type: ignore[misc]
        for leaf in self.images:
            leaf.latched_picture = leaf.picture
        self.latched[:] = raw
        np.add(raw, self._offset, values)
        np.multiply(values, self._scale, values)
        for target, run in self._copies:
            if self._float:
                target[:] = run
            else:
                store(target, run)
        for history in self.histories:
            history.push(values, step == 1)

    def write(self, target: Array, prefix: Mapping[str, Array]) -> None:
        """Write the latched values into the port's staging buffer."""
        flat = self.flat
        for history, place in self._reads:
            history.read(flat[place])
        for leaf, place in self._pictures:
            if leaf.latched_picture is not None:
                leaf.image.write(leaf.latched_picture, flat[place])  # type: ignore[union-attr]
        for leaf in self.prefixes:
            self._prefix(leaf, prefix)
        out = target.reshape(-1)
        if self.spec.dtype == 'BF16':
            bits = flat.view(np.uint32)
            out[:] = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16      # nearest, ties to even
        else:
            out[:] = flat

    def _prefix(self, leaf: Leaf, prefix: Mapping[str, Array]) -> None:
        rows = prefix.get(leaf.spec.output or '')
        raw = leaf.raw
        raw[:] = 0.0
        if rows is not None and len(rows):
            if leaf.spec.term == 'prefix_rows':
                raw[0] = min(len(rows), leaf.spec.length or len(rows))   # what `prefix` holds
            else:
                table = raw.reshape(-1, rows.shape[1])
                n = min(len(rows), len(table))
                table[:n] = rows[:n]
                table[n:] = rows[n - 1]
        at = leaf.start
        part = slice(at, at + leaf.size)
        place = self._places[at]
        store(self.flat[place:place + leaf.size], (raw + self._offset[part]) * self._scale[part])


_all = np.logical_and.reduce          # what .all() calls, without the way there
PREFIXES = ('prefix', 'prefix_rows')


def numbers(spec: TermSpec, given: Numbers, size: int, kind: type) -> Array:
    """Return offsets or scales as `(size,)` values. Raises Refusal(INVALID_POLICY_FILE)."""
    array: Array = np.asarray(given, dtype=kind)
    if array.ndim and array.shape != (size,):
        raise bad_term(spec, f'has {array.size} offsets or scales for {size} values; write one, or '
                       'one for each')
    return np.broadcast_to(array, size)


def store(target: Array, values: Array) -> None:
    """Write values into an array of any numpy type; integers by rounding, within their range."""
    kind = target.dtype
    if kind.kind == 'f':
        target[:] = values
    elif kind.kind == 'b':
        target[:] = values != 0
    elif kind.itemsize >= 8:
        target[:] = np.rint(values).astype(kind)
    else:
        limits = np.iinfo(kind)
        target[:] = np.clip(np.rint(values), limits.min, limits.max).astype(kind)


def _width(part: Part) -> int:
    return part.length * part.size if isinstance(part, History) else part.size
