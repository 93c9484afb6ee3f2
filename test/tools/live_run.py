"""A live run in one thread, and the bag that a recorder would have made of it.

The runner is the node's, driven by a simulated clock. The device is as slow as the test says:
between `slow` and `fast` no inference ends. Everything that a node publishes is serialised as ROS
does.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

pytest.importorskip('rosbags', reason="bags need rosbags: pip install 'flashrt_ros[bags]'")
from rosbags.rosbag2 import CompressionFormat, CompressionMode, StoragePlugin, Writer

from flashrt_ros.core.capsule import CapsuleInfo, Event
from flashrt_ros.core.session import Options
from flashrt_ros.ingest.output import Command
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import ChunkRecord, Clock, GoalRequest, NullSink
from flashrt_ros.tools.bag_types import Types
from flashrt_ros.tools.bags import Message
from flashrt_ros.tools.offline import Pump

S = 1_000_000_000
START = 1_700_000_000 * S
NODE = '/robot/policy_node'
JOINTS = ('a', 'b', 'c')
ACTIONS = 'std_msgs/msg/Float32MultiArray'
JOINT_STATE, TWIST = 'sensor_msgs/msg/JointState', 'geometry_msgs/msg/Twist'

# joints 3 + twist 3 + last action 2 + phase 2 + history 2 x 3 = 16
POLICY: dict[str, Any] = {
    'policy': {'backend': 'host', 'factory': 'flashrt_ros.backends.reference:chunked',
               'period_s': 0.02, 'options': {'obs_dim': 16, 'action_dim': 2, 'horizon': 5}},
    'run': {'trigger': 'timer'},
    'inputs': {'obs': [
        {'term': 'joint_position', 'topic': 'joint_states', 'joints': list(JOINTS)},
        {'term': 'twist', 'topic': 'cmd_vel', 'fields': ['linear.x', 'linear.y', 'angular.z'],
         'latched': True, 'timeout_s': 0.1, 'on_timeout': 'zero'},
        {'term': 'last_action'}, {'term': 'phase', 'period_s': 0.34},
        {'term': 'history', 'length': 2, 'of': [
            {'term': 'joint_position', 'topic': 'joint_states', 'joints': list(JOINTS)}]}]},
    'outputs': {'actions': {'topic': 'action', 'type': ACTIONS, 'kind': 'raw', 'scale': 0.5}},
}
EARLY = {'run': {'start_at': 3, 'latency_steps': 2}}
LOCK_STEP = {'run': {'trigger': {'input': ['joint_states']}, 'on_restore': 'continue'}}


def types() -> Types:
    """Return a store with the messages of this package and the common ones."""
    store = Types({}, {}, 'jazzy', [])
    for name in ('ActionChunk', 'PolicyStatus', 'CapsuleEvent', 'CapsuleInfo'):
        store.need(f'flashrt_ros/msg/{name}')
    for name in (JOINT_STATE, TWIST, ACTIONS, 'std_msgs/msg/Float64MultiArray'):
        store.need(name)
    return store


TYPES = types()


def make(kind: str, /, **fields: Any) -> Any:
    """Return a message; fields that are not given are zero."""
    from rosbags.interfaces import Nodetype
    zero: dict[str, Any] = {}
    for name, (node, rest) in TYPES.store.fielddefs[kind][1]:
        if name in fields:
            continue
        if node is Nodetype.NAME:
            zero[name] = make(rest)
        elif node is Nodetype.BASE:
            zero[name] = {'string': '', 'bool': False}.get(rest[0], 0)
        else:
            inner, count = rest
            numbers = inner[0] is Nodetype.BASE and inner[1][0] != 'string'
            number = np.dtype({'byte': 'u1', 'char': 'u1'}.get(inner[1][0], inner[1][0])
                              if numbers else 'O')
            size = count if node is Nodetype.ARRAY else 0
            zero[name] = np.zeros(size, number) if numbers else []
    return TYPES.store.types[kind](**zero, **fields)


def stamp(ns: int) -> Any:
    """Return a builtin_interfaces Time."""
    return make('builtin_interfaces/msg/Time', sec=ns // S, nanosec=ns % S)


def header(ns: int) -> Any:
    """Return a std_msgs Header."""
    return make('std_msgs/msg/Header', stamp=stamp(ns), frame_id='')


def raw(message: Any) -> bytes:
    """Return a message's CDR bytes."""
    return bytes(TYPES.store.serialize_cdr(message, message.__msgtype__))


def write_bag(path: Path, messages: Iterable[tuple[str, str, int, bytes]], *,
              storage: str = 'mcap', compression: str = '', version: int = 9) -> Path:
    """Write a bag of `(topic, type, time_ns, CDR bytes)`."""
    writer = Writer(path, version=version, storage_plugin=StoragePlugin[storage.upper()])
    if compression:
        writer.set_compression(CompressionMode[compression.upper()], CompressionFormat.ZSTD)
    with writer:
        connections: dict[str, Any] = {}
        for topic, kind, time_ns, data in messages:
            if topic not in connections:
                TYPES.need(kind)
                # of services a recorder has no definition that rosbags could write
                how: dict[str, Any] = ({'msgdef': '', 'rihs01': 'RIHS01_unknown'}
                                       if '/srv/' in kind else {'typestore': TYPES.store})
                connections[topic] = writer.add_connection(topic, kind, **how)
            writer.write(connections[topic], time_ns, data)
    return path


class Sink(NullSink):
    """Records what leaves the runner as a node publishes it."""

    def __init__(self, run: LiveRun) -> None:
        self.run = run

    def publish(self, output: str, command: Command) -> None:
        values = command.values.astype(np.float32)
        self.run.record(f'/robot/{self.run.runner.file.outputs[output].topic}', make(
            ACTIONS, layout=make('std_msgs/msg/MultiArrayLayout'), data=values))
        self.run.published.append(values)

    stop = publish

    def chunk(self, c: ChunkRecord) -> None:
        self.run.chunks.append(c)
        self.run.record(f'{NODE}/chunk', make(
            'flashrt_ros/msg/ActionChunk', header=header(c.stamp_ns), output=c.output,
            start=stamp(c.start_ns), session=c.session, epoch=c.epoch, tick=c.tick, step=c.step,
            step_s=c.step_s, horizon=len(c.data), names=list(c.names),
            data=c.data.reshape(-1), input_names=[e.name for e in c.latched],
            input_stamps=[stamp(e.stamp_ns) for e in c.latched],
            input_steps=np.array([e.step for e in c.latched], np.uint64),
            input_digests=np.array([e.digest for e in c.latched], np.uint64)))

    def event(self, event: Event) -> None:
        self.run.record(f'{NODE}/capsule_events', make(
            'flashrt_ros/msg/CapsuleEvent', header=header(self.run.ns), kind=int(event.kind),
            capsule=capsule(event.info), epoch=event.epoch, code=int(event.code),
            message=event.message, duration_s=event.duration_s, uri=event.uri,
            sha256=event.sha256))

    def changed(self) -> None:
        s = self.run.runner.status()
        self.run.record(f'{NODE}/status', make(
            'flashrt_ros/msg/PolicyStatus', header=header(self.run.ns), phase=int(s.phase),
            prompt=s.prompt, session=s.session, epoch=s.epoch, tick=s.tick, step=s.step,
            queue_depth=s.queue_depth, late_ticks=s.late_ticks))


def capsule(info: CapsuleInfo) -> Any:
    """Return a CapsuleInfo message."""
    return make('flashrt_ros/msg/CapsuleInfo', name=info.name, id=info.id,
                parent_id=info.parent_id, note=info.note, tick=info.tick, step=info.step,
                session=info.session, epoch=info.epoch, stamp=stamp(info.stamp_ns),
                tier=int(info.tier), nbytes=info.nbytes, fingerprint=info.fingerprint)


def merged(base: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy with nested values replaced."""
    result = {k: merged(v) if isinstance(v, Mapping) else v for k, v in base.items()}
    for change in changes:
        for key, value in change.items():
            old = result.get(key)
            both = isinstance(value, Mapping) and isinstance(old, Mapping)
            result[key] = merged(old, value) if both else value  # type: ignore[arg-type]
    return result


class LiveRun:
    """A configured and active runner, its robot, and what a recorder heard."""

    def __init__(self, folder: Path, *changes: Mapping[str, Any],
                 policy: Mapping[str, Any] = POLICY, modules: Sequence[str] = (),
                 **options: Any) -> None:
        self.policy_file = folder / 'policy.yaml'
        self.policy_file.write_text(yaml.safe_dump(merged(policy, *changes), sort_keys=False))
        self.folder = folder
        self.heard: list[Message] = []
        self.published: list[np.ndarray] = []
        self.chunks: list[ChunkRecord] = []
        self.ns = self.due = START
        self.pump = Pump()
        self.rng = np.random.default_rng(5)
        self.runner: Runner = build(
            self.policy_file, Sink(self), clock=Clock(lambda: self.ns, lambda: self.ns * 1e-9),
            options=Options(threaded=False, **options), worker=self.pump, modules=modules)
        self.runner.activate()
        self.lock_step = self.runner.file.run.lock_step
        self.period = round(self.runner.file.policy.period_s * 1e9)
        hz = self.runner.file.run.publish_hz
        self.parts = round(hz * self.runner.file.policy.period_s) if hz else 1

    def close(self) -> None:
        self.pump.release()
        self.runner.close()

    def record(self, topic: str, message: Any, at: int | None = None) -> bytes:
        """Let the recorder hear a message, a little later than it was sent."""
        data = raw(message)
        self.heard.append(Message(topic, message.__msgtype__,
                                  (self.ns if at is None else at) + 30_000, data))
        return data

    def _send(self, topic: str, message: Any) -> None:
        data = self.record(f'/robot/{topic}', message)
        digest = Message(topic, '', 0, data).digest
        self.runner.feed(topic, TYPES.store.deserialize_cdr(data, message.__msgtype__),
                         digest=lambda: digest)

    def joints(self) -> None:
        """The robot says where it stands: seeded, different each time."""
        position = self.rng.normal(size=3)
        self._send('joint_states', make(JOINT_STATE, header=header(self.ns - 1_000_000),
                                        name=list(JOINTS), position=position))

    def command(self, x: float = 0.3) -> None:
        """Somebody steers, with equal bytes each time; no stamp."""
        vector = 'geometry_msgs/msg/Vector3'
        self._send('cmd_vel', make(TWIST, linear=make(vector, x=x, y=0.0, z=0.0),
                                   angular=make(vector, x=0.0, y=0.0, z=-x)))

    def step(self, *, jitter: bool = True) -> None:
        """One period: time, measurements, the timer (which lock step has not)."""
        late = int(self.rng.integers(0, 2_000_000)) if jitter else 0
        self.due += self.period
        self.ns = self.due = max(self.due, self.ns)
        self.joints()
        if not self.lock_step:
            self.ns += late
            for _ in range(self.parts):
                self.runner.timer()

    def steps(self, n: int) -> None:
        for _ in range(n):
            self.step()

    def verb(self) -> Runner:
        """Return the runner for a verb, a little later than what came before."""
        self.ns += 100_000
        return self.runner

    def go(self, **request: Any) -> None:
        """Begin a goal."""
        self.ns += 100_000
        goal = self.runner.execute(GoalRequest(max_duration_s=1e6, **request))
        assert goal.result is None, goal.result

    def slow(self) -> None:
        """Inferences do not end from now on."""
        self.pump.hold()

    def fast(self) -> None:
        """They end, and go on ending at once."""
        self.pump.release()

    def bag(self, name: str = 'bag', *, lose: Callable[[Message], bool] = lambda _: False,
            **how: Any) -> Path:
        """Write what the recorder heard, but for what it is to lose."""
        kept = sorted((m for m in self.heard if not lose(m)), key=lambda m: m.time_ns)
        return write_bag(self.folder / name, [(m.topic, m.type, m.time_ns, m.raw) for m in kept],
                         **how)
