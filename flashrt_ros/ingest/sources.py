"""One object per subscribed topic: what its newest message said, and whether that may be used.

`parse` checks a message and changes nothing; `apply` takes it in. Live, one follows the other; in
lock step a parsed message waits until its step is complete.
"""
from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any

import numpy as np

from flashrt_ros.core.errors import Refusal
from flashrt_ros.ingest.inbox import GIVE_UP_NS, NEVER, Missing, Receipt, TopicClock, age, judge
from flashrt_ros.ingest.input_port import Leaf
from flashrt_ros.ingest.joints import JointMessage, JointTable
from flashrt_ros.ingest.terms import Read, rejected


class Source:
    """A topic that feeds terms. `untimed` says that lock step, not age, decides about it."""

    def __init__(self, topic: str, kind: str) -> None:
        self.topic = topic
        self.type = kind
        self.untimed = False
        self.clock = TopicClock()
        self.newest: Receipt | None = None
        self.leaves: list[Leaf] = []

    @property
    def steady(self) -> bool:
        """Whether all its terms keep their last value, so that it says nothing about now."""
        return bool(self.leaves) and all(leaf.spec.latched for leaf in self.leaves)

    def parse(self, msg: Any) -> Any:
        """Check a message and return what it carries; names its errors."""
        try:
            return self._parse(msg)
        except Refusal:
            raise
        except (AttributeError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise rejected(self.topic, f'the message is no {self.type} that can be read: '
                           f'{error}') from error

    def clear(self) -> None:
        """Forget all messages: the clock jumped."""
        self.clock = TopicClock()
        self.newest = None
        for leaf in self.leaves:
            leaf.raw.fill(np.nan)
            leaf.picture = None

    def _parse(self, msg: Any) -> Any:
        raise NotImplementedError

    def slack_ns(self, now_ns: int) -> float:
        """Return for how much longer its values may be used: inf where nothing limits that, -inf
        where one never came."""
        left = math.inf
        for leaf in self.leaves:
            limit = self._limit(leaf)
            if limit is not None and not leaf.spec.latched:
                oldest = self._oldest(leaf)
                left = min(left, -math.inf if oldest == NEVER else limit - (now_ns - oldest))
        return left

    def _oldest(self, leaf: Leaf) -> int:
        """Return the time from which the age of a term's oldest value counts."""
        return NEVER if self.newest is None else self.newest.as_of_ns

    def _limit(self, leaf: Leaf) -> int | None:
        return None if self.untimed else leaf.limit_ns


class LevelSource(Source):
    """A topic of which the newest message counts, as a whole."""

    def __init__(self, topic: str, kind: str) -> None:
        super().__init__(topic, kind)
        self.older = 0
        self.pending: Receipt | None = None
        self._vectors: list[tuple[Leaf, Read]] = []
        self._images: list[Leaf] = []

    def add(self, leaf: Leaf, read: Read | None) -> None:
        """Let a term read the topic; a picture has its own reader."""
        self.leaves.append(leaf)
        if read is None:
            self._images.append(leaf)
        else:
            self._vectors.append((leaf, read))

    def _parse(self, msg: Any) -> tuple[list[Any], list[Any]]:
        return ([read(msg) for _, read in self._vectors],
                [leaf.image.parse(msg) for leaf in self._images])  # type: ignore[union-attr]

    def apply(self, payload: tuple[list[Any], list[Any]], receipt: Receipt, *,
              force: bool = False) -> None:
        """Take the message in, unless a newer one is held and its source has not fallen silent."""
        held = self.newest
        if (held is not None and not force and receipt.stamp_ns < held.stamp_ns
                and receipt.arrival_ns - held.arrival_ns <= GIVE_UP_NS):
            self.older += 1
            return
        vectors, pictures = payload
        for (leaf, _), values in zip(self._vectors, vectors, strict=True):
            leaf.raw[:] = values
        for leaf, picture in zip(self._images, pictures, strict=True):
            leaf.picture = picture
        self.newest = self.pending = receipt

    def entered(self) -> list[Receipt]:
        """Return the message that entered since last asked."""
        pending, self.pending = self.pending, None
        return [] if pending is None else [pending]

    def expire(self, now_ns: int) -> None:
        """Zero the values of terms that say so after a silence."""
        if self.untimed:
            return
        for leaf in self.leaves:
            if leaf.zero_ns is not None and self._silent(leaf.zero_ns, now_ns):
                leaf.raw.fill(0.0)

    def _silent(self, limit_ns: int, now_ns: int) -> bool:
        return (self.newest is None or age(self.newest.as_of_ns, now_ns) is None
                or now_ns - self.newest.as_of_ns > limit_ns)

    def check(self, now_ns: int, after_ns: int) -> list[Missing]:
        """Return the terms that are too old, not fresh or never seen."""
        missing = []
        for leaf in self.leaves:
            if leaf.zero_ns is not None and not self.untimed and self._silent(leaf.zero_ns, now_ns):
                continue
            limit = self._limit(leaf)
            verdict = judge(self._oldest(leaf), now_ns, limit,
                            0 if leaf.spec.latched else after_ns)
            if verdict is not None:
                missing.append(_missing(leaf, self.topic, verdict, limit))
        return missing

    def stamps(self) -> list[tuple[int, str]]:
        """Return `(stamp, term)` of stamped values that must lie close together."""
        if self.newest is None or not self.newest.header_ns or self.steady:
            return []
        return [(self.newest.header_ns, self.leaves[0].spec.term)]

    def clear(self) -> None:
        """Forget all messages: the clock jumped."""
        super().clear()
        self.pending = None


class JointSource(Source):
    """A JointState topic: its table, and the terms that use rows of it."""

    def __init__(self, topic: str, leaves: Sequence[Leaf], extra: Sequence[str]) -> None:
        super().__init__(topic, 'sensor_msgs/msg/JointState')
        self.leaves = list(leaves)
        used = [name for leaf in leaves for name in leaf.names]
        self.table = JointTable(topic, [*used, *extra],
                                [leaf.spec.term.removeprefix('joint_') for leaf in leaves])
        for leaf in leaves:
            leaf.joint_rows = self.table.rows(leaf.names)
            leaf.joint_values = self.table.value[leaf.quantity]

    def _parse(self, msg: Any) -> JointMessage:
        return self.table.parse(msg)

    def apply(self, payload: JointMessage, receipt: Receipt, *, force: bool = False) -> None:
        """Merge the message into the table."""
        if self.newest is None or force or receipt.stamp_ns >= self.newest.stamp_ns:
            self.newest = receipt
        self.table.merge(payload, receipt, force=force)

    def entered(self) -> list[Receipt]:
        """Return the messages that entered since last asked."""
        pending = self.table.pending
        if not pending:
            return []
        receipts = list(pending.values())
        pending.clear()
        return receipts

    @property
    def older(self) -> int:
        """Values that were older than what the table held."""
        return self.table.older

    def check(self, now_ns: int, after_ns: int) -> list[Missing]:
        """Return the terms of which a joint is too old, not fresh or never seen, naming it."""
        missing = []
        for leaf in self.leaves:
            times = self.table.as_of[leaf.quantity, leaf.joint_rows]
            worst = int(times.argmin())
            limit = self._limit(leaf)
            verdict = judge(int(times[worst]), now_ns, limit, 0 if leaf.spec.latched else after_ns)
            if verdict is not None:
                seconds, why = verdict
                others = int((times == times[worst]).sum()) - 1
                named = f'joint {leaf.names[worst]}' + (f' (and {others} more)' if others else '')
                missing.append(_missing(leaf, self.topic, (seconds, f'{named} {why}'), limit))
        return missing

    def _oldest(self, leaf: Leaf) -> int:
        return int(self.table.as_of[leaf.quantity, leaf.joint_rows].min())

    def stamps(self) -> list[tuple[int, str]]:
        """Return `(stamp, term)` of the oldest and the newest joint in use."""
        if self.newest is None or not self.newest.header_ns or self.steady:
            return []
        stamps = []
        for leaf in self.leaves:
            if not leaf.spec.latched:
                used = self.table.stamp[leaf.quantity, leaf.joint_rows]
                stamps += [(int(used.min()), leaf.spec.term), (int(used.max()), leaf.spec.term)]
        return stamps

    def clear(self) -> None:
        """Forget all messages: the clock jumped."""
        super().clear()
        self.table.clear()


def _missing(leaf: Leaf, topic: str, verdict: tuple[float | None, str], limit: int | None
             ) -> Missing:
    seconds, why = verdict
    return Missing(leaf.spec.term, topic, seconds, None if limit is None else limit * 1e-9, why)
