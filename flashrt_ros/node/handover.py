"""Lets the device thread have the interpreter as soon as it has work.

An inference is started on the intake thread and runs on the device thread. Without this, the intake
would go on to build its next wait set, 0.1 ms of Python, and only then let go of the interpreter;
the action would be later by that. So for programs that are quick it rests until the chunk was used,
for QUICK_S at most. Others it does not wait for.
"""
from __future__ import annotations

import threading

from flashrt_ros.core.inference import Inference
from flashrt_ros.core.session import Session

QUICK_S = 0.002  # the longest that a service may be kept waiting by this


class Handover:
    """Rests after a message or a timer that has started an inference. Intake thread only."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._last: Inference | None = None
        self._used = threading.Event()
        self._quick = True

    def rest(self) -> None:
        """Return when the inference that has just been started is used, or at once."""
        inference = self._session.in_flight
        if inference is None or inference is self._last:
            return
        self._last = inference
        if self._quick:
            self._used.clear()
        inference.add_done_callback(self._done)    # after the runner's own, which publishes
        if self._quick:
            self._used.wait(QUICK_S)

    def _done(self, inference: Inference) -> None:
        self._quick = inference.error is None and inference.duration_s < QUICK_S
        self._used.set()
