"""What the robot measured at a step, under flat names, so that a restore can tell how far it moved.

Names are a term and a component, `joint_position.left_knee` or `projected_gravity.x`, in SI units
before offset and scale. Where two topics give the same term, those of the second end in `@topic`.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
import math

from flashrt_ros.ingest.inbox import Measured
from flashrt_ros.ingest.input_port import Array, Leaf, Port
from flashrt_ros.ingest.joints import QUANTITIES
from flashrt_ros.ingest.sources import JointSource, LevelSource, Source
from flashrt_ros.ingest.spec import DEFAULT_MAX_AGE_S, GuardSpec, WitnessLimit
from flashrt_ros.ingest.terms import WITNESSES


class Witness:
    """Names, limits, and the values of the last latch (no state: latched anew every step)."""

    def __init__(self, guard: GuardSpec, ports: Sequence[Port],
                 sources: Mapping[str, Source]) -> None:
        self._tables = [s for s in sources.values() if isinstance(s, JointSource)]
        # Positions always; velocity and effort where the guard names them.
        self._quantities = [i for i, q in enumerate(QUANTITIES)
                            if i == 0 or f'joint_{q}' in guard.witness]
        self._terms: list[tuple[list[str], Leaf, Port, LevelSource]] = []
        seen: set[tuple[str, str]] = set()
        for port in ports:
            for leaf in port.leaves:
                source = sources.get(leaf.topic)
                term = leaf.spec.term
                if (isinstance(source, LevelSource) and leaf.image is None and leaf.measured
                        and (term in WITNESSES or term in guard.witness)
                        and (term, leaf.topic) not in seen):
                    taken = any(t == term for t, _ in seen)
                    seen.add((term, leaf.topic))
                    end = f'@{leaf.topic}' if taken else ''
                    self._terms.append(([f'{term}.{n}{end}' for n in leaf.names], leaf, port,
                                        source))
        self._values: list[tuple[Array, Array]] = [
            (s.table.value.copy(), s.table.stamp.copy()) for s in self._tables]
        self._stamps = [0] * len(self._terms)
        self.limits = self._limits(guard)

    def _limits(self, guard: GuardSpec) -> dict[str, WitnessLimit]:
        names = {name for names, *_ in self._terms for name in names}
        names |= {f'joint_{QUANTITIES[q]}.{j}' for s in self._tables for j in s.table.joints
                  for q in self._quantities}
        limits: dict[str, WitnessLimit] = {}
        for key, limit in guard.witness.items():         # whole terms first, then single joints
            limits |= {n: limit for n in sorted(names) if n.startswith(f'{key}.')}
        for key, limit in guard.witness.items():
            if not any(n.startswith(f'{key}.') for n in names):
                limits[f'joint_position.{key}'] = limit
        return limits

    def latch(self) -> None:
        """Keep the present values as those of this step."""
        for source, (values, stamps) in zip(self._tables, self._values, strict=True):
            values[:] = source.table.value
            stamps[:] = source.table.stamp
        for i, (_, _, _, level) in enumerate(self._terms):
            self._stamps[i] = 0 if level.newest is None else level.newest.stamp_ns

    def latched(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return values and stamps of the last latch."""
        values, stamps = {}, {}
        for name, value, stamp, _ in self._joint_values(self._values, self._quantities):
            values[name], stamps[name] = value, stamp
        for (names, leaf, port, _), stamp in zip(self._terms, self._stamps, strict=True):
            for name, value in zip(names, port.latched[leaf.start:].tolist(), strict=False):
                values[name], stamps[name] = value, stamp
        return values, stamps

    def measured(self, now_ns: int) -> dict[str, Measured]:
        """Return what is measured now; what never was, or is no number, is absent."""
        found = {}
        for name, value, stamp, source in self._joint_values(self._now(), self._quantities):
            quantity, _, joint = name.partition('.')
            as_of = source.table.as_of[QUANTITIES.index(quantity.removeprefix('joint_')),
                                       source.table.index[joint]]
            limit = _limit(leaf for leaf in source.leaves if joint in leaf.names)
            found[name] = Measured(value, stamp, max(0, now_ns - int(as_of)) * 1e-9, limit)
        for names, leaf, _, level in self._terms:
            newest = level.newest
            if newest is not None:
                old = max(0, now_ns - newest.as_of_ns) * 1e-9
                for name, value in zip(names, leaf.raw.tolist(), strict=True):
                    if math.isfinite(value):
                        found[name] = Measured(value, newest.stamp_ns, old, _limit([leaf]))
        return found

    def joints(self) -> dict[str, tuple[float, int]]:
        """Return `(position, stamp)` of each joint that was ever measured."""
        return {name.partition('.')[2]: (value, stamp)
                for name, value, stamp, _ in self._joint_values(self._now(), [0])}

    def _now(self) -> list[tuple[Array, Array]]:
        return [(s.table.value, s.table.stamp) for s in self._tables]

    def _joint_values(self, arrays: Sequence[tuple[Array, Array]], quantities: Sequence[int]
                      ) -> Iterator[tuple[str, float, int, JointSource]]:
        """Yield each joint where it is newest; never seen ones, NaN, are left out."""
        rows = []
        for source, (values, stamps) in zip(self._tables, arrays, strict=True):
            for q in quantities:
                before = f'joint_{QUANTITIES[q]}.'
                rows += [(before + joint, value, stamp, source) for joint, value, stamp in zip(
                    source.table.joints, values[q].tolist(), stamps[q].tolist(), strict=True)
                    if math.isfinite(value)]
        if len(self._tables) > 1:
            rows.sort(key=lambda row: row[2])
        yield from {row[0]: row for row in rows}.values()


def _limit(leaves: Iterable[Leaf]) -> float | None:
    limits = [leaf.limit_ns for leaf in leaves]
    if not limits:
        return DEFAULT_MAX_AGE_S
    known = [n for n in limits if n is not None]
    return min(known) * 1e-9 if known else None
