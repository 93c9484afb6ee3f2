"""The arithmetic of the hybrid decoder: pure functions on tensors, fixed shapes, no state.

Axes in names: T tokens, N scan blocks, C tokens of a block, H value heads, G key heads, K key
dim, V value dim, D width, R journal rows. Nothing branches on a value, so all of it is captured.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from flashrt_ros.backends.tensor_program import import_torch

if TYPE_CHECKING:
    from torch import Tensor


def norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Return x over the root mean square of its last axis."""
    rms: Tensor = import_torch().nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)
    return rms


def write_rows(buffer: Tensor, rows: Tensor, at: Tensor) -> None:
    """Put `rows` (T, …) at row numbers `at` (T,), all different, of `buffer` (R, …), in place.

    In deterministic mode torch sorts the row numbers first, for the case that two are equal. Here
    none are, so the plain kernel gives the same bytes each time.
    """
    torch = import_torch()
    strict = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        buffer.index_copy_(0, at, rows)
    finally:
        torch.use_deterministic_algorithms(strict)


def causal_conv(padded: Tensor, taps: Tensor) -> Tensor:
    """Convolve each channel along time, then SiLU.

    padded: (kernel - 1 + T, channels), the last inputs before this chunk in front; taps: (kernel,
    channels) -> (T, channels)
    """
    torch = import_torch()
    kernel = taps.shape[0]
    tokens = padded.shape[0] - kernel + 1
    y = padded[:tokens] * taps[0]
    for i in range(1, kernel):
        y.addcmul_(padded[i:i + tokens], taps[i])
    out: Tensor = torch.nn.functional.silu(y, inplace=True)
    return out


def delta_step(state: Tensor, out: Tensor, q: Tensor, k: Tensor,
               v: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Advance the gated delta rule by one token: `out` becomes the state after it.

    S' = a S + k (beta (v - k a S)); returns q S'. state, out: (H, K, V) F32; q, k: (H, 1, K);
    v: (H, 1, V); decay a, beta: (H, 1, 1) -> (H, 1, V)
    """
    torch = import_torch()
    torch.mul(state, decay, out=out)
    update = (v - torch.bmm(k, out)) * beta
    out.baddbmm_(k.transpose(1, 2), update)
    read: Tensor = torch.bmm(q, out)
    return read


def delta_scan(state: Tensor, q: Tensor, k: Tensor, v: Tensor,
               log_decay: Tensor, beta: Tensor, block: int
               ) -> tuple[Tensor, Tensor]:
    """Advance the gated delta rule over T tokens in matrix form; return `(outputs, state)`.

    Within a block of C tokens with summed log decays g, the updates u solve a triangular system:
    (1 + N) U = beta V - beta e^g K S, N_ij = beta_i e^(g_i - g_j) k_i k_j for j < i. Its inverse is
    a product of log2 C factors, since N is nilpotent. What a block does to the state is then one
    affine map S -> A S + B, found for all blocks at once; only applying them is sequential.
    (Yang, Kautz, Hatamizadeh: Gated delta networks, 2024, eliminate in a kernel of their own; one
    matrix product per block is what plain torch can do in a single launch.)

    state: (H, K, V) F32; q, k: (T, G, K); v: (T, H, V); log_decay, beta: (T, H) F32
    -> (T, H, V) F32, (H, K, V)
    """
    torch = import_torch()
    tokens, heads, value_dim = v.shape
    groups, key_dim = k.shape[1:]
    n, c, r = tokens // block, block, heads // groups
    f32 = torch.float32

    def blocks(x: Tensor, dim: int) -> Tensor:
        """(T, X, dim) -> (N X, C, dim) F32, one copy."""
        out = x.new_empty((n, x.shape[1], c, dim), dtype=f32)
        out.copy_(x.reshape(n, c, x.shape[1], dim).transpose(1, 2))
        return out.view(-1, c, dim)

    # F64: a sum of logs that is off in the third digit is another decay. (cumsum is refused in
    # deterministic mode on CUDA.)
    upper = torch.ones((c, c), dtype=torch.float64, device=v.device).triu()
    g = (log_decay.view(n, c, heads).transpose(1, 2).double() @ upper).float()     # (N, H, C)
    b = beta.view(n, c, heads).transpose(1, 2)                                     # (N, H, C)
    total = g[..., -1:]                                                            # (N, H, 1)
    grown = g.exp()
    k_g = blocks(k, key_dim)                                                       # (N G, C, K)
    q_g = blocks(q, key_dim)
    k_nh = k_g.view(n, groups, 1, c, key_dim).expand(-1, -1, r, -1, -1)
    q_nh = q_g.view(n, groups, 1, c, key_dim).expand(-1, -1, r, -1, -1)
    five = (n, groups, r, c)

    # Decay from j to i, zero above the diagonal (before exp: above it the exponent may be large).
    causal = torch.ones((c, c), dtype=torch.bool, device=v.device).tril_()
    decay = torch.where(causal, g[..., :, None] - g[..., None, :], -math.inf).exp_()
    decay = decay.view(*five, c)
    kk = torch.bmm(k_g, k_g.transpose(1, 2)).view(n, groups, 1, c, c)
    qk = torch.bmm(q_g, k_g.transpose(1, 2)).view(n, groups, 1, c, c)
    power = (kk * decay).mul_(b.reshape(*five, 1)).tril_(-1).view(-1, c, c).neg_()  # -N
    within = (qk * decay).view(-1, c, c)                                            # (N H, C, C)
    eye = torch.eye(c, dtype=f32, device=v.device)
    inverse = eye + power                           # (1 - (-N))^-1 = (1 - N)(1 + N^2)(1 + N^4) …
    for _ in range(max(0, math.ceil(math.log2(c)) - 1)):
        power = torch.bmm(power, power)
        inverse = torch.baddbmm(inverse, inverse, power)

    # Right-hand sides side by side, the second negated: what solves them is U0 | -W.
    right = v.new_empty((n, heads, c, value_dim + key_dim), dtype=f32)
    torch.mul(v.reshape(n, c, heads, value_dim).transpose(1, 2), b[..., None],
              out=right[..., :value_dim])
    torch.mul(k_nh, (b * -grown).reshape(*five, 1),
              out=right[..., value_dim:].view(*five, key_dim))
    solved = torch.bmm(inverse, right.view(-1, c, value_dim + key_dim))
    k_end = (k_nh * (total - g).exp_().reshape(*five, 1)).view(-1, c, key_dim)      # (N H, C, K)
    # B | A of each block, behind the state it starts from; B turns into the state after it.
    maps = v.new_empty((n + 1, heads, key_dim, value_dim + key_dim), dtype=f32)
    torch.bmm(k_end.transpose(1, 2), solved, out=maps[1:].view(-1, key_dim, value_dim + key_dim))
    maps[1:, ..., value_dim:].diagonal(dim1=-2, dim2=-1).add_(total.exp())
    maps[0, ..., :value_dim].copy_(state)
    for i in range(n):
        maps[i + 1, ..., :value_dim].baddbmm_(maps[i + 1, ..., value_dim:],
                                              maps[i, ..., :value_dim])

    before = maps[:-1].view(-1, key_dim, value_dim + key_dim)[..., :value_dim]
    update = torch.baddbmm(solved[..., :value_dim], solved[..., value_dim:], before)
    out = torch.bmm((q_nh * grown.reshape(*five, 1)).view(-1, c, key_dim), before)
    out.baddbmm_(within, update)
    return (out.view(n, heads, c, value_dim).transpose(1, 2).reshape(tokens, heads, value_dim),
            maps[-1, ..., :value_dim])


def rotary(positions: Tensor, head_dim: int, base: float = 10000.0
           ) -> tuple[Tensor, Tensor]:
    """Return cosine and sine (T, 1, head_dim / 2) F32 of row numbers (T,)."""
    torch = import_torch()
    half = head_dim // 2
    inverse = torch.arange(half, device=positions.device, dtype=torch.float32)
    inverse = (inverse * (-math.log(base) / half)).exp()
    angle = positions[:, None, None].float() * inverse
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of (T, heads, head_dim) by position, in F32; return x's type."""
    torch = import_torch()
    a, b = x.float().chunk(2, dim=-1)
    turned: Tensor = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned


def attend_masked(q: Tensor, k: Tensor, v: Tensor, length: Tensor
                  ) -> Tensor:
    """Attention of T tokens that follow `length` (1,) rows over the journal, mask by length.

    Reads all rows whatever the length, and lets no row above a token's own reach its result, not
    even one that is no number. q: (T, heads, head_dim); k, v: (R, kv_heads, head_dim)
    """
    torch = import_torch()
    tokens, heads, dim = q.shape
    rows, kv_heads, _ = k.shape
    row = torch.arange(rows, device=q.device)
    hidden = row[None, :] > length + torch.arange(tokens, device=q.device)[:, None]   # (T, R)
    q_h = q.view(tokens, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = torch.bmm(q_h, k.permute(1, 2, 0)).float() * (1.0 / math.sqrt(dim))
    scores = scores.view(kv_heads, -1, tokens, rows).masked_fill_(hidden, -math.inf)
    p = scores.softmax(dim=-1).to(q.dtype).view(kv_heads, -1, rows)
    v_seen = v.masked_fill((row >= length + tokens)[:, None, None], 0)
    mixed: Tensor = torch.bmm(p, v_seen.transpose(0, 1))             # (kv_heads, heads/kv T, dim)
    return mixed.view(heads, tokens, dim).transpose(0, 1)


def attend_flash(q: Tensor, k: Tensor, v: Tensor, length: Tensor
                 ) -> Tensor:
    """As `attend_masked`, by torch's kernel for sequences whose lengths lie on the device.

    Work grows with the length, and one captured program serves all lengths.
    """
    torch = import_torch()
    tokens, dim = q.shape[0], q.shape[-1]
    ends = torch.zeros(2, dtype=torch.int32, device=q.device)
    q_ends = ends + tokens
    q_ends[:1].zero_()
    ends[1:].copy_(length + tokens)
    return _flash(q, k, v, q_ends, ends, tokens, causal=True, scale=1.0 / math.sqrt(dim))[0]


def attend_split(q: Tensor, k: Tensor, v: Tensor, length: Tensor,
                 split: int = 512) -> Tensor:
    """As `attend_flash` for a few tokens after many rows: stretches of the rows side by side.

    One token would keep a handful of multiprocessors busy for the whole journal. So each stretch
    of `split` rows is a sequence of its own, and their results are joined by their log sums.
    """
    torch = import_torch()
    tokens, heads, dim = q.shape
    rows = k.shape[0]
    n = -(-rows // split)
    scale = 1.0 / math.sqrt(dim)
    edge = torch.arange(n + 1, device=q.device, dtype=torch.int32)
    k_ends = torch.minimum(edge * split, length.int())
    out, lse = _flash(q.repeat(n, 1, 1), k, v, edge * tokens, k_ends, tokens, causal=False,
                      scale=scale, longest=split)
    # lse: (heads, N T); of an empty stretch the kernel says what it likes
    empty = (edge[:-1] * split >= length)[None, :, None]                             # (1, N, 1)
    lse = lse.view(heads, n, tokens).masked_fill(empty, -math.inf)
    # the tokens' own rows, gathered by number since their place is known on the device only
    own = length + torch.arange(tokens, device=q.device)
    k_own = k.index_select(0, own).repeat_interleave(heads // k.shape[1], dim=1)     # (T, heads, d)
    v_own = v.index_select(0, own).repeat_interleave(heads // v.shape[1], dim=1)
    scores = torch.bmm(q.transpose(0, 1).float(), k_own.permute(1, 2, 0).float()) * scale
    later = torch.ones((tokens, tokens), dtype=torch.bool, device=q.device).triu_(1)
    scores = scores.masked_fill_(later, -math.inf)                                   # (heads, T, T)
    weights = torch.cat((lse.transpose(1, 2), scores), dim=-1).softmax(dim=-1)
    values = torch.cat((out.view(n, tokens, heads, dim).permute(2, 1, 0, 3).float(),
                        v_own.transpose(0, 1)[:, None].expand(-1, tokens, -1, -1).float()), dim=2)
    mixed: Tensor = (weights[..., None] * values).sum(dim=2)                         # (heads, T, d)
    return mixed.transpose(0, 1).to(q.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, q_ends: Tensor,
           k_ends: Tensor, longest_q: int, *, causal: bool, scale: float,
           longest: int | None = None) -> tuple[Tensor, Tensor]:
    """Return `(attention, log sums)` of the sequences between `q_ends` and `k_ends`, I32."""
    op: Any = import_torch().ops.aten._flash_attention_forward
    out, lse = op(q, k, v, q_ends, k_ends, longest_q, longest or k.shape[0], 0.0, causal, False,
                  scale=scale)[:2]
    return out, lse
