"""JointState merged by name: many messages and publishers fill one table of joints.

For each joint and quantity the newer stamp wins. A joint that was never received is NaN, never
zero, so that no computation can take it for a measurement.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.ingest.inbox import GIVE_UP_NS, NEVER, Receipt
from flashrt_ros.ingest.terms import rejected

QUANTITIES = ('position', 'velocity', 'effort')
_LAYOUTS = 64      # name lists remembered; one per publisher is usual
_PENDING = 64      # messages kept for the record before those without effect are let go


class _Layout(NamedTuple):
    """Where the names of a message lie in the table."""

    names: int
    source: NDArray[np.intp] | None      # columns of the message; None: all, in order
    target: NDArray[np.intp] | slice     # rows of the table


class JointMessage(NamedTuple):
    """A checked message: its layout and the columns that it carries, `(count,)` each."""

    layout: _Layout
    columns: tuple[NDArray[np.float64] | None, ...]


class JointTable:
    """The newest value, stamp and time of each joint, by quantity: arrays of `(3, joints)`."""

    def __init__(self, topic: str, joints: Iterable[str], quantities: Iterable[str]) -> None:
        self.topic = topic
        self.joints = tuple(dict.fromkeys(joints))
        self.index = {name: i for i, name in enumerate(self.joints)}
        self.older = 0                       # values that were older than what the table held
        self.pending: dict[int, Receipt] = {}
        self._wanted = tuple(i for i, q in enumerate(QUANTITIES) if q in {'position', *quantities})
        shape = (len(QUANTITIES), len(self.joints))
        self.value = np.full(shape, np.nan)
        self.stamp = np.zeros(shape, np.int64)
        self.as_of = np.full(shape, NEVER, np.int64)
        self._owner = np.full(shape, NEVER, np.int64)    # order of the message that set a value
        self._newest = [0] * len(QUANTITIES)
        self._layouts: dict[tuple[str, ...], _Layout] = {}

    def parse(self, msg: Any) -> JointMessage:
        """Check a JointState and return what it carries. Raises Refusal(INPUT_REJECTED)."""
        names = tuple(msg.name)
        layout = self._layouts.get(names)
        if layout is None:
            layout = self._learn(names)
        position, velocity, effort = msg.position, msg.velocity, msg.effort
        count = layout.names
        if not (len(position) in (count, 0) and len(velocity) in (count, 0)
                and len(effort) in (count, 0)):
            self._unequal(msg, names)
        wanted = self._wanted
        return JointMessage(layout, (
            np.array(position, np.float64) if len(position) else None,
            np.array(velocity, np.float64) if 1 in wanted and len(velocity) else None,
            np.array(effort, np.float64) if 2 in wanted and len(effort) else None))

    def merge(self, message: JointMessage, receipt: Receipt, *, force: bool = False) -> None:
        """Take over the values that are not older than those held; `force` takes all."""
        layout = message.layout
        stamp = receipt.stamp_ns
        entered = False
        for i in self._wanted:
            column = message.columns[i]
            if column is None:
                continue
            target = layout.target
            values = column if layout.source is None else column[layout.source]
            if not force and stamp < self._newest[i]:
                rows = np.arange(len(self.joints))[target]
                # An older stamp wins only after a silence: its source has started anew.
                newer = ((stamp >= self.stamp[i, rows])
                         | (receipt.arrival_ns - self.as_of[i, rows] > GIVE_UP_NS))
                self.older += int(len(rows) - newer.sum())
                target, values = rows[newer], values[newer]
            else:
                self._newest[i] = stamp
            if not len(values):
                continue
            self.value[i, target] = values
            self.stamp[i, target] = stamp
            self.as_of[i, target] = receipt.as_of_ns
            self._owner[i, target] = receipt.order
            entered = True
        if entered:
            self._keep(receipt)

    def rows(self, joints: Sequence[str]) -> NDArray[np.intp] | slice:
        """Return where joints lie in the arrays; as a slice, which is faster, where it can be."""
        first = self.index[joints[0]]
        rows = np.array([self.index[name] for name in joints], np.intp)
        if (rows == np.arange(first, first + len(rows))).all():
            return slice(first, first + len(rows))
        return rows

    def clear(self) -> None:
        """Forget all values: the clock jumped."""
        self.value.fill(np.nan)
        self.stamp.fill(0)
        self.as_of.fill(NEVER)
        self._owner.fill(NEVER)
        self._newest = [0] * len(QUANTITIES)
        self.pending.clear()

    def _keep(self, receipt: Receipt) -> None:
        self.pending[receipt.order] = receipt
        if len(self.pending) > _PENDING:
            # Nobody latches in HOLD; what no value stems from any more has not entered anything.
            alive = set(self._owner.ravel().tolist())
            self.pending = {k: v for k, v in self.pending.items() if k in alive}

    def _learn(self, names: tuple[str, ...]) -> _Layout:
        seen = set()
        for name in names:
            if name in seen:
                raise rejected(self.topic, f'the joint {name} stands twice in one message; its '
                               'publisher must name each joint once')
            seen.add(name)
        pairs = [(i, self.index[name]) for i, name in enumerate(names) if name in self.index]
        source = np.array([i for i, _ in pairs], np.intp)
        target = np.array([j for _, j in pairs], np.intp)
        everything = len(pairs) == len(names) == len(self.joints) and bool((source == target).all())
        layout = _Layout(len(names), None if len(pairs) == len(names) else source,
                         slice(None) if everything else target)
        if len(self._layouts) >= _LAYOUTS:
            self._layouts.clear()
        self._layouts[names] = layout
        return layout

    def _unequal(self, msg: Any, names: tuple[str, ...]) -> None:
        count = len(names)
        for quantity in QUANTITIES:
            n = len(getattr(msg, quantity))
            if n not in (count, 0):
                named = (f'the joint {names[n]} has no {quantity}' if n < count
                         else 'the last joint is ' + (names[-1] if names else 'missing'))
                raise rejected(self.topic, f'{count} names but {n} values of {quantity}: {named}')
