"""Which attributes a program may write: origins of values, followed through views and branches.

Sound where every operation tells by its schema what it writes and what its results share memory
with; a value that may come from several attributes counts as each of them. To take a constant for
state costs a few bytes per capsule; to miss state would break the promise, so doubt goes that way.
"""
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
import re

# Torch's operations that draw from a generator; given none, from the process's own.
RANDOM = frozenset('''bernoulli bernoulli_ cauchy_ exponential_ geometric_ log_normal_ multinomial
    normal normal_ poisson rand rand_like randint randint_like randn randn_like random_ randperm
    uniform uniform_ rrelu_with_noise rrelu_with_noise_'''.split())


@dataclass
class Found:
    """What a program reads and writes beyond its inputs, by attribute path."""

    read: dict[str, str] = field(default_factory=dict)       # path -> type
    assigned: dict[str, str] = field(default_factory=dict)   # path -> type
    written: set[str] = field(default_factory=set)           # in place, through any view
    random: list[str] = field(default_factory=list)          # operations


@dataclass(frozen=True)
class Argument:
    """One argument of a schema: whether it is written, shared, or kept inside another."""

    written: bool
    shared: bool
    kept: bool


def parse_schema(text: str) -> tuple[list[Argument], bool]:
    """Return the arguments of a printed schema, and whether a result shares memory with them.

    >>> parse_schema('aten::add_(Tensor(a!) self, Tensor other) -> Tensor(a!)')[0][0].written
    True
    """
    match = re.match(r'[^(]*\((.*)\) -> (.*)$', text, re.DOTALL)
    if match is None:
        return [], True
    arguments = []
    for part in _split(match[1]):
        if part.strip() and part.strip() != '*':
            kind = part.split('=')[0]
            arguments.append(Argument('!' in kind, '(' in kind, '-> *' in kind))
    results = match[2].strip()
    # `(Tensor, Tensor)` is a tuple of results; an alias stands behind a type: `Tensor(a)`.
    return arguments, bool(re.search(r'[\w\]?]\(', results))


def _split(text: str) -> Iterable[str]:
    depth, part = 0, ''
    for c in text:
        depth += (c in '([') - (c in ')]')
        if c == ',' and depth == 0:
            yield part
            part = ''
        else:
            part += c
    yield part
