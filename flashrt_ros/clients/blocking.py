"""A policy node's verbs for programs that have no node: each call waits for its answer.

It brings its own context, node, executor and thread, so nothing of the caller is spun. All rclpy
calls are made inside that thread: an action answer that overtakes `send_goal_async` in another
thread would be thrown away.
"""
from __future__ import annotations

from collections.abc import Callable
import math
import os
import threading
import time
from typing import Any, TypeVar

from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.task import Future

from flashrt_ros.clients.client import Execution, PolicyClient
from flashrt_ros.core.errors import Code, Refusal

T = TypeVar('T')


class BlockingClient:
    """A context manager around a PolicyClient. Raises Refusal(NOT_FOUND) if nobody answers."""

    def __init__(self, target: str = 'policy_node', *, timeout_s: float = 5.0,
                 domain_id: int | None = None) -> None:
        self.target = target
        self.timeout_s = timeout_s
        self._context = Context()
        self._context.init(args=[], domain_id=domain_id)
        self.node = Node(f'flashrt_ros_client_{os.getpid()}', context=self._context,
                         use_global_arguments=False, start_parameter_services=False,
                         enable_rosout=False)
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self.node)
        self.client = PolicyClient(self.node, target)
        self._thread = threading.Thread(target=self._spin, name='flashrt_ros client', daemon=True)
        self._thread.start()

    def _spin(self) -> None:
        try:
            self._executor.spin()
        except Exception:
            # ExternalShutdownException, or an RCLError where close came while a wait set was built
            if self._context.ok():
                raise

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread and leave the graph."""
        self._context.try_shutdown()
        self._thread.join(timeout=5.0)
        self._executor.shutdown(timeout_sec=0)
        self.node.destroy_node()

    def inside(self, function: Callable[[], T]) -> T:
        """Run a function in the executor's thread and return its value."""
        done = threading.Event()
        box: dict[str, Any] = {}

        def run() -> None:
            try:
                box['value'] = function()
            except Exception as error:
                box['error'] = error
            done.set()

        self._executor.create_task(run)
        if not done.wait(self.timeout_s):
            raise Refusal(Code.INTERNAL, 'the client thread does not answer')
        if 'error' in box:
            raise box['error']
        value: T = box['value']
        return value

    def wait_ready(self) -> None:
        """Wait until the node's services are discovered. Raises Refusal(NOT_FOUND)."""
        end = time.monotonic() + self.timeout_s
        while not self.inside(self.client.ready):
            if time.monotonic() > end:
                raise Refusal(Code.NOT_FOUND, self._nobody())
            time.sleep(0.02)  # rclpy has no graph event to wait for

    def call(self, verb: Callable[[PolicyClient], Future], timeout_s: float | None = None) -> Any:
        """Return the answer of a verb, e.g. `call(lambda c: c.save('a'))`."""
        self.wait_ready()
        future = self.inside(lambda: verb(self.client))
        return self.wait(future, timeout_s)

    def wait(self, future: Future, timeout_s: float | None = None) -> Any:
        """Wait for a future of the client; `math.inf` waits for ever."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        if not done.wait(None if limit == math.inf else limit):
            raise Refusal(Code.BUSY, f'{self.target} did not answer within {limit:g} s; '
                          'it may still carry the request out')
        return future.result()

    def execute(self, **goal: Any) -> Execution:
        """Send a goal; wait for its end with `wait(execution.result, …)`."""
        self.wait_ready()
        return self.inside(lambda: self.client.execute(**goal))

    def first_status(self) -> Any:
        """Return the latched status."""
        got: Future = Future()
        self.inside(lambda: self.client.on_status(
            lambda msg: None if got.done() else got.set_result(msg)))
        try:
            return self.wait(got)
        except Refusal:
            raise Refusal(Code.NOT_FOUND, self._nobody()) from None

    def _nobody(self) -> str:
        suffix = '/save_capsule'
        seen = sorted(name[:-len(suffix)]
                      for name, _ in self.node.get_service_names_and_types()
                      if name.endswith(suffix) and self.node.count_services(name))
        return (f'no policy node {self.target!r} within {self.timeout_s:g} s; '
                + ('seen: ' + ', '.join(seen) if seen else 'none is running in this ROS domain'))
