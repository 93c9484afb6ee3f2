"""The hybrid decoder in a session: journals shared, prompt capsules, every promise of the suite."""
from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip('torch', reason='needs a CPU build of torch')

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.hybrid import decoder, flow
from flashrt_ros.backends.torch_program import ProgramPolicy
from flashrt_ros.core.session import Options, Session
from test.conformance import test_mutants
from test.conformance.cases import Case
from test.conformance.checks import CHECKS

PROMPT = np.random.default_rng(1).integers(0, 32, 128).astype(np.int32)
CASES = [Case('hybrid', lambda: (ProgramPolicy(decoder('tiny')), HostDevice()),
              ('recurrent', 'conv', 'kv', 'length', 'tail_tokens')),
         Case('flow', lambda: (ProgramPolicy(flow()), HostDevice()),
              ('memory', 'rng_key', 'rng_counter'))]


@pytest.fixture(autouse=True)
def _one_thread():
    import torch
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize('check', CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_promise(case, check):
    check(case)


@pytest.mark.parametrize(('mutant', 'check'), test_mutants.MUTANTS,
                         ids=[m.__name__ for m, _ in test_mutants.MUTANTS])
@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_p3_mutant_is_killed(case, mutant, check):
    test_mutants.test_p3_mutant_is_killed(case, mutant, check)


@pytest.mark.parametrize('case', CASES, ids=lambda c: c.name)
def test_p3_each_load_bearing_buffer_left_out_shows_in_the_outputs(case):
    test_mutants.test_p3_each_load_bearing_buffer_left_out_shows_in_the_outputs(case)


@pytest.fixture
def session():
    s = Session(ProgramPolicy(decoder('tiny')), HostDevice(),
                options=Options(threaded=False, verify=False))
    yield s
    s.close()


def prefill(s: Session, tokens: np.ndarray) -> list[int]:
    s.inputs['prompt'][:len(tokens)] = tokens
    s.inputs['prompt_length'][0] = len(tokens)
    out = s.accept(s.submit(prefill=True))
    s.commit_step()
    return [int(t) for t in out['tokens'] if t >= 0]


def decode(s: Session, n: int, observation: float = 0.2) -> list[int]:
    said: list[int] = []
    while len(said) < n:
        out = s.tick_now({'observation': np.full(6, observation, np.float32)})
        said += [int(t) for t in out['tokens'] if t >= 0]
    return said


def restore(s: Session, name: str) -> None:
    s.apply(s.plan_restore(name)).result()


def test_a_prompt_capsule_stands_for_prefill(session):
    prefill(session, PROMPT[:96])
    session.save('prompt')
    cold = prefill(session, PROMPT[96:112]) + decode(session, 40)
    # another prompt of the same length in the live set, then the prompt's capsule
    session.apply(session.plan_reset()).result()
    prefill(session, PROMPT[::-1][:96].copy())
    decode(session, 5)
    restore(session, 'prompt')
    assert prefill(session, PROMPT[96:112]) + decode(session, 40) == cold


def rows_of(s: Session, name: str) -> int:
    """Return how many journal rows of `kv` a capsule copied for itself."""
    capsule = next(c for c in s._store if c.name == name)
    others = {id(p.segment) for c in s._store if c is not capsule and c.boundary is not None
              for p in c.boundary.pieces.get('kv', ())}
    return sum(p.last - p.first for p in capsule.boundary.pieces['kv']
               if id(p.segment) not in others)


def test_a_save_copies_only_the_rows_that_its_ancestor_lacks(session):
    prefill(session, PROMPT[:64])
    session.save('a')
    assert rows_of(session, 'a') == 64
    said = 0
    lengths = {}
    for name, n in (('b', 8), ('c', 24)):
        before = int(session._live.lengths['length'])
        decode(session, n)
        said += n
        session.save(name)
        lengths[name] = int(session._live.lengths['length']) - before
        assert rows_of(session, name) == lengths[name]


def test_rollback_along_the_live_lineage_moves_no_journal_rows(session):
    prefill(session, PROMPT[:64])
    session.save('a')
    decode(session, 32)
    moved = []
    load = session._live.load
    session._live.load = lambda *a: moved.append(load(*a)) or moved[-1]
    session.apply(session.plan_rollback()).result()
    assert moved == [session._live.plain.nbytes]


def test_prefill_appends_so_a_prompt_is_restored_again_without_copying_it(session):
    prefill(session, PROMPT[:64])
    session.save('prompt')
    moved = []
    load = session._live.load
    session._live.load = lambda *a: moved.append(load(*a)) or moved[-1]
    for i in range(3):
        prefill(session, PROMPT[64 + i:80 + i])
        decode(session, 4)
        restore(session, 'prompt')
    assert moved == [session._live.plain.nbytes] * 3
