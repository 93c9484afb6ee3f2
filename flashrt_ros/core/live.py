"""A live set: one arena, the programs bound to it, and the staging that messages reach.

Everything here runs on the device thread, except the views of inputs and HOST state, which belong
to the owner of the session.
"""
from __future__ import annotations

from collections.abc import Mapping
import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core import journal
from flashrt_ros.core.arena import Arena
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.journal import Pieces, Strands
from flashrt_ros.core.layout import Layout, Role, Space
from flashrt_ros.core.payload import Payload
from flashrt_ros.core.seam import Buffer, Device, Policy, Prefills

Arrays = Mapping[str, NDArray[Any]]
NEIGHBOURS = 4096  # bytes between lengths that one copy fetches; a copy costs more than they do


class LiveSet:
    """Buffers and programs that can tick. Owns its arena and its Bound."""

    def __init__(self, device: Device, layout: Layout, policy: Policy,
                 strand_ids: itertools.count[int]) -> None:
        self.device = device
        self.arena = Arena(device, layout)
        self._staging: list[Any] = []
        self._strand_ids = strand_ids
        try:
            self.inputs = self._stage(Role.INPUT)
            self._outputs = self._stage(Role.OUTPUT)
            self.plain = self.arena.region(Role.STATE, Space.DEVICE)
            self.host_region = self.arena.region(Role.STATE, Space.HOST)
            host = self.arena.bytes_of(self.host_region)
            assert host is not None
            self._host = host
            self.host: dict[str, NDArray[Any]] = {
                n: b.array for n, b in self.arena.buffers.items()
                if b.spec.role is Role.STATE and b.spec.space is Space.HOST and b.array is not None}
            self.journals = [b for b in self.arena.buffers.values() if b.spec.is_journal]
            names = dict.fromkeys(b.spec.length or '' for b in self.journals)
            self._read: list[tuple[Any, int, int, int]] = []  # block, offset, bytes, at in staging
            at = self._place_lengths([self.arena.buffers[n] for n in names])
            self._lengths = device.alloc(max(at, 8), Space.HOST)
            self._staging.append(self._lengths)
            view = device.view(self._lengths, 0, at)
            assert view is not None
            self._length_view = view.view(np.int64)
            self._limits = {n: min(b.spec.rows()[1] for b in self.journals if b.spec.length == n)
                            for n in names}
            self.lengths: dict[str, int] = dict.fromkeys(names, 0)
            self.strands: dict[str, Strands] = {n: ((next(strand_ids), 0),) for n in names}
            self.bound = policy.bind(self.arena.buffers, device)
        except BaseException:
            self._free()
            raise

    def _place_lengths(self, buffers: list[Buffer]) -> int:
        """Plan how lengths come to the host, neighbours at once; return the bytes of staging."""
        at = 0
        self._length_words: dict[str, int] = {}
        for b in sorted(buffers, key=lambda b: (id(b.block), b.offset)):
            last = self._read[-1] if self._read else None
            if last is not None and last[0] is b.block and b.offset - last[1] <= NEIGHBOURS:
                at = last[3]
                self._read[-1] = (b.block, last[1], b.offset + 8 - last[1], at)
                self._length_words[b.spec.name] = (at + b.offset - last[1]) // 8
            else:
                self._read.append((b.block, b.offset, 8, at))
                self._length_words[b.spec.name] = at // 8
            at += self._read[-1][2]
        return at

    def _stage(self, role: Role) -> dict[str, NDArray[Any]]:
        """Return host arrays of a role; of a device that the CPU cannot reach, pinned staging."""
        region = self.arena.region(role, Space.DEVICE)
        specs = [b.spec for b in self.arena.buffers.values() if b.spec.role is role]
        block = None
        if region.nbytes and self.arena.bytes_of(region) is None:
            block = self.device.alloc(region.nbytes, Space.HOST)
            self._staging.append(block)
        arrays: dict[str, NDArray[Any]] = {}
        for spec in specs:
            buffer = self.arena.buffers[spec.name]
            if buffer.array is not None:
                arrays[spec.name] = buffer.array
                continue
            assert block is not None
            view = self.device.view(block, buffer.offset - region.offset, spec.nbytes)
            assert view is not None
            arrays[spec.name] = view.view(spec.storage).reshape(spec.shape)
        if role is Role.INPUT:
            self._in = (block, region)
        else:
            self._out = (block, region)
        return arrays

    def start(self, initial: Arrays) -> None:
        """Set all STATE to a fresh start: zero, then `initial`."""
        for name, buffer in self.arena.buffers.items():
            if buffer.spec.role is Role.STATE:
                value = np.zeros(buffer.spec.shape, buffer.spec.storage)
                if name in initial:
                    given = np.asarray(initial[name])
                    if given.shape != buffer.spec.shape or given.dtype != buffer.spec.storage:
                        raise Refusal(Code.BACKEND, f'initial value of {name} is {given.dtype}'
                                      f'{list(given.shape)}, the buffer {buffer.spec.storage}'
                                      f'{list(buffer.spec.shape)}')
                    value[...] = given
                self.arena.write(name, value.reshape(-1).view(np.uint8))
        self.read_lengths()
        for name in self.strands:
            self.strands[name] = ((next(self._strand_ids), 0),)

    def run(self, slot: Payload | None, *, prefill: bool = False) -> dict[str, NDArray[Any]]:
        """Run one tick and commit plain STATE into `slot`; return copies of the outputs."""
        d = self.device
        block, region = self._in
        if block is not None:
            d.copy(region.block, region.offset, block, 0, region.nbytes)
        if prefill:
            if not isinstance(self.bound, Prefills):
                raise Refusal(Code.UNSUPPORTED, 'this policy has no prefill program')
            self.bound.prefill()
        else:
            self.bound.enqueue()
        block, region = self._out
        if block is not None:
            d.copy(block, 0, region.block, region.offset, region.nbytes)
        if slot is not None:
            d.copy(slot.block, slot.offset, self.plain.block, self.plain.offset, self.plain.nbytes)
        before = dict(self.lengths)
        self.read_lengths()
        for name, length in self.lengths.items():
            if length < before[name] or (prefill and self.prefill_rewrites):
                # the program rewrote the journal from its start
                self.strands[name] = ((next(self._strand_ids), 0),)
        return {n: a.copy() for n, a in self._outputs.items()}

    @property
    def prefill_rewrites(self) -> bool:
        """Whether a prefill may change rows that were final before it."""
        return not getattr(self.bound, 'prefill_appends', False)

    def read_lengths(self) -> None:
        """Bring the journals' lengths to the host. Waits for the device."""
        for block, offset, nbytes, at in self._read:
            self.device.copy(self._lengths, at, block, offset, nbytes)
        self.device.sync(self.device.mark())
        for name, word in self._length_words.items():
            length = int(self._length_view[word])
            if not 0 <= length <= self._limits[name]:
                raise Refusal(Code.BACKEND, f'{name} is {length} after a tick; its journal has '
                              f'{self._limits[name]} rows')
            self.lengths[name] = length

    def save_plain(self, slot: Payload) -> None:
        """Copy plain STATE into a slot and wait."""
        self.device.copy(slot.block, slot.offset, self.plain.block, self.plain.offset,
                         self.plain.nbytes)
        self.device.sync()

    def load(self, payload: Payload, lengths: Mapping[str, int], strands: Mapping[str, Strands],
             pieces: Mapping[str, Pieces]) -> int:
        """Return DEVICE state to a boundary and wait; return the bytes moved."""
        moved = self.plain.nbytes
        self.device.copy(self.plain.block, self.plain.offset, payload.block, payload.offset,
                         self.plain.nbytes)
        for b in self.journals:
            name = b.spec.length or ''
            want = lengths[name]
            have = journal.shared_rows(self.strands[name], self.lengths[name],
                                       strands[name], want)
            copied = journal.copy_in(self.device, b, pieces.get(b.spec.name, ()), have, want)
            if copied != journal.segment_bytes(b.spec, max(0, want - have)):
                raise Refusal(Code.INTERNAL, f'rows {have} to {want} of {b.spec.name} are kept '
                              'nowhere')
            moved += copied
        for name, want in lengths.items():
            self.strands[name] = journal.lowered(strands[name], want, next(self._strand_ids))
            self.lengths[name] = want
        self.device.sync(self.device.mark())
        return moved

    def host_block(self) -> bytes:
        """Return a copy of all HOST state."""
        return self._host.tobytes()

    def set_host(self, block: bytes) -> None:
        """Overwrite all HOST state."""
        self._host[:] = np.frombuffer(block, np.uint8)

    def close(self) -> None:
        """Free programs, then memory."""
        self.bound.close()
        self._free()

    def _free(self) -> None:
        while self._staging:
            self.device.free(self._staging.pop())
        self.arena.close()
