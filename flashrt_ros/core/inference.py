"""One tick under way: started by submit, finished on the device thread, accepted by its owner."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import threading
from typing import Any

from numpy.typing import NDArray

from flashrt_ros.core.capsule import Latch
from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.journal import Strands
from flashrt_ros.core.payload import Payload


class Inference:
    """What submit returns. Fields below `done` are valid once it is true."""

    def __init__(self, latch: Latch, epoch: int, *, prefill: bool = False) -> None:
        self.latch = latch
        self.epoch = epoch
        self.prefill = prefill
        self.error: Refusal | None = None
        self.outputs: Mapping[str, NDArray[Any]] = {}
        self.slot: Payload | None = None
        self.lengths: Mapping[str, int] = {}
        self.strands: Mapping[str, Strands] = {}
        self.duration_s = 0.0
        self.settled = False               # accepted or discarded
        self._event: threading.Event | None = None
        self._done = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[Inference], None]] = []

    @property
    def done(self) -> bool:
        """Whether it has finished, well or not."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is done; False on time-out. Not for the ROS executor's thread."""
        with self._lock:
            if self._done:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(timeout)

    def add_done_callback(self, fn: Callable[[Inference], None]) -> None:
        """Call `fn(self)` on the device thread when done, or now if it is."""
        with self._lock:
            if not self._done:
                self._callbacks.append(fn)
                return
        fn(self)

    def finish(self) -> None:
        """Say that it is done. Called by the device thread, without any lock."""
        with self._lock:
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
            if self._event is not None:
                self._event.set()
        for fn in callbacks:
            fn(self)
