"""A policy node with a robot of three joints, for trees."""
from __future__ import annotations

from typing import Any

from py_trees.common import Status

from flashrt_ros.clients.behaviours import ExecutePolicy
from flashrt_ros.msg import CapsuleEvent
from test.clients.trees import Ticker
from test.node.harness import Probe, Served, until
from test.node.robot import Robot

AT_HOME, AWAY = [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]     # rad; the guard allows 0.2


class World:
    """A policy node that has made two ticks, its robot, and what a test asks of them."""

    def __init__(self, probe: Probe, served: Served) -> None:
        self.probe = probe
        self.served = served
        self.robot = Robot(probe, served.name)
        self.client = self.robot.client
        self.robot.say()
        self.robot.live()
        assert Ticker(probe, self.execute('before', 2)).end() is Status.SUCCESS

    def tick_number(self) -> int:
        """Return the present tick of the policy."""
        return int(self.served.node.runner.session.tick)

    def move(self, position: list[float]) -> None:
        """Put the robot elsewhere; the node has heard of it when this returns."""
        self.robot.say(position)
        hub = self.served.node.runner
        until(lambda: all(abs(hub.observation.joints()[f'j{i}'][0] - p) < 1e-6
                          for i, p in enumerate(position)), 'the robot has not moved')

    def execute(self, name: str, ticks: int = 3) -> ExecutePolicy:
        """Return a child that takes some ticks."""
        return ExecutePolicy(name, self.client, max_ticks=ticks)

    def kinds(self, kind: int) -> list[Any]:
        """Return the events of a kind so far: a reset at the end shows that all are there."""
        n = len(self.robot.events.messages)
        assert self.robot.call('reset').success
        self.robot.events.wait(lambda m: m.kind == CapsuleEvent.RESET, start=n)
        return [m for m in self.robot.events.messages if m.kind == kind]

    def restored(self) -> list[str]:
        """Return the names of the capsules that were restored, in order."""
        return [m.capsule.name for m in self.kinds(CapsuleEvent.RESTORED)]

    def capsules(self) -> list[str]:
        """Return the names of the capsules."""
        return [c.name for c in self.robot.call('list_capsules').capsules if c.name != 'origin']

    def no_capsules(self) -> None:
        """Wait until every checkpoint is dropped."""
        until(lambda: not self.capsules(), 'a checkpoint is left')
