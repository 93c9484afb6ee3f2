"""CapsuleScope: a checkpoint around a subtree, which returns exactly once when the subtree fails.

    save ──> child ──SUCCESS──> drop the checkpoint, keep the new state, SUCCESS
               └─FAILURE─> stop ─> check ─> recover ─> restore ─> drop, FAILURE
    halt (nothing is ticked any more): ~/stop and restore, both without waiting

Where a halt's restore was refused, because the robot has moved, or was not seen answered, the
scope stays *dirty*: at its next entry it goes through stop, check, recover and restore before it
saves and ticks its child. A scope that cannot restore (its capsule was evicted, the robot cannot be
brought back) fails at every entry until somebody rewinds: the child is never ticked on a state that
is not its own. py_trees halts a decorator before its child, so nothing here relies on the child's
own cancel.

The restore carries the id of its own save and the newest epoch in which something inside the scope
rewound. So of two scopes that are halted together the outer one returns, and the inner one's
request, which comes later on the same client, is stale and does nothing; and a state that somebody
else has rewound since is left alone. `check` asks for that before `recover` moves the robot.
"""
from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
import time
from typing import Any
import uuid

from flashrt_ros.clients.behaviours import Reporting, Steady, tell_scopes
from flashrt_ros.clients.calls import TIMEOUT_S, Call
from flashrt_ros.clients.client import PolicyClient
from flashrt_ros.core.errors import Code, Refusal

# isort: split
# behaviours has said what to install where py_trees is missing
from py_trees.behaviour import Behaviour
from py_trees.common import Status
from py_trees.decorators import Decorator


class Stage(Enum):
    """Where a scope is."""

    SAVE = 'save'
    CHILD = 'child'
    STOP = 'stop'
    CHECK = 'check'
    RECOVER = 'recover'
    RESTORE = 'restore'


class CapsuleScope(Reporting, Decorator):
    """Save, run `child`, and on failure or halt return to the save.

    `recover` brings the robot to where the capsule may be restored, for example to its witness,
    which lies on the blackboard as `capsule`; without it a robot that moved too far is FAILURE with
    ROBOT_MOVED. `lease_s` is how long the checkpoint survives a tree that is ticked no more.
    """

    def __init__(self, name: str, child: Behaviour, client: PolicyClient, *,
                 recover: Behaviour | None = None, note: str = '', lease_s: float = 600.0,
                 timeout_s: float = TIMEOUT_S, steady: Steady = time.monotonic) -> None:
        super().__init__(name, client, timeout_s=timeout_s, steady=steady, child=child)
        self.recover = recover
        if recover is not None:
            self.children.append(recover)
            recover.parent = self
        self.note = note or name
        self.lease_s = lease_s
        self.stage = Stage.SAVE
        self.dirty = False             # the state is not that from before the scope, and should be
        self.capsule: Any = None       # of the save
        self.epoch = 0                 # of the save, or of the newest rewind inside the scope
        self._call: Call | None = None
        self._repairing = False        # what a halt left; else the child has failed
        self._renew_at = 0.0           # steady
        self._stages = {Stage.SAVE: self._save, Stage.CHILD: self._child, Stage.STOP: self._stop,
                        Stage.CHECK: self._check, Stage.RECOVER: self._recover,
                        Stage.RESTORE: self._restore}

    def hear_epoch(self, epoch: int) -> None:
        """Something inside the scope rewound."""
        self.epoch = max(self.epoch, epoch)

    # -- ticking --------------------------------------------------------------------------

    def tick(self) -> Iterator[Behaviour]:
        """Go on with the stage; the child and `recover` are ticked only in theirs."""
        if self.status is not Status.RUNNING:
            self._enter(Stage.STOP if self.dirty else Stage.SAVE)
            self._repairing = self.dirty
        self._renew()
        status = Status.RUNNING
        ticked = None
        while status is Status.RUNNING and ticked is not self.stage:
            ticked = self.stage
            if self.stage is Stage.CHILD:
                yield from self.decorated.tick()
            elif self.stage is Stage.RECOVER and self.recover is not None:
                yield from self.recover.tick()
            status = self.update()
        if status is not Status.RUNNING:
            self.stop(status)
        self.status = status
        yield self

    def update(self) -> Status:
        """Look how the stage fares."""
        try:
            return self._stages[self.stage]()
        except Refusal as refusal:
            return self.refused(refusal)

    def _enter(self, stage: Stage) -> Status:
        self.stage = stage
        self._call = None
        return Status.RUNNING

    def _answer(self, service: str, **fields: Any) -> Any | None:
        """Return the answer of this stage's call, which is made at the first look."""
        if self._call is None:
            self._call = self.call(service, **fields)
        return self._call.poll()

    def _save(self) -> Status:
        if self._call is None:
            token = f'scope-{uuid.uuid4().hex}'
            self._call = self.call('save_capsule', name=token, note=self.note,
                                   lease_s=self.lease_s, request_id=token)
        try:
            response = self._call.poll()
        except Refusal:
            self._forget_save()
            raise
        if response is None:
            return Status.RUNNING
        self.accepted(response)
        self.capsule, self.epoch = response.capsule, int(response.epoch)
        self._renew_at = self.steady() + self.lease_s / 2
        return self._enter(Stage.CHILD)

    def _child(self) -> Status:
        if self.decorated.status is Status.FAILURE:
            self.dirty, self._repairing = True, False
            return self._enter(Stage.STOP)
        if self.decorated.status is Status.SUCCESS:
            self._drop(self.capsule)
            self.report(Code.OK, 'kept the new state')
        return self.decorated.status

    def _stop(self) -> Status:
        """Before `recover` moves the robot nothing else may. Rewinds that were asked for inside the
        scope, or by its halt, are awaited: whether the state is still this scope's depends on
        them."""
        if self._answer('stop') is None or any(
                below.rewinding for below in self.iterate() if isinstance(below, Reporting)):
            return Status.RUNNING
        if not self.dirty:             # the halt's restore was carried out
            return self._enter(Stage.SAVE)
        return self._enter(Stage.CHECK if self.recover is not None else Stage.RESTORE)

    def _check(self) -> Status:
        try:
            if self._answer('restore_capsule', check=True, **self._mine()) is None:
                return Status.RUNNING
        except Refusal as refusal:
            if refusal.code is not Code.ROBOT_MOVED:
                return self._not_restored(refusal)
            self.refused(refusal)      # so that one sees what `recover` is for
        return self._enter(Stage.RECOVER)

    def _recover(self) -> Status:
        assert self.recover is not None
        if self.recover.status is Status.FAILURE:
            raise Refusal(Code.ROBOT_MOVED, f'{self.recover.name!r} did not bring the robot to '
                          f'where {self.capsule.name} may be restored: '
                          f'{self.recover.feedback_message}')
        return (Status.RUNNING if self.recover.status is Status.RUNNING
                else self._enter(Stage.RESTORE))

    def _restore(self) -> Status:
        if self._call is None:
            self._call = self.rewind('restore_capsule', **self._mine())
        try:
            response = self._call.poll()
        except Refusal as refusal:
            return self._not_restored(refusal)
        if response is None:
            return Status.RUNNING
        self.report(Code.OK, response.message, epoch=response.epoch)
        return self._restored()

    def _not_restored(self, refusal: Refusal) -> Status:
        """Only a rewind by somebody else, or another configure, makes the state no longer this
        scope's business."""
        self.refused(refusal)
        anew = (refusal.code is Code.NOT_FOUND
                and self.client.session not in (0, self.capsule.session))
        if refusal.code is not Code.STALE_EPOCH and not anew:
            return Status.FAILURE
        self.dirty = False
        self._drop(self.capsule)
        return self._restored()

    def _restored(self) -> Status:
        """After a failure that is the end; after a halt the child's turn comes now."""
        return self._enter(Stage.SAVE) if self._repairing else Status.FAILURE

    def _mine(self) -> dict[str, Any]:
        return {'name': self.capsule.name, 'if_id': self.capsule.id, 'if_epoch': self.epoch}

    def rewound(self, response: Any) -> None:
        """The restore was carried out, whoever looked at its answer."""
        self.hear_epoch(int(response.epoch))
        tell_scopes(self, int(response.epoch))
        if response.capsule.id == self.capsule.id:
            self.dirty = False
            self._drop(self.capsule)

    def _drop(self, capsule: Any) -> None:
        """Nobody waits for the answer: a lost one costs no more than the lease."""
        self.call('drop_capsule', name=capsule.name, if_id=capsule.id)

    def _renew(self) -> None:
        """A child may take longer than the lease."""
        if self.stage is not Stage.SAVE and self.steady() > self._renew_at:
            self._renew_at = self.steady() + self.lease_s / 2
            self.call('keep_capsule', name=self.capsule.name, lease_s=self.lease_s)

    # -- halting --------------------------------------------------------------------------

    def stop(self, new_status: Status) -> None:
        """As Decorator, and with `recover` as a second child."""
        self.terminate(new_status)
        for below in self.children:
            if new_status is Status.INVALID or below.status is Status.RUNNING:
                below.stop(Status.INVALID)
        self.status = new_status

    def terminate(self, new_status: Status) -> None:
        """Halted: stop the robot and order the restore; nothing is ticked any more."""
        if new_status is not Status.INVALID or self.status is not Status.RUNNING:
            return
        if self.stage is Stage.SAVE:   # the child has not begun: there is nothing to undo
            self._forget_save()
        elif self.stage is Stage.CHILD or self.dirty:
            self.dirty = True
            self.call('stop')
            if not any(call.open for call in self._rewinds):
                self.rewind('restore_capsule', **self._mine())

    def _forget_save(self) -> None:
        """Drop what a save that nobody waits for any more may still make."""
        if self._call is not None:
            self._call.then(lambda response: self._drop(response.capsule))

    def tip(self) -> Behaviour | None:
        """As Decorator; while the robot is brought back, that of `recover`."""
        if self.stage is Stage.RECOVER and self.recover is not None:
            return self.recover.tip() or self
        return super().tip()
