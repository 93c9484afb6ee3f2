"""Message definitions of a bag: its own, the distribution's, installed ones, and .msg files.

Definitions that the bag carries come first. For what it lacks the order is: `--msg-path`, the
messages of this package, installed packages (AMENT_PREFIX_PATH), and the common interfaces of the
distribution that recorded it. Where the bag knows a type's hash, a definition from elsewhere must
have the same.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import os
from pathlib import Path
import sys
from typing import Any

from flashrt_ros.core.errors import Code, Refusal

MAX_REST = 64     # bytes behind a message that no field accounts for
SOURCE = Path(__file__).resolve().parents[2]      # of a checkout: msg/ and srv/ lie there
_TRIGGER = '---\nbool success\nstring message\n'
_EMPTY = 'uint8 structure_needs_at_least_one_member\n'    # what rosidl gives an empty message


class Types:
    """Decodes serialised messages; finds their definitions when they are first needed."""

    def __init__(self, embedded: Mapping[str, Any], hashes: Mapping[str, str], distro: str,
                 msg_paths: Sequence[Path]) -> None:
        """`embedded` are rosbags' MessageDefinitions by type, `hashes` RIHS01 by type."""
        from rosbags.typesys import Stores, get_typestore
        self._embedded = embedded
        self._hashes = hashes
        self._msg_paths = tuple(msg_paths)
        name = f'ROS2_{distro.upper()}'
        self._common = get_typestore(getattr(Stores, name, Stores.ROS2_JAZZY))
        self._store = get_typestore(Stores.EMPTY)
        self._known: set[str] = set()
        for path in self._msg_paths:
            if not path.exists():
                raise Refusal(Code.NOT_FOUND, f'--msg-path {path} does not exist')

    def need(self, kind: str) -> None:
        """Make sure that a type can be decoded. Raises Refusal, naming what is missing."""
        if kind in self._known:
            return
        found: dict[str, Any] = {}
        own = self._from_bag(kind)
        found.update(own)
        open_ = [kind] if kind not in own else [r for d in own.values() for r in _references(d)]
        while open_:
            name = open_.pop()
            if name in found:
                continue
            definitions = self._elsewhere(name)
            if definitions is None:
                raise self._missing(kind, name)
            found.update(definitions)
            open_ += [r for d in definitions.values() for r in _references(d)]
        try:
            self._store.register({n: d for n, d in found.items()
                                  if n not in self._store.fielddefs})
        except Exception as error:  # two definitions of one name, of a broken bag
            raise Refusal(Code.CORRUPT, f'the definitions of {kind} contradict each other: '
                          f'{error}') from error
        self._check_hash(kind, given=kind in own)
        self._known.add(kind)

    def decode(self, raw: bytes, kind: str) -> Any:
        """Return a message as an object with ROS attributes. Raises Refusal."""
        self.need(kind)
        try:
            if len(raw) < 4 or raw[0] or raw[1] > 1:
                raise ValueError('it has no CDR header')
            definition = self._store.get_msgdef(kind)
            read = definition.deserialize_cdr_le if raw[1] else definition.deserialize_cdr_be
            message, end = read(raw[4:], 0, definition.cls, self._store)
            # rclpy's serialize_message leaves a few bytes behind empty sequences
            if not len(raw) - MAX_REST <= end + 4 <= len(raw):
                raise ValueError(f'{len(raw) - 4 - end} bytes are left')
            return message
        except Exception as error:  # generated code raises whatever comes to hand
            raise Refusal(Code.CORRUPT, f'{len(raw)} bytes do not fit the definition of {kind} '
                          f'({type(error).__name__}: {error}); it is another version, or the bag '
                          'is damaged; give the right .msg files with --msg-path') from error

    def _from_bag(self, kind: str) -> dict[str, Any]:
        definition = self._embedded.get(kind)
        if definition is None or not definition.data.strip():
            return {}
        try:
            if definition.format.name == 'MSG':
                return _parse(definition.data, kind)
            return _parse_idl(definition.data)
        except Exception:  # a definition that cannot be read is as good as none
            return {}

    def _elsewhere(self, name: str) -> dict[str, Any] | None:
        package, group, word = (*name.split('/'), '', '')[:3]
        for file in self._files(package, group, word):
            try:
                text = file.read_text()
            except OSError:
                continue
            try:
                return _parse(text, name) if group == 'msg' else _service(text, name)
            except Exception as error:
                raise Refusal(Code.CORRUPT, f'{file} cannot be read as a definition of {name}: '
                              f'{error}') from error
        if name in self._common.fielddefs:
            return {name: self._common.fielddefs[name]}
        if name.startswith('std_srvs/srv/Trigger_'):
            return _service(_TRIGGER, name)
        return None

    def _files(self, package: str, group: str, word: str) -> Iterator[Path]:
        """Yield where a definition may lie."""
        if group == 'srv':
            word = word.rpartition('_')[0]
        name = f'{word}.{group}'
        for path in self._msg_paths:
            yield from (path / package / group / name, path / group / name, path / name,
                        path / package / name)
            if path.is_file() and path.name == name:
                yield path
        if package == 'flashrt_ros':
            yield SOURCE / group / name
        prefixes = os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep)
        for prefix in dict.fromkeys([*filter(None, prefixes), sys.prefix]):
            yield Path(prefix) / 'share' / package / group / name

    def _missing(self, kind: str, name: str) -> Refusal:
        package, _, word = name.rpartition('/')
        of = '' if name == kind else f', which {kind} contains'
        return Refusal(Code.UNSUPPORTED, f'the bag carries no definition of {name}{of}, and none '
                       f'is installed here; give the folder with {word}.msg (or the package '
                       f'{package.partition("/")[0]}) with --msg-path', type=name)

    def _check_hash(self, kind: str, *, given: bool) -> None:
        want = self._hashes.get(kind, '')
        if given or not want.startswith('RIHS01_') or '/msg/' not in kind:
            return
        have = self._store.hash_rihs01(kind)
        if have != want:
            raise Refusal(Code.UNSUPPORTED, f'the bag was recorded with another version of {kind} '
                          f'({want[7:19]}…, found here {have[7:19]}…); give its .msg files with '
                          '--msg-path')

    @property
    def store(self) -> Any:
        """The rosbags type store with everything that was needed so far."""
        return self._store


def _parse(text: str, name: str) -> dict[str, Any]:
    from rosbags.typesys import get_types_from_msg
    return dict(get_types_from_msg(text, name))


def _parse_idl(text: str) -> dict[str, Any]:
    from rosbags.typesys import get_types_from_idl
    bar = '=' * 80 + '\n'
    if not text.startswith(f'{bar}IDL: '):
        return dict(get_types_from_idl(text))
    found: dict[str, Any] = {}
    for part in text.split(bar)[1:]:
        found.update(get_types_from_idl(part.partition('\n')[2]))
    return found


def _service(text: str, name: str) -> dict[str, Any]:
    """Return request, response and event of a .srv file, as service introspection sends them."""
    from rosbags.interfaces import Nodetype
    base = name.rpartition('_')[0]
    package, _, word = base.split('/')
    request, _, response = text.partition('---\n')
    found: dict[str, Any] = {}
    for part, body in (('Request', request), ('Response', response)):
        # rosbags knows names of messages only
        (definition,) = _parse(_fields(body), f'{package}/msg/{word}_{part}').values()
        found[f'{base}_{part}'] = definition

    def at_most_one(kind: str) -> Any:
        return Nodetype.SEQUENCE, ((Nodetype.NAME, kind), 1)
    found[f'{base}_Event'] = ([], [
        ('info', (Nodetype.NAME, 'service_msgs/msg/ServiceEventInfo')),
        ('request', at_most_one(f'{base}_Request')),
        ('response', at_most_one(f'{base}_Response'))])
    return found


def _fields(text: str) -> str:
    lines = [line for line in text.splitlines() if line.partition('#')[0].strip()]
    variables = [line for line in lines if '=' not in line.replace('<=', '').partition('#')[0]]
    return text if variables else text + '\n' + _EMPTY


def _references(definition: Any) -> list[str]:
    """Return the message types that a definition's fields name."""
    found = []

    def visit(field: Any) -> None:
        node, rest = field
        if node.name == 'NAME':
            found.append(rest)
        elif node.name in ('ARRAY', 'SEQUENCE'):
            visit(rest[0])
    for _, field in definition[1]:
        visit(field)
    return found
