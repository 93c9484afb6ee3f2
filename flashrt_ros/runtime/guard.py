"""May the policy return to where the robot was? Compares a capsule's witness with the robot.

Live only, never in lock step, never for `origin`. Which values are compared, by flat name such as
`joint_position.shoulder`, and how far each may have moved, the observation knows from the policy
file. Nothing here changes anything.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.rewind import Plan
from flashrt_ros.ingest.inbox import Measured
from flashrt_ros.ingest.spec import GuardSpec, WitnessLimit


@dataclass(frozen=True)
class Moved:
    """Witness values beyond their limit, SI units."""

    names: tuple[str, ...] = ()
    distance: tuple[float, ...] = ()
    limit: tuple[float, ...] = ()
    forceable: bool = True             # whether every one of them is

    def __bool__(self) -> bool:
        return bool(self.names)

    def __str__(self) -> str:
        return ', '.join(f'{n} has moved {d:.4g} (limit {lim:.4g})' for n, d, lim in
                         zip(self.names, self.distance, self.limit, strict=True))


def check_age(guard: GuardSpec, plan: Plan, now_ns: int) -> None:
    """Refuse (TOO_OLD) a capsule whose observation is older than the guard allows."""
    if guard.max_age_s is None:
        return
    age = (now_ns - (plan.mark.stamp_ns or plan.saved_ns)) * 1e-9
    name = plan.info.name
    if age < -1.0:                     # sensors may be stamped a little ahead of this clock
        raise Refusal(Code.TOO_OLD, f'capsule {name!r} is stamped {-age:.1f} s in the future of '
                      'this clock, so its age cannot be told; save a new one, or reset')
    if age > guard.max_age_s:
        raise Refusal(Code.TOO_OLD, f'capsule {name!r} is {age:.1f} s old, the guard allows '
                      f'{guard.max_age_s:g} s; save a newer one, or raise guard.max_age_s')


def compare(limits: Mapping[str, WitnessLimit], then: Mapping[str, float],
            now: Mapping[str, Measured]) -> Moved:
    """Return which values moved too far between a capsule's witness and the robot now.

    Raises Refusal(INPUT_STALE) where one cannot be compared.
    """
    beyond = []
    for name, limit in limits.items():
        measured = now.get(name)
        if measured is None:
            raise Refusal(Code.INPUT_STALE, f'witness {name} is not measured: it was never '
                          'received, or is no number; check its topic')
        if measured.limit_s is not None and measured.age_s > measured.limit_s:
            raise Refusal(Code.INPUT_STALE, f'witness {name} is {measured.age_s:.3f} s old, the '
                          f'limit is {measured.limit_s:g} s; nothing can be said of where the '
                          'robot is now')
        if name not in then:
            raise Refusal(Code.INPUT_STALE, f'witness {name} was not measured when the capsule '
                          'was saved; save a new one')
        distance = abs(measured.value - then[name])
        if not distance <= limit.max:  # also where it is no number
            beyond.append((name, distance, limit))
    return Moved(tuple(n for n, _, _ in beyond), tuple(d for _, d, _ in beyond),
                 tuple(lim.max for _, _, lim in beyond), all(lim.forceable for _, _, lim in beyond))


def judge(guard: GuardSpec, moved: Moved, *, force: bool, allow_force: bool) -> str:
    """Return what to say of a robot that moved, or refuse (ROBOT_MOVED)."""
    if not moved:
        return ''
    if guard.on_moved == 'warn':
        return f'warning: {moved}'
    if force and allow_force and moved.forceable:
        return f'forced: {moved}'
    if not force:
        advice = 'move the robot back to where it was, then restore'
    elif not allow_force:
        advice = 'force is not allowed on this node (parameter allow_force)'
    else:
        advice = 'force does not reach terms that are not marked forceable'
    raise Refusal(Code.ROBOT_MOVED, f'{moved}; {advice}', moved=moved.names,
                  distance=moved.distance, limit=moved.limit)
