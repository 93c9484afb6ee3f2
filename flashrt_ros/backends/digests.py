"""Digests of files, sources and Python attributes: what identifies a policy, what it hides."""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
import hashlib
import inspect
import logging
from pathlib import Path
import random
import types
from typing import Any

import numpy as np

from flashrt_ros.core.errors import Code, Refusal

_DEPTH = 6  # attributes of attributes of …: deeper nesting is compared by type only


def file_digest(path: Path, what: str = 'file') -> str:
    """Return SHA-256 of a whole file. Raises Refusal(NOT_FOUND or IO) that names it."""
    sha = hashlib.sha256()
    try:
        with path.open('rb') as f:
            while part := f.read(1 << 20):
                sha.update(part)
        return sha.hexdigest()
    except FileNotFoundError as e:
        raise Refusal(Code.NOT_FOUND, f'{what} {path} does not exist') from e
    except OSError as e:
        raise Refusal(Code.IO, f'{what} {path} cannot be read: {e}') from e


def source_digest(*things: Any) -> str:
    """Return SHA-256 over the source files of modules, classes or functions, by module name."""
    files: dict[str, Path] = {}
    for thing in things:
        module = inspect.getmodule(thing)
        path = getattr(module, '__file__', None)
        if module is None or path is None:
            raise Refusal(Code.UNSUPPORTED, f'{thing!r} has no source file, so a capsule could '
                          'not tell its code from another; put it into a module')
        files[module.__name__] = Path(path)
    sha = hashlib.sha256()
    for name, path in sorted(files.items()):
        sha.update(f'{name} {file_digest(path, "source")}\n'.encode())
    return sha.hexdigest()


def attribute_digests(thing: object, prefix: str = '',
                      array_bytes: Callable[[Any], bytes | None] = lambda _: None
                      ) -> dict[str, str]:
    """Return a digest of each attribute of an object, by name.

    `array_bytes` gives the bytes of foreign arrays (tensors), None for everything else.
    """
    items = dict(getattr(thing, '__dict__', {}))
    for cls in type(thing).__mro__:
        for name in _slots(cls):
            if hasattr(thing, name):
                items.setdefault(name, getattr(thing, name))
    return {prefix + name: value_digest(value, array_bytes) for name, value in items.items()}


def value_digest(value: Any, array_bytes: Callable[[Any], bytes | None] = lambda _: None) -> str:
    """Return a digest of a value and everything it refers to, equal for equal contents."""
    sha = hashlib.sha256()
    _feed(sha.update, value, array_bytes, set(), 0)
    return sha.hexdigest()[:16]


def _slots(cls: type) -> Iterable[str]:
    slots = cls.__dict__.get('__slots__', ())
    return [s for s in ((slots,) if isinstance(slots, str) else slots)
            if s not in ('__dict__', '__weakref__')]


def _feed(put: Callable[[bytes], object], value: Any,
          array_bytes: Callable[[Any], bytes | None], seen: set[int], depth: int) -> None:
    """Feed type and content of `value`; cycles and great depth end in the type's name."""
    put(f'<{type(value).__module__}.{type(value).__qualname__}>'.encode())
    raw = array_bytes(value)
    if raw is not None:
        put(raw)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes):
        put(repr(value).encode())
    elif isinstance(value, np.ndarray | np.generic):
        put(f'{value.dtype}{value.shape}'.encode())
        put(repr(value.tolist()).encode() if value.dtype.hasobject else value.tobytes())
    elif isinstance(value, types.ModuleType | types.BuiltinFunctionType | type | logging.Logger
                    | logging.Handler):  # a logger's caches are nobody's state
        put(getattr(value, '__qualname__', getattr(value, '__name__', '')).encode())
    elif id(value) in seen or depth >= _DEPTH:
        return
    else:
        _feed_container(put, value, array_bytes, seen | {id(value)}, depth + 1)


def _feed_container(put: Callable[[bytes], object], value: Any,
                    array_bytes: Callable[[Any], bytes | None], seen: set[int],
                    depth: int) -> None:
    if isinstance(value, np.random.Generator):
        put(repr(value.bit_generator.state).encode())
    elif isinstance(value, types.MethodType):
        put(value.__qualname__.encode())
        _feed(put, value.__self__, array_bytes, seen, depth)
    elif isinstance(value, types.FunctionType):  # what it closed over, and mutable defaults
        put(value.__qualname__.encode())
        cells = [c.cell_contents for c in value.__closure__ or () if _filled(c)]
        for v in [*cells, *(value.__defaults__ or ()), value.__kwdefaults__]:
            _feed(put, v, array_bytes, seen, depth)
    elif isinstance(value, types.GeneratorType):
        put(repr(getattr(value.gi_frame, 'f_lasti', None)).encode())
        _feed(put, dict(getattr(value.gi_frame, 'f_locals', {})), array_bytes, seen, depth)
    elif isinstance(value, Mapping):
        for k, v in value.items():
            _feed(put, k, array_bytes, seen, depth)
            _feed(put, v, array_bytes, seen, depth)
    elif isinstance(value, list | tuple | deque):
        put(str(len(value)).encode())
        for v in value:
            _feed(put, v, array_bytes, seen, depth)
    elif isinstance(value, set | frozenset):
        put(''.join(sorted(value_digest(v, array_bytes) for v in value)).encode())
    elif hasattr(value, 'getstate') and callable(value.getstate):  # random.Random
        put(repr(value.getstate()).encode())
    else:
        items = {**{n: getattr(value, n) for c in type(value).__mro__ for n in _slots(c)
                    if hasattr(value, n)}, **getattr(value, '__dict__', {})}
        text = '' if items else repr(value)
        put(text.encode() if ' at 0x' not in text else b'')  # itertools.count shows its number
        for name, v in sorted(items.items()):
            put(str(name).encode())
            _feed(put, v, array_bytes, seen, depth)


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def process_generators() -> dict[str, str]:
    """Return digests of the generators that belong to the whole process: none may be drawn from."""
    return {'global generator of random': value_digest(random.getstate()),
            'global generator of numpy.random': value_digest(np.random.get_state())}
