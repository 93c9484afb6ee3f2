"""What an engine file is, told from its first bytes: no engine is loaded to find that out.

A file may be a plan as TensorRT writes it, with a note beside it (`NAME.engine.json`) where this
package built it, or an entry of the engine cache, which holds note and plan in one file. The header
of a plan is not documented; tag and version stand where NVIDIA's own `trtexec
--getPlanVersionOnly` reads them, the length of a TensorRT-RTX plan where all of its versions so far
put it. What cannot be told here is left to the library.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import hashlib
import json
import os
from pathlib import Path
import struct
import tempfile
from typing import Any, BinaryIO

from flashrt_ros.backends.tensorrt_api import EngineTensor, Library, version_tuple
from flashrt_ros.core.errors import Code, Refusal

HEADER = 64                      # bytes of a plan that tell what it is
TAGS = {b'ftrt': 'tensorrt', b'vtrt': 'tensorrt_rtx'}
MAGIC = b'FRTENG\x00\x01'        # of an entry of the engine cache
MAX_NOTE = 1 << 20
FORMAT = 1


@dataclass(frozen=True)
class PlanHeader:
    """The first bytes of a plan."""

    library: str
    version: tuple[int, ...]     # empty where this header's layout is unknown
    nbytes: int | None           # length of the whole plan, where the header tells

    @property
    def title(self) -> str:
        """Library and version, for messages."""
        name = 'TensorRT-RTX' if self.library == 'tensorrt_rtx' else 'TensorRT'
        return f'{name} {".".join(map(str, self.version)) or "of an unknown version"}'


@dataclass(frozen=True)
class Note:
    """What this package writes down about an engine that it builds."""

    key: Mapping[str, Any]       # source, library, version, arch, precision, …
    tensors: tuple[EngineTensor, ...]
    nbytes: int
    sha256: str
    capturable: bool = True

    def to_json(self) -> bytes:
        """Return it as JSON."""
        return json.dumps({'format': FORMAT, 'key': dict(self.key), 'nbytes': self.nbytes,
                           'sha256': self.sha256, 'capturable': self.capturable,
                           'tensors': [t.describe() for t in self.tensors]}, indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Note:
        """Read it; raises ValueError for anything else."""
        try:
            raw = json.loads(data)
            if raw['format'] != FORMAT:
                raise ValueError(f'format {raw["format"]!r}, expected {FORMAT}')
            tensors = tuple(EngineTensor(str(t['name']), bool(t['input']),
                                         tuple(int(n) for n in t['shape']), str(t['dtype']))
                            for t in raw['tensors'])
            return cls(dict(raw['key']), tensors, int(raw['nbytes']), str(raw['sha256']),
                       bool(raw['capturable']))
        except (KeyError, TypeError, UnicodeDecodeError, RecursionError) as e:
            raise ValueError(f'not a note: {e!r}') from e


def note_of(plan: bytes, key: Mapping[str, Any], tensors: tuple[EngineTensor, ...],
            capturable: bool) -> Note:
    """Return the note of a plan."""
    return Note(key, tensors, len(plan), hashlib.sha256(plan).hexdigest(), capturable)


def plan_header(head: bytes) -> PlanHeader | None:
    """Read the first `HEADER` bytes; None if they are no plan's."""
    library = TAGS.get(head[:4])
    if library is None or len(head) < 28:
        return None
    serialisation, = struct.unpack_from('<I', head, 4)
    if serialisation != 0:
        return PlanHeader(library, (), None)
    length = struct.unpack_from('<Q', head, 16)[0] if library == 'tensorrt_rtx' else None
    return PlanHeader(library, tuple(head[24:28]), length)


def same_version(header: PlanHeader, library: Library) -> bool:
    """Whether a plan was written by this very version; an unknown layout is not."""
    ours = version_tuple(library.version)
    return bool(header.version) and header.version == tuple(
        n & 0xFF for n in (*ours, 0, 0, 0, 0)[:4])


def check_plan(path: Path, size: int, header: PlanHeader | None, library: Library | None) -> None:
    """Refuse a file that is no plan, a cut one, or one of another library or version."""
    if header is None:
        raise Refusal(Code.CORRUPT, f'{path} is not a TensorRT engine; build one with '
                      'flashrt-ros build MODEL.onnx -o ENGINE')
    if header.nbytes is not None and header.nbytes != size:
        raise Refusal(Code.CORRUPT, f'{path} has {size} bytes, its header says {header.nbytes}: '
                      'the copy is incomplete or damaged; copy or build it again')
    if library is not None and (header.library != library.name
                                or (header.version and not same_version(header, library))):
        raise Refusal(Code.UNSUPPORTED, f'{path} was built by {header.title}, expected '
                      f'{library.title}: engines are not portable between versions; build it '
                      'again with flashrt-ros build, or name the ONNX file as the model')


@dataclass(frozen=True)
class EngineFile:
    """An engine file: where its plan starts, and what was noted about it."""

    path: Path
    offset: int                  # of the plan
    size: int                    # bytes of the plan
    header: PlanHeader | None
    note: Note | None
    remark: str = ''             # why a note was not believed

    def read(self) -> bytes:
        """Return the plan. Raises CORRUPT where it is not the one of the note."""
        with self.path.open('rb') as f:
            f.seek(self.offset)
            plan = f.read()
        if self.note is not None and (
                len(plan) != self.note.nbytes
                or hashlib.sha256(plan).hexdigest() != self.note.sha256):
            raise Refusal(Code.CORRUPT, f'{self.path}: the engine is not the one that was '
                          'written (its digest differs); delete it and build again')
        return plan


def open_engine(path: Path) -> EngineFile:
    """Read header and note, not the plan. Raises Refusal(NOT_FOUND, IO, CORRUPT)."""
    try:
        with path.open('rb') as f:
            size = os.fstat(f.fileno()).st_size
            head = f.read(HEADER)
            if head[:len(MAGIC)] == MAGIC:
                return _open_entry(path, f, size)
    except FileNotFoundError as e:
        raise Refusal(Code.NOT_FOUND, f'{path} does not exist') from e
    except OSError as e:
        raise Refusal(Code.IO, f'{path} cannot be read: {e}') from e
    note, remark = _note_beside(path, size)
    return EngineFile(path, 0, size, plan_header(head), note, remark)


def _open_entry(path: Path, f: BinaryIO, size: int) -> EngineFile:
    f.seek(len(MAGIC))
    raw = f.read(8)
    length = struct.unpack('<Q', raw)[0] if len(raw) == 8 else MAX_NOTE + 1
    offset = len(MAGIC) + 8 + length
    try:
        if length > MAX_NOTE or offset > size:
            raise ValueError('its note does not fit into the file')
        note = Note.from_json(f.read(length))
        if note.nbytes != size - offset:
            raise ValueError(f'{size - offset} bytes of engine, noted are {note.nbytes}')
    except ValueError as e:
        raise Refusal(Code.CORRUPT, f'{path} is a damaged cache entry: {e}; delete it') from e
    return EngineFile(path, offset, size - offset, plan_header(f.read(HEADER)), note)


def _note_beside(path: Path, size: int) -> tuple[Note | None, str]:
    beside = path.with_name(path.name + '.json')
    try:
        data = beside.read_bytes() if beside.stat().st_size <= MAX_NOTE else b''
    except OSError:
        return None, ''
    try:
        note = Note.from_json(data)
        digest = ''
        if note.nbytes == size:
            with path.open('rb') as f:
                digest = hashlib.sha256(f.read()).hexdigest()
        if digest == note.sha256:
            return note, ''
        return None, f'{beside.name} belongs to another engine'
    except ValueError as e:
        return None, f'{beside.name} cannot be used: {e}'


def write_atomic(path: Path, *parts: bytes, replace: bool = True) -> bool:
    """Write a file whole or not at all; return False if it existed and may not be replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f'.{path.name[:64]}-', dir=path.parent)
    try:
        with os.fdopen(handle, 'wb') as f:
            for part in parts:
                f.write(part)
            f.flush()
            os.fsync(f.fileno())
        os.chmod(name, 0o644)
        if replace:
            os.replace(name, path)
        else:
            try:
                os.link(name, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without hard links: the last one wins
                os.replace(name, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return True
    finally:
        if os.path.exists(name):
            os.unlink(name)


def write_engine(path: Path, plan: bytes, note: Note) -> None:
    """Write a plan that any TensorRT tool reads, and the note beside it.

    The note goes last and holds the plan's digest, so a note beside another plan is not believed.
    """
    write_atomic(path, plan)
    write_atomic(path.with_name(path.name + '.json'), note.to_json())


def write_entry(path: Path, plan: bytes, note: Note, *, replace: bool = False) -> bool:
    """Write a cache entry; False if another process was first."""
    data = note.to_json()
    return write_atomic(path, MAGIC, struct.pack('<Q', len(data)), data, plan, replace=replace)
