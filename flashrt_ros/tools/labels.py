"""Names for the values of a port: which term, and which joint or field of it."""
from __future__ import annotations

from collections.abc import Mapping
import math

from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.ingest.ports import action_shape, port_sizes
from flashrt_ros.ingest.schema import term_size
from flashrt_ros.ingest.spec import PolicyFile, TermSpec


def widths(file: PolicyFile, ports: Mapping[str, BufferSpec]) -> dict[str, int]:
    """Return how many values an action of each output has."""
    return {name: action_shape(output, ports).dim for name, output in file.outputs.items()}


def sized_terms(file: PolicyFile, ports: Mapping[str, BufferSpec], port: str
                ) -> list[tuple[TermSpec, int]]:
    """Return the terms of a port, each with the number of values that it fills."""
    terms = file.inputs.get(port, ())
    sizes = port_sizes(terms, math.prod(ports[port].shape), widths(file, ports))
    return list(zip(terms, sizes, strict=True)) if sizes is not None else []


def label(file: PolicyFile, ports: Mapping[str, BufferSpec], port: str, index: int) -> str:
    """Return the name of a port's value: `obs[45], the term phase (sin)`."""
    name, at = f'{port}[{index}]', index
    for term, size in sized_terms(file, ports, port):
        if at < size:
            return f'{name}, the term {term_label(term, at, size, widths(file, ports))}'
        at -= size
    return name


def term_label(term: TermSpec, at: int, size: int, dims: Mapping[str, int]) -> str:
    """Return the name of one value within a term."""
    if term.term == 'history' and term.length:
        width = size // term.length
        slot, at = divmod(at, width)
        for part in term.of:
            n = term_size(part, dims) or width
            if at < n:
                return f'history, slot {slot}: {term_label(part, at, n, dims)}'
            at -= n
        return f'history, slot {slot}'
    what = term.function or term.term
    names = term.joints or term.fields or (('sin', 'cos') if term.term == 'phase' else ())
    if at < len(names):
        return f'{what} ({names[at]})'
    return f'{what} [{at}]' if size > 1 else what
