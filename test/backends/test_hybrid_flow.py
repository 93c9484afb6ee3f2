"""The flow-matching head: its noise is state, and a restore repeats it."""
from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='needs a CPU build of torch')

from flashrt_ros.backends.host import HostDevice  # noqa: E402
from flashrt_ros.backends.hybrid import flow  # noqa: E402
from flashrt_ros.backends.torch_program import ProgramPolicy  # noqa: E402
from flashrt_ros.core.session import Options, Session  # noqa: E402


def session(**options) -> Session:
    return Session(ProgramPolicy(flow(**options)), HostDevice(), options=Options(threaded=False))


def run(s: Session, n: int) -> list[bytes]:
    return [s.tick_now({'obs': np.full(8, 0.1, np.float32)})['actions'].tobytes()
            for _ in range(n)]


def test_two_ticks_on_equal_input_differ_and_a_restore_repeats_them():
    s = session()
    run(s, 3)
    s.save('a')
    first = run(s, 6)
    assert len(set(first)) == 6
    s.apply(s.plan_restore('a')).result()
    assert run(s, 6) == first
    s.close()


def test_another_key_gives_other_noise_and_the_same_key_the_same():
    runs = []
    for key in (1, 2, 1):
        s = session(key=key)
        runs.append(run(s, 4))
        s.close()
    assert runs[0] == runs[2] != runs[1]


def test_with_no_noise_the_key_changes_nothing():
    runs = []
    for key in (1, 2):
        s = session(noise=0.0, key=key)
        runs.append(run(s, 4))
        s.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize('lost', ['rng_counter', 'rng_key', 'memory'])
def test_each_piece_of_state_carries_the_future(lost):
    s = session()
    run(s, 3)
    s.save('a')
    plain = run(s, 1)
    s.apply(s.plan_restore('a')).result()
    s._live.arena.write(lost, np.zeros(s.layout[lost].nbytes, np.uint8))
    assert run(s, 1) != plain
    s.close()
