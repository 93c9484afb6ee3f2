"""Returning to boundaries: restore, rollback, reset.

A restore is planned first, which checks everything and changes nothing, and applied then. Between
the two its owner asks the guard and stops the robot. A refusal leaves every byte as it was.
"""
from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, replace
import time

from flashrt_ros.core.capsule import ORIGIN, Boundary, Capsule, CapsuleInfo, Event, EventKind, Mark
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.parts import Parts
from flashrt_ros.core.payload import Tier

HERE_NBYTES = 1 << 20  # STATE that the CPU copies before another thread has woken up


@dataclass(frozen=True)
class Plan:
    """A restore that passed every check of the session and was not carried out yet."""

    kind: EventKind
    boundary: Boundary
    capsule: Capsule | None            # None: a boundary of the ring
    info: CapsuleInfo
    saved_ns: int

    @property
    def is_origin(self) -> bool:
        """Whether it goes to the fresh start, which has neither witness nor age: to `origin` or to
        a capsule that was saved before the first tick."""
        return self.boundary.tick == 0

    @property
    def mark(self) -> Mark:
        """Whence and where the robot was."""
        return self.boundary.mark


class Rewinding(Parts):
    """The part of a session that returns to boundaries."""

    # -- restore --------------------------------------------------------------------------

    def plan_restore(self, name: str = '', *, if_id: str = '', if_epoch: int = 0,
                     accept_inexact: bool = False) -> Plan:
        """Check a return to a capsule ('' the newest); change nothing.

        Raises Refusal: NOT_FOUND, EVICTED, STALE_EPOCH, FINGERPRINT_MISMATCH, FAULT.
        """
        with self._lock:
            self._check_fault()
            self._check_epoch(if_epoch)
            capsule = self._store.get(name, if_id)
            return self._plan(EventKind.RESET if capsule.name == ORIGIN else EventKind.RESTORED,
                              capsule, accept_inexact)

    def plan_reset(self) -> Plan:
        """Check a return to the fresh start."""
        return self.plan_restore(ORIGIN)

    def plan_rollback(self, capsules: int = 0, *, steps: int = 0, seconds: float = 0.0,
                      if_epoch: int = 0, accept_inexact: bool = False, lock_step: bool = False
                      ) -> Plan:
        """Check a return along the lineage; change nothing.

        Raises Refusal: INVALID_ARGUMENT for more than one criterion, UNSUPPORTED for steps or
        seconds when live, NOTHING_TO_ROLL_BACK, EVICTED, STALE_EPOCH, FINGERPRINT_MISMATCH.
        """
        if (capsules > 0) + (steps > 0) + (seconds > 0) > 1:
            raise Refusal(Code.INVALID_ARGUMENT, f'capsules={capsules}, steps={steps} and seconds='
                          f'{seconds} exclude each other; set one')
        if not 0 <= seconds < float('inf') or capsules < 0 or steps < 0:
            raise Refusal(Code.INVALID_ARGUMENT, f'capsules={capsules}, steps={steps}, seconds='
                          f'{seconds}: a rollback goes back by a finite positive amount')
        if (steps or seconds) and not lock_step:
            raise Refusal(Code.UNSUPPORTED, 'rollback by steps or seconds is possible in lock step '
                          'only: live, the robot has moved on; roll back by capsules')
        with self._lock:
            self._check_fault()
            self._check_epoch(if_epoch)
            if steps or seconds:
                return self._plan_steps(steps, seconds, accept_inexact)
            capsule = self._store.ancestor(self._parent, max(1, capsules))
            self._store.get(capsule.name, capsule.id)  # refuses an evicted one
            return self._plan(EventKind.ROLLED_BACK, capsule, accept_inexact)

    def _plan_steps(self, steps: int, seconds: float, accept_inexact: bool) -> Plan:
        newest = self._ring[-1]

        def wanted(step: int, stamp_ns: int) -> bool:
            if steps:
                return step == newest.step - steps
            return stamp_ns <= newest.mark.stamp_ns - round(seconds * 1e9)
        for b in reversed(self._ring):
            if wanted(b.step, b.mark.stamp_ns) and b.payload is not None and self._stands(b):
                info = CapsuleInfo('', '', b.parent, '', b.tick, b.step, self.id, self.epoch,
                                   b.mark.stamp_ns, b.payload.tier, self.state_nbytes,
                                   exact=self.exact, fingerprint=self._fingerprint_digest,
                                   witness=dict(b.mark.witness))
                return Plan(EventKind.ROLLED_BACK, b, None, info, self._clock())
        capsule = self._store.by_id(self._parent)
        while capsule is not None and not wanted(capsule.step, capsule.mark.stamp_ns):
            capsule = self._store.by_id(capsule.parent)
        if capsule is None or capsule.tier is Tier.NONE or capsule.name == ORIGIN:
            raise Refusal(Code.NOTHING_TO_ROLL_BACK, f'no boundary {steps or seconds} '
                          f'{"steps" if steps else "seconds"} back is kept (the ring starts at '
                          f'step {self._ring[0].step}, now is {newest.step}); raise history, or '
                          'save capsules')
        return self._plan(EventKind.ROLLED_BACK, capsule, accept_inexact)

    def _plan(self, kind: EventKind, capsule: Capsule, accept_inexact: bool) -> Plan:
        exact = self.fingerprint.check(capsule.fingerprint, accept_inexact=accept_inexact)
        boundary = capsule.boundary
        if boundary is None:
            raise Refusal(Code.BUSY, f'capsule {capsule.name!r} rests on disk; it must be loaded '
                          'first', on_disk=(capsule.name, capsule.id))
        info = replace(capsule.info(), exact=capsule.exact and exact)
        return Plan(kind, boundary, capsule, info, capsule.saved_ns)

    def apply(self, plan: Plan) -> Future[CapsuleInfo]:
        """Carry out a plan: HOST state at once, DEVICE state in order after a running tick.

        An inference in flight is discarded. The future answers after the copy; its exception is a
        Refusal(FAULT) where the device failed. Raises Refusal where the capsule went since.
        """
        started = time.perf_counter()
        with self._lock:
            self._check_fault()
            if plan.capsule is not None and plan.capsule.boundary is not plan.boundary:
                # it has left the memory since it was checked, and may be there again
                plan = self._plan(plan.kind, self._store.get(plan.capsule.name, plan.capsule.id),
                                  accept_inexact=True)
            if plan.capsule is None and not (any(b is plan.boundary for b in self._ring)
                                             and self._stands(plan.boundary)):
                raise Refusal(Code.NOTHING_TO_ROLL_BACK, 'the boundary has left the ring')
            target = plan.boundary.held()
            if self.in_flight is not None:
                inference = self.in_flight
                self._settle(inference)
                if inference.done:
                    self._release_slot(inference)
            self.epoch += 1
            self.rewind_epoch = self.epoch
            if plan.capsule is not None:
                plan.capsule.used = self._store.use()
                self._parent = plan.capsule.id
                self._set_newest(plan.boundary.held(), self._parent)
            else:
                while self._ring[-1] is not plan.boundary:
                    self._ring.pop().release()
                self._parent = plan.boundary.parent
                self._set_head(target.payload, target.lengths, target.strands)
            self._moved = False
            self.exact = self._build_exact and plan.info.exact
            self._live.set_host(target.host)
            self.pending_after_restore = target.pending
            epoch = self.epoch
        here = self.device.kind == 'host' and self.state_nbytes <= HERE_NBYTES
        return self._worker.call(lambda: self._load(plan, target, epoch, started), here=here)

    def _load(self, plan: Plan, target: Boundary, epoch: int, started: float) -> CapsuleInfo:
        """On the device thread: the copy."""
        copying = time.perf_counter()
        try:
            if self.fault is not None:  # the inference that it waited for has failed
                raise self.fault
            assert target.payload is not None
            self._live.load(target.payload, target.lengths, target.strands, target.pieces)
        except Exception as error:
            fault = Refusal(Code.FAULT, f'the device failed during a restore: {error}; clean up '
                            'and configure')
            with self._lock:
                self.fault = fault
            raise fault from error
        finally:
            now = time.perf_counter()
            with self._lock:
                target.release()
                self._restore_s = now - copying
        with self._lock:
            self._events.append(Event(plan.kind, plan.info, epoch, duration_s=now - started))
        self._flush_events()
        return plan.info
