"""The policy node beside a bare rclpy node: observation to action, and service round trips.

    python -m bench.ros_node [--n 1000] [--json FILE]

Two server processes and this one, alternating call by call, so that a busy machine slows both. The
policy is the small recurrent reference policy; its bare call is measured in this process and
subtracted from the latency of the policy node. With `slow` inferences of 50 ms run all the time.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
import json
import os
from pathlib import Path
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

POLICY = '''
policy: {{backend: host, factory: "{factory}", options: {options}, period_s: 0.02}}
run: {{trigger: {trigger}, autorun: true{more}}}
inputs:
  obs:
    - {{term: array, topic: obs, field: data, max_age_s: 60.0}}
outputs:
  actions: {{topic: policy/action, type: std_msgs/msg/Float32MultiArray, kind: raw}}
'''
ENV = {**os.environ, 'ROS_AUTOMATIC_DISCOVERY_RANGE': 'LOCALHOST',
       'ROS_DOMAIN_ID': str(101 + os.getpid() % 100)}
os.environ.update(ENV)
ROOT = Path(__file__).resolve().parents[1]


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python process for a while."""
    child = subprocess.Popen([sys.executable, *args], cwd=ROOT, env=ENV)
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT)
        child.wait(10)


class Caller:
    """A node with a spinning thread; measures one exchange at a time."""

    def __init__(self) -> None:
        import rclpy
        from rclpy.executors import SingleThreadedExecutor
        rclpy.init()
        self.node = rclpy.create_node('bench')
        self._executor = SingleThreadedExecutor()
        self._executor.add_node(self.node)
        threading.Thread(target=self._executor.spin, daemon=True).start()
        self._event = threading.Event()

    def round_trip(self, publisher: Any, message: Any, wait_s: float = 5.0) -> float:
        """Publish and wait for the answer; return seconds."""
        self._event.clear()
        t = time.perf_counter()
        publisher.publish(message)
        if not self._event.wait(wait_s):
            raise TimeoutError('no answer')
        return time.perf_counter() - t

    def listen(self, kind: Any, topic: str) -> None:
        """An answer on this topic ends a round trip."""
        self.node.create_subscription(kind, topic, lambda _: self._event.set(), 10)

    def call(self, client: Any, request: Any) -> float:
        """Call a service; return seconds."""
        event = threading.Event()
        t = time.perf_counter()
        future = client.call_async(request)
        future.add_done_callback(lambda _: event.set())
        if not event.wait(10):
            raise TimeoutError(client.srv_name)
        elapsed = time.perf_counter() - t
        response = future.result()
        if not response.success:
            raise RuntimeError(response.message)
        return elapsed


def ms(values: list[float]) -> dict[str, float]:
    """Return p50 and p99 in milliseconds."""
    ordered = sorted(values)
    return {'p50': statistics.median(ordered) * 1e3, 'p99': ordered[len(ordered) * 99 // 100] * 1e3}


def alternate(n: int, *calls: Callable[[], float]) -> list[dict[str, float]]:
    """Run the calls in turn, a tenth of them as warm-up."""
    times: list[list[float]] = [[] for _ in calls]
    for i in range(n + n // 10):
        for k, call in enumerate(calls):
            t = call()
            if i >= n // 10:
                times[k].append(t)
    return [ms(t) for t in times]


def bare_call_ms() -> float:
    """Return the median of the policy's bare call."""
    import numpy as np

    from flashrt_ros.backends import host, reference
    from flashrt_ros.core.session import Options, Session
    session = Session(reference.recurrent(), host.HostDevice(), options=Options(threaded=False))
    session.inputs['obs'][...] = np.ones(8, np.float32)
    times = []
    for _ in range(2000):
        t = time.perf_counter()
        session._live.bound.enqueue()
        times.append(time.perf_counter() - t)
    session.close()
    return statistics.median(times) * 1e3


def serve(folder: Path, **fields: Any) -> tuple[str, ...]:
    """Write a policy file; return the arguments that serve it."""
    path = folder / 'policy.yaml'
    path.write_text(POLICY.format(**fields))
    return ('-m', 'flashrt_ros.tools.cli', 'serve', str(path), '--python-module',
            'flashrt_ros.backends.reference', '--python-module', 'bench.slow_policy')


def measure(n: int) -> dict[str, Any]:
    """Return all figures."""
    from std_msgs.msg import Float32MultiArray
    from std_srvs.srv import Trigger

    from flashrt_ros.srv import RestoreCapsule, Rollback, SaveCapsule
    caller = Caller()
    node = caller.node
    out: dict[str, Any] = {'bare_call_ms': bare_call_ms()}
    names = {'save': ('save_capsule', SaveCapsule, {'name': 'bench', 'overwrite': True}),
             'restore': ('restore_capsule', RestoreCapsule, {'name': 'bench'}),
             'rollback': ('rollback', Rollback, {})}

    def clients() -> dict[str, tuple[Any, Any]]:
        made = {k: (node.create_client(t, f'policy_node/{s}'), t.Request(**f))
                for k, (s, t, f) in names.items()}
        made['trigger'] = (node.create_client(Trigger, 'trigger'), Trigger.Request())
        for client, _ in made.values():
            if not client.wait_for_service(20):
                raise TimeoutError(client.srv_name)
        return made
    with tempfile.TemporaryDirectory() as tmp, process('-m', 'bench.ros_echo'):
        folder = Path(tmp)
        message = Float32MultiArray(data=[0.5] * 8)
        caller.listen(Float32MultiArray, 'policy/action')
        caller.listen(Float32MultiArray, 'echo/action')
        with process(*serve(folder, factory='flashrt_ros.backends.reference:recurrent',
                            options='{}', trigger='{input: [obs]}',
                            more=', on_restore: continue'),
                     '-p', 'status_hz:=0.0'):
            policy = node.create_publisher(Float32MultiArray, 'obs', 10)
            made = clients()
            while policy.get_subscription_count() < 2:
                time.sleep(0.02)
            # both nodes listen on `obs`; the echo moves to a namespace of its own below
            calls = {k: (lambda c=c, r=r: caller.call(c, r)) for k, (c, r) in made.items()}
            calls['save']()
            rows = alternate(n, calls['trigger'], calls['save'], calls['restore'],
                             calls['rollback'])
            out['services'] = dict(zip(('trigger', 'save', 'restore', 'rollback'), rows,
                                       strict=True))
        with process(*serve(folder, factory='bench.slow_policy:slow',
                            options='{seconds: 0.05}', trigger='timer', more='')):
            made = clients()
            policy = node.create_publisher(Float32MultiArray, 'obs', 10)
            stop = threading.Event()

            def feed() -> None:
                while not stop.wait(0.02):
                    policy.publish(message)
            threading.Thread(target=feed, daemon=True).start()
            (save, trigger) = alternate(
                n, lambda: caller.call(*made['save']), lambda: caller.call(*made['trigger']))
            stop.set()
            out['save while 50 ms inferences run'] = save
            out['trigger beside it'] = trigger
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp)
        with process('-m', 'bench.ros_echo', '--ros-args', '-r', '__ns:=/echo'), process(
                *serve(folder, factory='flashrt_ros.backends.reference:recurrent', options='{}',
                       trigger='{input: [obs]}', more=''),
                '--namespace', '/policy', '-p', 'status_hz:=0.0'):
            caller.listen(Float32MultiArray, '/policy/policy/action')
            caller.listen(Float32MultiArray, '/echo/policy/action')
            ours = node.create_publisher(Float32MultiArray, '/policy/obs', 10)
            theirs = node.create_publisher(Float32MultiArray, '/echo/obs', 10)
            deadline = time.monotonic() + 20
            while not (ours.get_subscription_count() and theirs.get_subscription_count()):
                if time.monotonic() > deadline:
                    raise TimeoutError('the nodes did not start')
                time.sleep(0.02)
            for publisher in (theirs, ours):   # until discovery is complete both ways
                while True:
                    try:
                        caller.round_trip(publisher, message, 0.5)
                        break
                    except TimeoutError:
                        if time.monotonic() > deadline:
                            raise
            out['echo'], out['policy'] = alternate(
                n, lambda: caller.round_trip(theirs, message),
                lambda: caller.round_trip(ours, message))
    return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--n', type=int, default=1000)
    parser.add_argument('--json', type=Path)
    arguments = parser.parse_args()
    out = measure(arguments.n)
    if arguments.json:
        arguments.json.write_text(json.dumps(out, indent=2))
    floor = out['echo']['p50']
    ours = out['policy']['p50'] - out['bare_call_ms']
    print('| exchange | p50, ms | p99, ms | ratio at p50 |\n|---|---|---|---|')
    print(f'| echo node: message in, message out | {floor:.2f} | {out["echo"]["p99"]:.2f} | 1 |')
    print(f'| policy node, less the bare call of {out["bare_call_ms"]:.3f} ms | {ours:.2f} '
          f'| {out["policy"]["p99"] - out["bare_call_ms"]:.2f} | {ours / floor:.2f} |')
    services = out['services']
    for name, row in services.items():
        print(f'| {name} service | {row["p50"]:.2f} | {row["p99"]:.2f} '
              f'| {row["p50"] / services["trigger"]["p50"]:.2f} |')
    for name in ('trigger beside it', 'save while 50 ms inferences run'):
        row = out[name]
        print(f'| {name} | {row["p50"]:.2f} | {row["p99"]:.2f} '
              f'| {row["p50"] / out["trigger beside it"]["p50"]:.2f} |')


if __name__ == '__main__':
    main()
