"""A tick of the session over the bare backend call, paired in one run.

    python bench/session_tick.py [--ticks N]

Prints medians and their difference in microseconds, with the device thread and without.
"""
from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from flashrt_ros.backends import host, reference
from flashrt_ros.core.session import Options, Session


def measure(make: object, ticks: int, threaded: bool, history: int) -> tuple[float, float]:
    """Return the median microseconds of the bare call and of a whole tick and step."""
    session = Session(make(), host.HostDevice(),  # type: ignore[operator]
                      options=Options(threaded=threaded, history=history))
    inputs = {n: np.ones(a.shape, a.dtype) for n, a in session.inputs.items()}
    bare, whole = [], []
    for _ in range(ticks):
        t = time.perf_counter()
        session._live.bound.enqueue()
        bare.append(time.perf_counter() - t)
        t = time.perf_counter()
        session.tick_now(inputs)
        whole.append(time.perf_counter() - t)
    session.close()
    return statistics.median(bare) * 1e6, statistics.median(whole) * 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--ticks', type=int, default=5000)
    ticks = parser.parse_args().ticks
    print('| policy | thread | ring | bare, us | tick and step, us | more, us |')
    print('|---|---|---|---|---|---|')
    for make in (reference.recurrent, reference.chunked):
        for threaded in (False, True):
            for history in (0, 4):
                bare, whole = measure(make, ticks, threaded, history)
                print(f'| {make.__name__} | {"device" if threaded else "none"} '
                      f'| {"on" if history else "off"} | {bare:.0f} | {whole:.0f} '
                      f'| {whole - bare:.0f} |')


if __name__ == '__main__':
    main()
