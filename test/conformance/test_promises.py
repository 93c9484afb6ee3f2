"""Every promise of checks.py on every backend."""
from __future__ import annotations

from collections.abc import Callable

import pytest

from test.conformance.cases import Case, parameters
from test.conformance.checks import CHECKS


@pytest.mark.parametrize('check', CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize('case', parameters())
def test_promise(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
