"""Clocks, statistics and targets of the GPU benchmarks."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
import datetime
import platform
import time
from typing import Any

import numpy as np

from flashrt_ros.backends.cuda import CudaBlock, CudaDevice, CudaEvent
from flashrt_ros.backends.cuda_graph import CudaGraph, capture

WARM_UPS, REPEATS = 30, 50


@dataclass
class Series:
    """Times of one thing, microseconds: between events on the card, and on the wall."""

    gpu: list[float] = field(default_factory=list)
    wall: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Return p50 and p95 of both."""
        out = {'repeats': max(len(self.gpu), len(self.wall))}
        for name, values in (('gpu', self.gpu), ('wall', self.wall)):
            if values:
                out[f'{name}_p50_us'] = round(float(np.median(values)), 2)
                out[f'{name}_p95_us'] = round(float(np.percentile(values, 95)), 2)
        return out


class TimedDevice(CudaDevice):
    """A device that can time its own copies: from before the first to after the last since `arm`.

    Restores and plain copies are timed by the same code on the same path, so that they compare. A
    short spin is put before the first, so that the time until Python has launched is not counted.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._spin = _spin_graph(self)
        self._first = self.call('cudaEventCreateWithFlags', 0)
        self._last = self.call('cudaEventCreateWithFlags', 0)
        self._armed = self._open = self._spinning = False
        self.waited_us = 0.0    # in sync, all told

    def sync(self, event: CudaEvent | None = None) -> None:
        """See CudaDevice."""
        event = event if event is not None else self.mark()
        started = time.perf_counter()
        super().sync(event)
        self.waited_us += (time.perf_counter() - started) * 1e6

    def arm(self, *, spin: bool = True) -> None:
        """Time the copies that follow."""
        self._armed = self._open = True
        self._spinning = spin

    def elapsed_us(self) -> float:
        """Return the time of the copies since `arm`; they are done when this returns."""
        self._armed = self._open = False
        self.call('cudaEventSynchronize', self._last)
        return float(self.call('cudaEventElapsedTime', self._first, self._last)) * 1e3

    def _timed(self, stream: Any, work: Callable[[], None]) -> None:
        if self._open:
            self._open = False
            if self._spinning:
                self.call('cudaGraphLaunch', self._spin._executable, stream)
            self.call('cudaEventRecord', self._first, stream)
        work()
        if self._armed:
            self.call('cudaEventRecord', self._last, stream)

    def copy(self, dst: CudaBlock, dst_offset: int, src: CudaBlock, src_offset: int,
             nbytes: int) -> None:
        """See CudaDevice."""
        if self._armed:
            self._timed(self.stream, lambda: CudaDevice.copy(self, dst, dst_offset, src,
                                                             src_offset, nbytes))
        else:
            CudaDevice.copy(self, dst, dst_offset, src, src_offset, nbytes)

    def copy2d(self, *args: Any) -> None:
        """See CudaDevice."""
        self._timed(self.stream, lambda: CudaDevice.copy2d(self, *args))

    def side_copy2d(self, *args: Any) -> None:
        """See CudaDevice."""
        self._timed(self.side, lambda: CudaDevice.side_copy2d(self, *args))

    def rest(self, seconds: float = 0.0003) -> None:
        """Let other threads of this process finish, without letting the processor fall asleep."""
        event = self.mark()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self.done(event)        # leaves Python for a moment

    # -- other work -----------------------------------------------------------------------

    def measure(self, work: Callable[[], Any], *, before: Callable[[], Any] | None = None,
                warm_ups: int = WARM_UPS, repeats: int = REPEATS) -> Series:
        """Time what `work` orders on the stream, by events, and its wall time until it is done."""
        series = Series()
        for i in range(warm_ups + repeats):
            if before is not None:
                before()
            self.sync()
            started = time.perf_counter()
            self.call('cudaEventRecord', self._first, self.stream)
            work()
            self.call('cudaEventRecord', self._last, self.stream)
            self.call('cudaEventSynchronize', self._last)
            wall = time.perf_counter() - started
            if i >= warm_ups:
                series.wall.append(wall * 1e6)
                series.gpu.append(float(self.call('cudaEventElapsedTime', self._first,
                                                  self._last)) * 1e3)
        return series


def _spin_graph(device: CudaDevice) -> CudaGraph:
    """Return a graph that keeps the card busy for about 80 µs."""
    import torch

    def work(stream: Any) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            torch.cuda._sleep(150_000)
    torch.cuda._sleep(10)
    torch.cuda.synchronize()
    return capture(device, work)


def wall_us(work: Callable[[], Any]) -> float:
    """Return the wall time of a call, microseconds."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


@dataclass
class Target:
    """What was to be reached, what was measured, and why not where it was not."""

    name: str
    target: str
    measured: str
    met: bool
    note: str = ''


class Results:
    """All tables of a run, written as JSON."""

    def __init__(self) -> None:
        self.tables: dict[str, list[dict[str, Any]]] = {}
        self.targets: list[Target] = []
        self.facts: dict[str, Any] = {}
        self._started = time.perf_counter()

    def add(self, table: str, **row: Any) -> dict[str, Any]:
        """Add a row and print it."""
        self.tables.setdefault(table, []).append(row)
        print(f'[{time.perf_counter() - self._started:6.1f} s] {table}: '
              + ', '.join(f'{k} {v}' for k, v in row.items()), flush=True)
        return row

    def target(self, name: str, target: str, measured: str, met: bool, note: str = '') -> None:
        """Judge a target."""
        self.targets.append(Target(name, target, measured, bool(met), note))
        print(f'TARGET {"met   " if met else "MISSED"} {name}: {measured} (target {target})',
              flush=True)

    def note(self, text: str) -> None:
        """Say where the run stands."""
        print(f'[{time.perf_counter() - self._started:6.1f} s] {text}', flush=True)

    def as_json(self) -> dict[str, Any]:
        """Return everything."""
        self.facts['seconds'] = round(time.perf_counter() - self._started, 1)
        return {'facts': self.facts, 'targets': [vars(t) for t in self.targets],
                'tables': self.tables}


def facts(device: CudaDevice) -> dict[str, Any]:
    """Return the machine and the versions."""
    import torch
    total = device.memory()[1]
    return {'date': datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            **device.identity(), 'memory_gib': round(total / 2**30, 1),
            'torch': torch.__version__, 'python': platform.python_version(),
            'cpu': _cpu(), 'numpy': np.__version__,
            'command': 'python -m bench.gpu_capsules'}


def _cpu() -> str:
    try:
        with open('/proc/cpuinfo') as f:
            return next(line.split(':', 1)[1].strip() for line in f
                        if line.startswith('model name'))
    except (OSError, StopIteration):
        return platform.machine()


def copy_limit(device: TimedDevice, nbytes: int = 4 << 30) -> float:
    """Return the bandwidth of a long device copy, GB/s, bytes read and written both counted."""
    from flashrt_ros.core.layout import Space
    a, b = device.alloc(nbytes, Space.DEVICE), device.alloc(nbytes, Space.DEVICE)
    series = device.measure(lambda: CudaDevice.copy(device, a, 0, b, 0, nbytes), warm_ups=3,
                            repeats=10)
    device.free(a)
    device.free(b)
    return 2 * nbytes / float(np.median(series.gpu)) / 1e3


def matrix_peak(size: int = 8192, repeats: int = 20) -> float:
    """Return the rate of a large BF16 product on random data, TFLOP/s."""
    import torch
    a, b = (torch.randn(size, size, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times = []
    for i in range(3 + repeats):
        ends[0].record()
        torch.mm(a, b)
        ends[1].record()
        ends[1].synchronize()
        if i >= 3:
            times.append(ends[0].elapsed_time(ends[1]))
    return 2 * size**3 / float(np.median(times)) / 1e9


def size_text(nbytes: int) -> str:
    """Return a number of bytes for people."""
    value = float(nbytes)
    for unit in ('B', 'KB', 'MB', 'GB'):
        if value < 1000 or unit == 'GB':
            return f'{value:.3g} {unit}'
        value /= 1000
    return ''


def p50(values: Sequence[float]) -> float:
    """Return the median."""
    return float(np.median(values))
