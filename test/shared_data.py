"""Where the real policies and bags lie; tests that need them skip where they are absent."""
from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT.parent / 'shared' / 'data'


def data(*parts: str) -> Path:
    """Return a path below the data folder, or skip the test with the reason."""
    path = DATA.joinpath(*parts)
    if not path.exists():
        pytest.skip(f'{"/".join(parts)} is not beside this checkout (shared/data)')
    return path
