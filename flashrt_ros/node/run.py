"""Runs a policy node in a process: executor, signals, orderly end.

SIGINT and SIGTERM: on_stop is published at once, from a thread of its own, so that neither a
transition nor an inference can hold it up; then results go out, the node leaves the graph, and the
process ends with code 0. A second signal, or DEADLINE_S after the first, ends it without waiting
for a program that does not return. rclpy's own handlers are not used: they shut the context down
before anything could be said.
"""
from __future__ import annotations

from collections.abc import Callable
import os
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import Any

import rclpy
from rclpy.exceptions import InvalidHandle
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import TransitionCallbackReturn
from rclpy.signals import SignalHandlerOptions

from flashrt_ros.node.policy_node import PolicyNode, overrides

SIGNALS = (signal.SIGINT, signal.SIGTERM)
DEADLINE_S = 4.0
MAX_FAILURES = 100  # of the executor in a row, before the process gives up


class Signals:
    """Tells a thread of SIGINT and SIGTERM as they arrive, also while C code holds the main one."""

    def __init__(self, first: Callable[[str], None]) -> None:
        """`first` is called once, on the watching thread, with the signal's name."""
        self._first = first
        self.received = threading.Event()
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)

    def __enter__(self) -> Signals:
        def noticed(number: int, frame: FrameType | None) -> None:
            """Python's default would raise KeyboardInterrupt; the watcher does the work."""
        self._old = {number: signal.signal(number, noticed) for number in SIGNALS}
        self._old_fd = signal.set_wakeup_fd(self._write.fileno())
        threading.Thread(target=self._watch, name='signals', daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._old_fd)
        for number, handler in self._old.items():
            signal.signal(number, handler)
        self._write.close()

    def _watch(self) -> None:
        while number := self._read.recv(1):
            if number[0] not in SIGNALS:
                continue
            name = signal.Signals(number[0]).name
            if self.received.is_set():
                quit_now(128 + number[0], f'second {name}: ending without waiting')
            self.received.set()
            late = threading.Timer(DEADLINE_S, quit_now,
                                   (0, 'a program did not return in time; ending without it'))
            late.daemon = True
            late.start()
            try:
                self._first(name)
            except Exception:
                traceback.print_exc()


def quit_now(code: int, why: str) -> None:
    """End the process as it is."""
    print(f'[policy_node] {why}', file=sys.stderr, flush=True)
    os._exit(code)


def run(args: list[str], *, name: str = 'policy_node', namespace: str = '',
        parameters: dict[str, Any] | None = None, configure: bool = False,
        activate: bool = False) -> int:
    """Run until a signal; return the exit code. `configure` and `activate` do so at start: where
    that fails, 1."""
    try:
        rclpy.init(args=args, signal_handler_options=SignalHandlerOptions.NO)
        node = PolicyNode(name, namespace=namespace or None,
                          parameter_overrides=overrides(parameters or {}))
    except Exception as error:
        print(f'policy_node: {error}', file=sys.stderr)
        rclpy.try_shutdown()
        return 2
    executor = SingleThreadedExecutor()
    executor.add_node(node)

    def first(signal_name: str) -> None:
        node.halt(signal_name)
        executor.create_task(lambda: None)  # spin_once returns

    with Signals(first) as signals:
        code = 0
        if configure and not start(node, activate=activate):
            code = 0 if signals.received.is_set() else 1
        else:
            code = spin(node, executor, signals.received)
        stuck = finish(node, executor)
    if stuck:
        quit_now(code, 'an inference is still at work; ending without it')
    return code


def start(node: PolicyNode, *, activate: bool) -> bool:
    """Configure and activate; the log says why where it fails."""
    good = TransitionCallbackReturn.SUCCESS
    return node.trigger_configure() == good and (
        not activate or node.trigger_activate() == good)


def spin(node: PolicyNode, executor: SingleThreadedExecutor, ended: threading.Event) -> int:
    """Serve until `ended`; an exception that escapes a callback is logged and survived."""
    failures = 0
    while not ended.is_set() and executor.context.ok():
        try:
            executor.spin_once()
            failures = 0
        except ExternalShutdownException:
            break
        except Exception:
            failures += 1
            node.get_logger().error(traceback.format_exc())
            if failures >= MAX_FAILURES:
                return 1
    return 0


def finish(node: PolicyNode, executor: SingleThreadedExecutor) -> bool:
    """Stop, let clients have their results, leave. Return whether a program did not return."""
    stuck = False
    try:
        node.halt('shutdown')
        end = time.monotonic() + 0.5
        while node.busy and time.monotonic() < end:
            executor.spin_once(timeout_sec=0.05)
        for _ in range(20):  # rclpy sends a result from a task that follows the goal's
            executor.spin_once(timeout_sec=0.005)
        stuck = not node.close(timeout_s=2.0)
        executor.shutdown(timeout_sec=0)
        node.destroy_node()
    except (InvalidHandle, ExternalShutdownException):
        pass  # somebody else shut the context down
    except Exception:
        traceback.print_exc()
    rclpy.try_shutdown()
    return stuck
