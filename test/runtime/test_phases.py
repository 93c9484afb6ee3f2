"""The phase table against the design's, and that the runner follows it."""
from __future__ import annotations

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Cause, Phase, after

U, H, R, P, S, F = Phase

# cause: phase after, from UNCONFIGURED HOLD RUNNING PAUSED SHADOW FAULT; None is refused
DESIGN: dict[Cause, list[Phase | None]] = {
    Cause.GOAL: [None, R, R, R, R, None],
    Cause.PAUSE: [None, None, P, None, None, None],
    Cause.RESUME: [None, None, None, R, None, None],
    Cause.STOP: [None, H, H, H, H, None],
    Cause.REWIND: [None, H, H, H, H, None],
    Cause.STALE: [None, None, H, None, H, None],
    Cause.FAULT: [F, F, F, F, F, F],
}


@pytest.mark.parametrize('cause', Cause)
@pytest.mark.parametrize('phase', Phase)
def test_the_table_is_the_design_s(cause: Cause, phase: Phase) -> None:
    expected = DESIGN[cause][phase]
    if expected is None:
        with pytest.raises(Refusal) as error:
            after(cause, phase)
        assert error.value.code is {U: Code.NOT_CONFIGURED, F: Code.FAULT}.get(
            phase, Code.WRONG_PHASE)
    else:
        assert after(cause, phase) is expected


@pytest.mark.parametrize('phase', [H, R, P, S])
def test_a_shadow_goal_leads_to_shadow(phase: Phase) -> None:
    assert after(Cause.GOAL, phase, shadow=True) is S
