"""Which topic of a bag a policy file's topic is.

A policy file may name topics relative to its node's namespace, a bag holds full names. A name fits
if it is equal, equal with a slash or the namespace in front, or the end of exactly one topic of the
right type; `--remap policy_topic:=/bag_topic` says it outright.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
import difflib

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.bags import Bag, Topic


@dataclass
class Matches:
    """Policy topics with their topics in the bag, and why others have none."""

    found: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def back(self) -> dict[str, list[str]]:
        """Return policy topics by bag topic."""
        result: dict[str, list[str]] = {}
        for policy, bag in self.found.items():
            result.setdefault(bag, []).append(policy)
        return result


def parse_remaps(texts: Iterable[str]) -> dict[str, str]:
    """Return `{policy_topic: bag_topic}` of texts like `imu:=/robot/imu`. Raises Refusal."""
    remaps = {}
    for text in texts:
        ours, separator, theirs = text.partition(':=')
        if not (separator and ours and theirs):
            raise Refusal(Code.INVALID_ARGUMENT, f'--remap {text!r} is not POLICY_TOPIC:=BAG_TOPIC')
        remaps[ours] = theirs
    return remaps


def match(bag: Bag, wanted: Mapping[str, str], remaps: Mapping[str, str], namespace: str = ''
          ) -> Matches:
    """Find the bag's topics of `wanted`, types by policy topic. Raises Refusal for a bad remap."""
    for name in remaps:
        if name not in wanted:
            raise Refusal(Code.INVALID_ARGUMENT, f'--remap {name}: the policy file has no such '
                          f'topic; it has {", ".join(wanted)}')
    matches = Matches()
    for name, kind in wanted.items():
        if name in remaps:
            if remaps[name] not in bag.topics:
                raise Refusal(Code.INVALID_ARGUMENT, f'--remap {name}:={remaps[name]}: '
                              f'{bag.name} has no such topic; {_holds(bag)}')
            candidates = [bag.topics[remaps[name]]]
        else:
            candidates = _candidates(bag, name, namespace)
        fitting = [t for t in candidates if kind in t.types]
        if len(fitting) == 1:
            matches.found[name] = fitting[0].name
        else:
            matches.missing[name] = _why(bag, name, kind, candidates, fitting)
    return matches


def _candidates(bag: Bag, name: str, namespace: str) -> list[Topic]:
    space = f'/{namespace.strip("/")}' if namespace.strip('/') else ''
    if name.startswith('/'):
        exact = [name]
    else:
        exact = [f'{space}/{name}', name]
    for full in exact:
        if full in bag.topics:
            return [bag.topics[full]]
    end = '/' + name.lstrip('/')
    return [t for t in bag.topics.values() if t.name.endswith(end)]


def _why(bag: Bag, name: str, kind: str, candidates: Sequence[Topic], fitting: Sequence[Topic]
         ) -> str:
    if len(fitting) > 1:
        return (f'{name} may be {", ".join(t.name for t in fitting)} in the bag; say which with '
                f'--remap {name}:={fitting[0].name}')
    if candidates:
        return (f'{name} is read as {kind}, but {candidates[0].name} holds '
                f'{", ".join(candidates[0].types)}; correct the term or its type')
    same = [t.name for t in bag.topics.values() if kind in t.types]
    near = difflib.get_close_matches(name.lstrip('/'), [n.lstrip('/') for n in bag.topics], n=1)
    choice = same[0] if same else f'/{near[0]}' if near else ''
    if choice in same:
        return f'the bag has no {name} ({kind}); write --remap {name}:={choice} if that is it'
    return f'the bag has no {name} ({kind}); {_holds(bag)}'


def _holds(bag: Bag) -> str:
    names = [f'{t.name} ({t.type})' for t in bag.topics.values() if t.count]
    return 'it holds ' + (', '.join(names[:12]) + (', …' if len(names) > 12 else '')
                          if names else 'nothing')
