"""One allocation per space, from which all buffers of a live set are carved, once.

Addresses never change afterwards: captured programs hold them. STATE lies side by side, plain
buffers first, so that one copy takes all of it; journals follow, then INPUT and OUTPUT, each one
contiguous, so that inputs go to the device and actions come back in one copy each.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashrt_ros.core.layout import BufferSpec, Layout, Role, Space, align
from flashrt_ros.core.seam import Buffer, Bytes, Device


@dataclass(frozen=True)
class Region:
    """A contiguous part of a block."""

    block: Any
    offset: int
    nbytes: int


class Arena:
    """All buffers of one live set. Owns its blocks; `close` frees them."""

    def __init__(self, device: Device, layout: Layout) -> None:
        self.device = device
        self.layout = layout
        self._blocks: dict[Space, Any] = {}
        self._placed: dict[str, Buffer] = {}
        self._regions: dict[tuple[Role, Space], Region] = {}
        try:
            for space in Space:
                self._place(space)
        except BaseException:
            self.close()
            raise

    def _place(self, space: Space) -> None:
        groups = [(Role.STATE, self.layout.select(Role.STATE, space, journal=False)),
                  (None, self.layout.select(Role.STATE, space, journal=True)),
                  (Role.INPUT, self.layout.select(Role.INPUT, space)),
                  (Role.OUTPUT, self.layout.select(Role.OUTPUT, space))]
        offsets, bounds, total = place([specs for _, specs in groups])
        block = self.device.alloc(max(total, 1), space)
        self._blocks[space] = block
        for (role, specs), (start, end) in zip(groups, bounds, strict=True):
            if role is not None:
                self._regions[role, space] = Region(block, start, end - start)
            for spec in specs:
                offset = offsets[spec.name]
                view = self.device.view(block, offset, spec.nbytes)
                array = None if view is None else view.view(spec.storage).reshape(spec.shape)
                self._placed[spec.name] = Buffer(spec, block, offset, block.ptr + offset, array)

    @property
    def buffers(self) -> Mapping[str, Buffer]:
        """All buffers by name."""
        return self._placed

    def region(self, role: Role, space: Space) -> Region:
        """Return where a role's buffers lie; of STATE the plain ones, without journals."""
        return self._regions[role, space]

    def bytes_of(self, region: Region) -> Bytes | None:
        """Return a region as an array over the same memory, None where the CPU cannot reach."""
        return self.device.view(region.block, region.offset, region.nbytes)

    def read(self, name: str) -> Bytes:
        """Return a copy of a buffer's bytes, wherever it lies. Waits for the device."""
        buffer = self._placed[name]
        n = buffer.spec.nbytes
        if buffer.array is not None:
            self.device.sync()
            return np.array(buffer.array).reshape(-1).view(np.uint8)
        stage = self.device.alloc(n, Space.HOST)
        try:
            self.device.copy(stage, 0, buffer.block, buffer.offset, n)
            self.device.sync()
            view = self.device.view(stage, 0, n)
            assert view is not None
            copied: Bytes = view.copy()
            return copied
        finally:
            self.device.free(stage)

    def write(self, name: str, data: Bytes) -> None:
        """Overwrite a buffer's bytes, wherever it lies. Waits for the device."""
        buffer = self._placed[name]
        flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
        if flat.nbytes != buffer.spec.nbytes:
            raise ValueError(f'{name}: {flat.nbytes} bytes for a buffer of {buffer.spec.nbytes}')
        if buffer.array is not None:
            self.device.sync()
            buffer.array.reshape(-1).view(np.uint8)[:] = flat
            return
        stage = self.device.alloc(flat.nbytes, Space.HOST)
        try:
            view = self.device.view(stage, 0, flat.nbytes)
            assert view is not None
            view[:] = flat
            self.device.copy(buffer.block, buffer.offset, stage, 0, flat.nbytes)
            self.device.sync()
        finally:
            self.device.free(stage)

    def close(self) -> None:
        """Free the blocks. Programs bound to them must be closed before."""
        self._placed = {}
        self._regions = {}
        while self._blocks:
            self.device.free(self._blocks.popitem()[1])


def place(groups: Iterable[Iterable[BufferSpec]]
          ) -> tuple[dict[str, int], list[tuple[int, int]], int]:
    """Return `(offset by name, (start, end) of each group, total bytes)`, all 256-byte aligned."""
    offsets: dict[str, int] = {}
    bounds = []
    at = 0
    for specs in groups:
        start = at
        for spec in specs:
            offsets[spec.name] = at
            at = align(at + spec.nbytes)
        bounds.append((start, at))
    return offsets, bounds, at
