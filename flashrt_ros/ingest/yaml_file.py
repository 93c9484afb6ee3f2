"""Reads one YAML file that may be hostile into plain data: dict, list, str, int, float, bool, None.

Beyond PyYAML's safe loader it refuses a key that is written twice, keys that are no text, other
documents in the same file, and files whose aliases or merge keys would unfold into very much more
than they are. `1e-3` is a number here, as in YAML 1.2, not the text that YAML 1.1 makes of it.
"""
from __future__ import annotations

from pathlib import Path
import re
from typing import Any

import yaml

from flashrt_ros.core.errors import Code, Refusal

MAX_BYTES = 128 * 1024      # of the file; policy files have a few thousand
MAX_NODES = 50_000          # values after all aliases are unfolded
MAX_DEPTH = 40
_FLOAT = re.compile(r'[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+')
_SCALARS = frozenset(f'tag:yaml.org,2002:{t}' for t in ('null', 'bool', 'int', 'float', 'str'))
_MERGE = 'tag:yaml.org,2002:merge'


def read(path: Path) -> dict[str, Any]:
    """Return the mapping that the file holds. Raises Refusal(INVALID_POLICY_FILE)."""
    def refuse(text: str) -> Refusal:
        return Refusal(Code.INVALID_POLICY_FILE, f'{path.name}: {text}')

    try:
        if not path.is_file():
            raise refuse('there is no such file; give the path of a policy file')
        with path.open('rb') as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise refuse(f'cannot be read ({error}); check the path and its permissions') from None
    if len(data) > MAX_BYTES:
        raise refuse(f'is larger than {MAX_BYTES} bytes; a policy file names its weights, it does '
                     'not hold them')
    return parse(data, path.name)


def parse(data: bytes, name: str) -> dict[str, Any]:
    """Return the mapping that YAML text holds; `name` stands in front of refusals."""
    builder = _Builder(name)
    try:
        root = yaml.compose(data.decode('utf-8'), Loader=yaml.SafeLoader)
        if root is None or not isinstance(root, yaml.MappingNode):
            raise builder.refuse(root, 'is not a mapping; start with policy:, inputs: and outputs:')
        builder.measure(root, 0)
        return builder.mapping(root)
    except UnicodeDecodeError as error:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{name}: is not UTF-8 text ({error.reason} at '
                      f'byte {error.start}); save it as UTF-8') from None
    except RecursionError:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{name}: is nested too deeply; a policy file '
                      'needs five levels') from None
    except yaml.YAMLError as error:
        text = ' '.join(str(error).split())
        raise Refusal(Code.INVALID_POLICY_FILE, f'{name}: is not YAML: {text}; correct the place '
                      'that it names') from None


class _Builder:
    """Turns a node graph into data, after having measured how much it unfolds into."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sizes: dict[int, int] = {}      # by node identity; -1 while it is being measured
        self.scalars = yaml.constructor.SafeConstructor()

    def refuse(self, node: Any, text: str) -> Refusal:
        line = '' if node is None else f'line {node.start_mark.line + 1}: '
        return Refusal(Code.INVALID_POLICY_FILE, f'{self.name}: {line}{text}')

    def measure(self, node: Any, depth: int) -> int:
        """Return how many values a node unfolds into; aliases share nodes, so it is cheap."""
        known = self.sizes.get(id(node))
        if known == -1:
            raise self.refuse(node, 'an anchor holds an alias of itself; write the value out')
        if depth > MAX_DEPTH:
            raise self.refuse(node, 'is nested too deeply; a policy file needs five levels')
        if known is not None:
            return known
        self.sizes[id(node)] = -1
        total = 1
        if isinstance(node, yaml.SequenceNode):
            for item in node.value:
                total += self.measure(item, depth + 1)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                total += self.measure(key, depth + 1) + self.measure(value, depth + 1)
        if total > MAX_NODES:
            raise self.refuse(node, f'unfolds into more than {MAX_NODES} values; use fewer aliases')
        self.sizes[id(node)] = total
        return total

    def value(self, node: Any) -> Any:
        if isinstance(node, yaml.MappingNode) and node.tag == 'tag:yaml.org,2002:map':
            return self.mapping(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == 'tag:yaml.org,2002:seq':
            return [self.value(item) for item in node.value]
        if not isinstance(node, yaml.ScalarNode) or node.tag not in _SCALARS:
            raise self.refuse(node, f'{_shown(node)} has the type {node.tag.split(":")[-1]}, which '
                              'a policy file does not use; put text in quotes')
        if node.style is None and _FLOAT.fullmatch(node.value):
            return float(node.value)
        try:
            return self.scalars.construct_object(node)
        except (ValueError, OverflowError):
            raise self.refuse(node, f'{_shown(node)} is no value that can be read; write a plain '
                              'number or quoted text') from None

    def mapping(self, node: Any) -> dict[str, Any]:
        own: dict[str, Any] = {}
        merged: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _MERGE:
                self.merge(value_node, merged)
                continue
            key = self.value(key_node)
            if not isinstance(key, str):
                raise self.refuse(key_node, f'the key {_shown(key_node)} is not text; put it in '
                                  'quotes')
            if key in own:
                raise self.refuse(key_node, f'the key {key!r} is written twice; remove one')
            own[key] = self.value(value_node)
        return {**merged, **own}

    def merge(self, node: Any, into: dict[str, Any]) -> None:
        """Carry out `<<: *base`; of several bases the first one wins."""
        nodes = node.value if isinstance(node, yaml.SequenceNode) else [node]
        for base in nodes:
            if not isinstance(base, yaml.MappingNode):
                raise self.refuse(base, '<<: takes an alias of a mapping, or a list of such')
            for key, value in self.mapping(base).items():
                into.setdefault(key, value)


def _shown(node: Any) -> str:
    text = str(node.value) if isinstance(node, yaml.ScalarNode) else node.id
    return repr(text if len(text) <= 40 else text[:40] + '…')
