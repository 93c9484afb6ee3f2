"""Policy nodes for tests: in this process or in one of their own, and a probe that listens.

Every test gets a namespace of its own in a domain of this pytest process. Nothing sleeps: `Inbox`
and `Probe` wait on a condition that a message fulfils, and fail with what they have seen instead.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
import gc
import itertools
import os
from pathlib import Path
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

from flashrt_ros.clients.client import PolicyClient
from flashrt_ros.msg import PolicyStatus
from flashrt_ros.node.policy_node import PolicyNode, overrides
from flashrt_ros.node.run import spin
from test import ros_env

POLICIES = Path(__file__).resolve().parents[1] / 'policies'
ENV = ros_env.isolated()
DOMAIN = int(ENV['ROS_DOMAIN_ID'])
WAIT_S = 20.0  # until a test gives up; nothing takes that long unless it is broken
RELIABLE = QoSProfile(depth=1000)
BEST_EFFORT = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED = QoSProfile(depth=10, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_numbers = itertools.count(1)


def namespace() -> str:
    """Return a namespace that no other test has."""
    return f'/t{os.getpid()}_{next(_numbers)}'


class Inbox:
    """What was received on one topic, oldest first."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._condition = threading.Condition()

    def put(self, message: Any) -> None:
        """Take a message in."""
        with self._condition:
            self.messages.append(message)
            self._condition.notify_all()

    def wait(self, predicate: Callable[[Any], bool] = lambda _: True, *, start: int = 0,
             timeout: float = WAIT_S) -> Any:
        """Return the first message from `start` on that fulfils the predicate."""
        def found() -> Any:
            return next((m for m in self.messages[start:] if predicate(m)), None)
        with self._condition:
            if not self._condition.wait_for(lambda: found() is not None, timeout):
                pytest.fail(f'not received within {timeout} s; got {self.messages[-3:]}')
            return found()

    def count(self, n: int, timeout: float = WAIT_S) -> list[Any]:
        """Wait for n messages and return them."""
        with self._condition:
            if not self._condition.wait_for(lambda: len(self.messages) >= n, timeout):
                pytest.fail(f'{len(self.messages)} of {n} messages within {timeout} s')
            return self.messages[:n]


class Probe:
    """A node with a thread of its own: publishes, listens, calls. `call` waits for the answer."""

    def __init__(self, name: str = 'probe', domain: int = DOMAIN) -> None:
        self._made: list[PolicyClient] = []
        self.context = Context()
        self.context.init(args=[], domain_id=domain)
        self.node = Node(f'{name}_{next(_numbers)}', context=self.context,
                         use_global_arguments=False)
        self._executor = SingleThreadedExecutor(context=self.context)
        self._executor.add_node(self.node)
        self._thread = threading.Thread(target=self._spin, daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except Exception:          # RCLError where close came while a wait set was built
            if self.context.ok():
                raise

    def close(self) -> None:
        """Leave the graph.

        rclpy gives a participant back only when its last action client is collected, and one
        machine finds about thirty of them.
        """
        for client in self._made:
            self.inside(client.close)
        self._made.clear()
        self.context.try_shutdown()
        self._thread.join(5)
        self._executor.shutdown(timeout_sec=0)
        self.node.destroy_node()
        gc.collect()

    def inside(self, function: Callable[[], Any]) -> Any:
        """Run a function in the probe's thread; what it raises is raised here."""
        done = threading.Event()
        box: dict[str, Any] = {}

        def work() -> None:
            try:
                box['value'] = function()
            except Exception as error:
                box['error'] = error
            done.set()
        self._executor.create_task(work)
        if not done.wait(WAIT_S):
            pytest.fail('the probe does not answer')
        if 'error' in box:
            raise box['error']
        return box['value']

    def result(self, future: Any, timeout: float = WAIT_S) -> Any:
        """Wait for a future of this node."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(timeout):
            pytest.fail(f'no answer within {timeout} s')
        return future.result()

    def client(self, target: str) -> PolicyClient:
        """Return a client of a policy node that is discovered."""
        client: PolicyClient = self.inside(lambda: PolicyClient(self.node, target))
        self._made.append(client)
        until(client.ready, f'{target} is not discovered')
        return client

    def call(self, future_of: Callable[[], Any], timeout: float = WAIT_S) -> Any:
        """Send a request in the probe's thread and wait for its answer."""
        return self.result(self.inside(future_of), timeout)

    def service(self, kind: Any, name: str) -> Any:
        """Return a ready client of any service."""
        client = self.node.create_client(kind, name)
        until(client.service_is_ready, f'service {name} is not discovered')
        return client

    def listen(self, kind: Any, topic: str, qos: QoSProfile = RELIABLE) -> Inbox:
        """Collect a topic."""
        inbox = Inbox()
        self.inside(lambda: self.node.create_subscription(kind, topic, inbox.put, qos))
        return inbox

    def publisher(self, kind: Any, topic: str, qos: QoSProfile = RELIABLE) -> Any:
        """Advertise a topic; wait with `matched` before the first message."""
        return self.inside(lambda: self.node.create_publisher(kind, topic, qos))


def graph(probe: Probe, node: Served, complete: Callable[[dict[str, dict[str, str]]], bool]
          ) -> dict[str, dict[str, str]]:
    """Return what a node offers, as `{'services' | 'published' | 'subscribed': {name: type}}`,
    once it is discovered completely."""
    name, ns = node.node.get_name(), node.namespace
    get = {'services': probe.node.get_service_names_and_types_by_node,
           'published': probe.node.get_publisher_names_and_types_by_node,
           'subscribed': probe.node.get_subscriber_names_and_types_by_node}
    seen: dict[str, dict[str, str]] = {}

    def look() -> bool:
        if (name, ns) not in probe.node.get_node_names_and_namespaces():
            return False
        seen.update({what: {n: t[0] for n, t in of(name, ns)} for what, of in get.items()})
        return complete(seen)
    until(look, f'{node.name} is not discovered completely')
    return seen


def matched(*publishers: Any, n: int = 1) -> None:
    """Wait until somebody subscribes to each."""
    for publisher in publishers:
        until(lambda p=publisher: p.get_subscription_count() >= n,
              f'nobody subscribes to {publisher.topic_name}')


def until(condition: Callable[[], bool], otherwise: str, timeout: float = WAIT_S) -> None:
    """Wait for discovery, which has no event in rclpy: look every 5 ms."""
    end = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > end:
            pytest.fail(f'{otherwise} within {timeout} s')
        time.sleep(0.005)


@contextmanager
def held(post: Callable[[Callable[[], None]], Any]) -> Iterator[None]:
    """Keep a thread, to which `post` hands a job, in one that does not return."""
    gate, entered = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        gate.wait(WAIT_S)
    post(hold)
    assert entered.wait(5)
    try:
        yield
    finally:
        gate.set()


class Served:
    """A policy node in this process, so that a test can hold its policy and look inside."""

    def __init__(self, policy_file: Path | None, *, name: str = 'policy_node', ns: str = '',
                 **parameters: Any) -> None:
        self.namespace = ns or namespace()
        self.name = f'{self.namespace}/{name}'
        self.context = Context()
        self.context.init(args=[], domain_id=DOMAIN)
        values = {'status_hz': 0.0, **parameters}
        if policy_file is not None:
            values['policy_file'] = str(policy_file)
        self.node = PolicyNode(name, namespace=self.namespace, context=self.context,
                               use_global_arguments=False, parameter_overrides=overrides(values))
        self.executor = SingleThreadedExecutor(context=self.context)
        self.executor.add_node(self.node)
        self.ended = threading.Event()
        self.thread = threading.Thread(
            target=lambda: spin(self.node, self.executor, self.ended), daemon=True)
        self.thread.start()

    def inside(self, function: Callable[[], Any]) -> Any:
        """Run a function in the executor's thread."""
        done = threading.Event()
        task = self.executor.create_task(function)
        task.add_done_callback(lambda _: done.set())
        assert done.wait(WAIT_S), 'the executor does not answer'
        return task.result()

    def busy(self) -> AbstractContextManager[None]:
        """Keep the executor in a callback that does not return: requests wait."""
        return held(self.executor.create_task)

    def activate(self) -> None:
        """Configure and activate."""
        good = type(self.inside(self.node.trigger_configure)).SUCCESS
        assert self.node.runner is not None, 'configure failed; see the log'
        assert self.inside(self.node.trigger_activate) == good

    def close(self) -> None:
        """Shut down."""
        self.ended.set()
        self.executor.create_task(lambda: None)
        self.thread.join(5)
        self.node.close(2.0)
        self.executor.shutdown(timeout_sec=0)
        self.node.destroy_node()
        self.context.try_shutdown()


@contextmanager
def process(probe: Probe, policy_file: Path, *options: str, ns: str = '',
            name: str = 'policy_node', env: dict[str, str] | None = None
            ) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `flashrt-ros serve` in a process; yield the node's full name when it is active.

    Two participants in two processes may need 3 s to see each other, the period of Fast DDS'
    announcements; so a module that talks to one process keeps one probe.
    """
    ns = ns or namespace()
    child = subprocess.Popen(
        [sys.executable, '-m', 'flashrt_ros.tools.cli', 'serve', str(policy_file),
         '--namespace', ns, '--name', name, *options],
        env={**ENV, 'PYTHONPATH': str(POLICIES), **(env or {})}, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True)
    try:
        status = probe.listen(PolicyStatus, f'{ns}/{name}/status', LATCHED)

        def watch() -> None:
            if child.wait() != 0:
                status.put(None)
        threading.Thread(target=watch, daemon=True).start()
        first = status.wait(lambda m: m is None or m.phase != PolicyStatus.UNCONFIGURED)
        if first is None:
            pytest.fail(f'serve ended: {child.communicate()[1]}')
        yield f'{ns}/{name}', child
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        for pipe in (child.stdout, child.stderr):
            if pipe is not None and not pipe.closed:
                pipe.close()
