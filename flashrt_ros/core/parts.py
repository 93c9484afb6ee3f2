"""What the parts of a session share: its attributes, epochs and the present.

session.py sets them up and runs ticks; saving.py names boundaries, rewind.py returns to them,
fork.py continues them elsewhere.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
import itertools
import threading
from typing import TYPE_CHECKING

from flashrt_ros.core.capsule import Boundary, Capsule, CapsuleInfo, Event, EventKind, Latch
from flashrt_ros.core.disk import CapsuleFolder
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.inference import Inference
from flashrt_ros.core.journal import Pieces, Strands, shared_rows
from flashrt_ros.core.layout import BufferSpec, Fingerprint, Layout
from flashrt_ros.core.live import LiveSet
from flashrt_ros.core.payload import HostBlocks, Payload, SegmentPool, SlotPool
from flashrt_ros.core.seam import Device
from flashrt_ros.core.store import Store
from flashrt_ros.core.worker import Worker

if TYPE_CHECKING:
    from flashrt_ros.core.session import Options


class Parts:
    """Attributes and small helpers; `_lock` stands over all that begins with an underscore."""

    id: int
    epoch: int
    rewind_epoch: int
    fault: Refusal | None
    options: Options
    exact: bool
    _build_exact: bool
    device: Device
    fingerprint: Fingerprint
    layout: Layout
    state_nbytes: int
    in_flight: Inference | None
    pending_after_restore: Latch | None
    _lock: threading.RLock
    _store: Store
    _pool: SlotPool
    _host_blocks: HostBlocks
    _segments: SegmentPool
    _ring: deque[Boundary]
    _live: LiveSet
    _worker: Worker
    _parent: str
    _events: list[Event]
    _answers: dict[str, CapsuleInfo]
    _orders: itertools.count[int]
    _names: itertools.count[int]
    _fingerprint_digest: str
    _restore_s: float
    _clock: Callable[[], int]
    _steady: Callable[[], float]
    _spare_sets: list[LiveSet]
    _folder: CapsuleFolder | None
    _spill: Worker
    _strand_ids: itertools.count[int]
    _head_slot: Payload | None
    _head_lengths: Mapping[str, int]
    _head_strands: Mapping[str, Strands]
    _moved: bool  # ring off: a tick was accepted whose step is not committed yet
    _on_event: Callable[[Event], None] | None

    # -- epochs ---------------------------------------------------------------------------

    def raise_epoch(self, *, rewind: bool = False) -> int:
        """Count a stop, a goal start or a prompt change; a clock jump counts as a rewind."""
        with self._lock:
            self.epoch += 1
            if rewind:
                self.rewind_epoch = self.epoch
            return self.epoch

    def _check_epoch(self, if_epoch: int) -> None:
        if if_epoch and not self.rewind_epoch <= if_epoch <= self.epoch:
            raise Refusal(Code.STALE_EPOCH, f'if_epoch {if_epoch} no longer holds: the state was '
                          f'rewound in epoch {self.rewind_epoch} and the epoch is {self.epoch}; '
                          'look at the present state and ask again')

    def _check_fault(self) -> None:
        if self.fault is not None:
            raise Refusal(Code.FAULT, f'{self.fault.message}; clean up and configure')

    # -- the present ----------------------------------------------------------------------

    def _set_newest(self, boundary: Boundary, parent: str) -> None:
        """Make a boundary the present, whose reference it takes over; forget the ring."""
        boundary.parent = parent
        self._trim_ring(keep=0)
        self._ring.append(boundary)
        self._set_head(boundary.payload, boundary.lengths, boundary.strands)

    def _set_head(self, slot: Payload | None, lengths: Mapping[str, int],
                  strands: Mapping[str, Strands]) -> None:
        if slot is not None:
            slot.hold()
        if self._head_slot is not None:
            self._head_slot.release()
        self._head_slot, self._head_lengths, self._head_strands = slot, lengths, strands

    def _trim_ring(self, keep: int) -> None:
        """Release the oldest boundaries until `keep` ticks are left."""
        ring = self._ring
        while ring and len({id(b.payload) for b in ring}) > keep:
            ring.popleft().release()

    def _settle(self, inference: Inference) -> None:
        inference.settled = True
        if self.in_flight is inference:
            self.in_flight = None

    def _release_slot(self, inference: Inference) -> None:
        if inference.slot is not None:
            inference.slot.release()
            inference.slot = None

    def _evict(self, capsule: Capsule) -> None:
        """Give up a capsule's memory; without a file only its mark is left."""
        info = capsule.info()
        self._store.give_up(capsule)
        kind = EventKind.MOVED if capsule.durable else EventKind.EVICTED
        self._events.append(Event(kind, replace(info, tier=capsule.tier), self.epoch))

    def _stands(self, boundary: Boundary) -> bool:
        """Whether the live journals still have a boundary's rows: no later tick or prefill that
        rewrites them was accepted, is finished or runs."""
        flight = self.in_flight
        if flight is not None and flight.prefill and self._live.prefill_rewrites and (
                any(boundary.lengths.values())):
            return False
        later = [(self._head_strands, self._head_lengths)]
        if flight is not None and flight.done and flight.error is None:
            later.append((flight.strands, flight.lengths))
        return all(shared_rows(boundary.strands[n], rows, strands[n], lengths[n]) >= rows
                   for strands, lengths in later for n, rows in boundary.lengths.items())

    if TYPE_CHECKING:                  # what saving.py adds and others use
        def _check_rows(self, wanted: Sequence[tuple[BufferSpec, int, int]],
                        held: Mapping[str, Pieces]) -> None: ...

        def _remove(self, capsule: Capsule) -> None: ...

        def _reserve_rows(self, spec: BufferSpec, first: int, last: int) -> Pieces: ...

    def _flush_events(self) -> None:
        """Tell events that were recorded under the lock. Called without it."""
        while True:
            with self._lock:
                if not self._events:
                    return
                events, self._events = self._events, []
            if self._on_event is not None:
                for event in events:
                    self._on_event(event)
