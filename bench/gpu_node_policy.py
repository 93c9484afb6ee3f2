"""A flow head whose tick lasts 30 ms, for the node's benchmark."""
from __future__ import annotations

import time
from typing import Any

from flashrt_ros.backends.hybrid import FlowHead
from flashrt_ros.backends.tensor_program import Tensors, import_torch

TICK_S = 0.03
HERTZ = 1.98e9  # of the card's clock while it is busy; the status says what it came to


class Slow(FlowHead):
    """The same numbers, later."""

    def tick(self, t: Tensors) -> None:
        """Spend TICK_S on the card, or on the host where there is none, then run."""
        torch = import_torch()
        if t['obs'].is_cuda:
            torch.cuda._sleep(int(TICK_S * HERTZ))
        else:
            time.sleep(TICK_S)
        super().tick(t)


def slow(**options: Any) -> Slow:
    """Factory."""
    return Slow(**{'horizon': 16, 'action_dim': 4, **options})
