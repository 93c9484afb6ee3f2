"""Tests that need a CUDA card: skipped without one, failed where they were asked for by mark."""
from __future__ import annotations

from typing import Any

import pytest

from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.core.errors import Refusal


def cuda_device(request: pytest.FixtureRequest, **options: Any) -> CudaDevice:
    """Return a device, closed at the end of the test; skip or fail without a card."""
    try:
        device = CudaDevice(**options)
    except Refusal as e:
        reason = f'needs a CUDA card: {e.message}'
        if 'gpu' in (request.config.getoption('-m') or '').replace('not gpu', ''):
            pytest.fail(reason)
        pytest.skip(reason)
    request.addfinalizer(device.close)
    return device


def cuda_torch(request: pytest.FixtureRequest) -> Any:
    """Return torch with its card prepared; skip or fail without one."""
    cuda_device(request)
    torch = pytest.importorskip('torch', reason='needs torch')
    from flashrt_ros.backends import torch_cuda
    torch_cuda.prepare()
    return torch
