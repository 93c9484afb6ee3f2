"""The host as a device: ordinary memory, and every order carried out before the call returns.

It is the reference for what the `Device` protocol means and what ONNX Runtime and torch run on
when they run on the CPU. DEVICE and HOST space are the same kind of memory here, kept in separate
blocks so that code which confuses them fails in a test instead of on a GPU.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
import platform
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import ALIGNMENT, Space
from flashrt_ros.core.seam import Bytes

# What the libraries below us (OpenBLAS, MLAS, oneDNN) choose their kernels by. Two CPUs that
# differ here may differ in the last bits of a result.
_SIMD = ('sse4_2', 'avx', 'f16c', 'fma', 'avx2', 'avx512f', 'avx512bw', 'avx512vl', 'avx512_vnni',
         'avx_vnni', 'avx512_bf16', 'avx512_fp16', 'amx_tile', 'amx_bf16', 'amx_int8',
         'asimd', 'asimddp', 'asimdhp', 'i8mm', 'bf16', 'sve', 'sve2')


class HostBlock:
    """Ordinary memory, 256-byte aligned and zeroed. The array keeps it alive."""

    def __init__(self, nbytes: int, space: Space) -> None:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % ALIGNMENT
        self.data: Bytes = raw[skip:skip + nbytes]
        self.ptr: int = raw.ctypes.data + skip
        self.nbytes = nbytes
        self.space = space

    def part(self, offset: int, nbytes: int) -> Bytes:
        """Return bytes `offset` up to `offset + nbytes`, never fewer than asked for."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f'bytes {offset} to {offset + nbytes} of a block of {self.nbytes}')
        return self.data[offset:offset + nbytes]

    def rows(self, offset: int, pitch: int, width: int, height: int) -> NDArray[np.uint8]:
        """Return `height` runs of `width` bytes, `pitch` apart, as an array over the memory."""
        if height == 0 or width == 0:
            return np.empty((height, width), np.uint8)
        flat = self.part(offset, (height - 1) * pitch + width)
        return np.lib.stride_tricks.as_strided(flat, (height, width), (pitch, 1))


class HostDevice:
    """Synchronous memory: what was called is done, so marks have fired when they are made."""

    kind = 'host'

    def alloc(self, nbytes: int, space: Space) -> HostBlock:
        """Return a zeroed block."""
        try:
            return HostBlock(nbytes, space)
        except (MemoryError, ValueError) as e:
            raise Refusal(Code.NO_MEMORY, f'{nbytes} bytes of host memory: {e}') from e

    def free(self, block: HostBlock) -> None:
        """Forget a block; views that still exist keep their memory, so no reader can crash."""
        block.data = np.empty(0, np.uint8)
        block.nbytes = 0

    def copy(self, dst: HostBlock, dst_offset: int, src: HostBlock, src_offset: int,
             nbytes: int) -> None:
        """Copy bytes; the ranges may overlap."""
        dst.part(dst_offset, nbytes)[:] = src.part(src_offset, nbytes)

    def copy2d(self, dst: HostBlock, dst_offset: int, dst_pitch: int, src: HostBlock,
               src_offset: int, src_pitch: int, width: int, height: int) -> None:
        """Copy `height` runs of `width` bytes."""
        dst.rows(dst_offset, dst_pitch, width, height)[:] = src.rows(
            src_offset, src_pitch, width, height)

    side_copy2d = copy2d  # nothing runs behind the caller's back, so nothing has to wait

    def view(self, block: HostBlock, offset: int, nbytes: int) -> Bytes | None:
        """Return the bytes as an array over the same memory."""
        return block.part(offset, nbytes)

    def mark(self) -> object:
        """Return an event that has fired already."""
        return None

    def done(self, event: Any) -> bool:
        """Whether it fired: always."""
        return True

    def sync(self, event: Any = None) -> None:
        """Return at once: nothing is outstanding."""

    def identity(self) -> Mapping[str, str]:
        """Return the CPU: architecture, model and the instruction sets that kernels ask for."""
        return {'arch': platform.machine(), 'cpu': cpu_name()}

    def close(self) -> None:
        """Nothing to free."""


def cpu_name(cpuinfo: Path = Path('/proc/cpuinfo')) -> str:
    """Return `model: instruction sets` of the first CPU, or what Python knows without /proc."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return platform.processor() or 'unknown'
    fields: dict[str, str] = {}
    for line in text.split('\n\n')[0].splitlines():
        key, _, value = line.partition(':')
        fields[key.strip()] = value.strip()
    flags = set((fields.get('flags') or fields.get('Features') or '').split())
    model = fields.get('model name') or fields.get('CPU part') or platform.processor() or 'unknown'
    return f'{model}: {" ".join(f for f in _SIMD if f in flags)}'.rstrip(': ')
