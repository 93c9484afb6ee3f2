"""The device thread: runs ticks, restores and tier moves in the order in which they came.

Inline, the same calls run at once on the caller's thread, which is what offline replay, studies and
most tests want. A quick job may also run on its caller's thread when nothing else is under way:
where memory is the CPU's, handing a small copy to another thread costs more than the copy.
"""
from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
import logging
import queue
import threading
from typing import TypeVar

from flashrt_ros.core.errors import Code, Refusal

T = TypeVar('T')
log = logging.getLogger('flashrt_ros.core')


class Worker:
    """One thread and one queue, or neither."""

    def __init__(self, name: str, *, threaded: bool) -> None:
        self._inline = threading.RLock()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] | None = None
        self._gate = threading.Lock()  # nothing is put behind the end
        self._turn = threading.Lock()  # held by whoever runs a job
        self._owner = 0                # identity of that thread
        self._left = 0                 # jobs that were posted and have not ended
        self._closed = False
        self._thread: threading.Thread | None = None
        if threaded:
            self._jobs = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._thread.start()

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` after all that were posted before; it handles its own exceptions.

        Raises Refusal(NOT_CONFIGURED) after `close`.
        """
        if self._jobs is None:
            with self._inline:
                job()
            return
        with self._gate:
            if self._closed:
                raise Refusal(Code.NOT_CONFIGURED, 'the session is closed; configure again')
            self._left += 1
            self._jobs.put(job)

    def call(self, fn: Callable[[], T], *, here: bool = False) -> Future[T]:
        """Run `fn` after all that were posted before; the future has its result.

        `here`: on the caller's thread, before this returns, if nothing is left to do before it.
        """
        future: Future[T] = Future()

        def job() -> None:
            try:
                result = fn()
            except BaseException as error:  # handed to whoever waits
                future.set_exception(error)
            else:
                future.set_result(result)
        if not (here and self._jobs is not None and self._run_here(job)):
            self.post(job)
        return future

    def _run_here(self, job: Callable[[], None]) -> bool:
        with self._gate:
            if self._closed or self._left or not self._turn.acquire(blocking=False):
                return False
            self._owner = threading.get_ident()
        try:
            job()
        finally:
            self._owner = 0
            self._turn.release()
        return True

    @property
    def is_current(self) -> bool:
        """Whether the caller is the device thread, or runs a job in its place."""
        return self._thread is None or threading.get_ident() == self._owner

    @property
    def left(self) -> int:
        """Jobs that were posted and have not ended."""
        return self._left

    def close(self, timeout: float | None = None) -> bool:
        """Finish what was posted and end the thread; False where it is still at work."""
        if self._jobs is None or self._thread is None:
            return True
        with self._gate:
            self._closed = True
            self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        return True

    def _run(self) -> None:
        assert self._jobs is not None
        while True:
            job = self._jobs.get()
            with self._turn:           # what runs in our place ends first
                if job is None:
                    return
                self._owner = threading.get_ident()
                try:
                    job()
                except Exception:      # a listener's, for example: the next job must still be done
                    log.exception('a job of %s failed', threading.current_thread().name)
                self._owner = 0
            with self._gate:
                self._left -= 1
