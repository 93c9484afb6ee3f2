"""The rest of the suite on a real card: mutants, tiers, random verbs, a long run."""
from __future__ import annotations

import gc
import statistics
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest

from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space
from flashrt_ros.core.session import Options, Session
from test.backends.gpu_programs import Small
from test.backends.test_torch_cuda import BEARING, PROGRAMS, policy
from test.conformance import test_mutants, test_order
from test.conformance.cases import Case
from test.core import test_disk, test_model
from test.gpu import cuda_device, cuda_torch

pytestmark = pytest.mark.gpu


@pytest.fixture
def card(request):
    cuda_torch(request)
    return cuda_device(request)


@pytest.fixture(params=['decoder', 'flow'])
def case(request, card):
    make = PROGRAMS[request.param]
    return Case(request.param, lambda: (policy(make()), card), BEARING[request.param])


@pytest.mark.parametrize(('mutant', 'check'), test_mutants.MUTANTS,
                         ids=[m.__name__ for m, _ in test_mutants.MUTANTS])
def test_p3_mutant_is_killed(case, mutant, check):
    test_mutants.test_p3_mutant_is_killed(case, mutant, check)


def test_p3_each_load_bearing_buffer_left_out_shows_in_the_outputs(case):
    test_mutants.test_p3_each_load_bearing_buffer_left_out_shows_in_the_outputs(case)


def test_p13_a_capsule_returns_after_a_restart(case, tmp_path):
    test_disk.test_p13_a_capsule_returns_after_a_restart(case, tmp_path)


def test_p13_all_tiers_keep_the_bytes(case, tmp_path):
    test_disk.test_p13_all_tiers_keep_the_bytes(case, tmp_path)


def test_p17_nothing_is_bound_or_allocated_in_steady_state(case):
    test_order.test_p17_nothing_is_bound_or_allocated_in_steady_state(case)


def test_p33_p34_random_verbs_against_the_model(case, tmp_path):
    counts = test_model.walk(case, tmp_path, 4321, 600)
    for verb in ('restore', 'rollback', 'save', 'fork', 'drop'):
        assert counts.get(f'{verb} OK', 0) > 5, counts


class Narrow:
    """A card on which pinned memory runs out when a test says so."""

    def __init__(self, card: Any) -> None:
        self._card = card
        self.full = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._card, name)

    def alloc(self, nbytes: int, space: Space) -> Any:
        if self.full:
            raise Refusal(Code.NO_MEMORY, f'{nbytes} bytes of {space.name} memory: cudaHostAlloc')
        return self._card.alloc(nbytes, space)


def test_an_allocation_that_fails_is_told_and_the_other_capsules_stay(card):
    events: list[Event] = []
    device = Narrow(card)
    s = Session(policy(Small()), device, on_event=events.append,
                options=Options(threaded=False, device_slots=2, history=1))
    x = {'x': np.ones(8, np.float32)}
    digests = {}
    for name in ('a', 'b'):
        s.tick_now(x)
        s.save(name)
        digests[name] = s.digest()
    s.tick_now(x)
    device.full = True
    s.save('c')              # a has to leave the device, and there is no host memory for it
    device.full = False
    told = [e for e in events if e.code is Code.NO_MEMORY]
    if told:
        assert [(e.kind, e.info.name) for e in told] == [(EventKind.EVICTED, 'a')]
    s.apply(s.plan_restore('b')).result()
    assert s.digest() == digests['b']
    s.tick_now(x)
    s.close()


def test_p35_a_hundred_thousand_ticks_with_ten_thousand_saves_and_restores(card):
    s = Session(policy(Small()), card, options=Options(threaded=False, device_slots=4,
                                                       host_bytes=1 << 20, max_capsules=16))
    x = {'x': np.full(8, 0.01, np.float32)}
    medians, start, free = [], 0, 0
    for part in range(10):
        times = []
        for i in range(10_000):
            began = time.perf_counter()
            s.tick_now(x)
            times.append(time.perf_counter() - began)
            if i % 10 == 0:
                name = f'c{i // 10 % 40}'
                s.save(name, overwrite=True)
                s.apply(s.plan_restore(name)).result()
        medians.append(statistics.median(times))
        if part == 0:
            gc.collect()
            tracemalloc.start()
            start, free = tracemalloc.get_traced_memory()[0], card.memory()[0]
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    assert card.memory()[0] == free
    s.close()
    assert grown < 2_000_000
    assert medians[-1] <= 1.2 * medians[1], medians
