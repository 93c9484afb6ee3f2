"""A policy of any backend bound to an arena, without a session: what its backend alone does."""
from __future__ import annotations

from typing import Any

import numpy as np

from flashrt_ros.backends import load
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.arena import Arena
from flashrt_ros.core.layout import Role


class Live:
    """Buffers by name in `b`, at their initial values after construction and `wipe`."""

    def __init__(self, backend: str, **spec: Any) -> None:
        self.policy, self.device = load(backend, PolicySpec(**spec))
        self.layout = self.policy.layout()
        self.arena = Arena(self.device, self.layout)
        self.bound = self.policy.bind(self.arena.buffers, self.device)
        self.b = {name: buffer.array for name, buffer in self.arena.buffers.items()}
        self.wipe()

    def wipe(self) -> None:
        """Put STATE at its initial values and all else at 0."""
        initial = self.policy.initial()
        for name, array in self.b.items():
            array[...] = initial.get(name, 0)

    def tick(self, **inputs: Any) -> dict[str, np.ndarray]:
        """Run one tick; return copies of the outputs."""
        for name, value in inputs.items():
            self.b[name][...] = value
        self.bound.enqueue()
        return {s.name: self.b[s.name].copy() for s in self.layout.select(Role.OUTPUT)}

    def state(self) -> dict[str, bytes]:
        """Return the bytes of every STATE buffer."""
        return {s.name: self.b[s.name].tobytes() for s in self.layout.select(Role.STATE)}

    def put(self, state: dict[str, bytes]) -> None:
        """Put the bytes of STATE back."""
        for name, data in state.items():
            self.b[name].reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)

    def returns(self, inputs: list[dict[str, Any]], at: int) -> None:
        """Assert that state saved before tick `at` and put back repeats the rest to the byte."""
        self.wipe()
        before = [self.tick(**x) for x in inputs[:at]]
        assert len(before) == at
        saved = self.state()
        rest = [self.tick(**x) for x in inputs[at:]]
        for x in inputs[:3]:
            self.tick(**x)
        self.put(saved)
        for want, x in zip(rest, inputs[at:], strict=True):
            got = self.tick(**x)
            for name in want:
                np.testing.assert_array_equal(got[name], want[name])
