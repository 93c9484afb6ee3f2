"""Temporal ensembling against the plain definition: keep every prediction, average per step."""
from __future__ import annotations

from collections import defaultdict
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
from numpy.typing import NDArray
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.output import make_outputs
from flashrt_ros.ingest.spec import ModelSpec, OutputSpec, PolicyFile, RunSpec
from test.ingest.queue_model import Runner, make_queue


def average(predictions: list[NDArray[Any]], weight: float) -> NDArray[np.float64]:
    """The i-th oldest prediction weighs exp(-weight * i)."""
    weights = np.exp(-weight * np.arange(len(predictions)))
    result: NDArray[np.float64] = (np.array(predictions) * weights[:, None]).sum(0) / weights.sum()
    return result


@settings(max_examples=80, deadline=None)
@given(data=st.data(), horizon=st.integers(1, 6), weight=st.floats(-2, 2), relative=st.booleans())
def test_each_row_is_the_weighted_mean_of_all_that_was_predicted_for_its_step(
        data: st.DataObject, horizon: int, weight: float, relative: bool) -> None:
    latency = data.draw(st.integers(0, horizon - 1))
    changes: dict[str, Any] = {'kind': 'position', 'joints': ('a', 'b'), 'scale': (0.5, -2.0),
                               'offset': 0.25, 'relative': relative}
    run = {'blend': 'ensemble', 'ensemble_weight': weight, 'latency_steps': latency,
           'start_at': data.draw(st.integers(0, horizon)),
           'execute': data.draw(st.none() | st.integers(1, horizon - latency))}
    queue, host = make_queue(horizon, outputs={'arm': changes}, **run)
    spec = OutputSpec('arm', 'outputs.arm', 'arm', 'std_msgs/msg/Float64MultiArray',
                      port='actions', **changes)
    file = PolicyFile('', ModelSpec('host', 0.1), RunSpec(**run), {}, {'arm': spec})
    output = make_outputs(file, queue._ports)['arm']
    rng = np.random.default_rng(1)
    predicted: dict[int, list[NDArray[Any]]] = defaultdict(list)   # step -> positions, oldest first
    anchors: dict[int, NDArray[np.float64]] = {}

    def model(k: int) -> dict[str, Any]:
        chunk = rng.normal(size=(1, horizon, 2)).astype(np.float32)
        started = runner.started[k]
        for i in range(queue.rows_executed - started, horizon):
            predicted[started + i].append(
                chunk[0, i] * [0.5, -2.0] + 0.25 + (anchors[k] if relative else 0.0))
        return {'actions': chunk}

    runner = Runner(queue, host, model)
    for _ in range(4 * horizon):
        joints = rng.normal(size=2)
        runner.joints = {'a': (joints[0], 0), 'b': (joints[1], 0)}
        anchors[runner.count] = joints
        step = queue.rows_executed
        row = runner.step()
        assert row is not None
        command = output.command(row['arm'], {}, anchor=queue.anchor('arm'))
        assert command is not None
        np.testing.assert_allclose(command.values, average(predicted[step], weight), atol=1e-9)
        if data.draw(st.integers(0, 9)) == 0:
            queue.flush()
            runner.flight = None
            predicted.clear()


def test_with_weight_0_it_is_the_plain_mean_and_with_a_large_one_the_oldest() -> None:
    chunks = [np.full((1, 3, 1), v, np.float32) for v in (1.0, 4.0, 7.0)]
    for weight, expected in ((0.0, 4.0), (60.0, 1.0), (-60.0, 7.0)):
        queue, _ = make_queue(3, 1, blend='ensemble', ensemble_weight=weight, execute=1)
        for i, chunk in enumerate(chunks):
            queue.splice({'actions': chunk}, 0)
            row = queue.pop()['arm']
            if i == 2:
                assert row.tolist() == pytest.approx([expected])


def test_the_first_chunk_is_the_models_numbers() -> None:
    queue, _ = make_queue(3, 2, blend='ensemble')
    chunk = np.random.default_rng(0).normal(size=(1, 3, 2)).astype(np.float32)
    queue.splice({'actions': chunk}, 0)
    assert [queue.pop()['arm'].astype(np.float32).tobytes() for _ in range(3)] == [
        row.tobytes() for row in chunk[0]]


def test_p29_a_number_that_is_not_finite_does_not_enter_the_mean() -> None:
    queue, host = make_queue(3, 1, blend='ensemble')
    queue.splice({'actions': np.ones((1, 3, 1), np.float32)}, 0)
    before = {n: a.tobytes() for n, a in host.items()}
    bad = np.array([[[0], [np.nan], [0]]], np.float32)
    with pytest.raises(Refusal, match='not finite; the chunk was not taken') as caught:
        queue.splice({'actions': bad}, 0)
    assert caught.value.code is Code.BACKEND
    assert {n: a.tobytes() for n, a in host.items()} == before


def test_bf16_is_averaged_as_numbers() -> None:
    queue, _ = make_queue(2, 1, dtype='BF16', blend='ensemble', ensemble_weight=0.0)
    for value in (1.0, 2.0):
        bits = (np.full((1, 2, 1), value, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        queue.splice({'actions': bits}, 0)
    assert queue.pop()['arm'].tolist() == [1.5]
