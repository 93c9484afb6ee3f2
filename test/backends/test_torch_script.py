"""TorchScript: state found in the graph, whatever way it is written; the rest refused by name."""
from __future__ import annotations

from pathlib import Path
from typing import Optional

import numpy as np
import pytest

from flashrt_ros.backends.aliases import parse_schema
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from test.backends.live import Live

torch = pytest.importorskip('torch')
pytestmark = pytest.mark.filterwarnings('ignore:.*torch.jit:DeprecationWarning')


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('h', torch.zeros(2, 4))
        self.register_buffer('k', torch.ones(4))
        self.w = torch.nn.Parameter(torch.full((4,), 0.5))


class Assigned(Base):
    def forward(self, obs):
        self.h = torch.tanh(self.h * self.w + obs) * self.k
        return self.h[:1]


class ThroughViews(Base):
    def forward(self, obs):
        row = self.h[0]
        column = row.view(2, 2).select(0, 1)
        column.add_(obs[0, :2])
        return obs + self.h[:1] * self.w


class InBranch(Base):
    def forward(self, obs):
        if bool(obs.sum() > 0):
            target = self.h[0]
        else:
            target = self.h[1]
        target.mul_(0.5).add_(obs[0])
        return self.h.sum(0, keepdim=True)


class InLoop(Base):
    def forward(self, obs):
        x = self.k
        for i in range(2):
            x = self.h[i]
            x.add_(obs[0] + i)
        return self.h.sum(0, keepdim=True)


class InList(Base):
    def forward(self, obs):
        for row in [self.h[0], self.h[1]]:
            row.add_(obs[0])
        return self.h[:1] + obs


class Helper(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('m', torch.zeros(1, 4))

    def push(self, x):
        self.m.copy_(0.5 * self.m + x)
        return self.m

    def forward(self, x):
        return self.push(x) * 2


class InSubmodule(Base):
    def __init__(self):
        super().__init__()
        self.helper = Helper()

    def forward(self, obs):
        return self.helper(obs)


class Counter(Base):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, obs):
        self.n += 1
        return obs + self.n


class Listed(Base):
    def __init__(self):
        super().__init__()
        self.seen = [torch.zeros(1, 4)]

    def forward(self, obs):
        self.seen.append(obs)
        return obs + len(self.seen)


class Maybe(Base):
    def __init__(self):
        super().__init__()
        self.last = None

    def forward(self, obs):
        last = self.last
        out = obs if last is None else obs - last
        self.last = obs
        return out


Maybe.__annotations__ = {'last': Optional[torch.Tensor]}  # noqa: UP045  no strings


class Random(Base):
    def forward(self, obs):
        return obs + torch.randn_like(obs)


class RandomInTraining(Base):
    def forward(self, obs):
        if self.training and bool(obs.sum() > -1e9):
            obs = obs + torch.randn_like(obs)
        if not self.training:
            return obs * 2 + self.h[:1]
        return obs + torch.rand_like(obs)


class Input(Base):
    def forward(self, obs):
        obs.add_(1)
        return obs * 1


def script(folder: Path, module: torch.nn.Module) -> Path:
    path = folder / 'policy.pt'
    torch.jit.script(module).save(str(path))
    return path


def live(folder: Path, module: torch.nn.Module, **spec) -> Live:
    return Live('torch', model=script(folder, module), model_root=folder,
                **{'shapes': {'obs': (1, 4)}, **spec})


def xs(n: int = 9) -> list[dict]:
    rng = np.random.default_rng(4)
    return [{'obs': rng.normal(size=(1, 4)).astype(np.float32)} for _ in range(n)]


FOUND = [(Assigned, {'h'}), (ThroughViews, {'h'}), (InBranch, {'h'}), (InLoop, {'h', 'k'}),
         (InList, {'h'}), (InSubmodule, {'helper.m'})]


@pytest.mark.parametrize(('kind', 'names'), FOUND)
def test_p20_state_is_found_however_it_is_written(tmp_path, kind, names):
    policy = live(tmp_path, kind())
    found = {s.name for s in policy.layout.select(Role.STATE)}
    # a value that may come from two attributes counts as both (InLoop's k)
    assert found in (names, names - {'k'})


@pytest.mark.parametrize('kind', [k for k, _ in FOUND])
def test_p22_outputs_are_those_of_the_bare_module_to_the_byte(tmp_path, kind):
    policy = live(tmp_path, kind())
    bare = torch.jit.load(str(tmp_path / 'policy.pt')).eval()
    for x in xs():
        with torch.no_grad():
            want = bare(torch.from_numpy(x['obs'])).numpy()
        assert policy.tick(**x)['actions'].tobytes() == want.tobytes()


@pytest.mark.parametrize('kind', [k for k, _ in FOUND])
def test_p1_state_put_back_repeats_the_outputs_to_the_byte(tmp_path, kind):
    policy = live(tmp_path, kind())
    policy.returns(xs(), at=4)
    before = policy.policy.hidden()
    policy.tick(**xs()[0])
    assert policy.policy.hidden() == before


@pytest.mark.parametrize(('kind', 'code', 'words'), [
    (Counter, Code.UNDECLARED_STATE, 'attribute n (Int) is changed by forward'),
    (Listed, Code.UNDECLARED_STATE, 'attribute seen (List) is changed by forward'),
    (Maybe, Code.UNDECLARED_STATE, 'attribute last'),
    (Random, Code.UNSUPPORTED, 'aten::randn_like'),
    (Input, Code.UNSUPPORTED, 'input obs'),
])
def test_p20_what_no_buffer_can_hold_is_refused_by_name(tmp_path, kind, code, words):
    with pytest.raises(Refusal) as e:
        live(tmp_path, kind())
    assert words in e.value.message
    assert e.value.code is code


def test_random_operations_of_the_training_branch_do_not_count(tmp_path):
    policy = live(tmp_path, RandomInTraining().train())
    assert (policy.tick(obs=1)['actions'] == 2).all()


def test_a_traced_module_works_and_holds_no_state(tmp_path):
    traced = torch.jit.trace(torch.nn.Linear(4, 2), torch.zeros(1, 4))
    traced.save(str(tmp_path / 'policy.pt'))
    policy = Live('torch', model=Path('policy.pt'), model_root=tmp_path,
                  shapes={'input': (1, 4)})
    assert [s.role for s in policy.layout.values()] == [Role.INPUT, Role.OUTPUT]


def test_p20_a_pair_that_nobody_declared_is_refused(tmp_path):
    class Pair(torch.nn.Module):
        def forward(self, obs, h_in):
            h = torch.tanh(obs + h_in)
            return h * 2, h

    shapes = {'obs': (1, 4), 'h_in': (1, 4)}
    with pytest.raises(Refusal, match='input h_in looks like state that output output_1'):
        live(tmp_path, Pair(), shapes=shapes)
    policy = live(tmp_path, Pair(), shapes=shapes, state={'h_in': 'h'},
                  options={'outputs': ['actions', 'h']})
    policy.returns(xs(), at=3)


@pytest.mark.parametrize(('spec', 'words'), [
    ({'shapes': {}}, 'input obs has no shape'),
    ({'options': {'declare': {'h': {'kind': 'tensor'}}}}, 'is for factories'),
    ({'shapes': {'obs': (1, 5)}}, 'RuntimeError for obs F32 [1, 5]'),
])
def test_what_is_wrong_in_the_policy_file_is_said(tmp_path, spec, words):
    with pytest.raises(Refusal) as e:
        live(tmp_path, Assigned(), **spec)
    assert words in e.value.message


def test_p8_any_byte_of_the_file_is_part_of_the_weights(tmp_path):
    first = live(tmp_path, Assigned()).policy.identity()[0]['weights']
    other = Assigned()
    other.w.data[0] += 1e-7
    assert live(tmp_path, other).policy.identity()[0]['weights'] != first


@pytest.mark.parametrize(('text', 'written', 'shares'), [
    ('aten::add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor', [0, 0, 0], False),
    ('aten::copy_(Tensor(a!) self, Tensor src, bool b=False) -> Tensor(a!)', [1, 0, 0], True),
    ('aten::slice.Tensor(Tensor(a) self, int dim=0) -> Tensor(a)', [0, 0], True),
    ('aten::lstm.input(Tensor input, Tensor[] hx) -> (Tensor, Tensor, Tensor)', [0, 0], False),
    ('aten::append.t(t[](a!) self, t(c -> *) el) -> t[](a!)', [1, 0], True),
    ('aten::split.Tensor(Tensor(a -> *) self, int n) -> Tensor(a)[]', [0, 0], True),
])
def test_schemas_say_what_is_written_and_shared(text, written, shares):
    arguments, shared = parse_schema(text)
    assert [int(a.written) for a in arguments] == written
    assert shared is shares
