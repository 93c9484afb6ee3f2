"""The scripts behind make: which torch is taken, when an environment is made anew."""
from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from test.shared_data import ROOT


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / 'scripts' / f'{name}.py')
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def offer(version: str, url: str, *requires: str) -> dict[str, Any]:
    return {'metadata': {'version': version, 'requires_dist': list(requires)},
            'download_info': {'url': url}}


@pytest.mark.parametrize(('given', 'said'), [
    (offer('2.13.0+cpu', 'https://x/torch.whl', 'filelock'), ''),
    (offer('2.13.0', 'https://x/torch.whl', 'filelock',
           'nvidia-cublas-cu13 ; sys_platform == "linux"'), 'CUDA build'),
    (offer('2.13.0', 'https://x/torch.whl', 'nvidia-cublas-cu13 ; sys_platform == "no"'),
     'does not say'),
    (offer('2.13.0', 'https://x/torch.whl', 'triton (>=3)'), 'CUDA build')])
def test_only_a_cpu_build_of_torch_is_taken(given: dict[str, Any], said: str) -> None:
    reason = script('install_torch_cpu').refusal(given)
    assert bool(reason) == bool(said)
    assert said in reason


def test_a_local_file_that_is_too_large_is_no_cpu_build(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script('install_torch_cpu')
    wheel = tmp_path / 'torch.whl'
    wheel.write_bytes(b'0' * 2000)
    assert module.refusal(offer('2.13.0', wheel.as_uri())) == ''
    monkeypatch.setattr(module, 'LARGEST', 1000)
    assert 'no CPU build' in module.refusal(offer('2.13.0', wheel.as_uri()))


def test_an_environment_is_made_anew_when_messages_change(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script('setup_venv')
    monkeypatch.setattr(module, 'ROOT', tmp_path)
    (tmp_path / 'msg').mkdir()
    file = tmp_path / 'msg/A.msg'
    file.write_text('int32 a\n')
    first = module.digest(('msg',), 'jazzy')
    assert module.digest(('msg',), 'jazzy') == first
    assert module.digest(('msg',), 'kilted') != first
    file.write_text('int64 a\n')
    assert module.digest(('msg',), 'jazzy') != first
    assert set(module.BUILD_INPUTS) >= {'setup.py', 'CMakeLists.txt', 'msg', 'srv', 'action'}


def test_a_python_that_has_no_wheels_is_not_taken() -> None:
    module = script('setup_venv')
    assert module.find_python('python3.9') is None
    assert module.find_python('python3') is not None
