"""Journals: STATE that only grows is not copied per tick and not copied twice.

A boundary keeps a journal's length and a record of *who wrote which rows*: a tuple of strands
`(id, first row)`. A strand is one uninterrupted growth of the live set; a restore that lowers the
length starts a new one. Two boundaries share exactly the rows up to where their strands part, so
what must be copied is known from lineage and never found by comparing bytes.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.core.payload import Segment
from flashrt_ros.core.seam import Buffer, Device

Strands = tuple[tuple[int, int], ...]  # (strand id, first row), by first row


def shared_rows(a: Strands, length_a: int, b: Strands, length_b: int) -> int:
    """Return how many leading rows two boundaries have in common.

    >>> shared_rows(((0, 0), (1, 100)), 150, ((0, 0), (2, 120)), 130)
    100
    >>> shared_rows(((0, 0),), 150, ((0, 0), (2, 120)), 130)
    120
    """
    rows = min(length_a, length_b)
    for i in range(max(len(a), len(b))):
        here = a[i] if i < len(a) else None
        there = b[i] if i < len(b) else None
        if here != there:
            return min([rows, *(s[1] for s in (here, there) if s is not None)])
    return rows


def lowered(strands: Strands, length: int, new_id: int) -> Strands:
    """Return the live set's strands after a restore to `length` rows of `strands`."""
    return (*(s for s in strands if s[1] < length), (new_id, length))


@dataclass(frozen=True)
class Piece:
    """Rows `[first, last)` of a journal, found in a segment that may hold more."""

    segment: Segment
    first: int
    last: int


Pieces = tuple[Piece, ...]


def cut(pieces: Pieces, rows: int) -> Pieces:
    """Return the pieces of the first `rows` rows, each segment referred to once more."""
    out = []
    for p in pieces:
        if p.first < rows:
            out.append(Piece(p.segment.hold(), p.first, min(p.last, rows)))
    return tuple(out)


def release(pieces: Iterable[Piece]) -> None:
    """Refer to the segments no longer."""
    for p in pieces:
        p.segment.release()


def segment_bytes(spec: BufferSpec, rows: int) -> int:
    """Return the bytes of `rows` rows of a journal."""
    outer, _, row_bytes = spec.rows()
    return outer * rows * row_bytes


def copy_out(device: Device, journal: Buffer, segment: Segment) -> None:
    """Copy a segment's rows out of a live journal.

    The rows are final, so the copy may run beside a tick.
    """
    outer, rows, width = journal.spec.rows()
    n = segment.rows * width
    device.side_copy2d(segment.block, segment.offset, n, journal.block,
                       journal.offset + segment.first * width, rows * width, n, outer)


def copy_in(device: Device, journal: Buffer, pieces: Pieces, first: int, last: int) -> int:
    """Copy rows `[first, last)` back into a live journal, in stream order; return the bytes."""
    outer, rows, width = journal.spec.rows()
    moved = 0
    for p in pieces:
        lo, hi = max(p.first, first), min(p.last, last)
        if lo >= hi:
            continue
        n = (hi - lo) * width
        device.copy2d(journal.block, journal.offset + lo * width, rows * width,
                      p.segment.block, p.segment.offset + (lo - p.segment.first) * width,
                      p.segment.rows * width, n, outer)
        moved += n * outer
    return moved


def read_rows(device: Device, spec: BufferSpec, pieces: Pieces, rows: int, target: Any) -> None:
    """Copy the first `rows` rows, compact `(outer, rows, row_bytes)`, into a host block."""
    outer, _, width = spec.rows()
    for p in pieces:
        n = (p.last - p.first) * width
        device.copy2d(target, p.first * width, rows * width,
                      p.segment.block, p.segment.offset + (p.first - p.segment.first) * width,
                      p.segment.rows * width, n, outer)


def write_rows(device: Device, spec: BufferSpec, pieces: Pieces, rows: int, source: Any) -> None:
    """Copy `rows` rows, compact `(outer, rows, row_bytes)`, from a host block into new pieces."""
    outer, _, width = spec.rows()
    for p in pieces:
        n = (p.last - p.first) * width
        device.copy2d(p.segment.block, p.segment.offset, n, source, p.first * width, rows * width,
                      n, outer)
