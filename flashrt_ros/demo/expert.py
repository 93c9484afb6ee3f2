"""The scripted expert that the policy learns from. It sees what the policy may not remember.

A plan is a list of stages; each has a goal for the grasp point, a speed, a gripper command and a
condition to go on. `Expert.chunk` returns the next targets as if the arm followed perfectly, so
that it can label any state that a half-trained policy has got into.
"""
from __future__ import annotations

from copy import copy
from math import cos, hypot, sin
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.demo.arm import BINS, CLOSED, HALF_PART, HOME, OPEN, SCANNER, Cell, inverse

Vector = NDArray[np.float64]

HOVER = 0.09          # m, grasp point above the part's centre
TRAVEL = 0.20         # m, height of the grasp point when it carries
SCAN_HEIGHT = 0.15
DROP_HEIGHT = 0.10
FAST, SLOW = 0.020, 0.009   # m per control step
SCAN_STEPS = 12       # the rule asks for eight
CLOSE_STEPS = 6
OPEN_STEPS = 5


class View(NamedTuple):
    """What the expert looks at."""

    hand: Vector
    part: Vector
    held: bool
    scanned: bool
    binned: bool


def look(cell: Cell) -> View:
    """Return the expert's view of the cell."""
    return View(cell.hand, cell.part, cell.held, cell.scanned, cell.in_bin(cell.task.target))


class Expert:
    """Moves a setpoint of the grasp point through the stages of the task."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.stage = 'hover'
        self.count = 0
        self.point: Vector = np.array([HOME[1] * cos(HOME[0]), HOME[1] * sin(HOME[0]), HOME[2]])

    def observe(self, view: View) -> None:
        """Correct the stage by what really happened: a lost part is picked up again."""
        carrying = self.stage in ('carry', 'scan', 'away', 'over', 'lower')
        if carrying and not view.held and not view.binned:
            self._go('hover')
        if view.binned and self.stage in ('hover', 'descend', 'close'):
            self._go('home')
        if np.linalg.norm(self.point - view.hand) > 0.04:   # pushed away, or far behind
            self.point = view.hand.copy()

    def chunk(self, view: View, rows: int) -> NDArray[np.float64]:
        """Return the next targets (rows, 5): joints in rad and the finger in metres."""
        ahead = copy(self)
        ahead.point = self.point.copy()
        part, out = view.part.copy(), []
        for _ in range(rows):
            row, carried = ahead._advance(part, view.scanned)
            out.append(row)
            if carried:
                part = ahead.point.copy()
        return np.array(out)

    def advance(self, view: View) -> NDArray[np.float64]:
        """Go one control step on and return its target (5,)."""
        return self._advance(view.part, view.scanned)[0]

    def _go(self, stage: str) -> None:
        self.stage, self.count = stage, 0

    def _toward(self, goal: tuple[float, float, float], speed: float) -> bool:
        gap = np.array(goal) - self.point
        far = float(np.linalg.norm(gap))
        self.point = self.point + gap * min(1.0, speed / max(far, 1e-9))
        return far <= speed

    def _swing(self, goal: tuple[float, float, float], speed: float) -> bool:
        # Between stations the hand goes round the base, not straight through the column.
        x, y, z = goal
        angle, radius = np.arctan2(self.point[1], self.point[0]), hypot(*self.point[:2])
        turn = np.arctan2(y, x) - angle
        gap = np.array([turn * radius, hypot(x, y) - radius, z - self.point[2]])
        far = float(np.linalg.norm(gap))
        share = min(1.0, speed / max(far, 1e-9))
        angle, radius = angle + turn * share, radius + gap[1] * share
        self.point = np.array([radius * cos(angle), radius * sin(angle),
                               self.point[2] + gap[2] * share])
        return far <= speed

    def _advance(self, part: Vector, scanned: bool) -> tuple[Vector, bool]:
        px, py = float(part[0]), float(part[1])
        bx, by = BINS[self.target]
        grip, carried = OPEN, False
        self.count += 1
        if self.stage == 'hover':
            height = max(float(part[2]), HALF_PART) + HOVER
            if self._swing((px, py, height), FAST):
                self._go('descend')
        elif self.stage == 'descend':
            if hypot(self.point[0] - px, self.point[1] - py) > 0.02:
                self._go('hover')
            elif self._toward((px, py, max(float(part[2]), 0.02) - 0.002), SLOW):
                self._go('close')
        elif self.stage == 'close':
            grip = CLOSED
            if self.count >= CLOSE_STEPS:
                self._go('lift')
        elif self.stage in ('lift', 'carry', 'scan', 'away', 'over', 'lower'):
            grip, carried = CLOSED, True
            self._carry(scanned, bx, by)
        elif self.stage == 'open':
            if self.count >= OPEN_STEPS:
                self._go('rise')
        elif self.stage == 'rise':
            if self._toward((bx, by, TRAVEL), FAST):
                self._go('home')
        elif self._swing((HOME[1] * cos(HOME[0]), HOME[1] * sin(HOME[0]), HOME[2]), FAST):
            self._go('home')
        return np.append(inverse(self.point), grip), carried

    def _carry(self, scanned: bool, bx: float, by: float) -> None:
        x, y, _ = self.point
        if self.stage == 'lift':
            if self._toward((x, y, TRAVEL), FAST):
                self._go('over' if scanned else 'carry')
        elif self.stage == 'carry':
            if self._swing((*SCANNER, SCAN_HEIGHT), FAST):
                self._go('scan')
        elif self.stage == 'scan':
            if self.count >= SCAN_STEPS:
                self._go('away')
        elif self.stage == 'away':
            if self._toward((x, y, TRAVEL), FAST):
                self._go('over')
        elif self.stage == 'over':
            if self._swing((bx, by, TRAVEL), FAST):
                self._go('lower')
        elif self._toward((bx, by, DROP_HEIGHT), FAST):
            self._go('open')
