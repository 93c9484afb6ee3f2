"""Inputs as a list of steps that can be played from any place, any number of times.

From a bag, cut into steps by lock step or by the period, or invented. The inbox is no state, so
before playing on from a capsule it is filled again with what lay in it there.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.inbox import LockStep, header_stamp
from flashrt_ros.ingest.schema import JOINT_STATE
from flashrt_ros.tools.bags import Bag, open_bag
from flashrt_ros.tools.invent import Inventor
from flashrt_ros.tools.offline import Offline
from flashrt_ros.tools.topics import Matches, match

START_NS = 1_700_000_000_000_000_000
HEARD = {JOINT_STATE: 50}              # messages per topic that the inbox may stem from; others 1


@dataclass
class Step:
    """What arrives before one step, and when it is taken."""

    time_ns: int = 0
    messages: list[tuple[str, Any]] = field(default_factory=list)


def invented(policy: Offline, n: int, seed: int) -> list[Step]:
    """Return steps of seeded messages. Raises Refusal where a bag is needed."""
    types = {t.topic: t.type for t in policy.topics() if not t.prompt}
    inventor = Inventor(policy.file, policy.session.layout, types, seed)
    period = round(policy.file.policy.period_s * 1e9)
    return [Step(t, inventor.step(t)) for t in (START_NS + i * period for i in range(1, n + 1))]


def recorded(policy: Offline, bag: Bag, matches: Matches, n: int, skip: int = 0) -> list[Step]:
    """Return the steps `skip` to `skip + n` of a bag, cut as the policy's trigger says."""
    back = matches.back()
    trigger = policy.file.run.trigger if policy.file.run.lock_step else ()
    sets = LockStep(trigger)
    period = round(policy.file.policy.period_s * 1e9)
    steps, now = [], Step()
    due = 0
    for message in bag.messages(back):
        data = bag.decode(message)
        if not trigger:
            due = due or message.time_ns + period
            while message.time_ns >= due:
                now.time_ns = due
                steps.append(now)
                now, due = Step(), due + period
        for topic in back[message.topic]:
            now.messages.append((topic, data))
            if topic in trigger:
                sets.put(topic, header_stamp(data), None)
                if sets.ready():
                    sets.take()
                    now.time_ns = message.time_ns
                    steps.append(now)
                    now = Step()
        if len(steps) >= skip + n:
            break
    return steps[skip:skip + n]


@contextmanager
def of_bag(policy: Offline, path: Path, remaps: Mapping[str, str], namespace: str,
           msg_paths: Sequence[Path]) -> Iterator[tuple[Bag, Matches]]:
    """Open a bag and find the policy's inputs in it. Raises Refusal where one is missing."""
    with open_bag(path, msg_paths=msg_paths) as bag:
        if not bag.count:
            raise Refusal(Code.NOT_FOUND, f'{bag.name} has no messages')
        matches = match(bag, {t.topic: t.type for t in policy.topics()}, remaps, namespace)
        prompts = {t.topic for t in policy.topics() if t.prompt}
        needed = [w for t, w in matches.missing.items() if t not in prompts]
        if needed:
            raise Refusal(Code.NOT_FOUND, '; '.join(needed))
        yield bag, matches


class Player:
    """Plays a script into a policy."""

    def __init__(self, policy: Offline, script: Sequence[Step]) -> None:
        self.policy = policy
        self.script = script
        self._types = {t.topic: t.type for t in policy.topics()}

    def fill(self, at: int) -> None:
        """Fill the inbox as it was before step `at`, and nothing else. In HOLD."""
        policy = self.policy
        policy.observation.clear()
        heard: dict[str, deque[tuple[int, Any]]] = {}
        for i, step in enumerate(self.script[:at]):
            for topic, msg in step.messages:
                room = HEARD.get(self._types[topic], 1)
                heard.setdefault(topic, deque(maxlen=room)).append((i, msg))
        for i, topic, msg in sorted(((i, t, m) for t, queue in heard.items() for i, m in queue),
                                    key=lambda item: item[0]):
            policy.clock.ns = self.script[i].time_ns
            policy.hear(topic, msg, lambda: 0)

    def play(self, first: int, last: int) -> None:
        """Take the steps `first` up to `last`. Raises Refusal where one could not be taken."""
        policy = self.policy
        for i in range(first, last):
            step, before = self.script[i], policy.session.step
            policy.clock.ns = step.time_ns
            for topic, msg in step.messages:
                try:
                    policy.feed(topic, msg)
                except Refusal as refusal:
                    if refusal.code is not Code.INPUT_REJECTED:
                        raise
            policy.period()
            if policy.session.step == before:
                why = policy.waiting_for or policy.status().last_refusal
                raise Refusal(Code.INPUT_STALE, f'step {i} could not be taken: {why}')


def first_usable(policy: Offline, script: Sequence[Step]) -> int:
    """Return the first step at which all inputs are there: a bag may begin before its sensors."""
    player = Player(policy, script)
    for i in range(len(script)):
        try:
            player.fill(i)
            policy.resume_at('origin')
            player.play(i, i + 1)
        except Refusal:
            continue
        return i
    raise Refusal(Code.INPUT_STALE, 'no step of the bag has all inputs: '
                  + (policy.waiting_for or policy.status().last_refusal))
