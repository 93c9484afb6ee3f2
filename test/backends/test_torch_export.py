"""torch.export programs: mutated buffers, fixed shapes, and no pickle whatever the file holds."""
from __future__ import annotations

import json
import os
from pathlib import Path
import pickle
import zipfile

import numpy as np
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from test.backends.live import Live

torch = pytest.importorskip('torch')
torch_export = pytest.importorskip('torch.export')


class Memory(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer('c', torch.zeros(1, 4))
        self.register_buffer('history', torch.zeros(3, 4))

    def forward(self, x):
        self.history.copy_(torch.roll(self.history, 1, 0))
        self.history[0].copy_(x[0])
        self.c.add_(x)
        return self.c + self.history.sum(0)


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.memory = Memory()
        self.cell = torch.nn.GRUCell(4, 4)
        self.register_buffer('scale', torch.ones(4))
        self.register_buffer('h', torch.zeros(1, 4))

    def forward(self, obs, n):
        self.h = self.cell(obs, self.h)
        x = obs.clone().mul_(2)
        y = torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))
        return {'actions': self.memory(y) + self.h * self.scale, 'count': n + 1}


class Noise(torch.nn.Module):
    def forward(self, obs):
        return obs + torch.rand_like(obs)


class Input(torch.nn.Module):
    def forward(self, obs):
        obs.add_(1)
        return obs * 1


OBS = (torch.zeros(1, 4),)


@pytest.fixture(scope='module')
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp('export') / 'policy.pt2'
    torch.manual_seed(0)
    program = torch.export.export(Policy().eval(), (*OBS, torch.zeros(1, dtype=torch.int64)))
    torch.export.save(program, path)
    return path


def live(path: Path, **spec) -> Live:
    return Live('torch', model=path, model_root=path.parent, **spec)


def refusal(path: Path, **spec) -> Refusal:
    with pytest.raises(Refusal) as e:
        live(path, **spec)
    return e.value


def xs(n: int = 8) -> list[dict]:
    rng = np.random.default_rng(4)
    return [{'obs': rng.normal(size=(1, 4)).astype(np.float32), 'n': i} for i in range(n)]


def test_p20_mutated_buffers_are_state_and_others_are_not(saved):
    layout = live(saved).layout
    assert {s.name for s in layout.select(Role.STATE)} == {'h', 'memory.c', 'memory.history'}
    assert (layout['n'].dtype, layout['obs'].shape) == ('I64', (1, 4))
    assert {s.name for s in layout.select(Role.OUTPUT)} == {'actions', 'count'}


def test_p22_outputs_are_those_of_the_bare_program_to_the_byte(saved):
    policy = live(saved)
    bare = torch.export.load(saved).module()
    for x in xs():
        with torch.no_grad():
            want = bare(torch.from_numpy(x['obs']), torch.tensor([x['n']]))
        assert policy.tick(**x)['actions'].tobytes() == want['actions'].numpy().tobytes()


def test_p1_state_put_back_repeats_the_outputs_to_the_byte(saved):
    policy = live(saved)
    policy.returns(xs(), at=3)
    before = policy.policy.hidden()
    policy.tick(**xs()[0])
    assert policy.policy.hidden() == before


@pytest.mark.parametrize(('module', 'code', 'words'), [
    (Noise, Code.UNSUPPORTED, 'aten::rand'), (Input, Code.UNSUPPORTED, 'input obs')])
def test_p20_what_no_capsule_can_hold_is_refused_by_name(tmp_path, module, code, words):
    path = tmp_path / 'policy.pt2'
    torch.export.save(torch.export.export(module(), OBS), path)
    e = refusal(path)
    assert words in e.message
    assert e.code is code


def test_dynamic_shapes_are_refused(tmp_path):
    path = tmp_path / 'policy.pt2'
    program = torch.export.export(torch.nn.Linear(4, 2), (torch.zeros(3, 4),),
                                  dynamic_shapes=({0: torch.export.Dim('batch')},))
    torch.export.save(program, path)
    assert 'dynamic shapes' in refusal(path).message


def rewritten(source: Path, target: Path, change) -> Path:
    """A copy of an archive whose entries went through `change(name, data)`."""
    with zipfile.ZipFile(source) as a, zipfile.ZipFile(target, 'w') as b:
        for name in a.namelist():
            b.writestr(name, change(name, a.read(name)))
    return target


class Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_a_pickle_among_the_sample_inputs_is_never_read(saved, tmp_path):
    marker = tmp_path / 'ran'
    payload = pickle.dumps(Evil(marker))
    path = rewritten(saved, tmp_path / 'evil.pt2',
                     lambda n, d: payload if 'sample_inputs' in n else d)
    live(path).tick(obs=1, n=1)
    assert not marker.exists()
    with pytest.raises(Exception):  # noqa: B017, PT011
        torch.export.load(path)
    assert marker.exists()  # what torch alone does with the same file


def config(**changes):
    def change(name: str, data: bytes) -> bytes:
        if name.endswith('weights_config.json'):
            found = json.loads(data)
            next(iter(found['config'].values())).update(changes)
            return json.dumps(found).encode()
        return data
    return change


def target(name: str):
    def change(entry: str, data: bytes) -> bytes:
        return data.replace(b'"torch.ops.aten.add.Tensor"', f'"{name}"'.encode()) if (
            '/models/' in entry) else data
    return change


@pytest.mark.parametrize(('change', 'words'), [
    (config(use_pickle=True), 'stored as a pickle'),
    (config(path_name='opaque_obj_0'), 'stored as a pickle or a custom object'),
    (target('torch.os.system'), "operation 'torch.os.system'"),
    (target('torch.ops.load_library'), 'torch.ops.load_library'),
    (lambda n, d: b'{' if '/models/' in n else d, 'is no JSON'),
])
def test_an_archive_that_would_run_code_is_refused(saved, tmp_path, change, words):
    assert words in refusal(rewritten(saved, tmp_path / 'evil.pt2', change)).message


def test_files_of_other_kinds_are_told_apart(saved, tmp_path):
    plain = tmp_path / 'checkpoint.pt'
    torch.save({'w': torch.zeros(2)}, plain)
    assert 'pickled checkpoint' in refusal(plain).message
    plain.write_bytes(b'not a zip')
    assert 'is no torch file' in refusal(plain).message
    with zipfile.ZipFile(plain, 'w') as z:
        z.writestr('a/b', b'')
    assert 'neither TorchScript nor' in refusal(plain).message
    assert 'policy.shapes.obs' in refusal(saved, shapes={'obs': (2, 4)}).message


def test_p8_any_byte_of_the_file_is_part_of_the_weights(saved, tmp_path):
    other = rewritten(saved, tmp_path / 'other.pt2',
                      lambda n, d: d + b' ' if '/models/' in n else d)
    assert live(saved).policy.identity()[0]['weights'] != live(other).policy.identity()[0][
        'weights']
