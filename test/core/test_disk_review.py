"""The DISK tier where something goes wrong: budgets, hostile folders, drops beside a write."""
from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import threading
from typing import Any

import pytest

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.reference import Recurrent
from flashrt_ros.core import codec
from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.codec import Image
from flashrt_ros.core.disk import CapsuleFolder
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.session import Options, Session
from test.conformance.cases import CASES, OWNER_STATE, Owner
from test.conformance.checks import refused

CASE = CASES[0]
JOURNAL = next(c for c in CASES if c.name == 'host-journal')


def opened(policy: Any, device: Any = None, **options: Any) -> Owner:
    events = options.pop('on_event', None)
    return Owner(Session(policy, device or HostDevice(), host_state=OWNER_STATE, on_event=events,
                         options=Options(**{'threaded': False, **options})))


def names(o: Owner) -> dict[str, str]:
    return {c.name: c.tier.name for c in o.session.list()}


# -- refusals without a side effect -----------------------------------------------------------


def test_p7_a_save_that_may_not_be_persisted_saves_and_replaces_nothing(tmp_path: Path) -> None:
    o = CASE.session(directory=tmp_path, disk_bytes=1)
    o.step()
    o.session.save('a')
    old = o.everything()
    o.step()
    before = o.session.list()
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'b', persist=True)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'a', persist=True, overwrite=True)
    assert o.session.list() == before
    o.restore('a')
    assert o.everything() == old
    o.close()


def test_p7_a_keep_that_may_not_persist_pins_and_leases_nothing(tmp_path: Path) -> None:
    for options, code in (({}, Code.UNSUPPORTED),
                          ({'directory': tmp_path, 'disk_bytes': 1}, Code.BUDGET_EXCEEDED)):
        o = CASE.session(**options)
        o.session.save('a')
        refused(code, o.session.keep, 'a', pin=True, persist=True, lease_s=5.0)
        assert not o.session.list()[-1].pinned
        assert o.session._store.find('a').lease_until == 0.0
        o.close()


def test_p15_persists_that_wait_count_against_the_disk_s_budget(tmp_path: Path) -> None:
    gate = threading.Event()
    o = CASE.session(directory=tmp_path, disk_bytes=3 * 4096, threaded=True)
    o.session._worker.post(lambda: gate.wait(10) and None)
    codes = []
    for i in range(200):
        try:
            o.session.save(f'c{i}', persist=True)
        except Refusal as error:
            codes.append(error.code)
    gate.set()
    o.close()
    assert set(codes) <= {Code.BUDGET_EXCEEDED}
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 3 * 4096


def test_p21_a_capsule_is_durable_in_no_answer_before_its_file_is_there(tmp_path: Path) -> None:
    gate = threading.Event()
    o = CASE.session(directory=tmp_path, threaded=True)
    o.step()
    o.session._worker.post(lambda: gate.wait(10) and None)
    o.session.save('a', persist=True)
    assert not o.session.keep('a').durable
    assert not o.session.list()[-1].durable
    assert o.session.usage().disk == 0
    gate.set()
    o.close()
    assert o.session.list()[-1].durable


def test_p15_a_capsule_that_is_being_written_is_not_evicted(tmp_path: Path) -> None:
    gate = threading.Event()
    o = CASE.session(directory=tmp_path, threaded=True, max_capsules=1)
    o.step()
    o.session._worker.post(lambda: gate.wait(10) and None)
    o.session.save('a', persist=True)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'b')
    assert names(o) == {'origin': 'DEVICE', 'a': 'DEVICE'}
    gate.set()
    o.close()


def test_p15_a_load_makes_room_on_the_host_first(tmp_path: Path) -> None:
    o = CASE.session(directory=tmp_path)
    n = o.session._live.plain.nbytes
    o.step()
    for name in ('a', 'b'):
        o.session.save(name, persist=True)
    o.close()
    o = CASE.session(directory=tmp_path, host_bytes=n)
    for name in ('a', 'b', 'a'):
        o.session.load(name).result(5)
        assert names(o)[name] == 'HOST'
        assert o.session.usage().host == n
    o.session.keep('a', pin=True)
    error = o.session.load('b').exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.BUDGET_EXCEEDED
    o.close()


def test_p15_a_file_that_could_not_be_written_frees_its_share_of_the_disk(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = CASE.session(directory=tmp_path, disk_bytes=4096)
    o.step()

    def full(*_: Any) -> str:
        raise Refusal(Code.IO, 'no space left on device')
    with monkeypatch.context() as m:
        m.setattr(o.session._folder, 'write', full)
        for i in range(20):
            o.session.save(f'c{i}', persist=True)
    o.session.save('a', persist=True)
    assert o.session.list()[-1].durable
    o.close()


# -- origin is nobody's file --------------------------------------------------------------------


def test_origin_is_neither_persisted_nor_read_from_a_file(tmp_path: Path) -> None:
    o = CASE.session(directory=tmp_path)
    fresh = o.everything()
    refused(Code.INVALID_NAME, o.session.keep, 'origin', persist=True)
    refused(Code.INVALID_NAME, o.session.persist, 'origin')
    o.run(2)
    o.session.save('a', persist=True)
    o.close()
    image = codec.decode((tmp_path / 'a.capsule').read_bytes())
    (tmp_path / 'origin.capsule').write_bytes(
        codec.encode(Image({**image.meta, 'name': 'origin'}, image.tensors)))
    events: list[Event] = []
    o = CASE.session(directory=tmp_path, on_event=events.append)
    assert names(o)['origin'] == 'DEVICE'
    assert any('origin.capsule' in e.message for e in events)
    o.run(3)
    o.session.apply(o.session.plan_reset()).result()
    assert o.everything() == fresh
    o.close()


# -- hostile folders ------------------------------------------------------------------------------


def forged(folder: Path, **metas: Mapping[str, Any]) -> None:
    """Write capsules that differ from a real one in metadata."""
    o = CASE.session(directory=folder)
    o.run(2)
    o.session.save('real', persist=True)
    o.close()
    image = codec.decode((folder / 'real.capsule').read_bytes())
    for name, meta in metas.items():
        (folder / f'{name}.capsule').write_bytes(
            codec.encode(Image({**image.meta, 'name': name, **meta}, image.tensors)))


def test_p9_two_files_with_one_id_are_one_capsule_and_one_refusal(tmp_path: Path) -> None:
    forged(tmp_path, twin={})
    events: list[Event] = []
    o = CASE.session(directory=tmp_path, on_event=events.append)
    told = [n for n in names(o) if n != 'origin']
    assert len(told) == 1
    assert any(e.kind is EventKind.REFUSED for e in events)
    for name in ('real', 'twin'):
        try:
            o.session.drop(name)
        except Refusal as error:
            assert error.code is Code.NOT_FOUND
    assert list(names(o)) == ['origin']
    o.close()


def test_p9_a_lineage_in_a_circle_hangs_nobody(tmp_path: Path) -> None:
    a, b = 'a' * 32, 'b' * 32
    forged(tmp_path, a={'id': a, 'parent': b}, b={'id': b, 'parent': a},
           c={'id': 'c' * 32, 'parent': 'c' * 32})
    o = CASE.session(directory=tmp_path)
    for name in ('a', 'b', 'c'):
        o.session.load(name).result(10)
        o.restore(name)
        with ThreadPoolExecutor(1) as pool:
            for ask in ({'capsules': 1 << 31}, {'steps': 1000}):
                future = pool.submit(o.session.plan_rollback, lock_step=True, **ask)
                error = future.exception(5)
                assert isinstance(error, Refusal), error
                assert error.code is Code.NOTHING_TO_ROLL_BACK
    o.close()


def test_p19_a_folder_loses_only_what_a_killed_writer_left(tmp_path: Path) -> None:
    (tmp_path / 'film.part-1').write_bytes(b'mine')
    (tmp_path / 'notes.part-of-it').mkdir()
    (tmp_path / ('a.part-' + '0' * 16)).write_bytes(b'half')
    CapsuleFolder(tmp_path).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ['.lock', 'film.part-1',
                                                          'notes.part-of-it']


# -- drop and the disk ----------------------------------------------------------------------------


def test_p21_a_dropped_capsule_does_not_come_back_though_its_file_was_another_s(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []
    failed = threading.Event()

    def tell(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.PERSIST_FAILED:
            failed.set()
    o = CASE.session(directory=tmp_path)
    o.step()
    o.session.save('a', persist=True)
    o.close()
    o = CASE.session(directory=tmp_path, threaded=True, on_event=tell)
    o.step()

    def full(*_: Any) -> str:
        raise Refusal(Code.IO, 'no space left on device')
    monkeypatch.setattr(o.session._folder, 'write', full)
    o.session.save('a', persist=True, overwrite=True)
    assert failed.wait(10)
    assert (tmp_path / 'a.capsule').exists(), 'the old file stays where the new one fails'
    o.session.drop('a')
    o.close()
    o = CASE.session(directory=tmp_path)
    assert list(names(o)) == ['origin']
    o.close()


def test_a_folder_that_fails_ends_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                            ) -> None:
    events: list[Event] = []
    told = threading.Event()

    def tell(event: Event) -> None:
        events.append(event)
        if event.kind is EventKind.PERSISTED and event.info.name == 'c':
            told.set()
    o = CASE.session(directory=tmp_path, threaded=True, on_event=tell)
    o.step()
    entered, gate = threading.Event(), threading.Event()
    folder = o.session._folder
    assert folder is not None
    write = folder.write

    def slow(name: str, data: bytes) -> str:
        entered.set()
        assert gate.wait(10)
        return write(name, data)

    def broken(name: str) -> None:
        raise Refusal(Code.IO, 'read-only file system')
    monkeypatch.setattr(folder, 'write', slow)
    monkeypatch.setattr(folder, 'remove', broken)
    o.session.save('a', persist=True)
    assert entered.wait(10)
    o.session.drop('a')                    # while it is written
    gate.set()
    o.session.save('c', persist=True)
    assert told.wait(5), 'the spill thread is gone'
    o.close()


def test_a_callback_that_raises_ends_no_thread() -> None:
    def tell(event: Event) -> None:
        if event.kind is EventKind.RESTORED:
            raise ValueError('a listener failed')
    o = CASE.session(threaded=True, on_event=tell)
    o.step()
    o.session.save('a')
    o.session.apply(o.session.plan_restore('a'))
    o.session._worker.post(lambda: 1 / 0)  # type: ignore[arg-type]
    inference = o.session.submit()
    assert inference.wait(5), 'the device thread is gone'
    o.close()


def test_a_move_to_the_host_that_fails_gives_the_capsule_up_and_says_why() -> None:
    class Failing(HostDevice):
        fails = False

        def copy(self, *args: Any) -> None:
            if self.fails:
                raise RuntimeError('the driver said no')
            super().copy(*args)
    events: list[Event] = []
    device = Failing()
    o = opened(Recurrent(), device, device_slots=1, history=1, on_event=events.append)
    o.step()
    o.session.save('a')
    o.step()
    device.fails = True
    o.session.save('b')
    device.fails = False
    assert names(o) == {'origin': 'DEVICE', 'a': 'NONE', 'b': 'DEVICE'}
    (lost,) = (e for e in events if e.kind is EventKind.EVICTED)
    assert (lost.info.name, lost.code) == ('a', Code.INTERNAL)
    assert 'the driver said no' in lost.message
    o.run(3)
    o.session.save('c')
    o.close()


def test_a_capsule_that_was_dropped_while_it_was_read_leaves_nothing_behind(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    o = JOURNAL.session(directory=tmp_path)
    o.run(4)
    o.session.save('a', persist=True)
    o.close()
    o = JOURNAL.session(directory=tmp_path)
    place = o.session._place

    def late(*args: Any) -> Any:
        o.session.drop('a')
        return place(*args)
    monkeypatch.setattr(o.session, '_place', late)
    error = o.session.load('a').exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.NOT_FOUND
    assert o.session._segments.used == 0
    assert len(o.session._host_blocks._spare) <= 1
    o.close()


def test_adopt_is_all_or_nothing_and_never_replaces_a_name(tmp_path: Path) -> None:
    o = CASE.session(directory=tmp_path / 'theirs', exactness={'x': '1'}, meaning={'m': '1'})
    o.step()
    o.session.save('a', persist=True)
    o.close()
    file = tmp_path / 'theirs' / 'a.capsule'
    o = CASE.session(meaning={'m': '2'})
    before = o.session.list()
    error = o.session.adopt(file).exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.FINGERPRINT_MISMATCH
    assert o.session.list() == before
    o.close()
    o = CASE.session(meaning={'m': '1'}, exactness={'x': '1'})
    o.run(3)
    o.session.save('a', pin=True)
    mine = o.everything()
    error = o.session.adopt(file).exception(5)
    assert isinstance(error, Refusal)
    assert error.code is Code.EXISTS
    o.run(2)
    o.restore('a')
    assert o.everything() == mine
    o.close()
