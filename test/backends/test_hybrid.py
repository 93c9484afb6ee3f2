"""The hybrid decoder against a plain reference: one token at a time, no cache, float64."""
from __future__ import annotations

import math

import numpy as np
import pytest

torch = pytest.importorskip('torch', reason='needs a CPU build of torch')

from flashrt_ros.backends.host import HostDevice  # noqa: E402
from flashrt_ros.backends.hybrid import Decoder, DecoderConfig, blocks, decoder  # noqa: E402
from flashrt_ros.backends.torch_program import ProgramPolicy  # noqa: E402
from flashrt_ros.core.arena import Arena  # noqa: E402
from flashrt_ros.core.errors import Code, Refusal  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Rig:
    """A decoder over an arena in host memory, without a session."""

    def __init__(self, program: Decoder | None = None) -> None:
        self.program = program or decoder('tiny')
        self.policy = ProgramPolicy(self.program)
        self.arena = Arena(HostDevice(), self.policy.layout())
        self.a = {n: b.array for n, b in self.arena.buffers.items()}
        for name, value in self.policy.initial().items():
            self.a[name][...] = value
        self.bound = self.policy.bind(self.arena.buffers, HostDevice())

    def prefill(self, tokens) -> None:
        self.a['prompt'][:len(tokens)] = tokens
        self.a['prompt_length'][0] = len(tokens)
        self.bound.prefill()

    def tick(self, observation=0.0) -> list[int]:
        self.a['observation'][:] = observation
        self.bound.enqueue()
        return [int(t) for t in self.a['tokens'] if t >= 0]

    def state(self) -> dict[str, bytes]:
        return {n: self.a[n].tobytes() for n, b in self.arena.buffers.items()
                if b.spec.role.name == 'STATE'}

    def put(self, state: dict[str, bytes]) -> None:
        for name, data in state.items():
            self.a[name][...] = np.frombuffer(data, self.a[name].dtype).reshape(self.a[name].shape)


def reference_hidden(program: Decoder, embedded: torch.Tensor) -> torch.Tensor:
    """Return hidden states (T, D) of embedded tokens (T, D), in float64, with no cache at all."""
    c = program.config

    def norm(x, w=None):
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        return y if w is None else y * w

    x = embedded
    for kind, layer in zip(c.pattern, program._weights.layers, strict=True):
        w = {n: v.double() for n, v in layer.items()}
        y = norm(x, w['norm'])
        p = y @ w['in']
        t = len(x)
        if kind == 'A':
            heads = p.view(t, -1, c.head_dim)
            angle = torch.arange(t).double()[:, None] * torch.exp(
                torch.arange(c.head_dim // 2).double() * (-math.log(1e4) / (c.head_dim // 2)))
            cos, sin = angle.cos()[:, None], angle.sin()[:, None]
            a, b = heads.chunk(2, dim=-1)
            turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
            q, k = turned[:, :c.heads], turned[:, c.heads:c.heads + c.kv_heads]
            v = heads[:, c.heads + c.kv_heads:]
            k, v = (y.repeat_interleave(c.heads // c.kv_heads, 1) for y in (k, v))
            scores = torch.einsum('ihd,jhd->hij', q, k) / math.sqrt(c.head_dim)
            scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -math.inf)
            mixed = torch.einsum('hij,jhd->ihd', scores.softmax(-1), v).reshape(t, -1)
        else:
            values = c.value_heads * c.value_dim
            gate, (forget, write) = y @ w['gate'], (y @ w['rates']).chunk(2, -1)
            padded = torch.cat((torch.zeros(c.kernel - 1, c.channels).double(), p))
            y = sum(padded[i:i + t] * w['taps'][i] for i in range(c.kernel))
            y = y * torch.sigmoid(y)
            q, k, v = y.split([c.key_heads * c.key_dim, c.key_heads * c.key_dim, values], -1)
            r = c.value_heads // c.key_heads
            q, k = (norm(z.reshape(t, c.key_heads, c.key_dim)).repeat_interleave(r, 1)
                    for z in (q, k))
            q, k = q / c.key_dim, k / math.sqrt(c.key_dim)
            v = v.reshape(t, c.value_heads, c.value_dim)
            decay = torch.exp(-w['rate'] * torch.nn.functional.softplus(forget + w['bias']))
            beta = torch.sigmoid(write)
            state = torch.zeros(c.value_heads, c.key_dim, c.value_dim).double()
            out = []
            for i in range(t):
                state = state * decay[i, :, None, None]
                error = v[i] - torch.einsum('hk,hkv->hv', k[i], state)
                state = state + torch.einsum('hk,hv->hkv', k[i], error * beta[i, :, None])
                out.append(torch.einsum('hk,hkv->hv', q[i], state))
            mixed = norm(torch.stack(out), w['out_norm']).reshape(t, -1)
            mixed = mixed * gate * torch.sigmoid(gate)
        x = x + mixed @ w['out']
        y = norm(x, w['ffn_norm'])
        gate = y @ w['ffn_gate']
        x = x + (gate * torch.sigmoid(gate) * (y @ w['ffn_up'])) @ w['ffn_out']
    return x


def reference_tokens(program: Decoder, prompt, observation: float, n: int) -> list[int]:
    """Return the first n tokens by recomputing everything for each of them."""
    w = {k: v.double() for k, v in program._weights.ends.items()}
    seen = torch.full((program.config.observation,), observation).double() @ w['observe']
    embedded = w['embed'][torch.tensor(prompt)]
    said = []
    for _ in range(n):
        h = reference_hidden(program, embedded)[-1]
        h = h / torch.sqrt((h * h).mean() + 1e-6) * w['norm']
        said.append(int((h @ w['head']).argmax()))
        embedded = torch.cat((embedded, (w['embed'][said[-1]] + seen)[None]))
    return said


PROMPT = [int(x) for x in np.random.default_rng(1).integers(0, 32, 100)]


@pytest.mark.parametrize(('tokens', 'block'),
                         [(16, 16), (64, 16), (64, 64), (48, 8), (16, 1), (64, 8)])
def test_matrix_form_of_the_scan_equals_one_token_at_a_time(tokens, block):
    torch.manual_seed(tokens)
    heads, groups, k_dim, v_dim = 4, 2, 8, 6
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, groups, k_dim), dim=-1)
            for _ in range(2))
    v = torch.randn(tokens, heads, v_dim)
    log_decay, beta = -torch.rand(tokens, heads), torch.rand(tokens, heads)
    state = torch.randn(heads, k_dim, v_dim)
    out, end = blocks.delta_scan(state, q, k, v, log_decay, beta, block)
    here = state.clone()
    for i in range(tokens):
        after = torch.empty_like(here)
        qi, ki = (x[i].repeat_interleave(2, 0)[:, None] for x in (q, k))
        read = blocks.delta_step(here, after, qi, ki, v[i][:, None],
                                 log_decay[i].exp()[:, None, None], beta[i][:, None, None])
        here = after
        torch.testing.assert_close(out[i], read[:, 0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(end, here, atol=1e-4, rtol=1e-4)


def test_convolution_reads_the_inputs_before_the_chunk():
    torch.manual_seed(0)
    padded, taps = torch.randn(3 + 5, 7), torch.randn(4, 7)
    out = blocks.causal_conv(padded, taps)
    for i in range(5):
        y = (padded[i:i + 4] * taps).sum(0)
        torch.testing.assert_close(out[i], y * torch.sigmoid(y))


def test_rows_above_the_length_never_reach_attention():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 8), torch.randn(40, 2, 8), torch.randn(40, 2, 8)
    length = torch.tensor([17])
    out = blocks.attend_masked(q, k, v, length)
    for row, seen in ((0, 18), (1, 19)):
        kk, vv = (x[:seen].repeat_interleave(2, 1).transpose(0, 1) for x in (k, v))
        want = torch.nn.functional.scaled_dot_product_attention(q[row][:, None], kk, vv)[:, 0]
        torch.testing.assert_close(out[row], want)
    k[19:], v[19:] = math.nan, math.inf
    assert torch.equal(blocks.attend_masked(q, k, v, length), out)


@pytest.mark.parametrize('n', [1, 5, 16, 17, 64, 100])
def test_prefill_equals_the_reference_for_every_length_of_prompt(n):
    rig = Rig()
    rig.prefill(PROMPT[:n])
    w = rig.program._weights
    hidden = reference_hidden(rig.program, w.ends['embed'].double()[torch.tensor(PROMPT[:n])])
    np.testing.assert_allclose(rig.a['tail_hidden'][0], hidden[-1], atol=2e-4)
    assert rig.a['length'][0] == rig.a['mtp_length'][0] == n
    first = [int(rig.a['tokens'][0]), rig.tick()[0]]
    assert first == reference_tokens(rig.program, PROMPT[:n], 0.0, 2)


@pytest.mark.parametrize('observation', [0.0, 0.3])
def test_tokens_equal_the_reference_with_drafts_accepted_and_rejected(observation):
    rig = Rig()
    rig.prefill(PROMPT[:20])
    said, counts = [int(rig.a['tokens'][0])], []
    while len(said) < 48:
        new = rig.tick(observation)
        counts.append(len(new))
        said += new
    assert said[:48] == reference_tokens(rig.program, PROMPT[:20], observation, 48)
    assert {1, 2} == set(counts), 'the run must hold both accepted and rejected drafts'


def test_a_draft_changes_the_speed_and_never_the_tokens():
    def run(break_draft: bool) -> tuple[list[int], int]:
        rig = Rig()
        rig.prefill(PROMPT[:20])
        said, ticks = [], 0
        while len(said) < 60:
            if break_draft:
                rig.a['mtp_kv'][...] = 0.5
            said += rig.tick()
            ticks += 1
        return said[:60], ticks
    (plain, ticks), (other, other_ticks) = run(False), run(True)
    assert plain == other
    assert ticks != other_ticks


def test_prompt_after_decoding_goes_on_from_there():
    rig = Rig()
    rig.prefill(PROMPT[:20])
    said = [int(rig.a['tokens'][0])]
    while len(said) < 9 or rig.a['tail_count'][0] == 1:  # leave a tail of two rows behind
        said += rig.tick()
    held = int(rig.a['length'][0])
    sequence = PROMPT[:20] + said[:held - 20]
    rig.prefill(PROMPT[50:57])
    w = rig.program._weights
    hidden = reference_hidden(rig.program, w.ends['embed'].double()[
        torch.tensor(sequence + PROMPT[50:57])])
    np.testing.assert_allclose(rig.a['tail_hidden'][0], hidden[-1], atol=2e-4)
    # the drafting head must hold what one prefill of the whole sequence gives it
    whole = Rig()
    whole.prefill(sequence + PROMPT[50:57])
    n = held + 7
    assert rig.a['mtp_length'][0] == whole.a['mtp_length'][0] == n
    np.testing.assert_allclose(rig.a['mtp_kv'][:, :, :n], whole.a['mtp_kv'][:, :, :n], atol=1e-3)


def test_p23_equal_partitions_give_equal_bytes():
    whole = Rig()
    whole.prefill(PROMPT[:64])
    middle = whole.state()
    whole.prefill(PROMPT[64:80])
    other = Rig(whole.program)
    other.prefill(PROMPT[20:90])
    other.put(middle)
    other.prefill(PROMPT[64:80])
    assert other.state() == whole.state()
    assert other.tick(0.1) == whole.tick(0.1)


def test_journal_rows_below_the_length_never_change():
    rig = Rig()
    rig.prefill(PROMPT[:30])
    names = {'kv': 'length', 'mtp_kv': 'mtp_length'}

    def rows() -> dict[str, np.ndarray]:
        return {n: rig.a[n][:, :, :rig.a[length][0]].copy() for n, length in names.items()}
    for i in range(40):
        before = rows()
        if i % 10 == 9:
            rig.prefill(PROMPT[:3])
        else:
            rig.tick(0.1 * (i % 7))
        for name, kept in before.items():
            assert np.array_equal(rig.a[name][:, :, :kept.shape[2]], kept), (i, name)


def test_full_context_emits_nothing_and_changes_nothing():
    rig = Rig(decoder('tiny', context=40))
    rig.prefill(PROMPT[:34])
    while rig.tick(0.2):
        pass
    assert 38 < rig.a['length'][0] + 1 <= 40
    before = rig.state()
    assert rig.tick(0.4) == []
    after = rig.state()
    for name in before:  # rows above the length are scratch
        if name not in ('kv', 'mtp_kv'):
            assert before[name] == after[name], name


def test_prompt_that_does_not_fit_is_refused_before_any_byte_changes():
    rig = Rig(decoder('tiny', context=64))
    rig.prefill(PROMPT[:50])
    before = rig.state()
    for prompt, code in ((PROMPT[:20], Code.BACKEND), ([], Code.INVALID_ARGUMENT)):
        with pytest.raises(Refusal) as refused:
            rig.prefill(prompt)
        assert refused.value.code is code
        assert rig.state() == before


@pytest.mark.parametrize('name', ['recurrent', 'conv', 'kv', 'length', 'tail_tokens'])
def test_each_class_of_state_carries_the_future(name):
    rig = Rig()
    rig.prefill(PROMPT[:40])
    origin = rig.state()
    plain = [rig.tick(0.2) for _ in range(30)]
    rig.put({**origin, name: bytes(len(origin[name]))})
    assert [rig.tick(0.2) for _ in range(30)] != plain
    rig.put(origin)
    assert [rig.tick(0.2) for _ in range(30)] == plain


@pytest.mark.parametrize('change', [{'scan': 12}, {'pattern': 'LX'}, {'heads': 3}, {'chunks': ()},
                                    {'attention': 'flash'}, {'size': 'huge'}, {'colour': 1}])
def test_shapes_that_do_not_fit_are_refused(change):
    with pytest.raises(Refusal) as refused:
        decoder(**{'size': 'tiny', **change})
    assert refused.value.code is Code.INVALID_POLICY_FILE


def test_partition_covers_the_prompt_with_the_smallest_last_chunk():
    program = Decoder(DecoderConfig())
    assert program.partition(5) == [16]
    assert program.partition(16) == [16]
    assert program.partition(17) == [64]
    assert program.partition(128) == [64, 64]
    assert program.partition(130) == [64, 64, 16]


def test_nothing_hides_outside_the_buffers():
    rig = Rig()
    before = rig.policy.hidden()
    rig.prefill(PROMPT[:20])
    rig.tick()
    assert rig.policy.hidden() == before
    rig.program._weights.ends['embed'][0, 0] += 1
    assert rig.policy.hidden() != before
