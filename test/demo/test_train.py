"""The training script: its ONNX graph is its network, and its data is what the node will see."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip('torch', reason="training needs torch: pip install 'flashrt_ros[torch]'")
pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('onnx', reason="pip install 'flashrt_ros[onnx]'")
pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")

import torch

from flashrt_ros.demo import rollout, train


def test_the_exported_graph_is_the_trained_network(tmp_path: Path) -> None:
    torch.manual_seed(1)
    net = train.Network()
    train.write(net, tmp_path / 'net.onnx')
    run = rollout.load(tmp_path / 'net.onnx')
    obs = torch.randn(1, 7, rollout.OBS)
    with torch.no_grad():
        wanted = net(obs)[0].numpy()[0]
    h = np.zeros((1, 1, rollout.HIDDEN), np.float32)
    for x, rows in zip(obs.numpy()[0], wanted, strict=True):
        got, h = run(x, h)
        assert np.abs(got - rows).max() < 1e-4
    assert np.abs(run(obs.numpy()[0, 0], h)[0] - wanted[0]).max() > 1e-3     # it has memory


def test_a_demonstration_shows_the_cue_once_and_ends_with_the_part_in_its_bin() -> None:
    (obs, chunks, facts), = train.collect(seed=123, count=1, model=None, share=0.0)
    assert obs.shape == (len(train.INFERENCES), rollout.OBS)
    assert chunks.shape == (len(obs), rollout.CHUNK, rollout.ACTIONS)
    assert obs[0, 8:].sum() == 1
    assert not obs[1:, 8:].any()
    assert np.array_equal(facts[0, :3], obs[0, 8:])
    assert not facts[0, 3]
    assert facts[-1, 3]
    assert obs[-1, 5:8].tolist() != obs[0, 5:8].tolist()
    assert np.abs(chunks).max() < 6
