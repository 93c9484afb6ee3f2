"""Plays a bag without a latch record into a policy: messages as they come, by recording time.

In lock step that is exactly what the node saw. With a timer it is a guess: the timer ticks every
period of bag time, from the first message on, and which message a live tick would have found is not
known.
"""
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from flashrt_ros.core.capsule import CapsuleInfo
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.inbox import LockStep, header_stamp
from flashrt_ros.tools.bags import Bag
from flashrt_ros.tools.offline import Offline
from flashrt_ros.tools.rerun import Limits
from flashrt_ros.tools.topics import Matches

TOLD = 5                   # rejected messages that are spelled out


@dataclass
class AsIs:
    """What happened to the messages."""

    rejected: dict[str, int] = field(default_factory=dict)     # why -> how often
    stopped: str = ''                  # why it ended early
    limited: bool = False
    messages: int = 0


def play(policy: Offline, bag: Bag, matches: Matches, limits: Limits, seen: AsIs, *,
         prompt: str = '', after: CapsuleInfo | None = None) -> Iterator[int]:
    """Feed the bag; yield the time of each message.

    `after`: a capsule of the policy to go on from; as many steps as it counts are only heard.
    """
    back = matches.back()
    trigger = policy.file.run.trigger if policy.file.run.lock_step else ()
    sets = LockStep(trigger)
    heard = 0                          # complete sets before the capsule
    period = round(policy.file.policy.period_s * 1e9)
    due = None                         # the simulated timer's next tick
    if after is None:
        policy.begin(prompt)
    for message in bag.messages(back):
        if limits.reached(policy.session.tick, policy.session.step, message.time_ns):
            seen.limited = True
            return
        if after is not None and _reached(after, heard, message.time_ns, bool(trigger)):
            policy.resume_at(after.name)
            after = None
        while not trigger and after is None and due is not None and due <= message.time_ns:
            policy.clock.ns = due
            policy.period()
            due += period
        policy.clock.ns = message.time_ns
        if not trigger and due is None and after is None:
            due = message.time_ns + period
        data = bag.decode(message)
        seen.messages += 1
        for topic in back[message.topic]:
            if after is not None and topic in trigger:
                sets.put(topic, header_stamp(data), None)
                while sets.ready():
                    sets.take()
                    heard += 1
            try:
                policy.feed(topic, data, digest=lambda m=message: m.digest)  # type: ignore[misc]
            except Refusal as refusal:
                if refusal.code is not Code.INPUT_REJECTED:
                    raise
                why = refusal.message
                if why not in seen.rejected and len(seen.rejected) >= TOLD:
                    why = 'other reasons'
                seen.rejected[why] = seen.rejected.get(why, 0) + 1
        if after is None and not policy.moving:
            at = (message.time_ns - bag.start_ns) * 1e-9
            seen.stopped = f'the policy stopped at {at:.3f} s: {policy.status().last_refusal}'
            return
        yield message.time_ns
    if after is not None:
        seen.stopped = (f'the bag ends after {heard} steps, the capsule {after.name!r} was saved '
                        f'at step {after.step}')


def _reached(after: CapsuleInfo, heard: int, time_ns: int, lock_step: bool) -> bool:
    return heard >= after.step if lock_step else time_ns > after.stamp_ns
