"""Backends: what runs a policy, chosen by name in the policy file and imported only when chosen.

| name     | runs                                               | needs           |
|----------|----------------------------------------------------|-----------------|
| host     | a Python factory that returns a `Policy` in numpy  | nothing         |
| onnx     | an ONNX model through ONNX Runtime                 | onnxruntime, onnx |
| torch    | TorchScript, torch.export, or a factory's module   | torch           |
| tensorrt | an engine or ONNX model through TensorRT           | tensorrt, cuda  |

Importing this package imports none of them. A backend imports core and nothing else of ours.
"""
from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal

if TYPE_CHECKING:
    from flashrt_ros.core.seam import Device, Policy

# Modules are not named after the library that they load: `import onnx` must mean the library.
MODULES = {'host': 'host_model', 'onnx': 'onnx_model', 'torch': 'torch_model',
           'tensorrt': 'tensorrt_engine'}


def load(name: str, spec: PolicySpec) -> tuple[Policy, Device]:
    """Load a policy without running it, and the device that it runs on. Raises Refusal."""
    if name not in MODULES:
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.backend: {name!r} is not one of '
                      f'{", ".join(MODULES)}')
    module = importlib.import_module(f'{__name__}.{MODULES[name]}')
    policy, device = module.load(spec)
    return policy, device
