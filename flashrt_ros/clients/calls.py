"""One service call of a behaviour: sent at once, looked at every tick, given up after a time.

Nothing here waits. Time is steady time: a jump of the ROS clock neither ends a call nor keeps it.
"""
from __future__ import annotations

from collections.abc import Callable
import time
from typing import Any

from rclpy.task import Future

from flashrt_ros.clients.client import PolicyClient, check
from flashrt_ros.core.errors import Code, Refusal

TIMEOUT_S = 5.0


class Call:
    """A request on its way. `poll` returns None while there is no answer and it is not too late.

    `heard` is called once with an answer that says yes, whenever that comes: also when nobody polls
    any more, because the behaviour was halted or had given up.
    """

    def __init__(self, client: PolicyClient, service: str, *, timeout_s: float = TIMEOUT_S,
                 steady: Callable[[], float] = time.monotonic,
                 heard: Callable[[Any], None] | None = None, **fields: Any) -> None:
        self._client = client
        self._name = f'{client.target}/{service}'
        self._steady = steady
        self._timeout_s = timeout_s
        self._until = steady() + timeout_s
        self._heard = heard
        self._future: Future | None = None
        # A request to a service that is not there would be lost without a word.
        if client.service_ready(service):
            self._future = client.call(service, **fields)
            self._future.add_done_callback(self._tell)

    @property
    def open(self) -> bool:
        """Whether an answer may still come in time."""
        return (self._future is not None and not self._future.done()
                and self._steady() <= self._until)

    def poll(self) -> Any | None:
        """Return the response once it says yes.

        Raises Refusal: with the node's code; UNSUPPORTED where the service is absent, IO where no
        answer came in time (the node may still carry the request out).
        """
        future = self._future
        if future is None:
            raise Refusal(Code.UNSUPPORTED, f'{self._name} is not there; start the policy node, or '
                          'correct its name')
        if not future.done():
            if self._steady() > self._until:
                raise Refusal(Code.IO, f'{self._name} did not answer within {self._timeout_s:g} s')
            return None
        if future.exception() is not None:
            raise Refusal(Code.IO, f'{self._name}: {future.exception()}')
        self._tell(future)             # rclpy runs done callbacks later, as tasks of the executor
        return check(future.result())

    def then(self, heard: Callable[[Any], None]) -> None:
        """Nobody polls any more; call `heard` with the answer, at once where it is there."""
        self._heard = heard
        if self._future is not None and self._future.done():
            self._tell(self._future)

    def abandon(self) -> None:
        """Want the answer no longer; `heard` is not called any more."""
        self._heard = None
        if self._future is not None:
            self._client.abandon(self._future)

    def _tell(self, future: Future) -> None:
        if future.exception() is not None:
            return
        response = future.result()
        self._client.hear(response)
        heard, self._heard = self._heard, None
        if heard is not None and getattr(response, 'success', False):
            heard(response)
