"""Boundaries, capsules and what is told of them.

A boundary is all STATE after a step: the device slot of the last accepted tick plus the host block
of this step, and, where an inference was started and not yet accepted, the inputs it latched. A
capsule is an immutable named boundary.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
import re
from typing import Any, TypeVar

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.journal import Pieces, Strands, release
from flashrt_ros.core.layout import Fingerprint
from flashrt_ros.core.payload import Payload, Tier

T = TypeVar('T')
ORIGIN = 'origin'
_NAME = re.compile(r'[A-Za-z0-9][A-Za-z0-9_.\-]{0,127}')


def check_name(name: str) -> str:
    """Return a capsule's name, or refuse one that must never reach a file system."""
    if not _NAME.fullmatch(name):
        raise Refusal(Code.INVALID_NAME, f'{name[:140]!r} is no capsule name: use 1 to 128 '
                      'letters, digits, _ . - and start with a letter or digit')
    return name


def made(cls: type[T], /, **fields: Any) -> T:
    """Return a frozen dataclass of its fields, those with plain defaults may be left out.

    Its own constructor sets them one by one through `object`, which took half the time of a save.
    """
    thing = object.__new__(cls)
    thing.__dict__.update(fields)
    return thing


@dataclass(frozen=True)
class Latch:
    """The inputs of one inference. `inputs` holds the bytes of INPUT buffers by name.

    Empty `inputs` means: what lies in the staging buffers now, and no copy is kept; such an
    inference cannot be started again after a restore.
    """

    inputs: Mapping[str, bytes] = field(default_factory=dict)
    step: int = 0
    stamp_ns: int = 0


@dataclass(frozen=True)
class Mark:
    """What a boundary is told by its owner: whence and where the robot was.

    `stamp_ns` of the observation that the last accepted tick latched; `witness` by flat names such
    as `joint_position.shoulder`, SI units, with the stamps of their measurement.
    """

    stamp_ns: int = 0
    witness: Mapping[str, float] = field(default_factory=dict)
    witness_stamps: Mapping[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class Boundary:
    """All STATE after a step. Holds one reference on its payload and on each segment."""

    payload: Payload | None            # None: the ring is off, the live set itself
    host: bytes
    tick: int
    step: int
    mark: Mark
    pending: Latch | None
    lengths: Mapping[str, int]
    strands: Mapping[str, Strands]
    parent: str                        # id of the capsule or origin that it descends from
    pieces: Mapping[str, Pieces] = field(default_factory=dict)  # journal rows, of capsules only

    def release(self) -> None:
        """Refer to its memory no longer."""
        if self.payload is not None:
            self.payload.release()
        for pieces in self.pieces.values():
            release(pieces)
        self.pieces = {}

    def held(self) -> Boundary:
        """Return a second reference to the same boundary."""
        if self.payload is not None:
            self.payload.hold()
        for pieces in self.pieces.values():
            for p in pieces:
                p.segment.hold()
        return Boundary(self.payload, self.host, self.tick, self.step, self.mark, self.pending,
                        self.lengths, self.strands, self.parent, dict(self.pieces))


@dataclass(frozen=True)
class CapsuleInfo:
    """What is known of a capsule without reading its bytes; the fields of msg/CapsuleInfo."""

    name: str = ''
    id: str = ''
    parent_id: str = ''
    note: str = ''
    tick: int = 0
    step: int = 0
    session: int = 0
    epoch: int = 0
    stamp_ns: int = 0
    tier: Tier = Tier.NONE
    nbytes: int = 0
    pinned: bool = False
    durable: bool = False
    exact: bool = True
    fingerprint: str = ''
    witness: Mapping[str, float] = field(default_factory=dict)


@dataclass(eq=False)
class Capsule:
    """A named boundary in the store. `boundary` is None where only the mark is left (evicted)
    or the bytes rest on disk."""

    name: str
    id: str
    parent: str
    note: str
    boundary: Boundary | None
    tick: int
    step: int
    session: int
    epoch: int
    mark: Mark
    nbytes: int
    fingerprint: Fingerprint
    fingerprint_digest: str
    exact: bool
    saved_ns: int                      # clock of the session's owner
    order: int                         # creation
    used: int                          # last use, for eviction
    pinned: bool = False
    lease_until: float = 0.0           # steady clock
    durable: bool = False
    uri: str = ''
    sha256: str = ''
    moving: bool = False               # a copy to another tier is ordered
    writing: bool = False              # a file is being written
    file_bytes: int = 0

    @property
    def tier(self) -> Tier:
        """Where its bytes rest now."""
        if self.boundary is not None and self.boundary.payload is not None:
            return self.boundary.payload.tier
        return Tier.DISK if self.durable else Tier.NONE

    def info(self) -> CapsuleInfo:
        """Return what is told of it."""
        return made(
            CapsuleInfo, name=self.name, id=self.id, parent_id=self.parent, note=self.note,
            tick=self.tick, step=self.step, session=self.session, epoch=self.epoch,
            stamp_ns=self.mark.stamp_ns, tier=self.tier, nbytes=self.nbytes, pinned=self.pinned,
            durable=self.durable, exact=self.exact, fingerprint=self.fingerprint_digest,
            witness=dict(self.mark.witness))


class EventKind(IntEnum):
    """Numbers of msg/CapsuleEvent."""

    SAVED = 0
    RESTORED = 1
    ROLLED_BACK = 2
    RESET = 3
    DROPPED = 4
    EVICTED = 5
    KEPT = 6
    PERSISTED = 7
    LOADED = 8
    REFUSED = 9
    MOVED = 10
    CLOCK_JUMP = 11
    PERSIST_FAILED = 12


@dataclass(frozen=True)
class Event:
    """A change of the store or a rewind; the fields of msg/CapsuleEvent."""

    kind: EventKind
    info: CapsuleInfo
    epoch: int
    code: Code = Code.OK
    message: str = ''
    duration_s: float = 0.0
    uri: str = ''
    sha256: str = ''
