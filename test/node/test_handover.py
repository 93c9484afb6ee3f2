"""The executor rests while a quick inference is at work, and only then."""
from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from flashrt_ros.core.capsule import Latch
from flashrt_ros.core.inference import Inference
from flashrt_ros.node import handover
from flashrt_ros.node.handover import Handover


def under_way(duration_s: float = 0.0) -> Inference:
    inference = Inference(Latch({}, 0), 1)
    inference.duration_s = duration_s
    return inference


def test_it_rests_until_the_inference_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, 'QUICK_S', 20.0)
    session = SimpleNamespace(in_flight=under_way())
    order: list[str] = []
    session.in_flight.add_done_callback(lambda _: order.append('published'))
    hand, resting = Handover(session), threading.Event()

    def rest() -> None:
        resting.set()
        hand.rest()
        order.append('went on')
    thread = threading.Thread(target=rest)
    thread.start()
    assert resting.wait(5)
    session.in_flight.finish()
    thread.join(5)
    assert order == ['published', 'went on']


def test_it_does_not_wait_for_a_program_that_was_slow_nor_without_one(
        monkeypatch: pytest.MonkeyPatch) -> None:
    session = SimpleNamespace(in_flight=under_way(0.05))
    hand = Handover(session)
    hand.rest()                        # not known to be slow yet: QUICK_S at most
    session.in_flight.finish()
    monkeypatch.setattr(handover, 'QUICK_S', 20.0)
    begun = time.monotonic()
    session.in_flight = under_way()
    hand.rest()
    session.in_flight = None
    hand.rest()
    assert time.monotonic() - begun < 5
