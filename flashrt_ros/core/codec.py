"""Capsule <-> file. The file is a safetensors file; what reads it treats it as hostile.

Tensors: `state/NAME` for every STATE buffer (of a journal the final rows only) and `latch/NAME` for
the inputs of an inference that was in flight. Types that numpy lacks are stored as the bits that
they are, with their names in `bits`. The container's metadata has two entries:

  flashrt_capsule  canonical JSON of everything else, with the keys of `Image.meta`
  flashrt_sha256   SHA-256 of the whole file with these 64 digits written as zeros

So any changed, added or missing byte is refused, a second spelling of the same header included,
whatever version of the safetensors library wrote it. There is no secret: the digest finds damage,
not forgery, and what passes it is checked against the layout like anything from outside.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import hashlib
import json
import re
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from flashrt_ros.core.capsule import check_name
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BIT_TYPES, DTYPES, dtype_name

FORMAT = 1
MAX_HEADER = 4 << 20        # bytes; names and shapes of a few thousand buffers
_DIGEST = re.compile(rb'"flashrt_sha256":"([0-9a-f]{64})"')
_ZEROS = b'0' * 64
_META: Mapping[str, type | tuple[type, ...]] = {
    'format': int, 'name': str, 'id': str, 'parent': str, 'note': str, 'tick': int, 'step': int,
    'session': int, 'epoch': int, 'stamp_ns': int, 'saved_ns': int, 'exact': bool,
    'witness': dict, 'witness_stamps': dict, 'meaning': dict, 'exactness': dict, 'lengths': dict,
    'bits': dict, 'latch': (dict, type(None))}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: safetensors type name, shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview


@dataclass(frozen=True)
class Image:
    """A whole capsule outside of any session."""

    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]


def encode(image: Image) -> bytes:
    """Return the file's bytes."""
    bits = {n: t.dtype for n, t in image.tensors.items() if t.dtype in BIT_TYPES}
    meta = json.dumps(_checked({**image.meta, 'bits': bits}), sort_keys=True, separators=(',', ':'),
                      allow_nan=False)
    arrays = {name: np.frombuffer(t.data, DTYPES[t.dtype][1]).reshape(t.shape)
              for name, t in image.tensors.items()}
    data = bytearray(save(arrays, {'flashrt_capsule': meta, 'flashrt_sha256': _ZEROS.decode()}))
    digest, where = _digest(data)
    data[where:where + 64] = digest.encode()
    return bytes(data)


def _digest(data: bytes | bytearray | memoryview) -> tuple[str, int]:
    """Return the digest that a file should have, and where its 64 digits stand."""
    size = int.from_bytes(data[:8], 'little')
    if len(data) < 8 or size > MAX_HEADER or size + 8 > len(data):
        raise Refusal(Code.CORRUPT, f'this is no capsule file: {len(data)} bytes with a header of '
                      f'{size}')
    head = bytes(data[:8 + size])
    found = list(_DIGEST.finditer(head))
    if len(found) != 1:
        raise Refusal(Code.CORRUPT, 'this is no capsule file: its header has no digest, or two')
    where = found[0].start(1)
    sha = hashlib.sha256(head[:where] + _ZEROS + head[where + 64:])
    sha.update(memoryview(data)[8 + size:])
    return sha.hexdigest(), where


def decode(data: bytes) -> Image:
    """Return the capsule in a file's bytes.

    Raises Refusal: CORRUPT for anything that `encode` did not write, UNSUPPORTED for another
    format version. The caller has bounded the size.
    """
    digest, where = _digest(data)
    if data[where:where + 64] != digest.encode():
        raise Refusal(Code.CORRUPT, 'the capsule file is damaged: its SHA-256 is '
                      f'{digest[:12]}…, its header says {data[where:where + 12].decode()}…')
    try:
        arrays = load(data)
    except Exception as error:  # the library has one exception for all
        raise Refusal(Code.CORRUPT, f'the capsule file is no safetensors file: {error}') from error
    meta = parse_meta(data)
    tensors: dict[str, Tensor] = {}
    bits = meta.pop('bits')
    for name, array in arrays.items():
        dtype = bits.pop(name, dtype_name(array.dtype))
        if dtype not in DTYPES or DTYPES[dtype][1] != DTYPES[dtype_name(array.dtype)][1]:
            raise Refusal(Code.CORRUPT, f'tensor {name!r} of type {array.dtype} is said to be '
                          f'{dtype!r:.20}')
        tensors[name] = Tensor(dtype, array.shape, array.tobytes())
    if bits:
        raise Refusal(Code.CORRUPT, f'the header types tensors that are not there: {sorted(bits)}')
    return Image(meta, tensors)


def parse_meta(data: bytes) -> dict[str, Any]:
    """Return a file's metadata from its first bytes, of which the header must be whole."""
    size = int.from_bytes(data[:8], 'little')
    if len(data) < 8 or size > MAX_HEADER or 8 + size > len(data):
        raise Refusal(Code.CORRUPT, 'this is no capsule file: its header is cut off')
    try:
        header = json.loads(data[8:8 + size].decode(), object_pairs_hook=_once)
        text = header['__metadata__']['flashrt_capsule']
        meta = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except Refusal:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise Refusal(Code.CORRUPT, f'the capsule file has no readable header: '
                      f'{type(error).__name__}') from error
    return _checked(meta)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise Refusal(Code.CORRUPT, 'a name stands twice in the capsule file\'s header')
    return out


def _no_constant(text: str) -> float:
    raise Refusal(Code.CORRUPT, f'the capsule file\'s header has {text}')


def _checked(meta: Any) -> dict[str, Any]:
    """Return metadata of the right keys, types and ranges."""
    if not isinstance(meta, dict):
        raise Refusal(Code.CORRUPT, 'the capsule file\'s header is no object')
    if type(meta.get('format')) is int and meta['format'] != FORMAT:
        raise Refusal(Code.UNSUPPORTED, f'the capsule file has format {meta["format"]}, this '
                      f'version reads {FORMAT}')
    if meta.keys() != _META.keys():
        raise Refusal(Code.CORRUPT, 'the capsule file\'s header has other fields: '
                      f'{sorted(meta.keys() ^ _META.keys())}')
    for key, kind in _META.items():
        value: Any = meta[key]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise Refusal(Code.CORRUPT, f'the capsule file\'s {key} is {value!r:.60}')
        if type(value) is int and not 0 <= value < 1 << 64:
            raise Refusal(Code.CORRUPT, f'the capsule file\'s {key} is {value}')
    check_name(meta['name'])
    if not re.fullmatch(r'[0-9a-f]{32}', meta['id']) or not re.fullmatch(
            r'([0-9a-f]{32})?', meta['parent']) or len(meta['note']) > 1024:
        raise Refusal(Code.CORRUPT, 'the capsule file\'s id, parent or note is malformed')
    for key in ('meaning', 'exactness', 'bits'):
        if not all(isinstance(v, str) for v in meta[key].values()):
            raise Refusal(Code.CORRUPT, f'the capsule file\'s {key} has a value that is no text')
    for key, number in (('witness', float), ('witness_stamps', int), ('lengths', int)):
        if not all(type(v) is number for v in meta[key].values()):
            raise Refusal(Code.CORRUPT, f'the capsule file\'s {key} has a value that is no number')
    latch = meta['latch']
    if latch is not None and (latch.keys() != {'step', 'stamp_ns'} or not all(
            type(v) is int and 0 <= v < 1 << 64 for v in latch.values())):
        raise Refusal(Code.CORRUPT, 'the capsule file\'s latch is malformed')
    return meta
