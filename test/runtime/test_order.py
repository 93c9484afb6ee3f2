"""Order and concurrency: saves beside an inference, restores that cut one short, many callers."""
from __future__ import annotations

from collections.abc import Callable
import random
import threading
from typing import Any

import pytest

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from test.runtime.policies import gate
from test.runtime.world import ARM, LOCK_STEP, NUMBERED, World

Make = Callable[..., World]


def held(world: Make, name: str, run: dict[str, Any] | None = None, **options: Any) -> World:
    """A threaded world with three published steps and the fourth's inference held."""
    gate(name)
    w = world(NUMBERED, {'run': run or {}, 'policy': {'options': {'gate': name, 'horizon': 1}}},
              threaded=True, **options)
    w.go()
    for n in range(3):
        w.step()
        w.sink.wait(lambda n=n: len(w.sink.actions) == n + 1)
    gate(name).close()
    w.step()
    assert gate(name).entered.wait(5)
    return w


@pytest.mark.parametrize('run', [{}, LOCK_STEP], ids=['live', 'lock step'])
def test_p10_a_save_beside_a_held_inference_answers_with_the_boundary_before_it(
        world: Make, run: dict[str, Any]) -> None:
    w = held(world, 'p10', run)
    answer: list[Any] = []
    other = threading.Thread(target=lambda: answer.append(w.runner.save('a')))
    other.start()
    other.join(5)
    assert answer, 'the save waited for the inference'
    assert (answer[0].tick, answer[0].step) == (3, 3)
    gate('p10').open()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.runner.restore('a').result(5).info.tick == 3
    assert w.runner.status().tick == 3


def test_p12_a_late_chunk_after_a_restore_is_dropped_and_counted(world: Make) -> None:
    w = held(world, 'p12')
    w.runner.save('a')
    restored = w.runner.restore('a')
    assert not restored.done()                   # the copy comes after the running inference
    assert w.phase is Phase.HOLD                 # the stop does not
    gate('p12').open()
    assert restored.result(5).epoch == 3         # 1, goal 2, restore 3
    assert w.runner.status().dropped_chunks == 1
    w.steps(3)
    assert w.numbers() == [1000, 2000, 3000]
    w.go()
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.numbers()[-1] == 4000               # the fourth again, from the restored state
    assert [c.used for c in w.sink.chunks] == [True] * 4


def test_p12_lock_step_goes_on_with_the_next_input_only(world: Make) -> None:
    w = held(world, 'p12b', LOCK_STEP)
    w.runner.save('a')
    restored = w.runner.restore('a')
    gate('p12b').open()
    restored.result(5)
    assert w.phase is Phase.RUNNING
    assert w.numbers() == [1000, 2000, 3000]     # the step that was cut short needs its input again
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.numbers()[-1] == 4000


def test_a_goal_right_after_a_restore_waits_for_its_copy(world: Make) -> None:
    w = held(world, 'copy')
    w.runner.save('a')
    restored = w.runner.restore('a')
    w.go()
    assert w.phase is Phase.RUNNING
    staged = {n: a.tobytes() for n, a in w.runner.session.inputs.items()}
    w.step([0.7, 0.7, 0.7])
    assert w.numbers() == [1000, 2000, 3000]
    # the abandoned inference still reads its inputs
    assert {n: a.tobytes() for n, a in w.runner.session.inputs.items()} == staged
    gate('copy').open()
    restored.result(5)
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.numbers()[-1] == 4000


def test_a_stop_during_an_inference_lets_its_tick_count_and_drops_its_chunk(world: Make) -> None:
    w = held(world, 'stop')
    w.runner.stop()
    w.go()
    w.step()
    gate('stop').open()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.numbers() == [1000, 2000, 3000, 5000]
    assert [c.used for c in w.sink.chunks] == [True, True, True, False, True]
    assert w.runner.status().dropped_chunks == 1
    assert w.runner.status().tick == 5


def test_p18_concurrent_callers_each_get_one_definite_answer(world: Make) -> None:
    w = held(world, 'many')
    w.runner.save('a')
    answers: list[Any] = []

    def call(i: int) -> None:
        verb = [lambda: w.runner.restore('a').result(5), lambda: w.runner.save(),
                lambda: w.runner.rollback().result(5), lambda: w.runner.stop(),
                lambda: w.runner.reset().result(5), lambda: w.runner.status(),
                lambda: w.go(), lambda: w.runner.poll()][i % 8]
        try:
            verb()
            answers.append(Code.OK)
        except Refusal as error:
            answers.append(error.code)
    threads = [threading.Thread(target=call, args=(i,)) for i in range(48)]
    for t in threads:
        t.start()
    gate('many').open()
    for t in threads:
        t.join(10)
    assert len(answers) == 48
    assert set(answers) <= {Code.OK, Code.NOTHING_TO_ROLL_BACK}


def test_p1_a_refusal_changes_no_byte_and_check_says_what_the_call_would(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.step()
    w.runner.save('a')
    w.steps(2)
    before, epoch, sent = w.runner.session.digest(), w.runner.epoch, len(w.sink.log)
    w.say([1.0, 0.1, 0.2])
    for check in (True, False):
        error = w.runner.restore('a', check=check).exception(0)
        assert isinstance(error, Refusal)
        assert error.code is Code.ROBOT_MOVED
    for name, code in (('b', Code.NOT_FOUND), ('', Code.STALE_EPOCH)):
        for check in (True, False):
            error = w.runner.restore(name, check=check, if_epoch=99 if not name else 0).exception(0)
            assert isinstance(error, Refusal)
            assert error.code is code
    assert (w.runner.session.digest(), w.runner.epoch, len(w.sink.log)) == (before, epoch, sent)
    assert w.phase is Phase.RUNNING
    w.say([0.0, 0.1, 0.2])
    assert 'possible' in w.runner.restore('a', check=True).result(0).message
    assert w.runner.session.digest() == before


def test_p28_a_repeated_or_late_request_has_no_second_effect(world: Make) -> None:
    w = world(ARM)
    w.go()
    w.step()
    first = w.runner.save(request_id='x')
    w.step()
    assert w.runner.save(request_id='x') == first
    seen = w.runner.epoch
    w.runner.restore(first.name, if_epoch=seen).result(0)
    before = w.runner.session.digest()
    for again in (w.runner.restore(first.name, if_epoch=seen), w.runner.rollback(if_epoch=seen)):
        error = again.exception(0)
        assert isinstance(error, Refusal)
        assert error.code is Code.STALE_EPOCH
    with pytest.raises(Refusal, match='STALE_EPOCH'):
        w.runner.drop(first.name, if_epoch=seen)
    w.runner.stop()                              # does not make an epoch stale
    w.runner.restore(first.name, if_epoch=seen + 1).result(0)
    w.runner.rollback().result(0)                # to that same one
    assert w.runner.session.digest() == before
    assert [e.code for e in w.sink.told(EventKind.REFUSED)] == [Code.STALE_EPOCH] * 3


def test_two_runners_in_one_process_share_nothing(world: Make) -> None:
    a, b = world(NUMBERED), world(NUMBERED)
    a.go()
    a.steps(3)
    before = b.runner.session.digest()
    a.runner.save('x')
    a.runner.reset().result(0)
    assert b.runner.session.digest() == before
    assert b.sink.log == []
    assert [c.name for c in b.runner.list()] == ['origin']
    b.go()
    b.steps(2)
    assert b.numbers() == [1000, 1001]
    assert a.numbers() == [1000, 1001, 1002]
    assert a.runner.session.id != b.runner.session.id


def test_an_inference_that_raises_is_a_fault_and_every_verb_still_answers(world: Make) -> None:
    w = world(ARM, {'outputs': {'arm': {'start_tolerance': 1000.0}}})
    goal = w.go()
    w.step()
    w.runner.save('a')
    w.steps(3)
    w.step([-200.0, 0, 0])
    assert goal.result is not None
    assert goal.result.code is Code.FAULT
    assert 'the policy raised' in goal.result.message
    assert w.phase is Phase.FAULT
    assert w.sink.kinds()[-1] == 'stop'
    for verb in (lambda: w.runner.restore('a').result(0), lambda: w.runner.start(),
                 lambda: w.runner.stop(), lambda: w.runner.pause(), lambda: w.runner.resume(),
                 lambda: w.runner.save('b')):
        with pytest.raises(Refusal, match='FAULT'):
            verb()
    w.steps(2)
    assert w.sink.kinds()[-1] == 'stop'
    assert w.runner.status().phase is Phase.FAULT
    w.runner.clock_jumped(-5)
    w.runner.deactivate()


@pytest.mark.parametrize('run', [{'start_at': 3, 'latency_steps': 2}, LOCK_STEP],
                         ids=['live', 'lock step'])
def test_p18_verbs_from_three_threads_beside_running_steps(world: Make, run: dict[str, Any]
                                                           ) -> None:
    w = world(NUMBERED, {'run': run}, threaded=True)
    w.go()
    w.runner.save('a', pin=True)
    answers: list[Code] = []
    end = threading.Event()

    def call(seed: int) -> None:
        rng = random.Random(seed)
        verbs: list[Callable[[], Any]] = [
            lambda: w.runner.save(), lambda: w.runner.restore('a').result(5),
            lambda: w.runner.rollback().result(5), lambda: w.runner.stop(), lambda: w.go(),
            lambda: w.go(capsule='a'), lambda: w.runner.poll(), lambda: w.runner.status(),
            lambda: w.runner.keep('a', pin=1), lambda: w.runner.pause()]
        for _ in range(60):
            try:
                rng.choice(verbs)()
                answers.append(Code.OK)
            except Refusal as error:
                answers.append(error.code)
    threads = [threading.Thread(target=call, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    while any(t.is_alive() for t in threads):
        w.step()
        end.wait(0.0005)                         # let the others have the processor
    for t in threads:
        t.join(5)
    w.runner.stop()
    w.runner.restore('a').result(5)              # the device thread has done everything else
    assert len(answers) == 180
    assert set(answers) <= {Code.OK, Code.WRONG_PHASE}
    assert w.runner.status().phase is Phase.HOLD
    rows = {round(n) for c in w.sink.chunks if c.used for n in c.data[:, 0]}
    assert set(w.numbers()) <= rows
    assert [c.tick for c in w.sink.chunks] == [round(c.data[0, 0]) // 1000 for c in w.sink.chunks]


@pytest.mark.parametrize('how', ['restore', 'goal'])
def test_a_capsule_that_goes_between_the_checks_and_the_copy_leaves_a_plain_stop(
        world: Make, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    w = world(NUMBERED, {'outputs': {'actions': {'on_stop': {'do': 'zero'}}}})
    goal = w.go()
    w.steps(2)
    w.runner.save('a')
    epoch = w.runner.epoch

    def gone(plan: object) -> None:
        raise Refusal(Code.NOT_FOUND, 'it went')
    monkeypatch.setattr(w.runner.session, 'apply', gone)
    if how == 'restore':
        error = w.runner.restore('a').exception(0)
        assert isinstance(error, Refusal)
        assert error.code is Code.NOT_FOUND
    else:
        result = w.go(capsule='a').result
        assert result is not None
        assert result.code is Code.NOT_FOUND
    assert goal.result is not None
    assert goal.result.code is Code.NOT_FOUND
    assert w.phase is Phase.HOLD
    assert w.runner.epoch == epoch + 1
    assert w.runner.status().queue_depth == 0
    assert w.sink.kinds() == ['publish', 'publish', 'stop']


def test_p12_lock_step_a_set_that_was_sent_before_the_restore_is_not_used_after_it(world: Make
                                                                                   ) -> None:
    w = held(world, 'early', LOCK_STEP)
    w.runner.save('a')
    w.advance(0.02)
    w.say()                                      # the sender did not wait for step 4's output
    restored = w.runner.restore('a')
    gate('early').open()
    restored.result(5)
    assert w.numbers() == [1000, 2000, 3000]
    w.step()
    w.sink.wait(lambda: len(w.sink.actions) == 4)
    assert w.runner.status().step == 4


def test_after_a_restore_boundaries_tell_of_the_restored_observation(world: Make) -> None:
    """Whence and where, until the next inference; the record loses nothing that a step took in."""
    w = world(NUMBERED, {'run': LOCK_STEP})
    w.go()
    for i in range(7):
        w.step([0.1 * i, 0.0, 0.0])
    a = w.runner.save('a')
    for i in range(6):
        w.step([9.0, 9.0, 9.0 + i])
    w.runner.restore('a').result(0)
    w.step([0.7, 0.0, 0.0])
    b = w.runner.save('b')
    assert (b.stamp_ns, b.witness, b.tick) == (a.stamp_ns, a.witness, a.tick)
    w.steps(3)
    assert [e.step for e in w.sink.chunks[-1].latched] == [11, 12, 7, 8, 9, 10]
