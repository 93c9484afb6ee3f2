"""P8: what changes the meaning of a policy file, what only its exactness, and what neither."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from flashrt_ros.ingest.policy_file import exactness, load, meaning
from test.ingest.policies import ARM, changed, load_data, write

OBS = 'inputs.obs'


def both(folder: Path, data: Any, **options: Any) -> tuple[dict[str, str], dict[str, str]]:
    pf = load_data(folder, data, **options)
    return meaning(pf), exactness(pf)


def _reversed(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _reversed(node[key]) for key in reversed(node)}
    return [_reversed(item) for item in node] if isinstance(node, list) else node


COSMETIC: dict[str, list[tuple[str, Any]]] = {
    'note': [('note', 'walks better')],
    'topics': [(f'{OBS}.0.topic', '/robot/joint_states'), (f'{OBS}.2.topic', 'other_imu'),
               ('outputs.arm.topic', 'elsewhere')],
    'quality of service': [('qos', {'imu/data': {'reliable': True, 'depth': 3}})],
    'file of the model': [('policy.model', 'models/arm_v2.onnx')],
    'a default written out': [(f'{OBS}.1.offset', 0.0), (f'{OBS}.1.type',
                              'sensor_msgs/msg/JointState'), (f'{OBS}.1.max_age_s', 0.5),
                              ('run', {'start_at': 0, 'blend': 'latest'})],
    'one number for all, or a list': [(f'{OBS}.1.scale', [0.05, 0.05, 0.05]),
                                      ('outputs.arm.clip', [[-1.5] * 3, [1.5, 1.5, 1.5]]),
                                      ('outputs.arm.max_rate', [2, 2, 2])],
    'whole numbers': [('outputs.arm.max_rate', 2)],
    'minus zero': [(f'{OBS}.0.offset', [-0.1, -0.0, 0.2])],
    'constants': [('constants', {'pose': [0.1, 0.0, -0.2]}), ('outputs.arm.offset', 'pose')],
    'a port named as the output': [('outputs', {'actions': {**ARM['outputs']['arm'],
                                                            'port': 'actions'}})],
    'the only output named': [(f'{OBS}.4', {'term': 'last_action', 'output': 'arm'})],
    'when the robot may move': [
        ('run', {'autorun': True, 'trigger': {'input': ['imu/data']}, 'on_restore': 'continue',
                 'on_clock_jump': 'keep', 'persist_on': ['save'],
                 'max_tick_s': 0.4, 'min_rate': 0.8, 'on_slow': 'warn', 'exclusive': False,
                 'joint_sources': 'any'}),
        ('guard', {'witness': {'hip': {'max': 1.0}}}), ('enable', {'topic': 'enable'})],
    'where joints are measured': [('joint_states', 'more_joints')],
}


@pytest.mark.parametrize('name', COSMETIC)
def test_p8_cosmetic_changes_change_nothing(tmp_path: Path, name: str) -> None:
    base = ARM
    if name == 'a port named as the output':
        base = changed(ARM, ('outputs', {'actions': {
            k: v for k, v in ARM['outputs']['arm'].items() if k != 'port'}}))
    assert both(tmp_path, changed(base, *COSMETIC[name])) == both(tmp_path, base)


def test_p8_order_of_keys_comments_anchors_and_path_change_nothing(tmp_path: Path) -> None:
    before = both(tmp_path, ARM)
    assert both(tmp_path, _reversed(ARM)) == before
    (tmp_path / 'sub').mkdir()
    text = '# a comment\n' + yaml.dump(ARM, default_flow_style=True) + '# the end\n'
    pf = load(write(tmp_path / 'sub', text, 'other.yml'))
    assert (meaning(pf), exactness(pf)) == before


SEMANTIC: dict[str, tuple[list[tuple[str, Any]], set[str]]] = {
    'period': ([('policy.period_s', 0.01)], {'policy.period_s'}),
    'feedback': ([('policy.state', {'h_in': 'other'})], {'policy.state'}),
    'shapes': ([('policy.shapes', {'obs': [1, 40]})], {'policy.shapes'}),
    'scale': ([(f'{OBS}.1.scale', 0.1)], {'inputs.obs[1].scale'}),
    'offset': ([(f'{OBS}.0.offset', [-0.1, 0.0, 0.3])], {'inputs.obs[0].offset'}),
    'joints': ([(f'{OBS}.1.joints', ['knee', 'hip', 'ankle'])], {'inputs.obs[1].joints'}),
    'age limit': ([(f'{OBS}.0.max_age_s', 0.2)], {'inputs.obs[0].max_age_s'}),
    'fields': ([(f'{OBS}.3.fields', ['linear.x', 'linear.y'])], {'inputs.obs[3].fields'}),
    'latched': ([(f'{OBS}.3', {'term': 'twist', 'topic': 'cmd_vel', 'fields': [
        'linear.x', 'angular.z'], 'scale': [2.0, 0.25]})],
        {'inputs.obs[3].latched', 'inputs.obs[3].timeout_s', 'inputs.obs[3].on_timeout'}),
    'message type': ([(f'{OBS}.3.type', 'geometry_msgs/msg/TwistStamped')],
                     {'inputs.obs[3].type'}),
    'phase': ([(f'{OBS}.5.period_s', 0.9)], {'inputs.obs[5].period_s'}),
    'another term': ([(f'{OBS}.2.term', 'angular_velocity')], {'inputs.obs[2].term'}),
    'skew': ([('sync', {'max_skew_s': 0.1})], {'sync.max_skew_s'}),
    'execute': ([('run', {'execute': 4})], {'run.execute'}),
    'start_at': ([('run', {'start_at': 1})], {'run.start_at'}),
    'latency': ([('run', {'latency_steps': 1})], {'run.latency_steps'}),
    'blend': ([('run', {'blend': 'ensemble'})], {'run.blend'}),
    'soft start': ([('run', {'blend_s': 0.5})], {'run.blend_s'}),
    'interpolation': ([('run', {'publish_hz': 100})], {'run.publish_hz'}),
    'output scale': ([('outputs.arm.scale', 0.5)], {'outputs.arm.scale'}),
    'output type': ([('outputs.arm.type', 'trajectory_msgs/msg/JointTrajectory')],
                    {'outputs.arm.type'}),
    'clip': ([('outputs.arm.clip', [-1.5, 1.6])], {'outputs.arm.clip'}),
    'no clip': ([('outputs.arm.clip', ...)], {'outputs.arm.clip'}),
    'rate': ([('outputs.arm.max_rate', [2.0, 2.0, 3.0])], {'outputs.arm.max_rate'}),
    'tolerance': ([('outputs.arm.start_tolerance', None)], {'outputs.arm.start_tolerance'}),
    'stop': ([('outputs.arm.on_stop', {'do': 'none'})], {'outputs.arm.on_stop'}),
    'stop, within': ([('outputs.arm.on_stop', {'do': 'hold', 'repeat': True})],
                     {'outputs.arm.on_stop'}),
    'relative': ([('outputs.arm.relative', True)], {'outputs.arm.relative'}),
    'port': ([('outputs.arm.port', 'other')], {'outputs.arm.port'}),
}


@pytest.mark.parametrize('name', SEMANTIC)
def test_p8_a_semantic_change_changes_the_field_that_it_is(tmp_path: Path, name: str) -> None:
    edits, fields = SEMANTIC[name]
    before, exact = both(tmp_path, ARM)
    after, still_exact = both(tmp_path, changed(ARM, *edits))
    assert {k for k in before.keys() | after.keys() if before.get(k) != after.get(k)} == fields
    assert exact == still_exact


def test_p8_the_order_of_terms_and_a_history_within_are_meaning(tmp_path: Path) -> None:
    def history(*of: dict[str, Any], **more: Any) -> dict[str, Any]:
        return changed(ARM, (f'{OBS}.5', {'term': 'history', 'length': 3, 'of': list(of), **more}))
    counter, action = {'term': 'counter'}, {'term': 'last_action', 'scale': 0.5}
    found = [both(tmp_path, data)[0] for data in (
        history(counter, action), history(action, counter), history(counter),
        history(counter, {'term': 'last_action'}), history(counter, action, order='oldest_first'))]
    assert len({str(sorted(f.items())) for f in found}) == len(found)
    terms = ARM['inputs']['obs']
    swapped = changed(ARM, (OBS, [terms[1], terms[0], *terms[2:]]))
    assert both(tmp_path, swapped)[0] != both(tmp_path, ARM)[0]


def test_p8_backend_and_its_options_are_exactness_a_factorys_options_are_meaning(tmp_path: Path
                                                                                 ) -> None:
    before = both(tmp_path, ARM)
    for edit, field in ((('policy.backend', 'torch'), 'policy.backend'),
                        (('policy.options', {'threads': 2}), 'policy.options'),
                        (('policy.exact', False), 'policy.exact')):
        after = both(tmp_path, changed(ARM, edit))
        assert after[0] == before[0]
        fields = {*before[1], *after[1]}
        assert {k for k in fields if before[1].get(k) != after[1].get(k)} == {field}
    factory = {'backend': 'host', 'factory': 'flashrt_ros.demo:make', 'period_s': 0.02}
    one = both(tmp_path, changed(ARM, ('policy', {**factory, 'options': {'gain': 1}})))
    two = both(tmp_path, changed(ARM, ('policy', {**factory, 'options': {'gain': 2}})))
    assert one[1] == two[1]
    assert {k for k in one[0] if one[0][k] != two[0].get(k)} == {'policy.options'}


def test_values_are_text_that_a_person_can_compare(tmp_path: Path) -> None:
    found = both(tmp_path, ARM)[0]
    assert found['inputs.obs[1].scale'] == '0.05'
    assert found['inputs.obs[0].joints'] == '["hip","knee","ankle"]'
    assert found['outputs.arm.clip'] == '[-1.5,1.5]'
    assert found['outputs.arm.on_stop'] == '{"do":"hold"}'
