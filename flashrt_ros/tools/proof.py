"""What verify has found: claims, what each buffer bears, and the actions that are compared."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.tools.offline import Sent


@dataclass(frozen=True)
class Check:
    """One claim, whether it holds, and what was seen."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True)
class Leaving:
    """What happens when one buffer is left out of a restore."""

    name: str
    nbytes: int
    space: str
    what: str                          # what it holds, where the policy file tells
    changed: bool                      # it differed from what was saved
    load_bearing: bool
    step: int | None = None            # of the first other action, counted from the restore
    largest: float | None = None       # difference of an action
    note: str = ''


@dataclass
class Proof:
    """Everything that verify has found."""

    checks: list[Check] = field(default_factory=list)
    buffers: list[Leaving] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    saved_at: int = 0
    steps: int = 0

    @property
    def ok(self) -> bool:
        """Whether every claim holds."""
        return bool(self.checks) and all(c.ok for c in self.checks)


@dataclass(frozen=True)
class Actions:
    """What left the policy, one entry per command."""

    steps: tuple[int, ...]
    values: tuple[NDArray[np.float64], ...]

    @staticmethod
    def of(sent: Sequence[Sent]) -> Actions:
        """Return the actions among what was sent."""
        rows = [s for s in sent if not s.stop]
        return Actions(tuple(s.step for s in rows), tuple(
            np.array(s.command.values if s.command.points is None else s.command.points)
            for s in rows))

    def since(self, step: int) -> Actions:
        """Return what left from a step on."""
        first = next((i for i, s in enumerate(self.steps) if s >= step), len(self.steps))
        return Actions(self.steps[first:], self.values[first:])

    def digest(self) -> str:
        """Return SHA-256 of all of it."""
        sha = hashlib.sha256()
        for step, value in zip(self.steps, self.values, strict=True):
            sha.update(f'{step} {value.shape} '.encode() + value.tobytes())
        return sha.hexdigest()

    def against(self, other: Actions) -> tuple[int | None, float]:
        """Return the step of the first other action, None where all are equal, and the largest
        difference."""
        largest, first = 0.0, None
        for step, a, b in zip(self.steps, self.values, other.values, strict=False):
            if a.tobytes() != b.tobytes():
                first = step if first is None else first
                if a.shape == b.shape:
                    with np.errstate(invalid='ignore'):
                        largest = max(largest, float(np.nanmax(np.abs(a - b))))
                else:
                    largest = math.inf
        if first is None and len(self.steps) != len(other.steps):
            short = min(len(self.steps), len(other.steps))
            first = (self.steps if len(self.steps) > short else other.steps)[short]
        return first, largest
