"""How every service answers, whatever happens inside its handler.

A refusal becomes code and message; anything else becomes INTERNAL, with the traceback in the log.
Nothing leaves a handler: an exception in a callback would end the executor and with it the node.
"""
from __future__ import annotations

from collections.abc import Awaitable, Callable
from concurrent.futures import Future as ThreadFuture
from concurrent.futures import TimeoutError as NotYet
from contextlib import suppress
import traceback
from typing import Any, TypeVar

from rclpy.exceptions import InvalidHandle
from rclpy.node import Node
from rclpy.task import Future

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.node.handover import QUICK_S
from flashrt_ros.runtime.runner import Runner

T = TypeVar('T')
Get = Callable[[], Runner | None]
Handler = Callable[[Any, Any, Any], Any]           # (runner, request, response) -> sentence
AsyncHandler = Callable[[Any, Any, Any], Awaitable[Any]]


def not_configured(node: Node) -> Refusal:
    """Return the refusal of an unconfigured node."""
    name = node.get_fully_qualified_name()
    return Refusal(Code.NOT_CONFIGURED, f'{name} is not configured; configure it first '
                   f'(ros2 lifecycle set {name} configure)')


def wake(node: Node) -> None:
    """Let a silent executor look for finished futures. Any thread, also while the node leaves."""
    executor = node.executor
    if executor is not None:
        try:
            executor.wake()
        except InvalidHandle:
            pass  # it was shut down in between


class Answers:
    """Wraps handlers. They get the runner, request and response and return the sentence to say."""

    def __init__(self, node: Node, runner: Get) -> None:
        self._node = node
        self._runner = runner

    def sync(self, handler: Handler) -> Callable[[Any, Any], Any]:
        """Return a service callback that answers at once."""
        def callback(request: Any, response: Any) -> Any:
            try:
                self._good(response, handler(self._need(), request, response))
            except Exception as error:
                self._bad(response, error)
            return response
        return callback

    def waiting(self, handler: AsyncHandler) -> Callable[[Any, Any], Awaitable[Any]]:
        """Return a service callback that may await `until`."""
        async def callback(request: Any, response: Any) -> Any:
            try:
                self._good(response, await handler(self._need(), request, response))
            except Exception as error:
                self._bad(response, error)
            return response
        return callback

    async def until(self, work: ThreadFuture[T]) -> T:
        """Await what another thread completes; the executor is woken, for it may be silent.

        Where ticks are quick it rests a little instead, for two turns of the executor take longer;
        steps have a thread of their own and go on.
        """
        runner = self._runner()
        if work.done():
            return work.result()
        if runner is not None and runner.session.stats().tick_p50_s < QUICK_S:
            with suppress(NotYet):
                return work.result(QUICK_S)
        done: Future = Future()

        def finish(_: ThreadFuture[T]) -> None:
            done.set_result(None)
            wake(self._node)

        work.add_done_callback(finish)
        await done
        return work.result()

    def _need(self) -> Runner:
        runner = self._runner()
        if runner is None:
            raise not_configured(self._node)
        return runner

    def _good(self, response: Any, sentence: str) -> None:
        response.success = True
        response.message = sentence
        self._epoch(response)

    def _bad(self, response: Any, error: Exception) -> None:
        if isinstance(error, Refusal):
            code, message, details = error.code, error.message, error.details
        else:
            self._node.get_logger().error(
                ''.join(traceback.format_exception(type(error), error, error.__traceback__)))
            code, details = Code.INTERNAL, {}
            message = f'{type(error).__name__}: {error} (the log of the node has the traceback)'
        response.success = False
        if hasattr(response, 'code'):
            response.code = int(code)
            response.message = message
        else:  # std_srvs/Trigger has no code: it stands in the sentence
            response.message = f'{code.name}: {message}'
        if hasattr(response, 'moved'):
            response.moved = [str(v) for v in details.get('moved', ())]
            response.distance = [float(v) for v in details.get('distance', ())]
            response.limit = [float(v) for v in details.get('limit', ())]
        self._epoch(response)

    def _epoch(self, response: Any) -> None:
        runner = self._runner()
        if runner is not None and hasattr(response, 'epoch'):
            response.epoch = runner.epoch
