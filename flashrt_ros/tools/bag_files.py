"""Finds the storage files of a bag, whatever state it is in, and says what is wrong with the rest.

A bag is a folder with metadata.yaml, a folder without it, or one storage file. What a file is, its
first bytes say, not its name: a folder may be called `walk.bag`, and a bag may be a text that
stands for one (Git LFS). Files compressed as a whole are unpacked into a temporary folder.
"""
from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
import difflib
import importlib
from pathlib import Path, PurePosixPath
import re
import shutil
import sys
import tempfile
from typing import Any

import yaml

from flashrt_ros.core.errors import Code, Refusal

MCAP, SQLITE = b'\x89MCAP0\r\n', b'SQLite format 3\x00'
ZSTD = b'\x28\xb5\x2f\xfd'
_LFS, _ROS1 = b'version https://git-lfs', b'#ROSBAG V'
_SUFFIXES = ('.mcap', '.db3', '.mcap.zstd', '.db3.zstd')
MAX_METADATA = 32 << 20


@dataclass
class Located:
    """Where a bag's messages lie: storage files in order, and what metadata.yaml adds."""

    path: Path
    files: list[Path]
    compression: str = ''              # '', file or message
    distro: str = ''
    count: int | None = None           # messages that metadata.yaml speaks of
    hashes: dict[str, str] = field(default_factory=dict)     # type hash by topic
    remarks: list[str] = field(default_factory=list)


def locate(path: Path, stack: ExitStack) -> Located:
    """Return a bag's storage files; `stack` removes what was unpacked. Raises Refusal."""
    if not path.exists():
        near = difflib.get_close_matches(path.name, _names(path.parent), n=1)
        raise Refusal(Code.NOT_FOUND, f'there is no bag {path}'
                      + (f'; did you mean {path.with_name(near[0])}?' if near else ''))
    found = _folder(path) if path.is_dir() else Located(path, [path])
    if path.name == 'metadata.yaml':
        raise Refusal(Code.INVALID_ARGUMENT, f'{path} is the description of a bag; give its folder '
                      f'{path.parent}')
    found.files = [_unpacked(f, stack) for f in found.files]
    return found


def _names(folder: Path) -> list[str]:
    try:
        return sorted(p.name for p in folder.iterdir())
    except OSError:
        return []


def _folder(path: Path) -> Located:
    names = _names(path)
    stored = sorted((path / n for n in names if n.endswith(_SUFFIXES)), key=_natural)
    found = Located(path, stored)
    if 'metadata.yaml' not in names:
        if not stored:
            inside = [n for n in names if (path / n).is_dir() and any(
                m == 'metadata.yaml' or m.endswith(_SUFFIXES) for m in _names(path / n))]
            hint = (f'; it holds the bags {", ".join(inside[:5])}: give one of them' if inside
                    else '; a bag has metadata.yaml and .mcap or .db3 files')
            raise Refusal(Code.NOT_FOUND, f'{path} is no bag{hint}')
        found.remarks.append('there is no metadata.yaml; its files are read in the order of their '
                             'names')
        return found
    try:
        _read_metadata(path / 'metadata.yaml', found)
    except Refusal as refusal:
        if not stored:
            raise
        found.files = stored
        found.remarks.append(f'{refusal.message}; its files are read in the order of their names')
    if missing := [f.name for f in found.files if not f.exists()]:
        raise Refusal(Code.NOT_FOUND, f'{path}: metadata.yaml names {", ".join(missing)}, which '
                      'is not there; copy the whole folder')
    return found


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key: x_2 before x_10."""
    return [(int(part), '') if part.isdecimal() else (0, part)
            for part in re.split(r'(\d+)', path.name)]


def _read_metadata(path: Path, found: Located) -> None:
    def bad(what: str) -> Refusal:
        return Refusal(Code.CORRUPT, f'{path.parent.name}/metadata.yaml {what}')
    try:
        if path.stat().st_size > MAX_METADATA:
            raise bad('is too large to be one')
        text = path.read_text()
        data: Any = yaml.safe_load(text)
    except OSError as error:
        raise Refusal(Code.IO, f'{path}: {error.strerror}') from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise bad('cannot be read as YAML') from error
    info = data.get('rosbag2_bagfile_information') if isinstance(data, Mapping) else None
    if not isinstance(info, Mapping):
        raise bad('has no rosbag2_bagfile_information' if text.strip() else 'is empty')
    names = info.get('relative_file_paths')
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise bad('names no files')
    # the name alone: older versions wrote the folder too, and a bag may lie elsewhere now
    found.files = [path.parent / PurePosixPath(n).name for n in names]
    found.compression = str(info.get('compression_mode') or '').lower().replace('none', '')
    form = info.get('compression_format') or 'zstd'
    if found.compression and form != 'zstd':
        raise Refusal(Code.UNSUPPORTED, f'{path.parent} is compressed with {form}; convert it with '
                      'ros2 bag convert to zstd or none')
    found.distro = str(info.get('ros_distro') or '')
    count = info.get('message_count')
    found.count = count if isinstance(count, int) else None
    topics = info.get('topics_with_message_count')
    for entry in topics if isinstance(topics, list) else []:
        topic = entry.get('topic_metadata') if isinstance(entry, Mapping) else None
        if isinstance(topic, Mapping) and topic.get('type_description_hash'):
            found.hashes[str(topic.get('name'))] = str(topic['type_description_hash'])


def head(path: Path, n: int = 64) -> bytes:
    """Return the first bytes of a regular file. Raises Refusal."""
    if not path.is_file():
        raise Refusal(Code.IO, f'{path} is no regular file')
    try:
        with path.open('rb') as file:
            return file.read(n)
    except OSError as error:
        raise Refusal(Code.IO, f'{path} cannot be opened: {error.strerror}') from error


def _unpacked(path: Path, stack: ExitStack) -> Path:
    """Return a readable storage file, or refuse with what the file really is."""
    first = head(path)
    if first.startswith(ZSTD):
        return _unzstd(path, stack)
    if first.startswith((MCAP, SQLITE)):
        _check_wal(path)
        return path
    if not first:
        raise Refusal(Code.CORRUPT, f'{path} has no bytes: nothing was recorded, or the copy '
                      'failed; record or copy it again')
    if first.startswith(_LFS):
        raise Refusal(Code.CORRUPT, f'{path} is a Git LFS pointer, not the bag itself; fetch it '
                      'with git lfs pull')
    if first.startswith(_ROS1):
        raise Refusal(Code.UNSUPPORTED, f'{path} is a ROS 1 bag; convert it with rosbags-convert '
                      f'--src {path.name} --dst {path.stem}')
    if not first.strip(b'\x00'):
        raise Refusal(Code.CORRUPT, f'{path} begins with zeros: it was not written to the end, '
                      'or its disk is damaged; copy or record it again')
    raise Refusal(Code.CORRUPT, f'{path} is neither MCAP nor SQLite: it begins with '
                  f'{first[:8]!r}; give a bag that ros2 bag record made')


def _check_wal(path: Path) -> None:
    """Messages in SQLite's write-ahead log would be overlooked."""
    wal = path.with_name(path.name + '-wal')
    if wal.is_file() and wal.stat().st_size:
        raise Refusal(Code.CORRUPT, f'{wal.name} still holds messages: the recorder did not end '
                      f'well; run sqlite3 {path.name} "PRAGMA wal_checkpoint(TRUNCATE)" beside it')


def zstandard() -> Any:
    """Return the zstd module that rosbags brings along."""
    if sys.version_info >= (3, 14):
        return importlib.import_module('compression.zstd')
    return importlib.import_module('backports.zstd')


def _unzstd(path: Path, stack: ExitStack) -> Path:
    zstd = zstandard()
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='flashrt-bag-')))
    target = folder / path.name.removesuffix('.zstd')
    try:
        with path.open('rb') as packed, zstd.open(packed, 'rb') as source:
            with target.open('wb') as out:
                shutil.copyfileobj(source, out)
    except (EOFError, zstd.ZstdError) as error:
        raise Refusal(Code.CORRUPT, f'{path} cannot be unpacked ({error}): it is cut off or '
                      'damaged; copy it again') from error
    except OSError as error:
        raise Refusal(Code.IO, f'{path} cannot be unpacked into {folder}: {error.strerror}; it '
                      'needs room there (TMPDIR)') from error
    return _unpacked(target, stack)
