"""Philox against its published known answers, and as a stream whose state is all there is."""
from __future__ import annotations

import pytest

torch = pytest.importorskip('torch', reason='needs a CPU build of torch')

from flashrt_ros.backends import philox  # noqa: E402


def state(key=(1, 2), counter=0):
    return torch.tensor(key), torch.tensor([counter])


@pytest.mark.parametrize(('key', 'counter', 'want'), [
    ((0, 0), (0, 0, 0, 0), '6627e8d5 e169c58d bc57ac4c 9b00dbd8'),
    ((0xffffffff,) * 2, (0xffffffff,) * 4, '408f276d 41c83b0e a20bc7c6 6d5451fd'),
    ((0xa4093822, 0x299f31d0), (0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344),
     'd16cfe09 94fdcceb 5001e420 24126ea1')])
def test_known_answers_of_the_paper(key, counter, want):
    words = philox.block(torch.tensor(key), torch.tensor(counter)[:, None])[:, 0]
    assert ' '.join(f'{int(w):08x}' for w in words) == want


def test_the_nth_word_depends_on_key_and_counter_alone():
    key, counter = state()
    whole = philox.bits(key, counter, 40)
    assert int(counter) == 10
    key, counter = state()
    parts = torch.cat([philox.bits(key, counter, 8) for _ in range(5)])
    assert torch.equal(whole, parts)
    assert torch.equal(philox.bits(*state(counter=5), 8), whole[20:28])
    assert not torch.equal(philox.bits(*state(key=(1, 3)), 40), whole)


def test_counter_carries_into_its_second_word():
    low = philox.bits(*state(counter=(1 << 32) - 1), 8)
    high = philox.bits(*state(counter=1 << 32), 4)
    assert torch.equal(low[4:], high)
    assert not torch.equal(high, philox.bits(*state(), 4))


def test_uniform_stays_inside_and_normal_has_mean_and_spread():
    key, counter = state()
    u = philox.uniform(key, counter, (100_000,))
    assert 0 < u.min()
    assert u.max() < 1
    assert abs(float(u.mean()) - 0.5) < 5e-3
    z = philox.normal(key, counter, (100_001,))
    assert z.shape == (100_001,)
    assert abs(float(z.mean())) < 1e-2
    assert abs(float(z.std()) - 1) < 1e-2
    assert abs(float((z ** 4).mean()) - 3) < 0.1
