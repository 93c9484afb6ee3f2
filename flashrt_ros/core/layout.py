"""What a policy's memory consists of: named, typed, fixed-shape buffers with a role and a space.

Names are the identity of a buffer; order never matters to correctness. Data types carry the names
of the safetensors format, so that types that numpy lacks (BF16, F8) are described, copied and
compared on their bytes like all others.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
import hashlib
import json
import math
import re

import numpy as np

from flashrt_ros.core.errors import Code, Refusal

ALIGNMENT = 256  # bytes; what cudaMalloc gives and what vectorised kernels assume

# safetensors name -> (bytes per element, numpy type that holds the bits)
DTYPES: Mapping[str, tuple[int, str]] = {
    'BOOL': (1, '?'), 'U8': (1, 'u1'), 'I8': (1, 'i1'), 'U16': (2, '<u2'), 'I16': (2, '<i2'),
    'U32': (4, '<u4'), 'I32': (4, '<i4'), 'U64': (8, '<u8'), 'I64': (8, '<i8'),
    'F16': (2, '<f2'), 'F32': (4, '<f4'), 'F64': (8, '<f8'),
    'BF16': (2, '<u2'), 'F8_E4M3': (1, 'u1'), 'F8_E5M2': (1, 'u1'),
}
BIT_TYPES = frozenset({'BF16', 'F8_E4M3', 'F8_E5M2'})  # numpy sees only their bits
_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9_./:\-]{0,255}')


class Role(IntEnum):
    """What a buffer is for. Only STATE outlives a tick."""

    INPUT = 0
    STATE = 1
    OUTPUT = 2


class Space(IntEnum):
    """Where a buffer lives. On a CPU backend DEVICE is ordinary memory too."""

    DEVICE = 0
    HOST = 1


def dtype_name(dtype: np.dtype | type | str) -> str:
    """Return the safetensors name of a numpy type.

    >>> dtype_name(np.float32)
    'F32'
    """
    wanted = np.dtype(dtype).newbyteorder('<')
    for name, (_, code) in DTYPES.items():
        if name not in BIT_TYPES and np.dtype(code) == wanted:
            return name
    raise Refusal(Code.UNSUPPORTED, f'data type {dtype} has no safetensors name; '
                  f'use one of {", ".join(DTYPES)}')


@dataclass(frozen=True)
class BufferSpec:
    """One buffer: `shape` in elements, `dtype` by safetensors name.

    A journal is a STATE buffer that only grows along `journal_axis` (a KV cache). `length` names
    the STATE buffer (I64, one element, same space) that counts its final rows: rows below it never
    change until a restore lowers it. `low` and `high` are the range that configure draws seeded
    test inputs from.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role
    space: Space = Space.DEVICE
    journal_axis: int | None = None
    length: str | None = None
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise Refusal(Code.UNSUPPORTED, f'buffer name {self.name!r} is not of the form '
                          f'{_NAME.pattern}; rename it')
        if self.dtype not in DTYPES:
            raise Refusal(Code.UNSUPPORTED, f'buffer {self.name}: data type {self.dtype!r} is not '
                          f'one of {", ".join(DTYPES)}')
        object.__setattr__(self, 'shape', tuple(int(n) for n in self.shape))
        if any(n < 1 for n in self.shape):
            raise Refusal(Code.UNSUPPORTED, f'buffer {self.name}: shape {self.shape} has an '
                          'unknown or empty dimension; give it a fixed size')
        if self.journal_axis is not None and (
                self.role is not Role.STATE or self.length is None
                or not 0 <= self.journal_axis < len(self.shape)):
            raise Refusal(Code.UNSUPPORTED, f'buffer {self.name}: a journal is STATE, has an axis '
                          f'within {self.shape} and names the buffer that holds its length')

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return DTYPES[self.dtype][0]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole buffer."""
        return math.prod(self.shape) * self.itemsize

    @property
    def storage(self) -> np.dtype:
        """The numpy type of its bits (BF16 as uint16, F8 as uint8)."""
        return np.dtype(DTYPES[self.dtype][1])

    @property
    def is_journal(self) -> bool:
        """Whether it grows along an axis."""
        return self.journal_axis is not None

    def rows(self) -> tuple[int, int, int]:
        """Return a journal's `(outer, rows, row_bytes)`: `outer` runs of `rows * row_bytes`."""
        axis = self.journal_axis
        assert axis is not None
        return (math.prod(self.shape[:axis]), self.shape[axis],
                math.prod(self.shape[axis + 1:]) * self.itemsize)

    def describe(self) -> dict[str, object]:
        """Return what identifies the buffer, for digests and files."""
        return {'name': self.name, 'shape': list(self.shape), 'dtype': self.dtype,
                'role': self.role.name, 'space': self.space.name,
                'journal_axis': self.journal_axis, 'length': self.length}


class Layout(Mapping[str, BufferSpec]):
    """The closed set of a live set's buffers, by name."""

    def __init__(self, specs: Iterable[BufferSpec]) -> None:
        self._specs: dict[str, BufferSpec] = {}
        for spec in specs:
            if spec.name in self._specs:
                raise Refusal(Code.UNSUPPORTED, f'two buffers are named {spec.name!r}; rename one')
            self._specs[spec.name] = spec
        for spec in self._specs.values():
            if spec.is_journal:
                length = self._specs.get(spec.length or '')
                if (length is None or length.role is not Role.STATE or length.dtype != 'I64'
                        or math.prod(length.shape) != 1 or length.space is not spec.space
                        or length.is_journal):
                    raise Refusal(Code.UNSUPPORTED, f'journal {spec.name}: its length '
                                  f'{spec.length!r} must be a STATE buffer of one I64 in the '
                                  'same space')

    def __getitem__(self, name: str) -> BufferSpec:
        return self._specs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def select(self, role: Role | None = None, space: Space | None = None,
               journal: bool | None = None) -> list[BufferSpec]:
        """Return the buffers of a role, a space, and of journals only or none."""
        return [s for s in self._specs.values()
                if (role is None or s.role is role) and (space is None or s.space is space)
                and (journal is None or s.is_journal is journal)]

    def nbytes(self, role: Role) -> int:
        """Return the bytes of all buffers of a role, without alignment."""
        return sum(s.nbytes for s in self.select(role))

    def digest(self) -> str:
        """Return SHA-256 over all descriptions, whatever their order."""
        return digest_of(sorted((s.describe() for s in self._specs.values()),
                                key=lambda d: str(d['name'])))


def digest_of(value: object) -> str:
    """Return SHA-256 of a JSON value in canonical form."""
    text = json.dumps(value, sort_keys=True, separators=(',', ':'), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def align(n: int, to: int = ALIGNMENT) -> int:
    """Round up to a multiple of `to`.

    >>> align(257)
    512
    """
    return -(-n // to) * to


@dataclass(frozen=True)
class Fingerprint:
    """Where a capsule may return, field by field, so that a refusal can say what differs.

    `meaning` must be equal and nothing overrides it: weights, layout, ports and terms, format.
    `exactness` must be equal unless the caller accepts results that differ in the last bits:
    engine or graph digest, precision, architecture, library versions, determinism settings.
    """

    meaning: Mapping[str, str] = field(default_factory=dict)
    exactness: Mapping[str, str] = field(default_factory=dict)

    def digest(self) -> str:
        """Return SHA-256 over all fields."""
        return digest_of({'meaning': dict(self.meaning), 'exactness': dict(self.exactness)})

    def differences(self, other: Fingerprint) -> tuple[list[str], list[str]]:
        """Return the names of differing `(meaning, exactness)` fields, sorted."""
        def differ(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
            return sorted(k for k in {*a, *b} if a.get(k) != b.get(k))
        return differ(self.meaning, other.meaning), differ(self.exactness, other.exactness)

    def check(self, capsule: Fingerprint, *, accept_inexact: bool) -> bool:
        """Refuse a capsule that may not return here; return whether it is exact."""
        meaning, exactness = self.differences(capsule)
        if meaning:
            raise Refusal(Code.FINGERPRINT_MISMATCH, 'the capsule belongs to another policy: '
                          + _spell(meaning, capsule.meaning, self.meaning)
                          + '; load the policy that it was saved from', fields=meaning)
        if exactness and not accept_inexact:
            raise Refusal(Code.FINGERPRINT_MISMATCH, 'the capsule was saved by another build: '
                          + _spell(exactness, capsule.exactness, self.exactness)
                          + '; set accept_inexact to continue with results that may differ in '
                          'the last bits', fields=exactness)
        return not exactness


def _spell(fields: list[str], theirs: Mapping[str, str], ours: Mapping[str, str]) -> str:
    def short(value: str | None) -> str:
        return 'absent' if value is None else value if len(value) <= 40 else value[:12] + '…'
    return ', '.join(f'{f} (capsule {short(theirs.get(f))}, here {short(ours.get(f))})'
                     for f in fields)
