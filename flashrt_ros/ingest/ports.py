"""Holds a policy file against the ports of the model that was loaded for it.

An OUTPUT port is read from its end: the last axis holds the values of one action, the one before
it the rows of a chunk, all others have length 1. `(12,)` and `(1, 12)` are one action of 12
values, `(1, 4, 4)` a chunk of four rows.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import math
from pathlib import Path

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role
from flashrt_ros.ingest.reader import Errors, nearest
from flashrt_ros.ingest.schema import CHANNELS, DEFAULT_ENCODING, OUTPUT_TYPES, flat, term_size
from flashrt_ros.ingest.spec import Numbers, OutputSpec, PolicyFile, TermSpec


@dataclass(frozen=True)
class ActionShape:
    """How an output lies in its port: `rows` of a chunk, columns `first` up to `last`."""

    port: str
    rows: int
    first: int
    last: int

    @property
    def dim(self) -> int:
        """Values of one action."""
        return self.last - self.first


def action_shape(output: OutputSpec, ports: Mapping[str, BufferSpec]) -> ActionShape:
    """Return where an output's values lie. Raises Refusal(INVALID_POLICY_FILE), path in front."""
    name = output.port or output.name
    spec = ports.get(name)
    places = [s.name for s in ports.values() if s.role is Role.OUTPUT]
    if spec is None or spec.role is not Role.OUTPUT:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{output.path}.port: the model has no output '
                      f'{name}; {nearest(name, places)}')
    rows = spec.shape[-2] if len(spec.shape) > 1 else 1
    width = spec.shape[-1] if spec.shape else 1
    if math.prod(spec.shape) != rows * width:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{output.path}.port: {name} has the shape '
                      f'{list(spec.shape)}; actions are (rows of a chunk, values) with nothing but '
                      'axes of length 1 in front')
    if spec.dtype.startswith('F8'):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{output.path}.port: {name} has the type '
                      f'{spec.dtype}; let the model cast its actions to F32')
    first, last = output.columns or (0, width)
    if last > width:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{output.path}.columns: end at {last}, but {name} '
                      f'{list(spec.shape)} has {width} values; write columns within them')
    return ActionShape(name, rows, first, last)


def check_ports(policy_file: PolicyFile, layout: Mapping[str, BufferSpec]) -> None:
    """Refuse a policy file whose terms or outputs do not fit the model's buffers."""
    errors = Errors(Path(policy_file.path).name)
    shapes: dict[str, ActionShape] = {}
    for output in policy_file.outputs.values():
        try:
            shapes[output.name] = action_shape(output, layout)
        except Refusal as refusal:
            errors.add('', refusal.message)
        else:
            _check_output(output, shapes[output.name], errors)
    _check_chunks(policy_file, shapes, errors)
    widths = {name: shape.dim for name, shape in shapes.items()}
    ports = {s.name: s for s in layout.values() if s.role is Role.INPUT}
    for port, terms in policy_file.inputs.items():
        if port not in ports:
            errors.add(f'inputs.{port}', f'is no input of the model; {nearest(port, ports)}')
        elif len(widths) == len(policy_file.outputs):
            _check_input(port, terms, ports[port], widths, errors)
    for port, spec in ports.items():
        if port not in policy_file.inputs:
            errors.add(f'inputs.{port}', f'is missing; the model reads {port} {list(spec.shape)}: '
                       'write its terms, or pair it with an output under policy.state')
    errors.check()


def port_sizes(terms: tuple[TermSpec, ...], elements: int, widths: Mapping[str, int]
               ) -> list[int] | None:
    """Return how many values of a port each term fills, None where they do not fit.

    One term whose size only its message or function knows takes what the others leave.
    """
    sizes = [term_size(t, widths) for t in terms]
    rest = elements - sum(n for n in sizes if n is not None)
    unknown = sizes.count(None)
    if unknown > 1 or (rest < 1 if unknown else rest != 0):
        return None
    return [rest if n is None else n for n in sizes]


def _check_input(port: str, terms: tuple[TermSpec, ...], spec: BufferSpec,
                 widths: Mapping[str, int], errors: Errors) -> None:
    elements = math.prod(spec.shape)
    sizes = port_sizes(terms, elements, widths)
    known = [(t, term_size(t, widths)) for t in terms]
    if sizes is None:
        listed = ', '.join(f'{t.term} {"?" if n is None else n}' for t, n in known)
        if sum(n is None for _, n in known) > 1:
            errors.add(f'inputs.{port}', f'holds more than one term of unknown size ({listed}); '
                       'write the length of all but one')
        else:
            total = sum(n for _, n in known if n is not None)
            times, rest = divmod(elements, total) if total else (0, 1)
            advice = ('add, remove or correct a term' if rest or times < 2 else
                      f'{elements} = {times} × {total}: if it reads the last {times} steps, write '
                      f'{{term: history, of: [these terms], length: {times}}}')
            errors.add(f'inputs.{port}', f'its terms give {total} values ({listed}), but the '
                       f"model's {port} {list(spec.shape)} takes {elements}; {advice}")
        return
    # A term within a history has no share of the port: its own size is all that can be checked.
    share = dict(zip((t.path for t in terms), sizes, strict=True))
    for term in flat(terms):
        size = share.get(term.path, term_size(term, widths))
        if term.term == 'image':
            size = CHANNELS[term.encoding or DEFAULT_ENCODING]
        if size is not None:
            for key, numbers in (('offset', term.offset), ('scale', term.scale)):
                _check_count(f'{term.path}.{key}', numbers, size, term.term, errors)


def _check_output(output: OutputSpec, shape: ActionShape, errors: Errors) -> None:
    dim = shape.dim
    for key, names in (('joints', output.joints), ('fields', output.fields)):
        if names and len(names) != dim:
            errors.add(f'{output.path}.{key}', f'names {len(names)}, but the model gives {dim} '
                       f'values ({shape.port}); name each once, or choose columns')
    for key, numbers in (('scale', output.scale), ('offset', output.offset),
                         ('max_rate', output.max_rate), ('clip', (output.clip or (0.0, 0.0))[0]),
                         ('clip', (output.clip or (0.0, 0.0))[1])):
        if numbers is not None:
            _check_count(f'{output.path}.{key}', numbers, dim, shape.port, errors)
    width = OUTPUT_TYPES[output.type].width
    if width is not None and dim != width:
        errors.add(f'{output.path}.columns', f'the model gives {dim} values, but '
                   f'{output.type.rpartition("/")[2]} takes {width}; choose columns')


def _check_count(path: str, numbers: Numbers, size: int, what: str, errors: Errors) -> None:
    if isinstance(numbers, tuple) and len(numbers) != size:
        errors.add(path, f'has {len(numbers)} numbers for the {size} values of {what}; write '
                   f'{size}, or one number for all')


def _check_chunks(policy_file: PolicyFile, shapes: Mapping[str, ActionShape], errors: Errors
                  ) -> None:
    """All outputs advance together; of each chunk at least one row must be left to execute."""
    run = policy_file.run
    lengths = {name: shape.rows for name, shape in shapes.items()}
    if len(set(lengths.values())) > 1:
        listed = ', '.join(f'{name} {n}' for name, n in lengths.items())
        errors.add('outputs', f'have chunks of different lengths ({listed}); all outputs of a '
                   'policy advance together, so give them equally many rows')
        return
    for rows in set(lengths.values()):
        if run.latency_steps >= rows:
            errors.add('run.latency_steps', f'is {run.latency_steps}, but a chunk has {rows} rows, '
                       'so none would be left when it is spliced; write less')
        elif run.execute is not None and run.execute + run.latency_steps > rows:
            errors.add('run.execute', f'is {run.execute}, which with latency_steps '
                       f'{run.latency_steps} needs more than the {rows} rows of a chunk; write at '
                       f'most {rows - run.latency_steps}')
        if abs(run.ensemble_weight) * rows > 500:
            errors.add('run.ensemble_weight', f'is {run.ensemble_weight:g}, whose weights over '
                       f'{rows} predictions no float holds; write one nearer to 0')
