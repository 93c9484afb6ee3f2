"""Policy files as data: tests change one thing and write them out."""
from __future__ import annotations

from collections.abc import Mapping
import copy
from pathlib import Path
from typing import Any

import yaml

from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.ingest.policy_file import load
from flashrt_ros.ingest.spec import PolicyFile

LEGS = ['hip', 'knee', 'ankle']

ARM: dict[str, Any] = {
    'policy': {'backend': 'onnx', 'model': 'arm.onnx', 'period_s': 0.02,
               'state': {'h_in': 'h_out'}},
    'inputs': {'obs': [
        {'term': 'joint_position', 'topic': 'joint_states', 'joints': LEGS,
         'offset': [-0.1, 0.0, 0.2], 'max_age_s': 0.1},
        {'term': 'joint_velocity', 'topic': 'joint_states', 'joints': LEGS, 'scale': 0.05},
        {'term': 'projected_gravity', 'topic': 'imu/data'},
        {'term': 'twist', 'topic': 'cmd_vel', 'fields': ['linear.x', 'angular.z'],
         'scale': [2.0, 0.25], 'latched': True, 'timeout_s': 0.5, 'on_timeout': 'zero'},
        {'term': 'last_action'},
        {'term': 'phase', 'period_s': 0.8},
    ]},
    'outputs': {'arm': {
        'topic': 'arm/command', 'type': 'sensor_msgs/msg/JointState', 'kind': 'position',
        'joints': LEGS, 'scale': 0.25, 'offset': [0.1, 0.0, -0.2], 'clip': [-1.5, 1.5],
        'max_rate': 2.0, 'start_tolerance': 0.1, 'on_stop': {'do': 'hold'}, 'port': 'actions'}},
}


def changed(base: Mapping[str, Any], *edits: tuple[str, Any]) -> dict[str, Any]:
    """Return a copy with values set at paths such as `inputs.obs.3.scale`; ... removes one."""
    data = copy.deepcopy(dict(base))
    for path, value in edits:
        *parents, last = path.split('.')
        node: Any = data
        for key in parents:
            node = node[int(key)] if isinstance(node, list) else node.setdefault(key, {})
        if isinstance(node, list):
            node[int(last)] = copy.deepcopy(value)
        elif value is ...:
            del node[last]
        else:
            node[last] = copy.deepcopy(value)
    return data


def write(folder: Path, data: Any, name: str = 'walk.yaml') -> Path:
    """Write a policy file, keys in their order and without aliases."""
    path = folder / name
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data, sort_keys=False))
    return path


def load_data(folder: Path, data: Any, **options: Any) -> PolicyFile:
    """Write a policy file and load it."""
    return load(write(folder, data), **options)


def layout(obs: tuple[int, ...] = (1, 16), actions: tuple[int, ...] = (1, 3), dtype: str = 'F32',
           **more: tuple[int, ...]) -> dict[str, BufferSpec]:
    """Return the buffers of a model: one input, one output, one state, more outputs."""
    specs = [BufferSpec('obs', obs, 'F32', Role.INPUT),
             BufferSpec('actions', actions, dtype, Role.OUTPUT),
             BufferSpec('h', (1, 8), 'F32', Role.STATE, Space.DEVICE),
             *(BufferSpec(name, shape, dtype, Role.OUTPUT) for name, shape in more.items())]
    return {s.name: s for s in specs}
