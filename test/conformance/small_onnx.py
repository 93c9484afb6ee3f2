"""A recurrent ONNX model of a few hundred bytes, made on the spot."""
from __future__ import annotations

from pathlib import Path

import numpy as np


def write_gru(path: Path, *, obs: int = 6, hidden: int = 8, actions: int = 3) -> None:
    """Write obs[1,6], h_in[1,8] -> actions[1,3], h_out[1,8]: a gated cell with fixed weights."""
    from onnx import TensorProto, helper, numpy_helper, save
    rng = np.random.default_rng(3)

    def weight(name: str, *shape: int) -> object:
        return numpy_helper.from_array(rng.normal(0, 0.5, shape).astype(np.float32), name)
    node = helper.make_node
    graph = helper.make_graph(
        [node('Concat', ['obs', 'h_in'], ['x'], axis=1),
         node('Gemm', ['x', 'w_z'], ['z_raw']), node('Sigmoid', ['z_raw'], ['z']),
         node('Gemm', ['x', 'w_n'], ['n_raw']), node('Tanh', ['n_raw'], ['n']),
         node('Sub', ['h_in', 'n'], ['d']), node('Mul', ['z', 'd'], ['zd']),
         node('Add', ['n', 'zd'], ['h_out']),
         node('Gemm', ['h_out', 'w_a'], ['actions'])],
        'gru',
        [helper.make_tensor_value_info('obs', TensorProto.FLOAT, [1, obs]),
         helper.make_tensor_value_info('h_in', TensorProto.FLOAT, [1, hidden])],
        [helper.make_tensor_value_info('actions', TensorProto.FLOAT, [1, actions]),
         helper.make_tensor_value_info('h_out', TensorProto.FLOAT, [1, hidden])],
        [weight('w_z', obs + hidden, hidden), weight('w_n', obs + hidden, hidden),
         weight('w_a', hidden, actions)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid('', 17)])
    model.ir_version = 8
    save(model, str(path))
