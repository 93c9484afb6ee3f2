"""The proof that nothing was left out: what a capsule holds is all that the future depends on.

From `origin` twice; save, run on, overwrite everything, restore, run again; a new process from the
saved file; then one STATE buffer left out at a time. Every run sees the same inputs, so whatever
differs names what was not saved.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
import math
from pathlib import Path
from typing import Any

from flashrt_ros.core import probe
from flashrt_ros.core.capsule import ORIGIN
from flashrt_ros.core.errors import Refusal
from flashrt_ros.core.layout import Role, Space
from flashrt_ros.core.session import COUNTERS
from flashrt_ros.ingest.ports import action_shape
from flashrt_ros.ingest.schema import flat
from flashrt_ros.tools.labels import label
from flashrt_ros.tools.offline import Offline
from flashrt_ros.tools.proof import Actions, Check, Leaving, Proof
from flashrt_ros.tools.script import Player, Step
from flashrt_ros.tools.trace import Trace, Tracer, part

NAME, NEXT = 'verify', 'verify-next'     # mid-chunk, and before a step that computes one
SAVE_AT, FUTURE, DISTURBED = 33, 60, 17     # steps; lengthened where a period would hide something
Tell = Callable[[str, float], None]         # what is done, and how much of all


def plan(policy: Offline, script: int) -> tuple[int, int, int]:
    """Return `(save_at, future, disturbed)` in steps: none hides behind a period of the policy."""
    horizon = max(action_shape(o, policy.session.layout).rows for o in policy.file.outputs.values())
    terms = flat(tuple(t for port in policy.file.inputs.values() for t in port))
    periods = [round(t.period_s / policy.file.policy.period_s) for t in terms
               if t.term == 'phase' and t.period_s]
    periods += [policy.file.run.execute or horizon, *(t.length for t in terms
                                                      if t.term == 'history' and t.length)]
    future = max(FUTURE, 3 * horizon)
    save_at = max(SAVE_AT, 2 * horizon + 1)
    if script < save_at + future:              # a short bag
        save_at, future = max(1, script // 3), script - max(1, script // 3)
    disturbed = next((d for d in range(DISTURBED, 4 * DISTURBED) if d != save_at and all(
        (save_at - d) % p for p in periods if p > 1)), DISTURBED)
    return save_at, future, disturbed


class Verifier:
    """Runs the proof on one policy. `script` are the inputs, `other` different ones."""

    def __init__(self, policy: Offline, script: Sequence[Step], other: Sequence[Step],
                 tolerance: float = 0.0, tell: Tell = lambda what, done: None,
                 reopen: Callable[[], Offline] | None = None) -> None:
        """`reopen` makes the policy anew over the same folder, should it end in FAULT."""
        self.policy = policy
        self._reopen = reopen
        self.player = Player(policy, script)
        self.other = Player(policy, other)
        self.tolerance = tolerance
        self.proof = Proof()
        self.tell = tell
        self.save_at, self.future, self.disturbed = plan(policy, len(script))
        self.places: dict[str, int] = {}       # capsule -> the step before which it was saved
        self._hidden = dict(policy.session.policy.hidden())

    # -- runs ----------------------------------------------------------------------------------

    def _run(self, player: Player, first: int, last: int, *, trace: bool = False
             ) -> tuple[Actions, Trace | None]:
        policy = self.policy
        tracer = Tracer(policy) if trace else None
        policy.pump.around = tracer.around if tracer is not None else None
        begin = len(policy.sink.sent)
        try:
            player.play(first, last)
        finally:
            policy.pump.around = None
        sent, policy.sink.sent[begin:] = policy.sink.sent[begin:], []
        policy.sink.chunks.clear()
        return Actions.of(sent), tracer.trace if tracer is not None else None

    def _from(self, name: str, player: Player, at: int) -> None:
        """Return to a capsule with the inbox of step `at`."""
        self.policy.halt()
        player.fill(at)
        self.policy.resume_at(name)

    # -- the proof -----------------------------------------------------------------------------

    def twice(self) -> None:
        """From origin twice: equal inputs give equal bytes."""
        self.tell('from origin, twice', 0.0)
        traces, actions = [], []
        for _ in range(2):
            self._from(ORIGIN, self.player, 0)
            done, trace = self._run(self.player, 0, self.save_at + self.future, trace=True)
            actions.append(done)
            traces.append(trace)
        assert traces[0] is not None
        assert traces[1] is not None
        parting = part(traces[0], traces[1], self.tolerance)
        hidden = self._hidden_now()
        what = f'{len(traces[0].steps)} ticks from origin, twice'
        if hidden:
            self._say(what, False, f'{", ".join(hidden)} changed and is no declared buffer: make '
                      'it STATE, or a restore will not bring it back')
        elif parting is not None:
            self._say(what, False, self._where(parting))
        else:
            first, largest = actions[0].against(actions[1])
            self._say(what, largest <= self.tolerance and (first is None or bool(self.tolerance)),
                      'equal in every input, STATE buffer and output' if first is None else
                      f'the actions of step {first} differ by up to {largest:.3g}')

    def _where(self, parting: Any) -> str:
        """Say in which input or buffer two runs on equal messages part."""
        first = parting.buffers[0]
        if first.startswith('input ') and parting.index is not None:
            port = first.removeprefix('input ')
            at = label(self.policy.file, self.policy.session.layout, port, parting.index)
            return (f'tick {parting.tick}: {at} differs although the messages are equal: its term '
                    'keeps something that is not STATE (a module or closure variable)')
        rest = ', '.join(parting.buffers)
        return (f'tick {parting.tick}: {rest} differ although the inputs are equal: the policy '
                'keeps something that is not STATE, or is not deterministic')

    def _hidden_now(self) -> list[str]:
        now = dict(self.policy.session.policy.hidden())
        return sorted(k for k in {*now, *self._hidden} if now.get(k) != self._hidden.get(k))

    def restore(self) -> Actions:
        """Save, run on, overwrite everything, restore, run again; return the undisturbed actions.
        """
        self.tell('save, overwrite, restore', 0.2)
        session = self.policy.session
        self._from(ORIGIN, self.player, 0)
        self._run(self.player, 0, self.save_at)
        session.save(NAME, overwrite=True, pin=True, persist=True)
        saved = session.digest()
        undisturbed = self._undisturbed()
        self._disturb()
        left = self._overwrite()
        self._from(NAME, self.player, self.save_at)
        wrong = [n for n, digest in session.digest().items() if digest != saved[n]]
        self._say('a restore brings back every byte', not wrong, f'{", ".join(wrong)} differ'
                  if wrong else f'{len(saved) - len(left)} STATE buffers were overwritten and '
                  'came back' + (f'; {", ".join(left)} by their rows' if left else ''))
        again, _ = self._run(self.player, self.save_at, self.save_at + self.future)
        first, largest = undisturbed.against(again)
        good = first is None or (bool(self.tolerance) and largest <= self.tolerance)
        self._say('the future after a restore', good, f'{len(again.steps)} actions as if never '
                  'interrupted' if first is None else f'parts at step {first}, by up to '
                  f'{largest:.3g}: something that shapes actions is not in the capsule')
        return undisturbed

    def _undisturbed(self) -> Actions:
        """Run on from the save; save once more before a step that starts an inference."""
        end = self.save_at + self.future
        parts = []
        for at in range(self.save_at, end):
            if not self.places or (at > self.save_at and NEXT not in self.places
                                   and self.policy.would_start):
                name = NEXT if self.places else NAME
                if name == NEXT:
                    self.policy.session.save(NEXT, overwrite=True, pin=True, persist=True)
                self.places[name] = at
            parts.append(self._run(self.player, at, at + 1)[0])
        return Actions(tuple(s for p in parts for s in p.steps),
                       tuple(v for p in parts for v in p.values))

    def _disturb(self) -> None:
        """Leave other values everywhere: other inputs, from origin, for another number of steps."""
        policy = self.policy
        self._from(ORIGIN, self.other, 0)
        if policy.observation.takes_prompt:
            with suppress(Refusal):            # where even this is too long
                policy.begin('other')
        self._run(self.other, 0, self.disturbed)

    def _overwrite(self) -> list[str]:
        """Write other bytes into every STATE buffer; return the journals, whose rows stay."""
        layout = self.policy.session.layout
        lengths = {s.length for s in layout.values() if s.is_journal}
        left = []
        for spec in layout.select(Role.STATE):
            if spec.is_journal or spec.name in lengths:
                left.append(spec.name)
                continue
            old = probe.read_state(self.policy.session, spec.name)
            probe.write_state(self.policy.session, spec.name, bytes(b ^ 0x5A for b in old))
        return left

    def process(self, child: Callable[[Path], str], undisturbed: Actions) -> None:
        """A new process goes on from the saved file; `child` returns the digest of its actions."""
        self.tell('a new process', 0.4)
        folder = self.policy.session.options.directory
        assert folder is not None
        self.policy.halt()
        try:
            digest = child(folder / f'{NAME}.capsule')
        except Refusal as refusal:
            self._say('a new process from the file', False, refusal.message)
            return
        good = digest == undisturbed.digest()
        self._say('a new process from the file', good, f'{len(undisturbed.steps)} actions equal to '
                  'the byte' if good else 'its actions differ: something lives in this process '
                  'only (a module variable, a cache, a random generator)')

    def leave_out(self, undisturbed: Actions) -> None:
        """Leave one STATE buffer out of a restore at a time, from each place."""
        specs = self.policy.session.layout.select(Role.STATE)
        found: dict[str, Leaving] = {}
        for n, (name, at) in enumerate(self.places.items()):
            session = self.policy.session
            self._from(name, self.player, at)
            saved = {s.name: probe.read_state(session, s.name) for s in specs}
            self._disturb()
            dirty = {s.name: probe.read_state(session, s.name) for s in specs}
            for i, spec in enumerate(specs):
                done = (n + i / len(specs)) / len(self.places)
                self.tell(f'without {spec.name}', 0.5 + 0.5 * done)
                old = found.get(spec.name) or Leaving(
                    spec.name, spec.nbytes, spec.space.name, self._what(spec.name), False, False,
                    note='did not change')
                found[spec.name] = old
                if not old.load_bearing and dirty[spec.name] != saved[spec.name]:
                    found[spec.name] = self._without(old, name, at, dirty[spec.name], undisturbed)
        self.proof.buffers = list(found.values())

    def _without(self, base: Leaving, name: str, at: int, dirty: bytes, undisturbed: Actions
                 ) -> Leaving:
        base = replace(base, changed=True, note='changes, does not matter')
        self.policy.rewind(ORIGIN)             # so that a journal's rows are all copied back
        self._from(name, self.player, at)
        probe.write_state(self.policy.session, base.name, dirty)
        try:
            actions, _ = self._run(self.player, at, self.save_at + self.future)
        except Refusal as refusal:
            del self.policy.sink.sent[:]
            self._recover()
            return replace(base, load_bearing=True, step=0,
                           note=f'refused: {refusal.message}'[:120])
        self.policy.halt()
        first, largest = undisturbed.since(at).against(actions)
        if first is None and len(actions.steps) != len(undisturbed.since(at).steps):
            largest = math.inf
        if first is not None and largest > self.tolerance:
            return replace(base, load_bearing=True, step=first - at, largest=largest, note='')
        return replace(base, largest=largest)

    def _recover(self) -> None:
        """Go on after a buffer without which the policy failed for good."""
        if self.policy.session.fault is None or self._reopen is None:
            self.policy.halt()
            return
        self.policy.close()
        self.policy = policy = self._reopen()
        for name in self.places:
            policy.session.load(name).result()
        self.player = Player(policy, self.player.script)
        self.other = Player(policy, self.other.script)

    def _what(self, name: str) -> str:
        """Return what a buffer of ours holds, in the words of the policy file."""
        if name in COUNTERS:
            return 'for records'
        if name == 'obs.steps':
            terms = {t.term for port in self.policy.file.inputs.values() for t in flat(port)}
            return ', '.join(sorted(terms & {'phase', 'counter', 'episode_start'})) or 'counter'
        for end, what in (('.history', 'history'), ('.prompt', 'prompt')):
            if name.endswith(end):
                return what
        for begin, what in (('obs.last_action', 'last action'), ('obs.prompt', 'prompt'),
                            ('queue.', 'queue'), ('output.', 'limits')):
            if name.startswith(begin):
                return what
        return 'model'

    def _against(self, a: Actions, b: Actions, name: str) -> tuple[int | None, float]:
        """Compare by position: without the step counter the steps' numbers are others."""
        first, largest = a.against(b)
        if first is None and len(a.steps) != len(b.steps):
            largest = math.inf
        return None if first is None else first - self.save_at, largest

    def remark(self) -> None:
        """Note what the table alone does not say."""
        proof = self.proof
        proof.saved_at, proof.steps = self.save_at, self.future
        report = self.policy.session.report
        if report is not None and report.zero_inputs:
            proof.remarks.append(f'configure tried {", ".join(report.zero_inputs)} with zeros '
                                 'only: no range is declared (policy.options.ranges)')
        if not any(b.load_bearing and b.space == Space.DEVICE.name for b in proof.buffers) and not (
                self.policy.session.layout.select(Role.STATE, Space.DEVICE)):
            proof.remarks.append('the model itself keeps no state')

    def _say(self, name: str, ok: bool, detail: str) -> None:
        self.proof.checks.append(Check(name, ok, detail))
