"""A plain model of the store: every capsule is a full copy of everything, nothing is shared.

It knows names, lineage, ids and bytes. Of eviction it knows only the rules that a user may count
on: what is pinned or leased stays, and what is refused says so.
"""
from __future__ import annotations

from dataclasses import dataclass, field

Bytes = dict[str, bytes]


@dataclass
class Saved:
    """A capsule: all bytes, its id and its parent's."""

    state: Bytes
    id: str
    parent: str
    pinned: bool = False
    durable: bool = False


@dataclass
class Model:
    """The capsules by name and the id that the present descends from."""

    origin: Saved
    parent: str
    capsules: dict[str, Saved] = field(default_factory=dict)

    def find(self, name: str) -> Saved | None:
        """Return a capsule by name, origin included."""
        return self.origin if name == 'origin' else self.capsules.get(name)

    def by_id(self, id_: str) -> tuple[str, Saved] | None:
        """Return a capsule and its name by id."""
        for name, c in (('origin', self.origin), *self.capsules.items()):
            if c.id == id_:
                return name, c
        return None

    def ancestor(self, generations: int) -> tuple[str, Saved] | None:
        """Return the capsule that a rollback by `generations` goes to."""
        found = self.by_id(self.parent)
        for _ in range(generations - 1):
            if found is None or found[0] == 'origin':
                break
            found = self.by_id(found[1].parent)
        return None if found is None or found[0] == 'origin' else found

    def drop(self, name: str) -> None:
        """Forget a capsule; its children take its parent."""
        gone = self.capsules.pop(name)
        for c in self.capsules.values():
            if c.parent == gone.id:
                c.parent = gone.parent
        if self.parent == gone.id:
            self.parent = gone.parent
