"""Service calls in a bag, made again at their tick and their answers compared.

With `introspection:=contents` a node publishes each request and answer on <service>/_service_event.
A save is made again at the boundary that its answer names; a rewind is carried out by the record
anyway, and the capsule that it reached is compared; what asks only about the store (drop, keep,
list, calls that were refused) is made again between the ticks where it came. Stops and starts are
marks of the record and are not made twice.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashrt_ros.core.capsule import CapsuleInfo
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.tools.bags import Bag

_OURS = {'save_capsule': 'SaveCapsule', 'restore_capsule': 'RestoreCapsule', 'rollback': 'Rollback',
         'list_capsules': 'ListCapsules', 'drop_capsule': 'DropCapsule',
         'keep_capsule': 'KeepCapsule'}
TYPES: Mapping[str, str] = {
    **{verb: f'flashrt_ros/srv/{kind}_Event' for verb, kind in _OURS.items()},
    **dict.fromkeys(('checkpoint', 'rewind', 'reset'), 'std_srvs/srv/Trigger_Event')}
REWINDS = ('restore_capsule', 'rollback', 'rewind', 'reset')
# refusals that depend on a robot, a clock or the room that there was
LIVE = {Code.ROBOT_MOVED, Code.TOO_OLD, Code.INPUT_STALE, Code.BUSY, Code.BUDGET_EXCEEDED,
        Code.NO_MEMORY, Code.NOT_CONFIGURED, Code.WRONG_PHASE, Code.IO, Code.STALE_EPOCH,
        Code.FAULT}
_SERVER, _CLIENT = (1, 2), (0, 3)      # request, response of service_msgs/msg/ServiceEventInfo


@dataclass(frozen=True)
class Call:
    """One request with its answer, as rosbags decodes them."""

    verb: str
    request: Any
    response: Any
    time_ns: int

    @property
    def code(self) -> Code:
        """The code of the answer; a Trigger tells only success."""
        code = getattr(self.response, 'code', None)
        if code is None:
            return Code.OK if self.response.success else Code.INTERNAL
        return Code(int(code))

    @property
    def boundary(self) -> tuple[int, int] | None:
        """Tick and step that a successful save has named."""
        if self.verb != 'save_capsule' or not self.response.success:
            return None
        return int(self.response.capsule.tick), int(self.response.capsule.step)


@dataclass(frozen=True)
class Answer:
    """What a call answered then and now."""

    verb: str
    name: str
    recorded: str
    replayed: str

    @property
    def same(self) -> bool:
        """Whether both say the same."""
        return self.recorded == self.replayed


def read_calls(bag: Bag, node: str) -> tuple[list[Call], list[str]]:
    """Return the calls to a node's services, by time, and remarks. Raises Refusal."""
    topics = {f'{node}/{verb}/_service_event': verb for verb in TYPES}
    here = {t: v for t, v in topics.items() if t in bag.topics}
    open_: dict[tuple[str, bytes, int], tuple[int, Any]] = {}
    calls, bare = [], 0
    for message in bag.messages(here) if here else ():
        verb = here[message.topic]
        if message.type != TYPES[verb]:
            continue
        event = bag.decode(message)
        kind, info = int(event.info.event_type), event.info
        key = (verb, bytes(bytearray(int(b) & 255 for b in info.client_gid)),
               int(info.sequence_number))
        if kind in (_SERVER[0], _CLIENT[0]):
            if len(event.request):
                open_.setdefault(key, (message.time_ns, event.request[0]))
            else:
                bare += 1
        elif len(event.response) and key in open_:
            time_ns, request = open_.pop(key)      # the client's event is a second one
            calls.append(Call(verb, request, event.response[0], time_ns))
    remarks = []
    if bare:
        remarks.append(f'{bare} service calls are recorded without contents and are not made '
                       'again; run the node with introspection:=contents')
    return sorted(calls, key=lambda c: c.time_ns), remarks


class Repeater:
    """Makes calls again while a replay goes on."""

    def __init__(self, runner: Runner, calls: Sequence[Call]) -> None:
        self._runner = runner
        self._calls = deque(calls)
        self.answers: list[Answer] = []

    def between(self, boundary: tuple[int, int], next_ns: int | None) -> None:
        """Make what belongs before the next tick, whose recorded time is `next_ns`. `boundary`:
        tick and step of what a save would name."""
        while self._calls:
            call = self._calls[0]
            at = call.boundary
            if call.verb in REWINDS and call.response.success and not (
                    getattr(call.request, 'check', False)):
                return                             # `rewound` takes it
            if at is not None:
                if at != boundary:
                    return
            elif next_ns is not None and call.time_ns >= next_ns:
                return
            self._calls.popleft()
            self._repeat(call)

    def rewound(self, info: CapsuleInfo) -> None:
        """A rewind was carried out: it is the answer of the next call that asked for one."""
        while self._calls:
            call = self._calls.popleft()
            if call.verb not in REWINDS or not call.response.success:
                self._repeat(call)                 # its boundary was in a stretch without a record
                continue
            capsule = getattr(call.response, 'capsule', None)
            told = (f'tick {capsule.tick}, step {capsule.step}' if capsule is not None
                    else f'tick {info.tick}, step {info.step}')
            self.answers.append(Answer(call.verb, info.name if capsule is None else capsule.name,
                                       told, f'tick {info.tick}, step {info.step}'))
            return

    def _repeat(self, call: Call) -> None:
        if call.code in LIVE:
            return                                 # it depended on the world of that time
        request, recorded = call.request, call.code.name
        try:
            info = _MAKE[call.verb](self._runner, request)
        except Refusal as refusal:
            code = refusal.code.name
            if call.verb in ('checkpoint', *REWINDS) and not call.response.success:
                code = recorded                    # a Trigger does not say why
            self.answers.append(Answer(call.verb, getattr(request, 'name', ''), recorded, code))
            return
        replayed = Code.OK.name
        if info is not None and call.boundary is not None:
            recorded += ' at tick {}, step {}'.format(*call.boundary)
            replayed += f' at tick {info.tick}, step {info.step}'
        self.answers.append(Answer(call.verb, getattr(request, 'name', ''), recorded, replayed))


def _save(runner: Runner, r: Any) -> CapsuleInfo | None:
    return runner.session.save(r.name, note=r.note, pin=r.pin, overwrite=r.overwrite,
                               request_id=r.request_id)


def _restore(runner: Runner, r: Any) -> CapsuleInfo | None:
    return runner.session.plan_restore(r.name, accept_inexact=r.accept_inexact).info


def _rollback(runner: Runner, r: Any) -> CapsuleInfo | None:
    return runner.session.plan_rollback(r.capsules, steps=r.steps, seconds=r.seconds,
                                        accept_inexact=r.accept_inexact,
                                        lock_step=runner.file.run.lock_step).info


def _keep(runner: Runner, r: Any) -> CapsuleInfo | None:
    return runner.session.keep(r.name, pin={1: True, 2: False}.get(int(r.pin)))


def _list(runner: Runner, r: Any) -> CapsuleInfo | None:
    runner.session.list(r.prefix)
    return None


_MAKE: Mapping[str, Callable[[Runner, Any], CapsuleInfo | None]] = {
    'save_capsule': _save, 'restore_capsule': _restore, 'rollback': _rollback,
    'drop_capsule': lambda runner, r: runner.session.drop(r.name), 'keep_capsule': _keep,
    'list_capsules': _list, 'checkpoint': lambda runner, r: runner.session.save(),
    'rewind': lambda runner, r: runner.session.plan_rollback().info,
    'reset': lambda runner, r: runner.session.plan_reset().info}
