"""Torch captured on a real card: the suite's promises, equality with eager, and what is refused."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
import threading
from typing import Any

import numpy as np
import pytest

from flashrt_ros.backends import cuda_graph
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from flashrt_ros.core.session import Options, Session
from test.backends.gpu_programs import Small, asleep
from test.conformance.cases import Case
from test.conformance.checks import CHECKS
from test.gpu import cuda_device, cuda_torch
from test.shared_data import data

pytestmark = pytest.mark.gpu


@pytest.fixture
def torch(request):
    return cuda_torch(request)


@pytest.fixture
def card(request, torch):
    return cuda_device(request)


def micro(**changes: Any) -> Any:
    """Return a narrow decoder in BF16 with torch's attention kernel."""
    from flashrt_ros.backends.hybrid import decoder
    return decoder('small', **{'width': 128, 'pattern': 'LA', 'ffn': 256, 'mtp_ffn': 128,
                               'context': 512, 'prompt': 256, **changes})


def masked() -> Any:
    from flashrt_ros.backends.hybrid import decoder
    return decoder('tiny')


def noisy() -> Any:
    from flashrt_ros.backends.hybrid import flow
    return flow()


def policy(program: Any, **options: Any) -> Any:
    from flashrt_ros.backends.torch_program import ProgramPolicy
    return ProgramPolicy(program, **options)


@contextmanager
def session(program: Any, card: Any, *, exact: bool = True, generator: bool = False,
            **options: Any):
    s = Session(policy(program, exact=exact, generator=generator), card,
                options=Options(**{'threaded': False, 'exact': exact, **options}))
    try:
        yield s
    finally:
        s.close()


def restore(s: Session, name: str) -> None:
    s.apply(s.plan_restore(name)).result(60)


def g1(card: Any, path: Any) -> Any:
    from flashrt_ros.backends import torch_model
    from flashrt_ros.backends.spec import PolicySpec
    loaded, _ = torch_model.load(PolicySpec(model=path, model_root=path.parent,
                                            shapes={'x': (1, 47)}, options={'device': 'cuda'}))
    return loaded


PROGRAMS: dict[str, Callable[[], Any]] = {'decoder': micro, 'masked': masked, 'flow': noisy}
BEARING = {'decoder': ('recurrent', 'conv', 'kv', 'length', 'tail_tokens'),
           'masked': ('recurrent', 'conv', 'kv', 'length', 'tail_tokens'),
           'flow': ('memory', 'rng_key', 'rng_counter')}


@pytest.mark.parametrize('check', CHECKS.values(), ids=CHECKS.keys())
@pytest.mark.parametrize('name', PROGRAMS)
def test_promise(name, check, card):
    check(Case(name, lambda: (policy(PROGRAMS[name]()), card), BEARING[name]))


@pytest.mark.parametrize('check', [CHECKS['p1_every_byte_returns'],
                                   CHECKS['p2_the_future_is_the_same']], ids=lambda c: c.__name__)
def test_promise_of_the_g1(check, card):
    path = data('g1_lstm_walk', 'motion.pt')
    check(Case('g1', lambda: (g1(card, path), card), ('hidden_state', 'cell_state')))


def test_g1_equals_its_expected_actions(card):
    path = data('g1_lstm_walk', 'motion.pt')
    expected = np.load(path.parent / 'expected_200.npz')
    s = Session(g1(card, path), card, options=Options(threaded=False))
    name = next(n for n, b in s.layout.items() if b.role is Role.INPUT)
    out = next(n for n, b in s.layout.items() if b.role is Role.OUTPUT)
    got = [s.tick_now({name: obs.reshape(1, 47).astype(np.float32)})[out][0]
           for obs in expected['obs']]
    np.testing.assert_allclose(got, expected['actions'].reshape(-1, 12), atol=1e-4)
    s.close()


# -- captured equals eager ----------------------------------------------------------------


def drive(s: Session, n: int, prompt: int = 0) -> list[bytes]:
    """Feed seeded inputs; return all outputs."""
    rng = np.random.default_rng(5)
    out = []
    if prompt:
        s.inputs['prompt'][:prompt] = rng.integers(0, 32, prompt)
        s.inputs['prompt_length'][0] = prompt
        out.append(s.accept(s.submit(prefill=True)))
        s.commit_step()
    names = [b.name for b in s.layout.values() if b.role is Role.INPUT and b.low is not None]
    for _ in range(n):
        for name in names:
            s.inputs[name][...] = rng.uniform(-1, 1, s.inputs[name].shape)
        out.append(s.tick_now({}))
    return [b''.join(o[k].tobytes() for k in sorted(o)) for o in out]


@pytest.mark.parametrize('name', PROGRAMS)
def test_p22_captured_equals_eager_byte_for_byte(name, card, torch, monkeypatch):
    from flashrt_ros.backends import torch_cuda
    from flashrt_ros.backends.torch_program import EagerBound, EagerPrefillBound
    prompt = 0 if name == 'flow' else 100

    def eager(policy_, buffers, device):
        where = torch.device('cuda', 0)
        torch_cuda.prepare()
        policy_.place(where)
        tensors = {n: torch_cuda.device_tensor(b, where) for n, b in buffers.items()
                   if b.spec.space.name == 'DEVICE'}
        kind = EagerPrefillBound if prompt else EagerBound
        bound = kind(policy_, tensors)
        run = bound.run
        stream = torch.cuda.ExternalStream(device.stream_ptr)

        def on_stream(program):
            with torch.cuda.stream(stream):
                run(program)
        bound.run = on_stream
        return bound
    runs = []
    for how in ('captured', 'eager'):
        if how == 'eager':
            monkeypatch.setattr(torch_cuda, 'bind', eager)
        with session(PROGRAMS[name](), card) as s:
            runs.append(drive(s, 40, prompt))
    assert runs[0] == runs[1]


def test_attention_kernels_agree_with_the_masked_form(card, torch):
    from flashrt_ros.backends.hybrid import blocks
    torch.manual_seed(0)
    k, v = (torch.randn(3000, 2, 64, device='cuda', dtype=torch.bfloat16) for _ in range(2))
    for tokens, kernels in ((2, (blocks.attend_flash, blocks.attend_split)),
                            (64, (blocks.attend_flash,))):
        q = torch.randn(tokens, 8, 64, device='cuda', dtype=torch.bfloat16)
        for length in (0, 1, 511, 512, 513, 2500):
            at = torch.tensor([length], device='cuda')
            want = blocks.attend_masked(q.float(), k.float(), v.float(), at)
            for kernel in kernels:
                dirty = [x.clone() for x in (k, v)]
                for x in dirty:
                    x[length + tokens:] = float('nan')  # rows above the length are nobody's
                got = kernel(q, *dirty, at).float()
                assert float((got - want).norm() / want.norm()) < 1e-2, (kernel.__name__, length)


def test_prefill_on_the_card_agrees_with_the_host(card, torch):
    from flashrt_ros.backends.host import HostDevice
    hidden = []
    for device in (card, HostDevice()):
        s = Session(policy(masked()), device, options=Options(threaded=False, verify=False))
        drive(s, 0, 100)
        hidden.append(s._live.arena.read('tail_hidden').view(np.float32).copy())
        s.close()
    np.testing.assert_allclose(*hidden, atol=5e-2)  # TF32 products in the scan


# -- steady state -------------------------------------------------------------------------


def test_p17_steady_state_captures_binds_and_allocates_nothing(card, torch, monkeypatch):
    with session(micro(), card, device_slots=6) as s:
        drive(s, 8, 64)
        s.save('a')
        drive(s, 2)
        restore(s, 'a')
        addresses = {n: b.ptr for n, b in s._live.arena.buffers.items()}

        def never(*args, **kw):
            raise AssertionError('captured or allocated in steady state')
        monkeypatch.setattr(cuda_graph.CudaGraph, '__init__', never)
        monkeypatch.setattr(card, 'alloc', never)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()['allocation.all.allocated'], card.memory()[0]
        for i in range(20):
            drive(s, 3, 8)
            s.save(f's{i}')
            if i % 3 == 2:
                s.apply(s.plan_rollback(2)).result()
            restore(s, 'a')
            s.drop(f's{i}')
        torch.cuda.synchronize()
        after = torch.cuda.memory_stats()['allocation.all.allocated'], card.memory()[0]
        assert after == before
        assert {n: b.ptr for n, b in s._live.arena.buffers.items()} == addresses
        monkeypatch.undo()


def test_p10_save_answers_while_an_inference_runs_with_the_boundary_before_it(card):
    with session(asleep(400_000_000), card, threaded=True, verify=False) as s:   # about 0.2 s
        first = s.submit()
        assert first.wait(10)
        s.accept(first)
        s.commit_step()
        present = s.digest()
        running = s.submit()
        info = s.save('a')
        assert not running.done
        assert info.tick == 1
        assert running.wait(10)
        s.accept(running)
        s.commit_step()
        restore(s, 'a')
        assert s.digest() == present


def test_two_sessions_on_one_card_do_not_disturb_each_other(card, request):
    other = cuda_device(request)
    with session(micro(), card) as s:
        alone = drive(s, 30, 40)
    results: dict[int, list[bytes]] = {}

    def run(i: int, device: Any) -> None:
        with session(micro(), device) as s:
            results[i] = drive(s, 30, 40)
    threads = [threading.Thread(target=run, args=(i, d)) for i, d in enumerate((card, other))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {0: alone, 1: alone}


def test_poisoned_outputs_scratch_and_inputs_never_reach_a_result(card, torch):
    with session(micro(), card) as s:
        drive(s, 3, 60)
        s.save('a')
        want = drive(s, 10)
        restore(s, 'a')
        for name, b in s._live.arena.buffers.items():
            if b.spec.role is Role.OUTPUT:
                s._live.arena.write(name, np.full(b.spec.nbytes, 0xFF, np.uint8))
            if b.spec.is_journal:
                outer, rows, width = b.spec.rows()
                kept = s._live.arena.read(name).reshape(outer, rows, width)
                kept[:, s._live.lengths[b.spec.length]:] = 0xFF      # NaN in every type
                s._live.arena.write(name, kept.reshape(-1))
        s.inputs['prompt'][...] = -1
        # scratch: the pool that the graphs share, filled through a graph of its own
        for owner in s._live.bound._owners[:1]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=owner.pool()):
                poison = torch.full((1 << 20,), float('nan'), device='cuda')
            del poison
            graph.replay()
            torch.cuda.synchronize()
        assert drive(s, 10) == want


# -- what is refused ----------------------------------------------------------------------


@pytest.mark.parametrize(('f', 'code', 'words'), [
    (lambda torch, x: x + torch.randn(8, device='cuda'), Code.UNDECLARED_STATE,
     ['aten.randn', 'philox', 'options.generator: true']),
    (lambda torch, x: torch.nn.functional.dropout(x, 0.5), Code.UNDECLARED_STATE, ['draws from']),
    (lambda torch, x: x * x.sum().item(), Code.UNSUPPORTED, ['_local_scalar_dense', '.item()']),
    (lambda torch, x: x[x > 0].sum() + x, Code.UNSUPPORTED, ['nonzero|index', 'mask']),
    (lambda torch, x: x + torch.tensor([1.0] * 8).cuda(), Code.UNSUPPORTED, ['_to_copy|copy']),
    (lambda torch, x: torch.median(x.view(2, 4), dim=1)[0].sum() + x, Code.UNSUPPORTED,
     ['median', 'deterministic', 'exact: false']),
], ids=['randn', 'dropout', 'item', 'mask', 'from the host', 'not deterministic'])
def test_p20_what_cannot_be_captured_or_kept_is_refused_by_name(card, f, code, words):
    import re
    with pytest.raises(Refusal) as refused, session(Small(f), card):
        pass
    assert refused.value.code is code, refused.value
    for word in words:
        assert re.search(word, refused.value.message), (word, refused.value.message)
    with session(Small(), card) as s:       # the card works on
        drive(s, 3)


def test_operation_without_a_deterministic_form_runs_where_inexact_is_accepted(card):
    def f(torch, x):
        return torch.median(x.view(2, 4), dim=1)[0].sum() + x
    with session(Small(f), card, exact=False) as s:
        assert s.exact is False
        drive(s, 3)


def test_opted_in_generator_is_state_and_a_restore_repeats_it(card, torch):
    def f(torch, x):
        return torch.randn(8, device='cuda')
    mine = torch.cuda.get_rng_state()
    with session(Small(f), card, generator=True) as s:
        same = [np.zeros(8, np.float32)] * 6
        first = [s.tick_now({'x': x})['actions'].tobytes() for x in same]
        assert len(set(first)) == 6
        s.save('a')
        plain = [s.tick_now({'x': x})['actions'].tobytes() for x in same]
        torch.randn(100, device='cuda')     # somebody else draws
        restore(s, 'a')
        assert [s.tick_now({'x': x})['actions'].tobytes() for x in same] == plain
    torch.cuda.set_rng_state(mine)


def test_p8_a_capsule_of_another_architecture_is_refused_and_named(card, tmp_path):
    with session(noisy(), card, directory=tmp_path) as s:
        drive(s, 3)
        s.save('a', persist=True)
        want = drive(s, 3)

    class Other:
        """The same card under another name."""

        def __getattr__(self, name):
            return getattr(card, name)

        def identity(self):
            return {**card.identity(), 'cuda.arch': 'sm_110'}
    for device, refuses in ((Other(), True), (card, False)):
        with session(noisy(), device, directory=tmp_path) as s:
            s.load('a').result(30)
            if refuses:
                with pytest.raises(Refusal, match=r'cuda\.arch \(capsule sm_') as refused:
                    s.plan_restore('a')
                assert refused.value.code is Code.FINGERPRINT_MISMATCH
                s.apply(s.plan_restore('a', accept_inexact=True)).result()
                assert s.exact is False
            else:
                restore(s, 'a')
                drive_again = drive(s, 3)
                assert drive_again == want
