"""The DISK tier, the way out: capsules to files in the background.

`persist` answers at once; bytes are gathered on the device thread, written on the spill thread, and
PERSISTED follows when the file is synced. load.py brings them back.
"""
from __future__ import annotations

from flashrt_ros.core import codec, disk, journal
from flashrt_ros.core.capsule import (
    ORIGIN,
    Boundary,
    Capsule,
    CapsuleInfo,
    Event,
    EventKind,
)
from flashrt_ros.core.codec import Image, Tensor
from flashrt_ros.core.errors import Code, Refusal, told
from flashrt_ros.core.journal import Pieces
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.core.parts import Parts
from flashrt_ros.core.payload import Payload


class Persisting(Parts):
    """The part of a session that writes files."""

    def _check_persist(self, capsule: Capsule | None = None, *, replacing: Capsule | None = None
                       ) -> None:
        """Refuse what could not be written: a capsule, or one that is about to be saved."""
        if self._folder is None:
            raise Refusal(Code.UNSUPPORTED, 'persist needs a folder; set capsule_dir')
        if capsule is not None and capsule.name == ORIGIN:
            raise Refusal(Code.INVALID_NAME, 'origin is made anew by every configure and is never '
                          'written; save it under another name')
        if capsule is None or not (capsule.durable or capsule.writing):
            self._check_disk_room(self.state_nbytes, replacing)

    def _check_disk_room(self, nbytes: int, but: Capsule | None) -> None:
        used = sum(c.file_bytes for c in self._store if c is not but)
        if used + nbytes > self.options.disk_bytes:
            raise Refusal(Code.BUDGET_EXCEEDED, f'{used} of disk_bytes {self.options.disk_bytes} '
                          f'are in use and the capsule has {nbytes}; drop durable capsules or '
                          'raise it')

    def persist(self, name: str = '') -> CapsuleInfo:
        """Order a capsule ('' the newest) to be written; PERSISTED or PERSIST_FAILED follows.

        Raises Refusal: UNSUPPORTED without a folder, NOT_FOUND, EVICTED, BUDGET_EXCEEDED.
        """
        with self._lock:
            capsule = self._store.get(name)
            self._check_persist(capsule)
            if not capsule.durable and not capsule.writing:
                capsule.writing = True
                capsule.file_bytes = capsule.nbytes  # about; known once it is encoded
                assert capsule.boundary is not None
                held = capsule.boundary.held()
                self._worker.post(lambda: self._gather(capsule, held))
            return capsule.info()

    def _gather(self, capsule: Capsule, boundary: Boundary) -> None:
        """On the device thread: bring all bytes to the host."""
        try:
            if self._gone(capsule):
                return
            image = self._image(capsule, boundary)
        except Exception as error:
            self._failed(capsule, error)
        else:
            self._spill.post(lambda: self._write(capsule, image))
        finally:
            with self._lock:
                boundary.release()

    def _gone(self, capsule: Capsule) -> bool:
        """Whether it was dropped or overwritten since; its file is nobody's then."""
        with self._lock:
            return self._store.by_id(capsule.id) is not capsule

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
        if self._gone(capsule):
            return
        try:
            data = codec.encode(image)
            with self._lock:
                self._check_disk_room(len(data), capsule)
                capsule.file_bytes = len(data)
            sha256 = self._folder.write(capsule.name, data)
        except Exception as error:
            self._failed(capsule, error)
            return
        with self._lock:
            gone = self._gone(capsule)
            capsule.writing = False
            if not gone:
                capsule.durable = True
                capsule.uri = self._folder.file(capsule.name).absolute().as_uri()
                capsule.sha256 = sha256
                self._events.append(Event(EventKind.PERSISTED, capsule.info(), self.epoch,
                                          uri=capsule.uri, sha256=sha256))
            replaced = self._store.find(capsule.name)
        if gone and (replaced is None or not (replaced.durable or replaced.writing)):
            self._remove_file(self._folder, capsule)  # dropped while it was written
        self._flush_events()

    def _failed(self, capsule: Capsule, error: Exception) -> None:
        code, text = told(error)
        with self._lock:
            capsule.writing = False
            capsule.file_bytes = 0
            self._events.append(Event(EventKind.PERSIST_FAILED, capsule.info(), self.epoch, code,
                                      text))
        self._flush_events()

    def _forget_file(self, capsule: Capsule) -> None:
        """Remove the file of a dropped capsule, in the background; where its own was not written
        yet, or could not be, that of an earlier one of its name."""
        folder = self._folder
        if folder is not None:
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


def with_rows(spec: BufferSpec, rows: int) -> tuple[int, ...]:
    """Return a journal's shape with `rows` rows."""
    shape = list(spec.shape)
    assert spec.journal_axis is not None
    shape[spec.journal_axis] = rows
    return tuple(shape)
