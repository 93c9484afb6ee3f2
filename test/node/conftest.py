"""Fixtures of the node tests."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
import sys
from typing import Any

import pytest

from test.node.harness import POLICIES, Probe, Served

sys.path.insert(0, str(POLICIES))  # python_modules of the test policies
import held_policy


@pytest.fixture
def probe() -> Iterator[Probe]:
    made = Probe()
    yield made
    made.close()


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Serve a policy of test/policies in this process: `serve('arm', history=2)`."""
    nodes: list[Served] = []

    def make(policy: str | Path | None, *, activate: bool = True, **parameters: Any) -> Served:
        path = POLICIES / f'{policy}.yaml' if isinstance(policy, str) else policy
        parameters.setdefault('python_modules', ['held_policy'])
        nodes.append(Served(path, **parameters))
        if activate:
            nodes[-1].activate()
        return nodes[-1]
    yield make
    held_policy.GATE.set()  # nothing may stay held
    for node in nodes:
        node.close()


@pytest.fixture
def gate() -> Iterator[Any]:
    """The module whose GATE holds ticks with obs[0] > 100, reset before and opened after."""
    held_policy.GATE.clear()
    held_policy.ENTERED.clear()
    yield held_policy
    held_policy.GATE.set()
