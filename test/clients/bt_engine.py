"""Runs a tree of flashrt_ros/clients/trees in the BehaviorTree.CPP engine against a policy node.

The Python binding registers nodes without ports, so each of our nodes in the file becomes a type of
its own that knows its attributes and reads and writes the blackboard itself, as the engine would
for it. All the rest (control flow, scripts, subtrees, remapping, halts) is the engine's. The nodes
are as thin as the C++ ones in docs/behaviour_trees.md: send in the first tick, look in the others,
forget at a halt. What a node raises would become FAILURE in the engine; it is raised here instead.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import threading
from typing import Any
import xml.etree.ElementTree as ElementTree

import behaviortreepy as bt
import pytest

import flashrt_ros.clients
from flashrt_ros.clients.client import Execution, PolicyClient
from flashrt_ros.core.errors import Code
from test.node.harness import WAIT_S, Probe

TREES = Path(flashrt_ros.clients.__path__[0]) / 'trees'
RUNNING, SUCCESS, FAILURE = (getattr(bt.NodeStatus, n) for n in ('RUNNING', 'SUCCESS', 'FAILURE'))
PERIOD_S = 0.004


class Node:
    """One of our nodes in a tree."""

    def __init__(self, engine: Engine, ports: dict[str, str]) -> None:
        self.engine = engine
        self.ports = ports
        self.sent: Any = None

    def read(self, node: Any, port: str, default: Any) -> Any:
        """Return the value of an input port."""
        text = self.ports.get(port)
        if text is None:
            return default
        if text.startswith('{'):
            board, key = node.config().blackboard, text.strip('{}')
            if isinstance(default, str):
                return board.get_string(key)
            return type(default)(board.get_int(key))
        return text == 'true' if isinstance(default, bool) else type(default)(text)

    def write(self, node: Any, port: str, value: Any) -> None:
        """Set an output port."""
        text = self.ports.get(port)
        if text is not None:
            board, key = node.config().blackboard, text.strip('{}')
            (board.set_int if isinstance(value, int) else board.set_string)(key, value)

    def start(self, node: Any) -> Any:
        """Send."""
        self.sent = self.send(node)
        return RUNNING

    def send(self, node: Any) -> Any:
        """Return what `look` is to look at."""
        raise NotImplementedError

    def look(self, node: Any) -> Any:
        """Return RUNNING until the answer is there, SUCCESS only if it says so."""
        if not self.sent.done():
            return RUNNING
        response = self.sent.result()
        self.write(node, 'code', int(getattr(response, 'code', 0)))
        if not response.success:
            return FAILURE
        self.answered(node, response)
        return SUCCESS

    def answered(self, node: Any, response: Any) -> None:
        """For subclasses."""

    def halt(self, node: Any) -> None:
        """Forget: the node may still carry the request out."""
        self.engine.client.abandon(self.sent)


class SaveCapsule(Node):
    """srv/SaveCapsule."""

    def send(self, node: Any) -> Any:
        """Send it."""
        return self.engine.client.save(self.read(node, 'capsule_name', ''),
                                       lease_s=self.read(node, 'lease_s', 0.0))

    def answered(self, node: Any, response: Any) -> None:
        """Tell which."""
        self.write(node, 'capsule', response.capsule.name)
        self.write(node, 'capsule_id', response.capsule.id)
        self.write(node, 'epoch', int(response.epoch))
        self.write(node, 'witness_names', ';'.join(response.capsule.witness_names))
        self.write(node, 'witness', ';'.join(map(repr, response.capsule.witness)))


class RestoreCapsule(Node):
    """srv/RestoreCapsule."""

    def send(self, node: Any) -> Any:
        """Send it."""
        return self.engine.client.restore(
            self.read(node, 'capsule', ''), if_id=self.read(node, 'if_id', ''),
            if_epoch=self.read(node, 'if_epoch', 0), check=self.read(node, 'check', False))

    def answered(self, node: Any, response: Any) -> None:
        """Tell since when."""
        self.write(node, 'epoch', int(response.epoch))


class DropCapsule(Node):
    """srv/DropCapsule."""

    def send(self, node: Any) -> Any:
        """Send it."""
        return self.engine.client.drop(self.read(node, 'capsule', ''),
                                       if_id=self.read(node, 'if_id', ''))


class TriggerService(Node):
    """Any std_srvs/Trigger."""

    def send(self, node: Any) -> Any:
        """Send it."""
        return self.engine.client.trigger(self.ports['service_name'].rpartition('/')[2])


class ExecutePolicy(Node):
    """action/ExecutePolicy. `forgetful`: at a halt before the acknowledgement it cancels nothing,
    as Nav2's and BehaviorTree.ROS2's action nodes do."""

    forgetful = False

    def send(self, node: Any) -> Execution:
        """Send the goal."""
        return self.engine.client.execute(max_ticks=self.read(node, 'max_ticks', 0))

    def look(self, node: Any) -> Any:
        """Look for the result."""
        if not self.sent.result.done():
            return RUNNING
        result = self.sent.result.result()
        self.write(node, 'code', int(result.code))
        return SUCCESS if result.code == Code.OK else FAILURE

    def halt(self, node: Any) -> None:
        """Cancel."""
        if self.sent.accepted.done() or not self.forgetful:
            self.sent.cancel()


class Forgetful(ExecutePolicy):
    """Such a node."""

    forgetful = True


class Said(Node):
    """Returns what the test wrote into `engine.says` under its key. Notes that it was asked, and
    the value of its port `shows`."""

    def start(self, node: Any) -> Any:
        """Count and say."""
        key = self.ports['key']
        self.engine.ticked.append(key)
        if 'shows' in self.ports:
            self.engine.shown[key] = self.read(node, 'shows', '')
        return self.engine.says.get(key, RUNNING)

    def look(self, node: Any) -> Any:
        """Say."""
        return self.engine.says.get(self.ports['key'], RUNNING)

    def halt(self, node: Any) -> None:
        """Nothing was sent."""


NODES = {cls.__name__: cls for cls in (SaveCapsule, RestoreCapsule, DropCapsule, TriggerService,
                                       ExecutePolicy, Forgetful, Said)}


class Engine:
    """A tree in the engine; `xml` are the files that make it."""

    def __init__(self, probe: Probe, client: PolicyClient, *xml: str, main: str = 'Main') -> None:
        self.probe = probe
        self.client = client
        self.says: dict[str, Any] = {}
        self.ticked: list[str] = []
        self.shown: dict[str, str] = {}
        self.errors: list[BaseException] = []
        self.ticks = 0
        self.status = bt.NodeStatus.IDLE
        self._news = threading.Condition()
        self._factory = bt.BehaviorTreeFactory()
        self._count = 0
        for text in xml:
            self._factory.register_behavior_tree_from_text(self._own_nodes(text))
        self.tree = self._factory.create_tree(main)

    def another(self, name: str) -> Any:
        """Return another tree on the blackboard of this one's root."""
        return self._factory.create_tree(name, self.tree.root_blackboard())

    def _own_nodes(self, text: str) -> str:
        root = ElementTree.fromstring(text)
        for element in root.iter():
            if element.tag in NODES:
                ports = {k: v for k, v in element.attrib.items() if not k.startswith('_')}
                for port in ports:
                    del element.attrib[port]
                self._count += 1
                node = NODES[element.tag](self, ports)
                element.tag = f'{element.tag}_{self._count}'
                self._factory.register_simple_stateful_action(
                    element.tag, self._safe(node.start), self._safe(node.look),
                    self._safe(node.halt))
        return ElementTree.tostring(root, encoding='unicode')

    def _safe(self, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def call(node: Any) -> Any:
            try:
                return function(node)
            except BaseException as error:
                self.errors.append(error)
                raise
        return call

    def _tick(self) -> None:
        self.status = self.tree.tick_once()
        self.ticks += 1

    def once(self) -> Any:
        """Tick once."""
        self.probe.inside(self._tick)
        self._check()
        return self.status

    def until(self, condition: Callable[[], Any], what: str, timeout: float = WAIT_S) -> None:
        """Tick until something is so, and not once more."""
        done = False

        def tick() -> None:
            nonlocal done
            if not done:
                self._tick()
                done = bool(condition()) or bool(self.errors)
                with self._news:
                    self._news.notify_all()
        timer = self.probe.inside(lambda: self.probe.node.create_timer(PERIOD_S, tick))
        try:
            with self._news:
                if not self._news.wait_for(lambda: done, timeout):
                    pytest.fail(f'{what} not within {self.ticks} ticks; {self.ticked}')
        finally:
            self.probe.inside(lambda: self.probe.node.destroy_timer(timer))
        self._check()

    def end(self) -> Any:
        """Tick until the tree ends; return how."""
        self.until(lambda: self.status in (SUCCESS, FAILURE), 'the end')
        return self.status

    def halt(self) -> None:
        """Halt as Nav2 does at a cancel."""
        self.probe.inside(self.tree.halt_tree)
        self._check()

    def _check(self) -> None:
        if self.errors:
            raise self.errors[0]
