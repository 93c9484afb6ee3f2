"""One replay from beginning to verdict: opens bag and policy, drives, compares.

Which way a bag is played: by its latch record where it has one (~/chunk), else as it is.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
import hashlib
from pathlib import Path
import time
from urllib.parse import unquote, urlparse

from flashrt_ros.core.capsule import CapsuleInfo, EventKind
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools import as_is
from flashrt_ros.tools.bags import Bag, open_bag
from flashrt_ros.tools.compare import (
    Row,
    Series,
    compare,
    pair_by_time,
    pair_in_order,
    recorded_values,
    sent_values,
)
from flashrt_ros.tools.offline import Offline, open_policy
from flashrt_ros.tools.record import EventNote, Run, find_node, read_run
from flashrt_ros.tools.replay_report import Report
from flashrt_ros.tools.rerun import Limits, Rerun
from flashrt_ros.tools.services import read_calls
from flashrt_ros.tools.topics import Matches, match
from flashrt_ros.tools.trace import Trace, Tracer

RECORD, AS_IS, TIMER = 'latch record', 'messages as they are', 'messages, with a simulated timer'
Tell = Callable[[float], None]         # progress, 0 to 1


@dataclass(frozen=True)
class Ask:
    """What is to be replayed, and how. Paths, and the options of the command line."""

    bag: Path
    policy: Path
    model_root: Path | None = None
    modules: tuple[str, ...] = ()
    msg_paths: tuple[Path, ...] = ()
    remaps: Mapping[str, str] = field(default_factory=dict)
    namespace: str = ''
    node: str = ''
    session: int = 0
    prompt: str = ''
    trigger: tuple[str, ...] = ()
    as_is: bool = False                # ignore a latch record
    start: str = ''                    # a capsule: file, or name in the bag's events
    capsules: Path | None = None       # folder where capsule files lie now
    accept_inexact: bool = False
    until_s: float | None = None
    until_tick: int | None = None
    until_step: int | None = None
    tolerance: float = 0.0
    compare: bool = True
    trace: bool = False


@dataclass
class Result:
    """A report, and what it was made from."""

    report: Report
    series: list[Series]
    trace: Trace | None


def replay(ask: Ask, tell: Tell = lambda _: None) -> Result:
    """Replay a bag and compare. Raises Refusal where there is nothing to replay."""
    began = time.perf_counter()
    with open_bag(ask.bag, msg_paths=ask.msg_paths) as bag:
        if not bag.count:
            raise Refusal(Code.NOT_FOUND, f'{bag.name} has no messages; record it again while the '
                          'robot runs (ros2 bag record)')
        node = None if ask.as_is else find_node(bag, ask.node)
        run = read_run(bag, node, ask.session) if node is not None else None
        policy = open_policy(ask.policy, model_root=ask.model_root, modules=ask.modules,
                             trigger=ask.trigger)
        try:
            result = _Replay(ask, bag, policy, run, tell).result()
        finally:
            policy.close()
    result.report.took_s = time.perf_counter() - began
    return result


class _Replay:
    """The state of one replay."""

    def __init__(self, ask: Ask, bag: Bag, policy: Offline, run: Run | None, tell: Tell) -> None:
        self.ask = ask
        self.bag = bag
        self.policy = policy
        self.run = run
        self.tell = tell
        lock_step = policy.file.run.lock_step
        mode = RECORD if run is not None else AS_IS if lock_step else TIMER
        self.report = Report(bag.name, Path(policy.file.path).name, mode, bag_s=bag.seconds,
                             tolerance=ask.tolerance, remarks=list(bag.remarks))
        namespace = ask.namespace or (run.node.rpartition('/')[0] if run is not None else '')
        outputs = {o.topic: o.type for o in policy.file.outputs.values()}
        inputs = {t.topic: t.type for t in policy.topics()}
        found = match(bag, {**outputs, **inputs}, ask.remaps, namespace)
        self.inputs = Matches({t: b for t, b in found.found.items() if t in inputs},
                              {t: w for t, w in found.missing.items() if t in inputs})
        self.outputs = Matches({t: b for t, b in found.found.items() if t in outputs},
                               {t: w for t, w in found.missing.items() if t in outputs})
        self.limits = Limits(None if ask.until_s is None else
                             bag.start_ns + round(ask.until_s * 1e9), ask.until_tick,
                             ask.until_step)
        self.tracer = Tracer(policy) if ask.trace else None
        if self.tracer is not None:
            policy.pump.around = self.tracer.around

    def result(self) -> Result:
        """Drive and compare."""
        after = self._start() if self.ask.start else None
        if after is not None:
            self.report.start = f'{after.name} (tick {after.tick}, step {after.step})'
        if self.run is not None:
            series = self._by_record(self.run, after)
        else:
            series = self._as_is(after)
        report, session = self.report, self.policy.session
        report.steps, report.ticks = session.step, session.tick
        report.outputs = [compare(s, self.ask.tolerance) for s in series]
        for c in report.outputs:
            if c.first is not None:
                report.different(f'{c.beyond} of {c.compared} {c.what} of {c.output} differ')
        if self.ask.compare and not any(c.compared for c in report.outputs):
            self._nothing_compared()
        return Result(report, series, self.tracer.trace if self.tracer is not None else None)

    def _nothing_compared(self) -> None:
        why = '; '.join(self.outputs.missing.values()) or 'the bag has no recorded action there'
        if not self.report.reasons:
            self.report.incomplete(f'nothing was recorded to compare with: {why} '
                                   '(--no-compare, if that is meant)')

    # -- by the latch record -------------------------------------------------------------------

    def _by_record(self, run: Run, after: CapsuleInfo | None) -> list[Series]:
        report, policy = self.report, self.policy
        report.remarks += run.remarks
        if after is None:
            self._known_start(run)
            report.missing += run.gaps()
        calls, remarks = read_calls(self.bag, run.node)
        report.remarks += remarks
        rerun = Rerun(policy, self.bag, run, self.inputs, self._adopt_event, self.limits, calls)
        span = max(1, self.bag.end_ns - self.bag.start_ns)
        for time_ns in rerun.play(after):
            self.tell((time_ns - self.bag.start_ns) / span)
        report.answers = rerun.calls.answers
        for answer in report.answers:
            if not answer.same:
                report.different(f'{answer.verb} {answer.name!r} answered {answer.recorded}, the '
                                 f'replay {answer.replayed}')
        progress = rerun.progress
        report.missing += progress.missing
        if progress.stopped:
            report.incomplete(progress.stopped)
        elif report.missing:
            report.incomplete('the recorder has missed messages')
        return self._chunk_series(rerun) + self._action_series(run, rerun, after)

    def _known_start(self, run: Run) -> None:
        """Let the replay begin at configure or at a reset. Raises Refusal where it cannot."""
        skipped = 0
        for i, segment in enumerate(run.segments):
            reset = segment.rewind is not None and segment.rewind.kind is EventKind.RESET
            ticks = segment.ticks
            if reset or (i == 0 and (not ticks or ticks[0].step == 0)):
                del run.segments[:i]
                break
            skipped += len(ticks)
        else:
            first = run.ticks[0]
            raise Refusal(Code.NOT_FOUND, f'the record begins at tick {first.tick}, step '
                          f'{first.step}, and the state at that time is not known; go on from a '
                          'capsule of this run with --from, or record from configure on')
        if skipped:
            self.report.remarks.append(f'the record begins in the middle: {skipped} ticks before '
                                       'the first reset are not replayed')

    def _chunk_series(self, rerun: Rerun) -> list[Series]:
        chunks, progress = self.policy.sink.chunks, rerun.progress
        ends = [*progress.begins[1:], len(chunks)]
        replayed = {(i, c.tick, c.output): c for i, (first, end) in
                    enumerate(zip(progress.begins, ends, strict=False)) for c in chunks[first:end]}
        found = {name: Series(name, 'chunks', ()) for name in self.policy.file.outputs}
        for i, recorded in progress.ticks:
            for name, series in found.items():
                chunk = replayed.get((i, recorded.tick, name))
                if chunk is not None and name in recorded.outputs:
                    series.names = chunk.names
                    series.recorded.append(Row(recorded.step, recorded.tick, recorded.time_ns,
                                               recorded.outputs[name]))
                    series.replayed.append(Row(chunk.step, chunk.tick, recorded.time_ns,
                                               chunk.data))
        return list(found.values())

    def _action_series(self, run: Run, rerun: Rerun, after: CapsuleInfo | None) -> list[Series]:
        """What was published, in order; not where limits start from joints measured just then."""
        begin = 0
        if after is not None and rerun.progress.ticks:
            begin = rerun.progress.ticks[0][1].time_ns
        result = []
        for series in self._recorded(begin):
            spec = self.policy.file.outputs[series.output]
            series.replayed = [r for r in series.replayed if r.time_ns >= begin]
            pair_in_order(series, self.ask.tolerance)
            if spec.max_rate is not None or (run and self.policy.file.run.blend_s):
                if compare(series, self.ask.tolerance).beyond:
                    self.report.remarks.append(
                        f'published values of {series.output} start from joints as measured when '
                        'they were sent, which no record holds: they are not compared')
                    continue
            result.append(series)
        return result

    # -- as it is ------------------------------------------------------------------------------

    def _as_is(self, after: CapsuleInfo | None) -> list[Series]:
        report, policy = self.report, self.policy
        needed = [w for t, w in self.inputs.missing.items() if not self._optional(t)]
        if needed:
            raise Refusal(Code.NOT_FOUND, '; '.join(needed))
        report.remarks += [f'{w}; its terms are zero' for w in self.inputs.missing.values()]
        if report.mode == TIMER:
            report.remarks.append(
                'the policy steps by a timer and the bag has no ~/chunk: which messages a live '
                'tick used is not known, so actions may differ from recorded ones')
        seen = as_is.AsIs()
        span = max(1, self.bag.end_ns - self.bag.start_ns)
        for time_ns in as_is.play(policy, self.bag, self.inputs, self.limits, seen,
                                  prompt=self.ask.prompt, after=after):
            self.tell((time_ns - self.bag.start_ns) / span)
        report.remarks += [f'{n} message{"s" * (n > 1)} rejected: {why}'
                           for why, n in seen.rejected.items()]
        if seen.stopped:
            report.incomplete(seen.stopped)
        elif not policy.session.step:
            report.incomplete('no step could be taken: '
                              + (policy.waiting_for or self._lacking()))
        series = self._recorded(0)
        for s in series:
            begun = s.replayed[0].time_ns if s.replayed else 0
            if after is not None or seen.limited or seen.stopped:
                s.recorded = [r for r in s.recorded if r.time_ns >= begun]
                if seen.limited or seen.stopped:
                    s.recorded = s.recorded[:len(s.replayed)]
            lost = pair_by_time(s)
            if lost and s.recorded:
                report.incomplete(f'the bag lacks {len(lost)} actions of {s.output} (first: step '
                                  f'{lost[0]})')
            elif s.unmatched:
                report.incomplete(f'{s.unmatched} recorded actions of {s.output} have no step here')
        return series

    def _optional(self, topic: str) -> bool:
        """Whether the policy can do without a topic: all its terms become zero by themselves."""
        terms = [t for port in self.policy.file.inputs.values() for p in port
                 for t in (p, *p.of) if t.topic == topic]
        return all(t.term == 'prompt' or (t.latched and t.on_timeout == 'zero') for t in terms)

    def _lacking(self) -> str:
        trigger = self.policy.file.run.trigger
        if self.policy.file.run.lock_step:
            topics = [self.bag.topics[self.inputs.found[t]] for t in trigger
                      if t in self.inputs.found]
            counts = ', '.join(f'{t.name} {t.count}' for t in topics)
            return ('its messages never made a complete set with equal stamps '
                    f'({counts} messages); take other topics with --trigger')
        return 'its inputs never came together'

    def _recorded(self, begin_ns: int) -> list[Series]:
        """Return recorded and published actions by output."""
        if not self.ask.compare:
            return []
        found = {}
        by_topic = {}
        for name, spec in self.policy.file.outputs.items():
            if spec.topic in self.outputs.found:
                found[name] = Series(name, 'actions', spec.joints or spec.fields)
                by_topic[self.outputs.found[spec.topic]] = spec
        for message in self.bag.messages(by_topic) if by_topic else ():
            spec = by_topic[message.topic]
            if message.time_ns < begin_ns or message.type != spec.type:
                continue
            try:
                values = recorded_values(self.bag.decode(message), spec)
            except (AttributeError, KeyError, ValueError, IndexError) as error:
                self.report.different(f'{message.topic} holds messages of another contract than '
                                      f'output {spec.name}: {error}')
                del found[spec.name]
                break
            found[spec.name].recorded.append(Row(-1, -1, message.time_ns, values))
        for sent in self.policy.sink.sent:
            series = found.get(sent.output)
            if series is not None and not sent.between and not (
                    sent.stop and self.run is not None):
                series.replayed.append(Row(sent.step, -1, sent.time_ns, sent_values(
                    sent, self.policy.file.outputs[sent.output])))
        return list(found.values())

    # -- capsules ------------------------------------------------------------------------------

    def _start(self) -> CapsuleInfo:
        """Read the capsule that `--from` names."""
        text = self.ask.start
        path = Path(text)
        if not path.is_file():
            events = self.run.events if self.run is not None else []
            durable = [e for e in events if e.kind is EventKind.PERSISTED]
            written = [e for e in durable if text in (e.name, e.id)]
            if not written:
                names = {e.name for e in durable}
                raise Refusal(Code.NOT_FOUND, f'--from {text}: there is no such file, and no event '
                              'in the bag tells of a durable capsule of that name; it tells of '
                              + (', '.join(sorted(names)) or 'none (persist them: run.persist_on)'))
            path = self._file(written[-1])
        self.policy.accept_inexact = self.ask.accept_inexact
        info: CapsuleInfo = self.policy.session.adopt(path).result()
        return info

    def _file(self, event: EventNote) -> Path:
        """Return where the file of a PERSISTED event lies now. Raises Refusal."""
        there = Path(unquote(urlparse(event.uri).path))
        beside = self.bag.path if self.bag.path.is_dir() else self.bag.path.parent
        places = [there, *(f / there.name for f in (self.ask.capsules, beside, beside.parent)
                           if f is not None)]
        for place in places:
            if place.is_file():
                if event.sha256 and hashlib.sha256(place.read_bytes()).hexdigest() != event.sha256:
                    raise Refusal(Code.CORRUPT, f'{place} is not the file that the bag speaks of '
                                  '(another SHA-256): it was saved again since')
                return place
        raise Refusal(Code.NOT_FOUND, f'the file of capsule {event.name!r} is neither {there} nor '
                      'beside the bag; say where its folder is with --capsules')

    def _adopt_event(self, event: EventNote) -> str:
        """Bring a capsule that the run returned to and that was saved before the record begins."""
        events = self.run.events if self.run is not None else []
        told = [e for e in events if e.id == event.id and e.uri]
        if not told:
            raise Refusal(Code.NOT_FOUND, 'the bag does not tell how it was saved, nor of a file')
        info: CapsuleInfo = self.policy.session.adopt(self._file(told[-1])).result()
        return info.name
