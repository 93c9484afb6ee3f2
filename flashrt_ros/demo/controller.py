"""A fake joint trajectory controller: what it does on a message is what real ones do.

A new trajectory replaces the running one at once, from the present setpoint; points are joined by
straight lines; at the end the last point is held. A trajectory without points is ignored, so it
is no stop. Whoever goes silent without a stop leaves the arm on its way to the last point.
"""
from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Floats = Sequence[float] | Vector


class TrajectoryController:
    """Setpoints of `n` joints over time. Times are seconds of the caller's clock."""

    def __init__(self, start: Floats) -> None:
        self._times = [0.0]
        self._points: Vector = np.array([start], np.float64)  # (points, joints), rad

    def command(self, now: float, points: Sequence[Floats], times: Sequence[float]) -> None:
        """Replace the trajectory: `points` (k, joints) are due `times` seconds after `now`."""
        if not len(points):
            return
        first = self.sample(now)
        self._times = [now, *(now + float(t) for t in times)]
        self._points = np.concatenate((first[None], np.asarray(points, np.float64)))

    def sample(self, now: float) -> Vector:
        """Return the setpoint (joints,) at a time."""
        i = bisect_right(self._times, now)
        before: Vector = self._points[max(0, i - 1)]
        if i == 0 or i == len(self._times):
            return np.array(before)
        share = (now - self._times[i - 1]) / (self._times[i] - self._times[i - 1])
        setpoint: Vector = before + share * (self._points[i] - before)
        return setpoint

    def state(self) -> tuple[list[float], Vector]:
        """Return copies of `(times, points)`, all that it remembers."""
        return list(self._times), self._points.copy()

    def set_state(self, state: tuple[list[float], Vector]) -> None:
        """Go back to what `state` returned."""
        self._times, self._points = list(state[0]), state[1].copy()
