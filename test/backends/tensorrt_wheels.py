"""The real TensorRT libraries, for tests that parse and build with them; no GPU is needed."""
from __future__ import annotations

import functools

import pytest

from flashrt_ros.backends.tensorrt_api import MODULES, Library, find
from flashrt_ros.core.errors import Refusal

LIBRARIES = sorted(MODULES)


@functools.cache
def _found(name: str) -> Library | str:
    try:
        return find(name)
    except Refusal as refusal:
        return refusal.message


def real(name: str = 'tensorrt_rtx') -> Library:
    """Return a library, or skip the test with the reason."""
    found = _found(name)
    if isinstance(found, str):
        pytest.skip(found)
    return found
