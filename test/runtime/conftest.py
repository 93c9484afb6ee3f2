"""Fixtures of the runtime tests."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from test.runtime.policies import GATES
from test.runtime.world import World


@pytest.fixture
def world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make worlds: `world(ARM, {...changes}, threaded=True)`; all are closed afterwards."""
    made: list[World] = []

    def make(*data: Any, **options: Any) -> World:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(World(folder, *data, **options))
        return made[-1]
    yield make
    for gate in GATES.values():
        gate.open()
    for each in made:
        each.close()
    GATES.clear()
