"""The conformance suite on the tensorrt backend: on the double anywhere, for real with a card.

`pytest -m tensorrt` runs the second half and fails, rather than skips, where TensorRT or a card
that it runs on is missing.
"""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
import tempfile
from typing import Any

import numpy as np
import pytest

from flashrt_ros import backends
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from flashrt_ros.core.session import Options, Session
from test.backends.tensorrt_double import STATE, on_double
from test.conformance.cases import Case
from test.conformance.checks import CHECKS, owner, refused
from test.conformance.small_onnx import write_gru
from test.conformance.test_mutants import MUTANTS
from test.shared_data import data


def small_on_card() -> Any:
    """Load a model of a few hundred bytes, which needs no files from elsewhere."""
    root = Path(tempfile.mkdtemp(prefix='flashrt-trt-'))
    write_gru(root / 'gru.onnx')
    return backends.load('tensorrt', PolicySpec(root / 'gru.onnx', model_root=root,
                                                state={'h_in': 'h_out'}))


def on_card(path: str, state: dict[str, str]) -> Callable[[], Any]:
    """Return a loader of a real policy, built and run by the TensorRT of this machine."""
    def make() -> Any:
        model = data(*path.split('/'))
        return backends.load('tensorrt', PolicySpec(model, model_root=model.parent, state=state))
    return make


STATES = tuple(STATE)
DOUBLES = [Case('captured', on_double('tensorrt'), STATES),
           Case('captured-rtx', on_double('tensorrt_rtx'), STATES),
           Case('uncaptured', on_double('tensorrt', capturable=False), STATES)]
CARDS = [Case('small-gru', small_on_card, ('h_in',)),
         Case('g1-lstm', on_card('g1_lstm_walk/g1_lstm.onnx', {'h_in': 'h_out', 'c_in': 'c_out'}),
              ('h_in', 'c_in')),
         Case('raptor-gru', on_card('raptor_gru_quadrotor/raptor_gru.onnx', {'h_in': 'h_out'}),
              ('h_in',)),
         Case('pickplace-gru', on_card('pickplace_gru_chunk4/pickplace_gru_chunk4.onnx',
                                       {'h_in': 'h_out'}), ('h_in',))]
Check = Callable[[Case], None]


def p17_nothing_is_bound_or_allocated_in_steady_state(case: Case) -> None:
    """P17: ticks, saves and restores make no context, no graph and no device memory."""
    with owner(case, Session) as o:
        o.run(3)
        o.session.save('a')
        o.restore('a')
        bound = o.session._live.bound
        graph, context = bound._graph, bound._context
        o.run(2)
        before = o.session.device.memory()[0]
        for i in range(20):
            o.run(3)
            o.session.save(f'c{i % 3}', overwrite=True)
            o.restore('a')
        assert (bound._graph, bound._context) == (graph, context)
        assert o.session.device.memory()[0] >= before


def p21_what_is_reported_is_done(case: Case) -> None:
    """P21: a save's bytes are there when it answers, a restore's when its future is done."""
    with owner(case, Session, threaded=True) as o:
        o.run(4)
        o.session.save('a')
        saved = o.everything()
        for _ in range(5):
            o.run(3)
            o.restore('a')
            assert o.everything() == saved


def p3_mutants_are_killed(case: Case) -> None:
    """P3: sessions that are wrong in one way each are noticed on this backend, too."""
    for mutant, check in MUTANTS:
        try:
            CHECKS[check](case, mutant)
        except AssertionError:
            continue
        pytest.fail(f'{mutant.__name__} was not noticed by {check}')


def p8_another_build_of_the_engine_is_refused_unless_asked_for(case: Case) -> None:
    """P8, P13: a capsule returns after a restart; to another engine only with accept_inexact."""
    with tempfile.TemporaryDirectory() as folder:
        o = case.session(directory=Path(folder))
        o.run(4)
        o.session.save('a', persist=True)
        saved, never = o.everything(), o.run(5)
        o.close()
        o = case.session(directory=Path(folder))
        o.session.load('a').result(60)
        o.restore('a')
        assert o.everything() == saved
        assert o.run(5) == never
        o.close()
        o = case.session(directory=Path(folder), exactness={'engine': 'another'})
        o.session.load('a').result(60)
        error = refused(Code.FINGERPRINT_MISMATCH, o.session.plan_restore, 'a')
        assert 'engine' in error.message
        assert not o.session.apply(o.session.plan_restore('a', accept_inexact=True)).result().exact
        o.close()


ALL: dict[str, Check] = {**CHECKS, **{f.__name__: f for f in (
    p3_mutants_are_killed, p8_another_build_of_the_engine_is_refused_unless_asked_for,
    p17_nothing_is_bound_or_allocated_in_steady_state, p21_what_is_reported_is_done)}}


@pytest.mark.parametrize('check', ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize('case', DOUBLES, ids=lambda c: c.name)
def test_promise_on_the_double(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.parametrize('missing', STATES)
def test_p3_every_piece_of_state_is_load_bearing(missing: str) -> None:
    """A capsule that lacks one of the fed back tensors does not give the same future."""
    with owner(DOUBLES[0], Session) as o:
        o.run(3)
        o.session.save('a')
        future = o.run(4)
        kept = o.session._live.arena.read(missing)
        o.restore('a')
        o.session._live.arena.write(missing, kept)
        assert o.run(4) != future


@pytest.fixture(scope='module')
def card(request: pytest.FixtureRequest) -> None:
    """Skip without TensorRT and a card that it runs on; fail where the mark asked for them."""
    try:
        policy, device = CARDS[0].load()
    except Refusal as e:
        if 'tensorrt' in (request.config.getoption('-m') or '').replace('not tensorrt', ''):
            pytest.fail(f'needs TensorRT and a card that it runs on: {e.message}')
        pytest.skip(f'needs TensorRT and a card that it runs on: {e.message}')
    policy.close()
    device.close()


@pytest.mark.tensorrt
@pytest.mark.usefixtures('card')
@pytest.mark.parametrize('check', ALL.values(), ids=ALL.keys())
@pytest.mark.parametrize('case', CARDS, ids=lambda c: c.name)
def test_promise_on_the_card(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.tensorrt
@pytest.mark.usefixtures('card')
def test_p22_the_g1_on_the_card_is_the_g1_of_onnx_runtime() -> None:
    """The recorded walk, open loop: actions within 1e-4 of ONNX Runtime's on a CPU."""
    expected = np.load(data('g1_lstm_walk', 'expected_200_onnx.npz'))
    policy, device = CARDS[1].load()
    session = Session(policy, device, options=Options(threaded=False))
    try:
        name = next(s.name for s in session.layout.values() if s.role is Role.OUTPUT)
        for obs, want in zip(expected['obs'], expected['actions'], strict=True):
            got = session.tick_now({'obs': obs})[name]
            np.testing.assert_allclose(got.reshape(-1), want.reshape(-1), atol=1e-4)
    finally:
        session.close()
