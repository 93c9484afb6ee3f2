"""Small policies in numpy: the reference for tests, documentation and the conformance suite.

Each keeps all of its memory in declared buffers, so it shows what a policy of one's own for the
`host` backend looks like: a factory `module:function` that returns an object with `layout`,
`identity`, `initial`, `bind`, `hidden`. `NumpyPolicy` supplies all but the specs and the tick.

`recurrent`  one step per tick, hidden state, noise from a counter-based generator
`chunked`    a chunk of actions per tick, observation history, GRU; rows can be numbered
`journal`    key and value rows appended per tick, attention over them, prefill on a prompt
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.digests import attribute_digests, source_digest
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Layout, Role, digest_of
from flashrt_ros.core.seam import Buffer, Device

Array = NDArray[Any]
Arrays = Mapping[str, Array]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # SplitMix64 (Steele, Lea, Flood 2014)
_MIX = ((np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)),
        (np.uint64(27), np.uint64(0x94D049BB133111EB)))


def draw_bits(key: Array, counter: Array, n: int) -> NDArray[np.uint64]:
    """Return `n` random words and advance `counter` by `n`; both are `(1,)` U64 buffers.

    The k-th word depends on key and k alone: what a restore puts back is all there is.
    """
    z = key + (counter + np.arange(1, n + 1, dtype=np.uint64)) * _GAMMA
    for shift, factor in _MIX:
        z = (z ^ (z >> shift)) * factor
    counter += np.uint64(n)
    return np.asarray(z ^ (z >> np.uint64(31)), np.uint64)


def draw_normal(key: Array, counter: Array, n: int) -> NDArray[np.float32]:
    """Return `n` standard normal values (Box-Muller) and advance `counter`."""
    bits = draw_bits(key, counter, 2 * n)
    u = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0 ** -53
    return (np.sqrt(-2.0 * np.log(u[:n])) * np.cos(2.0 * np.pi * u[n:])).astype(np.float32)


def _weights(seed: int, **shapes: tuple[int, ...]) -> dict[str, NDArray[np.float32]]:
    """Return read-only matrices that depend on nothing but seed and shapes."""
    key, counter = np.array([seed], np.uint64), np.zeros(1, np.uint64)
    out = {}
    for name, shape in shapes.items():
        w = draw_normal(key, counter, int(np.prod(shape))).reshape(shape)
        out[name] = w / np.float32(np.sqrt(shape[-1]))
        out[name].flags.writeable = False
    return out


class NumpyPolicy:
    """A policy whose tick is a Python function over arrays. Subclasses set `specs`."""

    def __init__(self, specs: tuple[BufferSpec, ...], weights: Mapping[str, Array],
                 initial: Mapping[str, Array] | None = None, **settings: object) -> None:
        self._specs = specs
        self._w = weights
        self._initial = dict(initial or {})
        self._settings = settings

    def tick(self, b: Arrays) -> None:
        """Read INPUT and STATE, write STATE and OUTPUT of `b`."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """Return the declared buffers."""
        return Layout(self._specs)

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return digests of weights, settings and source, and the library that computes."""
        sha = hashlib.sha256()
        for name, w in sorted(self._w.items()):
            sha.update(f'{name} {w.dtype} {w.shape}'.encode() + w.tobytes())
        settings = digest_of({k: str(v) for k, v in self._settings.items()})
        return ({'weights': digest_of([sha.hexdigest(), settings, source_digest(type(self))])},
                {'numpy': np.__version__})

    def initial(self) -> Mapping[str, Array]:
        """Return initial values of STATE."""
        return self._initial

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> HostBound:
        """Return the tick over the buffers' arrays."""
        return HostBound(self.tick, arrays_of(buffers))

    def hidden(self) -> Mapping[str, str]:
        """Return digests of all attributes: a tick must change none of them."""
        return attribute_digests(self)

    def close(self) -> None:
        """Nothing to free."""


class HostBound:
    """A Python function over the arrays of one live set."""

    def __init__(self, tick: Callable[[Arrays], None], arrays: Arrays) -> None:
        self._tick = tick
        self._arrays = arrays

    def enqueue(self) -> None:
        """Run one tick."""
        self._tick(self._arrays)

    def close(self) -> None:
        """Let go of the arrays."""
        self._arrays = {}


def arrays_of(buffers: Mapping[str, Buffer]) -> dict[str, Array]:
    """Return the arrays of all buffers. Raises where the CPU cannot reach one."""
    out = {}
    for name, buffer in buffers.items():
        if buffer.array is None:
            raise Refusal(Code.UNSUPPORTED, f'buffer {name} lies where the CPU cannot reach it; '
                          'this policy runs on the host only')
        out[name] = buffer.array
    return out


def _gru(w: Arrays, x: Array, h: Array) -> None:
    """Advance `h` (H,) by one step on `x` (X,), in place; gates in torch's order r, z, n."""
    n = h.size
    gi, gh = w['gru_x'] @ x, w['gru_h'] @ h                       # (3H,)
    r, z = (1.0 / (1.0 + np.exp(-(gi[:2 * n] + gh[:2 * n])))).reshape(2, n)
    new = np.tanh(gi[2 * n:] + r * gh[2 * n:])
    h[:] = (1.0 - z) * new + z * h


class Recurrent(NumpyPolicy):
    """obs (D,) -> actions (1, A); STATE h (H,), rng_key and rng_counter (1,) U64."""

    def __init__(self, obs_dim: int = 8, hidden: int = 16, action_dim: int = 4,
                 noise: float = 0.1, seed: int = 1, key: int = 7) -> None:
        super().__init__((
            BufferSpec('obs', (obs_dim,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('h', (hidden,), 'F32', Role.STATE),
            BufferSpec('rng_key', (1,), 'U64', Role.STATE),
            BufferSpec('rng_counter', (1,), 'U64', Role.STATE),
            BufferSpec('actions', (1, action_dim), 'F32', Role.OUTPUT),
        ), _weights(seed, x=(hidden, obs_dim), h=(hidden, hidden), a=(action_dim, hidden)),
            {'rng_key': np.array([key], np.uint64)}, noise=noise, key=key)
        self._noise = np.float32(noise)

    def tick(self, b: Arrays) -> None:
        """h = tanh(W_x obs + W_h h); actions = W_a h + noise."""
        h, a = b['h'], b['actions']
        h[:] = np.tanh(self._w['x'] @ b['obs'] + self._w['h'] @ h)
        noise = draw_normal(b['rng_key'], b['rng_counter'], a.shape[1])
        a[0] = self._w['a'] @ h + self._noise * noise


class Chunked(NumpyPolicy):
    """obs (D,) -> actions (horizon, A); STATE history (L, D) newest first, filled, h, inference.

    With `numbered`, column 0 of row i of the k-th inference, k from 1, is 1000 k + i, so that a
    test can tell from any published action which row of which inference it was.
    """

    def __init__(self, horizon: int = 8, action_dim: int = 2, obs_dim: int = 6, length: int = 4,
                 hidden: int = 12, numbered: bool = False, seed: int = 2) -> None:
        super().__init__((
            BufferSpec('obs', (obs_dim,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('history', (length, obs_dim), 'F32', Role.STATE),
            BufferSpec('filled', (1,), 'I64', Role.STATE),
            BufferSpec('h', (hidden,), 'F32', Role.STATE),
            BufferSpec('inference', (1,), 'I64', Role.STATE),
            BufferSpec('actions', (horizon, action_dim), 'F32', Role.OUTPUT),
        ), _weights(seed, gru_x=(3 * hidden, length * obs_dim), gru_h=(3 * hidden, hidden),
                    a=(horizon * action_dim, hidden)), numbered=numbered)
        self._numbered = numbered

    def tick(self, b: Arrays) -> None:
        """Push obs into the history (the first fills it), advance the GRU, write the chunk."""
        history, out = b['history'], b['actions']
        if b['filled'][0] == 0:
            history[:] = b['obs']
        else:
            history[1:] = history[:-1].copy()
            history[0] = b['obs']
        b['filled'][0] = min(int(b['filled'][0]) + 1, len(history))
        _gru(self._w, history.reshape(-1), b['h'])
        b['inference'] += 1
        out[:] = (self._w['a'] @ b['h']).reshape(out.shape)
        if self._numbered:
            out[:, 0] = 1000 * b['inference'][0] + np.arange(len(out))


class Journal(NumpyPolicy):
    """obs (D,) -> actions (1, A) by attention over key and value rows, one appended per tick.

    STATE keys and values (heads, rows, d) are journals along axis 1 with `kv_length` (1,) I64;
    `kv_start` (1,) I64 is the first row that the present prompt sees. `prefill` appends the
    prompt's rows and moves `kv_start`: it never rewrites a row, for older capsules share them.
    `drafts` rows above the length are scratch, overwritten in every tick.
    """

    def __init__(self, rows: int = 64, heads: int = 2, width: int = 4, obs_dim: int = 6,
                 action_dim: int = 3, prompt_length: int = 16, drafts: int = 1,
                 seed: int = 3) -> None:
        d = heads * width
        kv = (heads, rows, width)
        super().__init__((
            BufferSpec('obs', (obs_dim,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('prompt', (prompt_length,), 'U8', Role.INPUT, low=0, high=127),
            BufferSpec('keys', kv, 'F32', Role.STATE, journal_axis=1, length='kv_length'),
            BufferSpec('values', kv, 'F32', Role.STATE, journal_axis=1, length='kv_length'),
            BufferSpec('kv_length', (1,), 'I64', Role.STATE),
            BufferSpec('kv_start', (1,), 'I64', Role.STATE),
            BufferSpec('actions', (1, action_dim), 'F32', Role.OUTPUT),
        ), _weights(seed, q=(d, obs_dim), k=(d, obs_dim), v=(d, obs_dim), a=(action_dim, d),
                    embed=(128, obs_dim)), drafts=drafts)
        self._drafts = drafts

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> JournalBound:
        """Return tick and prefill over the buffers' arrays."""
        return JournalBound(self.tick, self.prefill, arrays_of(buffers))

    def tick(self, b: Arrays) -> None:
        """Append one row for obs, attend over the prompt's and all later rows."""
        self._append(b, b['obs'])
        first, end = int(b['kv_start'][0]), int(b['kv_length'][0])
        heads, rows, width = b['keys'].shape
        q = (self._w['q'] @ b['obs']).reshape(heads, width, 1)
        scores = (b['keys'][:, first:end] @ q)[..., 0] / np.float32(np.sqrt(width))  # (heads, n)
        p = np.exp(scores - scores.max(axis=1, keepdims=True))
        p /= p.sum(axis=1, keepdims=True)
        mixed = (p[:, None, :] @ b['values'][:, first:end])[:, 0]                    # (heads, d)
        b['actions'][0] = self._w['a'] @ mixed.reshape(-1)
        for i in range(end, min(end + self._drafts, rows)):
            b['keys'][:, i] = mixed
            b['values'][:, i] = -mixed

    def prefill(self, b: Arrays) -> None:
        """Begin a new context with one row per byte of the prompt, up to the first zero."""
        text = b['prompt'].tobytes().split(b'\0')[0]
        self._check_room(b, len(text))
        b['kv_start'][0] = b['kv_length'][0]
        for byte in text:
            self._append(b, self._w['embed'][byte % 128])

    def _append(self, b: Arrays, x: Array) -> None:
        self._check_room(b, 1)
        heads, _, width = b['keys'].shape
        at = int(b['kv_length'][0])
        b['keys'][:, at] = (self._w['k'] @ x).reshape(heads, width)
        b['values'][:, at] = (self._w['v'] @ x).reshape(heads, width)
        b['kv_length'][0] = at + 1

    @staticmethod
    def _check_room(b: Arrays, n: int) -> None:
        rows, used = b['keys'].shape[1], int(b['kv_length'][0])
        if used + n > rows:
            raise Refusal(Code.BACKEND, f'journal keys: {n} more rows after {used} of {rows}; '
                          'reset, restore an earlier capsule, or give it more rows')


class JournalBound(HostBound):
    """A tick and a prefill over the arrays of one live set."""

    def __init__(self, tick: Callable[[Arrays], None], prefill: Callable[[Arrays], None],
                 arrays: Arrays) -> None:
        super().__init__(tick, arrays)
        self._prefill = prefill

    def prefill(self) -> None:
        """Take in the prompt."""
        self._prefill(self._arrays)


def recurrent(**options: Any) -> Recurrent:
    """Factory of `Recurrent`: `flashrt_ros.backends.reference:recurrent`."""
    return Recurrent(**options)


def chunked(**options: Any) -> Chunked:
    """Factory of `Chunked`: `flashrt_ros.backends.reference:chunked`."""
    return Chunked(**options)


def journal(**options: Any) -> Journal:
    """Factory of `Journal`: `flashrt_ros.backends.reference:journal`."""
    return Journal(**options)
