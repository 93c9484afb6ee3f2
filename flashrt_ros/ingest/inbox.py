"""What has arrived, when, and how old it is; and which messages make one step in lock step.

The inbox is the world as last reported, not state: a restore leaves it alone. Three times belong
to a message: its header stamp (0: none), its arrival in the node's clock, and `as_of`, the earlier
of the two where both are of one clock, from which ages and freshness are counted. A topic whose
first stamp is more than a minute away from its arrival is stamped in another clock (a bag without
/clock, a sensor that counts from its own start): there the arrival alone counts.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

CLOCK_APART_NS = 60_000_000_000   # a stamp further from its arrival is of another clock
GIVE_UP_NS = 1_000_000_000        # after this silence an older stamp is a source that restarted
NEVER = -1                        # as_of of what was never received
LOCK_STEP_DEPTH = 10              # messages that wait per trigger topic


class Arrival(NamedTuple):
    """When a message came, in the node's clock, and how often that clock had jumped by then."""

    time_ns: int
    clock_epoch: int = 0


@dataclass(frozen=True)
class InputTopic:
    """What the node subscribes to, and how."""

    topic: str
    type: str                  # sensor_msgs/msg/JointState
    reliable: bool = False
    depth: int = 1
    trigger: bool = False      # one of the topics of lock step
    prompt: bool = False       # an event: `receive` returns its text


class LatchEntry:
    """A message that entered inputs or history. `digest` is computed when first asked for."""

    __slots__ = ('_digest', '_value', 'name', 'stamp_ns', 'step')

    def __init__(self, name: str, stamp_ns: int, step: int, digest: Callable[[], int]) -> None:
        self.name = name
        self.stamp_ns = stamp_ns
        self.step = step
        self._digest: Callable[[], int] | None = digest
        self._value = 0

    @property
    def digest(self) -> int:
        """First 8 bytes of SHA-256 of the serialised message."""
        compute = self._digest
        if compute is not None:        # another thread may do the same
            self._value = compute()
            self._digest = None        # it holds the message
        return self._value

    def __repr__(self) -> str:
        return f'LatchEntry({self.name!r}, stamp_ns={self.stamp_ns}, step={self.step})'


@dataclass(frozen=True)
class Missing:
    """Why a term keeps an inference from starting. `age_s` is None where nothing came yet."""

    term: str
    topic: str
    age_s: float | None
    limit_s: float | None
    why: str

    def __str__(self) -> str:
        return f'{self.term} ({self.topic}): {self.why}'


class Measured(NamedTuple):
    """A measured value with its stamp, its age and the age limit of the term that uses it."""

    value: float
    stamp_ns: int
    age_s: float
    limit_s: float | None


class Receipt(NamedTuple):
    """The times of one message. `stamp_ns` is the header's, else the arrival."""

    order: int
    stamp_ns: int
    header_ns: int
    as_of_ns: int
    arrival_ns: int
    digest: Callable[[], int]


class Parsed(NamedTuple):
    """What a message says, or why it cannot be used. Made without the lock that a step holds."""

    payload: Any = None
    header_ns: int = 0
    error: Exception | None = None


def header_stamp(msg: Any) -> int:
    """Return a message's header stamp in ns; 0 where it has none or is stamped 0."""
    header = getattr(msg, 'header', None)
    if header is None:
        return 0
    stamp = header.stamp
    ns: int = stamp.sec * 1_000_000_000 + stamp.nanosec
    return max(0, ns)


class TopicClock:
    """Decides, once per topic, whether its stamps are of the node's clock."""

    __slots__ = ('same',)

    def __init__(self) -> None:
        self.same: bool | None = None

    def receipt(self, order: int, header_ns: int, arrival_ns: int,
                digest: Callable[[], int]) -> Receipt:
        """Return the times of a message. Arrival 0 is before the first /clock and no time."""
        if header_ns and arrival_ns and self.same is None:
            # Kept until the clock jumps: a driver that repeats one frame for ever stays stale.
            self.same = abs(header_ns - arrival_ns) < CLOCK_APART_NS
        if not arrival_ns:
            as_of = header_ns
        elif header_ns and self.same:
            as_of = min(header_ns, arrival_ns)
        else:
            as_of = arrival_ns
        return Receipt(order, header_ns or arrival_ns, header_ns, as_of, arrival_ns, digest)


def age(as_of_ns: int, now_ns: int) -> float | None:
    """Return an age in seconds; None where no time of the node's clock is known."""
    if as_of_ns <= 0 or as_of_ns - now_ns > CLOCK_APART_NS:
        return None
    return max(0, now_ns - as_of_ns) * 1e-9


def judge(as_of_ns: int, now_ns: int, limit_ns: int | None, after_ns: int
          ) -> tuple[float | None, str] | None:
    """Return `(age, why)` where a message is too old or not fresh, else None."""
    if as_of_ns == NEVER:
        return None, 'never received'
    if limit_ns is not None:
        old = age(as_of_ns, now_ns)
        if old is None:
            return None, 'arrived before the clock started; waits for the next message'
        if now_ns - as_of_ns > limit_ns:
            return old, f'{old:.3f} s old, the limit is {limit_ns * 1e-9:.3f} s'
    if after_ns and as_of_ns <= after_ns:
        return age(as_of_ns, now_ns), 'not fresh: nothing newer arrived yet'
    return None


class LockStep:
    """Which messages make one step: one of each trigger topic, the stamped ones equally stamped.

    Each topic keeps its messages in order, at most `depth`. A message that can no longer be part
    of a step, because another topic is past its stamp or because more than `depth` wait, is
    overtaken: dropped, counted and, like a gap in the publication sequence numbers, told by
    `problems`. Steps depend on the order within each topic only, never on how topics interleave.
    """

    def __init__(self, topics: Sequence[str], depth: int = LOCK_STEP_DEPTH) -> None:
        self.depth = depth
        self.overtaken = 0
        self.lost = 0
        self._queues: dict[str, deque[tuple[int, Any]]] = {t: deque() for t in topics}
        self._sequence: dict[str, int] = {}
        self._problems: list[str] = []

    def __contains__(self, topic: str) -> bool:
        return topic in self._queues

    def note(self, topic: str, sequence: int | None) -> None:
        """Take the publication sequence number of a message; a gap is a loss.

        A number that does not grow is a publisher that started anew.
        """
        if sequence is None:
            return
        last = self._sequence.get(topic)
        self._sequence[topic] = sequence
        if last is not None and sequence > last + 1:
            gap = sequence - last - 1
            self.lost += gap
            self._tell(f'{topic} lost {gap} message{"s" * (gap > 1)} before number {sequence}; '
                       'let the sender wait for the output of a step before it sends the next set')

    def put(self, topic: str, stamp_ns: int, item: Any) -> None:
        """Add a message; `stamp_ns` 0 is unstamped and pairs by order alone."""
        queue = self._queues[topic]
        if len(queue) >= self.depth:
            self._overtake(topic, f'{self.depth} messages wait for the other trigger topics')
        queue.append((stamp_ns, item))
        self._align(topic, stamp_ns)

    def ready(self) -> bool:
        """Whether each trigger topic has a message for the next step."""
        return all(self._queues.values())

    def take(self) -> list[tuple[str, Any]]:
        """Return `(topic, item)` of the next step, in the order of the trigger topics."""
        step = [(topic, queue.popleft()[1]) for topic, queue in self._queues.items()]
        for topic, queue in self._queues.items():
            if queue:
                self._align(topic, queue[0][0])
        return step

    def problems(self) -> list[str]:
        """Return what went wrong since last asked: losses and overtaken messages."""
        told, self._problems = self._problems, []
        return told

    def clear(self) -> None:
        """Forget waiting messages; a clock jump, not a loss."""
        for queue in self._queues.values():
            queue.clear()

    def _align(self, topic: str, stamp_ns: int) -> None:
        """Drop heads that another topic's head has passed."""
        if not stamp_ns:
            return
        while True:
            heads = [(q[0][0], t) for t, q in self._queues.items() if q and q[0][0]]
            newest, ahead = max(heads)
            behind = [t for stamp, t in heads if stamp < newest]
            if not behind:
                return
            for late in behind:
                self._overtake(late, f'{ahead} is already at stamp {newest} ns')

    def _overtake(self, topic: str, why: str) -> None:
        stamp, _ = self._queues[topic].popleft()
        self.overtaken += 1
        self._tell(f'a message of {topic} (stamp {stamp} ns) was overtaken before use: {why}')

    def _tell(self, problem: str) -> None:
        if len(self._problems) < 16:
            self._problems.append(problem)
