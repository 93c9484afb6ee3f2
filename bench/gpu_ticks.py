"""A tick: captured against eager, and what Python costs beside the card."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
import time

import numpy as np

from bench.gpu_common import REPEATS, WARM_UPS, Results, Series, TimedDevice, p50
from flashrt_ros.backends.hybrid import decoder, flow
from flashrt_ros.backends.torch_program import ProgramPolicy, settings
from flashrt_ros.core.layout import Role, Space
from flashrt_ros.core.session import Options, Session

G1 = Path(__file__).resolve().parents[2] / 'shared' / 'data' / 'g1_lstm_walk' / 'motion.pt'


def policies() -> Mapping[str, Callable[[], ProgramPolicy]]:
    """Return the policies of the table, by name."""
    found: dict[str, Callable[[], ProgramPolicy]] = {
        'flow head': lambda: ProgramPolicy(flow()),
        'decoder small': lambda: ProgramPolicy(decoder('small')),
        'decoder 1b': lambda: ProgramPolicy(decoder('1b', context=4096, prompt=2048))}
    if G1.exists():
        found = {'G1 LSTM (TorchScript)': g1, **found}
    return found


def g1() -> ProgramPolicy:
    """Return the walking policy of the Unitree G1, a TorchScript module with state in buffers."""
    from flashrt_ros.backends import torch_model
    from flashrt_ros.backends.spec import PolicySpec
    policy, _ = torch_model.load(PolicySpec(model=G1, model_root=G1.parent, shapes={'x': (1, 47)},
                                            options={'device': 'cuda'}))
    return policy


def run(results: Results, device: TimedDevice) -> None:
    """Fill the table `ticks`."""
    import torch
    for name, make in policies().items():
        _one(results, device, name, make())
        torch.cuda.empty_cache()
    rows = results.tables['ticks']
    worst = max(r['python_us'] for r in rows)
    results.target('Python and driver calls per tick beside the GPU', 'at most 60 µs',
                   ', '.join(f'{r["policy"]}: {r["python_us"]} µs' for r in rows), worst <= 60,
                   'the same calls, launch included, take longer after a longer wait: '
                   + ', '.join(f'{r["launch_python_us"]} µs' for r in rows) + ' to launch alone')


def _one(results: Results, device: TimedDevice, name: str, policy: ProgramPolicy) -> None:
    s = Session(policy, device, options=Options(verify=False, threaded=False))
    try:
        replay = device.measure(s._live.bound.enqueue)
        enqueue = Series()
        for _ in range(REPEATS):
            device.sync()
            started = time.perf_counter()
            s._live.bound.enqueue()
            enqueue.wall.append((time.perf_counter() - started) * 1e6)
        eager = _eager(device, policy, s)
        whole, python = _session_ticks(s, device)
    finally:
        s.close()
    threaded = Session(policy, device, options=Options(verify=False))
    try:
        beside, _ = _session_ticks(threaded, device)
    finally:
        threaded.close()
    graph = p50(replay.gpu)
    results.add('ticks', policy=name, replay_gpu_p50_us=round(graph, 1),
                replay_gpu_p95_us=replay.row()['gpu_p95_us'],
                launch_python_us=round(p50(enqueue.wall), 1),
                eager_gpu_p50_us=round(p50(eager.gpu), 1),
                faster_than_eager=round(p50(eager.gpu) / graph, 1),
                tick_wall_p50_us=whole.row()['wall_p50_us'],
                tick_wall_p95_us=whole.row()['wall_p95_us'],
                python_us=round(python, 1),
                beside_gpu_us=round(p50(whole.wall) - graph, 1),
                threaded_tick_wall_p50_us=beside.row()['wall_p50_us'],
                threaded_beside_gpu_us=round(p50(beside.wall) - graph, 1))


def _eager(device: TimedDevice, policy: ProgramPolicy, s: Session) -> Series:
    """Return the times of the program run operation by operation."""
    import torch

    from flashrt_ros.backends.torch_cuda import device_tensor
    where = torch.device('cuda', device.ordinal)
    tensors = {n: device_tensor(b, where) for n, b in s._live.arena.buffers.items()
               if b.spec.space is Space.DEVICE}
    program = policy.program.programs()['tick']
    with settings(policy), torch.cuda.stream(torch.cuda.ExternalStream(device.stream_ptr)):
        return device.measure(lambda: program(tensors), warm_ups=10)


def _session_ticks(s: Session, device: TimedDevice) -> tuple[Series, float]:
    """Return the wall time of whole ticks (latch, run, commit, outputs), and the median time that
    the caller did not spend waiting for the card."""
    rng = np.random.default_rng(0)
    inputs = {b.name: rng.uniform(-1, 1, b.shape).astype(b.storage) for b in s.layout.values()
              if b.role is Role.INPUT and b.storage.kind == 'f'}
    series, busy = Series(), []
    for i in range(WARM_UPS + 4 * REPEATS):
        waited = device.waited_us
        started = time.perf_counter()
        s.tick_now(inputs)
        took = (time.perf_counter() - started) * 1e6
        if i >= WARM_UPS:
            series.wall.append(took)
            busy.append(took - (device.waited_us - waited))
    return series, p50(busy)
