"""The whole ROS node on a GPU: jitter of published steps, verbs from a second process meanwhile.

    python -m bench.gpu_node [--device cuda] [--out docs] [--seconds 4]

This process is the second one: it publishes the robot's messages, listens to the actions and calls
the verbs; `flashrt-ros serve` runs in a child. Intervals are between the publisher's own time
stamps (source time stamps of DDS), so this process's load is not in them. Needs the ROS packages.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
G1 = ROOT.parent / 'shared' / 'data' / 'g1_lstm_walk'
LEGS = [f'{side}_{joint}_joint' for side in ('left', 'right') for joint in (
    'hip_pitch', 'hip_roll', 'hip_yaw', 'knee', 'ankle_pitch', 'ankle_roll')]
INPUT_HZ = 200.0
SAVES, REWINDS = 60, 20
DOMAIN = 1 + os.getpid() % 100


def g1_file(period_s: float, device: str) -> dict[str, Any]:
    """Return the walking policy: TorchScript with an LSTM's state in module buffers."""
    return {
        'policy': {'backend': 'torch', 'model': 'motion.pt', 'period_s': period_s,
                   'shapes': {'x': [1, 47]}, 'options': {'device': device}},
        'run': {'trigger': 'timer', 'autorun': True},
        'inputs': {'x': [
            {'term': 'angular_velocity', 'topic': '/imu/data', 'scale': 0.25},
            {'term': 'projected_gravity', 'topic': '/imu/data'},
            {'term': 'twist', 'topic': '/cmd_vel', 'fields': ['linear.x', 'linear.y', 'angular.z'],
             'latched': True},
            {'term': 'joint_position', 'topic': '/joint_states', 'joints': LEGS},
            {'term': 'joint_velocity', 'topic': '/joint_states', 'joints': LEGS, 'scale': 0.05},
            {'term': 'last_action'}, {'term': 'phase', 'period_s': 0.8}]},
        'outputs': {'actions': {'topic': 'policy/action', 'kind': 'raw',
                                'type': 'std_msgs/msg/Float32MultiArray'}}}


def slow_file(period_s: float, device: str) -> dict[str, Any]:
    """Return a chunked policy whose tick lasts 30 ms."""
    late = int(np.ceil(0.04 / period_s))   # steps that pass while an inference runs
    return {
        'policy': {'backend': 'torch', 'factory': 'bench.gpu_node_policy:slow',
                   'period_s': period_s, 'options': {'device': device}},
        'run': {'trigger': 'timer', 'autorun': True, 'start_at': late, 'latency_steps': late},
        'inputs': {'obs': [{'term': 'joint_position', 'topic': '/joint_states',
                            'joints': LEGS[:8]}]},
        'outputs': {'actions': {'topic': 'policy/action', 'kind': 'raw',
                                'type': 'std_msgs/msg/Float32MultiArray'}}}


SCENES: dict[str, tuple[Callable[[float, str], dict[str, Any]], float]] = {
    'G1 LSTM, 50 Hz': (g1_file, 0.02), 'G1 LSTM, 200 Hz': (g1_file, 0.005),
    'flow head, 30 ms ticks, 50 Hz': (slow_file, 0.02),
    'flow head, 30 ms ticks, 200 Hz': (slow_file, 0.005)}


class Robot:
    """Publishes joint states, an IMU and a command, and collects what comes back."""

    def __init__(self, node: Any, target: str) -> None:
        from geometry_msgs.msg import Twist
        from rclpy.qos import QoSProfile
        from sensor_msgs.msg import Imu, JointState
        from std_msgs.msg import Float32MultiArray

        from flashrt_ros.msg import ActionChunk, PolicyStatus
        self._node = node
        self._joints = JointState(name=LEGS, position=[0.1] * 12, velocity=[0.0] * 12)
        self._imu, self._twist = Imu(), Twist()
        self._imu.orientation.w = 1.0
        self._twist.linear.x = 0.5
        self._out = [(node.create_publisher(JointState, '/joint_states', 10), self._joints),
                     (node.create_publisher(Imu, '/imu/data', 10), self._imu),
                     (node.create_publisher(Twist, '/cmd_vel', 10), self._twist)]
        self.actions: list[int] = []        # source time stamps, ns
        self.chunks: list[int] = []
        self.status: Any = None
        self.moving = threading.Event()
        deep = QoSProfile(depth=1000)
        namespace = target.rsplit('/', 1)[0]
        node.create_subscription(Float32MultiArray, f'{namespace}/policy/action', self._on_action,
                                 deep)
        node.create_subscription(ActionChunk, f'{target}/chunk', self._on_chunk, deep)
        from flashrt_ros.clients.client import STATUS_QOS
        node.create_subscription(PolicyStatus, f'{target}/status', self._on_status, STATUS_QOS)
        node.create_timer(1.0 / INPUT_HZ, self._publish)

    def _publish(self) -> None:
        stamp = self._node.get_clock().now().to_msg()
        for publisher, message in self._out:
            if hasattr(message, 'header'):
                message.header.stamp = stamp
            publisher.publish(message)

    # rclpy tells by the number of arguments whether a callback wants the message's info
    def _on_action(self, message: Any, info: Any) -> None:
        self.actions.append(info['source_timestamp'])
        self.moving.set()

    def _on_chunk(self, message: Any, info: Any) -> None:
        self.chunks.append(info['source_timestamp'])

    def _on_status(self, message: Any) -> None:
        self.status = message


@contextmanager
def served(policy: dict[str, Any], root: Path, namespace: str, log: Path) -> Iterator[None]:
    """Run the node in a process of its own."""
    import yaml
    path = Path(tempfile.mkdtemp(prefix='flashrt-node-')) / 'policy.yaml'
    path.write_text(yaml.safe_dump(policy, sort_keys=False))
    with log.open('w') as out:
        child = subprocess.Popen(
            [sys.executable, '-m', 'flashrt_ros.tools.cli', 'serve', str(path), '--namespace',
             namespace, '--name', 'node', '--model-root', str(root), '--python-module', 'bench',
             '-p', 'status_hz:=10.0'],
            stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env={
                **os.environ, 'PYTHONPATH': f'{ROOT}:{os.environ.get("PYTHONPATH", "")}'})
        try:
            yield
        finally:
            child.terminate()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()


@contextmanager
def bare_node(namespace: str) -> Iterator[None]:
    """Run the bare node in a process of its own."""
    child = subprocess.Popen([sys.executable, '-m', 'bench.ros_echo', '--ros-args', '-r',
                              f'__ns:={namespace}'], cwd=ROOT)
    try:
        yield
    finally:
        child.kill()
        child.wait(10)


def spread(stamps: list[int], period_s: float) -> dict[str, float]:
    """Return how far intervals are from the period, µs, and how many were more than half off."""
    intervals = np.diff(np.array(stamps, np.int64)) / 1e3
    off = np.abs(intervals - period_s * 1e6)
    return {'n': len(intervals), 'interval_p50_us': round(float(np.median(intervals)), 1),
            'off_p50_us': round(float(np.median(off)), 1),
            'off_p99_us': round(float(np.percentile(off, 99)), 1),
            'off_max_us': round(float(off.max()), 1),
            'over_half': int((off > period_s * 5e5).sum())}


def latencies(times: list[float]) -> str:
    """Return p50 / p99 in ms."""
    return f'{np.median(times) * 1e3:.2f} / {np.percentile(times, 99) * 1e3:.2f}'


def scene(name: str, device: str, seconds: float, number: int, log: Path) -> dict[str, Any]:
    """Run one policy: quiet, with saves, with rewinds."""
    from std_srvs.srv import Trigger

    from flashrt_ros.clients.blocking import BlockingClient
    make, period_s = SCENES[name]
    namespace = f'/bench{number}'
    target = f'{namespace}/node'
    with (served(make(period_s, device), G1, namespace, log),
          bare_node(f'{namespace}/echo'),
          BlockingClient(target, timeout_s=60.0, domain_id=DOMAIN) as client):
        robot = client.inside(lambda: Robot(client.node, target))
        client.wait_ready()
        bare = client.inside(lambda: client.node.create_client(
            Trigger, f'{namespace}/echo/trigger'))
        if not bare.wait_for_service(20):
            raise RuntimeError(f'{name}: the bare node does not answer')
        if not robot.moving.wait(60):
            raise RuntimeError(f'{name}: nothing published; {log.read_text()[-2000:]}')

        def timed(verb: Callable[[Any], Any]) -> float:
            started = time.perf_counter()
            answer = client.call(verb)
            took = time.perf_counter() - started
            if not answer.success:
                raise RuntimeError(f'{name}: {answer.message}')
            return took

        def moving_again() -> float:
            robot.moving.clear()
            took = timed(lambda c: c.trigger('start'))
            if not robot.moving.wait(10):
                raise RuntimeError(f'{name}: no action after start: {robot.status}')
            return took
        time.sleep(1.0)                       # clocks of the card and the caches settle
        robot.actions, robot.chunks = [], []
        time.sleep(seconds)
        quiet, ticks = spread(robot.actions, period_s), list(robot.chunks)
        robot.actions = []
        saves: list[float] = []
        floor: list[float] = []
        for i in range(SAVES):
            saves.append(timed(lambda c, i=i: c.save(f's{i}', overwrite=True)))
            floor.append(timed(lambda c: bare.call_async(Trigger.Request())))
            time.sleep(seconds / SAVES)
        busy = spread(robot.actions, period_s)
        restores, rollbacks, starts = [], [], []
        for i in range(REWINDS):
            restores.append(timed(lambda c, i=i: c.restore(f's{SAVES - 1 - i % 4}')))
            starts.append(moving_again())
            time.sleep(3 * period_s)
            rollbacks.append(timed(lambda c: c.rollback()))
            starts.append(moving_again())
            time.sleep(3 * period_s)
        status = robot.status
        rate = len(ticks) / seconds
        return {'scene': name, 'period_ms': period_s * 1e3, 'ticks_per_s': round(rate, 1),
                'tick_p50_ms': round(status.tick_p50_s * 1e3, 3),
                'tick_p99_ms': round(status.tick_p99_s * 1e3, 3), 'quiet': quiet,
                'with_saves': busy, 'trigger_ms': latencies(floor),
                'save_ms': latencies(saves), 'restore_ms': latencies(restores),
                'rollback_ms': latencies(rollbacks), 'start_ms': latencies(starts),
                'restore_bound_ms': round(status.restore_bound_s * 1e3, 3),
                'late_ticks': status.late_ticks, 'dropped_chunks': status.dropped_chunks}


def markdown(data: dict[str, Any]) -> str:
    """Return the page."""
    head = ('| policy | ticks/s | tick p50 / p99, ms | step off its time, quiet: p50 / p99 / max, '
            'µs | with saves | bare Trigger | save | restore | rollback | start | late, dropped |')
    lines = ['# The node on a GPU', '', f'Measured {data["date"]}, {data["card"]}, CPU '
             f'{data["cpu"]}; by `python -m bench.gpu_node`. {data["seconds"]} s each; the node in '
             'one process, the robot and the caller of verbs in another. Verbs: round trip p50 / '
             f'p99 in ms, {SAVES} saves, {REWINDS} restores, {REWINDS} rollbacks, each of these '
             'followed by `~/start`. A bare Trigger of another process, called beside the '
             'saves, is the floor: the caller publishes at 200 Hz meanwhile.',
             '', head, '|' + '---|' * 11]
    for r in data['scenes']:
        def jitter(key: str, r: dict[str, Any] = r) -> str:
            s = r[key]
            return f'{s["off_p50_us"]} / {s["off_p99_us"]} / {s["off_max_us"]} (n = {s["n"]})'
        lines.append(
            f'| {r["scene"]} | {r["ticks_per_s"]} | {r["tick_p50_ms"]} / {r["tick_p99_ms"]} | '
            f'{jitter("quiet")} | {jitter("with_saves")} | {r["trigger_ms"]} | {r["save_ms"]} | '
            f'{r["restore_ms"]} | {r["rollback_ms"]} | {r["start_ms"]} | '
            f'{r["late_ticks"]}, {r["dropped_chunks"]} |')
    return '\n'.join(lines) + '\n'


def main() -> int:
    """Run all scenes; write JSON and Markdown."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--device', default='cuda', choices=('cuda', 'cpu'))
    parser.add_argument('--out', type=Path, default=Path('docs'))
    parser.add_argument('--seconds', type=float, default=4.0)
    parser.add_argument('--only', default='')
    arguments = parser.parse_args()
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    os.environ['ROS_DOMAIN_ID'] = str(DOMAIN)
    arguments.out.mkdir(parents=True, exist_ok=True)
    scenes, failed = [], False
    for number, name in enumerate(SCENES):
        if arguments.only not in name:
            continue
        try:
            scenes.append(scene(name, arguments.device, arguments.seconds, number,
                                arguments.out / f'node{number}.log'))
            print(json.dumps(scenes[-1]), flush=True)
        except Exception as error:   # the other scenes are worth having
            failed = True
            print(f'{name} FAILED: {error}', flush=True)
    data = {'date': time.strftime('%Y-%m-%d', time.gmtime()), 'card': card(arguments.device),
            'cpu': cpu(), 'seconds': arguments.seconds, 'scenes': scenes}
    (arguments.out / 'benchmarks_gpu_node.json').write_text(json.dumps(data, indent=1) + '\n')
    (arguments.out / 'benchmarks_gpu_node.md').write_text(markdown(data))
    return int(failed)


def card(device: str) -> str:
    """Return the card's name."""
    if device != 'cuda':
        return 'no card'
    from flashrt_ros.backends.cuda import CudaDevice
    return str(CudaDevice().identity()['cuda.device'])


def cpu() -> str:
    """Return the processor's name."""
    with open('/proc/cpuinfo') as f:
        return next((line.split(':', 1)[1].strip() for line in f
                     if line.startswith('model name')), 'unknown')


if __name__ == '__main__':
    sys.exit(main())
