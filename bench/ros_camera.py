"""The whole loop with a camera: 640x480 rgb8 in, resized to 96x96, a recurrent policy, joints out.

    python -m bench.ros_camera [--n 300] [--json FILE]

Beside a bare rclpy node that answers the same pictures with the same message, picture by picture in
turn. In lock step each picture is one step: the latency is that of the pipeline. Live, at 50 and
200 Hz, the camera has its own 30 Hz and a picture waits for the next step, half a period on
average; what counts there is how evenly the steps are published and what the process costs.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
import itertools
import json
import os
from pathlib import Path
import statistics
import tempfile
import threading
import time
from typing import Any

from bench.ros_node import Caller, ms, process

WIDTH, HEIGHT, CAMERA_HZ = 640, 480, 30.0
SERVE = ('--python-module', 'bench.camera_policy', '-p', 'status_hz:=2.0')
POLICY = '''
policy: {{backend: host, factory: "bench.camera_policy:camera", period_s: {period}}}
run: {{trigger: {trigger}, autorun: true}}
inputs:
  image:
    - {{term: image, topic: cam/image_raw, size: [96, 96], layout: CHW, scale: 0.00392156862745098,
       max_age_s: 60.0}}
qos: {{cam/image_raw: {{reliable: true, depth: 1}}}}
outputs:
  actions: {{topic: action, type: sensor_msgs/msg/JointState, kind: effort, joints: [a, b, c, d],
            on_stop: {{do: none}}}}
'''


class Loop:
    """A camera, and what comes back from the node that sees it."""

    def __init__(self, node: Any, name: str) -> None:
        from rclpy.qos import QoSProfile
        from sensor_msgs.msg import Image, JointState
        self._image = Image(height=HEIGHT, width=WIDTH, encoding='rgb8', step=3 * WIDTH)
        self._camera = node.create_publisher(Image, f'/{name}/cam/image_raw', QoSProfile(depth=10))
        self._pictures = [bytes([i]) * (3 * WIDTH * HEIGHT) for i in range(1, 251)]
        self._number = 0
        self._sent: dict[int, float] = {}      # number -> when, of pictures without an action yet
        self._changed = threading.Condition()
        self.latencies: list[float] = []       # s, from publication to the first action of it
        self.stamps: list[float] = []          # s, of the actions, by the node's own clock
        node.create_subscription(JointState, f'/{name}/action', self._received, 100)

    @property
    def ready(self) -> bool:
        """Whether somebody sees the camera."""
        return bool(self._camera.get_subscription_count())

    def shoot(self) -> int:
        """Publish the next picture; return its number, which is its first value too."""
        self._number = number = self._number % len(self._pictures) + 1
        self._image.data = self._pictures[number - 1]
        with self._changed:
            self._sent[number] = time.perf_counter()
        self._camera.publish(self._image)
        return number

    def _received(self, message: Any) -> None:
        now = time.perf_counter()
        number = round(message.effort[0] * 255)
        with self._changed:
            self.stamps.append(message.header.stamp.sec + message.header.stamp.nanosec * 1e-9)
            sent = self._sent.pop(number, None)
            if sent is not None:               # live, further actions come of the same picture
                self.latencies.append(now - sent)
                self._changed.notify_all()

    def exchange(self, wait_s: float = 5.0) -> float:
        """Publish a picture and wait for its action; return seconds."""
        number = self.shoot()
        with self._changed:
            if not self._changed.wait_for(lambda: number not in self._sent, wait_s):
                raise TimeoutError('no action')
            return self.latencies[-1]


def cpu_s(pid: int) -> float:
    """Return the CPU time of a process so far."""
    fields = Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')


def bare_call_ms() -> float:
    """Return the median of the policy's bare call."""
    from bench.camera_policy import camera
    from flashrt_ros.backends import host
    from flashrt_ros.core.session import Options, Session
    session = Session(camera(), host.HostDevice(), options=Options(threaded=False))
    times = []
    for _ in range(500):
        t = time.perf_counter()
        session._live.bound.enqueue()
        times.append(time.perf_counter() - t)
    session.close()
    return statistics.median(times) * 1e3


def evenness(stamps: list[float], period_s: float) -> dict[str, float]:
    """Return by how much the times between steps differ from the period, in ms."""
    return ms([abs(b - a - period_s) for a, b in itertools.pairwise(stamps)])


def in_turn(n: int, loops: dict[str, Loop]) -> dict[str, Any]:
    """Exchange one picture after the other; return each loop's latencies."""
    for i in range(n + n // 10):
        if i == n // 10:
            for loop in loops.values():
                loop.latencies.clear()
        for loop in loops.values():
            try:
                loop.exchange(1.0)
            except TimeoutError:               # counted: fewer latencies than pictures
                pass
    return {name: ms(loop.latencies) for name, loop in loops.items()}


def at_camera_rate(n: int, loops: dict[str, Loop]) -> dict[str, Any]:
    """Publish n pictures to each at CAMERA_HZ, the loops half a period apart."""
    for loop in loops.values():
        loop.latencies.clear()
        loop.stamps.clear()
    start = time.perf_counter()
    for i in range(2 * n):
        time.sleep(max(0.0, start + i / (2 * CAMERA_HZ) - time.perf_counter()))
        list(loops.values())[i % 2].shoot()
    return {name: ms(loop.latencies) for name, loop in loops.items()}


def run(caller: Caller, folder: Path, name: str, n: int, period_s: float, trigger: str,
        measure: Callable[[int, dict[str, Loop]], dict[str, Any]]) -> dict[str, Any]:
    """Serve the policy beside the echo node and measure."""
    path = folder / f'{name}.yaml'
    path.write_text(POLICY.format(period=period_s, trigger=trigger))
    loops = {'echo': Loop(caller.node, f'{name}_echo'), 'policy': Loop(caller.node, name)}
    # Reliable on both sides: half of the pictures sent best effort were lost, of the echo node too.
    qos = 'reliable'
    with process('-m', 'bench.ros_echo', '--camera', qos, '--ros-args', '-r', f'__ns:=/{name}_echo'
                 ) as echo, process('-m', 'flashrt_ros.tools.cli', 'serve', str(path),
                                    '--namespace', f'/{name}', *SERVE) as policy:
        end = time.monotonic() + 30
        for loop in loops.values():            # until discovery is complete both ways
            while not loop.ready:
                if time.monotonic() > end:
                    raise TimeoutError('the nodes did not start')
                time.sleep(0.02)
            while True:
                try:
                    loop.exchange(0.5)
                    break
                except TimeoutError:
                    if time.monotonic() > end:
                        raise
        pids = {'echo': echo.pid, 'policy': policy.pid}
        before, began = {k: cpu_s(p) for k, p in pids.items()}, time.monotonic()
        out = measure(n, loops)
        wall = time.monotonic() - began
        out['cpu'] = {k: (cpu_s(p) - before[k]) / wall for k, p in pids.items()}
        out['steps_per_s'] = len(loops['policy'].stamps) / wall
        out['pictures'] = {k: len(loop.latencies) for k, loop in loops.items()}
        out['uneven'] = evenness(loops['policy'].stamps, period_s)
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--n', type=int, default=300)
    parser.add_argument('--json', type=Path)
    arguments = parser.parse_args()
    n = arguments.n
    out: dict[str, Any] = {'bare_call_ms': bare_call_ms()}
    caller = Caller()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        out['lock step'] = run(caller, folder, 'step', n, 0.02, '{input: [cam/image_raw]}', in_turn)
        for hz in (50, 200):
            out[f'{hz} Hz'] = run(caller, folder, f'live{hz}', n, 1 / hz, 'timer', at_camera_rate)
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=2))
    print('| loop | picture to action, p50 / p99 ms | echo node, p50 / p99 ms | ratio at p50 '
          '| step off its time, p50 / p99 ms | steps/s '
          '| CPU | CPU of the echo node | pictures that arrived, of it |\n'
          '|---|---|---|---|---|---|---|---|---|')
    for name, row in out.items():
        if not isinstance(row, dict):
            continue
        ours, floor, uneven = row['policy'], row['echo'], row['uneven']
        step = name == 'lock step'
        print(f'| {name} | {ours["p50"]:.1f} / {ours["p99"]:.1f} '
              f'| {floor["p50"]:.1f} / {floor["p99"]:.1f} | '
              + (f'{ours["p50"] / floor["p50"]:.2f} | ' if step else 'waits for its step | ')
              + ('the picture decides' if step
                 else f'{uneven["p50"]:.2f} / {uneven["p99"]:.2f}')
              + f' | {row["steps_per_s"]:.0f} | {row["cpu"]["policy"]:.0%} '
                f'| {row["cpu"]["echo"]:.0%} | {row["pictures"]["policy"] / n:.0%}, '
                f'{row["pictures"]["echo"] / n:.0%} |')


if __name__ == '__main__':
    main()
