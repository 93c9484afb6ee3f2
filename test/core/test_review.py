"""Faults that a review found: a wrong answer, a leak or a call without an answer each."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import threading
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends.host import HostBlock, HostDevice
from flashrt_ros.backends.reference import Arrays, Journal, Recurrent
from flashrt_ros.core import codec
from flashrt_ros.core.capsule import Event, EventKind
from flashrt_ros.core.codec import Image
from flashrt_ros.core.disk import CapsuleFolder
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space
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


def test_p15_a_save_whose_second_journal_does_not_fit_evicts_nothing() -> None:
    o = opened(Journal(rows=64, drafts=0), segment_bytes=16 * 32)   # 16 rows of one journal
    o.run(5)
    o.session.save('a')                     # 5 rows of each
    o.restore('origin')
    o.run(9)                                # one journal fits where `a` is, two do not
    before = names(o)
    refused(Code.BUDGET_EXCEEDED, o.session.save, 'b')
    assert names(o) == before
    o.close()


def test_journal_rows_of_a_restored_boundary_are_counted_once() -> None:
    o = JOURNAL.session(history=1)
    o.run(4)
    o.session.save('a')
    for i in range(5):
        o.restore('a')
        o.session.save(f'c{i}')
    for c in o.session.list()[1:]:
        o.session.drop(c.name)
    o.run(3)                                # the ring lets go too
    assert o.session._segments.used == 0
    o.close()


def test_p21_a_save_right_behind_a_restore_has_the_restored_rows_though_their_capsule_is_gone(
        ) -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('a')
    a = o.everything()
    o.restore('origin')
    o.run(4, first=60)
    gate = threading.Event()
    o.session._worker.post(lambda: gate.wait(10) and None)
    future = o.session.apply(o.session.plan_restore('a'))
    o.session.drop('a')
    o.session.save('b')                     # the copy of `a` is still to come
    gate.set()
    future.result(10)
    o.run(2, first=90)
    o.restore('b')
    assert o.everything() == a
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
    CapsuleFolder(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['film.part-1', 'notes.part-of-it']


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


# -- between a plan and its copy ------------------------------------------------------------------


@pytest.mark.parametrize('again', [False, True])
def test_p21_a_plan_whose_capsule_went_to_disk_restores_no_other_bytes(tmp_path: Path, again: bool
                                                                       ) -> None:
    o = CASE.session(directory=tmp_path, history=1, device_slots=1)
    o.run(2)
    o.session.save('a', persist=True)
    a = o.everything()
    o.run(1)
    plan = o.session.plan_restore('a')
    o.session.save('b')                     # a is durable, so it gives up its slot
    assert names(o)['a'] == 'DISK'
    o.run(4)                                # the slot is written again
    if again:
        o.session.load('a').result(5)
    free = o.session._pool.free
    try:
        o.session.apply(plan).result(5)
    except Refusal as error:
        assert error.details.get('on_disk')
        assert o.session._pool.free == free
    else:
        assert o.everything() == a
    o.run(3)
    o.session.load('a').result(5)
    o.restore('a')
    assert o.everything() == a
    o.close()


def test_p21_a_restore_behind_a_failing_inference_is_no_success() -> None:
    class Failing(Recurrent):
        gate = threading.Event()
        entered = threading.Event()
        fails = False

        def tick(self, b: Arrays) -> None:
            if self.fails:
                self.entered.set()
                assert self.gate.wait(10)
                raise RuntimeError('the engine broke')
            super().tick(b)

        def hidden(self) -> dict[str, str]:
            return {}
    policy = Failing()
    o = opened(policy, threaded=True)
    o.run(2)
    o.session.save('a')
    policy.fails = True
    o.session.submit()
    assert policy.entered.wait(10)
    future = o.session.apply(o.session.plan_restore('a'))
    policy.gate.set()
    error = future.exception(10)
    assert isinstance(error, Refusal)
    assert error.code is Code.FAULT
    o.close()


# -- journals -------------------------------------------------------------------------------------


class Rewriting(Journal):
    """A journal whose prefill begins anew at row 0, and whose ticks and prefills can be held."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(rows=16, drafts=0)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self._first = first

    def initial(self) -> dict[str, Any]:
        rows = np.zeros((2, 16, 4), np.float32)
        rows[:, :self._first] = 0.25
        return {'kv_length': np.array([self._first], np.int64), 'keys': rows, 'values': rows + 0}

    def prefill(self, b: Arrays) -> None:
        b['keys'][:] = -7.0
        b['values'][:] = -8.0
        b['kv_length'][0] = b['kv_start'][0] = 0
        self._append(b, b['obs'])
        self.entered.set()
        assert self.gate.wait(20)

    def hidden(self) -> dict[str, str]:
        return {}


def test_p21_rows_that_a_prefill_rewrites_are_not_saved_as_those_before_it() -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('kept')
    o.run(2)
    policy.gate.clear()
    inference = o.session.submit(prefill=True)
    assert policy.entered.wait(10)
    refused(Code.BUSY, o.session.save, 'a')
    policy.gate.set()
    assert inference.wait(10)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.accept(inference)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.commit_step()
    o.session.save('a')
    a = o.everything()
    o.run(3)
    o.restore('a')
    assert o.everything() == a
    o.close()


def test_p21_a_save_of_what_a_kept_capsule_has_goes_on_during_a_prefill() -> None:
    policy = Rewriting()
    o = opened(policy, threaded=True)
    o.run(3)
    o.session.save('kept')
    kept = o.everything()
    policy.gate.clear()
    inference = o.session.submit(prefill=True)
    assert policy.entered.wait(10)
    o.session.save('a')
    policy.gate.set()
    assert inference.wait(10)
    o.session.accept(inference)
    o.session.commit_step()
    o.restore('a')
    assert o.everything() == kept
    o.close()


def test_p21_a_rollback_by_steps_over_a_prefill_that_rewrites_is_refused_or_exact() -> None:
    policy = Rewriting()
    o = opened(policy)
    o.run(3)
    want = o.everything()
    o.run(1)
    o.session.submit(prefill=True)          # unthreaded: it has run, and is not accepted yet
    error = None
    try:
        o.session.apply(o.session.plan_rollback(steps=1, lock_step=True)).result(10)
    except Refusal as refusal:
        error = refusal
    assert error is not None or o.everything() == want
    if error is not None:
        assert error.code is Code.NOTHING_TO_ROLL_BACK
    o.close()


def test_p1_the_rows_that_a_journal_begins_with_return_with_origin() -> None:
    o = opened(Rewriting(first=3))
    fresh = o.everything()
    o.run(2)
    inference = o.session.submit(prefill=True)
    o.session.accept(inference)
    o.session.commit_step()
    o.run(2)
    o.session.apply(o.session.plan_reset()).result(5)
    assert o.everything() == fresh
    o.close()


# -- the ring is off ------------------------------------------------------------------------------


def test_p18_history_0_a_save_does_not_wait_for_a_thread_that_waits_for_it(tmp_path: Path) -> None:
    class Slow(HostDevice):
        gate = threading.Event()
        entered = threading.Event()
        held = False

        def sync(self, event: Any = None) -> None:
            if self.held:
                self.entered.set()
                assert self.gate.wait(10)
    device = Slow()
    o = opened(Recurrent(), device, history=0, threaded=True, directory=tmp_path)
    o.run(2)
    o.session.save('a')
    device.held = True
    o.session.keep('a', persist=True)       # its bytes are brought to the host
    assert device.entered.wait(10)
    o.session.commit_step()
    done = threading.Event()

    def save() -> None:
        try:
            o.session.save('b')
        except Refusal:
            pass
        done.set()
    threading.Thread(target=save, daemon=True).start()
    done.wait(0.05)
    device.held = False
    device.gate.set()
    assert done.wait(5), 'save and the device thread wait for each other'
    o.close()


def test_p6_history_0_a_save_between_a_tick_and_its_step_mixes_nothing() -> None:
    o = opened(Recurrent(), history=0)
    o.run(2)
    o.session.inputs['obs'][...] = 0.5
    inference = o.session.submit()
    o.session.accept(inference)
    refused(Code.BUSY, o.session.save, 'a')
    o.session.commit_step()
    o.session.save('a')
    a = o.everything()
    o.run(2)
    o.restore('a')
    assert o.everything() == a
    o.close()


# -- the end --------------------------------------------------------------------------------------


class Counting(HostDevice):
    """Knows what was taken and not given back."""

    def __init__(self) -> None:
        self.blocks: dict[int, HostBlock] = {}

    def alloc(self, nbytes: int, space: Space) -> HostBlock:
        block = super().alloc(nbytes, space)
        self.blocks[id(block)] = block
        return block

    def free(self, block: HostBlock) -> None:
        del self.blocks[id(block)]
        super().free(block)


@pytest.mark.parametrize('make', [Recurrent, Journal])
def test_close_gives_all_memory_back(make: Callable[[], Any], tmp_path: Path) -> None:
    device = Counting()
    o = opened(make(), device, directory=tmp_path, device_slots=1, history=2, live_sets=2)
    for i in range(4):
        o.step()
        o.session.save(f'c{i}', persist=i == 0)
    assert 'HOST' in names(o).values()
    o.session.load('c0').result(5)
    o.restore('c0')
    o.session.submit()
    o.close()
    assert not device.blocks


def test_a_folder_that_cannot_be_made_leaves_no_policy_open(tmp_path: Path) -> None:
    closed = []

    class Closing(Recurrent):
        def close(self) -> None:
            closed.append(1)
    (tmp_path / 'file').write_bytes(b'')
    device = Counting()
    refused(Code.IO, opened, Closing(), device, directory=tmp_path / 'file' / 'capsules')
    assert closed == [1]
    assert not device.blocks


def test_p18_a_call_on_a_closed_session_is_answered() -> None:
    o = CASE.session(threaded=True)
    o.step()
    o.session.save('a')
    plan = o.session.plan_restore('a')
    o.close()
    with pytest.raises(Refusal):
        o.session.apply(plan).result(2)
    assert o.session.close(0.1) is True
