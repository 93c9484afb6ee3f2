"""The simulated cell: kinematics, the controller's manners, the rule of the scanner, the expert."""
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")

from flashrt_ros.demo import arm
from flashrt_ros.demo.arm import Cell, Task
from flashrt_ros.demo.controller import TrajectoryController
from flashrt_ros.demo.expert import Expert, look


def work(cell: Cell, expert: Expert, steps: int) -> None:
    """Let the expert work."""
    for _ in range(steps):
        view = look(cell)
        expert.observe(view)
        row = expert.advance(view)
        cell.command(row[:4])
        cell.grip = float(row[4])
        cell.step()


def test_inverse_kinematics_is_the_inverse_of_forward_and_keeps_the_hand_upright() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        angle, radius = rng.uniform(-1.0, 2.6), rng.uniform(0.24, 0.44)
        point = np.array([radius * np.cos(angle), radius * np.sin(angle), rng.uniform(0.02, 0.3)])
        joints = arm.inverse(point)
        assert np.allclose(arm.forward(joints), point, atol=1e-12)
        assert joints[1:].sum() == pytest.approx(np.pi)


def test_the_scene_has_the_geometry_that_the_code_computes_with() -> None:
    cell = Cell()
    for target in ((0.3, 0.1, 0.2), (-0.1, 0.36, 0.15)):
        cell.data.qpos[[int(cell.model.joint(j).qposadr[0]) for j in arm.JOINTS]] = arm.inverse(
            target)
        import mujoco
        mujoco.mj_forward(cell.model, cell.data)
        assert np.allclose(cell.data.site('grasp').xpos, target, atol=1e-9)
    for i, (x, y) in enumerate(arm.BINS):
        assert np.allclose(cell.model.body(f'bin{i}').pos[:2], (x, y), atol=1e-3)


def test_the_controller_replaces_on_message_ignores_nothing_and_finishes_what_it_has() -> None:
    controller = TrajectoryController([0.0, 0.0])
    controller.command(0.0, [[1.0, 2.0]], [1.0])
    assert np.allclose(controller.sample(0.5), [0.5, 1.0])
    controller.command(0.5, [], [])                        # no stop
    assert np.allclose(controller.sample(0.75), [0.75, 1.5])
    controller.command(0.75, [[0.75, 1.5], [0.0, 0.0]], [0.2, 0.7])
    assert np.allclose(controller.sample(0.95), [0.75, 1.5])
    assert np.allclose(controller.sample(9.0), [0.0, 0.0])


def test_a_snapshot_of_the_cell_brings_everything_back() -> None:
    cell = Cell()
    cell.reset(Task((0.3, 0.05), 0.1, 1))
    expert = Expert(1)
    work(cell, expert, 70)                                  # in the scanner
    snapshot = cell.snapshot()
    rows = np.random.default_rng(1).uniform(-0.02, 0.02, (30, 4)) + cell.joints

    def future() -> list[bytes]:
        out = []
        for row in rows:
            cell.command(row)
            cell.step()
            out.append(cell.data.qpos.tobytes() + bytes([cell.scanned]))
        return out
    first = future()
    cell.place((0.3, 0.0), 0.0)
    cell.pressure = False
    cell.restore(snapshot)
    assert future() == first


def test_the_scanner_wants_the_part_for_a_while_without_a_break() -> None:
    cell = Cell()
    cell.reset(Task((0.3, 0.0), 0.0, 0))

    def hold(seconds: float, x: float) -> None:
        for _ in range(round(seconds / arm.PHYSICS_S)):
            cell.data.qpos[cell._part:cell._part + 3] = [x, arm.SCANNER[1], 0.15]
            cell.data.qvel[cell._part_dof:cell._part_dof + 6] = 0
            cell.step(arm.PHYSICS_S)
    hold(0.3, arm.SCANNER[0])
    hold(0.02, arm.SCANNER[0] + 0.06)                       # out of the beam
    hold(0.3, arm.SCANNER[0])
    assert not cell.scanned
    hold(0.15, arm.SCANNER[0])
    assert cell.scanned
    cell.place((0.3, 0.0), 0.0)                             # a person put it back
    assert not cell.scanned


@pytest.mark.parametrize('seed', range(3))
def test_the_expert_does_the_task_and_picks_up_what_it_lost(seed: int) -> None:
    cell = Cell()
    task = Task.draw(np.random.default_rng([seed]))
    cell.reset(task)
    expert = Expert(task.target)
    work(cell, expert, 40)
    assert cell.held
    cell.pressure = False
    cell.step(0.3)
    cell.pressure = True
    assert not cell.held
    work(cell, expert, 220)
    assert cell.success
    assert cell.in_bin(task.target)
    assert not cell.in_bin((task.target + 1) % 3)
