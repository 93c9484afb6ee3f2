"""The output contract: one raw row of the model becomes one command for the robot.

A value is raw * scale + offset, plus the anchor where rows are relative. On it act, in this order,
the soft start (`blend_s`), the rate limit (`max_rate`, from the last command, or where there is
none yet from the measured joints; other kinds than position start from 0), and `clip`. Clip is
last, so that it always holds: where the robot stands outside of it, the first command may exceed
the rate by as much as it stands outside. A value that is not finite is refused, never sent.

What the next command depends on, the last command and the time since the start, is STATE in HOST
space: `state_specs` declares it (ActionQueue hands it on) and `OutputMap.bind` takes the views.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.ingest.ports import action_shape
from flashrt_ros.ingest.schema import OUTPUT_TYPES
from flashrt_ros.ingest.spec import Numbers, OutputSpec, PolicyFile

F64 = NDArray[np.float64]
Joints = Mapping[str, tuple[float, int]]      # name -> (position, stamp_ns), newest measured


class Command(NamedTuple):
    """What is to be sent on one output, as plain data."""

    output: str
    type: str                  # message or action type
    kind: str
    names: tuple[str, ...]     # joints or fields; empty where the type has none
    values: F64                # (dim,), the present row
    time_s: float              # trajectories: when the present row is to be reached
    points: F64 | None         # trajectories: (n, dim), the present row first
    times: tuple[float, ...]   # trajectories: time from start of each point
    clipped: int               # values that clip or max_rate changed
    frame_id: str = ''


def make_outputs(policy_file: PolicyFile, ports: Mapping[str, BufferSpec]
                 ) -> dict[str, OutputMap]:
    """Return the contract of each output; `bind` each before the first command."""
    return {name: OutputMap(spec, action_shape(spec, ports).dim, policy_file.policy.period_s,
                            policy_file.run.blend_s)
            for name, spec in policy_file.outputs.items()}


def state_specs(policy_file: PolicyFile, ports: Mapping[str, BufferSpec]) -> list[BufferSpec]:
    """Return the HOST STATE of all outputs."""
    return [spec for output in make_outputs(policy_file, ports).values()
            for spec in output.specs()]


class OutputMap:
    """The contract of one output. Allocates nothing but the command; owns no state of its own."""

    def __init__(self, spec: OutputSpec, dim: int, period_s: float, blend_s: float = 0.0) -> None:
        self.spec = spec
        self.dim = dim
        self.period_s = period_s
        self.blend_s = 0.0 if spec.kind == 'raw' else blend_s
        self.names = spec.joints or spec.fields
        self._scale = _vector(spec.scale, dim, unless=1.0)
        self._offset = _vector(spec.offset, dim, unless=0.0)
        low, high = spec.clip or (-math.inf, math.inf)
        self._low = _vector(low, dim, unless=-math.inf)
        self._high = _vector(high, dim, unless=math.inf)
        self._rate = None if spec.max_rate is None else _vector(spec.max_rate, dim)
        self._trajectory = OUTPUT_TYPES[spec.type].trajectory
        self._time_s = spec.time_s or period_s
        self._published: F64 | None = None    # (dim,), valid while _running
        self._running: NDArray[Any] | None = None
        self._from: F64 | None = None         # (dim,), where the soft start begins
        self._elapsed: F64 | None = None      # (1,), s since then

    # -- state --

    def specs(self) -> list[BufferSpec]:
        """Return the HOST STATE that this output needs, perhaps none."""
        def spec(name: str, n: int, dtype: str = 'F64') -> BufferSpec:
            return BufferSpec(f'output.{self.spec.name}.{name}', (n,), dtype, Role.STATE,
                              Space.HOST)
        found = []
        if self._rate is not None or self.blend_s:
            found.append(spec('running', 1, 'U8'))
        if self._rate is not None:
            found.append(spec('published', self.dim))
        if self.blend_s:
            found += [spec('blend_from', self.dim), spec('blend_elapsed', 1)]
        return found

    def bind(self, host: Mapping[str, NDArray[Any]]) -> None:
        """Take the views of its state; what they hold stays."""
        def view(name: str) -> NDArray[Any] | None:
            return host.get(f'output.{self.spec.name}.{name}')
        self._running, self._published = view('running'), view('published')
        self._from, self._elapsed = view('blend_from'), view('blend_elapsed')
        missing = [s.name for s in self.specs() if s.name not in host]
        if missing:
            raise Refusal(Code.INTERNAL, f'output {self.spec.name}: no buffer {missing[0]}; the '
                          'session must hold its state')

    def begin(self) -> None:
        """Motion begins: the next command starts from the measured joints, not the last one."""
        if self._running is not None:
            self._running[0] = 0

    # -- the way out --

    def command(self, row: NDArray[Any], joints: Joints, dt: float | None = None, *,
                anchor: F64 | None = None, rest: NDArray[Any] | None = None) -> Command | None:
        """Return the command for one raw row (dim,) and count it as sent.

        `dt` is the time since the last command (s, one step by default). With
        `chunk_as_trajectory`, `rest` holds the rows after this one: given once for each chunk,
        it makes the command that carries them all; without it there is nothing to send (None).
        Raises Refusal(BACKEND) for a value that is not finite and INPUT_STALE where a limit
        starts from joints that were never measured; then nothing counts as sent.
        """
        if dt is None or self.spec.chunk_as_trajectory:    # nothing is sent between its points
            dt = self.period_s
        target = self.target(row, anchor)
        value, clipped = target, 0
        running = self._running
        if running is not None:
            start = self._begin_from(joints) if not running[0] else None
            value, clipped = self._limit(
                target, dt, self._published if start is None else start,
                self._from if start is None else start,
                self._elapsed[0] if start is None and self._elapsed is not None else 0.0)
            if start is not None:
                running[0] = 1
                if self._from is not None and self._elapsed is not None:
                    self._from[:] = start
                    self._elapsed[0] = 0.0
            if self._published is not None:
                self._published[:] = value
            if self._elapsed is not None:
                self._elapsed[0] += dt
        elif self._low is not None or self._high is not None:
            value, clipped = self._limit(target, dt, None, None, 0.0)
        spec = self.spec
        if not self._trajectory:
            return Command(spec.name, spec.type, spec.kind, self.names, value, 0.0, None, (),
                           clipped, spec.frame_id)
        if not spec.chunk_as_trajectory:
            return Command(spec.name, spec.type, spec.kind, self.names, value, self._time_s,
                           value[None], (self._time_s,), clipped, spec.frame_id)
        if rest is None:
            return None
        points, more = self._points(value, rest, anchor)
        times = tuple(self._time_s + i * self.period_s for i in range(len(points)))
        return Command(spec.name, spec.type, spec.kind, self.names, value, self._time_s, points,
                       times, clipped + more, spec.frame_id)

    def target(self, row: NDArray[Any], anchor: F64 | None = None) -> F64:
        """Return raw * scale + offset (+ anchor) before all limits. Refuses what is not finite."""
        value: F64 = row.astype(np.float64)
        if self._scale is not None:
            value *= self._scale
        if self._offset is not None:
            value += self._offset
        if self.spec.relative:
            if anchor is None:
                raise Refusal(Code.INTERNAL, f'output {self.spec.name}: a relative row came '
                              'without its anchor')
            value += anchor
        # One sum finds NaN and infinity, without a warning; one that overflows needs a second look.
        if not math.isfinite(sum(value.tolist())) and not np.isfinite(value).all():
            i = int(np.flatnonzero(~np.isfinite(value))[0])
            raise Refusal(Code.BACKEND, f'output {self.spec.name}: the model gave {value[i]} for '
                          f'{self._name(i)}; nothing was sent', output=self.spec.name,
                          name=self._name(i))
        return value

    def on_stop(self, joints: Joints) -> Command | str | None:
        """Return what is sent when motion ends, None for nothing, or why nothing can be sent.

        The measured joints are sent as they are, past their age limit and outside of clip too:
        any other value would be a motion.
        """
        stop, spec = self.spec.on_stop, self.spec
        if stop.do == 'none':
            return None
        if stop.do == 'hold':
            value = measured(spec.joints, joints)
            if isinstance(value, str):
                return (f'output {spec.name}: {value} was never measured, so no holding position '
                        'was sent')
        else:
            value = np.zeros(self.dim)
        points = value[None] if self._trajectory else None
        return Command(spec.name, spec.type, spec.kind, self.names, value,
                       stop.time_s if self._trajectory else 0.0, points,
                       (stop.time_s,) if self._trajectory else (), 0, spec.frame_id)

    def start_deviation(self, row: NDArray[Any], joints: Joints, *, anchor: F64 | None = None
                        ) -> tuple[str, float, float] | None:
        """Return `(joint, distance, limit)` of the joint that is furthest beyond the tolerance.

        Of the position that the row asks for, within clip, before soft start and rate limit.
        A joint that was never measured is infinitely far. None: publishing may begin.
        """
        limit = self.spec.start_tolerance
        if self.spec.kind != 'position' or limit is None:
            return None
        present = measured(self.spec.joints, joints)
        if isinstance(present, str):
            return present, math.inf, limit
        value = self._limit(self.target(row, anchor), 0.0, None, None, 0.0)[0]
        distance = np.abs(value - present)
        i = int(distance.argmax())
        if distance[i] <= limit:
            return None
        return self.names[i], float(distance[i]), limit

    # -- pieces --

    def _limit(self, target: F64, dt: float, last: F64 | None, start: F64 | None, elapsed: float
               ) -> tuple[F64, int]:
        """Return a value within all limits, and how many of its numbers rate or clip changed."""
        value = target
        if start is not None and self.blend_s and elapsed + dt < self.blend_s:
            value = start + (target - start) * ((elapsed + dt) / self.blend_s)
        wanted = value
        if last is not None and self._rate is not None:
            step = self._rate * dt
            value = np.maximum(value, last - step)
            step += last
            np.minimum(value, step, out=value)
        if self._low is not None:
            value = np.maximum(value, self._low)
        if self._high is not None:
            value = np.minimum(value, self._high)
        return value, 0 if value is wanted else int(np.count_nonzero(value != wanted))

    def _points(self, value: F64, rest: NDArray[Any], anchor: F64 | None) -> tuple[F64, int]:
        """Return the points of a trajectory and how many numbers of the later ones were limited.

        They pass the limits one after the other, as if each had been sent in its step.
        """
        points = np.empty((len(rest) + 1, self.dim))
        points[0] = value
        elapsed = 0.0 if self._elapsed is None else float(self._elapsed[0])
        clipped = 0
        for i, row in enumerate(rest):
            points[i + 1], n = self._limit(self.target(row, anchor), self.period_s, points[i],
                                           self._from, elapsed)
            elapsed += self.period_s
            clipped += n
        return points, clipped

    def _begin_from(self, joints: Joints) -> F64:
        if self.spec.kind != 'position':
            return np.zeros(self.dim)
        present = measured(self.spec.joints, joints)
        if isinstance(present, str):
            raise Refusal(Code.INPUT_STALE, f'output {self.spec.name}: {present} was never '
                          'measured, and the first command must start from it; check that its '
                          'JointState arrives', output=self.spec.name, name=present)
        return present

    def _name(self, i: int) -> str:
        return self.names[i] if i < len(self.names) else f'value {i}'


def measured(names: Sequence[str], joints: Joints) -> F64 | str:
    """Return the measured positions (n,) of joints, or the first joint that has none."""
    value = np.empty(len(names))
    for i, name in enumerate(names):
        found = joints.get(name)
        if found is None or not math.isfinite(found[0]):
            return name
        value[i] = found[0]
    return value


def _vector(numbers: Numbers, dim: int, unless: float | None = None) -> F64 | None:
    """Return one float64 for each value; None where all equal `unless` and nothing need be done.

    Leaving the neutral operation out also keeps -0.0, and with it the model's own bytes.
    """
    vector = np.full(dim, numbers, np.float64) if not isinstance(numbers, tuple) else np.array(
        numbers, np.float64)
    return None if unless is not None and bool((vector == unless).all()) else vector
