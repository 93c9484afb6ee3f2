"""A folder of capsule files: written whole or not at all, read as if somebody hostile wrote them.

A write goes to a temporary name, is synced, replaces the old file and syncs the folder, so that a
kill at any instant leaves the old file or the new one. Only regular files directly in the folder
are touched; symbolic links are refused.
"""
from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
import re
import secrets
import stat
from typing import Any

from flashrt_ros.core import codec
from flashrt_ros.core.capsule import check_name
from flashrt_ros.core.errors import Code, Refusal

SUFFIX = '.capsule'
_PART = '.part-'
_LEFT = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}\.part-[0-9a-f]{16}')


class CapsuleFolder:
    """Files `NAME.capsule`, in a folder that only its owner may read.

    One writer at a time: two nodes on one folder would replace each other's files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock: int | None = os.open(path / '.lock', os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
                                             | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                raise Refusal(Code.BUSY, f'another node uses the capsule folder {path}; give each '
                              'node a capsule_dir of its own') from error
            for left in path.glob(f'*{_PART}*'):
                if _LEFT.fullmatch(left.name):
                    left.unlink(missing_ok=True)  # of a writer that was killed
        except OSError as error:
            raise Refusal(Code.IO, f'capsule folder {path}: {error.strerror}') from error

    def close(self) -> None:
        """Let others use the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def file(self, name: str) -> Path:
        """Return the path of a capsule's file."""
        return self.path / (check_name(name) + SUFFIX)

    def write(self, name: str, data: bytes) -> str:
        """Write a file, durably; return its SHA-256. Raises Refusal(IO)."""
        final = self.file(name)
        part = self.path / f'{name[:100]}{_PART}{secrets.token_hex(8)}'
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(fd, 'wb') as out:
                    out.write(data)
                    out.flush()
                    os.fsync(out.fileno())
                os.replace(part, final)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
            self._sync_folder()
        except OSError as error:
            raise Refusal(Code.IO, f'capsule {name!r} could not be written to {self.path}: '
                          f'{error.strerror}; free space or choose another capsule_dir') from error
        return hashlib.sha256(data).hexdigest()

    def _sync_folder(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def remove(self, name: str) -> None:
        """Remove a capsule's file, if there is one, durably. Raises Refusal(IO)."""
        try:
            self.file(name).unlink()
            self._sync_folder()
        except FileNotFoundError:
            return
        except OSError as error:
            raise Refusal(Code.IO, f'capsule {name!r} could not be removed: '
                          f'{error.strerror}') from error

    def scan(self) -> tuple[list[tuple[dict[str, Any], int]], list[Refusal]]:
        """Return `(metadata, bytes)` of readable files, and why the others are not.

        Only headers are read; the whole file is checked when it is loaded.
        """
        found, bad = [], []
        for path in sorted(self.path.glob(f'*{SUFFIX}')):
            try:
                name = check_name(path.name[:-len(SUFFIX)])
                with _open(path) as file:
                    head = file.read(8)
                    size = min(int.from_bytes(head, 'little'), codec.MAX_HEADER)
                    meta = codec.parse_meta(head + file.read(size))
                    if meta['name'] != name:
                        raise Refusal(Code.CORRUPT, f'the file holds capsule {meta["name"]!r}; '
                                      'rename it back')
                    found.append((meta, os.fstat(file.fileno()).st_size))
            except Refusal as error:
                bad.append(Refusal(error.code, f'{path.name}: {error.message}'))
        return found, bad


def read(path: Path, limit: int) -> bytes:
    """Return a capsule file's bytes, at most `limit`. Raises Refusal: NOT_FOUND, IO, CORRUPT."""
    with _open(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise Refusal(Code.CORRUPT, f'{path.name} has {size} bytes; a capsule of this policy '
                          f'has at most {limit}')
        data: bytes = file.read(limit + 1)
    if len(data) != size:
        raise Refusal(Code.CORRUPT, f'{path.name} changed while it was read; try again')
    return data


def _open(path: Path) -> Any:
    try:
        # O_NONBLOCK: a FIFO of that name must not stop the node
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise Refusal(Code.NOT_FOUND, f'there is no file {path.name}') from error
    except OSError as error:
        raise Refusal(Code.IO, f'{path.name} cannot be opened: {error.strerror}') from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise Refusal(Code.IO, f'{path.name} is no regular file')
    return os.fdopen(fd, 'rb')
