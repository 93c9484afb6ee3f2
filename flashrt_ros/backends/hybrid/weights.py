"""Random weights of the hybrid decoder, drawn where they are used."""
from __future__ import annotations

from dataclasses import dataclass, field
import math
from typing import TYPE_CHECKING

from flashrt_ros.backends.hybrid.config import DecoderConfig
from flashrt_ros.backends.tensor_program import import_torch, torch_dtype

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    Weights = dict[str, Tensor]


@dataclass
class DecoderWeights:
    """Matrices are (in, out). One dictionary per layer, one for the drafting head, one for ends."""

    layers: list[Weights] = field(default_factory=list)
    mtp: Weights = field(default_factory=dict)
    ends: Weights = field(default_factory=dict)

    def flat(self) -> Weights:
        """Return all tensors by a unique name."""
        named = {f'{i}.{n}': w for i, layer in enumerate(self.layers) for n, w in layer.items()}
        return {**named, **{f'mtp.{n}': w for n, w in self.mtp.items()}, **self.ends}


def draw(config: DecoderConfig, device: torch.device) -> DecoderWeights:
    """Return weights that depend on the configuration alone (and on torch's generator)."""
    torch = import_torch()
    c = config
    source = torch.device('cpu' if c.generator == 'cpu' else device)
    generator = torch.Generator(device=source).manual_seed(c.seed)
    dtype = torch_dtype(c.dtype)

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        w = torch.empty((rows, columns), dtype=dtype, device=source)
        w.normal_(0.0, scale / math.sqrt(rows), generator=generator)
        placed: Tensor = w.to(device)
        return placed

    def ones(n: int) -> Tensor:
        out: Tensor = torch.ones(n, dtype=dtype, device=device)
        return out

    def spread(n: int, low: float, high: float) -> Tensor:
        out: Tensor = torch.linspace(low, high, n, dtype=torch.float32).to(device)
        return out

    def ffn(width: int) -> Weights:
        return {'ffn_norm': ones(c.width), 'ffn_gate': matrix(c.width, width),
                'ffn_up': matrix(c.width, width), 'ffn_out': matrix(width, c.width)}

    def attention() -> Weights:
        return {'norm': ones(c.width),
                'in': matrix(c.width, (c.heads + 2 * c.kv_heads) * c.head_dim),
                'out': matrix(c.heads * c.head_dim, c.width)}

    def delta() -> Weights:
        values = c.value_heads * c.value_dim
        return {'norm': ones(c.width),
                'in': matrix(c.width, c.channels), 'gate': matrix(c.width, values),
                'rates': matrix(c.width, 2 * c.value_heads),
                'taps': matrix(c.kernel, c.channels),
                # softplus(bias) * rate: heads that forget within tens to thousands of tokens
                'rate': spread(c.value_heads, 0.01, 0.6), 'bias': spread(c.value_heads, -2.0, 0.0),
                'out_norm': ones(c.value_dim), 'out': matrix(values, c.width)}

    return DecoderWeights(
        layers=[{**(delta() if kind == 'L' else attention()), **ffn(c.ffn)} for kind in c.pattern],
        mtp={**attention(), **ffn(c.mtp_ffn), 'hidden_norm': ones(c.width),
             'token_norm': ones(c.width), 'join': matrix(2 * c.width, c.width)},
        ends={'embed': matrix(c.vocabulary, c.width, math.sqrt(c.vocabulary)),
              'observe': matrix(c.observation, c.width), 'norm': ones(c.width),
              'head': matrix(c.width, c.vocabulary)})
