"""P33, P34: random verbs against a plain model, on small budgets; every answer and every byte."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.payload import Tier
from test.conformance.cases import CASES, Case, Owner
from test.core.model import Model, Saved

VERBS = ('tick', 'tick', 'tick', 'step', 'save', 'save', 'overwrite', 'restore', 'restore',
         'rollback', 'steps', 'fork', 'drop', 'keep', 'persist', 'load', 'preview')
NAMES = [f'n{i}' for i in range(7)]


class Walk:
    """One random walk over the verbs of a session and its model."""

    def __init__(self, case: Case, folder: Path, seed: int, **options: int) -> None:
        self.case, self.folder, self.options = case, folder, options
        self.rng = np.random.default_rng(seed)
        self.counts: dict[str, int] = {}
        self.history: list[dict[str, bytes]] = []
        self.open()

    def open(self) -> None:
        """Configure; what was durable is there again."""
        self.o = self.case.session(directory=self.folder, live_sets=2, history=3, **self.options)
        (origin,) = (c for c in self.o.session.list() if c.name == 'origin')
        self.model = Model(Saved(self.o.everything(), origin.id, '', pinned=True), origin.id)
        self.history = [self.o.everything()]

    def reload(self) -> None:
        """Restart: durable capsules come back, the others are gone."""
        kept = {n: c for n, c in self.model.capsules.items() if c.durable}
        self.o.close()
        self.open()
        self.model.capsules = kept
        infos = {c.name: c for c in self.o.session.list() if c.name != 'origin'}
        assert infos.keys() == kept.keys()
        for name, c in kept.items():
            c.pinned = False
            c.parent = infos[name].parent_id  # as it was when the file was written

    def name(self) -> str:
        """Return a name of few, so that it often exists."""
        return str(self.rng.choice(NAMES))

    def verb(self, verb: str) -> str:
        """Carry out one verb on both; return the code."""
        try:
            getattr(self, f'do_{verb}')()
            code = 'OK'
        except Refusal as error:
            code = error.code.name
        self.counts[f'{verb} {code}'] = self.counts.get(f'{verb} {code}', 0) + 1
        return code

    def _present_is(self, state: dict[str, bytes]) -> None:
        assert self.o.everything() == state
        self.history = [state]

    def do_tick(self) -> None:
        full = [b for b in self.o.session._live.journals
                if self.o.session._live.lengths[b.spec.length or ''] + 1 > b.spec.rows()[1]]
        if full:  # an episode ends where the KV cache does
            self.o.restore('origin')
            self.model.parent = self.model.origin.id
            self._present_is(self.model.origin.state)
        self.o.step(int(self.rng.integers(128)))
        self.history.append(self.o.everything())

    def do_step(self) -> None:
        self.o.session.host['owner.queue'][0] += 1
        self.o.session.commit_step()
        self.history.append(self.o.everything())

    def do_save(self, overwrite: bool = False) -> None:
        name = self.name()
        old = self.model.capsules.get(name)
        mark = old is not None and self._tier(name) is Tier.NONE
        pin = self.rng.random() < 0.2
        try:
            info = self.o.session.save(name, pin=pin, overwrite=overwrite)
        except Refusal as error:
            assert error.code in (Code.EXISTS, Code.BUDGET_EXCEEDED)
            assert (error.code is Code.EXISTS) == (old is not None and not mark
                                                   and not overwrite), str(error)
            raise
        assert old is None or overwrite or mark
        if old is not None:
            self.model.drop(name)
        self.model.capsules[name] = Saved(self.o.everything(), info.id, self.model.parent, pin)
        assert info.parent_id == self.model.parent
        self.model.parent = info.id

    def do_overwrite(self) -> None:
        self.do_save(overwrite=True)

    def _tier(self, name: str) -> Tier:
        return next(c.tier for c in self.o.session.list() if c.name == name)

    def _expect(self, name: str) -> Saved:
        """Return the capsule, or say which refusal must come."""
        saved = self.model.find(name)
        if saved is None:
            raise LookupError('NOT_FOUND')
        tier = self._tier(name)
        if tier is Tier.NONE:
            assert not saved.pinned
            raise LookupError('EVICTED')
        return saved

    def do_restore(self) -> None:
        name = self.name() if self.rng.random() < 0.9 else 'origin'
        self._restore(name)

    def _restore(self, name: str) -> None:
        s = self.o.session
        try:
            saved = self._expect(name)
        except LookupError as expected:
            with pytest.raises(Refusal) as error:
                s.plan_restore(name)
            assert error.value.code.name == str(expected)
            raise error.value from None
        epoch = s.epoch
        s.load(name).result(10)
        s.apply(s.plan_restore(name)).result(10)
        assert s.epoch == epoch + 1
        self.model.parent = saved.id
        self._present_is(saved.state)

    def do_rollback(self) -> None:
        n = int(self.rng.integers(1, 4))
        found = self.model.ancestor(n)
        s = self.o.session
        if found is None:
            with pytest.raises(Refusal) as error:
                s.plan_rollback(n)
            assert error.value.code is Code.NOTHING_TO_ROLL_BACK
            raise error.value
        if self._tier(found[0]) is Tier.DISK:
            s.load(found[0]).result(10)
        s.apply(s.plan_rollback(n)).result(10)
        self.model.parent = found[1].id
        self._present_is(found[1].state)

    def do_steps(self) -> None:
        n = int(self.rng.integers(1, 5))
        s = self.o.session
        plan = s.plan_rollback(steps=n, lock_step=True)
        if plan.capsule is not None:
            return  # a capsule of the lineage; do_rollback covers those
        s.apply(plan).result(10)
        assert n < len(self.history), 'further back than the present lineage goes'
        state = self.history[-1 - n]
        assert self.o.everything() == state
        del self.history[-n:]
        self.model.parent = s._parent

    def do_fork(self) -> None:
        name = self.name()
        saved = self._or_refused(name, self.o.session.fork)
        present = self.o.everything()
        self.o.session.load(name).result(10)
        fork = self.o.session.fork(name)
        inputs = self.o._inputs[int(self.rng.integers(128))]
        outputs = fork.tick(inputs)
        fork.close()
        again = self.o.session.fork(name)
        assert {k: v.tobytes() for k, v in again.tick(inputs).items()} == {
            k: v.tobytes() for k, v in outputs.items()}
        again.close()
        assert self.o.everything() == present
        assert saved is not None

    def _or_refused(self, name: str, call: object) -> Saved:
        try:
            return self._expect(name)
        except LookupError as expected:
            with pytest.raises(Refusal) as error:
                call(name)  # type: ignore[operator]
            assert error.value.code.name == str(expected)
            raise error.value from None

    def do_preview(self) -> None:
        name = self.name()
        self._or_refused(name, lambda n: self.o.session.preview(n, []))
        self.o.session.load(name).result(10)
        present = self.o.everything()
        self.o.session.preview(name, self.o._inputs[:3])
        assert self.o.everything() == present

    def do_drop(self) -> None:
        name = self.name()
        known = name in self.model.capsules
        try:
            self.o.session.drop(name)
        except Refusal as error:
            assert error.code is Code.NOT_FOUND
            assert not known
            raise
        assert known
        self.model.drop(name)

    def do_keep(self) -> None:
        name, pin = self.name(), bool(self.rng.integers(2))
        saved = self._or_refused(name, self.o.session.keep)
        self.o.session.keep(name, pin=pin)
        saved.pinned = pin

    def do_persist(self) -> None:
        name = self.name()
        saved = self._or_refused(name, self.o.session.persist)
        self.o.session.persist(name)
        saved.durable = True

    def do_load(self) -> None:
        name = self.name()
        self._or_refused(name, self.o.session.load)
        self.o.session.load(name).result(10)

    def check(self) -> None:
        """Budgets hold, and what must be there is."""
        s, o = self.o.session, self.o.session.options
        infos = {c.name: c for c in s.list()}
        assert infos.keys() - {'origin'} == self.model.capsules.keys()
        resident = [c for c in infos.values() if c.tier in (Tier.DEVICE, Tier.HOST)]
        assert len(resident) - 1 <= o.max_capsules
        assert s.usage().host <= o.host_bytes
        assert len(s._store.slots()) <= o.device_slots
        for name, c in self.model.capsules.items():
            assert infos[name].id == c.id
            assert infos[name].parent_id == c.parent
            assert not (c.pinned and infos[name].tier is Tier.NONE)


def walk(case: Case, folder: Path, seed: int, verbs: int) -> dict[str, int]:
    """Walk and check; return what happened how often."""
    o: Owner = case.session()
    n = o.session._live.plain.nbytes
    o.close()
    w = Walk(case, folder, seed, device_slots=2, host_bytes=2 * n, max_capsules=5)
    try:
        for i in range(verbs):
            w.verb(str(w.rng.choice(VERBS)))
            w.check()
            if i % 250 == 249:
                w.reload()
    finally:
        w.o.close()
    return w.counts


HOST_CASES = pytest.mark.parametrize('case', [c for c in CASES if c.name.startswith('host')],
                                     ids=lambda c: c.name)


@HOST_CASES
def test_p33_ten_thousand_random_verbs_against_the_model(case: Case, tmp_path: Path) -> None:
    counts = walk(case, tmp_path, 12345, 10_000)
    for verb in ('restore', 'rollback', 'steps', 'fork', 'preview', 'save', 'drop', 'persist',
                 'load'):
        assert counts.get(f'{verb} OK', 0) > 20, f'{verb} was hardly carried out: {counts}'
    assert sum(n for k, n in counts.items() if k.endswith('EVICTED')) > 20, counts


@pytest.mark.long
@pytest.mark.parametrize('seed', range(20))
@HOST_CASES
def test_p33_many_seeds(case: Case, tmp_path: Path, seed: int) -> None:
    walk(case, tmp_path, seed, 3_000)
