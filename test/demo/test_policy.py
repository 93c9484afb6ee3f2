"""The bundled policy: what it can, that it needs its memory, that the node sees what it saw."""
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")

from flashrt_ros.demo import rollout
from flashrt_ros.demo.arm import JOINTS, Cell, Task
from flashrt_ros.demo.lockstep import Bench
from flashrt_ros.ingest.policy_file import load

HELD_OUT = 10**6                   # training draws its seeds below


def task(k: int) -> Task:
    """Return an episode that training has not seen."""
    return Task.draw(np.random.default_rng([HELD_OUT, k]))


def play(cell: Cell, player: rollout.Player, which: Task, *, wipe_at: int = -1) -> bool:
    """Play an episode; `wipe_at` forgets the GRU's state at that step."""
    cell.reset(which)
    player.reset()
    for i in rollout.run_episode(cell, player, 200):
        if i == wipe_at:
            player.h[:] = 0
    return cell.success


def test_the_policy_is_small_and_does_the_task() -> None:
    assert rollout.MODEL.stat().st_size < 1_000_000
    cell, player = Cell(), rollout.Player(rollout.load())
    assert sum(play(cell, player, task(k)) for k in range(12)) >= 11


def test_its_memory_is_needed() -> None:
    cell, player = Cell(), rollout.Player(rollout.load())
    good = [play(cell, player, task(k), wipe_at=20) for k in range(12)]
    assert sum(good) <= 7                      # one bin in three is right by chance


def test_the_policy_file_says_what_the_training_did() -> None:
    file = load(rollout.POLICY_FILE)
    terms = file.inputs['obs']

    def spread(value: object, n: int) -> list[float]:
        return list(value) if isinstance(value, tuple) else [float(value)] * n  # type: ignore[arg-type]
    sizes = [5, 3, 3]
    offsets = [v for t, n in zip(terms, sizes, strict=True) for v in spread(t.offset, n)]
    scales = [v for t, n in zip(terms, sizes, strict=True) for v in spread(t.scale, n)]
    assert offsets == rollout.OBS_OFFSET.tolist()
    assert scales == rollout.OBS_SCALE.tolist()
    assert terms[0].joints == (*JOINTS, 'finger')
    arm, gripper = file.outputs['arm'], file.outputs['gripper']
    assert [*spread(arm.scale, 4), *spread(gripper.scale, 1)] == rollout.ACTION_SCALE.tolist()
    assert [*spread(arm.offset, 4), *spread(gripper.offset, 1)] == rollout.ACTION_OFFSET.tolist()
    assert gripper.clip == rollout.FINGER_CLIP
    assert (file.run.execute, file.run.start_at, file.run.latency_steps) == (
        rollout.EXECUTE, rollout.START_AT, rollout.START_AT)


def test_p22_the_runner_moves_the_arm_as_the_bare_loop_does_to_the_bit() -> None:
    cell, player, bench = Cell(), rollout.Player(rollout.load()), Bench()
    try:
        which = task(3)
        bench.begin(which)
        bench.go()
        cell.reset(which)
        for i in range(110):
            bench.step()
            row = player.step(cell)
            cell.command(row[:4])
            cell.grip = float(row[4])
            cell.step()
            assert bench.cell.data.qpos.tobytes() == cell.data.qpos.tobytes(), f'step {i}'
        assert bench.cell.success
    finally:
        bench.close()


@pytest.mark.parametrize('gap', range(4))
def test_p24_two_runs_from_one_capsule_agree_to_the_bit(gap: int) -> None:
    """Policy and physics go back together, by the live rules: the guard compares, the queue is
    flushed, an inference on the restored state gives the first action. Wherever in a chunk the
    save was, the arm's motion is the same each time. It is saved in the scanner, standing still.
    """
    bench = Bench()
    try:
        bench.begin(task(1))
        bench.go()
        while bench.cell.in_beam_s < 0.3:
            bench.step()
        for _ in range(gap):
            bench.step()
        bench.runner.save('here')
        snapshot = bench.cell.snapshot()

        def future() -> list[bytes]:
            bench.runner.stop()
            bench.cell.restore(snapshot)
            bench.step()                        # the robot is seen where it was
            bench.runner.restore('here').result(0)
            bench.go()
            out = []
            for _ in range(50):
                bench.step()
                out.append(bench.cell.data.qpos.tobytes())
            return out
        first = future()
        assert future() == first
        assert bench.cell.success
    finally:
        bench.close()
