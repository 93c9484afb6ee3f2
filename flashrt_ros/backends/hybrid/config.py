"""Shapes of the hybrid decoder."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from flashrt_ros.core.errors import Code, Refusal


@dataclass(frozen=True)
class DecoderConfig:
    """All fixed at bind. `L` in `pattern` is a gated-delta layer, `A` one of full attention."""

    width: int = 32                  # D
    pattern: str = 'LLLA'
    key_heads: int = 2               # of L layers; each serves value_heads / key_heads heads
    value_heads: int = 4
    key_dim: int = 8                 # per head
    value_dim: int = 8
    heads: int = 4                   # of A layers
    kv_heads: int = 2
    head_dim: int = 8
    ffn: int = 64
    mtp_ffn: int = 32
    vocabulary: int = 32
    kernel: int = 4                  # taps of the causal convolution
    context: int = 256               # rows that the journals may come to
    prompt: int = 128                # tokens of the prompt port
    chunks: tuple[int, ...] = (16, 64)  # tokens of the prefill programs, ascending
    scan: int = 16                   # tokens of one matrix block of the scan; divides all chunks
    observation: int = 6
    dtype: str = 'F32'               # of weights, journals and convolution state: F32 or BF16
    attention: str = 'masked'        # or 'flash': torch's kernel for CUDA and BF16
    generator: str = 'cpu'           # where the random weights are drawn: cpu or cuda
    seed: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, 'chunks', tuple(self.chunks))
        wrong = [
            ('pattern', not self.pattern or set(self.pattern) - {'L', 'A'}),
            ('value_heads', self.value_heads % self.key_heads),
            ('heads', self.heads % self.kv_heads),
            ('head_dim', self.head_dim % 2),
            ('chunks', list(self.chunks) != sorted(set(self.chunks)) or not self.chunks),
            ('scan', self.scan < 1 or any(c % self.scan for c in self.chunks)),
            ('dtype', self.dtype not in ('F32', 'BF16')),
            ('attention', self.attention not in ('masked', 'flash')),
            ('attention', self.attention == 'flash' and self.dtype != 'BF16'),
            ('generator', self.generator not in ('cpu', 'cuda')),
        ]
        for name, bad in wrong:
            if bad:
                raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.{name}: '
                              f'{getattr(self, name)!r} does not fit {self}')

    @classmethod
    def of(cls, size: str, **changes: Any) -> DecoderConfig:
        """Return a named size with changes."""
        if size not in SIZES:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.size: {size!r} is not one of '
                          f'{", ".join(SIZES)}')
        try:
            return replace(SIZES[size], **changes)
        except TypeError as e:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options: {e}') from e

    @property
    def linear(self) -> int:
        """Gated-delta layers."""
        return self.pattern.count('L')

    @property
    def full(self) -> int:
        """Layers of full attention."""
        return self.pattern.count('A')

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values of an L layer."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def rows(self) -> int:
        """Rows of the journals: the context, then room for the padding of a chunk."""
        return self.context + self.chunks[-1]

    def describe(self) -> dict[str, Any]:
        """Return all fields, for digests."""
        return {**asdict(self), 'chunks': list(self.chunks)}


_WIDE = DecoderConfig(
    width=4096, pattern='LLLA', key_heads=16, value_heads=32, key_dim=128, value_dim=128, heads=32,
    kv_heads=8, head_dim=128, ffn=14336, mtp_ffn=4096, vocabulary=16384, context=33280,
    prompt=32768, chunks=(128, 512, 2048), scan=64, observation=32, dtype='BF16',
    attention='flash', generator='cuda')

# `1b` and `7b` share the width, and so the efficiency of a layer; they differ in depth.
SIZES: Mapping[str, DecoderConfig] = {
    'tiny': DecoderConfig(),
    'small': replace(_WIDE, width=512, key_heads=2, value_heads=4, heads=4, kv_heads=2, ffn=1024,
                     mtp_ffn=512, vocabulary=256, context=1024, prompt=512,
                     chunks=(64, 256), generator='cpu'),
    '1b': _WIDE,
    '7b': replace(_WIDE, pattern='LLLA' * 7),
}
