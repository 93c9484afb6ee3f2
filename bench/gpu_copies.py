"""Save and restore by size and tier, beside the ways to do it without an arena."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import copy
import io
from pathlib import Path
import tempfile
import threading
import time
from typing import Any

from bench.gpu_common import REPEATS, WARM_UPS, Results, Series, TimedDevice, p50, wall_us
from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.cuda_graph import capture
from flashrt_ros.backends.host import HostDevice
from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.layout import BufferSpec, Layout, Role, Space
from flashrt_ros.core.session import Options, Session

TIER_WARM_UPS, TIER_REPEATS = 5, 20  # of the slower tiers
# (bytes, buffers)
SIZES = ((64_000, 8), (1 << 20, 16), (16_000_000, 64), (64_000_000, 100), (94_000_000, 200),
         (377_000_000, 200), (1_000_000_000, 200))


class Inert:
    """A policy that has state and does nothing with it: what is left is the session's work."""

    def __init__(self, nbytes: int, buffers: int) -> None:
        self._specs = [BufferSpec('x', (1,), 'F32', Role.INPUT),
                       BufferSpec('actions', (1, 1), 'F32', Role.OUTPUT),
                       *(BufferSpec(f's{i:03}', (nbytes // buffers // 4,), 'F32', Role.STATE)
                         for i in range(buffers))]

    def layout(self) -> Layout:
        """Return its buffers."""
        return Layout(self._specs)

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return nothing of interest."""
        return {'weights': 'none'}, {}

    def initial(self) -> Mapping[str, Any]:
        """Return nothing."""
        return {}

    def bind(self, buffers: Any, device: Any) -> Inert:
        """Return itself."""
        return self

    def enqueue(self) -> None:
        """Do nothing."""

    def hidden(self) -> Mapping[str, str]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Free nothing."""


def run(results: Results, device: TimedDevice, limit: float) -> None:
    """Fill the tables `copies`, `tiers` and `alternatives`; judge the targets."""
    for nbytes, buffers in SIZES:
        _one_size(results, device, limit, nbytes, buffers)
    rows = {r['bytes']: r for r in results.tables['copies']}
    big = {b: r for b, r in rows.items() if b >= 64_000_000}
    worst = max(big.values(), key=lambda r: r['restore_over_copy'])
    results.target('restore against one cudaMemcpyAsync, 64 MB and more', 'at most 1.10 times',
                   ', '.join(f'{r["restore_over_copy"]:.3f}' for r in big.values()),
                   worst['restore_over_copy'] <= 1.10)
    small = rows[1 << 20]['restore_gpu_p50_us']
    results.target('restore of 1 MB in 16 buffers, GPU time', 'at most 15 µs', f'{small:.1f} µs',
                   small <= 15)
    clone = next(r for r in results.tables['alternatives'] if r['bytes'] == 94_000_000)
    factor = clone['clone_each_gpu_us'] / rows[94_000_000]['restore_gpu_p50_us']
    results.target('restore against cloning each tensor, 94 MB in 200 buffers',
                   'at least 10 times faster', f'{factor:.1f} times', factor >= 10)
    slowest = max(r['save_wall_p50_us'] for r in rows.values())
    results.target('save, wall time, whatever the size', 'under 20 µs',
                   f'{min(r["save_wall_p50_us"] for r in rows.values()):.1f} to {slowest:.1f} µs',
                   slowest < 20, "Python's own time, no byte of STATE is touched: without a card, "
                   f'on ordinary memory, the same call takes {_without_a_card():.1f} µs here')


def _without_a_card() -> float:
    """Return the wall time of a save in a session on ordinary memory, µs."""
    s = Session(Inert(64_000, 8), HostDevice(), options=Options(verify=False))
    times = []
    for i in range(WARM_UPS + REPEATS):
        s.tick_now({})
        time.sleep(0.0003)
        times.append(wall_us(lambda i=i: s.save(f'n{i}')))
        s.drop(f'n{i}')
    s.close()
    return p50(times[WARM_UPS:])


def _one_size(results: Results, device: TimedDevice, limit: float, nbytes: int, buffers: int
              ) -> None:
    directory = Path(tempfile.mkdtemp(prefix='flashrt-bench-')) if nbytes <= 100_000_000 else None
    moved = threading.Event()
    written = threading.Event()

    def on_event(event: Event) -> None:
        if event.kind is EventKind.MOVED:
            moved.set()
        if event.kind is EventKind.PERSISTED:
            written.set()
    s = Session(Inert(nbytes, buffers), device, on_event=on_event, options=Options(
        history=4, device_slots=2, host_bytes=3 * nbytes + (1 << 20), verify=False,
        directory=directory))
    plain = s._live.plain
    junk = device.alloc(plain.nbytes, Space.DEVICE)
    other = device.alloc(plain.nbytes, Space.DEVICE)
    fill(device, junk, 0xA5)

    def overwrite() -> None:
        device.copy(plain.block, plain.offset, junk, 0, plain.nbytes)
        device.sync()
    try:
        fill(device, plain.block, 0x3C, plain.offset, plain.nbytes)
        save = Series()
        for i in range(WARM_UPS + REPEATS):
            s.tick_now({})
            device.rest()           # the device thread has said that the tick is done
            took = wall_us(lambda i=i: s.save(f'n{i}'))
            s.drop(f'n{i}')
            if i >= WARM_UPS:
                save.wall.append(took)
        s.save('a')
        want = s.digest()
        restore, plain_copy = Series(), Series()
        for i in range(WARM_UPS + REPEATS):
            _on_device(s, overwrite)
            wall = wall_us(lambda: s.apply(s.plan_restore('a')).result())
            _on_device(s, overwrite)
            device.arm()
            s.apply(s.plan_restore('a')).result()
            gpu = device.elapsed_us()
            device.arm()
            # the same bytes between two other allocations, launched and timed the same way
            _on_device(s, lambda: (device.copy(other, 0, junk, 0, plain.nbytes),
                                   device.sync(device.mark())))
            reference = device.elapsed_us()
            if i >= WARM_UPS:
                restore.gpu.append(gpu)
                restore.wall.append(wall)
                plain_copy.gpu.append(reference)
        assert s.digest() == want, 'a restore did not bring the bytes back'
        ideal = 2 * plain.nbytes / limit / 1e3
        results.add('copies', bytes=nbytes, buffers=buffers,
                    save_wall_p50_us=save.row()['wall_p50_us'],
                    save_wall_p95_us=save.row()['wall_p95_us'],
                    restore_gpu_p50_us=restore.row()['gpu_p50_us'],
                    restore_gpu_p95_us=restore.row()['gpu_p95_us'],
                    restore_wall_p50_us=restore.row()['wall_p50_us'],
                    restore_wall_p95_us=restore.row()['wall_p95_us'],
                    memcpy_gpu_p50_us=plain_copy.row()['gpu_p50_us'],
                    restore_over_copy=round(p50(restore.gpu) / p50(plain_copy.gpu), 3),
                    limit_us=round(ideal, 2),
                    gb_per_s=round(2 * plain.nbytes / p50(restore.gpu) / 1e3, 1))
        _tiers(results, device, s, nbytes, plain.nbytes, overwrite, moved,
               written if directory else None)
        assert s.digest() == want, 'a restore from another tier did not bring the bytes back'
        _alternatives(results, device, nbytes, buffers)
    finally:
        s.close()
        device.free(junk)
        device.free(other)


def _on_device(s: Session, work: Callable[[], Any]) -> None:
    s._worker.call(work).result()


def fill(device: CudaDevice, block: Any, value: int, offset: int = 0, nbytes: int | None = None
         ) -> None:
    """Set bytes of device memory."""
    device.call('cudaMemsetAsync', block.ptr + offset, value,
                block.nbytes - offset if nbytes is None else nbytes, device.stream)
    device.sync()


def _tiers(results: Results, device: TimedDevice, s: Session, nbytes: int, plain: int,
           overwrite: Callable[[], None], moved: threading.Event,
           written: threading.Event | None) -> None:
    """Move capsule `a` to the host, restore it from there; write one, load and restore it."""
    moved.clear()
    for i in range(2):
        s.tick_now({})
        s.save(f'push{i}')      # two device slots: the oldest capsule goes to the host
    assert moved.wait(30)
    row: dict[str, Any] = {}
    series = Series()
    for i in range(TIER_WARM_UPS + TIER_REPEATS):
        _on_device(s, overwrite)
        wall = wall_us(lambda: s.apply(s.plan_restore('a')).result())
        device.arm()
        s.apply(s.plan_restore('a')).result()
        us = device.elapsed_us()
        if i >= TIER_WARM_UPS:
            series.gpu.append(us)
            series.wall.append(wall)
    row['host_restore_gpu_p50_us'] = series.row()['gpu_p50_us']
    row['host_restore_wall_p50_us'] = series.row()['wall_p50_us']
    row['host_restore_gb_per_s'] = round(plain / p50(series.gpu) / 1e3, 1)
    host = device.alloc(plain, Space.HOST)
    source = s._live.plain
    down = device.measure(lambda: CudaDevice.copy(device, host, 0, source.block, source.offset,
                                                  plain), warm_ups=3, repeats=20)
    device.free(host)
    row['device_to_host_gpu_p50_us'] = round(p50(down.gpu), 2)
    row['device_to_host_gb_per_s'] = round(plain / p50(down.gpu) / 1e3, 1)
    for i in range(2):
        s.drop(f'push{i}')
    if written is not None:
        out, back = [], []
        for i in range(4):
            s.tick_now({})
            written.clear()
            out.append(wall_us(lambda i=i: (s.save(f'd{i}', persist=True), written.wait(60))))
            with s._lock:       # give up the memory: only the file is left
                s._evict(next(c for c in s._store if c.name == f'd{i}'))
            back.append(wall_us(lambda i=i: (s.load(f'd{i}').result(),
                                             s.apply(s.plan_restore(f'd{i}')).result())))
            s.drop(f'd{i}')
        row['disk_save_wall_p50_us'] = round(p50(out[1:]), 1)
        row['disk_restore_wall_p50_us'] = round(p50(back[1:]), 1)
    s.apply(s.plan_restore('a')).result()
    results.add('tiers', bytes=nbytes, **row)


def _alternatives(results: Results, device: TimedDevice, nbytes: int, buffers: int) -> None:
    """What one would do with one tensor per buffer."""
    import torch
    with torch.cuda.stream(torch.cuda.ExternalStream(device.stream_ptr)):
        row = _with_tensors(device, nbytes, buffers)
        device.sync()
    torch.cuda.empty_cache()
    results.add('alternatives', bytes=nbytes, buffers=buffers, **row)


def _with_tensors(device: TimedDevice, nbytes: int, buffers: int) -> dict[str, float]:
    import torch
    live = [torch.randn(nbytes // buffers // 4, device='cuda') for _ in range(buffers)]
    kept = [t.clone() for t in live]
    state = {f's{i}': t for i, t in enumerate(live)}
    size = nbytes // buffers // 4 * 4
    graph = capture(device, lambda handle: [device._copy(a.data_ptr(), b.data_ptr(), size, handle)
                                            for a, b in zip(live, kept, strict=True)])
    row = {f'{name}_gpu_us': round(p50(device.measure(work).gpu), 1) for name, work in {
        'clone_each': lambda: [t.clone() for t in live],
        'copy_each': lambda: [a.copy_(b) for a, b in zip(live, kept, strict=True)],
        'foreach_copy': lambda: torch._foreach_copy_(live, kept),
        'graph_of_copies': graph.launch}.items()}
    graph.close()
    row['deepcopy_wall_us'] = round(p50(device.measure(lambda: copy.deepcopy(state), warm_ups=2,
                                                       repeats=10).wall), 1)
    if nbytes <= 400_000_000:
        row['torch_save_wall_us'] = round(p50([
            wall_us(lambda: torch.save(state, io.BytesIO())) for _ in range(3)][1:]), 1)
    return row
