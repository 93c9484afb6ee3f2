"""Takes typed values out of the plain data of a file and collects what is wrong with them.

Every error names the place in the file, the value, and what to write instead. A value that is
wrong is replaced by a harmless one, so that one reading finds all errors; none of these stand-ins
leaves `Errors.check`.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import difflib
import math
import re
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.spec import Numbers

MAX_SHOWN = 12          # errors in one message
_TOPIC = re.compile(r'(~/|/)?[A-Za-z_][A-Za-z0-9_]*(/[A-Za-z_][A-Za-z0-9_]*)*')
_TYPE = re.compile(r'[A-Za-z][A-Za-z0-9_]*/(msg|action)/[A-Za-z][A-Za-z0-9_]*')
_FUNCTION = re.compile(r'[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*', re.ASCII)


class Errors:
    """What is wrong with one file, in the order of finding."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[str] = []

    def add(self, path: str, text: str) -> None:
        """Note an error at a path such as `inputs.obs[3].joints`."""
        self.found.append(f'{self.file}: {path}: {text}' if path else f'{self.file}: {text}')

    def check(self) -> None:
        """Raise Refusal(INVALID_POLICY_FILE) if anything was found."""
        if self.found:
            more = len(self.found) - MAX_SHOWN
            lines = self.found[:MAX_SHOWN] + ([f'and {more} more'] if more > 0 else [])
            raise Refusal(Code.INVALID_POLICY_FILE, '\n'.join(lines), errors=tuple(self.found))


def shown(value: object) -> str:
    """Spell a value of the file, shortened."""
    if value is None:
        return 'empty'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, Mapping):
        return 'a mapping'
    text = repr(value)
    return text if len(text) <= 60 else text[:60] + '…'


def nearest(name: str, known: Collection[str]) -> str:
    """Return advice that names the nearest known name, or all of them."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f'did you mean {close[0]}?'
    return f'known are {", ".join(known)}' if known else 'none is known here'


def is_function(text: str) -> bool:
    """Whether text has the form `module:function`."""
    return _FUNCTION.fullmatch(text) is not None


def allowed_module(function: str, modules: Sequence[str]) -> bool:
    """Whether `module:function` comes from an allowed module or from below one."""
    module = function.partition(':')[0]
    return any(module == m or module.startswith(m + '.') for m in modules)


class Reader:
    """One mapping of the file. Remembers which keys were asked for; `close` refuses the others."""

    def __init__(self, data: Mapping[str, Any], path: str, errors: Errors,
                 constants: Mapping[str, Numbers]) -> None:
        self.data = data
        self.path = path
        self.errors = errors
        self.constants = constants
        self.known: dict[str, None] = {}

    def at(self, key: str) -> str:
        """Return the path of a key."""
        return f'{self.path}.{key}' if self.path else key

    def error(self, key: str, text: str) -> None:
        """Note an error about a key."""
        self.errors.add(self.at(key), text)

    def wrong(self, key: str, wanted: str) -> None:
        """Note that the value of a key is not what is wanted."""
        self.error(key, f'is {shown(self.data.get(key))}; write {wanted}')

    def has(self, key: str) -> bool:
        """Whether the key is written."""
        self.known[key] = None
        return key in self.data

    def require(self, *keys: str, what: str = '') -> bool:
        """Note the keys that are missing; return whether all are there."""
        missing = [key for key in keys if not self.has(key)]
        for key in missing:
            self.error(key, f'is missing; write it{what}')
        return not missing

    def close(self, what: str = '') -> None:
        """Note the keys that nobody asked for."""
        for key in self.data:
            if key not in self.known:
                self.error(key, f'is no key{what}; {nearest(key, self.known)}')

    # -- one value each; the default stands where the key is absent or wrong --

    def text(self, key: str, default: str = '') -> str:
        """Return non-empty text."""
        if not self.has(key):
            return default
        value = self.data[key]
        if isinstance(value, str) and value:
            return value
        self.wrong(key, 'text, in quotes where YAML would read it as something else')
        return default

    def maybe_text(self, key: str) -> str | None:
        """Return non-empty text, or None where the key is absent."""
        return self.text(key) or None

    def choice(self, key: str, default: str, choices: Sequence[str]) -> str:
        """Return one of the choices."""
        value = self.text(key, default)
        if key in self.data and isinstance(self.data[key], str) and value not in choices:
            self.error(key, f'is {shown(value)}; {nearest(value, choices)}')
            return default
        return value

    def flag(self, key: str, default: bool) -> bool:
        """Return a truth value."""
        if not self.has(key):
            return default
        value = self.data[key]
        if isinstance(value, bool):
            return value
        self.wrong(key, 'true or false')
        return default

    def maybe_number(self, key: str, *, low: float = -math.inf, above: float = -math.inf
                     ) -> float | None:
        """Return a finite number `>= low` and `> above`; None where absent or null."""
        if not self.has(key) or self.data[key] is None:
            return None
        value = as_number(self.data[key])
        if value is not None and value >= low and value > above:
            return value
        bound = (f' above {above:g}' if above > -math.inf
                 else f' of at least {low:g}' if low > -math.inf else '')
        self.wrong(key, f'a finite number{bound}')
        return None

    def number(self, key: str, default: float, *, low: float = -math.inf, above: float = -math.inf
               ) -> float:
        """Return a finite number; here null is an error."""
        if self.has(key) and self.data[key] is None:
            self.wrong(key, 'a finite number, or remove the key')
        value = self.maybe_number(key, low=low, above=above)
        return default if value is None else value

    def maybe_integer(self, key: str, *, low: int = 0) -> int | None:
        """Return a whole number `>= low`; None where absent or null."""
        if not self.has(key) or self.data[key] is None:
            return None
        value = as_integer(self.data[key])
        if value is not None and low <= value < 2 ** 31:
            return value
        self.wrong(key, f'a whole number of at least {low}')
        return None

    def integer(self, key: str, default: int, *, low: int = 0) -> int:
        """Return a whole number; here null is an error."""
        if self.has(key) and self.data[key] is None:
            self.wrong(key, 'a whole number, or remove the key')
        value = self.maybe_integer(key, low=low)
        return default if value is None else value

    def integers(self, key: str, count: int | None = None, *, low: int = 0) -> tuple[int, ...]:
        """Return a list of whole numbers, empty where absent."""
        if not self.has(key):
            return ()
        value = self.data[key]
        found = [as_integer(v) for v in value] if isinstance(value, list) else []
        if found and all(n is not None and low <= n < 2 ** 31 for n in found) and (
                count is None or len(found) == count):
            return tuple(n for n in found if n is not None)
        self.wrong(key, f'a list of {"" if count is None else f"{count} "}whole numbers of at '
                   f'least {low}')
        return ()

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of different names, empty where absent."""
        if not self.has(key):
            return ()
        value = self.data[key]
        if not isinstance(value, list) or not value or not all(
                isinstance(v, str) and v for v in value):
            self.wrong(key, 'a list of names, in quotes where YAML would read them as something '
                       'else')
            return ()
        twice = sorted({v for v in value if value.count(v) > 1})
        if twice:
            self.error(key, f'holds {twice[0]} twice; remove one')
        return tuple(value)

    def numbers(self, key: str, default: Numbers, count: int | None = None, *,
                above: float = -math.inf) -> Numbers:
        """Return one number for all, or a list of `count`; the name of a constant stands for it."""
        if not self.has(key):
            return default
        value = as_numbers(self.data[key], self.at(key), self.errors, self.constants)
        if value is None:
            return default
        if isinstance(value, tuple) and count is not None and len(value) != count:
            self.error(key, f'has {len(value)} numbers for {count} values; write {count}, or one '
                       'number for all')
            return default
        if min(value if isinstance(value, tuple) else (value,)) <= above:
            self.wrong(key, f'numbers above {above:g}')
            return default
        return value

    def topic(self, key: str) -> str | None:
        """Return a topic name, None where absent."""
        value = self.maybe_text(key)
        if value is not None and not _TOPIC.fullmatch(value):
            self.error(key, f'is {shown(value)}; write a topic name such as joint_states')
        return value

    def type(self, key: str) -> str | None:
        """Return the name of a message or action type, None where absent."""
        value = self.maybe_text(key)
        if value is not None and not _TYPE.fullmatch(value):
            self.error(key, f'is {shown(value)}; write it whole, such as sensor_msgs/msg/Imu')
        return value

    def function(self, key: str, modules: Sequence[str], value: str | None = None) -> str | None:
        """Return `module:function` from an allowed module, None where absent."""
        text = self.maybe_text(key) if value is None else value
        if text is None:
            return None
        if not is_function(text):
            self.error(key, f'is {shown(text)}; write module:function')
        elif not allowed_module(text, modules):
            self.error(key, f'wants code from {text.partition(":")[0]}, which may not supply code; '
                       f'add the module to python_modules (now: {", ".join(modules) or "none"})')
        return text

    def section(self, key: str) -> Reader | None:
        """Return a reader of the mapping at a key, None where absent or wrong."""
        if not self.has(key):
            return None
        value = self.data[key]
        if isinstance(value, Mapping):
            return Reader(value, self.at(key), self.errors, self.constants)
        self.wrong(key, 'a mapping of keys to values')
        return None

    def sections(self, key: str) -> list[Reader]:
        """Return readers of the list of mappings at a key."""
        if not self.has(key):
            return []
        value = self.data[key]
        if not isinstance(value, list) or not value:
            self.wrong(key, 'a list of mappings')
            return []
        readers = []
        for i, item in enumerate(value):
            path = f'{self.at(key)}[{i}]'
            if isinstance(item, Mapping):
                readers.append(Reader(item, path, self.errors, self.constants))
            else:
                self.errors.add(path, f'is {shown(item)}; write a mapping in braces')
        return readers

    def plain(self, key: str) -> Mapping[str, Any]:
        """Return a mapping of whatever the receiver understands, empty where absent."""
        section = self.section(key)
        if section is None:
            return {}
        if not _finite(section.data):
            self.error(key, 'holds a number that is not finite; write finite ones')
        return section.data


def as_number(value: object) -> float | None:
    """Return a finite number as float, None for anything else; a truth value is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_integer(value: object) -> int | None:
    """Return a whole number, None for anything else; 2.0 is one, a truth value is none."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    number = as_number(value)
    return int(number) if number is not None and number.is_integer() else None


def as_numbers(value: object, path: str, errors: Errors, constants: Mapping[str, Numbers]
               ) -> Numbers | None:
    """Return a number, a tuple of numbers, or what a constant's name stands for."""
    if isinstance(value, str):
        if value in constants:
            return constants[value]
        errors.add(path, f'is {shown(value)}, which is no number and no name under constants; '
                   f'{nearest(value, constants)}')
        return None
    if isinstance(value, list) and value:
        for i, item in enumerate(value):
            if as_number(item) is None:
                errors.add(f'{path}[{i}]', f'is {shown(item)}; write a finite number')
                return None
        return tuple(float(item) for item in value)
    number = as_number(value)
    if number is None:
        errors.add(path, f'is {shown(value)}; write a finite number, a list of such, or the name '
                   'of a constant')
    return number


def _finite(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(_finite(v) for v in value.values())
    if isinstance(value, list):
        return all(_finite(v) for v in value)
    return not isinstance(value, float) or math.isfinite(value)
