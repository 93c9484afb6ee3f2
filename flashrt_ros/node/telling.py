"""What the node tells of itself, on a thread of its own: chunks, events, status, diagnostics.

Nobody's motion depends on these, so neither an action nor an answer waits until they are built and
published, and a reader that cannot keep up slows nothing down. One thread keeps their order.
"""
from __future__ import annotations

from collections.abc import Callable
import traceback

from rclpy.exceptions import InvalidHandle
from rclpy.node import Node

from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.worker import Worker

MAX_WAITING = 1000  # what comes while so much waits is dropped, counted and warned of


class Telling:
    """A queue of things to publish. All methods may be called from any thread."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._worker = Worker('telling', threaded=True)
        self._due: set[Callable[[], None]] = set()
        self.dropped = 0

    @property
    def behind(self) -> bool:
        """Whether more waits than a burst leaves: what is told now should hold little memory."""
        return self._worker.left > 16

    def tell(self, job: Callable[[], None]) -> None:
        """Carry out `job` after all that came before."""
        if self._worker.left >= MAX_WAITING:
            self.dropped += 1
            self._node.get_logger().warning(
                f'{self.dropped} messages of ~/chunk and ~/capsule_events were dropped: publishing '
                'them does not keep up', throttle_duration_sec=1.0)
            return
        self._post(job)

    def once(self, job: Callable[[], None]) -> None:
        """The same for what tells of the present: if it waits already, that is enough."""
        if job not in self._due:
            self._due.add(job)

            def run() -> None:
                self._due.discard(job)     # what changes from here on is told by the next
                job()
            self._post(run)

    def _post(self, job: Callable[[], None]) -> None:
        try:
            self._worker.post(lambda: self.guarded(job))
        except Refusal:
            pass                           # the node has left

    def guarded(self, job: Callable[[], None]) -> None:
        """Carry out `job` here and now; a failure is logged and stays here. Some thread may still
        have something to say when the node has left the graph."""
        try:
            job()
        except InvalidHandle:
            pass
        except Exception:
            self._node.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)

    def close(self, timeout_s: float = 1.0) -> None:
        """Tell what waits and end the thread."""
        self._worker.close(timeout_s)
