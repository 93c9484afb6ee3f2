"""The action queue: chunks in, one row per step out.

Row i of a chunk belongs to the step i steps after the one that latched its observation. A chunk
that is spliced after `skip` rows were executed since then goes on at its row `skip`: that count is
of rows that left the queue, never an estimate from a clock. So the row of each executed step is
that step's row of some chunk, whatever the delays.

Everything that the next row depends on is STATE in HOST space (`specs`, `bind`); this object
holds none of it itself. All outputs advance together; each keeps the columns that are its own.

Blend `latest`: a new chunk replaces what was left of the old one; the rows are the model's bytes.
Blend `ensemble` (temporal ensembling as in ACT): the predictions that several chunks made for one
step are averaged, the i-th oldest with weight exp(-w i); then the rows are float64.

`relative` rows count from the joints measured when their inference latched, the anchor. Rows of
chunks with different anchors are carried over to one anchor before they are mixed.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.ingest.output import F64, Joints, measured, state_specs
from flashrt_ros.ingest.ports import ActionShape, action_shape
from flashrt_ros.ingest.spec import OutputSpec, PolicyFile

Rows = NDArray[Any]
_NONE: Mapping[str, Rows] = {}
# Counters, one I64 each: the next row · the row that the chunk was spliced at · its rows (0: none)
# · the tick that made it · rows executed since origin · rows executed since the last flush
_COUNTERS = ('cursor', 'start', 'depth', 'tick', 'executed', 'run')


@dataclass
class _Lane:
    """One output's part of the queue: constants, and views of its STATE."""

    spec: OutputSpec
    shape: ActionShape
    dtype: str                 # of its rows
    bits: bool                 # rows are BF16 bits, for which numpy has no type
    scale: F64
    views: dict[str, Rows] = field(default_factory=dict)
    rows: Rows = field(default_factory=lambda: np.empty((0, 0)))

    def specs(self, between: bool) -> list[BufferSpec]:
        dim = self.shape.dim
        vectors = ['last'] if between else []
        if self.spec.relative:
            # of the inference in flight · of the chunk in the queue · of the row popped last
            vectors += ['anchor_pending', 'anchor', 'anchor_last']
        return [_host(f'{self.spec.name}.rows', (self.shape.rows, dim), self.dtype),
                *(_host(f'{self.spec.name}.{name}', (dim,), 'F64') for name in vectors)]

    def decode(self, row: Rows) -> Rows:
        """Return a copy with numbers in it."""
        return _from_bf16(row) if self.bits else row.copy()


class ActionQueue:
    """Queue, cursor and blending of all outputs of a policy.

    `ports` are the model's buffers by name. Belongs to one owner; takes no lock.
    """

    def __init__(self, policy_file: PolicyFile, ports: Mapping[str, BufferSpec]) -> None:
        run = policy_file.run
        self.start_at = run.start_at
        self.latency_steps = run.latency_steps
        self.execute = run.execute
        self.ensemble = run.blend == 'ensemble'
        self._between = run.publish_hz is not None
        self._lanes: dict[str, _Lane] = {}
        for name, spec in policy_file.outputs.items():
            shape = action_shape(spec, ports)
            dtype = ports[shape.port].dtype
            self._lanes[name] = _Lane(
                spec, shape, 'F64' if self.ensemble else dtype,
                dtype == 'BF16' and not self.ensemble,
                np.full(shape.dim, spec.scale, np.float64))
        lengths = {lane.shape.rows for lane in self._lanes.values()}
        if len(lengths) != 1:
            raise Refusal(Code.INVALID_POLICY_FILE, 'outputs: have chunks of different lengths '
                          f'{sorted(lengths)}; all outputs of a policy advance together')
        self.horizon = lengths.pop()
        self._ports = {lane.shape.port: ports[lane.shape.port] for lane in self._lanes.values()}
        self._specs = [*self._own_specs(), *state_specs(policy_file, ports)]
        # Weight of the i-th oldest prediction, and of the i oldest together.
        self._weight = np.exp(-run.ensemble_weight * np.arange(self.horizon + 1))
        self._weights = np.concatenate(([0.0], np.cumsum(self._weight)))

    def _own_specs(self) -> list[BufferSpec]:
        specs = [_host(name, (1,), 'I64') for name in _COUNTERS]
        if self.ensemble:
            specs.append(_host('predictions', (self.horizon,), 'I64'))
        for lane in self._lanes.values():
            specs += lane.specs(self._between)
        return specs

    # -- state --

    def specs(self) -> list[BufferSpec]:
        """Return the HOST STATE that it needs, that of the outputs' limits included."""
        return list(self._specs)

    def initial(self) -> dict[str, Rows]:
        """Return initial values that are not 0: no anchor was noted yet, which is not 0."""
        return {f'queue.{name}.anchor_pending': np.full(lane.shape.dim, np.nan)
                for name, lane in self._lanes.items() if lane.spec.relative}

    def bind(self, host: Mapping[str, Rows]) -> None:
        """Take the views of its state; what they hold stays."""
        missing = [s.name for s in self._own_specs() if s.name not in host]
        if missing:
            raise Refusal(Code.INTERNAL, f'no buffer {missing[0]}; the session must hold the '
                          "queue's state")
        self._cursor, self._start, self._depth = (
            host[f'queue.{name}'] for name in ('cursor', 'start', 'depth'))
        self._tick, self._executed, self._run = (
            host[f'queue.{name}'] for name in ('tick', 'executed', 'run'))
        self._predictions = host.get('queue.predictions')
        for name, lane in self._lanes.items():
            head = f'queue.{name}.'
            lane.views = {k[len(head):]: v for k, v in host.items() if k.startswith(head)}
            lane.rows = lane.views['rows']

    @property
    def left(self) -> int:
        """Rows that can be popped before another chunk is needed."""
        depth, start = int(self._depth[0]), int(self._start[0])
        end = depth if self.execute is None else min(start + self.execute, depth)
        return max(0, end - int(self._cursor[0]))

    @property
    def rows_executed(self) -> int:
        """Rows popped since origin; it returns with a restore."""
        return int(self._executed[0])

    @property
    def tick(self) -> int:
        """The tick that made the newest chunk."""
        return int(self._tick[0])

    @property
    def fresh(self) -> bool:
        """Whether the next row is the first one after a splice."""
        return self._depth[0] > 0 and bool(self._cursor[0] == self._start[0])

    def wants_inference(self) -> bool:
        """Whether an inference should start, if none is in flight."""
        return self.left <= self.start_at

    def due(self, executed: int) -> bool:
        """Whether a finished chunk is to be spliced, `executed` rows after its inference began."""
        return executed >= self.latency_steps or self.left == 0

    # -- in --

    def latch(self, joints: Joints) -> None:
        """An inference starts: note the measured joints as its anchor.

        Raises Refusal(INPUT_STALE) where relative rows would have none; nothing was noted then.
        """
        anchors = {}
        for name, lane in self._lanes.items():
            if lane.spec.relative:
                anchor = measured(lane.spec.joints, joints)
                if isinstance(anchor, str):
                    raise Refusal(Code.INPUT_STALE, f'output {name}: {anchor} was never measured, '
                                  'and relative rows count from it; check that its JointState '
                                  'arrives', output=name, name=anchor)
                anchors[name] = anchor
        for name, anchor in anchors.items():
            self._lanes[name].views['anchor_pending'][:] = anchor

    def splice(self, outputs: Mapping[str, Rows], skip: int,
               anchor: Mapping[str, F64] | None = None, *, tick: int = 0) -> int:
        """Take in a chunk, `skip` rows after its inference latched; return the rows left.

        `outputs` are the model's OUTPUT buffers by port. `anchor` is of relative outputs, by
        name; None takes what `latch` noted. Raises Refusal(BACKEND) for a number that is not
        finite where it would be averaged; the queue is then as before.
        """
        if skip < 0:
            raise Refusal(Code.INTERNAL, f'a chunk cannot be spliced {-skip} rows before its start')
        chunks = {name: self._chunk(lane, outputs) for name, lane in self._lanes.items()}
        anchors = self._anchors(anchor)
        cursor, depth = int(self._cursor[0]), int(self._depth[0])
        for name, lane in self._lanes.items():
            old = None
            if lane.spec.relative:
                old = lane.views['anchor'].copy()
                lane.views['anchor'][:] = anchors[name]
            if self.ensemble:
                self._average(lane, chunks[name], cursor, depth, skip, old)
            else:
                lane.rows[:] = chunks[name]
        if self._predictions is not None:
            both = max(0, min(depth - cursor, self.horizon - skip))
            counts = np.ones(self.horizon, np.int64)
            counts[skip:skip + both] += self._predictions[cursor:cursor + both]
            self._predictions[:] = counts
        self._cursor[0] = self._start[0] = min(skip, self.horizon)
        self._depth[0] = self.horizon
        self._tick[0] = tick
        return self.left

    def _anchors(self, given: Mapping[str, F64] | None) -> dict[str, F64]:
        """Return the anchors of relative outputs, by name; without one nothing may be spliced."""
        found = {name: lane.views['anchor_pending'] if given is None else given[name]
                 for name, lane in self._lanes.items() if lane.spec.relative}
        for name, anchor in found.items():
            if not np.isfinite(anchor).all():
                raise Refusal(Code.INTERNAL, f'output {name}: relative rows came without an '
                              'anchor; call latch when their inference starts')
        return found

    def rows(self, outputs: Mapping[str, Rows], name: str) -> Rows:
        """Return the chunk (rows, dim) that the model gave for an output, as numbers."""
        lane = self._lanes[name]
        spec = self._ports[lane.shape.port]
        chunk = self._columns(lane, outputs)
        return _from_bf16(chunk) if spec.dtype == 'BF16' else chunk.copy()

    def span(self, skip: int) -> slice:
        """Return which rows of a chunk may be executed if it is spliced after `skip` rows."""
        end = self.horizon if self.execute is None else min(skip + self.execute, self.horizon)
        return slice(min(skip, end), end)

    def _columns(self, lane: _Lane, outputs: Mapping[str, Rows]) -> Rows:
        shape = lane.shape
        chunk = np.asarray(outputs[shape.port])
        storage = self._ports[shape.port].storage
        if chunk.dtype != storage:
            chunk = chunk.view(storage)
        return chunk.reshape(shape.rows, -1)[:, shape.first:shape.last]

    def _chunk(self, lane: _Lane, outputs: Mapping[str, Rows]) -> Rows:
        """Return a lane's columns of a chunk (rows, dim), as bits or, for averaging, numbers."""
        if not self.ensemble:
            return self._columns(lane, outputs)
        numbers = self.rows(outputs, lane.spec.name).astype(np.float64)
        if not np.isfinite(numbers).all():
            raise Refusal(Code.BACKEND, f'output {lane.spec.name}: the model gave a number that is '
                          'not finite; the chunk was not taken', output=lane.spec.name)
        return numbers

    def _average(self, lane: _Lane, chunk: Rows, cursor: int, depth: int, skip: int,
                 old_anchor: F64 | None) -> None:
        """Write a chunk over the queue, averaged with what the queue has for the same steps."""
        assert self._predictions is not None
        both = max(0, min(depth - cursor, self.horizon - skip))
        if both:
            old = lane.rows[cursor:cursor + both]
            if old_anchor is not None:
                old = rebase(old, old_anchor, lane.views['anchor'], lane.scale)
            n = np.minimum(self._predictions[cursor:cursor + both], self.horizon)[:, None]
            total = self._weights[n]
            weight = self._weight[n]
            chunk[skip:skip + both] = (
                old * total + chunk[skip:skip + both] * weight) / (total + weight)
        lane.rows[:] = chunk

    # -- out --

    def pop(self) -> dict[str, Rows]:
        """Return a copy of the next row (dim,) of each output, and go on."""
        if not self.left:
            raise Refusal(Code.INTERNAL, 'the queue is empty; wait for a chunk before a step')
        i = int(self._cursor[0])
        self._cursor[0] = i + 1
        self._executed[0] += 1
        self._run[0] += 1
        result = {}
        for name, lane in self._lanes.items():
            row = lane.decode(lane.rows[i])
            views = lane.views
            if 'anchor' in views:
                views['anchor_last'][:] = views['anchor']
            if 'last' in views:
                views['last'][:] = row
            result[name] = row
        return result

    def peek(self) -> dict[str, Rows] | None:
        """Return a copy of the next row of each output, None where the queue is empty."""
        if not self.left:
            return None
        i = int(self._cursor[0])
        return {name: lane.decode(lane.rows[i]) for name, lane in self._lanes.items()}

    def anchor(self, name: str, *, next_row: bool = False) -> F64 | None:
        """Return the anchor of an output's last popped row, or of the next one; None: absolute."""
        return self._lanes[name].views.get('anchor' if next_row else 'anchor_last')

    def rest(self, name: str) -> Rows:
        """Return a copy of the rows (n, dim) of an output that are still to be popped."""
        i = int(self._cursor[0])
        lane = self._lanes[name]
        return lane.decode(lane.rows[i:i + self.left])

    def between(self, part: int, parts: int) -> dict[str, F64]:
        """Return what lies `part` of `parts` of a step after the last row, linearly to the next.

        Needs `publish_hz`. Empty before the first row since a flush; the last row again where
        the queue knows none after it. Relative rows count from `anchor(name)`.
        """
        if not self._run[0]:
            return {}
        i = int(self._cursor[0])
        known = i < self._depth[0]
        result: dict[str, F64] = {}
        for name, lane in self._lanes.items():
            last: F64 = lane.views['last'].copy()
            if known:
                after = lane.decode(lane.rows[i]).astype(np.float64)
                if lane.spec.relative:
                    after = rebase(after, lane.views['anchor'], lane.views['anchor_last'],
                                   lane.scale)
                last += (after - last) * (part / parts)
            result[name] = last
        return result

    def running(self, name: str, joints: Joints | None = None) -> F64:
        """Return the rest of the running chunk (n, dim) of an output, past `execute` too.

        For policies that are conditioned on it: its first row is that of the step that comes
        next. With `joints`, the anchor of the inference that will read it, relative rows are
        carried over to them.
        """
        lane = self._lanes[name]
        i, depth = int(self._cursor[0]), int(self._depth[0])
        rows: F64 = lane.decode(lane.rows[i:depth]).astype(np.float64)
        if lane.spec.relative and joints is not None:
            anchor = measured(lane.spec.joints, joints)
            if not isinstance(anchor, str):
                rows = rebase(rows, lane.views['anchor'], anchor, lane.scale)
        return rows

    def prefixes(self, joints: Joints | None = None) -> dict[str, F64]:
        """Return `running` of each output by name; '' stands for the only one."""
        found = {name: self.running(name, joints) for name in self._lanes}
        return {**found, '': next(iter(found.values()))} if len(found) == 1 else found

    def remaining(self, length: int, output: str | None = None, joints: Joints | None = None
                  ) -> F64:
        """Return `running` as (length, dim): cut, or padded by repeating its last row.

        Zeros where no row is left.
        """
        rows = self.running(output if output is not None else next(iter(self._lanes)), joints)
        if not len(rows):
            return np.zeros((length, rows.shape[1]))
        return rows[np.minimum(np.arange(length), len(rows) - 1)]

    def flush(self) -> int:
        """Forget the running chunk; return how many rows were left to execute."""
        dropped = self.left
        self._cursor[0] = self._start[0] = self._depth[0] = self._run[0] = 0
        return dropped


def rebase(rows: Rows, old: F64, new: F64, scale: F64) -> F64:
    """Return relative rows that reach, from anchor `new`, what they reached from `old`."""
    result: F64 = rows + (old - new) / scale
    return result


def allocate(specs: Iterable[BufferSpec], initial: Mapping[str, Rows] = _NONE
             ) -> dict[str, Rows]:
    """Return arrays for STATE outside of a session: tests and tools."""
    host = {s.name: np.zeros(s.shape, s.storage) for s in specs}
    for name, value in initial.items():
        host[name][:] = value
    return host


def _host(name: str, shape: tuple[int, ...], dtype: str) -> BufferSpec:
    return BufferSpec(f'queue.{name}', shape, dtype, Role.STATE, Space.HOST)


def _from_bf16(bits: Rows) -> Rows:
    """Return the numbers of BF16 bits, which are the upper half of a float32's."""
    wide: Rows = bits.astype(np.uint32) << 16
    return wide.view(np.float32)
