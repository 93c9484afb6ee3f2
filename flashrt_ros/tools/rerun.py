"""Does a recorded run again from its latch record: each step takes in the messages it took in.

Steps are counted, not timed. Before each step the marks, saves and rewinds of the record that
belong there are carried out; then the step's messages are fed and the step is taken. A tick whose
chunk came too late, or that a stop overtook, is held back until the record says that it ended. So
the replay makes the decisions of the live run, in its order, whatever its timing was.
"""
from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from flashrt_ros.core.capsule import ORIGIN, CapsuleInfo, EventKind
from flashrt_ros.core.errors import Refusal
from flashrt_ros.ingest.inbox import header_stamp
from flashrt_ros.ingest.schema import JOINT_STATE
from flashrt_ros.tools.bags import Bag, Message
from flashrt_ros.tools.latched import LatchedMessages
from flashrt_ros.tools.offline import Offline
from flashrt_ros.tools.record import MOVING, Entry, EventNote, Mark, Run, Segment, Tick
from flashrt_ros.tools.services import Call, Repeater
from flashrt_ros.tools.topics import Matches

OTHER_CLOCK_NS = 60_000_000_000
HEARD_JOINTS = 50      # newest messages that a JointState topic's joints are taken from
Adopt = Callable[[EventNote], str]     # brings a capsule from a file; returns its name


@dataclass
class Limits:
    """Where to end; None: at the end of the bag."""

    time_ns: int | None = None         # of the recorder
    tick: int | None = None
    step: int | None = None

    def reached(self, tick: int, step: int, time_ns: int) -> bool:
        """Whether what comes next is beyond."""
        return ((self.tick is not None and tick >= self.tick)
                or (self.step is not None and step >= self.step)
                or (self.time_ns is not None and time_ns > self.time_ns))


@dataclass
class Progress:
    """How far a replay came, and what it had to do without."""

    ticks: list[tuple[int, Tick]] = field(default_factory=list)  # segment, and what was recorded
    begins: list[int] = field(default_factory=list)      # chunks in the sink before each segment
    missing: list[str] = field(default_factory=list)
    stopped: str = ''                                    # why it ended early
    limited: bool = False                                # it ended where it was told to


class Rerun:
    """Drives an offline policy through a recorded run."""

    def __init__(self, policy: Offline, bag: Bag, run: Run, matches: Matches, adopt: Adopt,
                 limits: Limits | None = None, calls: Sequence[Call] = ()) -> None:
        self.calls = Repeater(policy, calls)
        self._policy = policy
        self._bag = bag
        self._run = run
        self.progress = Progress()
        self._limits = limits or Limits()
        self._adopt = adopt
        self._trigger = policy.file.run.trigger if policy.file.run.lock_step else ()
        self._joints = {t.topic for t in policy.topics() if t.type == JOINT_STATE}
        self._messages = LatchedMessages(bag, matches, run.entries,
                                         list(matches.found) if self._trigger else ())
        self._fed: dict[str, Message] = {}     # newest by topic
        rewinds = [s.rewind for s in run.segments if s.rewind is not None]
        self._wanted = {r.id for r in rewinds if r.name}
        self._wanted_steps = {r.step for r in rewinds if not r.name}
        self._names: dict[str, str] = {}       # recorded capsule, or its step -> its name here
        self._boundary = (0, 0)                # tick and step of what a save would name
        self._prompt = ''
        self._shadow = False

    def play(self, after: CapsuleInfo | None = None) -> Iterator[int]:
        """Do it; yield the recorder's time of each tick.

        `after`: the capsule that the policy goes on from; what came before it is only heard of.
        """
        first = 0
        if after is not None:
            first = max((i for i, s in enumerate(self._run.segments)
                         if s.epochs[0] <= after.epoch), default=0)
            self._hear(self._run.segments[:first + 1], after)
            self._policy.resume_at(after.name)
            self._boundary = (after.tick, after.step)
            self._check_flight(first, after)
        segments = self._run.segments
        for i in range(first, len(segments)):
            rewind = segments[i].rewind
            if i > first and rewind is not None:
                self._rewind(segments[i], rewind)
            if self.progress.stopped == '':
                self.progress.begins += [len(self._policy.sink.chunks)] * (
                    i + 1 - len(self.progress.begins))
                yield from self._play(i, after if i == first else None)
            if self.progress.stopped or self.progress.limited:
                return

    def _check_flight(self, first: int, after: CapsuleInfo) -> None:
        """A live capsule may lack what an inference under way had read."""
        flying = next((t for t in self._run.segments[first].ticks if t.tick > after.tick), None)
        if flying is not None and flying.step < after.step and not self._policy.has_pending:
            self.progress.stopped = (
                f'capsule {after.name!r} was saved while tick {flying.tick} was under way and does '
                'not hold what that had read; a live node keeps it with run.persist_on, else go on '
                'from a capsule that was saved between two inferences')

    def _hear(self, segments: Sequence[Segment], after: CapsuleInfo) -> None:
        """Put into the inbox what lay there: the newest message of each topic, of joints more."""
        newest: dict[str, deque[Entry]] = {}
        for segment in segments:
            mine = segment is segments[-1]
            for t in segment.ticks:
                for e in t.entries:
                    if not mine or t.tick <= after.tick or e.step < after.step:
                        room = HEARD_JOINTS if e.topic in self._joints else 1
                        newest.setdefault(e.topic, deque(maxlen=room)).append(e)
        for topic, entries in newest.items():
            for e in entries if topic not in self._trigger else ():
                message = self._messages.find(e)
                if message is not None:
                    self._feed(e, message, e.stamp_ns)

    # -- between ticks -------------------------------------------------------------------------

    def _rewind(self, segment: Segment, event: EventNote) -> None:
        policy = self._policy
        key = event.id if event.name else f'step {event.step}'
        try:
            name = (ORIGIN if event.kind is EventKind.RESET
                    else self._names.get(key) or self._adopt(event))
        except Refusal as refusal:
            self.progress.missing.append(f'capsule {event.name!r}, to which the run returned: '
                                         f'{refusal.message}')
            self.progress.stopped = 'a capsule that the run returned to is missing'
            return
        self._prompt = ''
        lock_step = bool(self._trigger)
        told = [s for s in segment.statuses if s.epoch == event.epoch]
        if lock_step and told and told[0].phase in MOVING:
            info = policy.resume_at(name)      # on_restore: continue
        else:
            info = policy.rewind(name, keep=lock_step)
        self._boundary = (info.tick, info.step)
        self.calls.rewound(info)

    def _mark(self, mark: Mark) -> None:
        if mark.flush:
            if not self._policy.moving:        # a goal that came and went before its first step
                self._policy.begin(self._prompt)
            self._policy.halt()
        self._prompt = mark.prompt or self._prompt
        self._shadow = mark.shadow

    def _save(self, segment: Segment) -> None:
        """Save what the run returns to later."""
        session = self._policy.session
        for event in segment.saved:
            if (event.id in self._wanted and event.id not in self._names
                    and (event.tick, event.step) == self._boundary):
                self._names[event.id] = session.save(f'replay-{event.id}').name
        if session.step in self._wanted_steps:
            self._names[f'step {session.step}'] = session.save(
                f'replay-step-{session.step}', overwrite=True).name

    # -- a segment -----------------------------------------------------------------------------

    def _play(self, index: int, after: CapsuleInfo | None) -> Iterator[int]:
        segment = self._run.segments[index]
        policy, session, progress = self._policy, self._policy.session, self.progress
        ticks, marks, lost = deque(segment.ticks), deque(segment.marks), list(segment.lost)
        if after is not None:
            while ticks and ticks[0].tick <= after.tick:
                ticks.popleft()
            while marks and marks[0].epoch <= after.epoch:
                marks.popleft()
        times = Times(policy, ticks)
        late = {id(segment.ticks[i]) for i in segment.late(policy.file.run.latency_steps)}
        while True:
            step = session.step
            tick = ticks[0] if ticks else None
            here = tick is not None and tick.step == step
            while marks and marks[0].step <= step and (
                    tick is None or not here or marks[0].epoch <= tick.epoch):
                self._mark(marks.popleft())
            self._save(segment)
            self.calls.between(self._boundary, None if tick is None else tick.time_ns)
            if here:
                policy.pump.release()          # what was held back ends before the next begins
            elif tick is None:
                policy.pump.hold()             # what is not recorded was never accepted
            if tick is not None and self._limits.reached(session.tick, step, tick.time_ns):
                progress.limited = True
                break
            if tick is None and self._ended(segment, marks, step):
                break
            if not policy.moving:
                policy.begin(self._prompt, shadow=self._shadow)
            again, before = policy.has_pending, policy.started
            if tick is not None and here and (
                    id(tick) in late or (marks and marks[0].step == step)):
                policy.pump.hold()
            # what a started inference took in, and what came since, is in the next tick's record
            source = (ticks[1] if len(ticks) > 1 else None) if again else tick
            if source is not None:
                entries = [e for e in source.entries if e.step == step]
            else:                              # what came after the next stop was not taken in
                end_ns = marks[0].stamp_ns if marks else 1 << 64
                entries = [e for e in lost if e.step == step and e.stamp_ns < end_ns]
                lost = [e for e in lost if e not in entries]
            now = (max(1, tick.start_ns) if tick is not None and here
                   else times.of(step, entries))
            if self._trigger and not any(e.topic in self._trigger for e in entries):
                if not self._next_set(index) and tick is None:
                    lost = entries + lost
                    break
            elif not self._step(entries, now, tick):
                return
            if session.step == step and not (marks and marks[0].step == step):
                if tick is None:               # it was begun and never executed
                    break
                self._diverged(policy.waiting_for or policy.status().last_refusal)
                return
            if session.step > step:
                self._boundary = (session.tick, session.step)
            starts, due = policy.started - before, due_here(ticks, marks, step, again=again)
            # one more may have been under way when the record ended
            if tick is not None and (starts < due or starts > due < len(ticks)):
                self._diverged(f'the record computes tick {tick.tick} at step {tick.step}, here '
                               f'{starts} inferences were started')
                return
            for tick in [ticks.popleft() for _ in range(min(starts, len(ticks)))]:
                progress.ticks.append((index, tick))
                yield tick.time_ns
        policy.end_inference()
        for e in lost if not ticks else ():    # it lay in the inbox
            message = self._messages.find(e)
            if message is not None:
                self._feed(e, message, max(policy.clock.ns, e.stamp_ns), used=False)

    def _ended(self, segment: Segment, marks: Sequence[Mark], step: int) -> bool:
        """Whether nothing is known of further steps after the last recorded tick."""
        policy = self._policy
        if not policy.moving:
            return True
        if (marks and marks[0].step > step) or any(e.step > step for e in segment.lost):
            return False
        return not self._trigger and (policy.would_start or step >= segment.last_step)

    def _diverged(self, why: str) -> None:
        self.progress.stopped = (f'the replay cannot follow the record at step '
                                 f'{self._policy.session.step}: {why} (a policy that is driven '
                                 'otherwise can be fed the bag with --as-is)')

    def _step(self, entries: Sequence[Entry], now_ns: int, tick: Tick | None) -> bool:
        """Feed a step's messages and take it; False where one is missing."""
        policy, missing = self._policy, self.progress.missing
        found = []
        # a set of lock step may have waited while other topics went on: it comes last
        for e in sorted(entries, key=lambda e: e.topic in self._trigger):
            message = self._messages.find(e)
            if message is None:
                where = f'tick {tick.tick}' if tick is not None else f'step {e.step}'
                missing.append(f'a message of {e.topic}, stamped {e.stamp_ns * 1e-9:.6f} s, digest '
                               f'{e.digest:016x}, which {where} took in')
            else:
                found.append((e, message))
        if missing:
            self.progress.stopped = 'the recorder has missed messages that the run took in'
            return False
        last = {e.topic: e for e, _ in found}
        for e, message in found:
            self._feed(e, message, now_ns, used=last[e.topic] is e)
        policy.clock.ns = now_ns
        policy.period()
        return True

    def _next_set(self, index: int) -> bool:
        """Lock step beyond the last recorded tick: take the step that the bag holds next."""
        later = self._run.segments[index + 1:index + 2]
        end_ns = later[0].rewind.time_ns if later and later[0].rewind is not None else 1 << 64
        found = {}
        for topic in self._trigger:
            message = self._messages.following(
                topic, self._fed[topic].time_ns if topic in self._fed else 0)
            if message is None or message.time_ns >= end_ns:
                return False
            found[topic] = message
        last = max(m.time_ns for m in found.values())
        others = [t for t in self._fed if t not in found]
        for topic, message in [(t, self._messages.newest(t, last)) for t in others] + [
                *found.items()]:
            if message is not None:
                self._feed(Entry(topic, message.time_ns, 0, 0), message, last)
        return True

    def _feed(self, entry: Entry, message: Message, now_ns: int, *, used: bool = True) -> None:
        """Let a message arrive when it did: known where it is unstamped, else the recorder's.

        Not `used`: one of a set of lock step that came before motion was permitted.
        """
        policy = self._policy
        self._fed[entry.topic] = message
        self._messages.used(entry.topic, message.time_ns)
        data = self._bag.decode(message)
        arrival = entry.stamp_ns
        if header_stamp(data):
            near = abs(message.time_ns - now_ns) < OTHER_CLOCK_NS
            arrival = min(message.time_ns, now_ns) if near else now_ns
        policy.clock.ns = max(1, arrival)
        if used or entry.topic not in self._trigger:
            policy.feed(entry.topic, data, digest=lambda: message.digest)
        else:
            policy.hear(entry.topic, data, lambda: message.digest)


def due_here(ticks: Sequence[Tick], marks: Sequence[Mark], step: int, *, again: bool) -> int:
    """Return how many of the next ticks are computed in a step. `again`: the first is one that a
    boundary holds; where it lands at once, another may follow."""
    end = marks[0].epoch if marks and marks[0].step == step else 1 << 64
    n = int(again and bool(ticks))
    while n < len(ticks) and ticks[n].step == step and ticks[n].epoch < end:
        n += 1
    return n


class Times:
    """When each step was taken, in the node's clock: known of those that computed a tick."""

    def __init__(self, policy: Offline, ticks: Sequence[Tick]) -> None:
        self._clock = policy.clock
        self._period = round(policy.file.policy.period_s * 1e9)
        self._known = {t.step: t.start_ns for t in reversed(ticks)}
        self._steps = sorted(self._known)

    def of(self, step: int, entries: Sequence[Entry]) -> int:
        """Return a step's time: one period after the last, not before what it took in, and not
        after the next one that is known. Without messages time stands: nothing grows old."""
        if not entries:
            return self._clock.ns
        at = bisect_left(self._steps, step)
        end = self._known[self._steps[at]] if at < len(self._steps) else 1 << 64
        stamps = [e.stamp_ns for e in entries if abs(e.stamp_ns - self._clock.ns) < OTHER_CLOCK_NS]
        return max(1, min(max([self._clock.ns + self._period, *stamps]), end))
