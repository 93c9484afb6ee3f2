"""The layers of the hybrid decoder over its buffers: prefill, the verifying step, the draft.

T tokens, D width. Journals and convolution state are written in place; recurrent and convolution
state after a verifying step only once it is known how many of its rows count.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from flashrt_ros.backends.hybrid import blocks
from flashrt_ros.backends.hybrid.config import DecoderConfig
from flashrt_ros.backends.tensor_program import Tensors, import_torch

if TYPE_CHECKING:
    from torch import Tensor

    from flashrt_ros.backends.hybrid.weights import DecoderWeights, Weights

    Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def _attend(c: DecoderConfig, tokens: int) -> Attend:
    if c.attention == 'masked':
        return blocks.attend_masked
    return blocks.attend_split if tokens < 16 else blocks.attend_flash


def _ffn(w: Weights, x: Tensor) -> Tensor:
    """Add the gated feed-forward to x, in place."""
    torch = import_torch()
    normed = blocks.norm(x, w['ffn_norm'])
    # Two products instead of one: on halves of a wide one the next two passes run at half speed.
    gate = torch.nn.functional.silu(normed @ w['ffn_gate'], inplace=True)              # (T, F)
    return x.addmm_(gate.mul_(normed @ w['ffn_up']), w['ffn_out'])


def _attention(c: DecoderConfig, w: Weights, x: Tensor, kv: Tensor,
               length: Tensor, positions: Tensor,
               turn: tuple[Tensor, Tensor]) -> Tensor:
    """Append keys and values of x (T, D) to kv (2, R, kv_heads, head_dim), attend, add to x."""
    tokens = x.shape[0]
    heads = (blocks.norm(x, w['norm']) @ w['in']).view(tokens, -1, c.head_dim)
    both = blocks.rotate(heads[:, :c.heads + c.kv_heads], *turn)
    blocks.write_rows(kv[0], both[:, c.heads:], positions)
    blocks.write_rows(kv[1], heads[:, c.heads + c.kv_heads:], positions)
    mixed = _attend(c, tokens)(both[:, :c.heads], kv[0], kv[1], length)
    return _ffn(w, x.addmm_(mixed.reshape(tokens, -1), w['out']))


class _Delta:
    """What an L layer projects from x (T, D) and the last inputs of its convolution."""

    def __init__(self, c: DecoderConfig, w: Weights, x: Tensor, conv: Tensor) -> None:
        torch = import_torch()
        tokens = x.shape[0]
        normed = blocks.norm(x, w['norm'])
        self.gate = normed @ w['gate']
        forget, write = (normed @ w['rates']).chunk(2, dim=-1)
        self.padded = x.new_empty((c.kernel - 1 + tokens, c.channels))
        self.padded[:c.kernel - 1].copy_(conv)
        torch.mm(normed, w['in'], out=self.padded[c.kernel - 1:])
        keys = c.key_heads * c.key_dim
        mixed = blocks.causal_conv(self.padded, w['taps'])                  # (T, channels)
        q, k, v = mixed[:, :keys], mixed[:, keys:2 * keys], mixed[:, 2 * keys:]
        # x / |x| = norm(x) / sqrt(K); queries carry another 1 / sqrt(K)
        self.q = blocks.norm(q.reshape(tokens, c.key_heads, c.key_dim)) * (1.0 / c.key_dim)
        self.k = blocks.norm(k.reshape(tokens, c.key_heads, c.key_dim)) * (c.key_dim ** -0.5)
        self.v = v.reshape(tokens, c.value_heads, c.value_dim)
        self.log_decay = torch.nn.functional.softplus(forget.float() + w['bias']) * -w['rate']
        self.beta = write.float().sigmoid()                             # both (T, H)
        self._w, self._x = w, x

    def finish(self, out: Tensor) -> Tensor:
        """Gate and project what the rule read (T, H, V), add it to x, and run the FFN."""
        torch = import_torch()
        w, x = self._w, self._x
        normed = blocks.norm(out.to(x.dtype), w['out_norm']).reshape(x.shape[0], -1)
        gated = torch.nn.functional.silu(self.gate, inplace=True).mul_(normed)
        return _ffn(w, x.addmm_(gated, w['out']))


def prefill(c: DecoderConfig, w: DecoderWeights, t: Tensors, x: Tensor,
            valid: Tensor) -> Tensor:
    """Run T tokens of which `valid` (1,) count; write all state but the lengths. (T, D) -> same."""
    torch = import_torch()
    tokens = x.shape[0]
    step = torch.arange(tokens, device=x.device)
    positions = t['length'] + step
    turn = blocks.rotary(positions, c.head_dim)
    counts = (step < valid)[:, None]                                                   # (T, 1)
    ends = valid + torch.arange(c.kernel - 1, device=x.device)
    linear = full = 0
    for kind, layer in zip(c.pattern, w.layers, strict=True):
        if kind == 'A':
            x = _attention(c, layer, x, t['kv'][full], t['length'], positions, turn)
            full += 1
            continue
        d = _Delta(c, layer, x, t['conv'][linear])
        # decay 1 and beta 0: padding leaves the state as it is
        out, state = blocks.delta_scan(t['recurrent'][linear], d.q, d.k, d.v,
                                       d.log_decay * counts, d.beta * counts, c.scan)
        t['recurrent'][linear].copy_(state)
        t['conv'][linear].copy_(d.padded.index_select(0, ends))
        x = d.finish(out)
        linear += 1
    return x


def verify(c: DecoderConfig, w: DecoderWeights, t: Tensors, x: Tensor
           ) -> tuple[Tensor, Callable[[Tensor], None]]:
    """Run the last token and its draft (2, D); return hidden states and how to settle.

    Calling the second with the number of rows that count (1,) writes recurrent and convolution
    state; before that only rows above the journal's length are written.
    """
    torch = import_torch()
    tokens = x.shape[0]
    positions = t['length'] + torch.arange(tokens, device=x.device)
    turn = blocks.rotary(positions, c.head_dim)
    if c.linear:
        after = x.new_empty((tokens, *t['recurrent'].shape), dtype=torch.float32)
    padded = []
    linear = full = 0
    for kind, layer in zip(c.pattern, w.layers, strict=True):
        if kind == 'A':
            x = _attention(c, layer, x, t['kv'][full], t['length'], positions, turn)
            full += 1
            continue
        d = _Delta(c, layer, x, t['conv'][linear])
        padded.append(d.padded)
        repeat = c.value_heads // c.key_heads
        q = d.q.float().repeat_interleave(repeat, dim=1)[:, :, None]               # (T, H, 1, K)
        k = d.k.float().repeat_interleave(repeat, dim=1)[:, :, None]
        v = d.v.float()[:, :, None]
        decay, beta = d.log_decay.exp()[..., None, None], d.beta[..., None, None]
        state = t['recurrent'][linear]
        read = []
        for i in range(tokens):
            read.append(blocks.delta_step(state, after[i, linear], q[i], k[i], v[i], decay[i],
                                          beta[i]))
            state = after[i, linear]
        x = d.finish(torch.stack(read)[:, :, 0])
        linear += 1

    def settle(count: Tensor) -> None:
        if not c.linear:
            return
        here = t['recurrent']
        for i in range(tokens):
            torch.where(count == i + 1, after[i], here, out=here)
        ends = count + torch.arange(c.kernel - 1, device=count.device)
        t['conv'].copy_(torch.stack(padded).index_select(1, ends))
    return x, settle


def pairs(c: DecoderConfig, w: DecoderWeights, hidden: Tensor, ids: Tensor
          ) -> Tensor:
    """Return the drafting head's input rows: hidden state at i - 1 (T, D) with token i (T,)."""
    torch = import_torch()
    token = w.ends['embed'].index_select(0, ids)
    joined = torch.cat((blocks.norm(hidden, w.mtp['hidden_norm']),
                        blocks.norm(token, w.mtp['token_norm'])), dim=-1)
    rows: Tensor = joined @ w.mtp['join']
    return rows


def append_pairs(c: DecoderConfig, w: DecoderWeights, t: Tensors, rows: Tensor,
                 positions: Tensor) -> None:
    """Write the drafting head's keys and values of rows (T, D) at `positions` (T,)."""
    keys = c.heads * c.head_dim
    both = (blocks.norm(rows, w.mtp['norm']) @ w.mtp['in'][:, keys:]).view(
        rows.shape[0], -1, c.head_dim)
    turn = blocks.rotary(positions, c.head_dim)
    blocks.write_rows(t['mtp_kv'][0, 0], blocks.rotate(both[:, :c.kv_heads], *turn), positions)
    blocks.write_rows(t['mtp_kv'][0, 1], both[:, c.kv_heads:], positions)


def draft(c: DecoderConfig, w: DecoderWeights, t: Tensors) -> Tensor:
    """Append the tail's pairs to the drafting head's journal; return its guess (1,)."""
    torch = import_torch()
    x = pairs(c, w, t['tail_hidden'], t['tail_tokens'])
    positions = t['mtp_length'] + torch.arange(x.shape[0], device=x.device)
    turn = blocks.rotary(positions, c.head_dim)
    x = _attention(c, w.mtp, x, t['mtp_kv'][0], t['mtp_length'], positions, turn)
    return speak(w, x.index_select(0, t['tail_count'] - 1))


def speak(w: DecoderWeights, hidden: Tensor) -> Tensor:
    """Return the likeliest token after each hidden state (T, D) -> (T,)."""
    logits = blocks.norm(hidden, w.ends['norm']) @ w.ends['head']
    return logits.float().argmax(dim=-1)
