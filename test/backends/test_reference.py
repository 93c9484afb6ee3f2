"""The reference policies: all their memory is declared, and each piece of it matters."""
from __future__ import annotations

import numpy as np
import pytest

from flashrt_ros.backends.reference import Recurrent, draw_bits, draw_normal
from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.layout import Role
from test.backends.live import Live

FACTORIES = ('recurrent', 'chunked', 'journal')


def live(name: str, **options) -> Live:
    return Live('host', factory=f'flashrt_ros.backends.reference:{name}', options=options)


def observations(n: int, dim: int) -> list[dict]:
    rng = np.random.default_rng(5)
    return [{'obs': rng.uniform(-1, 1, dim).astype(np.float32)} for _ in range(n)]


@pytest.mark.parametrize('name', FACTORIES)
def test_p1_state_put_back_repeats_the_outputs_to_the_byte(name):
    policy = live(name)
    policy.returns(observations(20, policy.b['obs'].size), at=9)


@pytest.mark.parametrize('name', FACTORIES)
def test_p20_ticks_change_nothing_but_buffers(name):
    policy = live(name)
    before = policy.policy.hidden()
    for x in observations(5, policy.b['obs'].size):
        policy.tick(**x)
    assert policy.policy.hidden() == before
    assert any('numpy.random' in k for k in before)


@pytest.mark.parametrize(('name', 'buffer'), [
    ('recurrent', 'h'), ('recurrent', 'rng_key'), ('recurrent', 'rng_counter'),
    ('chunked', 'history'), ('chunked', 'filled'), ('chunked', 'h'), ('chunked', 'inference'),
    ('journal', 'keys'), ('journal', 'values'), ('journal', 'kv_length')])
def test_p3_every_buffer_is_load_bearing(name, buffer):
    options = {'numbered': True} if name == 'chunked' else {}
    policy = live(name, **options)
    xs = observations(8, policy.b['obs'].size)
    for x in xs[:5]:
        policy.tick(**x)
    saved = policy.state()
    want = [policy.tick(**x)['actions'] for x in xs[5:]]
    policy.put(saved)
    policy.b[buffer][...] = 0
    got = [policy.tick(**x)['actions'] for x in xs[5:]]
    assert any(a.tobytes() != b.tobytes() for a, b in zip(want, got, strict=True))


def test_row_i_of_inference_k_is_1000_k_plus_i():
    policy = live('chunked', numbered=True, horizon=5)
    for k in (1, 2, 3):
        out = policy.tick(obs=0.5)['actions']
        assert out[:, 0].tolist() == [1000 * k + i for i in range(5)]


def test_the_first_observation_fills_the_history():
    policy = live('chunked', length=3)
    policy.tick(obs=0.25)
    assert (policy.b['history'] == 0.25).all()
    policy.tick(obs=0.5)
    assert policy.b['history'][:, 0].tolist() == [0.5, 0.25, 0.25]
    assert policy.b['filled'][0] == 2


def test_noise_depends_on_key_and_counter_alone():
    key, counter = np.array([9], np.uint64), np.zeros(1, np.uint64)
    whole = draw_bits(key, counter, 10)
    counter[0] = 4
    np.testing.assert_array_equal(draw_bits(key, counter, 6), whole[4:])
    assert counter[0] == 10
    assert (draw_bits(key + np.uint64(1), np.zeros(1, np.uint64), 10) != whole).all()


def test_noise_is_normal():
    x = draw_normal(np.array([3], np.uint64), np.zeros(1, np.uint64), 20_000)
    assert abs(float(x.mean())) < 0.03
    assert abs(float(x.std()) - 1) < 0.03
    assert np.isfinite(x).all()


def test_splitmix_gives_its_known_answers():
    # Vigna's splitmix64.c, seed 1234567
    got = draw_bits(np.array([1234567], np.uint64), np.zeros(1, np.uint64), 3)
    assert got.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_a_journal_keeps_its_final_rows_and_rewrites_its_drafts():
    policy = live('journal', drafts=2)
    xs = observations(6, policy.b['obs'].size)
    for x in xs[:3]:
        policy.tick(**x)
    n = int(policy.b['kv_length'][0])
    assert n == 3
    final, drafts = policy.b['keys'][:, :n].copy(), policy.b['keys'][:, n:n + 2].copy()
    policy.tick(**xs[3])
    np.testing.assert_array_equal(policy.b['keys'][:, :n], final)
    assert (policy.b['keys'][:, n + 1:n + 3] != drafts).any()


def test_prefill_appends_and_never_rewrites():
    policy = live('journal')
    policy.tick(obs=0.1)
    row = policy.b['keys'][:, :1].copy()
    policy.b['prompt'][:4] = list(b'pick')
    policy.bound.prefill()
    assert (policy.b['kv_start'][0], policy.b['kv_length'][0]) == (1, 5)
    np.testing.assert_array_equal(policy.b['keys'][:, :1], row)
    with_prompt = policy.tick(obs=0.1)['actions']
    policy.wipe()
    assert (policy.tick(obs=0.1)['actions'] != with_prompt).any()


def test_a_full_journal_is_refused_and_keeps_its_rows():
    policy = live('journal', rows=3)
    for _ in range(3):
        policy.tick(obs=0.1)
    before = policy.state()
    with pytest.raises(Refusal, match='journal keys: 1 more rows after 3 of 3'):
        policy.tick(obs=0.1)
    assert policy.state() == before


def test_only_the_journal_takes_prompts():
    assert [hasattr(live(n).bound, 'prefill') for n in FACTORIES] == [False, False, True]


def test_p8_weights_and_settings_are_part_of_the_identity():
    def weights(**options):
        return Recurrent(**options).identity()[0]['weights']
    assert weights() == weights()
    assert len({weights(), weights(seed=4), weights(noise=0.2), weights(hidden=8)}) == 4


def test_a_counter_left_in_an_attribute_shows_in_hidden():
    class Leaky(Recurrent):
        n = 0

        def tick(self, b):
            self.n += 1
            super().tick(b)

    policy = Leaky()
    before = policy.hidden()
    policy.tick({s.name: np.zeros(s.shape, s.storage) for s in policy.layout().values()})
    changed = [k for k, v in policy.hidden().items() if before.get(k) != v]
    assert changed == ['n']


def test_layouts_have_one_role_for_each_buffer():
    assert {s.name for s in live('journal').layout.select(Role.STATE)} == {
        'keys', 'values', 'kv_length', 'kv_start'}
