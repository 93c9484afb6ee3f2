"""Capsules by name: lineage, budgets, pins, leases, eviction.

Nothing here copies bytes or locks: the session calls it under its own lock and carries out the
moves that it plans. A capsule over budget goes to the next tier that has room, least recently used
first; pinned and leased ones never move. What gives up its bytes altogether stays as a mark, so
that a later restore can say EVICTED instead of NOT_FOUND.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
import time

from flashrt_ros.core.capsule import ORIGIN, Capsule
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.payload import Payload, Tier

MAX_MARKS = 1024  # names of evicted capsules that are remembered


@dataclass(frozen=True)
class Budgets:
    """How much the store may keep."""

    device_slots: int = 8      # distinct device slots of capsules, origin not counted
    host_bytes: int = 1 << 30
    max_capsules: int = 256    # in memory; origin and marks not counted


@dataclass(frozen=True)
class Room:
    """What must go before something new fits: capsules to move to the host, and to give up."""

    demote: tuple[Capsule, ...] = ()
    evict: tuple[Capsule, ...] = ()


NO_ROOM = Room()


class Store:
    """The capsules of one session."""

    def __init__(self, budgets: Budgets,
                 steady: Callable[[], float] = time.monotonic) -> None:
        self.budgets = budgets
        self._steady = steady
        self._by_name: dict[str, Capsule] = {}
        self._by_id: dict[str, Capsule] = {}
        self._uses = 0

    def __iter__(self) -> Iterator[Capsule]:
        return iter(sorted(self._by_id.values(), key=lambda c: c.order))

    def use(self) -> int:
        """Return the next number of use."""
        self._uses += 1
        return self._uses

    # -- look-ups -------------------------------------------------------------------------

    def find(self, name: str) -> Capsule | None:
        """Return the capsule or mark of a name."""
        return self._by_name.get(name)

    def by_id(self, id_: str) -> Capsule | None:
        """Return the capsule or mark of an id."""
        return self._by_id.get(id_)

    def newest(self) -> Capsule:
        """Return the newest capsule that has its bytes, origin excluded."""
        for capsule in reversed(list(self)):
            if capsule.name != ORIGIN and capsule.tier is not Tier.NONE:
                return capsule
        raise Refusal(Code.NOT_FOUND, 'there is no capsule yet; save one, or name origin for a '
                      'fresh episode')

    def get(self, name: str, if_id: str = '') -> Capsule:
        """Return a capsule that has its bytes; '' is the newest."""
        capsule = self._by_name.get(name) if name else self.newest()
        if capsule is None:
            known = ', '.join(sorted(self._by_name)[:8])
            raise Refusal(Code.NOT_FOUND, f'there is no capsule {name!r}; there are {known}')
        if if_id and capsule.id != if_id:
            raise Refusal(Code.NOT_FOUND, f'{capsule.name!r} is now capsule {capsule.id}, not '
                          f'{if_id}; it was overwritten or saved again')
        if capsule.tier is Tier.NONE:
            raise Refusal(Code.EVICTED, f'capsule {capsule.name!r} was evicted to make room; pin '
                          'or lease what must stay, or raise device_slots and host_bytes')
        return capsule

    def ancestor(self, id_: str, generations: int) -> Capsule:
        """Return the capsule `generations` (1 = itself) up the lineage from `id_`."""
        capsule = self._by_id.get(id_)
        for _ in range(generations - 1):
            if capsule is None or capsule.name == ORIGIN:
                break
            capsule = self._by_id.get(capsule.parent)
        if capsule is None or capsule.name == ORIGIN:
            raise Refusal(Code.NOTHING_TO_ROLL_BACK, f'the present state has no {generations}. '
                          'capsule on its lineage; restore one by name, or reset to origin')
        return capsule

    # -- changes --------------------------------------------------------------------------

    def add(self, capsule: Capsule) -> None:
        """Enter a capsule; a mark of the same name gives way."""
        old = self._by_name.get(capsule.name)
        if old is not None:
            self.remove(old)
        self._by_name[capsule.name] = capsule
        self._by_id[capsule.id] = capsule
        if len(self._by_id) <= MAX_MARKS:
            return
        marks = [c for c in self if c.tier is Tier.NONE]
        for mark in marks[:max(0, len(marks) - MAX_MARKS)]:
            self.remove(mark)

    def remove(self, capsule: Capsule) -> None:
        """Take a capsule out of the tree; its children take its parent."""
        for child in self._by_id.values():
            if child.parent == capsule.id:
                child.parent = capsule.parent
        del self._by_id[capsule.id]
        if self._by_name.get(capsule.name) is capsule:
            del self._by_name[capsule.name]
        self.give_up(capsule)

    def give_up(self, capsule: Capsule) -> None:
        """Release a capsule's bytes; what is left is a mark, or its file."""
        if capsule.boundary is not None:
            capsule.boundary.release()
            capsule.boundary = None

    # -- budgets --------------------------------------------------------------------------

    def pinned(self, capsule: Capsule) -> bool:
        """Whether a capsule must keep its bytes: origin, pinned, leased, or being copied."""
        return (capsule.name == ORIGIN or capsule.pinned or capsule.moving or capsule.writing
                or capsule.lease_until > self._steady())

    def resident(self, tier: Tier) -> list[Capsule]:
        """Return the capsules of a memory tier, least recently used first, origin excluded."""
        return sorted((c for c in self._by_id.values() if c.tier is tier and c.name != ORIGIN),
                      key=lambda c: c.used)

    def slots(self, without: frozenset[str] = frozenset()) -> set[int]:
        """Return the identities of device slots that capsules refer to; shared ones count once.

        A capsule on its way to the host no longer counts: the copy is carried out before the next
        tick needs a slot.
        """
        return {id(c.boundary.payload) for c in self._by_id.values()
                if c.boundary is not None and c.tier is Tier.DEVICE and c.name != ORIGIN
                and not c.moving and c.id not in without}

    def host_bytes(self, without: frozenset[str] = frozenset()) -> int:
        """Return the bytes of host payloads that capsules refer to, or will after their move."""
        seen: dict[int, int] = {}
        for c in self._by_id.values():
            payload = c.boundary.payload if c.boundary is not None else None
            if payload is not None and c.id not in without and (
                    payload.tier is Tier.HOST or c.moving):
                seen[id(payload)] = payload.nbytes
        return sum(seen.values())

    def count(self, without: frozenset[str] = frozenset()) -> int:
        """Return how many capsules have their bytes in memory, origin excluded."""
        return sum(1 for c in self._by_id.values() if c.name != ORIGIN
                   and c.tier in (Tier.DEVICE, Tier.HOST) and c.id not in without)

    def make_room(self, payload: Payload | None, *, replacing: Capsule | None = None) -> Room:
        """Plan what must move so that a capsule on `payload` fits; change nothing.

        Raises Refusal(BUDGET_EXCEEDED) where what is in the way may not be evicted.
        """
        gone = {replacing.id} if replacing is not None else set()
        demote: list[Capsule] = []
        evict = self._make_count(gone)
        while payload is not None and payload.tier is Tier.DEVICE and (
                len(self.slots(frozenset(gone)) | {id(payload)}) > self.budgets.device_slots):
            groups = self._movable_groups(Tier.DEVICE, gone, payload)
            if not groups:
                raise Refusal(Code.BUDGET_EXCEEDED, f'all {self.budgets.device_slots} device '
                              'slots hold pinned or leased capsules; drop or unpin one, or raise '
                              'device_slots')
            self._demote_or_evict(groups[0], demote, evict, gone)
        if payload is not None and payload.tier is Tier.HOST and not any(
                c.boundary is not None and c.boundary.payload is payload and c.id not in gone
                for c in self.resident(Tier.HOST)):
            # restored from the host, and the capsule that it came from is gone since
            self._make_host(payload.nbytes, evict, gone, payload)
        return Room(tuple(demote), tuple(evict)) if demote or evict else NO_ROOM

    def _make_count(self, gone: set[str]) -> list[Capsule]:
        """Plan what must go so that one more capsule may be in memory; enter it in `gone`."""
        evict: list[Capsule] = []
        if len(self._by_id) < self.budgets.max_capsules:
            return evict    # even if marks and origin counted
        while self.count(frozenset(gone)) + 1 > self.budgets.max_capsules:
            movable = sorted((c for c in self._by_id.values() if c.tier in (Tier.DEVICE, Tier.HOST)
                              and c.id not in gone and not self.pinned(c)), key=lambda c: c.used)
            if not movable:
                raise Refusal(Code.BUDGET_EXCEEDED, f'all {self.budgets.max_capsules} capsules '
                              'are pinned or leased; drop one or raise max_capsules')
            evict.append(movable[0])
            gone.add(movable[0].id)
        return evict

    def make_host_room(self, nbytes: int) -> list[Capsule]:
        """Plan what must give up its memory so that `nbytes` more fit on the host; change nothing.

        Raises Refusal(BUDGET_EXCEEDED).
        """
        gone: set[str] = set()
        evict = self._make_count(gone)
        self._make_host(nbytes, evict, gone)
        return evict

    def _make_host(self, nbytes: int, evict: list[Capsule], gone: set[str],
                   but: Payload | None = None) -> None:
        """Plan what must go so that `nbytes` more fit on the host; capsules on `but` stay."""
        needed = self.host_bytes(frozenset(gone)) + nbytes
        for group in self._movable_groups(Tier.HOST, gone, but):
            if needed <= self.budgets.host_bytes:
                break
            evict += group
            gone.update(c.id for c in group)
            needed -= _payload_bytes(group)
        if needed > self.budgets.host_bytes:
            raise Refusal(Code.BUDGET_EXCEEDED, f'{nbytes} bytes do not fit into host_bytes '
                          f'{self.budgets.host_bytes} beside pinned and leased capsules; drop one '
                          'or raise it')

    def _movable_groups(self, tier: Tier, gone: set[str], but: Payload | None = None
                        ) -> list[list[Capsule]]:
        """Return capsules by shared payload, least recently used first, without pinned ones."""
        groups: dict[int, list[Capsule]] = {}
        for c in self.resident(tier):
            if c.id not in gone and c.boundary is not None and c.boundary.payload is not but:
                groups.setdefault(id(c.boundary.payload), []).append(c)
        return sorted((g for g in groups.values() if not any(map(self.pinned, g))),
                      key=lambda g: max(c.used for c in g))

    def _demote_or_evict(self, group: list[Capsule], demote: list[Capsule],
                         evict: list[Capsule], gone: set[str]) -> None:
        """Plan the move of a group that shares one slot to the host, or its eviction."""
        nbytes = _payload_bytes(group[:1])
        needed = self.host_bytes(frozenset(gone)) + _payload_bytes(demote) + nbytes
        freed: list[Capsule] = []
        for others in self._movable_groups(Tier.HOST, gone):
            if needed <= self.budgets.host_bytes:
                break
            freed += others
            needed -= _payload_bytes(others)
        if needed <= self.budgets.host_bytes and not all(c.durable for c in group):
            demote += group
            evict += freed
            gone.update(c.id for c in freed)
        else:
            evict += group
        gone.update(c.id for c in group)


def _payload_bytes(capsules: list[Capsule]) -> int:
    """Return the bytes of distinct payloads."""
    return sum({id(c.boundary.payload): c.boundary.payload.nbytes for c in capsules
                if c.boundary is not None and c.boundary.payload is not None}.values())
