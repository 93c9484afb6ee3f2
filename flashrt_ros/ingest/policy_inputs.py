"""Reads section `inputs` of the policy file: ports, their terms, and what a term may hold."""
from __future__ import annotations

from collections.abc import Sequence
import re

from flashrt_ros.ingest.images import COMPRESSED
from flashrt_ros.ingest.reader import Reader, nearest, shown
from flashrt_ros.ingest.schema import (
    CHANNELS,
    CUSTOM,
    DEFAULT_ENCODING,
    TERMS,
    TermRule,
    term_size,
)
from flashrt_ros.ingest.spec import TermSpec

_FIELD = re.compile(r'[A-Za-z_]\w*(\[\d{1,4}\])?(\.[A-Za-z_]\w*(\[\d{1,4}\])?)*', re.ASCII)


def read_inputs(section: Reader, modules: Sequence[str]) -> dict[str, tuple[TermSpec, ...]]:
    """Return the terms of each port, in the order in which they fill it."""
    return {port: tuple(read_term(entry, modules) for entry in section.sections(port))
            for port in section.data}


def read_term(entry: Reader, modules: Sequence[str], *, within: bool = False) -> TermSpec:
    """Return one term; `within` says that it is part of a history."""
    if not entry.require('term', what=f', one of {", ".join(TERMS)}, or module:function'):
        return TermSpec('', entry.path)
    name = entry.text('term')
    function = entry.function('term', modules, name) if ':' in name else None
    rule = CUSTOM if function is not None else TERMS.get(name)
    if rule is None:
        if name:
            entry.error('term', f'is {shown(name)}, which is not built in; {nearest(name, TERMS)} '
                        '(your own are written module:function)')
        return TermSpec(name, entry.path)
    if within and name == 'history':
        entry.error('term', 'is a history within a history; list its terms themselves')
    entry = _only(entry, name, rule)
    entry.require(*rule.required, what=f', {name} needs it')
    topic = entry.topic('topic')
    if entry.has('type') and topic is None:
        entry.error('topic', 'is missing beside type; write it, or remove type')
    term = TermSpec(
        name, entry.path, topic=topic, type=_type(entry, name, rule, topic),
        fields=_field_names(entry, name, rule), field=_field(entry, name),
        joints=entry.names('joints'),
        max_age_s=entry.maybe_number('max_age_s', above=0.0),
        latched=entry.flag('latched', False),
        timeout_s=entry.maybe_number('timeout_s', above=0.0),
        on_timeout=entry.choice('on_timeout', 'stop', ('stop', 'zero')),
        period_s=entry.maybe_number('period_s', above=0.0),
        length=entry.maybe_integer('length', low=1),
        order=entry.choice('order', 'newest_first', ('newest_first', 'oldest_first')),
        of=tuple(read_term(part, modules, within=True) for part in entry.sections('of')),
        value=_value(entry),
        encode=_encode(entry, modules), output=entry.maybe_text('output'),
        size=_pair(entry.integers('size', 2, low=1)), crop=_crop(entry),
        layout=entry.choice('layout', 'HWC', ('HWC', 'CHW')),
        encoding=entry.choice('encoding', '', tuple(CHANNELS)) or None,
        resize=entry.choice('resize', '', ('bilinear', 'area', 'nearest')) or None,
        fill=entry.maybe_number('fill'),
        function=function, options=entry.plain('options'),
        offset=entry.numbers('offset', 0.0), scale=entry.numbers('scale', 1.0))
    _check_lengths(entry, term)
    _check_times(entry, term)
    return term


def _only(entry: Reader, name: str, rule: TermRule) -> Reader:
    """Note keys that the term does not take and return a reader without them."""
    allowed = ('term', *rule.keys)
    for key in entry.data:
        if key not in allowed:
            entry.error(key, f'is no key of the term {name}; {nearest(key, allowed)}')
    return Reader({k: v for k, v in entry.data.items() if k in allowed}, entry.path, entry.errors,
                  entry.constants)


def _type(entry: Reader, name: str, rule: TermRule, topic: str | None) -> str | None:
    """Return the message type that is written, else the term's usual one."""
    written = entry.type('type')
    if written is not None:
        if '*' not in rule.types and written not in rule.types:
            entry.error('type', f'is {shown(written)}; {name} reads {", ".join(rule.types)}')
        return written
    if topic is None:
        return None
    if name == 'image' and topic.endswith('/compressed'):
        return COMPRESSED
    if rule.types[0] == '*':
        entry.error('type', f'is missing; {name} is not built in, so write the message type of '
                    f'{topic}')
        return None
    return rule.types[0]


def _field_names(entry: Reader, name: str, rule: TermRule) -> tuple[str, ...]:
    fields = entry.names('fields')
    for field in fields:
        if rule.fields and field not in rule.fields:
            entry.error('fields', f'holds {shown(field)}, which {name} does not have; '
                        f'{nearest(field, rule.fields)}')
        elif not _FIELD.fullmatch(field):
            entry.error('fields', f'holds {shown(field)}; write a path such as linear.x or axes[2]')
    return fields or rule.fields


def _field(entry: Reader, name: str) -> str | None:
    field = entry.maybe_text('field')
    if field is not None and not _FIELD.fullmatch(field):
        entry.wrong('field', 'a path such as data or pose.position')
    return 'data' if field is None and name == 'array' else field


def _value(entry: Reader) -> tuple[float, ...]:
    value = entry.numbers('value', ())
    return value if isinstance(value, tuple) else (value,)


def _encode(entry: Reader, modules: Sequence[str]) -> str | None:
    encode = entry.maybe_text('encode')
    return encode if encode in (None, 'bytes') else entry.function('encode', modules)


def _pair(numbers: tuple[int, ...]) -> tuple[int, int] | None:
    return (numbers[0], numbers[1]) if len(numbers) == 2 else None


def _crop(entry: Reader) -> tuple[int, int, int, int] | None:
    numbers = entry.integers('crop', 4)
    if len(numbers) != 4:
        return None
    top, left, height, width = numbers
    if not height or not width:
        entry.wrong('crop', '[top, left, height, width] with a height and a width of at least 1')
    return top, left, height, width


def _check_lengths(entry: Reader, term: TermSpec) -> None:
    """Offset and scale hold one number, or one for each value (of an image: each channel)."""
    size = term_size(term, {})
    if term.term == 'image':
        size = CHANNELS[term.encoding or DEFAULT_ENCODING]
    for key, numbers in (('offset', term.offset), ('scale', term.scale)):
        if isinstance(numbers, tuple) and size is not None and len(numbers) != size:
            entry.error(key, f'has {len(numbers)} numbers for {size} values; write {size}, or one '
                        'number for all')


def _check_times(entry: Reader, term: TermSpec) -> None:
    if term.latched and term.max_age_s is not None:
        entry.error('max_age_s', 'stands beside latched: true, which keeps the last value however '
                    'old; remove one, or write timeout_s and on_timeout')
    if term.timeout_s is not None and not term.latched:
        entry.error('timeout_s', 'is for latched inputs; write max_age_s, or latched: true')
    if entry.has('on_timeout') and term.timeout_s is None:
        entry.error('on_timeout', 'has no timeout_s beside it; write after which silence it acts')
