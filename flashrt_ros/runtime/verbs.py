"""The capsule verbs as a client asks for them: save, restore, rollback, reset, drop, keep, list.

Save, drop, keep and list go straight to the session, which has a lock of its own and never waits
for an inference. A rewind checks and stops under the runner's lock and answers through a future,
after its copy. A capsule that rests on disk is loaded first; nothing has changed until then.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

from flashrt_ros.core.capsule import CapsuleInfo
from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.rewind import Plan
from flashrt_ros.core.saving import Usage
from flashrt_ros.core.session import Session
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.rewinds import Rewinds
from flashrt_ros.runtime.sink import RewindAnswer


class Verbs:
    """The part of a runner that names boundaries and returns to them."""

    session: Session
    _hub: Hub
    _rewinds: Rewinds

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Remember a refusal for the status, tell of it, and pass it on."""
        try:
            yield
        except Refusal as error:
            with self._hub.locked():
                self._hub.refused(error)
            raise

    def save(self, name: str = '', *, note: str = '', pin: bool = False, persist: bool = False,
             overwrite: bool = False, lease_s: float = 0.0, request_id: str = '') -> CapsuleInfo:
        """Name the newest boundary. Waits for nothing. Raises Refusal."""
        persist = persist or 'save' in self._hub.file.run.persist_on
        with self._telling():
            return self.session.save(name, note=note, pin=pin, persist=persist,
                                     overwrite=overwrite, lease_s=lease_s, request_id=request_id)

    def drop(self, name: str, *, if_id: str = '', if_epoch: int = 0) -> CapsuleInfo:
        """Forget a capsule. Raises Refusal."""
        with self._telling():
            return self.session.drop(name, if_id=if_id, if_epoch=if_epoch)

    def keep(self, name: str = '', *, pin: int = 0, persist: bool = False,
             lease_s: float = 0.0) -> CapsuleInfo:
        """Pin (1), unpin (2), lease or persist a capsule ('' the newest). Raises Refusal."""
        with self._telling():
            return self.session.keep(name, pin={1: True, 2: False}.get(pin), persist=persist,
                                     lease_s=lease_s)

    def list(self, prefix: str = '') -> list[CapsuleInfo]:
        """Return the capsules whose name starts with `prefix`, oldest first."""
        return self.session.list(prefix)

    def usage(self) -> Usage:
        """Return the bytes that capsules take, by tier."""
        return self.session.usage()

    def restore(self, name: str = '', *, if_id: str = '', if_epoch: int = 0, check: bool = False,
                force: bool = False, accept_inexact: bool = False) -> Future[RewindAnswer]:
        """Return to a capsule ('' the newest); the future's exception is the Refusal why not."""
        return self._rewind(lambda: self.session.plan_restore(
            name, if_id=if_id, if_epoch=if_epoch, accept_inexact=accept_inexact), check, force)

    def rollback(self, capsules: int = 0, *, steps: int = 0, seconds: float = 0.0,
                 if_epoch: int = 0, check: bool = False, force: bool = False,
                 accept_inexact: bool = False) -> Future[RewindAnswer]:
        """Return along the lineage."""
        return self._rewind(lambda: self.session.plan_rollback(
            capsules, steps=steps, seconds=seconds, if_epoch=if_epoch,
            accept_inexact=accept_inexact, lock_step=self._hub.lock_step), check, force)

    def reset(self) -> Future[RewindAnswer]:
        """Return to the fresh start."""
        return self._rewind(self.session.plan_reset, False, False)

    def _rewind(self, plan: Callable[[], Plan], check: bool, force: bool) -> Future[RewindAnswer]:
        answer: Future[RewindAnswer] = Future()

        def attempt() -> None:
            self._rewinds.rewind(plan(), answer, check=check, force=force)

        def failed(error: Exception) -> None:
            if isinstance(error, Refusal) and not check:
                self._hub.refused(error)
            self._hub.later(lambda: answer.set_exception(error))
        with self._hub.locked():
            self._rewinds.when_loaded(attempt, failed)
        return answer
