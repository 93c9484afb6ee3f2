"""P9: whatever is wrong with a stored capsule, it is refused, and nothing crashes."""
from __future__ import annotations

import json
import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from safetensors import deserialize
from safetensors.numpy import load

from flashrt_ros.core import codec
from flashrt_ros.core.codec import Image, Tensor
from flashrt_ros.core.errors import Code, Refusal


def image(**changes: Any) -> Image:
    """Return a small whole capsule."""
    meta = {'format': 1, 'name': 'a', 'id': 'a' * 32, 'parent': 'b' * 32, 'note': 'a note with "',
            'tick': 3, 'step': 4, 'session': 5, 'epoch': 6, 'stamp_ns': 7, 'saved_ns': 8,
            'exact': True, 'witness': {'joint_position.a': 0.25}, 'witness_stamps':
            {'joint_position.a': 7}, 'meaning': {'weights': 'x'}, 'exactness': {'lib': '1'},
            'lengths': {'n': 2}, 'latch': None, **changes}
    h = np.arange(8, dtype=np.float32)
    return Image(meta, {'state/h': Tensor('F32', (8,), h.tobytes()),
                        'state/k': Tensor('BF16', (2, 3), bytes(12)),
                        'state/n': Tensor('I64', (1,), (2).to_bytes(8, 'little'))})


def test_round_trip() -> None:
    data = codec.encode(image())
    back = codec.decode(data)
    assert back.meta == image().meta
    assert {n: (t.dtype, t.shape, bytes(t.data)) for n, t in back.tensors.items()} == {
        n: (t.dtype, t.shape, t.data) for n, t in image().tensors.items()}


def test_it_is_a_safetensors_file_that_others_can_read() -> None:
    data = codec.encode(image())
    assert {n for n, _ in deserialize(data)} == {'state/h', 'state/k', 'state/n'}
    one = codec.encode(Image(image().meta, {'state/h': image().tensors['state/h']}))
    np.testing.assert_array_equal(load(one)['state/h'], np.arange(8, dtype=np.float32))


def test_p9_every_single_bit_counts() -> None:
    data = codec.encode(image())
    for i in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[i] ^= 1 << bit
            with pytest.raises(Refusal):
                codec.decode(bytes(changed))


def test_p9_truncation_and_extension() -> None:
    data = codec.encode(image())
    for n in range(len(data)):
        with pytest.raises(Refusal):
            codec.decode(data[:n])
    for tail in (b'\0', b' ', data):
        with pytest.raises(Refusal):
            codec.decode(data + tail)


def forge(header: str, body: bytes) -> bytes:
    """Return a file with this header and the digest that belongs to it."""
    head = header.encode()
    data = bytearray(len(head).to_bytes(8, 'little') + head + body)
    digest, where = codec._digest(data)
    data[where:where + 64] = digest.encode()
    return bytes(data)


def parts() -> tuple[dict[str, Any], bytes]:
    """Return the header and body of a good file, its digest zero again."""
    data = codec.encode(image())
    n = int.from_bytes(data[:8], 'little')
    header = re.sub(r'("flashrt_sha256":")[0-9a-f]{64}', r'\g<1>' + '0' * 64,
                    data[8:8 + n].decode())
    return json.loads(header), data[8 + n:]


def compact(header: dict[str, Any]) -> str:
    """Return JSON as safetensors spells it."""
    return json.dumps(header, separators=(',', ':'))


def meta_changed(**changes: Any) -> bytes:
    """Return a file with changed metadata and a digest that fits."""
    header, body = parts()
    meta = json.loads(header['__metadata__']['flashrt_capsule'])
    meta.update(changes)
    header['__metadata__']['flashrt_capsule'] = json.dumps(meta)
    return forge(compact(header), body)


def test_p9_a_second_spelling_of_the_same_header_has_another_digest() -> None:
    header, body = parts()
    good = codec.encode(image())
    digest = re.search(rb'flashrt_sha256":"([0-9a-f]{64})', good)
    assert digest is not None
    for text in (compact(header).replace('"state/h":', '"state/h": '),
                 compact(dict(reversed(header.items()))), compact(header) + ' ' * 8):
        spelled = bytearray(len(text).to_bytes(8, 'little') + text.encode() + body)
        where = codec._digest(spelled)[1]
        spelled[where:where + 64] = digest.group(1)
        with pytest.raises(Refusal, match='damaged'):
            codec.decode(bytes(spelled))


@pytest.mark.parametrize('hole', [
    {'state/h': {'dtype': 'F32', 'shape': [8], 'data_offsets': [0, 32]},
     'state/g': {'dtype': 'F32', 'shape': [8], 'data_offsets': [0, 32]}},      # overlap
    {'state/h': {'dtype': 'F32', 'shape': [8], 'data_offsets': [0, 16]}},      # wrong size
    {'state/h': {'dtype': 'F32', 'shape': [1 << 62], 'data_offsets': [0, 32]}},
    {'state/h': {'dtype': 'F32', 'shape': [-8], 'data_offsets': [0, 32]}},
    {'state/h': {'dtype': 'F999', 'shape': [8], 'data_offsets': [0, 32]}},
    {'state/h': {'dtype': 'F32', 'shape': [8], 'data_offsets': [8, 40]}},      # hole at the start
    {'state/h': {'dtype': 'F32', 'shape': [8], 'data_offsets': [32, 0]}},
    {'state/h': {'dtype': 'F32', 'shape': [2**63] * 4, 'data_offsets': [0, 32]}},
], ids=['overlap', 'size', 'huge', 'negative', 'dtype', 'hole', 'backwards', 'overflow'])
def test_p9_hostile_tensors_with_a_digest_that_fits(hole: dict[str, Any]) -> None:
    header, _ = parts()
    text = compact({'__metadata__': header['__metadata__'], **hole})
    with pytest.raises(Refusal) as error:
        codec.decode(forge(text, bytes(32)))
    assert error.value.code is Code.CORRUPT


def test_p9_a_name_that_stands_twice() -> None:
    header, body = parts()
    text = compact(header)
    h = compact(header['state/h'])
    with pytest.raises(Refusal):
        codec.decode(forge(text.replace('"state/h":', f'"state/h":{h},"state/h":', 1), body))


@pytest.mark.parametrize('change', [
    {'name': '../../etc/passwd'}, {'name': ''}, {'id': 'A' * 32}, {'id': 'a'}, {'tick': -1},
    {'tick': 1 << 64}, {'tick': 1.5}, {'tick': True}, {'note': 'x' * 2000}, {'exact': 1},
    {'witness': {'a': '1'}}, {'lengths': {'n': -1.0}}, {'meaning': {'a': 1}}, {'extra': 1},
    {'latch': {'step': -1, 'stamp_ns': 0}}, {'latch': []}, {'witness': []}, {'parent': 'x'},
], ids=str)
def test_p9_hostile_metadata_with_a_digest_that_fits(change: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as error:
        codec.decode(meta_changed(**change))
    assert error.value.code in (Code.CORRUPT, Code.INVALID_NAME)


def test_another_format_version_is_named() -> None:
    with pytest.raises(Refusal, match='format 2') as error:
        codec.decode(meta_changed(format=2))
    assert error.value.code is Code.UNSUPPORTED


@pytest.mark.parametrize('text', ['', '{', '[]', 'null', '[' * 100000, '{"a":NaN}'])
def test_p9_no_header_at_all(text: str) -> None:
    data = len(text).to_bytes(8, 'little') + text.encode() + bytes(64)
    with pytest.raises(Refusal):
        codec.decode(data)
    with pytest.raises(Refusal):
        codec.parse_meta(data)


def test_p9_an_absurd_header_size_is_refused_before_anything_is_read() -> None:
    for n in (1 << 63, codec.MAX_HEADER + 1, (1 << 64) - 1):
        with pytest.raises(Refusal):
            codec.decode(n.to_bytes(8, 'little') + bytes(100))


@given(st.binary(max_size=400))
@settings(max_examples=300, deadline=None)
def test_p9_random_bytes(data: bytes) -> None:
    with pytest.raises(Refusal):
        codec.decode(data)
