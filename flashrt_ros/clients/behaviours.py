"""Behaviours for py_trees: execute, save, restore, roll back, stop. CapsuleScope is in scope.py.

All behaviours of a tree share one `PolicyClient`, so requests to one service arrive in the order in
which the tree made them. Tick the tree in the thread that spins the client's node, for example in a
timer of it: nothing here waits. A behaviour succeeds only where the answer says so. What it learnt
lies on the blackboard below `/capsules/<its name>`: `code` (int, of the last answer), `message`,
`epoch` and `capsule` (CapsuleInfo); so names should differ.

A value of a request may be a function, which is called when the request is made: a prompt from the
blackboard, for example.

>>> import py_trees
>>> from flashrt_ros.clients import behaviours
>>> issubclass(behaviours.SaveCapsule, py_trees.behaviour.Behaviour)
True
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import re
import time
from typing import Any

from flashrt_ros.clients.calls import TIMEOUT_S, Call
from flashrt_ros.clients.client import Execution, PolicyClient
from flashrt_ros.core.errors import Code, Refusal

try:
    from py_trees.behaviour import Behaviour
    from py_trees.common import Access, Status
except ImportError as error:  # the module is useless without it, and says what to do
    raise ImportError("behaviours need py_trees: pip install 'flashrt_ros[trees]'") from error

Steady = Callable[[], float]
KEYS = ('code', 'message', 'epoch', 'capsule')
DEFAULT_LIMIT_S = 60.0  # of a goal that names none, as action/ExecutePolicy says
STALE_RETRIES = 3
# Ends of a goal that had begun; a goal that was refused has rewound nothing.
BEGUN = (Code.OK, Code.CANCELLED, Code.PREEMPTED, Code.STOPPED, Code.LIMIT_REACHED)


class Reporting(Behaviour):
    """A behaviour that leaves what it learnt on the blackboard, and tells the scopes around it of
    every rewind that it caused."""

    def __init__(self, name: str, client: PolicyClient, *, timeout_s: float = TIMEOUT_S,
                 steady: Steady = time.monotonic, **more: Any) -> None:
        super().__init__(name=name, **more)
        self.client = client
        self.timeout_s = timeout_s
        self.steady = steady
        self.board = self.attach_blackboard_client(
            name=name, namespace='/capsules/' + re.sub(r'\W', '_', name))
        for key in KEYS:
            self.board.register_key(key=key, access=Access.WRITE)
        self._rewinds: list[Call] = []

    def call(self, service: str, **fields: Any) -> Call:
        """Send a request with this behaviour's time-out."""
        return Call(self.client, service, timeout_s=self.timeout_s, steady=self.steady, **fields)

    def rewind(self, service: str, **fields: Any) -> Call:
        """Send a request that rewinds; its answer is heard also after a halt."""
        call = self.call(service, heard=self.rewound, **fields)
        self._rewinds = [c for c in self._rewinds if c.open] + [call]
        return call

    @property
    def rewinding(self) -> bool:
        """Whether a rewind was asked for whose answer may still come."""
        return any(call.open for call in self._rewinds)

    def rewound(self, response: Any) -> None:
        """A rewind was carried out: the scopes around this must not take it for somebody else's."""
        tell_scopes(self, int(response.epoch))

    def report(self, code: Code, message: str, *, epoch: int | None = None,
               capsule: Any = None) -> None:
        """Say what came of it: on the blackboard and as feedback."""
        self.board.code = int(code)
        self.board.message = message
        self.feedback_message = message or code.name
        if epoch is not None:
            self.board.epoch = int(epoch)
        if capsule is not None:
            self.board.capsule = capsule

    def accepted(self, response: Any) -> Status:
        """Report an answer that says yes."""
        self.report(Code.OK, response.message, epoch=getattr(response, 'epoch', None),
                    capsule=getattr(response, 'capsule', None))
        return Status.SUCCESS

    def refused(self, refusal: Refusal) -> Status:
        """Report a refusal; a behaviour that was refused has failed."""
        self.report(refusal.code, refusal.message)
        return Status.FAILURE


def tell_scopes(behaviour: Behaviour, epoch: int) -> None:
    """Tell every scope around a behaviour of a rewind that was caused inside it."""
    parent = behaviour.parent
    while parent is not None:
        hear = getattr(parent, 'hear_epoch', None)
        if hear is not None:
            hear(epoch)
        parent = parent.parent


def present(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a request as they are now."""
    return {name: value() if callable(value) else value for name, value in fields.items()}


class Request(Reporting):
    """One request per activation. `fields` are those of the service; absent ones are zeros."""

    service = ''

    def __init__(self, name: str, client: PolicyClient, fields: Mapping[str, Any] | None = None, *,
                 timeout_s: float = TIMEOUT_S, steady: Steady = time.monotonic) -> None:
        super().__init__(name, client, timeout_s=timeout_s, steady=steady)
        self.fields = dict(fields or {})
        self._call: Call | None = None

    def initialise(self) -> None:
        """Send it."""
        self._call = self.call(self.service, **present(self.fields))

    def update(self) -> Status:
        """Look for the answer."""
        assert self._call is not None
        try:
            response = self._call.poll()
        except Refusal as refusal:
            return self.refused(refusal)
        return Status.RUNNING if response is None else self.accepted(response)

    def terminate(self, new_status: Status) -> None:
        """Halted, or done: no answer is wanted; the node may still carry the request out."""
        if self._call is not None:
            self._call.abandon()
            self._call = None


class SaveCapsule(Request):
    """Names the newest boundary. Fields of srv/SaveCapsule; `capsule` is its name, '' automatic."""

    service = 'save_capsule'

    def __init__(self, name: str, client: PolicyClient, capsule: str | Callable[[], str] = '', *,
                 timeout_s: float = TIMEOUT_S, steady: Steady = time.monotonic, **fields: Any
                 ) -> None:
        super().__init__(name, client, {'name': capsule, **fields}, timeout_s=timeout_s,
                         steady=steady)


class Rewinding(Request):
    """A request that rewinds. It carries the newest epoch that the client has heard of, so that one
    which arrives late, after another rewind, does nothing; `if_epoch=0` leaves that out."""

    def initialise(self) -> None:
        """Send it."""
        fields = {'if_epoch': self.client.epoch, **present(self.fields)}
        send = self.call if fields.get('check') else self.rewind
        self._call = send(self.service, **fields)

    def terminate(self, new_status: Status) -> None:
        """Halted: the scopes around still hear of a rewind that was under way."""
        self._call = None


class RestoreCapsule(Rewinding):
    """Returns to a capsule ('' the newest, 'origin' a fresh episode). Fields of
    srv/RestoreCapsule."""

    service = 'restore_capsule'

    def __init__(self, name: str, client: PolicyClient, capsule: str | Callable[[], str] = '', *,
                 timeout_s: float = TIMEOUT_S, steady: Steady = time.monotonic, **fields: Any
                 ) -> None:
        super().__init__(name, client, {'name': capsule, **fields}, timeout_s=timeout_s,
                         steady=steady)


class Rollback(Rewinding):
    """Returns along the lineage. Fields of srv/Rollback."""

    service = 'rollback'

    def __init__(self, name: str, client: PolicyClient, *, timeout_s: float = TIMEOUT_S,
                 steady: Steady = time.monotonic, **fields: Any) -> None:
        super().__init__(name, client, fields, timeout_s=timeout_s, steady=steady)


class Stop(Request):
    """Ends motion, whoever ordered it. State is kept."""

    service = 'stop'


class ExecutePolicy(Reporting):
    """Gives permission to move until the goal ends. Fields of action/ExecutePolicy.

    Unless `if_epoch` is given the goal carries the newest epoch that this client has heard of: one
    that arrives after a stop, because its tree was halted meanwhile, starts nothing. Where the
    client was only behind the times, the goal is sent again with the epoch that it was told.
    """

    def __init__(self, name: str, client: PolicyClient, *, timeout_s: float = TIMEOUT_S,
                 steady: Steady = time.monotonic, **goal: Any) -> None:
        super().__init__(name, client, timeout_s=timeout_s, steady=steady)
        self.goal = goal
        self._execution: Execution | None = None
        self._sent: dict[str, Any] = {}
        self._retries = 0
        self._session = 0              # of the node that was asked
        self._seen = 0.0               # steady: when the node was last there
        self._unanswered_until = 0.0   # steady
        self._over = 0.0               # steady: the node has ended the goal by itself by then

    def initialise(self) -> None:
        """Send the goal."""
        self._retries = STALE_RETRIES
        self._send(self.client.epoch)

    def _send(self, epoch: int) -> None:
        self._execution = None
        if not self.client.execute_ready():
            return
        self._sent = goal = {'if_epoch': epoch, **present(self.goal)}
        self._execution = execution = self.client.execute(**goal)
        self._session = self.client.session
        self._seen = self.steady()
        self._unanswered_until = self._seen + self.timeout_s
        self._over = (self._unanswered_until
                      + (float(goal.get('max_duration_s', 0.0)) or DEFAULT_LIMIT_S))
        if goal.get('capsule'):
            execution.result.add_done_callback(lambda done: self._hear_rewind(done.result()))

    def _hear_rewind(self, result: Any) -> None:
        """A goal that had begun with a restore has ended. RESTORED is left out: then somebody else
        has rewound since."""
        if (result.ticks > 0 and result.code != Code.RESTORED) or result.code in BEGUN:
            self.rewound(result)

    @property
    def rewinding(self) -> bool:
        """Whether the goal began with a restore, and how it ended may still be told."""
        return (self._execution is not None and bool(self._sent.get('capsule'))
                and not self._execution.result.done() and self.steady() <= self._unanswered_until)

    def update(self) -> Status:
        """Look for the result."""
        execution = self._execution
        if execution is None:
            return self.refused(Refusal(
                Code.UNSUPPORTED, f'{self.client.target}/execute is not there; start the policy '
                'node, or correct its name'))
        if not execution.result.done():
            lost = self._lost(execution)
            if not lost:
                return Status.RUNNING
            execution.cancel()
            return self.refused(Refusal(Code.IO, f'{self.client.target}/execute {lost}'))
        result = execution.result.result()
        self.client.hear(result)
        if self._behind(result):
            self._retries -= 1
            self._send(int(result.epoch))
            return Status.RUNNING
        self.report(Code(result.code), result.message, epoch=result.epoch,
                    capsule=result.last if result.last.name else None)
        return Status.SUCCESS if result.code == Code.OK else Status.FAILURE

    def _behind(self, result: Any) -> bool:
        """Whether the goal was refused only because the client had not heard of the epoch yet."""
        return (result.code == Code.STALE_EPOCH and 'if_epoch' not in self.goal
                and self._retries > 0 and result.epoch != self._sent['if_epoch'])

    def _lost(self, execution: Execution) -> str:
        """Return why no result will come, '' while one may."""
        now = self.steady()
        if not execution.accepted.done():
            return (f'did not answer within {self.timeout_s:g} s'
                    if now > self._unanswered_until else '')
        if self.client.execute_ready():
            self._seen = now
        elif now > self._seen + self.timeout_s:
            return 'went away'
        if self._session and self.client.session not in (0, self._session):
            return 'is another one now, and its policy was configured anew'
        return 'did not end its goal in time' if now > self._over else ''

    def terminate(self, new_status: Status) -> None:
        """Halted: cancel, also where the goal was not acknowledged yet."""
        if new_status is Status.INVALID and self._execution is not None:
            self._execution.cancel()
            self._unanswered_until = self.steady() + self.timeout_s
