"""The policy file against the model: sizes, names, and what the refusal says."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.policy_file import check_ports
from flashrt_ros.ingest.ports import action_shape, port_sizes
from test.ingest.policies import ARM, changed, layout, load_data

OBS = 'inputs.obs'
IMAGE = {'term': 'image', 'topic': 'cam', 'size': [4, 6]}


def check(folder: Path, *edits: tuple[str, Any], **shapes: Any) -> None:
    check_ports(load_data(folder, changed(ARM, *edits), modules=('mine',)), layout(**shapes))


def test_a_policy_file_that_fits_is_accepted(tmp_path: Path) -> None:
    check(tmp_path)


WRONG: list[tuple[list[tuple[str, Any]], dict[str, Any], str]] = [
    ([], {'obs': (1, 17)}, "inputs.obs: its terms give 16 values (joint_position 3, joint_velocity "
     "3, projected_gravity 3, twist 2, last_action 3, phase 2), but the model's obs [1, 17] takes "
     '17; add, remove or correct a term'),
    ([('inputs', {'ob': ARM['inputs']['obs']})], {},
     'inputs.ob: is no input of the model; did you mean obs?'),
    ([('inputs', {}), ('joint_states', 'j')], {},
     'inputs.obs: is missing; the model reads obs [1, 16]: write its terms, or pair it with an '
     'output under policy.state'),
    ([('outputs.arm.port', ...)], {}, 'outputs.arm.port: the model has no output arm; known are '
     'actions'),
    ([('outputs.arm.port', 'h')], {}, 'outputs.arm.port: the model has no output h'),
    ([], {'actions': (1, 4)}, 'outputs.arm.joints: names 3, but the model gives 4 values (act'),
    ([], {'actions': (2, 4, 3)}, 'outputs.arm.port: actions has the shape [2, 4, 3]; actions are'),
    ([], {'dtype': 'F8_E4M3'},
     'outputs.arm.port: actions has the type F8_E4M3; let the model cast its actions to F32'),
    ([('outputs.arm.columns', [1, 4])], {}, 'outputs.arm.columns: end at 4, but actions [1, 3]'),
    ([(f'{OBS}.4.scale', [1.0, 2.0])], {},
     'inputs.obs[4].scale: has 2 numbers for the 3 values of last_action; write 3'),
    ([(f'{OBS}.5', {'term': 'history', 'length': 2, 'of': [
        {'term': 'last_action', 'offset': [1.0]}]})], {'obs': (1, 20)},
     'inputs.obs[5].of[0].offset: has 1 numbers for the 3 values of last_action'),
    ([('run', {'latency_steps': 4})], {'actions': (4, 3)},
     'run.latency_steps: is 4, but a chunk has 4 rows, so none would be left'),
    ([('run', {'latency_steps': 2, 'execute': 3})], {'actions': (4, 3)},
     'run.execute: is 3, which with latency_steps 2 needs more than the 4 rows of a chunk; write '
     'at most 2'),
    ([('run', {'blend': 'ensemble', 'ensemble_weight': -200})], {'actions': (4, 3)},
     'run.ensemble_weight: is -200, whose weights over 4 predictions no float holds'),
    ([('outputs.arm.type', 'std_msgs/msg/Float64MultiArray'), ('outputs.arm.kind', 'velocity'),
      ('outputs.arm.joints', ...), ('outputs.arm.start_tolerance', ...), ('outputs.arm.on_stop', {
          'do': 'zero'}), ('outputs.arm.offset', [1.0, 2.0])], {},
     'outputs.arm.offset: has 2 numbers for the 3 values of actions'),
    ([(f'{OBS}.5', {'term': 'array', 'topic': 'x'}),
      (f'{OBS}.2', {'term': 'array', 'topic': 'y'})], {},
     'inputs.obs: holds more than one term of unknown size (joint_position 3, joint_velocity 3, '
     'array ?, twist 2, last_action 3, array ?); write the length of all but one'),
    ([(f'{OBS}.5', {'term': 'array', 'topic': 'x', 'scale': [1.0, 2.0, 3.0]})], {},
     'inputs.obs[5].scale: has 3 numbers for the 2 values of array'),
    ([('inputs.cam', [IMAGE])], {}, 'inputs.cam: is no input of the model'),
]


@pytest.mark.parametrize(('edits', 'shapes', 'said'), WRONG, ids=[s[:50] for _, _, s in WRONG])
def test_what_does_not_fit_is_told_with_its_sizes(
        tmp_path: Path, edits: list[tuple[str, Any]], shapes: dict[str, Any], said: str) -> None:
    with pytest.raises(Refusal) as caught:
        check(tmp_path, *edits, **shapes)
    assert caught.value.code is Code.INVALID_POLICY_FILE
    assert f'walk.yaml: {said}' in caught.value.message


@pytest.mark.parametrize(('shape', 'rows', 'dim'), [
    ((3,), 1, 3), ((1, 3), 1, 3), ((1, 1, 3), 1, 3), ((4, 3), 4, 3), ((1, 4, 3), 4, 3),
    ((4, 1), 4, 1), ((1, 1), 1, 1)])
def test_actions_are_read_from_the_end_of_the_shape(
        tmp_path: Path, shape: tuple[int, ...], rows: int, dim: int) -> None:
    found = action_shape(load_data(tmp_path, ARM).outputs['arm'], layout(actions=shape))
    assert (found.rows, found.dim) == (rows, dim)


def test_outputs_share_a_port_by_columns_and_have_chunks_of_one_length(tmp_path: Path) -> None:
    gripper = {'topic': 'grip', 'type': 'control_msgs/action/GripperCommand', 'kind': 'position',
               'joints': ['finger'], 'start_tolerance': None, 'on_stop': {'do': 'none'},
               'port': 'actions', 'columns': [3, 4]}
    edits = [('outputs.arm.columns', [0, 3]), ('outputs.grip', gripper),
             (f'{OBS}.4', {'term': 'last_action', 'output': 'arm'})]
    check(tmp_path, *edits, actions=(8, 4))
    with pytest.raises(Refusal, match=r'outputs: have chunks of different lengths \(arm 8, grip 2'):
        check(tmp_path, *edits, ('outputs.grip.port', 'finger'), ('outputs.grip.columns', ...),
              actions=(8, 3), finger=(2, 1))
    with pytest.raises(Refusal, match=r'outputs\.grip\.joints: names 1, but the model gives 4'):
        check(tmp_path, *edits, ('outputs.grip.columns', ...), actions=(8, 4))


def test_one_term_of_unknown_size_takes_what_is_left(tmp_path: Path) -> None:
    own = {'term': 'mine:grip', 'topic': 'grip', 'type': 'a/msg/B'}
    pf = load_data(tmp_path, changed(ARM, (f'{OBS}.5', own)), modules=('mine',))
    assert port_sizes(pf.inputs['obs'], 20, {'arm': 3}) == [3, 3, 3, 2, 3, 6]
    assert port_sizes(pf.inputs['obs'], 14, {'arm': 3}) is None
    check_ports(pf, layout(obs=(1, 20)))


def test_sizes_of_all_terms(tmp_path: Path) -> None:
    terms: list[tuple[dict[str, Any], int]] = [
        ({'term': 'angular_velocity', 'topic': 'a'}, 3),
        ({'term': 'angular_velocity', 'topic': 'a', 'fields': ['z']}, 1),
        ({'term': 'orientation', 'topic': 'a'}, 4), ({'term': 'twist', 'topic': 'c'}, 6),
        ({'term': 'pose', 'topic': 'd'}, 7), ({'term': 'wrench', 'topic': 'e'}, 6),
        ({'term': 'joy', 'topic': 'f', 'fields': ['axes[0]', 'buttons[3]']}, 2),
        ({'term': 'array', 'topic': 'g', 'length': 5}, 5),
        (IMAGE, 72), ({**IMAGE, 'encoding': 'mono8'}, 24),
        ({'term': 'constant', 'value': [1, 2]}, 2), ({'term': 'constant', 'value': 1}, 1),
        ({'term': 'prompt', 'encode': 'bytes', 'length': 9}, 9), ({'term': 'last_action'}, 3),
        ({'term': 'prefix', 'length': 4}, 12), ({'term': 'prefix_rows'}, 1),
        ({'term': 'phase', 'period_s': 1}, 2), ({'term': 'counter'}, 1),
        ({'term': 'episode_start'}, 1),
        ({'term': 'joint_effort', 'topic': 'j', 'joints': ['a', 'b']}, 2),
        ({'term': 'history', 'length': 5, 'of': [{'term': 'phase', 'period_s': 1},
                                                 {'term': 'last_action'}]}, 25)]
    pf = load_data(tmp_path, changed(ARM, (OBS, [t for t, _ in terms]),
                                     ('joint_states', 'joint_states')))
    sizes = [n for _, n in terms]
    assert port_sizes(pf.inputs['obs'], sum(sizes), {'arm': 3}) == sizes
