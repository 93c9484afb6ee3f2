"""What the robot reports, as the inputs of a policy: the one object the runner talks to.

Messages arrive at any time (`receive`) and stay in the inbox, which is the world and no state.
Once per step `latch` freezes the newest values and advances what counts steps: phase, counter,
last action, history. Whatever of that outlives the step lies in HOST STATE (`specs`, `bind`), so a
restore brings it back. An inference reads the latched values (`write`).

All calls belong to one owner, under its lock. A message must not be changed after `receive`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any

import numpy as np

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.ingest.assembly import PROMPT_BYTES, Assembly, Builder
from flashrt_ros.ingest.inbox import (
    LOCK_STEP_DEPTH,
    Arrival,
    InputTopic,
    LatchEntry,
    LockStep,
    Measured,
    Missing,
    Parsed,
    header_stamp,
)
from flashrt_ros.ingest.input_port import Array
from flashrt_ros.ingest.sources import JointSource, LevelSource
from flashrt_ros.ingest.spec import PolicyFile, WitnessLimit
from flashrt_ros.ingest.terms import rejected
from flashrt_ros.ingest.witness import Witness

_STEPS, _PROMPT, _PROMPT_LENGTH = 'obs.steps', 'obs.prompt', 'obs.prompt_length'
_JOINT_DEPTH = 10     # several publishers send at once; the newest alone would lose joints


def _no_digest() -> int:
    return 0


class Observation:
    """The inputs of one policy. `ports` are the model's buffers; `modules` may supply code."""

    def __init__(self, policy_file: PolicyFile, ports: Mapping[str, BufferSpec],
                 modules: Sequence[str] = ()) -> None:
        self._file = policy_file
        self._host: dict[str, Array] = {}
        self._made: Assembly = Builder(policy_file, ports, modules, self._host).build()
        self._ports = list(self._made.ports.values())
        self._named = list(self._made.ports.items())
        self._sources = self._made.sources
        self._expiring = [s for s in self._sources.values() if isinstance(s, LevelSource)
                          and any(leaf.zero_ns is not None for leaf in s.leaves)]
        self._timely = [s for s in self._sources.values() if not s.steady]
        self._witness = Witness(policy_file.guard, self._ports, self._sources)
        self._skew_ns = None if policy_file.max_skew_s is None else policy_file.max_skew_s * 1e9
        self._lock_step = self._trigger(policy_file.run.trigger)
        self._order = 0
        self._clock_epoch = 0
        self._from_other_clock = 0
        self._stamp_ns = 0

    def _trigger(self, trigger: str | tuple[str, ...]) -> LockStep | None:
        if isinstance(trigger, str):
            return None
        for topic in trigger:
            if topic not in self._sources:
                raise Refusal(Code.INVALID_POLICY_FILE, f'run.trigger: no term reads the topic '
                              f'{topic}; topics in use are {", ".join(self._sources)}')
            self._sources[topic].untimed = True
        return LockStep(trigger)

    # --- state

    def specs(self) -> list[BufferSpec]:
        """Return the HOST STATE that it needs."""
        made = self._made
        specs = [BufferSpec(_STEPS, (1,), 'I64', Role.STATE, Space.HOST),
                 *made.last_actions.values(),
                 *(h.state for port in self._ports for h in port.histories)]
        if made.prompts:
            specs += [BufferSpec(_PROMPT, (PROMPT_BYTES,), 'U8', Role.STATE, Space.HOST),
                      BufferSpec(_PROMPT_LENGTH, (1,), 'I64', Role.STATE, Space.HOST),
                      *(p.state for p in made.prompts)]
        return specs

    def initial(self) -> dict[str, Array]:
        """Return initial values that are not zero: what the empty prompt encodes to."""
        return {p.state.name: p.encode('') for p in self._made.prompts}

    def bind(self, host: Mapping[str, Array]) -> None:
        """Use the session's memory for `specs`; its values are as they were left."""
        self._host.update({s.name: host[s.name].reshape(s.shape) for s in self.specs()})
        self._steps = self._host[_STEPS]
        for port in self._ports:
            for history in port.histories:
                history.bind(self._host)

    def set_last_action(self, rows: Mapping[str, Array]) -> None:
        """Keep the raw action row `(action_dim,)` of each output for the term last_action."""
        for output, state in self._made.last_actions.items():
            row = rows.get(output)
            if row is not None:
                self._host[state.name][:] = row

    @property
    def takes_prompt(self) -> bool:
        """Whether a term reads the prompt."""
        return bool(self._made.prompts)

    @property
    def prompt(self) -> str:
        """The present prompt."""
        if not self._made.prompts:
            return ''
        n = int(self._host[_PROMPT_LENGTH][0])
        return self._host[_PROMPT][:n].tobytes().decode(errors='replace')

    def set_prompt(self, text: str) -> None:
        """Write a prompt into STATE, all or nothing. Raises Refusal(INVALID_ARGUMENT)."""
        if not self._made.prompts:
            if text:
                raise Refusal(Code.INVALID_ARGUMENT, f'the policy takes no prompt, but {text!r} '
                              'was given; leave it empty, or add the term prompt')
            return
        data = text.encode()
        if len(data) > PROMPT_BYTES:
            raise Refusal(Code.INVALID_ARGUMENT, f'the prompt has {len(data)} bytes, at most '
                          f'{PROMPT_BYTES} are kept; shorten it')
        encoded = [(p.state.name, p.encode(text)) for p in self._made.prompts]
        for name, values in encoded:
            self._host[name][:] = values
        self._host[_PROMPT].fill(0)
        self._host[_PROMPT][:len(data)] = np.frombuffer(data, np.uint8)
        self._host[_PROMPT_LENGTH][0] = len(data)

    # --- messages

    def topics(self) -> list[InputTopic]:
        """Return what to subscribe to. Sensors: best effort, the newest; triggers: reliable."""
        found = []
        for topic, source in self._sources.items():
            trigger = self._lock_step is not None and topic in self._lock_step
            depth = (LOCK_STEP_DEPTH if trigger else
                     _JOINT_DEPTH if isinstance(source, JointSource) else 1)
            found.append(InputTopic(topic, source.type, trigger, depth, trigger))
        found += [InputTopic(t, 'std_msgs/msg/String', True, 1, prompt=True)
                  for t in self._made.prompt_topics]
        for i, item in enumerate(found):
            wish = self._file.qos.get(item.topic)
            if wish is not None:
                found[i] = InputTopic(
                    item.topic, item.type,
                    item.reliable if wish.reliable is None else wish.reliable,
                    item.depth if wish.depth is None else wish.depth, item.trigger, item.prompt)
        return found

    def parse(self, topic: str, msg: Any) -> Parsed:
        """Read a message for `receive`; touches nothing that a step uses, so that a picture of a
        megabyte holds no step up. For one thread at a time. What is wrong with it `receive` raises.
        """
        try:
            if topic in self._made.prompt_topics:
                return Parsed(str(msg.data))
            source = self._sources.get(topic)
            if source is None:
                raise rejected(topic, 'no term reads this topic')
            return Parsed(source.parse(msg), header_stamp(msg))
        except Exception as error:
            return Parsed(error=error)

    def receive(self, topic: str, msg: Any, arrival: Arrival,
                digest: Callable[[], int] = _no_digest, seq: int | None = None) -> str | None:
        """Take in a message, or what `parse` made of it; of a prompt topic return its text instead,
        for `set_prompt`.

        Raises Refusal(INPUT_REJECTED); then nothing has changed. `seq` is the publication sequence
        number, by which lock step finds losses.
        """
        parsed = msg if isinstance(msg, Parsed) else self.parse(topic, msg)
        source = self._sources.get(topic)
        if source is None:
            if parsed.error is not None:
                raise parsed.error
            return str(parsed.payload)
        if arrival.clock_epoch > self._clock_epoch:
            self.clear(arrival.clock_epoch)
        lock_step = self._lock_step if source.untimed else None
        if lock_step is not None:
            lock_step.note(topic, seq)           # also of one that is not used: it was not lost
        if arrival.clock_epoch < self._clock_epoch:
            self._from_other_clock += 1          # sent before a clock jump, handled after it
            return None
        if parsed.error is not None:
            raise parsed.error
        self._order += 1
        payload, header = parsed.payload, parsed.header_ns
        receipt = source.clock.receipt(self._order, header, arrival.time_ns, digest)
        if lock_step is None:
            source.apply(payload, receipt)
        else:
            lock_step.put(topic, header, (payload, receipt))
        return None

    def lockstep_ready(self) -> bool:
        """Whether the next step's messages are all there (lock step); `take` them then."""
        return self._lock_step is not None and self._lock_step.ready()

    def take(self) -> bool:
        """Take in the messages of the next step, whether or not it is then latched (HOLD).

        Return False, and change nothing, where they are not all there.
        """
        if self._lock_step is None or not self._lock_step.ready():
            return False
        for topic, (payload, receipt) in self._lock_step.take():
            self._sources[topic].apply(payload, receipt, force=True)
        return True

    def lockstep_problems(self) -> list[str]:
        """Return losses and overtaken messages since last asked; in lock step an error."""
        return [] if self._lock_step is None else self._lock_step.problems()

    def clear(self, clock_epoch: int | None = None) -> None:
        """Empty the inbox after a clock jump; later arrivals of an earlier epoch are dropped."""
        if clock_epoch is not None:
            self._clock_epoch = clock_epoch
        for source in self._sources.values():
            source.clear()
        if self._lock_step is not None:
            self._lock_step.clear()

    @property
    def counters(self) -> dict[str, int]:
        """Messages that were dropped, by why."""
        lock_step = self._lock_step
        return {'older': sum(s.older for s in self._sources.values()),
                'other_clock': self._from_other_clock,
                'overtaken': 0 if lock_step is None else lock_step.overtaken,
                'lost': 0 if lock_step is None else lock_step.lost}

    # --- a step

    def missing(self, now_ns: int, after_ns: int = 0) -> list[Missing]:
        """Return what keeps a step from being latched; `after_ns`: all must be newer than that.

        Too old, never received, not finite, or too far apart in stamps. In lock step the trigger
        topics have no age limit.
        """
        found = []
        for level in self._expiring:
            level.expire(now_ns)
        for source in self._sources.values():
            found += source.check(now_ns, after_ns)
        self._gather()
        told = {(m.term, m.topic) for m in found}
        for port in self._ports:
            if not port.complete():
                found += [m for m in port.not_finite() if (m.term, m.topic) not in told]
        if self._skew_ns is not None:
            found += self._skew(self._skew_ns)
        return found

    def slack_s(self, now_ns: int) -> float | None:
        """Return for how much longer the inputs may be used, s: of all terms with an age limit the
        smallest limit less age, negative where one is too old already. None: no term has a limit.

        Like `missing` it judges what is newest; asked right after `latch`, that is what a step
        latched. Latched terms and the trigger topics of lock step have no age that counts.
        """
        slack = min((source.slack_ns(now_ns) for source in self._sources.values()),
                    default=math.inf)
        return None if slack == math.inf else slack * 1e-9

    def _gather(self) -> None:
        for port in self._ports:
            port.gather()

    def _skew(self, limit_ns: float) -> list[Missing]:
        stamps = [(ns, term, source.topic) for source in self._sources.values()
                  for ns, term in source.stamps()]
        if len(stamps) < 2:
            return []
        oldest, newest = min(stamps), max(stamps)
        apart = newest[0] - oldest[0]
        if apart <= limit_ns:
            return []
        return [Missing(oldest[1], oldest[2], None, limit_ns * 1e-9,
                        f'stamped {apart * 1e-9:.3f} s before {newest[1]} ({newest[2]}), the limit '
                        f'is {limit_ns * 1e-9:.3f} s')]

    def latch(self, now_ns: int, step: int | None = None) -> list[LatchEntry]:
        """Freeze the newest values for one step and advance what counts steps.

        Return the messages that entered since the last latch, oldest first, under `step` (the
        steps latched before, where it is not given). Raises Refusal(INPUT_STALE), with nothing
        changed, where a value was never received or is not finite; ages are `missing`'s.
        """
        for level in self._expiring:
            level.expire(now_ns)
        self._gather()
        if not all([port.complete() for port in self._ports]):
            why = self.missing(now_ns)
            raise Refusal(Code.INPUT_STALE, '; '.join(map(str, why)), missing=why)
        count = int(self._steps[0]) + 1
        self._steps[0] = count
        for port in self._ports:
            port.latch(count)
        self._witness.latch()
        self._stamp_ns = self._stamp(now_ns)
        return self._entries(count - 1 if step is None else step)

    def _entries(self, step: int) -> list[LatchEntry]:
        entered = [(receipt.order, topic, receipt) for topic, source in self._sources.items()
                   for receipt in source.entered()]
        entered.sort()
        return [LatchEntry(topic, receipt.stamp_ns, step, receipt.digest)
                for _, topic, receipt in entered]

    def _stamp(self, now_ns: int) -> int:
        newest = 0
        for source in self._timely:
            if (receipt := source.newest) is not None:
                stamp = (receipt.header_ns if receipt.header_ns
                         and (source.clock.same or source.untimed) else receipt.arrival_ns)
                newest = max(newest, stamp)
        return newest or now_ns

    @property
    def stamp_ns(self) -> int:
        """The newest stamp among what was latched last, keeping inputs apart; else the time."""
        return self._stamp_ns

    @property
    def prefixes(self) -> frozenset[str]:
        """Outputs whose running chunk `write` wants to be given the rest of."""
        return frozenset(self._made.prefixes)

    def write(self, inputs: Mapping[str, Array], prefix: Mapping[str, Array] | None = None) -> None:
        """Fill the INPUT staging of an inference with the latched values.

        `prefix` holds, by output, the rows `(rows, action_dim)` of the running chunk that are
        still to be executed; missing ones repeat the last, without any all are zero.
        """
        for name, port in self._named:
            port.write(inputs[name], prefix or {})

    # --- what was measured

    def joints(self) -> dict[str, tuple[float, int]]:
        """Return the newest measured `(position, stamp)` of each joint, however old."""
        return self._witness.joints()

    def witness(self) -> tuple[dict[str, float], dict[str, int]]:
        """Return values and stamps, by flat name, as latched by the last step."""
        return self._witness.latched()

    def measured(self, now_ns: int) -> dict[str, Measured]:
        """Return the same names as measured just now, with age and limit; absent: never."""
        return self._witness.measured(now_ns)

    @property
    def guard(self) -> Mapping[str, WitnessLimit]:
        """The guard's limits by flat name."""
        return self._witness.limits
