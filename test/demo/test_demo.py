"""The demo's own instruments, and the whole story in three processes."""
from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")

from flashrt_ros.demo import render, rollout
from flashrt_ros.demo.arm import JOINTS, Cell, Task
from flashrt_ros.demo.shadow import Shadow, digest


class Told:
    """Sensor messages and chunks as a node would have sent them."""

    def __init__(self, shadow: Shadow) -> None:
        self.model = rollout.load()
        self.shadow = shadow
        self.cell = Cell()
        self.cell.reset(Task((0.3, 0.0), 0.0, 1))
        self.h = np.zeros((1, 1, rollout.HIDDEN), np.float32)
        self.count = 0

    def tick(self, number: int, epoch: int, *, lose: bool = False) -> None:
        """One inference, told chunk by chunk."""
        self.count += 1
        shown = rollout.cue(1) if number == 1 else None
        messages: dict[str, Any] = {
            'joint_states': SimpleNamespace(name=[*JOINTS, 'finger'],
                                            position=[*self.cell.joints, self.cell.finger]),
            'part_in_hand': SimpleNamespace(data=self.cell.seen.tolist()),
            'cue': SimpleNamespace(data=[0.0] * 3 if shown is None else shown.tolist())}
        raws = {topic: f'{topic}{self.count}'.encode() for topic in messages}
        if not lose:
            for topic, message in messages.items():
                self.shadow.hear(topic, raws[topic], message)
        rows, self.h = self.model(rollout.observe(self.cell, shown), self.h)
        self.cell.command(rows[0][:4] * 0.5 + rollout.ACTION_OFFSET[:4])
        self.cell.step()
        for output, data in (('arm', rows[:, :4]), ('gripper', rows[:, 4:])):
            self.shadow.hear_chunk(SimpleNamespace(
                output=output, epoch=epoch, tick=number, data=data.ravel().tolist(),
                input_names=list(raws), input_stamps=[None] * 3,
                input_digests=[digest(raw) for raw in raws.values()]))


def test_the_shadow_agrees_with_an_exact_restore_and_convicts_every_other() -> None:
    for forgets in (False, True):
        told = Told(Shadow())
        for number in range(1, 7):
            told.tick(number, 2)
            if number == 4:
                saved = told.h.copy()
        if not forgets:
            told.h = saved
        told.tick(5, 3)
        told.tick(6, 3)
        whole = told.shadow.verdict(told.model)
        after = told.shadow.verdict(told.model, since_epoch=3)
        assert whole.equal == (12 if forgets else 16)
        assert (after.equal, after.different) == ((0, 4) if forgets else (4, 0))
        assert bool(after.first_difference) is forgets


def test_the_shadow_says_what_it_could_not_check() -> None:
    told = Told(Shadow())
    told.tick(1, 1)
    told.tick(2, 1, lose=True)
    verdict = told.shadow.verdict(told.model)
    assert (verdict.equal, verdict.different, verdict.unknown) == (2, 0, 2)
    assert 'not checked' in str(verdict)


def test_a_machine_without_egl_says_what_would_give_pictures(monkeypatch: pytest.MonkeyPatch
                                                             ) -> None:
    def missing(name: str) -> None:
        raise OSError(name)
    monkeypatch.setattr(render.ctypes, 'CDLL', missing)
    monkeypatch.setenv('MUJOCO_GL', 'egl')
    assert 'libegl1' in render.choose()
    assert os.environ['MUJOCO_GL'] == 'disable'


@pytest.mark.long
def test_the_whole_story_in_three_processes(tmp_path: Path) -> None:
    pytest.importorskip('rclpy')
    ended = subprocess.run([sys.executable, '-m', 'flashrt_ros.demo', '--out', str(tmp_path)],
                           timeout=150, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    text = (tmp_path / 'demo.md').read_text()
    assert 'True (blue)' in text
    assert 'ROBOT_MOVED' in text
    assert (tmp_path / 'demo.png').stat().st_size > 20_000
    assert 'Traceback' not in ended.stderr
