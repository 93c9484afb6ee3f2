"""The hybrid decoder as a `TensorProgram`: prefill in chunks, decoding with one draft per tick.

A tick takes in an observation and emits one or two action tokens:

1. The drafting head (MTP) reads the rows that are new to it, each a pair of the trunk's hidden
   state at i - 1 and token i, appends them to its own journal and guesses the token after the last.
2. The trunk reads the last token and the guess as two rows. What it says after the first row is the
   next token; if the guess was right, what it says after the second is the one after that.
3. Recurrent and convolution state become what they were after the accepted rows. Both rows lie in
   the journal already: a rejected one lies above the length, where the next tick overwrites it.

Where the context is full a tick emits nothing and changes nothing.

`prefill` appends the prompt to whatever state there is, in chunks of fixed size: full ones of the
largest, then the smallest that holds the rest, padded. Padding reaches no state. The partition
depends only on where a prompt begins and how long it is, and equal partitions give equal bytes.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.digests import source_digest
from flashrt_ros.backends.hybrid import blocks, trunk, weights
from flashrt_ros.backends.hybrid.config import DecoderConfig
from flashrt_ros.backends.tensor_program import Steps, Tensors, import_torch
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Layout, Role, digest_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

DRAFTS = 1
TAIL = 1 + DRAFTS  # rows that a tick can append


class Decoder:
    """A policy that speaks action tokens. All its memory is in the buffers of `layout`."""

    precision = 'high'  # TF32 for the F32 products of the scan; their inputs are BF16 anyway

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self._weights = weights.DecoderWeights()

    def layout(self) -> Layout:
        """Return ports and state; `kv` and `mtp_kv` are journals."""
        c = self.config
        heads = (c.kv_heads, c.head_dim)
        state = partial(BufferSpec, role=Role.STATE)
        specs = [
            BufferSpec('observation', (c.observation,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('prompt', (c.prompt,), 'I32', Role.INPUT),
            BufferSpec('prompt_length', (1,), 'I64', Role.INPUT),
            state('prompt_cursor', (1,), 'I64'),
            state('length', (1,), 'I64'),
            state('mtp_length', (1,), 'I64'),
            state('tail_hidden', (TAIL, c.width), c.dtype),   # the trunk's, newest last
            state('tail_tokens', (TAIL,), 'I64'),
            state('tail_count', (1,), 'I64'),                 # rows of the tail that are new
            state('mtp_kv', (1, 2, c.rows + 1, *heads), c.dtype, journal_axis=2,
                  length='mtp_length'),
            BufferSpec('tokens', (TAIL,), 'I64', Role.OUTPUT),  # -1: none
            BufferSpec('actions', (1, 1), 'F32', Role.OUTPUT),  # the newest token in -1 .. 1
        ]
        if c.full:
            specs.append(state('kv', (c.full, 2, c.rows, *heads), c.dtype, journal_axis=2,
                               length='length'))
        if c.linear:
            specs += [state('recurrent', (c.linear, c.value_heads, c.key_dim, c.value_dim), 'F32'),
                      state('conv', (c.linear, c.kernel - 1, c.channels), c.dtype)]
        return Layout(specs)

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return one tail row: token 0 after nothing."""
        return {'tail_count': np.ones(1, np.int64)}

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the configuration, which the weights are drawn from, and the code."""
        code = source_digest(Decoder, blocks, trunk, weights)
        return {'weights': digest_of([self.config.describe(), code])}, {}

    def to(self, device: torch.device) -> None:
        """Draw the weights."""
        self._weights = weights.draw(self.config, device)

    def constants(self) -> Mapping[str, Any]:
        """Return the weights."""
        return dict(self._weights.flat())

    def programs(self) -> Mapping[str, Callable[[Tensors], None]]:
        """Return `tick`, `begin` of a prompt, and one `chunk_<tokens>` per size."""
        return {'tick': self.tick, 'begin': self.begin,
                **{f'chunk_{n}': partial(self.chunk, tokens=n) for n in self.config.chunks}}

    # -- host part of a prompt ------------------------------------------------------------

    def prefill(self, steps: Steps) -> None:
        """Append the prompt. Refuses one that does not fit, before any program runs."""
        tokens = int(steps.read('prompt_length')[0])
        length = int(steps.read('length')[0])
        c = self.config
        if not 0 < tokens <= c.prompt:
            raise Refusal(Code.INVALID_ARGUMENT, f'prompt_length: {tokens} is not within 1 to '
                          f'{c.prompt}')
        if length + tokens + TAIL > c.context:
            raise Refusal(Code.BACKEND, f'a prompt of {tokens} tokens after {length} does not fit '
                          f'into a context of {c.context}; reset or restore an earlier capsule')
        steps.run('begin')
        for size in self.partition(tokens):
            steps.run(f'chunk_{size}')

    def partition(self, tokens: int) -> list[int]:
        """Return the chunks that take in a prompt of so many tokens."""
        *_, largest = self.config.chunks
        whole, rest = divmod(tokens, largest)
        return [largest] * whole + [s for s in self.config.chunks if s >= rest][:min(rest, 1)]

    def begin(self, t: Tensors) -> None:
        """Point at the first token of the prompt."""
        t['prompt_cursor'].zero_()

    # -- programs -------------------------------------------------------------------------

    def chunk(self, t: Tensors, tokens: int) -> None:
        """Append up to `tokens` tokens of the prompt and emit the one that follows."""
        torch = import_torch()
        c, w = self.config, self._weights
        step = torch.arange(tokens, device=t['length'].device)
        valid = (t['prompt_length'] - t['prompt_cursor']).clamp(0, tokens)             # (1,)
        at = (t['prompt_cursor'] + step).clamp_(max=c.prompt - 1)
        ids = t['prompt'].index_select(0, at).long().clamp_(0, c.vocabulary - 1)       # (T,)
        embedded = w.ends['embed'].index_select(0, ids)                                # (T, D)
        hidden = trunk.prefill(c, w, t, embedded, valid)                               # (T, D)

        # Rows that the drafting head has not read: perhaps one of the tail, then the prompt, its
        # first token in the place of what had been emitted.
        newest = t['tail_hidden'].index_select(0, t['tail_count'] - 1)
        rows = trunk.pairs(c, w, torch.cat((t['tail_hidden'][:1], newest, hidden[:-1])),
                           torch.cat((t['tail_tokens'][:1], ids)))
        spare = torch.full_like(valid, c.rows)   # a row of the journal that nothing reads
        first = torch.where(t['tail_count'] == TAIL, t['length'] - 1, spare)
        trunk.append_pairs(c, w, t, rows, torch.cat((first, t['length'] + step)))

        last = hidden.index_select(0, (valid - 1).clamp_(min=0))                       # (1, D)
        token = trunk.speak(w, last)                                                   # (1,)
        some = valid > 0
        t['length'].add_(valid)
        t['mtp_length'].copy_(torch.where(some, t['length'], t['mtp_length']))
        t['tail_hidden'][:1].copy_(torch.where(some[:, None], last, t['tail_hidden'][:1]))
        t['tail_tokens'][:1].copy_(torch.where(some, token, t['tail_tokens'][:1]))
        t['tail_count'].copy_(torch.where(some, torch.ones_like(valid), t['tail_count']))
        t['prompt_cursor'].add_(valid)
        self._emit(t, torch.cat((token, torch.full_like(token, -1))), token)

    def tick(self, t: Tensors) -> None:
        """Emit one or two tokens."""
        torch = import_torch()
        c, w = self.config, self._weights
        seen = (t['observation'].to(w.ends['observe'].dtype) @ w.ends['observe'])      # (D,)
        room = t['length'] + TAIL <= c.context                                         # (1,)

        draft = trunk.draft(c, w, t)                                                   # (1,)
        last = t['tail_tokens'].index_select(0, t['tail_count'] - 1)
        ids = torch.cat((last, draft))
        hidden, advanced = trunk.verify(c, w, t, w.ends['embed'].index_select(0, ids) + seen)
        said = trunk.speak(w, hidden)                                                  # (2,)
        accepted = room & (said[:1] == draft)
        count = room.long() + accepted.long()                                          # 0, 1, 2

        advanced(count)
        t['mtp_length'].copy_(torch.where(room, t['length'] + 1, t['mtp_length']))
        t['length'].add_(count)
        t['tail_hidden'].copy_(torch.where(room[:, None], hidden, t['tail_hidden']))
        t['tail_tokens'].copy_(torch.where(room, said, t['tail_tokens']))
        t['tail_count'].copy_(torch.where(room, count, t['tail_count']))
        none = torch.full_like(said, -1)
        keep = torch.arange(TAIL, device=count.device) < count
        newest = t['tail_tokens'].index_select(0, t['tail_count'] - 1)
        self._emit(t, torch.where(keep, said, none), newest)

    def _emit(self, t: Tensors, tokens: Tensor, newest: Tensor) -> None:
        t['tokens'].copy_(tokens)
        scale = 2.0 / max(self.config.vocabulary - 1, 1)
        t['actions'].copy_((newest.float() * scale - 1.0).view(1, 1))
