"""Graphs: work that is captured once over fixed addresses and launched again and again.

Captured operations refer to memory, they do not own it: whoever captures keeps arena, weights and
scratch alive for as long as the graph. Capture is thread-local, so that another session, or torch
in another thread, may allocate meanwhile.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashrt_ros.backends.cuda import CudaDevice


class CudaGraph:
    """An instantiated graph of one device. `close` frees it."""

    def __init__(self, device: CudaDevice, graph: Any, *, owned: bool = True) -> None:
        self._device = device
        self._graph = graph if owned else None
        try:
            self._executable = device.call('cudaGraphInstantiate', graph, 0)
            device.call('cudaGraphUpload', self._executable, device.stream)
        except BaseException:
            self._executable = None
            self.close()
            raise

    def launch(self) -> None:
        """Order the whole graph."""
        self._device.launch(self._executable)

    def close(self) -> None:
        """Free it. No launch may be outstanding."""
        executable, self._executable = self._executable, None
        graph, self._graph = self._graph, None
        if executable is not None:
            self._device.call('cudaGraphExecDestroy', executable)
        if graph is not None:
            self._device.call('cudaGraphDestroy', graph)


def capture(device: CudaDevice, work: Callable[[Any], None]) -> CudaGraph:
    """Capture what `work(stream)` orders on the stream that it is given.

    That is a stream of its own: waits that other threads put into the device's stream must not
    end up in the graph.
    """
    device.enter()
    rt = device.rt
    stream = device.call('cudaStreamCreateWithFlags', rt.cudaStreamNonBlocking)
    try:
        device.call('cudaStreamBeginCapture', stream,
                    rt.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal)
        try:
            work(stream)
        except BaseException:
            _, broken = rt.cudaStreamEndCapture(stream)
            if broken is not None and int(broken):
                rt.cudaGraphDestroy(broken)
            rt.cudaGetLastError()
            raise
        return CudaGraph(device, device.call('cudaStreamEndCapture', stream))
    finally:
        device.call('cudaStreamDestroy', stream)
