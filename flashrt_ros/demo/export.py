"""Trained weights -> ONNX graph, built node by node. Needs `onnx`, not torch.

obs (1, 11) and h_in (1, 1, H) -> actions (1, 8, 5) and h_out (1, 1, H). The chunk is a correction
to the measured joints: row = head(h, features) + what the observation says of the joints.
"""
from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.demo.rollout import (
    ACTION_OFFSET,
    ACTION_SCALE,
    ACTIONS,
    CHUNK,
    HIDDEN,
    OBS,
    OBS_OFFSET,
    OBS_SCALE,
)

# (11, 5): from the normalised observation to the raw action that keeps the joints where they are
KEEP = np.zeros((OBS, ACTIONS), np.float32)
KEEP[np.arange(4), np.arange(4)] = (1 / (OBS_SCALE[:4] * ACTION_SCALE[:4])).astype(np.float32)
KEEP_BIAS = np.zeros(ACTIONS, np.float32)
KEEP_BIAS[:4] = ((-OBS_OFFSET[:4] - ACTION_OFFSET[:4]) / ACTION_SCALE[:4]).astype(np.float32)


def export(weights: Mapping[str, NDArray[np.float32]], path: Path) -> None:
    """Write the graph. `weights` carries torch's names and shapes (gates r, z, n)."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    def gates(w: NDArray[np.float32]) -> NDArray[np.float32]:
        r, z, n = np.split(w, 3)
        return np.concatenate((z, r, n))      # ONNX order: update, reset, hidden

    tensors = {
        'enc_w': weights['enc.weight'], 'enc_b': weights['enc.bias'],
        'gru_w': gates(weights['gru.weight_ih_l0'])[None],
        'gru_r': gates(weights['gru.weight_hh_l0'])[None],
        'gru_b': np.concatenate((gates(weights['gru.bias_ih_l0']),
                                 gates(weights['gru.bias_hh_l0'])))[None],
        'head_w': weights['head.weight'], 'head_b': weights['head.bias'],
        'out_w': weights['out.weight'], 'out_b': weights['out.bias'],
        'keep_w': KEEP, 'keep_b': KEEP_BIAS,
        'fine_w': fine_features(), 'axis0': np.array([0], np.int64),
        'flat_h': np.array([1, HIDDEN], np.int64),
        'rows': np.array([1, CHUNK, ACTIONS], np.int64),
        'one': np.array([1, 1, ACTIONS], np.int64)}
    node = helper.make_node
    nodes = [
        node('MatMul', ['obs', 'fine_w'], ['fine_in']),
        node('Tanh', ['fine_in'], ['fine']),
        node('Concat', ['obs', 'fine'], ['features'], axis=1),
        node('Gemm', ['features', 'enc_w', 'enc_b'], ['enc_lin'], transB=1),
        node('Relu', ['enc_lin'], ['enc']),
        node('Unsqueeze', ['enc', 'axis0'], ['sequence']),
        node('GRU', ['sequence', 'gru_w', 'gru_r', 'gru_b', '', 'h_in'], ['', 'h_out'],
             hidden_size=HIDDEN, linear_before_reset=1),
        node('Reshape', ['h_out', 'flat_h'], ['h_flat']),
        node('Concat', ['h_flat', 'enc'], ['head_in'], axis=1),
        node('Gemm', ['head_in', 'head_w', 'head_b'], ['head_lin'], transB=1),
        node('Relu', ['head_lin'], ['head']),
        node('Gemm', ['head', 'out_w', 'out_b'], ['out'], transB=1),
        node('Reshape', ['out', 'rows'], ['correction']),
        node('Gemm', ['obs', 'keep_w', 'keep_b'], ['keep_flat']),
        node('Reshape', ['keep_flat', 'one'], ['keep']),
        node('Add', ['correction', 'keep'], ['actions'])]
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes, 'sorting', [info('obs', TensorProto.FLOAT, [1, OBS]),
                           info('h_in', TensorProto.FLOAT, [1, 1, HIDDEN])],
        [info('actions', TensorProto.FLOAT, [1, CHUNK, ACTIONS]),
         info('h_out', TensorProto.FLOAT, [1, 1, HIDDEN])],
        [numpy_helper.from_array(np.ascontiguousarray(v), k) for k, v in tensors.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)], ir_version=9,
                              producer_name='flashrt_ros.demo.train')
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString(deterministic=True))


def fine_features() -> NDArray[np.float32]:
    """Return (11, 4): gains of the tanh features that see the last centimetres of the grasp."""
    gains = np.zeros((OBS, 4), np.float32)
    gains[[5, 6, 7], [0, 1, 2]] = 8.0
    gains[4, 3] = 2.0
    return gains
