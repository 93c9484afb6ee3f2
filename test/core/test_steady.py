"""P35: nothing grows and nothing slows down."""
from __future__ import annotations

import gc
import statistics
import time
import tracemalloc

import pytest

from test.conformance.cases import CASES


def run(ticks: int, verbs: int) -> tuple[float, int]:
    """Return the ratio of the median tick of the last tenth to the second's, and memory growth."""
    o = CASES[0].session(device_slots=4, host_bytes=1 << 20, max_capsules=16)
    tenth = ticks // 10
    every = ticks // verbs
    medians, start = [], 0
    inputs = o._inputs[3]
    for part in range(10):
        times = []
        for i in range(tenth):
            t = time.thread_time()  # what this thread used: the machine may be busy elsewhere
            o.session.tick_now(inputs)
            times.append(time.thread_time() - t)
            if i % every == 0:
                name = f'c{i // every % 40}'
                o.session.save(name, overwrite=True)
                o.restore(name)
        medians.append(statistics.median(times))
        if part == 0:
            gc.collect()
            tracemalloc.start()
            start = tracemalloc.get_traced_memory()[0]
            medians[0] = 0.0
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - start
    tracemalloc.stop()
    o.close()
    return medians[-1] / medians[1], grown


def test_p35_memory_does_not_grow() -> None:
    _, grown = run(5_000, 500)
    assert grown < 2_000_000


@pytest.mark.long
def test_p35_a_hundred_thousand_ticks_with_ten_thousand_saves_and_restores() -> None:
    ratio, grown = run(100_000, 10_000)
    assert grown < 2_000_000
    assert ratio <= 1.2
