"""The DISK tier, the way in: capsules from files, also of a session before this one.

A capsule on disk is read, checked against its digest and against this session's layout, and placed
on the host before it can be restored. What is not whole is refused and leaves nothing behind.
"""
from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.core import codec, disk, journal
from flashrt_ros.core.capsule import (
    ORIGIN,
    Boundary,
    Capsule,
    CapsuleInfo,
    Event,
    EventKind,
    Latch,
    Mark,
)
from flashrt_ros.core.codec import Image
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.journal import Pieces
from flashrt_ros.core.layout import BufferSpec, Fingerprint, Role, Space
from flashrt_ros.core.parts import Parts
from flashrt_ros.core.payload import Payload, Tier
from flashrt_ros.core.persist import with_rows


class Loading(Parts):
    """The part of a session that reads files."""

    def _scan_folder(self) -> None:
        """Enter what lies in the folder; what cannot be read is told by name and left alone."""
        if self._folder is None:
            return
        found, bad = self._folder.scan()
        for meta, nbytes in sorted(found, key=lambda f: (f[0]['saved_ns'], f[0]['name'])):
            path = self._folder.file(meta['name'])
            if meta['name'] == ORIGIN or self._store.by_id(meta['id']) is not None:
                bad.append(Refusal(Code.EXISTS, f'{path.name}: there is a capsule of this '
                                   + ('name' if meta['name'] == ORIGIN else 'id') + ' already'))
            else:
                self._store.add(self._of_file(meta, nbytes, path))
        for refusal in bad:
            self._events.append(Event(EventKind.REFUSED, CapsuleInfo(), self.epoch, refusal.code,
                                      f'skipped: {refusal.message}'))

    def _of_file(self, meta: Mapping[str, Any], nbytes: int, path: Path) -> Capsule:
        fp = Fingerprint(meta['meaning'], meta['exactness'])
        parent, above = meta['parent'], self._store.by_id(meta['parent'])
        while above is not None and above.parent != meta['id']:
            above = self._store.by_id(above.parent)
        if above is not None or parent == meta['id']:
            parent = ''                     # a circle that somebody made up
        return Capsule(
            meta['name'], meta['id'], parent, meta['note'], None, meta['tick'],
            meta['step'], meta['session'], meta['epoch'],
            Mark(meta['stamp_ns'], meta['witness'], meta['witness_stamps']), self.state_nbytes,
            fp, fp.digest(), meta['exact'], meta['saved_ns'], next(self._orders),
            self._store.use(), durable=nbytes > 0, uri=path.absolute().as_uri(), file_bytes=nbytes)

    def adopt(self, path: Path, *, overwrite: bool = False) -> Future[CapsuleInfo]:
        """Read a capsule from any file into memory, under the name that it has there.

        In the future: Refusal as for `load`, and EXISTS where the name is another capsule's.
        """
        return self._spill.call(lambda: self._adopt(path, overwrite))

    def _adopt(self, path: Path, overwrite: bool) -> CapsuleInfo:
        image = codec.decode(disk.read(path, self._file_limit()))
        with self._lock:
            # the file is not ours to keep: 0 bytes of the disk's budget, and not durable
            capsule = (self._store.by_id(image.meta['id'])
                       or self._of_file(image.meta, 0, path))
        return self._worker.call(lambda: self._place(capsule, image, adopt=True,
                                                     overwrite=overwrite)).result()

    def load(self, name: str = '', *, if_id: str = '') -> Future[CapsuleInfo]:
        """Bring a capsule ('' the newest) from disk to the host; at once where it is in memory.

        Raises Refusal at once: NOT_FOUND, EVICTED; in the future: CORRUPT, IO, BUDGET_EXCEEDED,
        FINGERPRINT_MISMATCH.
        """
        with self._lock:
            capsule = self._store.get(name, if_id)
            if capsule.tier is not Tier.DISK:
                done: Future[CapsuleInfo] = Future()
                done.set_result(capsule.info())
                return done
            self.fingerprint.check(capsule.fingerprint, accept_inexact=True)
        folder = self._folder
        assert folder is not None  # or nothing could rest on disk
        return self._spill.call(lambda: self._read_file(folder, capsule))

    def _read_file(self, folder: disk.CapsuleFolder, capsule: Capsule) -> CapsuleInfo:
        image = codec.decode(disk.read(folder.file(capsule.name), self._file_limit()))
        if image.meta['id'] != capsule.id:
            raise Refusal(Code.CORRUPT, f'{capsule.name}: the file holds capsule '
                          f'{image.meta["id"]}, not {capsule.id}; it was replaced')
        return self._worker.call(lambda: self._place(capsule, image)).result()

    def _file_limit(self) -> int:
        return (self.layout.nbytes(Role.STATE) + self.layout.nbytes(Role.INPUT)
                + codec.MAX_HEADER + 4096)

    def _place(self, capsule: Capsule, image: Image, *, adopt: bool = False,
               overwrite: bool = False) -> CapsuleInfo:
        """On the device thread: give a decoded capsule a place in memory."""
        self.fingerprint.check(Fingerprint(image.meta['meaning'], image.meta['exactness']),
                               accept_inexact=True)
        check_tensors(self.layout, image)
        with self._lock:
            if capsule.boundary is not None:
                return capsule.info()
            self._check_place(capsule, adopt, overwrite)
            for c in self._store.make_host_room(self._host_blocks.nbytes):
                self._evict(c)
            payload = self._host_blocks.take_spare()
        payload = payload or self._host_blocks.allocate()
        try:
            self._fill(payload, image)
            pieces = self._place_journals(image)
        except BaseException:
            with self._lock:
                payload.release()
            raise
        latch = image.meta['latch']
        pending = None if latch is None else Latch(
            {n[len('latch/'):]: bytes(t.data) for n, t in image.tensors.items()
             if n.startswith('latch/')}, latch['step'], latch['stamp_ns'])
        boundary = Boundary(
            payload, self._host_of(image), capsule.tick, capsule.step, capsule.mark, pending,
            dict(image.meta['lengths']),
            {n: ((next(self._strand_ids), 0),) for n in image.meta['lengths']}, capsule.parent,
            pieces)
        with self._lock:
            try:
                self._check_place(capsule, adopt, overwrite)
                # a save beside this may have planned for the same room
                for c in self._store.make_host_room(payload.nbytes):
                    self._evict(c)
            except Refusal:
                boundary.release()
                raise
            if adopt and self._store.by_id(capsule.id) is None:
                old = self._store.find(capsule.name)
                if old is not None:
                    self._remove(old)
                self._store.add(capsule)
            capsule.boundary = boundary
            capsule.used = self._store.use()
            self._events.append(Event(EventKind.LOADED, capsule.info(), self.epoch,
                                      uri=capsule.uri, sha256=capsule.sha256))
            info = capsule.info()
        self._flush_events()
        return info

    def _check_place(self, capsule: Capsule, adopt: bool, overwrite: bool) -> None:
        """Refuse a capsule that was dropped since, or whose name is another one's."""
        if self._store.by_id(capsule.id) is capsule:
            return
        if not adopt:
            raise Refusal(Code.NOT_FOUND, f'capsule {capsule.name!r} was dropped while it was read')
        old = self._store.find(capsule.name)
        if old is not None and (old.name == ORIGIN or (
                old.tier is not Tier.NONE and not overwrite)):
            raise Refusal(Code.EXISTS, f'there is a capsule {capsule.name!r} already; drop '
                          'it first')

    def _fill(self, payload: Payload, image: Image) -> None:
        view = self.device.view(payload.block, 0, payload.nbytes)
        assert view is not None
        for name, b in self._live.arena.buffers.items():
            if b.spec.role is Role.STATE and b.spec.space is Space.DEVICE and (
                    not b.spec.is_journal):
                at = b.offset - self._live.plain.offset
                view[at:at + b.spec.nbytes] = np.frombuffer(
                    image.tensors['state/' + name].data, np.uint8)

    def _host_of(self, image: Image) -> bytes:
        region = self._live.host_region
        block = np.zeros(region.nbytes, np.uint8)
        for name, b in self._live.arena.buffers.items():
            if b.spec.role is Role.STATE and b.spec.space is Space.HOST:
                at = b.offset - region.offset
                block[at:at + b.spec.nbytes] = np.frombuffer(
                    image.tensors['state/' + name].data, np.uint8)
        return block.tobytes()

    def _place_journals(self, image: Image) -> dict[str, Pieces]:
        out: dict[str, Pieces] = {}
        lengths = image.meta['lengths']
        with self._lock:
            self._check_rows([(b.spec, 0, lengths[b.spec.length or ''])
                              for b in self._live.journals], {})
        try:
            for b in self._live.journals:
                rows = lengths[b.spec.length or '']
                out[b.spec.name] = ()
                if not rows:
                    continue
                raw = np.frombuffer(image.tensors['state/' + b.spec.name].data, np.uint8)
                block = self.device.alloc(raw.nbytes, Space.HOST)
                try:
                    view = self.device.view(block, 0, raw.nbytes)
                    assert view is not None
                    view[:] = raw
                    with self._lock:
                        out[b.spec.name] = self._reserve_rows(b.spec, 0, rows)
                    journal.write_rows(self.device, b.spec, out[b.spec.name], rows, block)
                    self.device.sync()
                finally:
                    self.device.free(block)
        except BaseException:
            with self._lock:
                for pieces in out.values():
                    journal.release(pieces)
            raise
        return out


def check_tensors(layout: Mapping[str, BufferSpec], image: Image) -> None:
    """Refuse a file whose tensors are not exactly the STATE of this layout."""
    lengths = image.meta['lengths']
    groups = {s.length: s for s in layout.values() if s.is_journal}
    if lengths.keys() != groups.keys():
        raise Refusal(Code.CORRUPT, f'the capsule counts journals {sorted(lengths)}, this policy '
                      f'has {sorted(map(str, groups))}')
    expected: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, spec in layout.items():
        if spec.role is Role.STATE:
            shape = spec.shape
            if spec.is_journal:
                rows = lengths[spec.length]
                if not 0 <= rows <= spec.rows()[1]:
                    raise Refusal(Code.CORRUPT, f'the capsule has {rows} rows of {name}, which '
                                  f'holds {spec.rows()[1]}')
                shape = with_rows(spec, rows)
            expected['state/' + name] = (spec.dtype, shape)
        elif spec.role is Role.INPUT and 'latch/' + name in image.tensors:
            expected['latch/' + name] = (spec.dtype, spec.shape)
    found = {n: (t.dtype, t.shape) for n, t in image.tensors.items()}
    if found != expected:
        wrong = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
        raise Refusal(Code.CORRUPT, f'the capsule\'s tensors {", ".join(wrong[:5])} are not those '
                      'of this policy')
    for group, spec in groups.items():
        raw = np.frombuffer(image.tensors[f'state/{group}'].data, np.int64)
        if int(raw[0]) != lengths[group]:
            raise Refusal(Code.CORRUPT, f'the capsule says {lengths[group]} rows of {spec.name} '
                          f'and its state {int(raw[0])}')
