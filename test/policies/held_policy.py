"""Policies for node tests: one that can be held or made to raise by its input, one that speaks.

`held`: as the recurrent reference, but an obs[0] above 100 holds the tick until GATE is set, and
one below -100 makes it raise. `prompted`: each row says which prompt and inference it came from.
"""
from __future__ import annotations

import os
from pathlib import Path
import threading
from typing import Any

import numpy as np

from flashrt_ros.backends.reference import Arrays, NumpyPolicy, Recurrent
from flashrt_ros.core.layout import BufferSpec, Role

GATE = threading.Event()       # lets a held tick go on
ENTERED = threading.Event()    # a tick is held


def wait() -> None:
    """Say that somebody is held, and wait."""
    ENTERED.set()
    if 'HELD_FILE' in os.environ:  # for a test in another process
        Path(os.environ['HELD_FILE']).touch()
    GATE.wait(60)


class Held(Recurrent):
    """obs (D,) -> actions (1, A)."""

    def tick(self, b: Arrays) -> None:
        """Wait or raise where obs[0] says so."""
        if b['obs'][0] > 100:
            wait()
        if b['obs'][0] < -100:
            raise RuntimeError('the policy raised')
        super().tick(b)


class Prompted(NumpyPolicy):
    """obs (D,), prompt (L,) U8 -> actions (H, 1): 10000 prompt[0] + 10 k + row of inference k."""

    def __init__(self, horizon: int = 8, obs_dim: int = 3, length: int = 8) -> None:
        super().__init__((
            BufferSpec('obs', (obs_dim,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('prompt', (length,), 'U8', Role.INPUT, low=0, high=127),
            BufferSpec('count', (1,), 'I64', Role.STATE),
            BufferSpec('actions', (horizon, 1), 'F32', Role.OUTPUT)), {})

    def tick(self, b: Arrays) -> None:
        """Number the rows."""
        b['count'] += 1
        rows = np.arange(len(b['actions']), dtype=np.float32)
        b['actions'][:, 0] = 10000.0 * b['prompt'][0] + 10 * b['count'][0] + rows


def held(**options: Any) -> Held:
    """Factory of Held."""
    return Held(**options)


def slow(**options: Any) -> Held:
    """Factory of Held that takes its time."""
    wait()
    return Held(**options)


def prompted(**options: Any) -> Prompted:
    """Factory of Prompted."""
    return Prompted(**options)
