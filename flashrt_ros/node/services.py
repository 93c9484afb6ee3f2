"""The services of the node: six with types of their own, seven Triggers.

They exist from construction; an unconfigured node answers NOT_CONFIGURED. Save, list, drop, keep
and the phase verbs answer in the handler, for they wait for nothing. Restore, rollback and reset
await the device thread.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import QoSProfile
from rclpy.service_introspection import ServiceIntrospectionState
from std_srvs.srv import Trigger

from flashrt_ros.core.capsule import CapsuleInfo
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.node import conversions
from flashrt_ros.node.answers import Answers
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import RewindAnswer
from flashrt_ros.srv import (
    DropCapsule,
    KeepCapsule,
    ListCapsules,
    RestoreCapsule,
    Rollback,
    SaveCapsule,
)

DEEP = QoSProfile(depth=1000)  # requests of many clients in a burst are all answered
INTROSPECTION = {'off': ServiceIntrospectionState.OFF,
                 'metadata': ServiceIntrospectionState.METADATA,
                 'contents': ServiceIntrospectionState.CONTENTS}


class Services:
    """Owns the services; hands each request to the runner and each answer back."""

    def __init__(self, node: Node, runner: Callable[[], Runner | None],
                 group: CallbackGroup) -> None:
        self._node = node
        self._answers = answers = Answers(node, runner)
        table: dict[str, tuple[Any, Any]] = {
            'save_capsule': (SaveCapsule, answers.sync(self._save)),
            'restore_capsule': (RestoreCapsule, answers.waiting(self._restore)),
            'rollback': (Rollback, answers.waiting(self._rollback)),
            'list_capsules': (ListCapsules, answers.sync(self._list)),
            'drop_capsule': (DropCapsule, answers.sync(self._drop)),
            'keep_capsule': (KeepCapsule, answers.sync(self._keep)),
            'checkpoint': (Trigger, answers.sync(self._checkpoint)),
            'rewind': (Trigger, answers.waiting(self._rewind)),
            'reset': (Trigger, answers.waiting(self._reset)),
            'start': (Trigger, answers.sync(self._start)),
            'stop': (Trigger, answers.sync(self._stop)),
            'pause': (Trigger, answers.sync(self._pause)),
            'resume': (Trigger, answers.sync(self._resume)),
        }
        self._services = [
            node.create_service(kind, f'~/{name}', callback, qos_profile=DEEP,
                                callback_group=group)
            for name, (kind, callback) in table.items()]

    def introspect(self, mode: str) -> None:
        """Publish requests and answers on <service>/_service_event: off, metadata or contents."""
        for service in self._services:
            service.configure_introspection(self._node.get_clock(), QoSProfile(depth=50),
                                            INTROSPECTION[mode])

    # -- store ----------------------------------------------------------------------------

    def _save(self, runner: Runner, request: Any, response: Any) -> str:
        info = runner.save(request.name, note=request.note, pin=request.pin,
                           persist=request.persist, overwrite=request.overwrite,
                           lease_s=request.lease_s, request_id=request.request_id)
        response.capsule = conversions.capsule_info(info)
        return saved(info)

    def _list(self, runner: Runner, request: Any, response: Any) -> str:
        infos, usage = runner.list(request.prefix), runner.usage()
        response.capsules = [conversions.capsule_info(i) for i in infos]
        response.device_bytes = int(usage.device)
        response.host_bytes = int(usage.host)
        response.disk_bytes = int(usage.disk)
        return f'{len(infos)} capsules'

    def _drop(self, runner: Runner, request: Any, response: Any) -> str:
        info = runner.drop(request.name, if_id=request.if_id, if_epoch=request.if_epoch)
        response.capsule = conversions.capsule_info(info)
        return f'dropped {info.name!r}'

    def _keep(self, runner: Runner, request: Any, response: Any) -> str:
        if request.pin not in (request.LEAVE, request.PIN, request.UNPIN):
            raise Refusal(Code.INVALID_ARGUMENT, f'pin is {request.pin}; it must be 0 (leave), '
                          '1 (pin) or 2 (unpin)')
        info = runner.keep(request.name, pin=request.pin, persist=request.persist,
                           lease_s=request.lease_s)
        response.capsule = conversions.capsule_info(info)
        return f'{info.name!r} is ' + ('pinned' if info.pinned else 'not pinned')

    def _checkpoint(self, runner: Runner, request: Any, response: Any) -> str:
        return saved(runner.save())

    # -- rewind ---------------------------------------------------------------------------

    async def _restore(self, runner: Runner, request: Any, response: Any) -> str:
        return self._rewound(response, request.check, await self._answers.until(runner.restore(
            request.name, if_id=request.if_id, if_epoch=request.if_epoch, check=request.check,
            force=request.force, accept_inexact=request.accept_inexact)))

    async def _rollback(self, runner: Runner, request: Any, response: Any) -> str:
        return self._rewound(response, request.check, await self._answers.until(runner.rollback(
            request.capsules, steps=request.steps, seconds=request.seconds,
            if_epoch=request.if_epoch, check=request.check, force=request.force,
            accept_inexact=request.accept_inexact)))

    async def _rewind(self, runner: Runner, request: Any, response: Any) -> str:
        return str((await self._answers.until(runner.rollback())).message)

    async def _reset(self, runner: Runner, request: Any, response: Any) -> str:
        return str((await self._answers.until(runner.reset())).message)

    def _rewound(self, response: Any, check: bool, answer: RewindAnswer) -> str:
        response.capsule = conversions.capsule_info(answer.info)
        response.moved = list(answer.moved)
        response.distance = [float(v) for v in answer.distance]
        response.limit = [float(v) for v in answer.limit]
        return answer.message

    # -- phases ---------------------------------------------------------------------------

    def _start(self, runner: Runner, request: Any, response: Any) -> str:
        runner.start()
        return f'{runner.phase.name}'

    def _stop(self, runner: Runner, request: Any, response: Any) -> str:
        return runner.stop() or f'{runner.phase.name}'

    def _pause(self, runner: Runner, request: Any, response: Any) -> str:
        return runner.pause() or f'{runner.phase.name}'

    def _resume(self, runner: Runner, request: Any, response: Any) -> str:
        return runner.resume() or f'{runner.phase.name}'


def saved(info: CapsuleInfo) -> str:
    """Say what was saved."""
    where = 'durable on disk' if info.durable else f'in {info.tier.name.lower()} memory'
    return (f'saved {info.name!r} at tick {info.tick}, step {info.step}, '
            f'{info.nbytes:,} bytes {where}')
