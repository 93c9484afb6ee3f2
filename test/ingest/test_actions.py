"""The action queue: which row leaves it at which step, and that its state is all there is."""
from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role, Space
from flashrt_ros.ingest.actions import ActionQueue, allocate
from test.ingest.queue_model import Boundary, Runner, make_queue, numbered

H = st.integers(1, 7)


def first(row: dict[str, Any] | None) -> int:
    assert row is not None
    return int(row['arm'][0])


def drain(queue: ActionQueue) -> list[int]:
    return [first(queue.pop()) for _ in range(queue.left)]


# -- one chunk after the other --

def test_rows_leave_in_order_and_are_the_models_bytes() -> None:
    queue, host = make_queue(4)
    outputs = {'actions': np.random.default_rng(0).normal(size=(1, 4, 2)).astype(np.float32)}
    assert queue.left == 0
    assert queue.peek() is None
    assert queue.splice(outputs, 0, tick=7) == 4
    assert (queue.tick, queue.fresh) == (7, True)
    for i in range(4):
        assert queue.peek()['arm'].tobytes() == outputs['actions'][0, i].tobytes()  # type: ignore[index]
        row = queue.pop()['arm']
        assert row.tobytes() == outputs['actions'][0, i].tobytes()
        assert row.dtype == np.float32
        assert (queue.left, queue.rows_executed, queue.fresh) == (3 - i, i + 1, False)
        row[:] = 99                                    # a copy: the queue does not notice
    assert host['queue.arm.rows'].tobytes() == outputs['actions'].tobytes()
    with pytest.raises(Refusal, match='the queue is empty') as caught:
        queue.pop()
    assert caught.value.code is Code.INTERNAL
    assert queue.rows_executed == 4


@pytest.mark.parametrize(('dtype', 'storage'), [
    ('F64', np.float64), ('F16', np.float16), ('I32', np.int32), ('I64', np.int64),
    ('U8', np.uint8)])
def test_rows_keep_the_type_of_their_port(dtype: str, storage: type) -> None:
    queue, host = make_queue(3, dtype=dtype)
    outputs = {'actions': np.arange(6).reshape(1, 3, 2).astype(storage)}
    queue.splice(outputs, 0)
    assert queue.pop()['arm'].dtype == storage
    assert host['queue.arm.rows'].tobytes() == outputs['actions'].tobytes()


def test_bf16_rows_are_kept_as_bits_and_leave_as_numbers() -> None:
    queue, host = make_queue(2, dtype='BF16')
    numbers = np.array([[1.5, -2.0], [0.15625, 3e38]], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    queue.splice({'actions': bits[None]}, 0)
    assert host['queue.arm.rows'].tobytes() == bits.tobytes()
    exact = (bits.astype(np.uint32) << 16).view(np.float32)
    assert queue.rows({'actions': bits[None]}, 'arm').tolist() == exact.tolist()
    assert queue.pop()['arm'].tolist() == exact[0].tolist()
    assert queue.rest('arm').tolist() == exact[1:].tolist()
    assert queue.remaining(3).tolist() == [exact[1].tolist()] * 3


def test_outputs_take_their_columns_and_advance_together() -> None:
    queue, _ = make_queue(3, 4, outputs={'arm': {'columns': (0, 3)}, 'grip': {'columns': (3, 4)}})
    outputs = {'actions': np.arange(12, dtype=np.float32).reshape(1, 3, 4)}
    queue.splice(outputs, 1)
    row = queue.pop()
    assert (row['arm'].tolist(), row['grip'].tolist()) == ([4, 5, 6], [7])
    assert queue.rest('grip').tolist() == [[11]]
    assert queue.rows(outputs, 'grip').tolist() == [[3], [7], [11]]


def test_execute_is_how_many_rows_of_each_chunk_are_executed() -> None:
    queue, _ = make_queue(6, execute=2)
    assert queue.splice(numbered(1, 6), 0) == 2
    assert drain(queue) == [1000, 1001]
    assert queue.splice(numbered(2, 6), 3) == 2
    assert drain(queue) == [2003, 2004]
    assert queue.splice(numbered(3, 6), 5) == 1
    assert drain(queue) == [3005]
    assert [queue.span(s) for s in (0, 3, 5, 9)] == [
        slice(0, 2), slice(3, 5), slice(5, 6), slice(6, 6)]


def test_a_chunk_that_is_all_in_the_past_leaves_nothing() -> None:
    queue, _ = make_queue(3)
    assert queue.splice(numbered(1, 3), 3) == 0
    assert queue.splice(numbered(1, 3), 30) == 0
    assert queue.wants_inference()
    with pytest.raises(Refusal, match='cannot be spliced 1 rows before its start'):
        queue.splice(numbered(1, 3), -1)


def test_flush_forgets_the_chunk_and_says_how_many_rows_were_left() -> None:
    queue, _ = make_queue(5, execute=4, publish_hz=20.0)
    queue.splice(numbered(1, 5), 0)
    queue.pop()
    assert queue.flush() == 3
    assert queue.left == 0
    assert queue.flush() == 0
    assert queue.peek() is None
    assert queue.between(1, 2) == {}
    assert queue.remaining(2).tolist() == [[0, 0], [0, 0]]
    assert queue.rows_executed == 1


def test_all_that_outlives_a_step_is_declared_host_state() -> None:
    queue, host = make_queue(3, publish_hz=20.0, blend='ensemble', outputs={
        'arm': {'kind': 'position', 'joints': ('a', 'b'), 'relative': True, 'max_rate': 1.0}})
    assert {s.name for s in queue.specs()} == set(host) == {
        *(f'queue.{n}' for n in ('cursor', 'start', 'depth', 'tick', 'executed', 'run',
                                 'predictions')),
        *(f'queue.arm.{n}' for n in ('rows', 'last', 'anchor', 'anchor_pending', 'anchor_last')),
        'output.arm.running', 'output.arm.published'}
    assert {(s.role, s.space) for s in queue.specs()} == {(Role.STATE, Space.HOST)}
    del host['queue.cursor']
    with pytest.raises(Refusal, match=r'no buffer queue\.cursor'):
        queue.bind(host)


# -- P11: no row is skipped that was not executed --

@settings(max_examples=250, deadline=None)
@given(data=st.data(), horizon=H, lock_step=st.booleans())
def test_p11_each_step_gets_its_own_row_whatever_the_delays_and_restores(
        data: st.DataObject, horizon: int, lock_step: bool) -> None:
    latency = data.draw(st.integers(0, horizon - 1))
    queue, host = make_queue(
        horizon, start_at=data.draw(st.integers(0, horizon)), latency_steps=latency,
        execute=data.draw(st.none() | st.integers(1, horizon - latency)))
    runner = Runner(queue, host, lambda k: numbered(k, horizon), lock_step)
    kept: list[Boundary] = []
    newest, allowed = -1, 0
    for op in data.draw(st.lists(st.sampled_from(
            ('step',) * 8 + ('save', 'restore', 'stop')), max_size=40)):
        if op == 'save':
            kept.append(runner.save())
        elif op == 'restore' and kept:
            runner.restore(data.draw(st.sampled_from(kept)))
            newest = -1
            allowed = 0 if lock_step else runner.count      # live: only inferences from now on
        elif op == 'stop':
            queue.flush()
            runner.flight = None
            allowed = runner.count
        else:
            executed = queue.rows_executed
            row = runner.step(data.draw(st.integers(0, 2 * horizon)))
            if row is None:
                assert not lock_step, 'in lock step a step waits for its chunk'
                continue
            k, i = divmod(first(row), 1000)
            assert executed - runner.started[k] == i, 'row 0 belongs to the latched step'
            assert k >= newest, 'no return'
            assert k >= allowed, 'no row of an abandoned future'
            newest = k


@settings(max_examples=60, deadline=None)
@given(data=st.data(), horizon=H)
def test_p2_lock_step_continues_byte_for_byte_from_every_cursor_position(
        data: st.DataObject, horizon: int) -> None:
    latency = data.draw(st.integers(0, horizon - 1))
    options = {'start_at': data.draw(st.integers(0, horizon)), 'latency_steps': latency,
               'execute': data.draw(st.none() | st.integers(1, horizon - latency)),
               'blend': data.draw(st.sampled_from(('latest', 'ensemble')))}
    queue, host = make_queue(horizon, **options)
    rng = np.random.default_rng(5)
    chunks = [{'actions': rng.normal(size=(1, horizon, 2)).astype(np.float32)} for _ in range(99)]
    runner = Runner(queue, host, lambda k: chunks[k])
    boundaries, rows = [], []
    for _ in range(3 * horizon + 2):
        boundaries.append(runner.save())
        rows.append(runner.step()['arm'].tobytes())  # type: ignore[index]
    for i, boundary in enumerate(boundaries):
        for array in host.values():
            array[...] = 3                             # whatever the present left behind
        runner.restore(boundary)
        assert [runner.step()['arm'].tobytes() for _ in rows[i:]] == rows[i:], i  # type: ignore[index]


NEEDED = ('queue.cursor', 'queue.start', 'queue.depth', 'queue.executed', 'queue.arm.rows',
          'queue.predictions', 'queue.arm.anchor', 'queue.arm.anchor_pending',
          'queue.arm.anchor_last', 'queue.tick')


@pytest.mark.parametrize('left_out', [None, *NEEDED])
def test_p3_each_buffer_of_the_queue_is_needed(left_out: str | None) -> None:
    """A restore that leaves one out is noticed in the rows, their anchors or the tick."""
    queue, host = make_queue(6, start_at=1, latency_steps=1, execute=2, blend='ensemble', outputs={
        'arm': {'kind': 'position', 'joints': ('a', 'b'), 'relative': True}})
    rng = np.random.default_rng(6)
    chunks = [{'actions': rng.normal(size=(1, 6, 2)).astype(np.float32)} for _ in range(60)]
    runner = Runner(queue, host, lambda k: chunks[k])

    def step(n: int) -> bytes:
        runner.joints = {'a': (n * 0.1, 0), 'b': (n * 0.01, 0)}
        row, anchor = runner.step(), queue.anchor('arm')
        if row is None or anchor is None:
            return b'nothing'
        return row['arm'].tobytes() + anchor.tobytes() + bytes([queue.tick, queue.rows_executed])

    noticed = False
    for n in range(25):
        boundary = runner.save()
        anchor_now = host['queue.arm.anchor_last'].tobytes()
        expected = [step(m) for m in range(n, n + 7)]
        present = {name: a.copy() for name, a in host.items()}
        runner.restore(boundary)
        if left_out is not None:
            host[left_out][...] = present[left_out]
        same_anchor = host['queue.arm.anchor_last'].tobytes() == anchor_now
        try:
            again = [step(m) for m in range(n, n + 7)]
        except (Refusal, ValueError):
            again = []
        noticed = noticed or again != expected or not same_anchor
        runner.restore(boundary)
        step(n)
    assert noticed == (left_out is not None)


@pytest.mark.parametrize('latency', [0, 1, 3])
def test_a_chunk_is_spliced_when_latency_steps_rows_were_executed(latency: int) -> None:
    queue, host = make_queue(8, start_at=5, latency_steps=latency)
    runner = Runner(queue, host, lambda k: numbered(k, 8))
    rows = [first(runner.step()) for _ in range(3 + latency + 1)]
    assert rows == [0, 1, 2, *range(3, 3 + latency), 1000 + latency]


def test_late_chunks_are_dropped_live_and_the_rest_goes_on() -> None:
    queue, host = make_queue(6, start_at=4, latency_steps=1)
    runner = Runner(queue, host, lambda k: numbered(k, 6), lock_step=False)
    delays = iter([0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0])
    rows = [runner.step(next(delays) if runner.flight is None and queue.wants_inference() else 0)
            for _ in range(9)]
    assert runner.dropped == 1
    assert [first(row) for row in rows] == [0, 1, 2, 3, 4, 5, 2000, 2001, 2002]


# -- between rows, and what a model may want to know of the rest --

def test_interpolation_goes_from_the_last_row_linearly_to_the_next() -> None:
    queue, _ = make_queue(3, publish_hz=40.0)
    assert queue.between(1, 4) == {}
    queue.splice({'actions': np.array([[[0, 8], [4, 0], [4, 4]]], np.float32)}, 0)
    assert queue.between(1, 4) == {}, 'nothing was executed yet'
    queue.pop()
    assert [queue.between(i, 4)['arm'].tolist() for i in (1, 2, 3)] == [[1, 6], [2, 4], [3, 2]]
    queue.pop()
    assert queue.between(2, 4)['arm'].tolist() == [4, 2]
    queue.pop()
    assert queue.between(2, 4)['arm'].tolist() == [4, 4], 'nothing after the last row: hold it'
    queue.splice({'actions': np.array([[[9, 9], [8, 0], [0, 0]]], np.float32)}, 1)
    assert queue.between(2, 4)['arm'].tolist() == [6, 2], 'to the row of the new chunk'


def test_interpolation_knows_the_rows_past_execute() -> None:
    queue, _ = make_queue(3, 1, publish_hz=20.0, execute=1)
    queue.splice({'actions': np.array([[[0], [4], [8]]], np.float32)}, 0)
    queue.pop()
    assert queue.left == 0
    assert queue.between(1, 2)['arm'].tolist() == [2]


def test_interpolation_of_relative_rows_counts_from_the_anchor_of_the_last_row() -> None:
    queue, _ = make_queue(2, 1, publish_hz=20.0, outputs={'arm': {
        'kind': 'position', 'joints': ('a',), 'relative': True, 'scale': 2.0}})
    queue.latch({'a': (10.0, 0)})
    queue.splice({'actions': np.array([[[1], [2]]], np.float32)}, 0)
    queue.pop()                                         # stands for 10 + 2 * 1 = 12
    queue.latch({'a': (14.0, 0)})
    queue.splice({'actions': np.array([[[7], [-3]]], np.float32)}, 1)    # 14 - 2 * 3 = 8
    assert queue.anchor('arm').tolist() == [10.0]  # type: ignore[union-attr]
    assert queue.anchor('arm', next_row=True).tolist() == [14.0]  # type: ignore[union-attr]
    assert queue.between(1, 2)['arm'].tolist() == [0.0]  # 10 + 2 * 0 = 10, half-way


def test_the_prefix_is_the_rest_of_the_running_chunk_past_execute() -> None:
    queue, _ = make_queue(5, execute=2)
    assert queue.remaining(2).tolist() == [[0, 0], [0, 0]]
    assert queue.running('arm').shape == (0, 2)
    queue.splice(numbered(1, 5), 0)
    queue.pop()
    assert queue.running('arm')[:, 0].tolist() == [1001, 1002, 1003, 1004]
    assert queue.remaining(2)[:, 0].tolist() == [1001, 1002]
    assert queue.remaining(6)[:, 0].tolist() == [1001, 1002, 1003, 1004, 1004, 1004]
    assert {n: len(r) for n, r in queue.prefixes().items()} == {'arm': 4, '': 4}


@settings(max_examples=60, deadline=None)
@given(horizon=st.integers(2, 7), data=st.data())
def test_the_prefix_begins_with_the_rows_that_will_be_executed_until_the_splice(
        horizon: int, data: st.DataObject) -> None:
    latency = data.draw(st.integers(1, horizon - 1))
    queue, host = make_queue(horizon, start_at=data.draw(st.integers(1, horizon)),
                             latency_steps=latency)
    runner = Runner(queue, host, lambda k: numbered(k, horizon))
    prefixes: list[tuple[int, list[float]]] = []
    rows: list[int] = []
    for step in range(30):
        before, prefix = runner.count, queue.running('arm')[:, 0].tolist()
        rows.append(first(runner.step()))
        if runner.count > before:
            prefixes.append((step, prefix))
    assert any(prefix for _, prefix in prefixes)
    for step, prefix in prefixes:
        n = min(latency, len(prefix), len(rows) - step)
        assert rows[step:step + n] == prefix[:n]


def test_a_relative_prefix_is_carried_over_to_the_anchor_of_its_reader() -> None:
    queue, _ = make_queue(2, 1, outputs={'arm': {
        'kind': 'position', 'joints': ('a',), 'relative': True, 'scale': 2.0}})
    queue.latch({'a': (10.0, 0)})
    queue.splice({'actions': np.array([[[1], [2]]], np.float32)}, 0)
    assert queue.remaining(2).tolist() == [[1], [2]]
    assert queue.remaining(2, 'arm', {'a': (11.0, 0)}).tolist() == [[0.5], [1.5]]


# -- anchors --

def test_relative_rows_without_an_anchor_are_refused_and_change_nothing() -> None:
    queue, host = make_queue(2, outputs={'arm': {
        'kind': 'position', 'joints': ('a', 'b'), 'relative': True}})
    before = {n: a.tobytes() for n, a in host.items()}
    with pytest.raises(Refusal, match='relative rows came without an anchor'):
        queue.splice(numbered(1, 2), 0)
    with pytest.raises(Refusal, match='b was never measured') as caught:
        queue.latch({'a': (1.0, 0)})
    assert caught.value.code is Code.INPUT_STALE
    assert {n: a.tobytes() for n, a in host.items()} == before
    queue.splice(numbered(1, 2), 0, {'arm': np.array([1.0, 2.0])})
    queue.pop()
    assert queue.anchor('arm').tolist() == [1.0, 2.0]  # type: ignore[union-attr]


def test_absolute_outputs_have_no_anchor() -> None:
    queue, _ = make_queue(2)
    queue.latch({})
    queue.splice(numbered(1, 2), 0)
    queue.pop()
    assert queue.anchor('arm') is None


def test_two_queues_share_nothing() -> None:
    (one, _), (two, _) = make_queue(3), make_queue(3)
    one.splice(numbered(1, 3), 0)
    assert (one.left, two.left) == (3, 0)
    host = allocate(one.specs())
    one.bind(host)
    assert one.left == 0


@pytest.mark.parametrize('left_out', [None, 'queue.run', 'queue.arm.last'])
def test_p2_what_lies_between_rows_continues_after_a_restore(left_out: str | None) -> None:
    queue, host = make_queue(4, publish_hz=20.0)
    queue.splice(numbered(1, 4), 0)
    queue.pop()
    kept = {n: a.copy() for n, a in host.items()}
    expected = queue.between(1, 2)['arm'].tolist()
    queue.pop()
    queue.flush()
    for name, array in host.items():
        if name != left_out:
            array[...] = kept[name]
    found = queue.between(1, 2)
    assert (bool(found) and found['arm'].tolist() == expected) == (left_out is None)
