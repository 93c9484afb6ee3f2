"""Bags without ROS: messages in time order, as bytes with their digest, decoded on demand.

Reads SQLite and MCAP, compressed by file, chunk or message, split, with or without metadata.yaml.
Storage files are opened one by one through `rosbags` and merged by time; its reader of folders
trusts metadata.yaml more than the files and loses messages where the two disagree. Whatever is
wrong becomes a Refusal that says what to do.

The digest of a message is that of its serialised bytes, encapsulation header included: the bytes
that a node receives and a recorder stores are the same, so it names a message in both.
"""
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
import hashlib
import heapq
from pathlib import Path
from typing import Any, NamedTuple

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.bag_files import MCAP, ZSTD, Located, head, locate, zstandard
from flashrt_ros.tools.bag_types import Types


class Message(NamedTuple):
    """One recorded message. `time_ns` is when the recorder got it, `raw` its CDR bytes."""

    topic: str
    type: str
    time_ns: int
    raw: bytes

    @property
    def digest(self) -> int:
        """The first 8 bytes, big endian, of SHA-256 of the serialised message."""
        return int.from_bytes(hashlib.sha256(self.raw).digest()[:8], 'big')


@dataclass(frozen=True)
class Topic:
    """What a bag holds of one topic."""

    name: str
    types: tuple[str, ...]             # more than one where publishers disagreed
    count: int
    foreign: str = ''                  # a serialisation that is not CDR

    @property
    def type(self) -> str:
        """The message type."""
        return self.types[0]


class Bag:
    """An open bag. Iterating twice reads twice; nothing is kept in memory."""

    def __init__(self, located: Located, storages: Sequence[Any], types: Types) -> None:
        self.path = located.path
        self.name = located.path.name
        self.distro = located.distro
        self.remarks = list(located.remarks)
        self.types = types
        self._storages = storages
        self._compressed = located.compression == 'message'
        self.topics = self._topics()
        metas = [s.metadata for s in storages if s.metadata.message_count]
        self.count = sum(m.message_count for m in metas)
        self.start_ns = min((m.start_time for m in metas), default=0)
        self.end_ns = max((m.end_time for m in metas), default=0)
        if located.count is not None and located.count > self.count:
            self.remarks.append(f'metadata.yaml counts {located.count} messages, the files hold '
                                f'{self.count}')
        foreign = {t.foreign for t in self.topics.values() if t.foreign}
        if foreign and all(t.foreign for t in self.topics.values()):
            raise Refusal(Code.UNSUPPORTED, f'{self.name} is serialised as {", ".join(foreign)}, '
                          'not as CDR; record it with a DDS middleware (rmw_fastrtps, '
                          'rmw_cyclonedds, rmw_zenoh)')

    def _topics(self) -> dict[str, Topic]:
        found: dict[str, Topic] = {}
        for storage in self._storages:
            for c in storage.connections:
                form = c.ext.serialization_format
                old = found.get(c.topic, Topic(c.topic, (), 0))
                found[c.topic] = Topic(
                    c.topic, tuple(dict.fromkeys((*old.types, c.msgtype))), old.count + c.msgcount,
                    old.foreign or ('' if form in ('', 'cdr') else form))
        return dict(sorted(found.items()))

    @property
    def seconds(self) -> float:
        """From the first message to the last."""
        return max(0, self.end_ns - self.start_ns) * 1e-9

    def messages(self, topics: Collection[str]) -> Iterator[Message]:
        """Yield the messages of some topics by recording time. Raises Refusal(CORRUPT)."""
        for name in topics:
            topic = self.topics[name]
            if topic.foreign:
                raise Refusal(Code.UNSUPPORTED, f'{self.name}: {name} is serialised as '
                              f'{topic.foreign}, not as CDR; record it with a DDS middleware')
        streams = [self._read(s, topics) for s in self._storages]
        yield from heapq.merge(*streams, key=lambda m: m.time_ns)

    def _read(self, storage: Any, topics: Collection[str]) -> Iterator[Message]:
        connections = [c for c in storage.connections if c.topic in topics]
        if not connections:
            return
        with _reading(storage.path):
            for connection, time_ns, data in _in_order(storage, connections):
                raw = bytes(data)
                if self._compressed or raw.startswith(ZSTD):
                    raw = bytes(zstandard().decompress(raw))
                yield Message(connection.topic, connection.msgtype, time_ns, raw)

    def decode(self, message: Message) -> Any:
        """Return a message as an object with ROS attributes. Raises Refusal."""
        try:
            return self.types.decode(message.raw, message.type)
        except Refusal as refusal:
            at = (message.time_ns - self.start_ns) * 1e-9
            raise Refusal(refusal.code, f'{self.name}: {message.topic} at {at:.3f} s: '
                          f'{refusal.message}', **refusal.details) from refusal


def _in_order(storage: Any, connections: list[Any]) -> Iterator[tuple[Any, int, bytes]]:
    """Yield messages by time; a file without an index is sorted if need be."""
    if hasattr(storage, 'messages_scan') and not storage.chunks:
        last = -1
        for _, time_ns, _ in storage.messages_scan(connections):
            if time_ns < last:
                yield from sorted(storage.messages_scan(connections), key=lambda m: m[1])
                return
            last = time_ns
    yield from storage.messages(connections)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever a damaged file makes its parser raise into a refusal."""
    try:
        yield
    except Refusal:
        raise
    except GeneratorExit:
        raise
    except OSError as error:
        raise Refusal(Code.IO, f'{path.name}: {error.strerror or error}') from error
    except Exception as error:  # parsers raise anything on damaged bytes
        raise Refusal(Code.CORRUPT, f'{path.name} cannot be read ({type(error).__name__}: '
                      f'{str(error)[:120]}): {_advice(path)}') from error


def _advice(path: Path) -> str:
    if head(path, 8).startswith(MCAP):
        if _tail(path) != MCAP:
            return ('it is cut off, so its recorder did not end well or the copy failed; copy it '
                    f'again, or save what can be saved: mcap recover {path.name} -o saved.mcap')
        return f'it is damaged; copy it again, or try mcap recover {path.name} -o saved.mcap'
    return (f'it is damaged or cut off; copy it again, or try sqlite3 {path.name} ".recover" | '
            'sqlite3 saved.db3')


def _tail(path: Path) -> bytes:
    with path.open('rb') as file:
        file.seek(max(0, path.stat().st_size - 8))
        return file.read()


@contextmanager
def open_bag(path: str | Path, *, msg_paths: Sequence[Path] = ()) -> Iterator[Bag]:
    """Open a bag: a folder or a storage file. Raises Refusal.

    `msg_paths` are folders with definitions of message types that the bag does not carry.
    """
    try:
        from rosbags.rosbag2.storage_mcap import McapReader
        from rosbags.rosbag2.storage_sqlite3 import Sqlite3Reader
    except ImportError as error:
        raise Refusal(Code.UNSUPPORTED, "bags need rosbags; install it with pip install "
                      "'flashrt_ros[bags]'") from error
    with ExitStack() as stack:
        located = locate(Path(path), stack)
        storages = []
        for file in located.files:
            reader = (McapReader if head(file, 8).startswith(MCAP) else Sqlite3Reader)(file)
            with _reading(file):
                reader.open()
            stack.callback(reader.close)
            storages.append(reader)
        yield Bag(located, storages, Types(_definitions(storages), _hashes(storages, located),
                                           located.distro, msg_paths))


def _definitions(storages: Sequence[Any]) -> Mapping[str, Any]:
    found: dict[str, Any] = {}
    for storage in storages:
        for c in storage.connections:
            if c.msgdef.format.name != 'NONE':
                found.setdefault(c.msgtype, c.msgdef)
    return found


def _hashes(storages: Sequence[Any], located: Located) -> Mapping[str, str]:
    return {c.msgtype: h for s in storages for c in s.connections
            if (h := c.digest or located.hashes.get(c.topic, ''))}
