"""Random numbers inside a captured graph: Philox4x32-10 in plain torch operations.

A generator that lives in a library hides state that no capsule holds. Here key and counter are
STATE buffers that the program itself reads and advances: the n-th draw depends on them alone, so a
restore repeats the stream, and a replay draws new numbers every time. (Salmon, Moraes, Dror, Shaw:
Parallel random numbers: as easy as 1, 2, 3; SC 2011. The tests hold its known answers.)

Buffers: `key` (2,) I64, each in 0 .. 2**32 - 1; `counter` (1,) I64, in blocks of four words.
"""
from __future__ import annotations

import math
from typing import TYPE_CHECKING

from flashrt_ros.backends.tensor_program import import_torch
from flashrt_ros.core.layout import BufferSpec, Role

if TYPE_CHECKING:
    from torch import Tensor

_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW = 0xFFFFFFFF
_ROUNDS = 10


def specs(prefix: str = 'rng') -> tuple[BufferSpec, BufferSpec]:
    """Return the STATE buffers `<prefix>_key` and `<prefix>_counter` of one stream."""
    return (BufferSpec(f'{prefix}_key', (2,), 'I64', Role.STATE),
            BufferSpec(f'{prefix}_counter', (1,), 'I64', Role.STATE))


def block(key: Tensor, counter: Tensor) -> Tensor:
    """Return Philox of `counter` (4, n) under `key` (2,) or (2, n): words (4, n), all I64.

    64-bit products wrap: the low 32 bits and, after a shift and a mask, the high ones come out
    right whatever the sign.
    """
    torch = import_torch()
    a, b = counter[0::2], counter[1::2]                       # words 0, 2 and 1, 3: (2, n)
    # Built from scalars: a constant copied from the host cannot be captured.
    factor, step = (torch.cat([torch.full((1, 1), w, dtype=torch.int64, device=key.device)
                               for w in pair]) for pair in ((_M0, _M1), (_W0, _W1)))
    k = key.reshape(2, -1)                                     # (2, 1) or (2, n)
    for i in range(_ROUNDS):
        product = a * factor
        high, low = (product >> 32) & _LOW, product & _LOW
        # (x0, x1, x2, x3) <- (hi(M1 x2) ^ x1 ^ k0, lo(M1 x2), hi(M0 x0) ^ x3 ^ k1, lo(M0 x0))
        a, b = high.flip(0) ^ b ^ k, low.flip(0)
        if i < _ROUNDS - 1:
            k = (k + step) & _LOW
    words: Tensor = torch.stack((a[0], b[0], a[1], b[1]))
    return words


def bits(key: Tensor, counter: Tensor, n: int) -> Tensor:
    """Return `n` words (n,) I64 in 0 .. 2**32 - 1, and advance `counter` in place."""
    torch = import_torch()
    blocks = -(-n // 4)
    index = counter + torch.arange(blocks, device=counter.device)
    zero = torch.zeros_like(index)
    words = block(key, torch.stack((index & _LOW, (index >> 32) & _LOW, zero, zero)))
    counter.add_(blocks)
    return words.t().reshape(-1)[:n]


def uniform(key: Tensor, counter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return F32 values of `shape` in the open interval (0, 1), and advance `counter`."""
    words = bits(key, counter, math.prod(shape))
    return ((words >> 8).float().add_(0.5) * 2.0 ** -24).reshape(shape)


def normal(key: Tensor, counter: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal F32 values of `shape` (Box-Muller), and advance `counter`."""
    torch = import_torch()
    n = math.prod(shape)
    u = uniform(key, counter, (2, -(-n // 2)))
    radius, angle = (-2.0 * u[0].log()).sqrt(), (2.0 * math.pi) * u[1]
    out: Tensor = torch.cat((radius * angle.cos(), radius * angle.sin()))[:n].reshape(shape)
    return out
