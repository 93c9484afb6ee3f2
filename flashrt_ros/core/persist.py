"""The DISK tier: capsules to files in the background, and back after a restart.

`persist` answers at once; bytes are gathered on the device thread, written on the spill thread, and
PERSISTED follows when the file is synced. A capsule on disk is read, checked against its digest and
against this session's layout, and placed on the host before it can be restored.
"""
from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.core import codec, disk, journal
from flashrt_ros.core.capsule import Boundary, Capsule, CapsuleInfo, Event, EventKind, Latch, Mark
from flashrt_ros.core.codec import Image, Tensor
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.journal import Piece, Pieces
from flashrt_ros.core.layout import BufferSpec, Fingerprint, Role, Space
from flashrt_ros.core.parts import Parts
from flashrt_ros.core.payload import Payload, Tier


class Persisting(Parts):
    """The part of a session that knows files."""

    # -- out ------------------------------------------------------------------------------

    def _check_persist(self) -> disk.CapsuleFolder:
        if self._folder is None:
            raise Refusal(Code.UNSUPPORTED, 'persist needs a folder; set capsule_dir')
        return self._folder

    def persist(self, name: str = '') -> CapsuleInfo:
        """Order a capsule ('' the newest) to be written; PERSISTED or PERSIST_FAILED follows.

        Raises Refusal: UNSUPPORTED without a folder, NOT_FOUND, EVICTED, BUDGET_EXCEEDED.
        """
        self._check_persist()
        with self._lock:
            capsule = self._store.get(name)
            if not capsule.durable and not capsule.writing:
                self._check_disk_room(capsule)
                capsule.writing = True
                assert capsule.boundary is not None
                held = capsule.boundary.held()
                self._worker.post(lambda: self._gather(capsule, held))
            return capsule.info()

    def _check_disk_room(self, capsule: Capsule) -> None:
        used = sum(c.file_bytes for c in self._store if c.durable or c.writing)
        if used + capsule.nbytes > self.options.disk_bytes:
            raise Refusal(Code.BUDGET_EXCEEDED, f'{used} of disk_bytes {self.options.disk_bytes} '
                          f'are in use and the capsule has {capsule.nbytes}; drop durable '
                          'capsules or raise it')

    def _gather(self, capsule: Capsule, boundary: Boundary) -> None:
        """On the device thread: bring all bytes to the host."""
        try:
            image = self._image(capsule, boundary)
        except Exception as error:
            self._failed(capsule, error)
        else:
            self._spill.post(lambda: self._write(capsule, image))
        finally:
            with self._lock:
                boundary.release()

    def _image(self, capsule: Capsule, boundary: Boundary) -> Image:
        tensors: dict[str, Tensor] = {}
        assert boundary.payload is not None
        data = self._to_host(boundary.payload)
        for name, b in self._live.arena.buffers.items():
            if b.spec.role is not Role.STATE:
                continue
            if b.spec.is_journal:
                rows = boundary.lengths[b.spec.length or '']
                tensors['state/' + name] = Tensor(
                    b.spec.dtype, with_rows(b.spec, rows),
                    self._rows_to_host(b.spec, boundary.pieces.get(name, ()), rows))
            elif b.spec.space is Space.DEVICE:
                at = b.offset - self._live.plain.offset
                tensors['state/' + name] = Tensor(b.spec.dtype, b.spec.shape,
                                                  data[at:at + b.spec.nbytes])
            else:
                at = b.offset - self._live.host_region.offset
                tensors['state/' + name] = Tensor(b.spec.dtype, b.spec.shape,
                                                  boundary.host[at:at + b.spec.nbytes])
        latch = boundary.pending
        if latch is not None:
            for name, raw in latch.inputs.items():
                spec = self.layout[name]
                tensors['latch/' + name] = Tensor(spec.dtype, spec.shape, raw)
        fp = capsule.fingerprint
        return Image({
            'format': codec.FORMAT, 'name': capsule.name, 'id': capsule.id,
            'parent': capsule.parent, 'note': capsule.note, 'tick': capsule.tick,
            'step': capsule.step, 'session': capsule.session, 'epoch': capsule.epoch,
            'stamp_ns': capsule.mark.stamp_ns, 'saved_ns': capsule.saved_ns,
            'exact': capsule.exact,
            'witness': {k: float(v) for k, v in capsule.mark.witness.items()},
            'witness_stamps': dict(capsule.mark.witness_stamps),
            'meaning': dict(fp.meaning), 'exactness': dict(fp.exactness),
            'lengths': dict(boundary.lengths),
            'latch': None if latch is None else {'step': latch.step, 'stamp_ns': latch.stamp_ns},
        }, tensors)

    def _to_host(self, payload: Payload) -> bytes:
        """Return a payload's bytes. On the device thread."""
        block = self.device.alloc(max(payload.nbytes, 1), Space.HOST)
        try:
            self.device.copy(block, 0, payload.block, payload.offset, payload.nbytes)
            self.device.sync()
            view = self.device.view(block, 0, payload.nbytes)
            assert view is not None
            return view.tobytes()
        finally:
            self.device.free(block)

    def _rows_to_host(self, spec: BufferSpec, pieces: Pieces, rows: int) -> bytes:
        n = journal.segment_bytes(spec, rows)
        block = self.device.alloc(max(n, 1), Space.HOST)
        try:
            journal.read_rows(self.device, spec, pieces, rows, block)
            self.device.sync()
            view = self.device.view(block, 0, n)
            assert view is not None
            return view.tobytes()
        finally:
            self.device.free(block)

    def _write(self, capsule: Capsule, image: Image) -> None:
        """On the spill thread: encode, write, sync; then say so."""
        assert self._folder is not None
        try:
            data = codec.encode(image)
            sha256 = self._folder.write(capsule.name, data)
        except Exception as error:
            self._failed(capsule, error)
            return
        with self._lock:
            gone = self._store.by_id(capsule.id) is not capsule
            capsule.writing = False
            if not gone:
                capsule.durable = True
                capsule.file_bytes = len(data)
                capsule.uri = self._folder.file(capsule.name).absolute().as_uri()
                capsule.sha256 = sha256
                self._events.append(Event(EventKind.PERSISTED, capsule.info(), self.epoch,
                                          uri=capsule.uri, sha256=sha256))
            replaced = self._store.find(capsule.name)
        if gone and (replaced is None or not (replaced.durable or replaced.writing)):
            self._folder.remove(capsule.name)  # dropped while it was written
        self._flush_events()

    def _failed(self, capsule: Capsule, error: Exception) -> None:
        code = error.code if isinstance(error, Refusal) else Code.INTERNAL
        text = error.message if isinstance(error, Refusal) else f'{type(error).__name__}: {error}'
        with self._lock:
            capsule.writing = False
            self._events.append(Event(EventKind.PERSIST_FAILED, capsule.info(), self.epoch, code,
                                      text))
        self._flush_events()

    def _forget_file(self, capsule: Capsule) -> None:
        """Remove the file of a dropped capsule, in the background."""
        folder = self._folder
        if folder is not None and capsule.durable:
            self._spill.post(lambda: self._remove_file(folder, capsule))

    def _remove_file(self, folder: disk.CapsuleFolder, capsule: Capsule) -> None:
        with self._lock:
            now = self._store.find(capsule.name)
            if now is not None and (now.durable or now.writing):
                return  # another capsule of that name has the file now
        try:
            folder.remove(capsule.name)
        except Refusal as error:
            self._failed(capsule, error)

    # -- in -------------------------------------------------------------------------------

    def _scan_folder(self) -> None:
        """Enter what lies in the folder; what cannot be read is told by name and left alone."""
        if self._folder is None:
            return
        found, bad = self._folder.scan()
        for meta, nbytes in sorted(found, key=lambda f: (f[0]['saved_ns'], f[0]['name'])):
            self._enter_file(meta, nbytes, self._folder.file(meta['name']))
        for refusal in bad:
            self._events.append(Event(EventKind.REFUSED, CapsuleInfo(), self.epoch, refusal.code,
                                      f'skipped: {refusal.message}'))

    def _enter_file(self, meta: Mapping[str, Any], nbytes: int, path: Path) -> Capsule:
        fp = Fingerprint(meta['meaning'], meta['exactness'])
        capsule = Capsule(
            meta['name'], meta['id'], meta['parent'], meta['note'], None, meta['tick'],
            meta['step'], meta['session'], meta['epoch'],
            Mark(meta['stamp_ns'], meta['witness'], meta['witness_stamps']), self.state_nbytes,
            fp, fp.digest(), meta['exact'], meta['saved_ns'], next(self._orders),
            self._store.use(), durable=True, uri=path.absolute().as_uri(), file_bytes=nbytes)
        self._store.add(capsule)
        return capsule

    def adopt(self, path: Path) -> Future[CapsuleInfo]:
        """Read a capsule from any file into memory; the store's name is the file's."""
        return self._spill.call(lambda: self._adopt(path))

    def _adopt(self, path: Path) -> CapsuleInfo:
        image = codec.decode(disk.read(path, self._file_limit()))
        with self._lock:
            old = self._store.by_id(image.meta['id'])
            capsule = old or self._enter_file(image.meta, 0, path)
            if old is None:
                capsule.durable = False  # the file is not ours to keep
        return self._worker.call(lambda: self._place(capsule, image)).result()

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
        folder = self._check_persist()
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

    def _place(self, capsule: Capsule, image: Image) -> CapsuleInfo:
        """On the device thread: give a decoded capsule a place in memory."""
        self.fingerprint.check(Fingerprint(image.meta['meaning'], image.meta['exactness']),
                               accept_inexact=True)
        check_tensors(self.layout, image)
        with self._lock:
            if capsule.boundary is not None:
                return capsule.info()
            for c in self._store.make_host_room(self._host_blocks.nbytes):
                self._evict(c)
            payload = self._host_blocks.take_spare()
        payload = payload or self._host_blocks.allocate()
        pieces: dict[str, Pieces] = {}
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
            capsule.boundary = boundary
            capsule.used = self._store.use()
            self._events.append(Event(EventKind.LOADED, capsule.info(), self.epoch,
                                      uri=capsule.uri, sha256=capsule.sha256))
            info = capsule.info()
        self._flush_events()
        return info

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
        try:
            for b in self._live.journals:
                rows = image.meta['lengths'][b.spec.length or '']
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
                        segment = self._reserve_rows(b.spec, 0, rows, out)
                    self.device.copy(segment.block, segment.offset, block, 0, raw.nbytes)
                    self.device.sync()
                finally:
                    self.device.free(block)
                out[b.spec.name] = (Piece(segment, 0, rows),)
        except BaseException:
            with self._lock:
                for pieces in out.values():
                    journal.release(pieces)
            raise
        return out


def with_rows(spec: BufferSpec, rows: int) -> tuple[int, ...]:
    """Return a journal's shape with `rows` rows."""
    shape = list(spec.shape)
    assert spec.journal_axis is not None
    shape[spec.journal_axis] = rows
    return tuple(shape)


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

