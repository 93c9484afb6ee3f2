"""The messages of a latch record, found in a bag by digest while it is read once.

Equal bytes are equal messages, so it does not matter which of several equal ones a step took in,
nor whether the recorder missed one of them.
"""
from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable

from flashrt_ros.tools.bags import Bag, Message
from flashrt_ros.tools.record import Entry
from flashrt_ros.tools.topics import Matches

Key = tuple[str, int]


class LatchedMessages:
    """Reads ahead no further than it must; keeps what is still needed."""

    def __init__(self, bag: Bag, matches: Matches, entries: Iterable[Entry],
                 kept: Collection[str]) -> None:
        """`kept` are topics whose messages may be asked for although no entry names them."""
        self._back = matches.back()
        self._stream = bag.messages(self._back) if self._back else iter(())
        self._needed: Counter[Key] = Counter((e.topic, e.digest) for e in entries)
        self._found: dict[Key, Message] = {}
        self._kept: dict[str, deque[Message]] = {t: deque() for t in kept}
        self.read_ns = 0                       # how far the bag was read

    def find(self, entry: Entry) -> Message | None:
        """Return an entry's message, None where the bag does not hold it."""
        key = (entry.topic, entry.digest)
        while key not in self._found:
            if not self._read():
                return None
        message = self._found[key]
        self._needed[key] -= 1
        if not self._needed[key]:
            del self._found[key]
        return message

    def newest(self, topic: str, until_ns: int) -> Message | None:
        """Return the newest message of a kept topic up to a time, None where none came since
        last asked."""
        while self.read_ns <= until_ns and self._read():
            pass
        queue, newest = self._kept[topic], None
        while queue and queue[0].time_ns <= until_ns:
            newest = queue.popleft()
        return newest

    def following(self, topic: str, after_ns: int) -> Message | None:
        """Return the first message of a kept topic after a time; None at the end of the bag."""
        queue = self._kept[topic]
        while True:
            while queue and queue[0].time_ns <= after_ns:
                queue.popleft()
            if queue:
                return queue[0]
            if not self._read():
                return None

    def used(self, topic: str, time_ns: int) -> None:
        """Forget a kept topic's messages up to a time."""
        queue = self._kept.get(topic)
        while queue and queue[0].time_ns <= time_ns:
            queue.popleft()

    def _read(self) -> bool:
        message = next(self._stream, None)
        if message is None:
            return False
        self.read_ns = message.time_ns
        digest = message.digest
        for topic in self._back[message.topic]:
            if self._needed[topic, digest] > 0:
                self._found[topic, digest] = message
            if topic in self._kept:
                self._kept[topic].append(message)
        return True
