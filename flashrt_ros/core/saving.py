"""Naming boundaries and keeping them: save, drop, keep, list, and the moves that make room."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
import os

from flashrt_ros.core import journal
from flashrt_ros.core.capsule import (
    ORIGIN,
    Boundary,
    Capsule,
    CapsuleInfo,
    Event,
    EventKind,
    check_name,
    made,
)
from flashrt_ros.core.errors import Code, Refusal, told
from flashrt_ros.core.journal import Piece, Pieces
from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.core.payload import Tier
from flashrt_ros.core.persist import Persisting
from flashrt_ros.core.store import Room

MAX_ANSWERS = 256   # request ids that are remembered
MAX_NOTE = 1024


@dataclass(frozen=True)
class Usage:
    """Bytes of capsules by tier; shared ones count once."""

    device: int
    host: int
    disk: int


class Saving(Persisting):
    """The part of a session that names boundaries."""

    # -- save -----------------------------------------------------------------------------

    def save(self, name: str = '', *, note: str = '', pin: bool = False, persist: bool = False,
             overwrite: bool = False, lease_s: float = 0.0, request_id: str = '') -> CapsuleInfo:
        """Name the newest boundary. Never waits for an inference, nor for the disk.

        Raises Refusal: INVALID_NAME, INVALID_ARGUMENT, EXISTS, BUDGET_EXCEEDED, FAULT; with the
        ring off BUSY while an inference is in flight.
        """
        if name:
            check_name(name)
        if name == ORIGIN:
            raise Refusal(Code.INVALID_NAME, 'origin is the fresh start; choose another name')
        if len(note) > MAX_NOTE:
            raise Refusal(Code.INVALID_ARGUMENT, f'the note has {len(note)} characters, at most '
                          f'{MAX_NOTE} are kept')
        check_lease(lease_s)
        if not self.options.history:
            self._commit_live()
        with self._lock:
            if request_id and request_id in self._answers:
                return self._answers[request_id]
            self._check_fault()
            old = self._store.find(name) if name else None
            if old is not None and old.tier is not Tier.NONE and not overwrite:
                raise Refusal(Code.EXISTS, f'there is a capsule {name!r}; set overwrite or choose '
                              'another name')
            if persist:
                self._check_persist(replacing=old)
            newest = self._ring[-1]
            if newest.payload is None:
                raise self._busy()
            room = self._store.make_room(newest.payload, replacing=old)
            boundary = newest.held()
            if not boundary.pieces:  # a restored one has its rows
                try:
                    boundary.pieces = self._save_journals(boundary)
                except Refusal:
                    boundary.release()
                    raise
            self._carry_out(room)
            if old is not None:
                self._remove(old)
            capsule = self._enter(name or self._free_name(), boundary, note=note, pin=pin,
                                  lease_s=lease_s)
            self._parent = newest.parent = capsule.id
            info = self._tell(EventKind.SAVED, capsule)
            if persist:
                self.persist(capsule.name)
            if request_id:
                self._answers[request_id] = info
                while len(self._answers) > MAX_ANSWERS:
                    del self._answers[next(iter(self._answers))]
        self._flush_events()
        return info

    def _commit_live(self) -> None:
        """With the ring off: copy the live set now, if the newest boundary is still in it alone.

        Waits for the device thread, and so without the lock.
        """
        with self._lock:
            boundary = self._ring[-1]
            if boundary.payload is not None or self.fault is not None:
                return
            if self.in_flight is not None or self._moved:
                raise self._busy()
        if self._worker.is_current:
            self._copy_live(boundary)
        else:
            self._worker.call(lambda: self._copy_live(boundary)).result()

    def _copy_live(self, boundary: Boundary) -> None:
        """On the device thread: give a boundary that is the live set a slot of its own."""
        with self._lock:
            if self.in_flight is not None or self._moved or self._ring[-1] is not boundary:
                raise self._busy()
            slot = self._pool.take()
        try:
            self._live.save_plain(slot)
        except BaseException:
            with self._lock:
                slot.release()
            raise
        with self._lock:
            if self._ring[-1] is boundary and boundary.payload is None:
                boundary.payload = slot
            else:
                slot.release()

    def _busy(self) -> Refusal:
        return Refusal(Code.BUSY, 'history is 0, so a save is possible only between a step and the '
                       'next inference; try again, or set history to 1 or more')

    def _free_name(self) -> str:
        return next(n for n in (f'capsule-{i}' for i in self._names)
                    if self._store.find(n) is None)

    def _enter(self, name: str, boundary: Boundary, *, note: str = '', pin: bool = False,
               lease_s: float = 0.0) -> Capsule:
        capsule = Capsule(
            name, os.urandom(16).hex(), self._parent, note, boundary, boundary.tick,
            boundary.step, self.id, self.epoch, boundary.mark, self.state_nbytes, self.fingerprint,
            self._fingerprint_digest, self.exact, self._clock(), next(self._orders),
            self._store.use(), pin, self._steady() + lease_s if lease_s else 0.0)
        self._store.add(capsule)
        return capsule

    def _save_journals(self, boundary: Boundary) -> dict[str, Pieces]:
        """Keep the journals' rows: shared with the capsule that has most of them, else copied.

        The copies are ordered under the lock: a restore that lowers the journal comes after them.
        """
        out: dict[str, Pieces] = {}
        new: list[tuple[BufferSpec, int, int]] = []  # rows that nobody keeps yet
        for b in self._live.journals:
            group = b.spec.length or ''
            length, strands = boundary.lengths[group], boundary.strands[group]
            shared, source = 0, ()  # type: int, Pieces
            for c in self._store:
                if c.boundary is not None and b.spec.name in c.boundary.pieces:
                    n = journal.shared_rows(strands, length, c.boundary.strands[group],
                                            c.boundary.lengths[group])
                    if n > shared:
                        shared, source = n, c.boundary.pieces[b.spec.name]
            out[b.spec.name] = journal.cut(source, shared)
            if length > shared:
                new.append((b.spec, shared, length))
        try:
            if new and not self._stands(boundary):
                raise Refusal(Code.BUSY, f'rows of {new[0][0].name} that the newest boundary needs '
                              'are being rewritten by a prefill; try again after its step')
            self._check_rows(new, out)
            for spec, first, last in new:
                pieces = self._reserve_rows(spec, first, last)
                out[spec.name] += pieces
                for piece in pieces:
                    journal.copy_out(self.device, self._live.arena.buffers[spec.name],
                                     piece.segment)
        except Refusal:
            for pieces in out.values():
                journal.release(pieces)
            raise
        return out

    def _check_rows(self, wanted: Sequence[tuple[BufferSpec, int, int]],
                    held: Mapping[str, Pieces]) -> None:
        """Refuse rows `(journal, first, last)` for which evicting would not make room."""
        stays = {id(p.segment): p.segment for c in self._store
                 if c.boundary is not None and self._store.pinned(c)
                 for pieces in c.boundary.pieces.values() for p in pieces}
        stays |= {id(p.segment): p.segment for pieces in held.values() for p in pieces}
        if not self._segments.fits(stays.values(), [(journal.segment_bytes(spec, 1), last - first)
                                                    for spec, first, last in wanted]):
            need = sum(journal.segment_bytes(spec, last - first) for spec, first, last in wanted)
            raise Refusal(Code.BUDGET_EXCEEDED, f'{need} bytes of '
                          f'{", ".join(spec.name for spec, _, _ in wanted)} do not fit beside '
                          f'{sum(s.nbytes for s in stays.values())} bytes of pinned capsules and '
                          f'shared rows in segment_bytes {self._segments.nbytes}; drop one or '
                          'raise it')

    def _reserve_rows(self, spec: BufferSpec, first: int, last: int) -> Pieces:
        """Return room for rows of a journal, evicting least recently used capsules."""
        row = journal.segment_bytes(spec, 1)
        while (segments := self._segments.take(row, first, last - first)) is None:
            victims = [c for c in self._store if c.boundary is not None and c.boundary.pieces
                       and not self._store.pinned(c)]
            if not victims:
                raise Refusal(Code.BUDGET_EXCEEDED, f'the holes in the {self._segments.nbytes} '
                              f'bytes for journal rows are too small for {last - first} rows of '
                              f'{spec.name}; raise segment_bytes')
            self._evict(min(victims, key=lambda c: c.used))
        return tuple(Piece(s, s.first, s.first + s.rows) for s in segments)

    # -- room -----------------------------------------------------------------------------

    def _carry_out(self, room: Room) -> None:
        for capsule in room.evict:
            self._evict(capsule)
        groups: dict[int, list[Capsule]] = {}
        for capsule in room.demote:
            if capsule.boundary is None:  # evicted meanwhile for the room of its journal rows
                continue
            capsule.moving = True
            groups.setdefault(id(capsule.boundary and capsule.boundary.payload), []).append(capsule)
        for group in groups.values():
            self._worker.post(lambda group=group: self._demote(group))  # type: ignore[misc]

    def _demote(self, group: list[Capsule]) -> None:
        """On the device thread: copy a shared slot to the host and let it go."""
        with self._lock:
            group = [c for c in group if c.boundary is not None and c.boundary.payload is not None]
            target = self._host_blocks.take_spare() if group else None
        if not group:
            return
        assert group[0].boundary is not None
        assert group[0].boundary.payload is not None
        source = group[0].boundary.payload
        try:
            target = target or self._host_blocks.allocate()
            self.device.copy(target.block, 0, source.block, source.offset, source.nbytes)
            self.device.sync()
        except Exception as error:
            code, text = told(error)
            with self._lock:
                if target is not None:
                    target.release()
                for c in group:
                    c.moving = False
                    self._evict(c)
                    self._events[-1] = replace(self._events[-1], code=code, message=text)
        else:
            with self._lock:
                for c in group:
                    c.moving = False
                    if c.boundary is not None and c.boundary.payload is source:
                        c.boundary.payload = target.hold()
                        source.release()
                        self._tell(EventKind.MOVED, c)
                target.release()
        self._flush_events()

    # -- keeping --------------------------------------------------------------------------

    def drop(self, name: str, *, if_id: str = '', if_epoch: int = 0) -> CapsuleInfo:
        """Forget a capsule, pinned or not; its children take its parent. Never `origin`.

        Raises Refusal: INVALID_NAME, NOT_FOUND, STALE_EPOCH.
        """
        if not name or name == ORIGIN:
            raise Refusal(Code.INVALID_NAME, f'drop needs the name of a capsule, got {name!r}; '
                          'origin cannot be dropped')
        check_name(name)
        with self._lock:
            self._check_epoch(if_epoch)
            capsule = self._store.find(name)
            if capsule is None or (if_id and capsule.id != if_id):
                raise Refusal(Code.NOT_FOUND, f'there is no capsule {name!r}'
                              + (f' with id {if_id}' if if_id else ''))
            info = capsule.info()
            self._remove(capsule)
            self._events.append(Event(EventKind.DROPPED, info, self.epoch))
        self._flush_events()
        return info

    def _remove(self, capsule: Capsule) -> None:
        """Take a capsule out of the tree; what descends from it takes its parent."""
        if self._parent == capsule.id:
            self._parent = capsule.parent
        for b in self._ring:
            if b.parent == capsule.id:
                b.parent = capsule.parent
        self._store.remove(capsule)
        self._forget_file(capsule)

    def keep(self, name: str = '', *, pin: bool | None = None, persist: bool = False,
             lease_s: float = 0.0) -> CapsuleInfo:
        """Pin, unpin, lease or persist a capsule ('' the newest).

        Raises Refusal: NOT_FOUND, EVICTED, INVALID_ARGUMENT.
        """
        check_lease(lease_s)
        with self._lock:
            capsule = self._store.get(name)
            if capsule.name == ORIGIN and pin is False:
                raise Refusal(Code.INVALID_NAME, 'origin cannot be unpinned')
            if persist:
                self._check_persist(capsule)
            if pin is not None:
                capsule.pinned = pin
            if lease_s:
                capsule.lease_until = self._steady() + lease_s
            if persist:
                self.persist(capsule.name)
            capsule.used = self._store.use()
            self._tell(EventKind.KEPT, capsule)
            info = capsule.info()
        self._flush_events()
        return info

    def list(self, prefix: str = '') -> list[CapsuleInfo]:
        """Return capsules and marks whose name starts with `prefix`, oldest first, with origin."""
        with self._lock:
            return [c.info() for c in self._store if c.name.startswith(prefix)]

    def usage(self) -> Usage:
        """Return the bytes that capsules take, origin included."""
        with self._lock:
            device = {id(b.payload): b.payload.nbytes for b in
                      (c.boundary for c in self._store) if b is not None
                      and b.payload is not None and b.payload.tier is Tier.DEVICE}
            return Usage(sum(device.values()) + self._segments.used,
                         self._store.host_bytes(),
                         sum(c.file_bytes for c in self._store if c.durable))

    def _tell(self, kind: EventKind, capsule: Capsule) -> CapsuleInfo:
        info = capsule.info()
        self._events.append(made(Event, kind=kind, info=info, epoch=self.epoch))
        return info


def check_lease(lease_s: float) -> None:
    """Refuse a lease that is no positive, finite number of seconds."""
    if not 0 <= lease_s < 1e9:
        raise Refusal(Code.INVALID_ARGUMENT, f'lease_s is {lease_s}; give seconds, 0 for none')
