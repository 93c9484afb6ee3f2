"""The device thread: runs ticks, restores and tier moves in the order in which they came.

Inline, the same calls run at once on the caller's thread, which is what offline replay, studies and
most tests want.
"""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
import queue
import threading
from typing import Any, TypeVar

T = TypeVar('T')


class Worker:
    """One thread and one queue, or neither."""

    def __init__(self, name: str, *, threaded: bool) -> None:
        self._inline = threading.RLock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._thread: threading.Thread | None = None
        if threaded:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` after all that were posted before; it handles its own exceptions."""
        if self._jobs is None:
            with self._inline:
                job()
        else:
            self._jobs.put(job)

    def call(self, fn: Callable[[], T]) -> Future[T]:
        """Run `fn` after all that were posted before; the future has its result."""
        future: Future[T] = Future()

        def job() -> None:
            try:
                result = fn()
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
        self.post(job)
        return future

    @property
    def is_current(self) -> bool:
        """Whether the caller is the device thread."""
        return self._thread is None or threading.current_thread() is self._thread

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was posted and end the thread; False where it is still at work."""
        if self._jobs is None or self._thread is None:
            return True
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        assert self._jobs is not None
        jobs: Any = self._jobs
        while (job := jobs.get()) is not None:
            job()
