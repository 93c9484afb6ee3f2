"""Does a recorded run again from its latch record: each step takes in the messages it took in.

Steps are counted, not timed. Before each step the marks, saves and rewinds of the record that
belong there are carried out; then the step's messages are fed and the step is taken. A tick whose
chunk came too late, or that a stop overtook, is held back until the record says that it ended. So
the replay makes the decisions of the live run, in its order, whatever its timing was.
"""
from __future__ import annotations

from collections import defaultdict, deque
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

    ticks: list[Tick] = field(default_factory=list)      # recorded, in the order of acceptance
    missing: list[str] = field(default_factory=list)
    stopped: str = ''                                    # why it ended early
    limited: bool = False                                # it ended where it was told to


class Rerun:
    """Drives an offline policy through a recorded run."""

    def __init__(self, policy: Offline, bag: Bag, run: Run, matches: Matches, adopt: Adopt,
                 limits: Limits | None = None) -> None:
        self._policy = policy
        self._bag = bag
        self._run = run
        self.progress = Progress()
        self._limits = limits or Limits()
        self._adopt = adopt
        self._trigger = policy.file.run.trigger if policy.file.run.lock_step else ()
        self._joints = {t.topic for t in policy.topics() if t.type == JOINT_STATE}
        terms = [t for port in policy.file.inputs.values() for t in port if t.topic]
        self._latched = sorted({t.topic for t in terms if t.latched and t.topic in matches.found}
                               - {t.topic for t in terms if not t.latched})
        self._messages = LatchedMessages(
            bag, matches, [e for t in run.ticks for e in t.entries], self._latched)
        rewinds = [s.rewind for s in run.segments if s.rewind is not None]
        self._wanted = {r.id for r in rewinds if r.name}
        self._wanted_steps = {r.step for r in rewinds if not r.name}
        self._names: dict[str, str] = {}       # recorded capsule, or its step -> its name here
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
        for i, segment in enumerate(self._run.segments[first:]):
            if i and segment.rewind is not None:
                self._rewind(segment, segment.rewind)
            if not self.progress.stopped:
                yield from self._play(segment, after if i == 0 else None)
            if self.progress.stopped or self.progress.limited:
                return

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
        for topic in self._latched:            # a tick that was lost may have recorded it
            message = self._messages.level(topic, event.time_ns)
            if message is not None:
                self._feed(Entry(topic, policy.clock.ns, 0, 0), message, policy.clock.ns)
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
            policy.resume_at(name)             # on_restore: continue
        else:
            policy.rewind(name, keep=lock_step)

    def _mark(self, mark: Mark) -> None:
        if mark.flush:
            self._policy.halt()
        self._prompt = mark.prompt or self._prompt
        self._shadow = mark.shadow

    def _save(self, segment: Segment) -> None:
        """Save what the run returns to later."""
        session = self._policy.session
        for event in segment.saved:
            if (event.id in self._wanted and event.id not in self._names
                    and (event.tick, event.step) == (session.tick, session.step)):
                self._names[event.id] = session.save().name
        if session.step in self._wanted_steps:
            name = f'step-{session.step}'
            session.save(name, overwrite=True)
            self._names[f'step {session.step}'] = name

    # -- a segment -----------------------------------------------------------------------------

    def _play(self, segment: Segment, after: CapsuleInfo | None) -> Iterator[int]:
        policy, session, progress = self._policy, self._policy.session, self.progress
        ticks, marks = deque(segment.ticks), deque(segment.marks)
        if after is not None:
            while ticks and ticks[0].tick <= after.tick:
                ticks.popleft()
            while marks and marks[0].epoch <= after.epoch:
                marks.popleft()
        times = Times(policy, ticks)
        entries: dict[int, list[Entry]] = defaultdict(list)
        for t in ticks:
            for e in t.entries:
                entries[e.step].append(e)
        late = {id(segment.ticks[i]) for i in segment.late(policy.file.run.latency_steps)}
        while True:
            step = session.step
            tick = ticks[0] if ticks else None
            here = tick is not None and tick.step == step
            while marks and marks[0].step <= step and (
                    tick is None or not here or marks[0].epoch <= tick.epoch):
                self._mark(marks.popleft())
            self._save(segment)
            if tick is None or here:
                policy.pump.release()          # what was held back ends before the next begins
            if tick is not None and self._limits.reached(session.tick, step, tick.time_ns):
                progress.limited = True
                break
            if tick is None and (policy.would_start or not policy.moving
                                 or step >= segment.last_step):
                break
            if not policy.moving:
                policy.begin(self._prompt, shadow=self._shadow)
            starts = policy.would_start
            again = policy.has_pending
            if starts and tick is not None:
                if not (here or again):
                    self._diverged(f'the record computes tick {tick.tick} at step {tick.step}, '
                                   'the replay needs a chunk now')
                    return
                if id(tick) in late or (here and marks and marks[0].step == step):
                    policy.pump.hold()
                progress.ticks.append(ticks.popleft())
            if not self._step(entries.pop(step, []), times.of(step), tick):
                return
            if session.step == step and not (marks and marks[0].step == step):
                self._diverged(policy.waiting_for or policy.status().last_refusal)
                return
            if starts and tick is not None:
                yield tick.time_ns
        policy.end_inference()

    def _diverged(self, why: str) -> None:
        self.progress.stopped = (f'the replay cannot follow the record at step '
                                 f'{self._policy.session.step}: {why}')

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
        for e, message in found:
            self._feed(e, message, now_ns)
        policy.clock.ns = now_ns
        policy.period()
        return True

    def _feed(self, entry: Entry, message: Message, now_ns: int) -> None:
        """Let a message arrive when it did: known where it is unstamped, else the recorder's."""
        policy = self._policy
        data = self._bag.decode(message)
        arrival = entry.stamp_ns
        if header_stamp(data):
            near = abs(message.time_ns - now_ns) < OTHER_CLOCK_NS
            arrival = min(message.time_ns, now_ns) if near else now_ns
        policy.clock.ns = max(1, arrival)
        policy.feed(entry.topic, data, digest=lambda: message.digest)


class Times:
    """When each step was taken, in the node's clock: known of those that computed a tick."""

    def __init__(self, policy: Offline, ticks: Sequence[Tick]) -> None:
        self._clock = policy.clock
        self._known = {t.step: t.start_ns for t in reversed(ticks)}
        self._steps = sorted(self._known)

    def of(self, step: int) -> int:
        """Return a step's time; between ticks it is spaced evenly, after the last it stands."""
        known = self._known.get(step)
        if known is not None:
            return max(1, known)
        before = max((s for s in self._steps if s < step), default=None)
        after = min((s for s in self._steps if s > step), default=None)
        if before is None or after is None:
            return self._clock.ns
        first, last = self._known[before], self._known[after]
        return max(1, first + (last - first) * (step - before) // (after - before))
