"""A double of cuda.bindings.runtime on host memory: streams in order, capture, graphs.

Work is carried out when it is ordered, or, on a capturing stream, when the graph is launched. What
CUDA forbids during a capture (allocation, waiting) ends the capture here too, and memory is checked
to belong to an allocation. Addresses are real, so what a test writes there is what a kernel reads.
"""
from __future__ import annotations

from collections.abc import Callable
import ctypes
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import numpy as np

Work = Callable[[], None]


class Error(IntEnum):
    """The part of cudaError_t that is used."""

    cudaSuccess = 0  # noqa: N815
    cudaErrorInvalidValue = 1  # noqa: N815
    cudaErrorMemoryAllocation = 2  # noqa: N815
    cudaErrorInsufficientDriver = 35  # noqa: N815
    cudaErrorNotReady = 600  # noqa: N815
    cudaErrorStreamCaptureUnsupported = 900  # noqa: N815
    cudaErrorStreamCaptureInvalidated = 901  # noqa: N815


OK = Error.cudaSuccess


class Stream:
    """A stream; `captured` is a list while it captures, `broken` when that went wrong."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.captured: list[Work] | None = None
        self.broken = False

    def __int__(self) -> int:
        return self.handle


class Cudart:
    """The functions, named as in the bindings. `log` keeps the names of all calls."""

    cudaError_t = Error  # noqa: N815
    cudaEventDisableTiming = 2  # noqa: N815
    cudaEventBlockingSync = 1  # noqa: N815
    cudaStreamNonBlocking = 1  # noqa: N815
    cudaHostAllocPortable = 1  # noqa: N815
    cudaMemcpyKind = SimpleNamespace(cudaMemcpyDefault=4, cudaMemcpyDeviceToDevice=3)  # noqa: N815
    cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)  # noqa: N815

    def __init__(self, major: int = 8, minor: int = 9, name: str = 'double') -> None:
        self.properties = SimpleNamespace(major=major, minor=minor, name=name.encode(),
                                          multiProcessorCount=1, integrated=0)
        self.blocks: dict[int, Any] = {}
        self.streams: dict[int, Stream] = {}
        self.log: list[str] = []
        self.limit = 1 << 30
        self.last = OK

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith('cuda') and callable(value) and not isinstance(value, type):
            self.log.append(name)
        return value

    # -- what work is made of -------------------------------------------------------------

    def stream(self, handle: Any) -> Stream:
        """Return the stream of a handle or object."""
        return self.streams[int(handle)]

    def order(self, stream: Any, work: Work) -> Error:
        """Carry work out in order, or put it into the capture."""
        s = self.stream(stream)
        if s.broken:
            return Error.cudaErrorStreamCaptureInvalidated
        if s.captured is None:
            work()
        else:
            s.captured.append(work)
        return OK

    def owns(self, ptr: int, nbytes: int) -> bool:
        """Whether a range lies in one allocation."""
        return any(start <= ptr and ptr + nbytes <= start + block.nbytes
                   for start, block in self.blocks.items())

    def _forbidden(self) -> bool:
        """End every capture of this double, as an unsafe call of the same thread does."""
        capturing = [s for s in self.streams.values() if s.captured is not None]
        for s in capturing:
            s.broken = True
        self.last = Error.cudaErrorStreamCaptureUnsupported if capturing else self.last
        return bool(capturing)

    # -- the bindings ---------------------------------------------------------------------

    def cudaGetDeviceCount(self) -> Any:
        return OK, 1

    def cudaSetDevice(self, ordinal: int) -> Any:
        return OK,

    def cudaGetDeviceProperties(self, ordinal: int) -> Any:
        return OK, self.properties

    def cudaDriverGetVersion(self) -> Any:
        return OK, 13000

    def cudaRuntimeGetVersion(self) -> Any:
        return OK, 13000

    def cudaGetErrorString(self, error: Any) -> Any:
        return OK, b'double'

    def cudaGetLastError(self) -> Any:
        last, self.last = self.last, OK
        return last,

    def cudaMemGetInfo(self) -> Any:
        return OK, self.limit - sum(b.nbytes for b in self.blocks.values()), self.limit

    def _allocate(self, nbytes: int) -> Any:
        if self._forbidden():
            return Error.cudaErrorStreamCaptureUnsupported, 0
        if nbytes + sum(b.nbytes for b in self.blocks.values()) > self.limit:
            self.last = Error.cudaErrorMemoryAllocation
            return Error.cudaErrorMemoryAllocation, 0
        raw = np.full(nbytes + 256, 0xCD, np.uint8)
        skip = -raw.ctypes.data % 256
        block = raw[skip:skip + nbytes]
        self.blocks[block.ctypes.data] = block
        return OK, block.ctypes.data

    def cudaMalloc(self, nbytes: int) -> Any:
        return self._allocate(nbytes)

    def cudaHostAlloc(self, nbytes: int, flags: int) -> Any:
        return self._allocate(nbytes)

    def cudaFree(self, ptr: int) -> Any:
        del self.blocks[int(ptr)]
        return OK,

    cudaFreeHost = cudaFree  # noqa: N815

    def cudaStreamCreateWithFlags(self, flags: int) -> Any:
        handle = 0x1000 + 16 * len(self.streams)
        self.streams[handle] = Stream(handle)
        return OK, self.streams[handle]

    def cudaStreamDestroy(self, stream: Any) -> Any:
        self.stream(stream).captured = None
        return OK,

    def cudaStreamSynchronize(self, stream: Any) -> Any:
        return (Error.cudaErrorStreamCaptureUnsupported if self._forbidden() else OK,)

    def cudaStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> Any:
        return OK,

    def cudaEventCreateWithFlags(self, flags: int) -> Any:
        return OK, SimpleNamespace()

    def cudaEventRecord(self, event: Any, stream: Any) -> Any:
        return OK,

    def cudaEventQuery(self, event: Any) -> Any:
        return OK,

    def cudaEventSynchronize(self, event: Any) -> Any:
        return (Error.cudaErrorStreamCaptureUnsupported if self._forbidden() else OK,)

    def cudaEventDestroy(self, event: Any) -> Any:
        return OK,

    def cudaMemsetAsync(self, ptr: int, value: int, nbytes: int, stream: Any) -> Any:
        return self.order(stream, lambda: void(ctypes.memset(ptr, value, nbytes))),

    def cudaMemcpyAsync(self, dst: int, src: int, nbytes: int, kind: Any, stream: Any) -> Any:
        if not (self.owns(dst, nbytes) and self.owns(src, nbytes)):
            return Error.cudaErrorInvalidValue,
        return self.order(stream, lambda: void(ctypes.memmove(dst, src, nbytes))),

    def cudaMemcpy2DAsync(self, dst: int, dst_pitch: int, src: int, src_pitch: int, width: int,
                          height: int, kind: Any, stream: Any) -> Any:
        def work() -> None:
            for i in range(height):
                ctypes.memmove(dst + i * dst_pitch, src + i * src_pitch, width)
        return self.order(stream, work),

    def cudaStreamBeginCapture(self, stream: Any, mode: Any) -> Any:
        self.stream(stream).captured = []
        return OK,

    def cudaStreamEndCapture(self, stream: Any) -> Any:
        s = self.stream(stream)
        work, s.captured = s.captured, None
        broken, s.broken = s.broken, False
        return (Error.cudaErrorStreamCaptureInvalidated, None) if broken else (OK, Graph(work))

    def cudaGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return OK, Graph(graph.work)

    def cudaGraphUpload(self, executable: Any, stream: Any) -> Any:
        return OK,

    def cudaGraphLaunch(self, executable: Any, stream: Any) -> Any:
        def work() -> None:
            for step in executable.work:
                step()
        return self.order(stream, work),

    def cudaGraphExecDestroy(self, executable: Any) -> Any:
        executable.work = None
        return OK,

    def cudaGraphDestroy(self, graph: Any) -> Any:
        graph.work = None
        return OK,


class Graph:
    """Captured work."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def __int__(self) -> int:
        return id(self)


def void(_: object) -> None:
    """Drop a value."""
