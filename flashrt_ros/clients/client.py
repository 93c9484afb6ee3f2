"""Talks to a policy node from inside another node: every verb returns a future at once.

`PolicyClient` never spins, waits or sleeps: it lives in its owner's node and is served by its
owner's executor, so it can be used in callbacks and tree ticks. Call it from the thread that spins
that executor. Programs without a node of their own use `flashrt_ros.clients.blocking`.

An answer is the plain response message; `check` turns one that says no into a `Refusal`. Queues
are 1000 deep because a client with rclpy's default of 10 loses answers by itself in a burst.

The client remembers the newest epoch that it heard of, from answers, results, feedback and status.
A goal that carries it as `if_epoch` starts nothing if a stop or a rewind overtook it.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.action import ActionClient
from rclpy.callback_groups import CallbackGroup, ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from rclpy.task import Future
from std_srvs.srv import Trigger

from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.msg import CapsuleEvent, PolicyStatus
from flashrt_ros.srv import (
    DropCapsule,
    KeepCapsule,
    ListCapsules,
    RestoreCapsule,
    Rollback,
    SaveCapsule,
)

TRIGGERS = ('checkpoint', 'rewind', 'reset', 'start', 'stop', 'pause', 'resume')
SERVICES: dict[str, Any] = {
    'save_capsule': SaveCapsule, 'restore_capsule': RestoreCapsule, 'rollback': Rollback,
    'list_capsules': ListCapsules, 'drop_capsule': DropCapsule, 'keep_capsule': KeepCapsule,
    **dict.fromkeys(TRIGGERS, Trigger),
}
DEEP = QoSProfile(depth=1000)
STATUS_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.RELIABLE,
                        durability=DurabilityPolicy.TRANSIENT_LOCAL)
EVENTS_QOS = QoSProfile(depth=50, reliability=ReliabilityPolicy.RELIABLE)


def check(response: Any) -> Any:
    """Return the response if it says yes. Raises Refusal with its code and message."""
    code = _code(response)
    if code is not Code.OK:
        details = {k: list(getattr(response, k)) for k in ('moved', 'distance', 'limit')
                   if hasattr(response, k)}
        raise Refusal(code, response.message, **details)
    return response


def _code(response: Any) -> Code:
    """Return the code of an answer. A Trigger has none: its sentence begins with the name of it."""
    code = Code(response.code) if hasattr(response, 'code') else Code.OK
    if code is Code.OK and getattr(response, 'success', True) is False:
        code = Code.__members__.get(response.message.partition(':')[0], Code.INTERNAL)
    return code


class Execution:
    """One goal on its way. `result` completes with an ExecutePolicy.Result, whatever happens."""

    def __init__(self, sent: Future) -> None:
        self.result: Future = Future()
        self.accepted: Future = Future()
        self._handle: Any = None
        self._cancelled = False
        sent.add_done_callback(self._on_sent)

    def cancel(self) -> None:
        """Ask to end the goal; the result then says CANCELLED. Works before acceptance too."""
        self._cancelled = True
        if self._handle is not None and not self.result.done():
            self._handle.cancel_goal_async()

    def _on_sent(self, sent: Future) -> None:
        handle = sent.result()
        if not handle.accepted:
            self.result.set_result(ExecutePolicy.Result(
                code=int(Code.INTERNAL), message='the goal was rejected; the log of the policy '
                'node has the reason'))
            self.accepted.set_result(False)
            return
        self._handle = handle
        handle.get_result_async().add_done_callback(
            lambda done: self.result.set_result(done.result().result))
        if self._cancelled:
            handle.cancel_goal_async()
        self.accepted.set_result(True)


class PolicyClient:
    """The verbs of one policy node. `target` is its name, relative to the owner's namespace."""

    def __init__(self, node: Node, target: str = 'policy_node', *,
                 callback_group: CallbackGroup | None = None) -> None:
        self.node = node
        self.target = target
        self._group = callback_group or ReentrantCallbackGroup()
        self._clients = {
            name: node.create_client(kind, f'{target}/{name}', qos_profile=DEEP,
                                     callback_group=self._group)
            for name, kind in SERVICES.items()}
        self._execute = ActionClient(
            node, ExecutePolicy, f'{target}/execute', callback_group=self._group,
            goal_service_qos_profile=DEEP, result_service_qos_profile=DEEP,
            cancel_service_qos_profile=DEEP)
        self._subscriptions: list[Any] = []
        self.session = 0               # of the node; 0 where it is unconfigured or unheard of
        self.epoch = 0                 # the newest that was heard of; 0: none, and as if_epoch: any
        self.on_status(self._on_status)

    def ready(self) -> bool:
        """Whether every service and the action of the node are there."""
        return (all(c.service_is_ready() for c in self._clients.values())
                and self.execute_ready())

    def service_ready(self, service: str) -> bool:
        """Whether one service of the node is there."""
        return bool(self._clients[service].service_is_ready())

    def execute_ready(self) -> bool:
        """Whether the action of the node is there."""
        return bool(self._execute.server_is_ready())

    def call(self, service: str, **fields: Any) -> Future:
        """Send a request by service name; absent fields keep their useful zeros."""
        future = self._clients[service].call_async(SERVICES[service].Request(**fields))
        future.add_done_callback(
            lambda done: None if done.exception() else self.hear(done.result()))
        return future

    def hear(self, said: Any) -> None:
        """Learn the epoch from an answer, result or feedback; Triggers have none."""
        self.epoch = max(self.epoch, int(getattr(said, 'epoch', 0)))

    def _on_status(self, status: PolicyStatus) -> None:
        if status.session != self.session:     # epochs begin anew
            self.session, self.epoch = int(status.session), int(status.epoch)
        self.hear(status)

    def abandon(self, future: Future) -> None:
        """Forget an answer that is not wanted any more; the node may still carry it out."""
        for client in self._clients.values():
            client.remove_pending_request(future)

    def save(self, name: str = '', *, note: str = '', pin: bool = False, persist: bool = False,
             overwrite: bool = False, lease_s: float = 0.0, request_id: str = '') -> Future:
        """Name the newest boundary. An equal `request_id` gets the first answer again."""
        return self.call('save_capsule', name=name, note=note, pin=pin, persist=persist,
                         overwrite=overwrite, lease_s=float(lease_s), request_id=request_id)

    def restore(self, name: str = '', *, if_id: str = '', if_epoch: int = 0, check: bool = False,
                force: bool = False, accept_inexact: bool = False) -> Future:
        """Return to a capsule; '' is the newest, 'origin' a fresh episode. Starts no motion."""
        return self.call('restore_capsule', name=name, if_id=if_id, if_epoch=if_epoch,
                         check=check, force=force, accept_inexact=accept_inexact)

    def rollback(self, *, capsules: int = 0, steps: int = 0, seconds: float = 0.0,
                 if_epoch: int = 0, check: bool = False, force: bool = False,
                 accept_inexact: bool = False) -> Future:
        """Return along the lineage; steps and seconds in lock step only."""
        return self.call('rollback', capsules=capsules, steps=steps, seconds=float(seconds),
                         if_epoch=if_epoch, check=check, force=force,
                         accept_inexact=accept_inexact)

    def list(self, prefix: str = '') -> Future:
        """List capsules, oldest first."""
        return self.call('list_capsules', prefix=prefix)

    def drop(self, name: str, *, if_id: str = '', if_epoch: int = 0) -> Future:
        """Forget a capsule, a pinned one too."""
        return self.call('drop_capsule', name=name, if_id=if_id, if_epoch=if_epoch)

    def keep(self, name: str = '', *, pin: bool | None = None, persist: bool = False,
             lease_s: float = 0.0) -> Future:
        """Pin (True), unpin (False), lease or persist a capsule; '' is the newest."""
        choice = (KeepCapsule.Request.LEAVE if pin is None
                  else KeepCapsule.Request.PIN if pin else KeepCapsule.Request.UNPIN)
        return self.call('keep_capsule', name=name, pin=choice, persist=persist,
                         lease_s=float(lease_s))

    def trigger(self, verb: str) -> Future:
        """Call one of TRIGGERS."""
        if verb not in TRIGGERS:
            raise ValueError(f'{verb!r} is not one of {", ".join(TRIGGERS)}')
        return self.call(verb)

    def execute(self, prompt: str = '', *, capsule: str = '', max_duration_s: float = 0.0,
                max_ticks: int = 0, shadow: bool = False, if_epoch: int = 0,
                feedback: Callable[[Any], None] | None = None) -> Execution:
        """Give permission to move. `feedback` gets every ExecutePolicy.Feedback."""
        goal = ExecutePolicy.Goal(
            prompt=prompt, capsule=capsule, max_duration_s=float(max_duration_s),
            max_ticks=max_ticks, shadow=shadow, if_epoch=if_epoch)

        def hear(message: Any) -> None:
            self.hear(message.feedback)
            if feedback is not None:
                feedback(message.feedback)
        execution = Execution(self._execute.send_goal_async(goal, feedback_callback=hear))
        execution.result.add_done_callback(lambda done: self.hear(done.result()))
        return execution

    def on_status(self, callback: Callable[[PolicyStatus], None]) -> None:
        """Hear of every status; the latest one comes at once."""
        self._subscribe(PolicyStatus, 'status', callback, STATUS_QOS)

    def on_event(self, callback: Callable[[CapsuleEvent], None]) -> None:
        """Hear of every change of the store and every rewind from now on."""
        self._subscribe(CapsuleEvent, 'capsule_events', callback, EVENTS_QOS)

    def _subscribe(self, kind: Any, topic: str, callback: Callable[[Any], None],
                   qos: QoSProfile) -> None:
        self._subscriptions.append(self.node.create_subscription(
            kind, f'{self.target}/{topic}', callback, qos, callback_group=self._group))

    def close(self) -> None:
        """Take everything back out of the owner's node. A second call does nothing."""
        if not self._clients:
            return
        for client in self._clients.values():
            self.node.destroy_client(client)
        for subscription in self._subscriptions:
            self.node.destroy_subscription(subscription)
        self._clients = {}
        self._subscriptions = []
        self._execute.destroy()
