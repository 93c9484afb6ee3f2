"""A walking robot in MuJoCo: the Unitree G1's twelve leg joints, scene read from a data folder.

The folder holds the scene (`sim/`), its constants (`sim/g1.yaml`) and the trained policies; it is
not part of the package. `Walker` does what the robot's own low-level controller does: 500 Hz PD
control towards the newest action, sensor readings at 50 Hz. It knows nothing of the policy.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray
import yaml

Vector = NDArray[Any]

JOINT_STATES, IMU, COMMAND, ACTION = '/joint_states', '/imu/data', '/cmd_vel', 'policy/action'
ONNX = {'backend': 'onnx', 'model': 'g1_lstm.onnx', 'state': {'h_in': 'h_out', 'c_in': 'c_out'}}
TORCH = {'backend': 'torch', 'model': 'motion.pt', 'shapes': {'x': [1, 47]}}


@dataclass(frozen=True)
class Reading:
    """What the sensors say, SI units, float64 as MuJoCo has it."""

    stamp_ns: int
    positions: Vector       # (12,)
    velocities: Vector      # (12,)
    orientation: Vector     # (4,) w x y z
    rates: Vector           # (3,) rad/s in the pelvis' frame
    command: Vector         # (3,) m/s, m/s, rad/s


class Walker:
    """Physics and low-level control. Deterministic: equal actions, equal readings."""

    def __init__(self, folder: Path) -> None:
        with open(folder / 'sim' / 'g1.yaml', encoding='utf-8') as file:
            c = yaml.safe_load(file)
        self.model: Any = mujoco.MjModel.from_xml_path(str(folder / 'sim' / 'scene.xml'))
        self.model.opt.timestep = c['simulation_dt']
        self.data: Any = mujoco.MjData(self.model)
        self.joints = tuple(self.model.joint(i).name for i in range(1, self.model.njnt))
        self._kp, self._kd, self._rest, self._command = (      # (12,) each, but the command (3,)
            np.array(c[k], np.float32) for k in ('kps', 'kds', 'default_angles', 'cmd_init'))
        # the decimal numbers, for the policy file; 0.3 as float32 is another number
        self.rest = tuple(float(v) for v in c['default_angles'])
        self._scale, self._decimation = c['action_scale'], c['control_decimation']
        self.action: Vector = np.zeros(len(self.joints), np.float32)
        self.push: Vector = np.zeros(3)      # N, on the pelvis
        self.ticks = 0

    def step(self) -> Reading:
        """Let 20 ms pass under the newest action, then read the sensors."""
        d = self.data
        for _ in range(self._decimation):
            target = self.action * self._scale + self._rest
            d.ctrl[:] = (target - d.qpos[7:]) * self._kp - d.qvel[6:] * self._kd
            d.xfrc_applied[1, :3] = self.push
            mujoco.mj_step(self.model, d)
        self.ticks += 1
        return Reading(round(d.time * 1e9), d.qpos[7:].copy(), d.qvel[6:].copy(),
                       d.qpos[3:7].copy(), d.qvel[3:6].copy(), self._command.astype(np.float64))

    @property
    def height(self) -> float:
        """Of the pelvis, metres: 0.77 when it walks, below 0.5 when it has fallen."""
        return float(self.data.qpos[2])

    def snapshot(self) -> dict[str, Any]:
        """Return all that the robot and its low-level controller remember."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, physics, kind)
        return {'physics': physics, 'action': self.action.copy(), 'ticks': self.ticks}

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Return to a snapshot."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(self.model, self.data, snapshot['physics'], kind)
        self.action, self.ticks = snapshot['action'].copy(), snapshot['ticks']


def policy_text(joints: Sequence[str], rest: Sequence[float], policy: Mapping[str, Any]) -> str:
    """Return the policy file of the walking policy: ONNX or TORCH, in lock step with the walker."""
    legs = {'topic': JOINT_STATES, 'joints': list(joints)}
    text: str = yaml.safe_dump({
        'policy': {**policy, 'period_s': 0.02},
        'run': {'trigger': {'input': [JOINT_STATES, IMU, COMMAND]}, 'autorun': True,
                'on_restore': 'continue'},
        'inputs': {('obs' if policy['backend'] == 'onnx' else 'x'): [
            {'term': 'angular_velocity', 'topic': IMU, 'scale': 0.25},
            {'term': 'projected_gravity', 'topic': IMU},
            {'term': 'twist', 'topic': COMMAND, 'fields': ['linear.x', 'linear.y', 'angular.z'],
             'scale': [2.0, 2.0, 0.25]},
            {'term': 'joint_position', **legs, 'offset': [-v for v in rest]},
            {'term': 'joint_velocity', **legs, 'scale': 0.05},
            {'term': 'last_action'},
            {'term': 'phase', 'period_s': 0.8}]},
        'outputs': {'actions': {'topic': ACTION, 'type': 'std_msgs/msg/Float32MultiArray',
                                'kind': 'raw'}},
    }, sort_keys=False)
    return text


def plain(reading: Reading, joints: Sequence[str]) -> dict[str, Any]:
    """Return a reading as messages by topic: objects with a message's attributes, no ROS."""
    def space(**values: Any) -> SimpleNamespace:
        return SimpleNamespace(**values)
    sec, nanosec = divmod(reading.stamp_ns, 10**9)
    header = space(stamp=space(sec=sec, nanosec=nanosec), frame_id='')
    w, x, y, z = map(float, reading.orientation)
    zero = space(x=0.0, y=0.0, z=0.0)
    vx, vy, turn = map(float, reading.command)
    return {
        JOINT_STATES: space(header=header, name=list(joints),
                            position=reading.positions.tolist(),
                            velocity=reading.velocities.tolist(), effort=[]),
        IMU: space(header=header, orientation=space(w=w, x=x, y=y, z=z),
                   angular_velocity=space(**dict(zip('xyz', map(float, reading.rates),
                                                     strict=True))),
                   linear_acceleration=zero, orientation_covariance=[0.0] * 9,
                   angular_velocity_covariance=[0.0] * 9,
                   linear_acceleration_covariance=[0.0] * 9),
        COMMAND: space(linear=space(x=vx, y=vy, z=0.0), angular=space(x=0.0, y=0.0, z=turn))}


def messages(reading: Reading, joints: Sequence[str]) -> dict[str, Any]:
    """Return a reading as ROS messages by topic."""
    from geometry_msgs.msg import Twist
    from sensor_msgs.msg import Imu, JointState
    sec, nanosec = divmod(reading.stamp_ns, 10**9)
    state, imu, command = JointState(), Imu(), Twist()
    for message in (state, imu):
        message.header.stamp.sec, message.header.stamp.nanosec = sec, nanosec
    state.name = list(joints)
    state.position, state.velocity = reading.positions.tolist(), reading.velocities.tolist()
    q, rates = imu.orientation, imu.angular_velocity
    q.w, q.x, q.y, q.z = map(float, reading.orientation)
    rates.x, rates.y, rates.z = map(float, reading.rates)
    command.linear.x, command.linear.y, command.angular.z = map(float, reading.command)
    return {JOINT_STATES: state, IMU: imu, COMMAND: command}
