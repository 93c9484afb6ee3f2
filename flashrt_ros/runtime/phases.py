"""The phases of a policy node and what each event does to them, as one table.

Only RUNNING publishes actions. The table is data so that a test can read it against the design's;
the runner asks `after` and does nothing to its phase in any other way.
"""
from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, IntEnum

from flashrt_ros.core.errors import Code, Refusal


class Phase(IntEnum):
    """Numbers of msg/PolicyStatus."""

    UNCONFIGURED = 0
    HOLD = 1
    RUNNING = 2
    PAUSED = 3
    SHADOW = 4
    FAULT = 5


class Cause(Enum):
    """What may change the phase."""

    GOAL = 'goal'                      # also ~/start
    PAUSE = 'pause'                    # also enable lost
    RESUME = 'resume'
    STOP = 'stop'                      # also cancel, result, limit, deactivate, shutdown
    REWIND = 'rewind'                  # restore, rollback, reset, clock jump
    STALE = 'stale'                    # stale input or NaN after the goal's first row
    FAULT = 'fault'


_MOVING = (Phase.RUNNING, Phase.PAUSED, Phase.SHADOW)
_CONFIGURED = (Phase.HOLD, *_MOVING)

# cause -> phase before -> phase after; what is absent is refused
TABLE: Mapping[Cause, Mapping[Phase, Phase]] = {
    Cause.GOAL: dict.fromkeys(_CONFIGURED, Phase.RUNNING),       # SHADOW for a shadow goal
    Cause.PAUSE: {Phase.RUNNING: Phase.PAUSED},
    Cause.RESUME: {Phase.PAUSED: Phase.RUNNING},
    Cause.STOP: dict.fromkeys(_CONFIGURED, Phase.HOLD),
    Cause.REWIND: dict.fromkeys(_CONFIGURED, Phase.HOLD),        # not asked with `continue`
    Cause.STALE: {Phase.RUNNING: Phase.HOLD, Phase.SHADOW: Phase.HOLD},
    Cause.FAULT: dict.fromkeys(Phase, Phase.FAULT),
}

_REASONS: Mapping[Phase, tuple[Code, str]] = {
    Phase.UNCONFIGURED: (Code.NOT_CONFIGURED, 'the node is not configured; configure it first'),
    Phase.FAULT: (Code.FAULT, 'the node is in FAULT; clean up and configure it'),
}


def after(cause: Cause, phase: Phase, *, shadow: bool = False) -> Phase:
    """Return the phase that follows. `shadow`: the goal commands nothing.

    Raises Refusal(NOT_CONFIGURED, FAULT or WRONG_PHASE).
    """
    follows = TABLE[cause].get(phase)
    if follows is None:
        code, reason = _REASONS.get(phase, (Code.WRONG_PHASE, f'{cause.value} is not possible in '
                                            f'{phase.name}'))
        raise Refusal(code, reason)
    if cause is Cause.GOAL and shadow:
        return Phase.SHADOW
    return follows
