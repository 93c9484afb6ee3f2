"""A policy whose inference takes as long as its option says."""
from __future__ import annotations

import time
from typing import Any

from flashrt_ros.backends.reference import Recurrent


class Slow(Recurrent):
    """The recurrent reference policy, `seconds` later."""

    def __init__(self, seconds: float = 0.05, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds

    def tick(self, b: Any) -> None:
        """Compute, then wait."""
        super().tick(b)
        time.sleep(self._seconds)


def slow(**options: Any) -> Slow:
    """Return the policy; named in the policy file as bench.slow_policy:slow."""
    return Slow(**options)
