"""A trajectory controller as they are found on robots: it finishes what it has accepted.

A message replaces the running trajectory from the present setpoint on; the setpoint goes linearly
to each point and stays at the last; an empty trajectory is ignored; without a message it goes on to
the end. Simulated time, sampled at 100 Hz.
"""
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

SAMPLE_S = 0.01


class FakeController:
    """Setpoints of `joints`; `setpoint` (n,) in radians."""

    def __init__(self, joints: Sequence[str], start: Sequence[float]) -> None:
        self.joints = tuple(joints)
        self.setpoint: NDArray[np.float64] = np.array(start, float)
        self.now_s = 0.0
        self.accepted = 0
        self._times = np.zeros(1)
        self._points = self.setpoint[None].copy()

    def message(self, names: Sequence[str], points: Sequence[Sequence[float]],
                times_s: Sequence[float]) -> None:
        """Accept a trajectory: `points` (k, n) in the order of `names`, at `times_s` from now."""
        if not len(points):
            return
        order = [list(names).index(j) for j in self.joints]
        wanted = np.asarray(points, float)[:, order]
        self._times = np.concatenate([[self.now_s], self.now_s + np.asarray(times_s, float)])
        self._points = np.vstack([self.setpoint, wanted])
        self.accepted += 1

    def advance(self, duration_s: float) -> NDArray[np.float64]:
        """Let time pass; return the setpoints (k, n), one per sample."""
        samples = []
        for _ in range(max(1, round(duration_s / SAMPLE_S))):
            self.now_s += SAMPLE_S
            self.setpoint = np.array([np.interp(self.now_s, self._times, self._points[:, j])
                                      for j in range(len(self.joints))])
            samples.append(self.setpoint.copy())
        return np.array(samples)
