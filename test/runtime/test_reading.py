"""A message is read before the lock is taken: whatever that takes, a stop does not wait for it."""
from __future__ import annotations

from collections.abc import Callable
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from flashrt_ros.core.errors import Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.world import ARM, JOINTS, LOCK_STEP, NUMBERED, S, World, stamp

Make = Callable[..., World]


class Message:
    """A JointState that does something while it is read."""

    velocity: tuple[float, ...] = ()
    effort: tuple[float, ...] = ()
    name = JOINTS

    def __init__(self, w: World, reading: Callable[[], None], position: Any = (0.0, 0.0, 0.0)
                 ) -> None:
        self.header = SimpleNamespace(stamp=stamp(w.ns))
        self._reading = reading
        self._position = position

    @property
    def position(self) -> Any:
        self._reading()
        return self._position


def test_a_stop_does_not_wait_for_a_message_that_takes_long_to_read(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.steps(3)
    gate, entered = threading.Event(), threading.Event()

    def reading() -> None:
        entered.set()
        assert gate.wait(10)
    feeder = threading.Thread(target=lambda: w.runner.feed('joint_states', Message(w, reading)))
    feeder.start()
    assert entered.wait(5)
    stopper = threading.Thread(target=w.runner.stop)
    stopper.start()
    stopper.join(5)
    assert not stopper.is_alive()
    assert w.phase is Phase.HOLD
    assert w.sink.kinds()[-1] == 'stop'
    gate.set()
    feeder.join(5)
    assert w.sink.kinds()[-1] == 'stop'


def test_a_message_during_whose_reading_the_clock_jumps_is_dropped(world: Make) -> None:
    w = world(ARM)

    def jump() -> None:
        w.ns -= 100 * S
        w.runner.clock_jumped(-100 * S)
    once = iter([jump])
    w.runner.feed('joint_states', Message(w, lambda: next(once, lambda: None)()))
    assert w.runner.observation.counters['other_clock'] == 1
    assert w.runner.observation.missing(w.ns)


def test_a_message_that_cannot_be_read_is_rejected_and_not_counted_as_lost(world: Make) -> None:
    w = world(NUMBERED, {'run': LOCK_STEP})
    w.say(seq=1)
    with pytest.raises(Refusal, match='joint_states'):
        w.runner.feed('joint_states', Message(w, lambda: None, position=(0.0,)), seq=2)
    w.say(seq=3)
    assert w.runner.status().rejected_inputs == 1
    assert w.runner.observation.counters['lost'] == 0
