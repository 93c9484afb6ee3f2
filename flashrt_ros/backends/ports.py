"""Inputs and outputs of a model, turned into buffers: ports, and feedback pairs as STATE.

Shared by all backends that load a model with named tensors, and by the tools that inspect one.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
import functools
import re
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role

_BAD = re.compile(r'[^A-Za-z0-9_./:\-]')
_TOKEN = re.compile(r'[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+')
_INPUT_WORDS = frozenset('in input inp prev previous old past init initial last cur current'
                         .split())
_OUTPUT_WORDS = frozenset('out output outp next new present updated final'.split())
# Words that nothing but recurrent state is called by.
_STATE_WORDS = frozenset('h c hx cx hxs cxs hidden cell memory mem past kv cache carry gru lstm '
                         'rnn recurrent'.split())
# The last action is an ordinary input, made by a term from the policy's own output.
_ACTION_WORDS = frozenset('action actions act'.split())


@dataclass(frozen=True)
class TensorInfo:
    """A named tensor of a model. `dtype` by safetensors name, `shape` complete."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@functools.lru_cache(4096)  # torch programs name their outputs in every tick
def buffer_name(name: str) -> str:
    """Return a name that a buffer may have, equal to `name` wherever that is possible.

    >>> buffer_name('/actor/Tanh_output_0')
    'actor/Tanh_output_0'
    """
    return _BAD.sub('_', name).lstrip('./:-')[:256] or '_'


def suggest_pairs(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo]
                  ) -> list[tuple[str, str]]:
    """Return `(input, output)` names that look like one piece of state, in the inputs' order.

    A guess from names among tensors of equal shape and type: `h_in, h_out`, `past_x, present_x`,
    `hidden, new_hidden`, `h0, hn`; or an input that is called as only state is called.

    >>> h = (1, 1, 64)
    >>> suggest_pairs([TensorInfo('obs', (1, 47), 'F32'), TensorInfo('h_in', h, 'F32')],
    ...               [TensorInfo('actions', (1, 12), 'F32'), TensorInfo('h_out', h, 'F32')])
    [('h_in', 'h_out')]
    """
    free = [o for o in outputs if not _ACTION_WORDS & set(_tokens(o.name))]
    pairs: list[tuple[str, str]] = []
    for similar in (_similar, _state_like):
        for i in inputs:
            if any(i.name == a for a, _ in pairs) or _ACTION_WORDS & set(_tokens(i.name)):
                continue
            fits = [o for o in free if (o.shape, o.dtype) == (i.shape, i.dtype)
                    and similar(i.name, o.name)]
            if fits:
                pairs.append((i.name, fits[0].name))
                free.remove(fits[0])
    order = [i.name for i in inputs]
    return sorted(pairs, key=lambda p: order.index(p[0]))


def _tokens(name: str) -> list[str]:
    return [t.lower() for t in _TOKEN.findall(name)]


def _similar(i: str, o: str) -> bool:
    if i == o:
        return True
    torch_i, torch_o = re.fullmatch(r'(.*?)_?0', i), re.fullmatch(r'(.*?)_?[n1]', o)
    if torch_i and torch_o and torch_i[1] and torch_i[1] == torch_o[1]:
        return True
    a = [t for t in _tokens(i) if t not in _INPUT_WORDS]
    b = [t for t in _tokens(o) if t not in _OUTPUT_WORDS]
    a, b = (a, b) if len(a) >= len(b) else (b, a)
    return bool(b) and a[-len(b):] == b and not all(t.isdigit() for t in b)


def _state_like(i: str, o: str) -> bool:
    return bool(_STATE_WORDS & set(_tokens(i)))


def port_specs(inputs: Sequence[TensorInfo], outputs: Sequence[TensorInfo],
               state: Mapping[str, str], stateless: Collection[str] = (),
               publish: Collection[str] = (), ranges: Mapping[str, Any] | None = None
               ) -> list[BufferSpec]:
    """Return INPUT, OUTPUT and, for each feedback pair, one STATE buffer named by the input.

    An output that is fed back is no port, unless `publish` names it or it is called an action
    (a previous action is often an input). Raises Refusal where a pair does not fit, or where an
    input looks like state that is not fed back and `stateless` does not say otherwise.
    """
    ranges = ranges or {}
    by_in, by_out = ({t.name: t for t in ts} for ts in (inputs, outputs))
    _check_names([*inputs, *outputs])
    for i, o in state.items():
        _check_pair(i, o, by_in, by_out)
    for option, given, known in (('stateless', stateless, by_in), ('ranges', ranges, by_in),
                                 ('publish', publish, by_out)):
        for name in given:
            if name not in known:
                raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.{option}: the model has '
                              f'no {"output" if known is by_out else "input"} {name!r}; it has '
                              f'{", ".join(known)}')
    open_in = [t for t in inputs if t.name not in state and t.name not in stateless]
    open_out = [t for t in outputs if t.name not in state.values()]
    for i, o in suggest_pairs(open_in, open_out):
        raise Refusal(Code.UNDECLARED_STATE, f'input {i} looks like state that output {o} '
                      f'continues, and nothing feeds it back; write policy.state: {{{i}: {o}}}, '
                      f'or, if it is an ordinary input, policy.options.stateless: [{i}]',
                      input=i, output=o)
    specs = [BufferSpec(t.name, t.shape, t.dtype, Role.STATE if t.name in state else Role.INPUT,
                        low=_range(ranges, t.name)[0], high=_range(ranges, t.name)[1])
             for t in inputs]
    ports = [t for t in outputs if t.name not in state.values() or t.name in publish
             or _ACTION_WORDS & set(_tokens(t.name))]
    specs += [BufferSpec(t.name, t.shape, t.dtype, Role.OUTPUT) for t in ports]
    if not ports:
        raise Refusal(Code.UNSUPPORTED, 'the model has no output beside its fed back state')
    return specs


def _check_names(tensors: Sequence[TensorInfo]) -> None:
    seen: set[str] = set()
    for t in tensors:
        if t.name in seen:
            raise Refusal(Code.UNSUPPORTED, f'two inputs or outputs are named {t.name!r} (names '
                          'are compared after replacing odd characters); rename one')
        seen.add(t.name)


def _check_pair(i: str, o: str, by_in: Mapping[str, TensorInfo],
                by_out: Mapping[str, TensorInfo]) -> None:
    where = f'policy.state.{i}'
    if i not in by_in:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: the model has no input {i!r}; it has '
                      f'{", ".join(by_in)}')
    if o not in by_out:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: the model has no output {o!r}; it has '
                      f'{", ".join(by_out)}')
    a, b = by_in[i], by_out[o]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: input {i} is {a.dtype} {a.shape}, '
                      f'output {o} is {b.dtype} {b.shape}; a pair has equal type and shape')


def _range(ranges: Mapping[str, Any], name: str) -> tuple[float | None, float | None]:
    if name not in ranges:
        return None, None
    value = ranges[name]
    if (not isinstance(value, list | tuple) or len(value) != 2
            or not all(isinstance(v, int | float) for v in value) or not value[0] <= value[1]):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.ranges.{name}: is {value!r}, '
                      'must be [low, high]')
    return float(value[0]), float(value[1])
