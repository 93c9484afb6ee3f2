"""The engine cache: keys, headers, damage, and processes that build at once."""
from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.backends.tensorrt_api import EngineTensor, Library
from flashrt_ros.backends.tensorrt_build import BuildOptions, Built
from flashrt_ros.backends.tensorrt_cache import EngineCache, default_folder, key_of
from flashrt_ros.backends.tensorrt_plan import (
    HEADER,
    MAGIC,
    note_of,
    open_engine,
    plan_header,
    same_version,
    write_entry,
)
from flashrt_ros.core.errors import Code, Refusal
from test.backends.tensorrt_double import plan

LIBRARY = Library(None, 'tensorrt', '10.13.3.9')
TENSORS = (EngineTensor('obs', True, (1, 6), 'F32'),)
KEY = key_of('a' * 64, LIBRARY, BuildOptions(arch='sm_110'))


class Builds:
    """Counts how often an engine is built; each build gives other bytes, as real ones do."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Built:
        self.count += 1
        return Built(plan(n=self.count, process=os.getpid()), TENSORS, True)


@pytest.fixture
def cache(tmp_path: Path) -> EngineCache:
    return EngineCache(tmp_path / 'engines')


def test_an_engine_is_built_once(cache: EngineCache) -> None:
    build = Builds()
    first = cache.get(KEY, LIBRARY, build)
    again = cache.get(KEY, LIBRARY, build)
    assert build.count == 1
    assert (first.fresh, again.fresh) == (True, False)
    assert (first.plan, first.note) == (again.plan, again.note)
    assert again.note.tensors == TENSORS
    assert [p.name for p in cache.folder.iterdir()] == [cache.path(KEY).name]


@pytest.mark.parametrize('change', [
    {'source': 'b' * 64}, {'version': '10.14.1.48'}, {'library': 'tensorrt_rtx'},
    {'arch': 'sm_89'}, {'precision': 'fp16'}, {'workspace_mib': 64}, {'optimization_level': 5},
    {'shapes': {'obs': [1, 7]}}])
def test_everything_that_an_engine_depends_on_is_in_the_key(change: Any, cache: EngineCache
                                                            ) -> None:
    assert set(change) <= set(KEY)
    assert cache.path({**KEY, **change}) != cache.path(KEY)
    assert cache.path(dict(reversed(KEY.items()))) == cache.path(KEY)


def damaged(data: bytes) -> dict[str, bytes]:
    """Return what may lie in place of an entry."""
    middle = len(data) - 40
    return {'empty': b'', 'cut in the note': data[:40], 'cut': data[:-1], 'longer': data + b'x',
            'foreign': b'GIF89a' * 100, 'magic only': MAGIC,
            'absurd note': MAGIC + b'\xff' * 8 + data[16:],
            'a bit in the plan': data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1:],
            'note of another key': data.replace(b'sm_110', b'sm_089'),
            'no plan': data[:data.index(b'ftrt')] + b'X' + data[data.index(b'ftrt') + 1:],
            'other version': data.replace(b'\x0a\x0d\x03\x09', b'\x0a\x0d\x02\x06')}


@pytest.mark.parametrize('kind', damaged(bytes(99) + b'ftrt'))
def test_a_bad_entry_is_recognised_and_built_again(kind: str, cache: EngineCache) -> None:
    build = Builds()
    good = cache.get(KEY, LIBRARY, build)
    path = cache.path(KEY)
    bad = damaged(path.read_bytes())[kind]
    assert bad != path.read_bytes()
    path.write_bytes(bad)
    if kind != 'a bit in the plan':         # seen from the header, before the plan is read
        assert cache.find(KEY, LIBRARY) is None
    again = cache.get(KEY, LIBRARY, build)
    assert again.fresh
    assert build.count == 2
    assert again.plan != good.plan
    assert cache.get(KEY, LIBRARY, build).plan == again.plan
    assert len(list(cache.folder.iterdir())) == 1


def test_the_header_tells_without_reading_the_plan(cache: EngineCache) -> None:
    cache.get(KEY, LIBRARY, Builds())
    entry = open_engine(cache.path(KEY))
    assert entry.header is not None
    assert entry.header.title == 'TensorRT 10.13.3.9'
    assert entry.note is not None
    assert dict(entry.note.key) == KEY
    assert entry.size == len(entry.read())


def test_versions_are_compared_as_the_header_holds_them() -> None:
    header = plan_header(plan(version=(1, 5, 0, 300 & 0xFF), tag=b'vtrt')[:HEADER])
    assert header is not None
    assert same_version(header, Library(None, 'tensorrt_rtx', '1.5.0.300'))
    assert not same_version(header, Library(None, 'tensorrt_rtx', '1.5.1.300'))
    assert not same_version(header, Library(None, 'tensorrt_rtx', '1.5.0.301'))
    unknown = plan_header(b'ftrt\x01\0\0\0' + bytes(56))
    assert unknown is not None
    assert not same_version(unknown, LIBRARY)
    assert plan_header(b'ftrt') is None


def test_a_build_that_fails_leaves_nothing(cache: EngineCache) -> None:
    def fail() -> Built:
        raise Refusal(Code.BACKEND, 'no')
    with pytest.raises(Refusal):
        cache.get(KEY, LIBRARY, fail)
    assert not cache.folder.exists()


def test_a_folder_that_cannot_be_written_costs_the_cache_and_not_the_engine(
        tmp_path: Path, caplog: Any) -> None:
    (tmp_path / 'file').write_text('not a folder')
    cache = EngineCache(tmp_path / 'file' / 'engines')
    got = cache.get(KEY, LIBRARY, Builds())
    assert got.path is None
    assert got.fresh
    assert 'cannot be written' in caplog.text


def test_an_interrupted_write_leaves_no_part(cache: EngineCache, monkeypatch: Any) -> None:
    built = Builds()()
    note = note_of(built.plan, KEY, built.tensors, True)

    def stop(*_: Any) -> None:
        raise OSError('disk full')
    monkeypatch.setattr('flashrt_ros.backends.tensorrt_plan.os.fsync', stop)
    with pytest.raises(OSError, match='disk full'):
        write_entry(cache.path(KEY), built.plan, note)
    assert list(cache.folder.iterdir()) == []


def _process(folder: str, barrier: Any, out: Any) -> None:
    build = Builds()

    def together() -> Built:
        barrier.wait(20)        # both are inside their build now
        return build()
    got = EngineCache(Path(folder)).get(KEY, LIBRARY, together)
    out.put((os.getpid(), build.count, got.note.sha256))


def test_two_processes_that_build_at_once_run_the_same_engine(cache: EngineCache) -> None:
    spawn = multiprocessing.get_context('spawn')
    barrier, out = spawn.Barrier(2), spawn.Queue()
    both = [spawn.Process(target=_process, args=(str(cache.folder), barrier, out))
            for _ in range(2)]
    for p in both:
        p.start()
    (_, built_a, a), (_, built_b, b) = (out.get(timeout=30) for _ in both)
    for p in both:
        p.join(30)
    assert (built_a, built_b) == (1, 1), 'they did not build at once'
    assert a == b == open_engine(cache.path(KEY)).note.sha256  # type: ignore[union-attr]
    assert len(list(cache.folder.iterdir())) == 1


def test_the_cache_lies_where_the_user_s_caches_lie(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    assert default_folder() == tmp_path / 'flashrt_ros' / 'engines'
