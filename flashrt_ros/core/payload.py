"""Where plain STATE rests: reference-counted slots on the device, blocks on the host.

All device slots, for the ring of boundaries and for capsules, come from one pool allocated at
configure. A slot returns to the pool when neither ring, capsule nor a copy in flight refers to it.
Nothing here locks: the session calls it under its own lock.
"""
from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space, align
from flashrt_ros.core.seam import Device

ROW_ALIGNMENT = 16  # bytes; copies need no more, and a one-row save stays small


class Tier(IntEnum):
    """Where a capsule's bytes rest; numbers of msg/CapsuleInfo."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    NONE = 3


class Payload:
    """Bytes with a count of those who refer to them; immutable while anybody does."""

    __slots__ = ('_owner', 'block', 'nbytes', 'offset', 'refs', 'tier')

    def __init__(self, owner: SlotPool | HostBlocks, block: Any, offset: int, nbytes: int,
                 tier: Tier) -> None:
        self._owner = owner
        self.block = block
        self.offset = offset
        self.nbytes = nbytes
        self.tier = tier
        self.refs = 1

    def hold(self) -> Payload:
        """Refer to it once more."""
        self.refs += 1
        return self

    def release(self) -> None:
        """Refer to it no longer; the last one gives the memory back."""
        self.refs -= 1
        if self.refs == 0:
            self._owner.give_back(self)


class SlotPool:
    """`count` device slots of `nbytes` each."""

    def __init__(self, device: Device, nbytes: int, count: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self.count = count
        stride = align(max(nbytes, 1))
        self._block = device.alloc(stride * count, Space.DEVICE)
        self._free = [stride * i for i in reversed(range(count))]

    @property
    def free(self) -> int:
        """Slots that nobody refers to."""
        return len(self._free)

    def take(self) -> Payload:
        """Return a free slot, referred to once."""
        if not self._free:
            raise Refusal(Code.BUDGET_EXCEEDED, f'all {self.count} device slots are in use; drop '
                          'capsules or raise device_slots')
        return Payload(self, self._block, self._free.pop(), self.nbytes, Tier.DEVICE)

    def give_back(self, payload: Payload) -> None:
        """Called by the last release."""
        self._free.append(payload.offset)

    def close(self) -> None:
        """Free the block."""
        self._device.free(self._block)


class HostBlocks:
    """Host (pinned) blocks of `nbytes` each. Pinned memory is slow to get, so all stay to the end.
    """

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = nbytes
        self._all: list[Any] = []
        self._spare: list[Any] = []

    def take_spare(self) -> Payload | None:
        """Return a block that was used before, under the session's lock; None: allocate one."""
        return Payload(self, self._spare.pop(), 0, self.nbytes, Tier.HOST) if self._spare else None

    def allocate(self) -> Payload:
        """Return a new block, without any lock. Raises Refusal(NO_MEMORY)."""
        block = self._device.alloc(max(self.nbytes, 1), Space.HOST)
        self._all.append(block)
        return Payload(self, block, 0, self.nbytes, Tier.HOST)

    def give_back(self, payload: Payload) -> None:
        """Called by the last release."""
        self._spare.append(payload.block)

    def close(self) -> None:
        """Free all blocks, those of capsules too."""
        while self._all:
            self._device.free(self._all.pop())


class Segment:
    """Rows of a journal as one compact run `(outer, rows, row_bytes)`, shared by capsules."""

    __slots__ = ('block', 'first', 'nbytes', 'offset', 'owner', 'refs', 'rows')

    def __init__(self, owner: SegmentPool, block: Any, offset: int, nbytes: int,
                 first: int, rows: int) -> None:
        self.owner = owner
        self.block = block
        self.offset = offset
        self.nbytes = nbytes
        self.first = first
        self.rows = rows
        self.refs = 1

    def hold(self) -> Segment:
        """Refer to it once more."""
        self.refs += 1
        return self

    def release(self) -> None:
        """Refer to it no longer."""
        self.refs -= 1
        if self.refs == 0:
            self.owner.give_back(self)


def _place(holes: list[tuple[int, int]], row_nbytes: int, rows: int
           ) -> list[tuple[int, int, int]] | None:
    """Cut room for rows out of holes `(offset, bytes)`; return `(offset, bytes, rows)` each."""
    whole = align(row_nbytes * rows, ROW_ALIGNMENT)
    first = next((hole for hole in holes if hole[1] >= whole), None)
    chosen: list[tuple[tuple[int, int], int]] = []
    if first is not None:
        chosen.append((first, rows))
    elif sum(size // row_nbytes for _, size in holes) < rows:
        return None
    else:
        for hole in sorted(holes, key=lambda hole: -hole[1]):
            if n := min(rows, hole[1] // row_nbytes):
                chosen.append((hole, n))
                rows -= n
    places = []
    for hole, n in chosen:
        nbytes = align(row_nbytes * n, ROW_ALIGNMENT)
        i, (offset, size) = holes.index(hole), hole
        holes[i:i + 1] = [(offset + nbytes, size - nbytes)] if size > nbytes else []
        places.append((offset, nbytes, n))
    return places


class SegmentPool:
    """A device block from which journal rows of capsules are cut; holes merge when freed."""

    def __init__(self, device: Device, nbytes: int) -> None:
        self._device = device
        self.nbytes = align(nbytes) if nbytes else 0
        self._block = device.alloc(self.nbytes, Space.DEVICE) if nbytes else None
        self._holes: list[tuple[int, int]] = [(0, self.nbytes)] if nbytes else []
        self.used = 0

    def take(self, row_nbytes: int, first: int, rows: int) -> list[Segment] | None:
        """Return segments for rows `[first, first + rows)`: one in the first hole that is large
        enough, else several in the largest holes; None where all holes together have no room."""
        places = _place(self._holes, row_nbytes, rows)
        if places is None:
            return None
        segments = []
        for offset, nbytes, n in places:
            segments.append(Segment(self, self._block, offset, nbytes, first, n))
            self.used += nbytes
            first += n
        return segments

    def fits(self, beside: Iterable[Segment], wanted: Iterable[tuple[int, int]]) -> bool:
        """Whether all of `wanted`, (row_nbytes, rows), would find room if of all segments only
        those `beside` were left."""
        holes: list[tuple[int, int]] = []
        at = 0
        for s in sorted(beside, key=lambda s: s.offset):
            if s.offset > at:
                holes.append((at, s.offset - at))
            at = s.offset + s.nbytes
        if self.nbytes > at:
            holes.append((at, self.nbytes - at))
        return all(_place(holes, row_nbytes, rows) is not None for row_nbytes, rows in wanted)

    def give_back(self, segment: Segment) -> None:
        """Called by the last release."""
        self.used -= segment.nbytes
        self._holes.append((segment.offset, segment.nbytes))
        self._holes.sort()
        merged: list[tuple[int, int]] = []
        for offset, size in self._holes:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._holes = merged

    def close(self) -> None:
        """Free the block."""
        if self._block is not None:
            self._device.free(self._block)
            self._block = None
