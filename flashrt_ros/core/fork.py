"""Continuing a capsule beside the present: forks and previews.

A fork runs in a live set that was declared and bound at configure; nothing binds at run time. A
preview runs a few ticks from a capsule and leaves the present as it was, in a spare live set where
there is one, else in the live set itself between two ticks.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from flashrt_ros.core import probe
from flashrt_ros.core.capsule import Boundary
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.live import LiveSet

if TYPE_CHECKING:
    from flashrt_ros.core.session import Session

Arrays = Mapping[str, NDArray[Any]]


class Fork:
    """A capsule continued in another live set. `close` gives the live set back."""

    def __init__(self, session: Session, live: LiveSet, boundary: Boundary) -> None:
        self._session = session
        self._live: LiveSet | None = live
        session._worker.call(lambda: _load(session, live, boundary)).result()

    def tick(self, inputs: Arrays) -> Arrays:
        """Run one tick of the policy; return copies of its outputs. Waits."""
        live = self._live
        if live is None:
            raise Refusal(Code.WRONG_PHASE, 'this fork is closed')
        return self._session._worker.call(lambda: _tick(live, inputs)).result()

    def digest(self) -> dict[str, str]:
        """Return SHA-256 of every STATE buffer. Waits."""
        live = self._live
        if live is None:
            raise Refusal(Code.WRONG_PHASE, 'this fork is closed')
        return self._session._worker.call(lambda: probe.digest(live)).result()

    def close(self) -> None:
        """Give the live set back for another fork."""
        if self._live is not None:
            with self._session._lock:
                self._session._spare_sets.append(self._live)
            self._live = None


class Forks:
    """The part of a session that continues capsules elsewhere."""

    def fork(self: Session, name: str = '') -> Fork:  # type: ignore[misc]
        """Continue a capsule ('' the newest) in a spare live set.

        Raises Refusal: UNSUPPORTED where all declared live sets are in use, NOT_FOUND, EVICTED.
        """
        with self._lock:
            plan = self.plan_restore(name)
            if not self._spare_sets:
                raise Refusal(Code.UNSUPPORTED, f'all {self.options.live_sets} live sets are in '
                              'use; declare more with live_sets')
            live = self._spare_sets.pop()
            boundary = plan.boundary.held()
        try:
            return Fork(self, live, boundary)
        except BaseException:
            with self._lock:
                self._spare_sets.append(live)
            raise

    def preview(self: Session, name: str, inputs: Sequence[Arrays]  # type: ignore[misc]
                ) -> list[Arrays]:
        """Return the outputs of ticks from a capsule on `inputs`; the present stays as it is."""
        with self._lock:
            spare = bool(self._spare_sets)
        if spare:
            fork = self.fork(name)
            try:
                return [fork.tick(i) for i in inputs]
            finally:
                fork.close()
        if self._live.journals:
            raise Refusal(Code.UNSUPPORTED, 'a preview of a policy with journals needs a live set '
                          'of its own; declare live_sets: 2')
        with self._lock:
            boundary = self.plan_restore(name).boundary.held()
        return self._worker.call(lambda: _preview_in_place(self, boundary, inputs)).result()


def _load(session: Session, live: LiveSet, boundary: Boundary) -> None:
    try:
        if boundary.payload is None:
            raise Refusal(Code.UNSUPPORTED, 'a fork continues a capsule; save one first')
        live.load(boundary.payload, boundary.lengths, boundary.strands, boundary.pieces)
        live.set_host(boundary.host)
    finally:
        with session._lock:
            boundary.release()


def _tick(live: LiveSet, inputs: Arrays) -> Arrays:
    for name, value in inputs.items():
        live.inputs[name][...] = value
    return live.run(None)


def _preview_in_place(session: Session, boundary: Boundary, inputs: Sequence[Arrays]
                      ) -> list[Arrays]:
    live = session._live
    with session._lock:
        try:
            present = session._pool.take()
        except Refusal:
            boundary.release()
            raise
    kept = {n: a.copy() for n, a in live.inputs.items()}
    try:
        live.save_plain(present)
        assert boundary.payload is not None
        live.load(boundary.payload, boundary.lengths, boundary.strands, {})
        return [_tick(live, i) for i in inputs]
    finally:
        live.load(present, live.lengths, live.strands, {})
        for name, value in kept.items():
            live.inputs[name][...] = value
        with session._lock:
            present.release()
            boundary.release()
