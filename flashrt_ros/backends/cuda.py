"""A CUDA card as a device: plain allocations, pinned host memory, one stream and one beside it.

Ordering. Everything of a live set runs on `stream`, in the order in which it was called. Copies of
`side_copy2d` run on a second stream, so that a save does not wait for the tick under way; the next
thing that is ordered on `stream` waits for them. Neither stream waits for the legacy default
stream, and nothing here uses it.

Every return code is checked, and an error names the call. An error that leaves the context dead
(an illegal address, say) is returned by every later call too; the session then stands in FAULT.

Managed and stream-ordered allocations lost against plain cudaMalloc: the first may move under a
program, the second gives memory back at a point in a stream, and a captured graph holds addresses
for the life of a session.

The library is imported when a device is made, never before.
"""
from __future__ import annotations

from collections.abc import Mapping
import ctypes
import threading
from typing import Any

import numpy as np

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space
from flashrt_ros.core.seam import Bytes

_MAX_PITCH = 2**31 - 1  # cudaMemcpy2DAsync refuses a longer one (cudaDevAttrMaxPitch)


def runtime() -> Any:
    """Return `cuda.bindings.runtime`, or refuse with how to get it."""
    try:
        from cuda.bindings import runtime as rt
    except ImportError as e:
        raise Refusal(Code.UNSUPPORTED, f'cuda-bindings is not installed ({e}); install it with '
                      "pip install 'flashrt_ros[cuda]'") from e
    return rt


class CudaBlock:
    """One cudaMalloc or cudaHostAlloc."""

    __slots__ = ('data', 'nbytes', 'ptr', 'space')

    def __init__(self, ptr: int, nbytes: int, space: Space, data: Bytes | None) -> None:
        self.ptr = ptr
        self.nbytes = nbytes
        self.space = space
        self.data = data  # of pinned memory, the same bytes

    def at(self, offset: int, nbytes: int) -> int:
        """Return the address of bytes `offset` up to `offset + nbytes`, never past the end."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise ValueError(f'bytes {offset} to {offset + nbytes} of a block of {self.nbytes}')
        return self.ptr + offset


class CudaEvent:
    """A recorded event; its handle goes back to the device's list when nobody holds it."""

    __slots__ = ('_spare', 'handle')

    def __init__(self, handle: Any, spare: list[Any]) -> None:
        self.handle = handle
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.handle)


class CudaDevice:
    """One card. `wait` is 'spin' (a core at work while it waits) or 'block' (the thread sleeps)."""

    kind = 'cuda'

    def __init__(self, ordinal: int = 0, *, wait: str = 'spin', rt: Any = None) -> None:
        self.rt = rt if rt is not None else runtime()
        self.ordinal = ordinal
        self._local = threading.local()
        self._spare_events: list[Any] = []
        # Copies ordered on `side`, and how many of them `stream` waits for.
        self._side_ordered = self._side_joined = 0
        self._side_lock = threading.Lock()
        self._streams: list[Any] = []
        if wait not in ('spin', 'block'):
            raise Refusal(Code.INVALID_POLICY_FILE, f'wait: {wait!r} is not spin or block')
        self._event_flags = self.rt.cudaEventDisableTiming | (
            self.rt.cudaEventBlockingSync if wait == 'block' else 0)
        count = self.call('cudaGetDeviceCount')
        if not 0 <= ordinal < count:
            raise Refusal(Code.UNSUPPORTED, f'CUDA device {ordinal} of {count}; choose another')
        self.enter()
        self._props = self.call('cudaGetDeviceProperties', ordinal)
        self.stream = self._new_stream()
        self.side = self._new_stream()
        # Handles as plain numbers: what the bindings accept fastest and torch expects.
        self.stream_ptr = int(self.stream)
        self._memcpy = self.rt.cudaMemcpyAsync
        self._default_kind = self.rt.cudaMemcpyKind.cudaMemcpyDefault
        self._ok = self.rt.cudaError_t.cudaSuccess
        self._not_ready = self.rt.cudaError_t.cudaErrorNotReady

    # -- calls ----------------------------------------------------------------------------

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the runtime; return what it gives, refuse by name if it fails."""
        error, *rest = getattr(self.rt, name)(*args)
        if error != self.rt.cudaError_t.cudaSuccess:
            raise self.refusal(name, error)
        return rest[0] if len(rest) == 1 else tuple(rest) or None

    def refusal(self, name: str, error: Any) -> Refusal:
        """Return what is raised for a failed call."""
        text = self.rt.cudaGetErrorString(error)[1]
        text = text.decode() if isinstance(text, bytes) else str(text)
        what = f'{name} failed: {getattr(error, "name", error)} ({text})'
        if error == self.rt.cudaError_t.cudaErrorMemoryAllocation:
            return Refusal(Code.NO_MEMORY, f'{what}; free device memory, or lower device_slots '
                           'or segment_bytes')
        return Refusal(Code.BACKEND, what)

    def enter(self) -> None:
        """Make this card the current one of the calling thread; each thread needs it once."""
        if not getattr(self._local, 'entered', False):
            self.call('cudaSetDevice', self.ordinal)
            self._local.entered = True

    def _new_stream(self) -> Any:
        stream = self.call('cudaStreamCreateWithFlags', self.rt.cudaStreamNonBlocking)
        self._streams.append(stream)
        return stream

    # -- memory ---------------------------------------------------------------------------

    def alloc(self, nbytes: int, space: Space) -> CudaBlock:
        """Return a zeroed block. Raises Refusal(NO_MEMORY)."""
        self.enter()
        try:
            if space is Space.HOST:
                ptr = int(self.call('cudaHostAlloc', nbytes, self.rt.cudaHostAllocPortable))
                data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(ptr))
                data[:] = 0
                return CudaBlock(ptr, nbytes, space, data)
            ptr = int(self.call('cudaMalloc', nbytes))
        except Refusal as e:
            if e.code is Code.NO_MEMORY:
                self.rt.cudaGetLastError()  # not sticky: the next call must not report it
                raise Refusal(Code.NO_MEMORY, f'{nbytes} bytes of {space.name} memory: '
                              f'{e.message}') from e
            raise
        # Zeroed beside the stream: an allocation does not queue behind a running tick.
        self.call('cudaMemsetAsync', ptr, 0, nbytes, self.side)
        self.call('cudaStreamSynchronize', self.side)
        return CudaBlock(ptr, nbytes, space, None)

    def free(self, block: CudaBlock) -> None:
        """Give a block back."""
        self.enter()
        ptr, block.ptr, block.nbytes, block.data = block.ptr, 0, 0, None
        if ptr:
            self.call('cudaFreeHost' if block.space is Space.HOST else 'cudaFree', ptr)

    def view(self, block: CudaBlock, offset: int, nbytes: int) -> Bytes | None:
        """Return pinned bytes; None for device memory, on integrated cards too.

        (An integrated card could map it, but a write by the CPU then has no place in the stream.)
        """
        block.at(offset, nbytes)
        return None if block.data is None else block.data[offset:offset + nbytes]

    # -- order ----------------------------------------------------------------------------

    def join(self) -> None:
        """Let what comes next on `stream` wait for the copies on `side`."""
        if self._side_joined != self._side_ordered:
            with self._side_lock:
                event = self._event()
                self.call('cudaEventRecord', event.handle, self.side)
                self.call('cudaStreamWaitEvent', self.stream, event.handle, 0)
                self._side_joined = self._side_ordered

    def copy(self, dst: CudaBlock, dst_offset: int, src: CudaBlock, src_offset: int,
             nbytes: int) -> None:
        """Copy bytes between any two blocks, in stream order."""
        # Several times per tick, so written out: no calls, and the card need not be the current
        # one of the thread, as the stream says which it is.
        if self._side_joined != self._side_ordered:
            self.join()
        if (min(dst_offset, src_offset, nbytes) < 0 or dst_offset + nbytes > dst.nbytes
                or src_offset + nbytes > src.nbytes):
            dst.at(dst_offset, nbytes)
            src.at(src_offset, nbytes)
        if nbytes:
            error, = self._memcpy(dst.ptr + dst_offset, src.ptr + src_offset, nbytes,
                                  self._default_kind, self.stream)
            if error != self._ok:
                raise self.refusal('cudaMemcpyAsync', error)

    def _copy(self, dst: int, src: int, nbytes: int, stream: Any) -> None:
        error, = self._memcpy(dst, src, nbytes, self._default_kind, stream)
        if error != self._ok:
            raise self.refusal('cudaMemcpyAsync', error)

    def copy2d(self, dst: CudaBlock, dst_offset: int, dst_pitch: int, src: CudaBlock,
               src_offset: int, src_pitch: int, width: int, height: int) -> None:
        """Copy `height` runs of `width` bytes, in stream order."""
        self.enter()
        self.join()
        self._copy2d(dst, dst_offset, dst_pitch, src, src_offset, src_pitch, width, height,
                     self.stream)

    def side_copy2d(self, dst: CudaBlock, dst_offset: int, dst_pitch: int, src: CudaBlock,
                    src_offset: int, src_pitch: int, width: int, height: int) -> None:
        """As copy2d, from any thread, beside a running program."""
        self.enter()
        with self._side_lock:
            self._copy2d(dst, dst_offset, dst_pitch, src, src_offset, src_pitch, width, height,
                         self.side)
            self._side_ordered += 1

    def _copy2d(self, dst: CudaBlock, dst_offset: int, dst_pitch: int, src: CudaBlock,
                src_offset: int, src_pitch: int, width: int, height: int, stream: Any) -> None:
        if not width or not height:
            return
        to = dst.at(dst_offset, (height - 1) * dst_pitch + width)
        at = src.at(src_offset, (height - 1) * src_pitch + width)
        if height == 1 or width == dst_pitch == src_pitch:
            self._copy(to, at, width * height, stream)
        elif max(dst_pitch, src_pitch) > _MAX_PITCH:
            for i in range(height):
                self._copy(to + i * dst_pitch, at + i * src_pitch, width, stream)
        else:
            self.call('cudaMemcpy2DAsync', to, dst_pitch, at, src_pitch, width, height,
                      self._default_kind, stream)

    def launch(self, executable: Any) -> None:
        """Launch an instantiated graph, in stream order."""
        if self._side_joined != self._side_ordered:
            self.join()
        error, = self.rt.cudaGraphLaunch(executable, self.stream)
        if error != self._ok:
            raise self.refusal('cudaGraphLaunch', error)

    def _event(self) -> CudaEvent:
        try:
            handle = self._spare_events.pop()
        except IndexError:
            self.enter()
            handle = self.call('cudaEventCreateWithFlags', self._event_flags)
        return CudaEvent(handle, self._spare_events)

    def mark(self) -> CudaEvent:
        """Return an event that fires when all that was ordered so far is done."""
        if self._side_joined != self._side_ordered:
            self.join()
        event = self._event()
        error, = self.rt.cudaEventRecord(event.handle, self.stream)
        if error != self._ok:
            raise self.refusal('cudaEventRecord', error)
        return event

    def done(self, event: CudaEvent) -> bool:
        """Whether it fired."""
        error, = self.rt.cudaEventQuery(event.handle)
        if error == self._ok:
            return True
        if error == self._not_ready:
            return False
        raise self.refusal('cudaEventQuery', error)

    def sync(self, event: CudaEvent | None = None) -> None:
        """Wait for an event, or for all that was ordered."""
        if event is None:
            event = self.mark()
        error, = self.rt.cudaEventSynchronize(event.handle)
        if error != self._ok:
            raise self.refusal('cudaEventSynchronize', error)

    # -- about ----------------------------------------------------------------------------

    @property
    def integrated(self) -> bool:
        """Whether card and CPU share one memory (Jetson): the HOST tier then frees nothing."""
        return bool(self._props.integrated)

    def memory(self) -> tuple[int, int]:
        """Return `(free, total)` bytes of device memory, of all processes together."""
        self.enter()
        free, total = self.call('cudaMemGetInfo')
        return int(free), int(total)

    def identity(self) -> Mapping[str, str]:
        """Return what results may depend on: architecture, card, driver and runtime versions."""
        name = self._props.name
        text = name.decode() if isinstance(name, bytes) else str(name)
        return {'cuda.arch': f'sm_{self._props.major}{self._props.minor}',
                'cuda.device': text.strip('\0'),
                'cuda.multiprocessors': str(self._props.multiProcessorCount),
                'cuda.driver': _version(self.call('cudaDriverGetVersion')),
                'cuda.runtime': _version(self.call('cudaRuntimeGetVersion')),
                'cuda.alignment': '256'}

    def close(self) -> None:
        """Free streams and events."""
        if not self._streams:
            return
        self.enter()
        while self._streams:
            self.call('cudaStreamDestroy', self._streams.pop())
        while self._spare_events:
            self.call('cudaEventDestroy', self._spare_events.pop())


def _version(number: Any) -> str:
    return f'{int(number) // 1000}.{int(number) % 1000 // 10}'
