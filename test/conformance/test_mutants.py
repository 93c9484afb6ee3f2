"""P3: sessions that are wrong in one way each; a named check must notice each of them."""
from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
import pytest

from flashrt_ros.core.capsule import CapsuleInfo
from flashrt_ros.core.layout import Role, Space
from flashrt_ros.core.rewind import Plan
from flashrt_ros.core.session import Session
from test.conformance import checks
from test.conformance.cases import Case, Owner, parameters
from test.conformance.checks import owner


class NoOpRestore(Session):
    """Answers, and changes nothing."""

    def apply(self, plan: Plan) -> Future[CapsuleInfo]:
        self.epoch += 1
        self.rewind_epoch = self.epoch
        future: Future[CapsuleInfo] = Future()
        future.set_result(plan.info)
        return future


class OneBufferShort(Session):
    """Copies all of plain STATE but the last buffer."""

    def _load(self, *args: Any) -> CapsuleInfo:
        plain = [s for s in self.layout.select(Role.STATE, Space.DEVICE) if not s.is_journal]
        kept = self._live.arena.read(plain[-1].name)
        info = super()._load(*args)
        self._live.arena.write(plain[-1].name, kept)
        return info


class CursorNotRestored(Session):
    """Forgets one buffer of the host block."""

    def apply(self, plan: Plan) -> Future[CapsuleInfo]:
        kept = self.host['owner.counter'].copy()
        future = super().apply(plan)
        self.host['owner.counter'][...] = kept
        return future


class HostBlockOfThePreviousStep(Session):
    """Commits HOST state as it was one step ago."""

    _previous: bytes | None = None

    def commit_step(self, *args: Any, **kw: Any) -> None:
        super().commit_step(*args, **kw)
        now = self._ring[-1].host
        if self._previous is not None:
            self._ring[-1].host = self._previous
        self._previous = now


class EpochNotRaised(Session):
    """Rewinds without saying so."""

    def apply(self, plan: Plan) -> Future[CapsuleInfo]:
        epoch, rewind = self.epoch, self.rewind_epoch
        future = super().apply(plan)
        self.epoch, self.rewind_epoch = epoch, rewind
        return future


class CopyAfterTheNextTick(Session):
    """Orders the device copy behind the tick that follows."""

    _late: Any = None

    def _load(self, *args: Any) -> CapsuleInfo:
        plan: Plan = args[0]
        target = args[1].held()

        def later() -> None:
            assert target.payload is not None
            self._live.load(target.payload, target.lengths, target.strands, target.pieces)
            target.release()
        args[1].release()
        self._late = later
        return plan.info

    def _run(self, *args: Any) -> None:
        super()._run(*args)
        if self._late is not None:
            late, self._late = self._late, None
            late()


class SlotWrittenTooLate(Session):
    """A save names the live set's slot, which the next tick writes again."""

    def _run(self, inference: Any) -> None:
        super()._run(inference)
        if inference.slot is not None and self._head_slot is not None:
            d, head = self.device, self._head_slot
            d.copy(head.block, head.offset, inference.slot.block, inference.slot.offset,
                   head.nbytes)


MUTANTS = [
    (NoOpRestore, 'p1_every_byte_returns'),
    (OneBufferShort, 'p1_every_byte_returns'),
    (CursorNotRestored, 'p6_host_state_returns_with_the_device'),
    (HostBlockOfThePreviousStep, 'p2_the_future_is_the_same'),
    (EpochNotRaised, 'p11_epochs_rise_with_every_rewind'),
    (CopyAfterTheNextTick, 'p2_the_future_is_the_same'),
    (SlotWrittenTooLate, 'p4_restoring_never_changes_a_capsule'),
]


@pytest.mark.parametrize(('mutant', 'check'), MUTANTS, ids=[m.__name__ for m, _ in MUTANTS])
@pytest.mark.parametrize('case', parameters())
def test_p3_mutant_is_killed(case: Case, mutant: type[Session], check: str) -> None:
    with pytest.raises(AssertionError):
        checks.CHECKS[check](case, mutant)


@pytest.mark.parametrize('case', parameters())
def test_p3_each_load_bearing_buffer_left_out_shows_in_the_outputs(case: Case) -> None:
    for name in case.load_bearing:
        with owner(case, Session) as o:
            o.run(5)
            o.session.save('a')
            never = o.run(6)
            o.restore('a')
            o.run(6, first=70)
            other = np.frombuffer(o.everything()[name], np.uint8)
            o.restore('a')
            o.session._live.arena.write(name, left_out(o, name, other))
            assert o.run(6) != never, f'{name} does not matter'


def left_out(o: Owner, name: str, other: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return a buffer as if the restore had not brought it back from the other branch."""
    spec = o.session.layout[name]
    if not spec.is_journal:
        constant = np.array_equal(other, o.session._live.arena.read(name))
        return other ^ np.uint8(1) if constant else other
    outer, rows, width = spec.rows()
    data = o.session._live.arena.read(name).reshape(outer, rows * width)
    n = o.session._live.lengths[spec.length or ''] * width
    data[:, :n] = other.reshape(outer, -1)[:, -n:]  # rows that the branch wrote
    return data.reshape(-1)
