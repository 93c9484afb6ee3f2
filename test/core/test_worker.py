"""The device thread keeps the order of its jobs, also where one runs on its caller's thread."""
from __future__ import annotations

from collections.abc import Iterator
import threading

import pytest

from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.worker import Worker


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker('test', threaded=True)
    yield made
    assert made.close(5)


def thread_of(worker: Worker, *, here: bool) -> threading.Thread:
    def job() -> threading.Thread:
        assert worker.is_current
        return threading.current_thread()
    return worker.call(job, here=here).result(5)


def test_an_idle_worker_lets_its_caller_do_a_quick_job(worker: Worker) -> None:
    assert thread_of(worker, here=True) is threading.current_thread()
    assert thread_of(worker, here=False) is not threading.current_thread()
    assert not worker.is_current


def test_a_busy_worker_keeps_the_order(worker: Worker) -> None:
    gate, entered, order = threading.Event(), threading.Event(), []

    def held() -> None:
        entered.set()
        assert gate.wait(5)
        order.append('held')
    worker.post(held)
    assert entered.wait(5)
    quick = worker.call(lambda: order.append('quick'), here=True)
    assert not quick.done()
    gate.set()
    quick.result(5)
    assert order == ['held', 'quick']


def test_nothing_begins_while_a_caller_runs_a_job(worker: Worker) -> None:
    order: list[str] = []
    later = threading.Event()

    def job() -> None:
        worker.post(lambda: (order.append('posted'), later.set()))
        nested = worker.call(lambda: order.append('nested'), here=True)
        assert not later.wait(0.05)        # it would have run by now
        assert not nested.done()
        order.append('first')
    worker.call(job, here=True).result(5)
    worker.call(lambda: None).result(5)
    assert order == ['first', 'posted', 'nested']


def test_a_failure_on_the_callers_thread_is_the_futures(worker: Worker) -> None:
    def fail() -> None:
        raise ValueError('on purpose')
    future = worker.call(fail, here=True)
    with pytest.raises(ValueError, match='on purpose'):
        future.result()
    assert thread_of(worker, here=True) is threading.current_thread()


def test_close_waits_for_a_job_on_another_thread_and_refuses_what_comes_after() -> None:
    worker = Worker('test', threaded=True)
    gate, entered = threading.Event(), threading.Event()

    def held() -> None:
        entered.set()
        assert gate.wait(5)
    caller = threading.Thread(target=lambda: worker.call(held, here=True))
    caller.start()
    assert entered.wait(5)
    assert not worker.close(0.05)
    gate.set()
    assert worker.close(5)
    caller.join(5)
    with pytest.raises(Refusal, match='closed'):
        worker.call(lambda: None, here=True)
