"""Fixtures of the client tests: a probe whose thread ticks the tree, and policy nodes."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import gc

import pytest

pytest.importorskip('py_trees')

from py_trees.blackboard import Blackboard

from test.clients.world import World
from test.node.conftest import gate, probe, serve
from test.node.harness import Probe, Served

__all__ = ['gate', 'probe', 'serve']


@pytest.fixture(autouse=True)
def _left_as_found() -> Iterator[None]:
    """py_trees keeps one blackboard for the whole process; and rclpy gives a participant back only
    when the last action client of its node is collected. A machine finds 32 of them, not more."""
    yield
    Blackboard.clear()
    gc.collect()


@pytest.fixture
def world(probe: Probe, serve: Callable[..., Served]) -> Iterator[World]:
    """A policy node that has made two ticks, and its robot."""
    made = World(probe, serve('arm'))
    yield made
    probe.inside(made.client.close)  # the engine's nodes keep it, where no collector sees them
