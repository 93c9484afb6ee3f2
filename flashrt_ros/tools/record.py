"""What a policy node has told of its run in a bag: ~/chunk, ~/status, ~/capsule_events.

~/chunk holds the latch record: which message each step took in, by digest. Epochs order what
happened between ticks: a rewind begins a new segment, any other change of the epoch is a mark, and
the status says at which step it came and whether it dropped the queue. Nothing here trusts the
order in which a recorder got messages of different topics.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.runtime.phases import Phase
from flashrt_ros.tools.bags import Bag, Message

CHUNK, STATUS, EVENT = (f'flashrt_ros/msg/{n}' for n in (
    'ActionChunk', 'PolicyStatus', 'CapsuleEvent'))
REWINDS = (EventKind.RESTORED, EventKind.ROLLED_BACK, EventKind.RESET)
MOVING = (Phase.RUNNING, Phase.SHADOW)


@dataclass(frozen=True)
class Entry:
    """A message that a step took in."""

    topic: str                         # as the policy file names it
    stamp_ns: int                      # header, else arrival
    step: int
    digest: int


@dataclass
class Tick:
    """One accepted inference."""

    tick: int
    step: int                          # steps executed when it latched
    epoch: int
    start_ns: int                      # the node's time at that latch
    stamp_ns: int
    time_ns: int                       # of the recorder
    entries: tuple[Entry, ...]
    outputs: dict[str, NDArray[np.float64]] = field(default_factory=dict)   # (horizon, names)
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Status:
    """What ~/status said."""

    session: int
    epoch: int
    phase: int
    tick: int
    step: int
    prompt: str
    late_ticks: int
    stamp_ns: int                      # of the node
    time_ns: int                       # of the recorder


@dataclass(frozen=True)
class EventNote:
    """What ~/capsule_events said; `name` to `session` are the capsule's."""

    kind: EventKind
    epoch: int                         # after the verb
    name: str
    id: str
    tick: int
    step: int
    session: int
    saved_epoch: int
    uri: str
    sha256: str
    message: str
    stamp_ns: int                      # of the node
    time_ns: int                       # of the recorder


@dataclass(frozen=True)
class Mark:
    """A change of the epoch that was no rewind, before the step of that number."""

    step: int
    epoch: int
    flush: bool                        # the queue was dropped
    prompt: str = ''
    shadow: bool = False
    stamp_ns: int = 1 << 64            # of the node; unknown where no status tells


@dataclass
class Segment:
    """What happened between two rewinds."""

    rewind: EventNote | None           # how it began; None: at configure
    epochs: tuple[int, int]            # first, and first of the next
    ticks: list[Tick] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    saved: list[EventNote] = field(default_factory=list)
    last_step: int = 0                 # at least so many steps were executed
    lost: list[Entry] = field(default_factory=list)  # of steps after the last tick, before a rewind
    statuses: list[Status] = field(default_factory=list)

    def late(self, latency_steps: int) -> set[int]:
        """Return the indices of ticks whose chunk came too late and was dropped.

        The status that counts one comes right after the step at which it was due; where that
        status was lost, a later one counts the tick before the next that was started.
        """
        late: set[int] = set()
        before = None
        for s in self.statuses:
            for _ in range(0 if before is None else s.late_ticks - before):
                due = [t.step + latency_steps + 1 for t in self.ticks]
                exact = [i for i, step in enumerate(due) if step == s.step]
                loose = [i for i, after in enumerate(self.ticks[1:]) if due[i] <= s.step
                         <= after.step]
                late.update([i for i in exact or loose if i not in late][-1:])
            before = s.late_ticks
        return late


@dataclass
class Run:
    """One session of one node."""

    node: str
    session: int
    segments: list[Segment]
    events: list[EventNote]
    remarks: list[str]

    @property
    def ticks(self) -> list[Tick]:
        """All ticks, in the order in which they were accepted."""
        return [t for s in self.segments for t in s.ticks]

    @property
    def entries(self) -> list[Entry]:
        """All messages that steps took in."""
        return [e for s in self.segments for t in s.ticks for e in t.entries] + [
            e for s in self.segments for e in s.lost]

    def gaps(self) -> list[str]:
        """Say where the recorder has missed a ~/chunk message."""
        found = []
        for segment in self.segments:
            last = segment.rewind.tick if segment.rewind is not None else 0
            prompts = len({m.prompt for m in segment.marks if m.prompt})
            for tick in segment.ticks:
                skipped = range(last + 1, tick.tick)
                if skipped and len(skipped) > prompts:     # taking in a prompt counts as a tick
                    found.append(f'~/chunk of tick {skipped[0]}'
                                 + (f' to {skipped[-1]}' if len(skipped) > 1 else ''))
                last = tick.tick
        return found


def find_node(bag: Bag, wanted: str = '') -> str | None:
    """Return the name of the policy node whose run a bag holds, None where there is none."""
    nodes = [t.name.rpartition('/')[0] for t in bag.topics.values()
             if CHUNK in t.types and t.count]
    if wanted:
        full = '/' + wanted.strip('/')
        if full not in nodes:
            raise Refusal(Code.NOT_FOUND, f'{bag.name} has no ~/chunk of a node {full}; it has '
                          + (', '.join(nodes) or 'none'))
        return full
    if len(nodes) > 1:
        raise Refusal(Code.INVALID_ARGUMENT, f'{bag.name} holds the runs of {", ".join(nodes)}; '
                      'choose one with --node')
    return nodes[0] if nodes else None


def read_run(bag: Bag, node: str, session: int = 0) -> Run:
    """Read a node's run, by default of the first session that ticked. Raises Refusal."""
    names = {f'{node}/chunk': CHUNK, f'{node}/status': STATUS, f'{node}/capsule_events': EVENT}
    here = {n: k for n, k in names.items() if n in bag.topics}
    remarks = [f'the bag has no {n}: what it tells must be guessed' for n in names
               if n not in here and n != f'{node}/chunk']
    sessions: dict[int, list[Tick]] = {}
    statuses: list[Status] = []
    events: list[tuple[int, EventNote]] = []     # with the session that was last heard of
    current = 0
    for message in bag.messages(here):
        if message.type != here[message.topic]:
            continue
        data = bag.decode(message)
        if message.type == CHUNK:
            current = int(data.session)
            _add_chunk(sessions.setdefault(current, []), data, message)
        elif message.type == STATUS:
            current = int(data.session) or current
            statuses.append(_status(data, message))
        else:
            events.append((current, _event(data, message)))
    if session and session not in sessions:
        raise Refusal(Code.NOT_FOUND, f'{bag.name} has no session {session}; it has '
                      + ', '.join(map(str, sessions)))
    if len(sessions) > 1 and not session:
        remarks.append(f'the bag holds {len(sessions)} sessions ({", ".join(map(str, sessions))}); '
                       'the first is taken, choose another with --session')
    session = session or next(iter(sessions))
    mine = [e for s, e in events if (s or e.session) == session]
    told = [s for s in statuses if s.session == session]
    return Run(node, session, _segments(sessions[session], told, mine), mine, remarks)


def _add_chunk(ticks: list[Tick], data: Any, message: Message) -> None:
    rows = np.asarray(data.data, np.float64).reshape(int(data.horizon), -1)
    last = ticks[-1] if ticks else None
    if last is None or (last.tick, last.epoch) != (data.tick, data.epoch) or (
            data.output in last.outputs):
        entries = tuple(
            Entry(str(n), _ns(t), int(s), int(d)) for n, t, s, d in zip(
                data.input_names, data.input_stamps, data.input_steps, data.input_digests,
                strict=True))
        last = Tick(int(data.tick), int(data.step), int(data.epoch), _ns(data.start),
                    _ns(data.header.stamp), message.time_ns, entries)
        ticks.append(last)
    last.outputs[data.output] = rows
    last.names[data.output] = tuple(data.names)


def _ns(stamp: Any) -> int:
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def _status(data: Any, message: Message) -> Status:
    return Status(int(data.session), int(data.epoch), int(data.phase), int(data.tick),
                  int(data.step), str(data.prompt), int(data.late_ticks), _ns(data.header.stamp),
                  message.time_ns)


def _event(data: Any, message: Message) -> EventNote:
    c = data.capsule
    return EventNote(EventKind(data.kind), int(data.epoch), str(c.name), str(c.id), int(c.tick),
                     int(c.step), int(c.session), int(c.epoch), str(data.uri), str(data.sha256),
                     str(data.message), _ns(data.header.stamp), message.time_ns)


def _segments(ticks: Sequence[Tick], statuses: Sequence[Status], events: Sequence[EventNote]
              ) -> list[Segment]:
    rewinds = {e.epoch: e for e in events if e.kind in REWINDS}
    firsts = [0, *sorted(rewinds)]
    segments: list[Segment] = []
    for first, end in zip(firsts, [*firsts[1:], 1 << 64], strict=True):
        s = Segment(rewinds.get(first), (first, end))
        s.ticks = sorted((t for t in ticks if first <= t.epoch < end), key=lambda t: t.tick)
        s.statuses = sorted((t for t in statuses if first <= t.epoch < end),
                            key=lambda t: (t.epoch, t.time_ns))
        s.saved = [e for e in events if e.kind is EventKind.SAVED and first <= e.epoch < end]
        s.marks = _marks(s)
        s.last_step = max([t.step for t in s.statuses]
                          + [e.step for e in s.saved], default=0)
        segments.append(s)
    for i in range(len(segments) - 1, 0, -1):
        # what entered before a rewind is told by the first tick after it that took something in
        s, before, rewind = segments[i], segments[i - 1], segments[i].rewind
        assert rewind is not None
        teller = next((t for t in s.ticks if t.entries), None)
        told = tuple(s.lost) if teller is None else teller.entries
        last = before.ticks[-1].step if before.ticks else (
            before.rewind.step - 1 if before.rewind is not None else -1)
        before.lost, mine = _split(told, rewind, last)
        if teller is None:
            s.lost = list(mine)
        else:
            teller.entries = mine
    return segments


def _split(entries: tuple[Entry, ...], rewind: EventNote, last_step: int
           ) -> tuple[list[Entry], tuple[Entry, ...]]:
    """Split a record into what entered before a rewind and after: steps go back there.

    Where they do not, what was stamped before the rewind entered before it, unless its step does
    not follow on `last_step`, the last that is known from before: then it waited in the inbox.
    """
    steps = [e.step for e in entries]
    falls = [i for i in range(1, len(steps)) if steps[i] < steps[i - 1]]
    at = falls[-1] if falls else 0
    for e in entries if not falls else ():
        if e.step >= rewind.step and (e.stamp_ns >= rewind.stamp_ns or e.step > last_step + 1):
            break
        last_step = max(last_step, e.step)
        at += 1
    return list(entries[:at]), entries[at:]


def _marks(segment: Segment) -> list[Mark]:
    """Return the changes of the epoch; what no status tells of is taken from the ticks."""
    epoch = max(segment.epochs[0], 1)
    moving = False
    marks: dict[int, Mark] = {}
    for s in segment.statuses:
        if s.epoch > epoch:
            # only a goal in HOLD leaves the queue alone: lock step may have restored it
            marks[s.epoch] = Mark(s.step, s.epoch, moving or s.phase not in MOVING, s.prompt,
                                  s.phase == Phase.SHADOW, s.stamp_ns)
            epoch = s.epoch
        moving = s.phase in MOVING
    known = {s.epoch for s in segment.statuses}
    before: Iterable[int] = ()
    for t in segment.ticks:
        if t.epoch > max(segment.epochs[0], 1) and t.epoch not in known and t.epoch not in marks:
            marks[t.epoch] = Mark(t.step, t.epoch, bool(before))
        before = (t.epoch,)
    return [marks[e] for e in sorted(marks)]
