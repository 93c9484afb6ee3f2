"""`policy.options` of a backend: every key known, every value of its type, or refused by name."""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import difflib
from typing import Any

from flashrt_ros.core.errors import Code, Refusal

Check = Callable[[Any], bool]


class Option:
    """A default, what a value may be, and how to say so."""

    def __init__(self, default: Any, check: Check, wanted: str) -> None:
        self.default = default
        self.check = check
        self.wanted = wanted


def flag(default: bool) -> Option:
    """An option that is true or false."""
    return Option(default, lambda v: isinstance(v, bool), 'true or false')


def whole(default: int, low: int) -> Option:
    """An option that is a whole number, at least `low`."""
    return Option(default, lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= low,
                  f'a whole number, at least {low}')


def choice(default: str, *values: str) -> Option:
    """An option that is one of some words."""
    return Option(default, lambda v: v in values, f'one of {", ".join(values)}')


def names() -> Option:
    """An option that is a list of names, empty by default."""
    return Option((), lambda v: isinstance(v, Sequence) and not isinstance(v, str)
                  and all(isinstance(n, str) for n in v), 'a list of names')


def mapping(wanted: str) -> Option:
    """An option that is a mapping by name, empty by default."""
    return Option({}, lambda v: isinstance(v, Mapping) and all(isinstance(k, str) for k in v),
                  wanted)


def parse(given: Mapping[str, Any], known: Mapping[str, Option]) -> dict[str, Any]:
    """Return all options with defaults. Raises Refusal(INVALID_POLICY_FILE)."""
    for key, value in given.items():
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.{key}: unknown; '
                          + (f'did you mean {near[0]}?' if near
                             else f'known are {", ".join(sorted(known))}'))
        if not known[key].check(value):
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.{key}: is {value!r}, must '
                          f'be {known[key].wanted}')
    return {key: given.get(key, option.default) for key, option in known.items()}
