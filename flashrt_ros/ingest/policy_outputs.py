"""Reads section `outputs` of the policy file: the contract of what leaves towards the robot."""
from __future__ import annotations

from collections.abc import Collection
import re

from flashrt_ros.ingest.reader import Reader, nearest, shown
from flashrt_ros.ingest.schema import KINDS, OUTPUT_TYPES, STOPS, OutputRule
from flashrt_ros.ingest.spec import Numbers, OnStop, OutputSpec

_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]{0,63}')


def read_outputs(section: Reader) -> dict[str, OutputSpec]:
    """Return the outputs by name."""
    outputs: dict[str, OutputSpec] = {}
    for name in section.data:
        if not _NAME.fullmatch(name):
            section.error(name, 'is no name for an output; write letters, digits and _')
            continue
        entry = section.section(name)
        if entry is not None:
            outputs[name] = _read_output(entry, name)
            for other in outputs.values():
                if other.name != name and other.topic == outputs[name].topic != '':
                    entry.error('topic', f'is also the topic of output {other.name}; use another, '
                                'or one output for both')
    return outputs


def _read_output(entry: Reader, name: str) -> OutputSpec:
    entry.require('topic', 'type', 'kind')
    type_ = entry.type('type') or ''
    rule = OUTPUT_TYPES.get(type_)
    if type_ and rule is None:
        entry.error('type', f'is {shown(type_)}; {nearest(type_, OUTPUT_TYPES)}')
    kind = entry.choice('kind', '', KINDS)
    joints, fields = entry.names('joints'), entry.names('fields')
    columns = entry.integers('columns', 2)
    count = len(joints) or len(fields) or (columns[1] - columns[0] if columns else None)
    output = OutputSpec(
        name, entry.path, entry.topic('topic') or '', type_, kind, joints=joints, fields=fields,
        scale=entry.numbers('scale', 1.0, count), offset=entry.numbers('offset', 0.0, count),
        clip=_clip(entry, count),
        max_rate=entry.numbers('max_rate', 0.0, count, above=0.0) or None,
        start_tolerance=entry.maybe_number('start_tolerance', above=0.0),
        relative=entry.flag('relative', False), on_stop=_on_stop(entry, kind),
        time_s=entry.maybe_number('time_s', above=0.0),
        chunk_as_trajectory=entry.flag('chunk_as_trajectory', False),
        columns=(columns[0], columns[1]) if columns else None, port=entry.maybe_text('port'),
        frame_id=entry.text('frame_id'), shared=entry.flag('shared', False))
    if columns and columns[0] >= columns[1]:
        entry.wrong('columns', '[first, one past the last]')
    if rule is not None and kind:
        _check_type(entry, output, rule)
    _check_position(entry, output)
    if joints and columns and len(joints) != columns[1] - columns[0]:
        entry.error('joints', f'names {len(joints)} joints for columns {list(columns)}; make them '
                    'equally many')
    entry.close(' of an output')
    return output


def _clip(entry: Reader, count: int | None) -> tuple[Numbers, Numbers] | None:
    """Return `(low, high)` of published values, each a number, a list or a constant's name."""
    if not entry.has('clip'):
        return None
    value = entry.data['clip']
    if not isinstance(value, list) or len(value) != 2:
        entry.wrong('clip', '[low, high], each a number, a list or the name of a constant')
        return None
    pair = Reader({'low': value[0], 'high': value[1]}, entry.at('clip'), entry.errors,
                  entry.constants)
    low, high = pair.numbers('low', 0.0, count), pair.numbers('high', 0.0, count)
    n = max(len(b) if isinstance(b, tuple) else 1 for b in (low, high))
    if any(a > b for a, b in zip(_spread(low, n), _spread(high, n), strict=False)):
        entry.wrong('clip', '[low, high] with low not above high')
    return low, high


def _spread(value: Numbers, n: int) -> tuple[float, ...]:
    return value if isinstance(value, tuple) else (value,) * n


def _on_stop(entry: Reader, kind: str) -> OnStop:
    choices = STOPS.get(kind, ('hold', 'zero', 'none'))
    if not entry.has('on_stop'):
        if kind != 'raw':
            entry.error('on_stop', 'is missing; write what is sent when motion ends: '
                        + ' or '.join(f'{{do: {c}}}' for c in choices))
        return OnStop('none')
    section = entry.section('on_stop')
    if section is None:
        return OnStop('none')
    section.require('do', what=f', one of {", ".join(choices)}')
    do = section.choice('do', 'none', ('hold', 'zero', 'none'))
    if do not in choices:
        why = {'hold': 'only a position can be held; zero stops it',
               'zero': 'position 0 is a place far away, not a stop'}[do]
        section.error('do', f'is {do}, but kind is {kind}: {why}; write {" or ".join(choices)}')
    stop = OnStop(do, time_s=section.number('time_s', 0.2, above=0.0),
                  repeat=section.flag('repeat', False))
    if stop.repeat and do == 'none':
        section.error('repeat', 'stands beside do: none, which sends nothing; remove it')
    section.close(' of on_stop')
    return stop


def _check_type(entry: Reader, output: OutputSpec, rule: OutputRule) -> None:
    short = output.type.rpartition('/')[2]
    if output.kind not in rule.kinds:
        entry.error('kind', f'is {output.kind}, which {short} cannot carry; write '
                    f'{" or ".join(rule.kinds)}, or another type')
    if (rule.joints or output.kind == 'position') and not output.joints:
        entry.error('joints', f'is missing; {short} with kind {output.kind} needs the names, in '
                    "the order of the model's values")
    if rule.width is not None and output.joints and len(output.joints) != rule.width:
        entry.error('joints', f'names {len(output.joints)} joints; {short} moves {rule.width}')
    if rule.fields and not output.fields:
        entry.error('fields', f'is missing; {short} needs the components, such as '
                    '[linear.x, linear.y, angular.z]')
    for field in output.fields:
        if field not in rule.fields:
            entry.error('fields', f'holds {shown(field)}; ' + (
                nearest(field, rule.fields) if rule.fields else f'{short} has none, remove it'))
    if output.joints and rule.fields:
        entry.error('joints', f'stands in an output of {short}, which has no joints; remove it')
    for key, there in (('time_s', output.time_s is not None),
                       ('chunk_as_trajectory', output.chunk_as_trajectory)):
        if there and not rule.trajectory:
            entry.error(key, f'is for trajectories; remove it, or use another type than {short}')


def _check_position(entry: Reader, output: OutputSpec) -> None:
    position = output.kind == 'position'
    if position and not entry.has('start_tolerance'):
        entry.error('start_tolerance', 'is missing; write how far the first row may be from the '
                    'measured joints (rad or m), or null to publish from anywhere')
    if output.kind and not position:
        if output.start_tolerance is not None:
            entry.error('start_tolerance', f'is for positions, kind is {output.kind}; remove it')
        if output.relative:
            entry.error('relative', f'adds measured positions, kind is {output.kind}; remove it')
    if output.relative and 0.0 in _spread(output.scale, 1):
        entry.error('scale', 'holds 0 beside relative: true; rows could not be carried from one '
                    'anchor to the next; write another number, or drop the column')


def needs_measured(output: OutputSpec, blend_s: float) -> str:
    """Return which key of an output needs measured joints, '' where none does."""
    if output.kind != 'position':
        return ''
    return ('start_tolerance' if output.start_tolerance is not None
            else 'on_stop' if output.on_stop.do == 'hold'
            else 'relative' if output.relative
            else 'max_rate' if output.max_rate is not None
            else 'blend_s' if blend_s > 0 else '')


def check_measured(outputs: Collection[OutputSpec], blend_s: float, section: Reader) -> None:
    """Note outputs whose contract needs measured joints; called where no JointState is read."""
    for output in outputs:
        why = needs_measured(output, blend_s)
        if why:
            section.error(f'{output.name}.joints', f'are never measured, but {why} needs them; '
                          'write joint_states: TOPIC beside inputs and outputs')
