"""The simulated cell: a four-joint arm with a gripper, a part, a scanner and three bins.

The rule of the cell: the part is held in the scanner's beam for `SCAN_S` and then put into the
bin that was shown at the start of the episode. Neither the bin nor whether the part was scanned
can be seen later on, so whoever does the work must remember both. A part that a person puts back
counts as not scanned.

Arrays: `joints` is (4,) rad in the order of JOINTS; `finger` is half the opening of the gripper
in metres; points are (3,) metres in the frame of the base. One control step is PERIOD_S.
"""
from __future__ import annotations

from dataclasses import dataclass
from math import acos, atan2, cos, hypot, pi, sin
from pathlib import Path
from typing import Any

import mujoco
import numpy as np

from flashrt_ros.demo.controller import Floats, TrajectoryController, Vector

JOINTS = ('base_yaw', 'shoulder', 'elbow', 'wrist')
PERIOD_S = 0.05                 # one control step: 20 Hz
PHYSICS_S = 0.005
SHOULDER_Z, UPPER, FORE, HAND = 0.25, 0.28, 0.26, 0.14
OPEN, CLOSED = 0.030, 0.004     # commanded finger positions; the part stops them at about 0.011
HALF_PART = 0.025               # half the height of the part
SCANNER = (0.269, 0.269)        # axis of the beam
BEAM_RADIUS, BEAM_TOP = 0.045, 0.244
SCAN_S = 0.4                    # time in the beam without a break
BINS = tuple((0.38 * cos(a), 0.38 * sin(a)) for a in (1.309, 1.8326, 2.3562))
BIN_YAWS = (1.309, 1.8326, 2.3562)
BIN_HALF = 0.066
HOME = (0.0, 0.30, 0.26)        # yaw, radius, height of the grasp point: where an episode starts


def inverse(point: Floats) -> Vector:
    """Return joints (4,) that hold the hand upright with the grasp point at `point`."""
    x, y, z = point
    reach, height = hypot(x, y), z + HAND - SHOULDER_Z
    cosine = (reach ** 2 + height ** 2 - UPPER ** 2 - FORE ** 2) / (2 * UPPER * FORE)
    elbow = acos(min(1.0, max(-1.0, cosine)))
    shoulder = atan2(reach, height) - atan2(FORE * sin(elbow), UPPER + FORE * cos(elbow))
    return np.array([atan2(y, x), shoulder, elbow, pi - shoulder - elbow])


def forward(joints: Floats) -> Vector:
    """Return the grasp point (3,) of a joint position (4,)."""
    yaw, shoulder, elbow, wrist = joints
    a, b, c = shoulder, shoulder + elbow, shoulder + elbow + wrist
    reach = UPPER * sin(a) + FORE * sin(b) + HAND * sin(c)
    height = SHOULDER_Z + UPPER * cos(a) + FORE * cos(b) + HAND * cos(c)
    return np.array([reach * cos(yaw), reach * sin(yaw), height])


HOME_JOINTS = inverse((HOME[1] * cos(HOME[0]), HOME[1] * sin(HOME[0]), HOME[2]))


@dataclass(frozen=True)
class Task:
    """One episode: where the part lies and into which bin it belongs."""

    part: tuple[float, float]   # on the table
    yaw: float                  # of the part
    target: int                 # 0, 1, 2

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Task:
        """Draw an episode: the part lies 26 to 42 cm in front of the base, within 0.55 rad."""
        angle, radius = rng.uniform(-0.55, 0.35), rng.uniform(0.26, 0.42)
        return cls((radius * cos(angle), radius * sin(angle)),
                   angle + rng.uniform(-0.15, 0.15), int(rng.integers(3)))


class Cell:
    """The cell in MuJoCo, one control step at a time. Deterministic: equal calls, equal bytes."""

    def __init__(self) -> None:
        self.model: Any = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name('scene.xml')))
        self.data: Any = mujoco.MjData(self.model)
        self._joint = [int(self.model.joint(name).qposadr[0]) for name in JOINTS]
        self._finger = int(self.model.joint('finger').qposadr[0])
        self._mirror = int(self.model.joint('finger_mirror').qposadr[0])
        self._part = int(self.model.joint('part').qposadr[0])
        self._part_dof = int(self.model.joint('part').dofadr[0])
        self._hand = int(self.model.body('hand').id)
        self.reset(Task((0.32, 0.0), 0.0, 0))

    def reset(self, task: Task) -> None:
        """Start an episode: arm at home, gripper open, part on the table, cue shown."""
        mujoco.mj_resetData(self.model, self.data)
        self.task = task
        self.data.qpos[self._joint] = HOME_JOINTS
        self.data.qpos[[self._finger, self._mirror]] = OPEN
        self.controller = TrajectoryController(HOME_JOINTS)
        self.grip = OPEN
        self.pull = np.zeros(3)          # N, on the hand
        self.pressure = True             # without it the fingers give way
        self.place(task.part, task.yaw)

    def place(self, part: Floats, yaw: float) -> None:
        """Lay the part on the table, as a person would. It counts as not scanned."""
        at, dof = self._part, self._part_dof
        self.data.qpos[at:at + 7] = [part[0], part[1], HALF_PART, cos(yaw / 2), 0, 0, sin(yaw / 2)]
        self.data.qvel[dof:dof + 6] = 0
        self.in_beam_s = 0.0
        self.scanned = False
        mujoco.mj_forward(self.model, self.data)

    def command(self, joints: Floats, time_s: float = PERIOD_S) -> None:
        """Send the arm to `joints` (4,) within a time, as one trajectory point."""
        self.controller.command(self.time, [joints], [time_s])

    def step(self, seconds: float = PERIOD_S) -> None:
        """Let time pass."""
        for _ in range(round(seconds / PHYSICS_S)):
            self.data.ctrl[:4] = self.controller.sample(self.time)
            self.data.ctrl[4:6] = self.grip if self.pressure else OPEN
            self.data.xfrc_applied[self._hand, :3] = self.pull
            mujoco.mj_step(self.model, self.data)
            self._scan()

    def _scan(self) -> None:
        x, y, z = self.part
        inside = hypot(x - SCANNER[0], y - SCANNER[1]) < BEAM_RADIUS and 0.03 < z < BEAM_TOP
        self.in_beam_s = self.in_beam_s + PHYSICS_S if inside else 0.0
        self.scanned = self.scanned or self.in_beam_s >= SCAN_S - 1e-9

    @property
    def time(self) -> float:
        """Simulated seconds since the reset."""
        return float(self.data.time)

    @property
    def joints(self) -> Vector:
        """Measured joints (4,), rad."""
        return np.array(self.data.qpos[self._joint])

    @property
    def joint_velocities(self) -> Vector:
        """Measured joint velocities (4,), rad/s."""
        return np.array([self.data.joint(name).qvel[0] for name in JOINTS])

    @property
    def finger(self) -> float:
        """Half the measured opening of the gripper, metres."""
        return float(self.data.qpos[self._finger])

    @property
    def hand(self) -> Vector:
        """The grasp point (3,)."""
        return forward(self.joints)

    @property
    def part(self) -> Vector:
        """The part's centre (3,)."""
        return np.array(self.data.qpos[self._part:self._part + 3])

    @property
    def part_yaw(self) -> float:
        """The part's turn about the vertical, rad."""
        w, x, y, z = self.data.qpos[self._part + 3:self._part + 7]
        return atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))

    @property
    def seen(self) -> Vector:
        """The part from the grasp point (3,): ahead, left, up, in the hand's frame."""
        dx, dy, dz = self.part - self.hand
        yaw = float(self.joints[0])
        return np.array([cos(yaw) * dx + sin(yaw) * dy, cos(yaw) * dy - sin(yaw) * dx, dz])

    @property
    def held(self) -> bool:
        """Whether the part is between the fingers and off the table."""
        return bool(np.linalg.norm(self.seen) < 0.03 and self.part[2] > HALF_PART + 0.01)

    def in_bin(self, which: int) -> bool:
        """Whether the part lies in a bin."""
        dx, dy = self.part[0] - BINS[which][0], self.part[1] - BINS[which][1]
        yaw = BIN_YAWS[which]
        along, across = cos(yaw) * dx + sin(yaw) * dy, cos(yaw) * dy - sin(yaw) * dx
        return bool(max(abs(along), abs(across)) < BIN_HALF and self.part[2] < 0.06
                    and not self.held)

    @property
    def success(self) -> bool:
        """Whether the part was scanned and lies in the bin that was shown."""
        return bool(self.scanned and self.in_bin(self.task.target))

    def snapshot(self) -> dict[str, Any]:
        """Return all that the cell remembers, to be given to `restore`."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        physics = np.empty(mujoco.mj_stateSize(self.model, kind))
        mujoco.mj_getState(self.model, self.data, physics, kind)
        return {'physics': physics, 'controller': self.controller.state(), 'grip': self.grip,
                'pull': self.pull.copy(), 'pressure': self.pressure, 'scanned': self.scanned,
                'in_beam_s': self.in_beam_s, 'task': self.task}

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Return to a snapshot."""
        kind = mujoco.mjtState.mjSTATE_INTEGRATION
        mujoco.mj_setState(self.model, self.data, snapshot['physics'], kind)
        mujoco.mj_forward(self.model, self.data)
        self.controller.set_state(snapshot['controller'])
        for name in ('grip', 'pressure', 'scanned', 'in_beam_s', 'task'):
            setattr(self, name, snapshot[name])
        self.pull = snapshot['pull'].copy()
