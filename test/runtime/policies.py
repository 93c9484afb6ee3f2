"""Policies whose actions a test can read: which inference, which row, which prompt made them."""
from __future__ import annotations

import threading
from typing import Any

import numpy as np

from flashrt_ros.backends.reference import Arrays, Chunked, Journal, NumpyPolicy
from flashrt_ros.core.layout import BufferSpec, Role


class Gate:
    """Holds ticks of a policy while closed; `entered` is set by the tick that waits."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._open.set()
        self.entered = threading.Event()

    def close(self) -> None:
        """Hold the next tick."""
        self.entered.clear()
        self._open.clear()

    def open(self) -> None:
        """Let it go on."""
        self._open.set()

    def __call__(self) -> None:
        if not self._open.is_set():
            self.entered.set()
            assert self._open.wait(10), 'a gate was never opened'


GATES: dict[str, Gate] = {}    # by name, for policies are made from a file


def gate(name: str) -> Gate:
    """Return the gate of a name."""
    return GATES.setdefault(name, Gate())


class Numbered(Chunked):
    """`Chunked`, numbered, whose ticks a gate can hold."""

    def __init__(self, gate: str = '', **options: Any) -> None:
        super().__init__(numbered=True, **options)
        self._gate = gate

    def tick(self, b: Arrays) -> None:
        """Wait at the gate, then tick."""
        if self._gate:
            GATES[self._gate]()
        super().tick(b)

    def hidden(self) -> dict[str, str]:
        """The gate's name is no state."""
        return {}


class Arm(NumpyPolicy):
    """q (n,) -> actions (horizon, n): row i is q, or `to` where given, + 0.01 (i + 1).

    Above 100 in q[0] it makes NaN, below -100 it raises. STATE count (1,) I64 and total (n,) F64.
    """

    def __init__(self, joints: int = 3, horizon: int = 4, to: float | None = None, gate: str = ''
                 ) -> None:
        super().__init__((
            BufferSpec('q', (joints,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('count', (1,), 'I64', Role.STATE),
            BufferSpec('total', (joints,), 'F64', Role.STATE),
            BufferSpec('actions', (horizon, joints), 'F32', Role.OUTPUT)), {})
        self._to = to
        self._gate = gate

    def tick(self, b: Arrays) -> None:
        """Say where to go."""
        if self._gate:
            GATES[self._gate]()
        if b['q'][0] < -100:
            raise RuntimeError('the policy raised')
        b['count'] += 1
        b['total'] += b['q']
        out = b['actions']
        out[:] = b['q'] if self._to is None else self._to
        out += 0.01 * np.arange(1, len(out) + 1, dtype=np.float32)[:, None]
        if b['q'][0] > 100:
            out[:] = np.nan

    def hidden(self) -> dict[str, str]:
        """The gate's name is no state."""
        return {}


class Prompted(NumpyPolicy):
    """obs (3,), prompt (8,) U8 -> actions (horizon, 1): 1000 prompt[0] + 10 k + row."""

    def __init__(self, horizon: int = 6, gate: str = '') -> None:
        super().__init__((
            BufferSpec('obs', (3,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('prompt', (8,), 'U8', Role.INPUT, low=0, high=127),
            BufferSpec('count', (1,), 'I64', Role.STATE),
            BufferSpec('actions', (horizon, 1), 'F32', Role.OUTPUT)), {})
        self._gate = gate

    def tick(self, b: Arrays) -> None:
        """Number the rows."""
        if self._gate:
            GATES[self._gate]()
        b['count'] += 1
        b['actions'][:, 0] = (1000.0 * b['prompt'][0] + 10.0 * b['count'][0]
                              + np.arange(len(b['actions'])))

    def hidden(self) -> dict[str, str]:
        """The gate's name is no state."""
        return {}


class GatedJournal(Journal):
    """`Journal` on three inputs, whose prefill a gate can hold."""

    def __init__(self, gate: str) -> None:
        super().__init__(obs_dim=3, rows=32, prompt_length=8)
        self._gate = gate

    def prefill(self, b: Arrays) -> None:
        """Wait at the gate, then take in the prompt."""
        GATES[self._gate]()
        super().prefill(b)

    def hidden(self) -> dict[str, str]:
        """The gate's name is no state."""
        return {}


def journal(**options: Any) -> GatedJournal:
    """Factory of GatedJournal."""
    return GatedJournal(**options)


def numbered(**options: Any) -> Numbered:
    """Factory of Numbered."""
    return Numbered(**options)


def arm(**options: Any) -> Arm:
    """Factory of Arm."""
    return Arm(**options)


def prompted(**options: Any) -> Prompted:
    """Factory of Prompted."""
    return Prompted(**options)
