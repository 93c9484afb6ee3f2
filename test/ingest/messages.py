"""Messages as plain objects, and observations bound to memory of their own."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from flashrt_ros.core.layout import BufferSpec, Role
from flashrt_ros.ingest.inbox import Arrival
from flashrt_ros.ingest.observation import Observation
from flashrt_ros.ingest.spec import ModelSpec, OutputSpec, PolicyFile, RunSpec, TermSpec

S = 1_000_000_000
T0 = 1_700_000_000 * S      # a usual stamp, in ns


def header(stamp_ns: int) -> SimpleNamespace:
    return SimpleNamespace(stamp=SimpleNamespace(sec=stamp_ns // S, nanosec=stamp_ns % S),
                           frame_id='')


def joints(stamp_ns: int, values: Mapping[str, float] | None = None, *,
           names: Sequence[str] | None = None, position: Any = None, velocity: Any = (),
           effort: Any = ()) -> SimpleNamespace:
    """A JointState; `values` are positions by name."""
    if values is not None:
        names, position = list(values), list(values.values())
    return SimpleNamespace(header=header(stamp_ns), name=list(names or ()),
                           position=() if position is None else position, velocity=velocity,
                           effort=effort)


def xyz(x: float, y: float, z: float) -> SimpleNamespace:
    return SimpleNamespace(x=x, y=y, z=z)


def quaternion(x: float, y: float, z: float, w: float) -> SimpleNamespace:
    return SimpleNamespace(x=x, y=y, z=z, w=w)


def imu(stamp_ns: int, rate: Sequence[float] = (0.0, 0.0, 0.0),
        q: Sequence[float] = (0.0, 0.0, 0.0, 1.0), accel: Sequence[float] = (0.0, 0.0, 9.8),
        **covariances: Sequence[float]) -> SimpleNamespace:
    return SimpleNamespace(header=header(stamp_ns), orientation=quaternion(*q),
                           angular_velocity=xyz(*rate), linear_acceleration=xyz(*accel),
                           **covariances)


def twist(x: float = 0.0, y: float = 0.0, yaw: float = 0.0) -> SimpleNamespace:
    return SimpleNamespace(linear=xyz(x, y, 0.0), angular=xyz(0.0, 0.0, yaw))


def array(*values: float) -> SimpleNamespace:
    return SimpleNamespace(data=list(values))


def term(name: str, topic: str | None = None, **keys: Any) -> TermSpec:
    return TermSpec(name, f'inputs.obs.{name}', topic=topic, **keys)


JOINT = {'joint_position', 'joint_velocity', 'joint_effort'}


def observe(*terms: TermSpec, size: int | None = None, shape: Sequence[int] | None = None,
            dtype: str = 'F32', actions: int = 2, run: RunSpec | None = None,
            output: Mapping[str, Any] | None = None, modules: Sequence[str] = (),
            **file: Any) -> Bound:
    """Return an observation of one port `obs`, beside one output `actions`."""
    policy_file = PolicyFile(
        'walk.yaml', ModelSpec('host', 0.02), run or RunSpec(), {'obs': tuple(terms)},
        {'actions': OutputSpec('actions', 'outputs.actions', 'policy/action',
                               'std_msgs/msg/Float32MultiArray', 'raw', **(output or {}))})
    policy_file = dataclasses.replace(policy_file, **file)
    ports = {'obs': BufferSpec('obs', tuple(shape or (1, size or 1)), dtype, Role.INPUT),
             'actions': BufferSpec('actions', (1, actions), 'F32', Role.OUTPUT)}
    return Bound(Observation(policy_file, ports, modules), ports['obs'])


class Bound:
    """An observation with STATE and staging in memory of its own, at the time `now`."""

    def __init__(self, observation: Observation, port: BufferSpec) -> None:
        self.obs = observation
        self.host = {s.name: np.zeros(s.shape, s.storage) for s in observation.specs()}
        for name, values in observation.initial().items():
            self.host[name][:] = values
        observation.bind(self.host)
        self.inputs = {'obs': np.zeros(port.shape, port.storage)}
        self.now = T0

    def get(self, topic: str, msg: Any, at: int | None = None, **more: Any) -> str | None:
        """Receive a message, now or at a time."""
        return self.obs.receive(topic, msg, Arrival(self.now if at is None else at), **more)

    def missing(self, after_ns: int = 0) -> list[str]:
        return [str(m) for m in self.obs.missing(self.now, after_ns)]

    def step(self, **write: Any) -> np.ndarray:
        """Latch and return what an inference would read, flat."""
        self.entries = self.obs.latch(self.now)
        return self.read(**write)

    def read(self, **write: Any) -> np.ndarray:
        self.obs.write(self.inputs, **write)
        return self.inputs['obs'].reshape(-1).copy()

    def save(self) -> dict[str, np.ndarray]:
        return {name: value.copy() for name, value in self.host.items()}

    def restore(self, saved: Mapping[str, np.ndarray]) -> None:
        for name, value in saved.items():
            self.host[name][:] = value
