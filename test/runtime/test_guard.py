"""P26: a live restore asks where the robot is now."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.world import ARM, LOCK_STEP, World

Make = Callable[..., World]


def saved(world: Make, *changes: Any, **options: Any) -> World:
    w = world(ARM, *changes, **options)
    w.go()
    w.step()
    w.runner.save('a')
    w.runner.stop()
    return w


def refusal(w: World, name: str = 'a', **request: Any) -> Refusal:
    error = w.runner.restore(name, **request).exception(0)
    assert isinstance(error, Refusal)
    return error


def test_p26_a_robot_that_moved_is_refused_with_joint_distance_and_limit(world: Make) -> None:
    w = saved(world)
    w.say([0.0, 0.5, 0.21])
    error = refusal(w)
    assert error.code is Code.ROBOT_MOVED
    assert error.details['moved'] == ('joint_position.b',)
    assert error.details['distance'] == pytest.approx((0.4,))
    assert error.details['limit'] == (0.2,)
    assert 'joint_position.b' in error.message
    w.say([0.0, 0.2, 0.21])
    assert w.runner.restore('a').result(0).moved == ()


def test_p26_the_narrower_entry_wins_for_its_joint(world: Make) -> None:
    w = saved(world)
    w.say([0.15, 0.1, 0.26])
    assert refusal(w).details['moved'] == ('joint_position.c',)


def test_p26_force_needs_the_parameter_and_reaches_forceable_terms_only(world: Make) -> None:
    w = saved(world)
    w.say([0.0, 0.5, 0.2])
    assert 'allow_force' in refusal(w, force=True).message
    w.runner.allow_force = True
    assert refusal(w).code is Code.ROBOT_MOVED           # it must be asked for too
    answer = w.runner.restore('a', force=True).result(0)
    assert answer.moved == ('joint_position.b',)
    assert answer.limit == (0.2,)
    w.say([0.0, 0.5, 0.3])
    assert 'forceable' in refusal(w, force=True).message
    w.advance(70)
    w.say([0.0, 0.1, 0.2])
    assert refusal(w, force=True).code is Code.TOO_OLD   # force overrides ROBOT_MOVED and no more


def test_p26_an_old_capsule_is_refused_and_origin_never(world: Make) -> None:
    w = saved(world)
    w.advance(59)
    w.say()
    w.runner.restore('a').result(0)
    w.advance(2)
    w.say([3.0, 3.0, 3.0])
    assert refusal(w).code is Code.TOO_OLD
    w.runner.restore('origin').result(0)
    w.runner.reset().result(0)


def test_p26_a_capsule_from_before_the_first_tick_is_the_fresh_start(world: Make) -> None:
    w = world(ARM)
    w.say()
    w.runner.save('start')
    w.go()
    w.step([0.0, 0.1, 0.2])
    w.advance(100)
    w.say([3.0, 3.0, 3.0])
    w.runner.restore('start').result(0)
    assert w.runner.status().tick == 0


def test_p26_a_stale_or_unmeasured_witness_refuses(world: Make) -> None:
    w = saved(world)
    w.advance(0.2)
    error = refusal(w)
    assert error.code is Code.INPUT_STALE
    assert 'joint_position' in error.message
    w.say([0.0, float('nan'), 0.2])
    assert refusal(w).code is Code.INPUT_STALE
    w.say([0.0, 0.1, 0.2])
    w.runner.restore('a').result(0)


def test_p26_the_guard_asks_the_present_robot_also_while_inactive_and_in_a_rollback(world: Make
                                                                                    ) -> None:
    w = saved(world)
    w.runner.deactivate()
    w.say([0.0, 0.5, 0.2])
    assert refusal(w).code is Code.ROBOT_MOVED
    error = w.runner.rollback().exception(0)
    assert isinstance(error, Refusal)
    assert error.code is Code.ROBOT_MOVED
    w.say([0.0, 0.1, 0.2])
    w.runner.rollback().result(0)


def test_p26_a_goal_with_a_capsule_is_guarded_and_leaves_the_running_goal_alone(world: Make
                                                                                ) -> None:
    w = saved(world)
    running = w.go()
    w.step([0.0, 0.5, 0.2])
    goal = w.go(capsule='a')
    assert goal.result is not None
    assert goal.result.code is Code.ROBOT_MOVED
    assert running.result is None
    assert w.phase is Phase.RUNNING


def test_p26_on_moved_warn_restores_and_says_so(world: Make) -> None:
    w = saved(world, {'guard': {'on_moved': 'warn'}})
    w.say([0.0, 0.5, 0.2])
    answer = w.runner.restore('a').result(0)
    assert answer.moved == ('joint_position.b',)
    assert 'warning' in answer.message


def test_the_guard_does_not_apply_in_lock_step(world: Make) -> None:
    w = saved(world, {'run': LOCK_STEP})
    w.say([0.0, 2.0, 0.2])
    w.advance(100)
    assert w.runner.restore('a').result(0).moved == ()


def test_the_witness_is_what_the_boundary_s_tick_latched(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.step([0.0, 0.1, 0.2])
    w.step([0.02, 0.1, 0.2])                     # between inferences
    info = w.runner.save('a')
    assert info.witness == pytest.approx(
        {'joint_position.a': 0.0, 'joint_position.b': 0.1, 'joint_position.c': 0.2})
    assert info.stamp_ns == w.ns - 20_000_000
