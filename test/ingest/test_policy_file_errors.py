"""What a wrong policy file is told: the place, the value, what to do."""
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.policy_file import load
from test.ingest.policies import ARM, changed, load_data, write

CMD = {'topic': 'cmd', 'type': 'geometry_msgs/msg/Twist', 'kind': 'twist',
       'fields': ['linear.x'], 'on_stop': {'do': 'zero'}}
OBS = 'inputs.obs'
TERM = f'{OBS}.1'        # joint_velocity
STEP = ('run', {'trigger': {'input': ['joint_states']}})
LAST = ('inputs.obs.4', {'term': 'last_action', 'output': 'arm'})

# (edits, what the message says)
WRONG: list[tuple[list[tuple[str, Any]], str]] = [
    # keys
    ([('polices', 1)], 'walk.yaml: polices: is no key of a policy file; did you mean policy?'),
    ([('outputs', ...)], 'walk.yaml: outputs: is missing; write it'),
    ([('outputs.arm.on_stopp', 1)],
     'outputs.arm.on_stopp: is no key of an output; did you mean on_stop?'),
    ([('policy.perod_s', 1)], 'policy.perod_s: is no key of policy; did you mean period_s?'),
    ([('run', {'start': 1})], 'run.start: is no key of run; did you mean start_at?'),
    ([('run', {'zzz': 1})], 'run.zzz: is no key of run; known are trigger, autorun'),
    ([(f'{TERM}.joint', [])], 'inputs.obs[1].joint: is no key of the term joint_velocity; did you '
     'mean joints?'),
    ([(f'{TERM}.period_s', 1.0)], 'inputs.obs[1].period_s: is no key of the term joint_velocity'),
    ([('outputs.arm.on_stop', {'do': 'hold', 'times': 1})],
     'outputs.arm.on_stop.times: is no key of on_stop; did you mean time_s?'),
    ([('guard', {'witness': {'hip': {'max': 1, 'force': True}}})],
     'guard.witness.hip.force: is no key of a witness; did you mean forceable?'),
    ([('sync', {'max_skew': 1})], 'sync.max_skew: is no key; did you mean max_skew_s?'),
    ([('enable', {'topic': 'e', 'max_age': 1})],
     'enable.max_age: is no key of enable; did you mean max_age_s?'),
    ([('qos', {'imu/data': {'reliabel': True}})],
     'qos.imu/data.reliabel: is no key of qos; did you mean reliable?'),
    # sections and types
    ([('policy', 3)], 'policy: is 3; write a mapping of keys to values'),
    ([('inputs', [1])], 'inputs: is [1]; write a mapping'),
    ([(OBS, {})], 'inputs.obs: is a mapping; write a list of mappings'),
    ([(OBS, [])], 'inputs.obs: is []; write a list of mappings'),
    ([(f'{OBS}.0', 'x')], "inputs.obs[0]: is 'x'; write a mapping in braces"),
    ([('outputs', {})], 'outputs: is a mapping; write at least one output'),
    ([('outputs', {'a b': CMD})], 'outputs.a b: is no name for an output'),
    ([('note', 3)], 'note: is 3; write text'),
    # numbers
    ([('policy.period_s', 'often')], "policy.period_s: is 'often'; write a finite number above 0"),
    ([('policy.period_s', True)], 'policy.period_s: is true; write a finite number above 0'),
    ([('policy.period_s', 0)], 'policy.period_s: is 0; write a finite number above 0'),
    ([('policy.period_s', None)], 'policy.period_s: is empty; write a finite number'),
    ([('policy.period_s', float('nan'))], 'policy.period_s: is nan; write a finite number'),
    ([('policy.period_s', float('inf'))], 'policy.period_s: is inf; write a finite number'),
    ([('policy.period_s', 10 ** 400)], 'write a finite number above 0'),
    ([(f'{OBS}.0.max_age_s', -1)], 'inputs.obs[0].max_age_s: is -1; write a finite number above'),
    ([(f'{TERM}.scale', True)], 'inputs.obs[1].scale: is true; write a finite number, a list'),
    ([(f'{TERM}.scale', [1, True, 2])], 'inputs.obs[1].scale[1]: is true; write a finite number'),
    ([(f'{TERM}.scale', [1, float('nan'), 2])], 'inputs.obs[1].scale[1]: is nan; write a finite'),
    ([(f'{TERM}.scale', [1.0, 2.0])],
     'inputs.obs[1].scale: has 2 numbers for 3 values; write 3, or one number for all'),
    ([(f'{TERM}.scale', [])], 'inputs.obs[1].scale: is []; write a finite number'),
    ([('constants', {'pose': [1.0]}), (f'{TERM}.offset', 'pos')],
     "inputs.obs[1].offset: is 'pos', which is no number and no name under constants; did you mean "
     'pose?'),
    ([(f'{TERM}.offset', 'pose')], 'no name under constants; none is known here'),
    ([('constants', {'pose': [1.0, 'x']})], "constants.pose[1]: is 'x'; write a finite number"),
    ([('constants', {'pose': True})], 'constants.pose: is true; write a finite number'),
    ([('constants', [1])], 'constants: is [1]; write names with numbers'),
    ([('run', {'start_at': -1})], 'run.start_at: is -1; write a whole number of at least 0'),
    ([('run', {'start_at': 1.5})], 'run.start_at: is 1.5; write a whole number'),
    ([('run', {'start_at': True})], 'run.start_at: is true; write a whole number'),
    ([('run', {'execute': 0})], 'run.execute: is 0; write a whole number of at least 1'),
    ([('run', {'autorun': 1})], 'run.autorun: is 1; write true or false'),
    # policy
    ([('policy.backend', 'onx')], "policy.backend: is 'onx'; did you mean onnx?"),
    ([('policy.model', ...)], 'policy.model: is missing; write model: FILE, or factory: module'),
    ([('policy.factory', 'flashrt_ros.demo:f')],
     'policy.model: stands beside factory; keep one'),
    ([('policy', {'backend': 'host', 'period_s': 1, 'model': 'x'})],
     'policy.model: is for other backends; host takes factory: module:function'),
    ([('policy', {'backend': 'onnx', 'period_s': 1, 'factory': 'flashrt_ros.demo:f'})],
     'policy.factory: is for host and torch; onnx takes model: FILE'),
    ([('policy', {'backend': 'host', 'period_s': 1, 'factory': 'demo'})],
     "policy.factory: is 'demo'; write module:function"),
    ([('policy', {'backend': 'host', 'period_s': 1, 'factory': 'os:system'})],
     'policy.factory: wants code from os, which may not supply code; add the module to '
     'python_modules (now: flashrt_ros.backends.reference'),
    ([('policy.model', '/etc/passwd')], "policy.model: is '/etc/passwd'; write a path below"),
    ([('policy.model', '../x.onnx')], "policy.model: is '../x.onnx'; write a path below"),
    ([('policy.model', 'a/../../x.onnx')], 'write a path below model_root, without ..'),
    ([('policy.model', 'a\0b')], 'write a path below model_root'),
    ([('policy.model', 3)], 'policy.model: is 3; write text'),
    ([('policy.state', {'h_in': 1})], 'policy.state.h_in: is 1; write text'),
    ([('policy.state', {'a': 'h', 'b': 'h'})], 'policy.state: feeds h into two inputs'),
    ([('policy.shapes', {'obs': [1, -2]})], 'policy.shapes.obs: is [1, -2]; write a list of whole'),
    ([('policy.options', {'a': [1.0, float('inf')]})], 'policy.options: holds a number that is n'),
    # run
    ([('run', {'trigger': 'tick'})], "run.trigger: is 'tick'; write timer, or {input: [topics"),
    ([('run', {'trigger': {'input': ['imu/dat']}})],
     "run.trigger.input: holds 'imu/dat', which no term reads; did you mean imu/data?"),
    ([('run', {'trigger': {'input': []}})], 'run.trigger.input: is []; write a list of names'),
    ([('run', {'trigger': {}})], 'run.trigger.input: is missing; write it, the topics'),
    ([('run', {'trigger': {'input': ['imu/data', 'imu/data']}})],
     'run.trigger.input: holds imu/data twice; remove one'),
    ([('run', {'trigger': {'topics': ['imu/data']}})], 'run.trigger.topics: is no key of trigger'),
    ([('run', {'on_restore': 'continue'})], 'run.on_restore: is continue, which would move a live '
     'robot by itself; it needs lock step'),
    ([('run', {'on_restore': 'go'})], "run.on_restore: is 'go'; known are hold, continue"),
    ([('run', {'ensemble_weight': 0.1})], 'run.ensemble_weight: has no effect with blend: latest'),
    ([('run', {'blend': 'ensembles'})], "run.blend: is 'ensembles'; did you mean ensemble?"),
    ([('run', {'publish_hz': 120})], 'run.publish_hz: is 120, which gives 2.4 values per step of '
     '0.02 s; write a whole multiple of 50'),
    ([('run', {'publish_hz': 20})], 'run.publish_hz: is 20, which gives 0.4 values per step'),
    ([('run', {'trigger': {'input': ['imu/data']}, 'publish_hz': 100})],
     'run.publish_hz: needs a clock between steps, which lock step has not'),
    ([('run', {'min_rate': 1.5})], 'run.min_rate: is 1.5; it is a share'),
    ([('run', {'persist_on': ['saves']})], "run.persist_on: holds 'saves'; did you mean save?"),
    # terms
    ([(f'{TERM}.term', 'joint_velocty')],
     "inputs.obs[1].term: is 'joint_velocty', which is not built in; did you mean joint_velocity?"),
    ([(f'{TERM}.term', ...)], 'inputs.obs[1].term: is missing; write it, one of joint_position'),
    ([(f'{TERM}.term', 'os:system')], 'inputs.obs[1].term: wants code from os, which may not'),
    ([(f'{TERM}.term', 'a:b:c')], "inputs.obs[1].term: is 'a:b:c'; write module:function"),
    ([(f'{TERM}.topic', ...)], 'inputs.obs[1].topic: is missing; write it, joint_velocity needs'),
    ([(f'{TERM}.joints', ...)], 'inputs.obs[1].joints: is missing; write it'),
    ([(f'{TERM}.joints', ['a', 'b', 'a'])], 'inputs.obs[1].joints: holds a twice; remove one'),
    ([(f'{TERM}.joints', ['a', 1, 'b'])], "inputs.obs[1].joints: is ['a', 1, 'b']; write a list"),
    ([(f'{TERM}.joints', 'hip')], "inputs.obs[1].joints: is 'hip'; write a list of names"),
    ([(f'{TERM}.topic', 'joint states')], "inputs.obs[1].topic: is 'joint states'; write a topic"),
    ([(f'{TERM}.type', 'JointState')], "inputs.obs[1].type: is 'JointState'; write it whole"),
    ([(f'{TERM}.type', 'sensor_msgs/msg/Imu')],
     "inputs.obs[1].type: is 'sensor_msgs/msg/Imu'; joint_velocity reads sensor_msgs/msg/JointSt"),
    ([(f'{OBS}.3.fields', ['linear.x', 'angular.w'])],
     "inputs.obs[3].fields: holds 'angular.w', which twist does not have; did you mean angular."),
    ([(f'{OBS}.3.timeout_s', ...)], 'inputs.obs[3].on_timeout: has no timeout_s beside it'),
    ([(f'{OBS}.3.latched', False)], 'inputs.obs[3].timeout_s: is for latched inputs; write max_a'),
    ([(f'{OBS}.3.max_age_s', 1.0)], 'inputs.obs[3].max_age_s: stands beside latched: true'),
    ([(f'{OBS}.3.on_timeout', 'hold')], "inputs.obs[3].on_timeout: is 'hold'; known are stop, ze"),
    ([(f'{OBS}.5.period_s', ...)], 'inputs.obs[5].period_s: is missing; write it, phase needs it'),
    ([(f'{OBS}.5', {'term': 'history', 'length': 2})], 'inputs.obs[5].of: is missing'),
    ([(f'{OBS}.5', {'term': 'history', 'of': [{'term': 'counter'}]})],
     'inputs.obs[5].length: is missing'),
    ([(f'{OBS}.5', {'term': 'history', 'length': 2, 'of': [
        {'term': 'history', 'length': 1, 'of': [{'term': 'counter'}]}]})],
     'inputs.obs[5].of[0].term: is a history within a history; list its terms themselves'),
    ([(f'{OBS}.5', {'term': 'history', 'length': 2, 'order': 'newest', 'of': [{'term': 'counter'}]}
       )], "inputs.obs[5].order: is 'newest'; did you mean newest_first?"),
    ([(f'{OBS}.5', {'term': 'history', 'length': 2, 'of': [{'term': 'phase'}]})],
     'inputs.obs[5].of[0].period_s: is missing'),
    ([(f'{OBS}.5', {'term': 'constant'})], 'inputs.obs[5].value: is missing'),
    ([(f'{OBS}.5', {'term': 'constant', 'value': [1, 2], 'scale': [1, 2, 3]})],
     'inputs.obs[5].scale: has 3 numbers for 2 values'),
    ([(f'{OBS}.5', {'term': 'prompt', 'length': 3, 'encode': 'json:loads'})],
     'inputs.obs[5].encode: wants code from json'),
    ([(f'{OBS}.5', {'term': 'last_action', 'output': 'leg'})],
     "inputs.obs[5].output: is 'leg', which is no output; known are arm"),
    ([('outputs.cmd', CMD)], 'inputs.obs[4].output: is missing; say which of arm, cmd'),
    ([(f'{OBS}.5', {'term': 'image', 'topic': 'cam', 'encoding': 'rgb'})],
     "inputs.obs[5].encoding: is 'rgb'; did you mean rgb8?"),
    ([(f'{OBS}.5', {'term': 'image', 'topic': 'cam', 'size': [1, 2, 3]})],
     'inputs.obs[5].size: is [1, 2, 3]; write a list of 2 whole numbers'),
    ([(f'{OBS}.5', {'term': 'image', 'topic': 'cam', 'crop': [0, 0, 0, 5]})],
     'inputs.obs[5].crop: is [0, 0, 0, 5]; write [top, left, height, width]'),
    ([(f'{OBS}.5', {'term': 'image', 'topic': 'cam', 'scale': [1, 2]})],
     'inputs.obs[5].scale: has 2 numbers for 3 values'),
    ([(f'{OBS}.5', {'term': 'array', 'topic': 'x', 'field': 'a b'})],
     "inputs.obs[5].field: is 'a b'; write a path such as data"),
    # outputs
    ([('outputs.arm.kind', 'positions')], "outputs.arm.kind: is 'positions'; did you mean positi"),
    ([('outputs.arm.type', 'sensor_msgs/msg/JointStates')],
     "outputs.arm.type: is 'sensor_msgs/msg/JointStates'; did you mean sensor_msgs/msg/JointState"),
    ([('outputs.arm.kind', 'twist')], 'outputs.arm.kind: is twist, which JointState cannot carry'),
    ([('outputs.arm.joints', ...)], 'outputs.arm.joints: is missing; JointState with kind positi'),
    ([('outputs.arm.offset', [1.0])], 'outputs.arm.offset: has 1 numbers for 3 values'),
    ([('outputs.arm.clip', [1.0])], 'outputs.arm.clip: is [1.0]; write [low, high]'),
    ([('outputs.arm.clip', [1.0, -1.0])], 'outputs.arm.clip: is [1.0, -1.0]; write [low, high] w'),
    ([('outputs.arm.clip', [[0, 0, 2], 1.0])], 'with low not above high'),
    ([('outputs.arm.clip', [[0, 0], 1.0])], 'outputs.arm.clip.low: has 2 numbers for 3 values'),
    ([('outputs.arm.max_rate', 0.0)], 'outputs.arm.max_rate: is 0.0; write numbers above 0'),
    ([('outputs.arm.max_rate', [1, 2, -3])], 'outputs.arm.max_rate: is [1, 2, -3]; write numbers'),
    ([('outputs.arm.start_tolerance', ...)],
     'outputs.arm.start_tolerance: is missing; write how far the first row may be from the'),
    ([('outputs.arm.start_tolerance', -0.1)], 'outputs.arm.start_tolerance: is -0.1; write a'),
    ([('outputs.arm.on_stop', ...)],
     'outputs.arm.on_stop: is missing; write what is sent when motion ends: {do: hold} or {do:'),
    ([('outputs.arm.on_stop', 'hold')], "outputs.arm.on_stop: is 'hold'; write a mapping"),
    ([('outputs.arm.on_stop', {})], 'outputs.arm.on_stop.do: is missing; write it, one of hold,'),
    ([('outputs.arm.on_stop', {'do': 'zero'})],
     'outputs.arm.on_stop.do: is zero, but kind is position: position 0 is a place far away'),
    ([('outputs.arm.on_stop', {'do': 'none', 'repeat': True})],
     'outputs.arm.on_stop.repeat: stands beside do: none, which sends nothing'),
    ([('outputs.arm.on_stop', {'do': 'hold', 'time_s': 0})], 'outputs.arm.on_stop.time_s: is 0;'),
    ([('outputs.cmd', {**CMD, 'on_stop': {'do': 'hold'}}), LAST],
     'outputs.cmd.on_stop.do: is hold, but kind is twist: only a position can be held'),
    ([('outputs.cmd', {k: v for k, v in CMD.items() if k != 'fields'}), LAST],
     'outputs.cmd.fields: is missing; Twist needs the components'),
    ([('outputs.cmd', {**CMD, 'joints': ['a']}), LAST],
     'outputs.cmd.joints: stands in an output of Twist, which has no joints'),
    ([('outputs.cmd', {**CMD, 'topic': 'arm/command'}), LAST],
     'outputs.cmd.topic: is also the topic of output arm'),
    ([('outputs.cmd', {**CMD, 'start_tolerance': 0.1}), LAST],
     'outputs.cmd.start_tolerance: is for positions, kind is twist; remove it'),
    ([('outputs.cmd', {**CMD, 'relative': True}), LAST],
     'outputs.cmd.relative: adds measured positions, kind is twist; remove it'),
    ([('outputs.arm.time_s', 1.0)], 'outputs.arm.time_s: is for trajectories; remove it'),
    ([('outputs.arm.chunk_as_trajectory', True)],
     'outputs.arm.chunk_as_trajectory: is for trajectories; remove it'),
    ([('outputs.arm.relative', True), ('outputs.arm.scale', 0.0)],
     'outputs.arm.scale: holds 0 beside relative: true'),
    ([('outputs.arm.columns', [3, 3])], 'outputs.arm.columns: is [3, 3]; write [first, one past'),
    ([('outputs.arm.columns', [0, 2]), ('outputs.arm.scale', 1.0), ('outputs.arm.offset', 0.0)],
     'outputs.arm.joints: names 3 joints for columns [0, 2]'),
    ([('outputs.arm.type', 'control_msgs/action/GripperCommand')],
     'outputs.arm.joints: names 3 joints; GripperCommand moves 1'),
    ([(OBS, [{'term': 'counter'}])], 'outputs.arm.joints: are never measured, but start_tolerance '
     'needs them; write joint_states: TOPIC'),
    ([(OBS, [{'term': 'counter'}]), ('outputs.arm.start_tolerance', None)],
     'are never measured, but on_stop needs them'),
    # the rest
    ([('guard', {'witness': {'joint_positon': {'max': 1}}})],
     'guard.witness.joint_positon: is neither a measured term of inputs nor a joint; did you mean '
     'joint_position?'),
    ([('guard', {'witness': {'joint_position.hips': {'max': 1}}})],
     'did you mean joint_position.hip?'),
    ([('guard', {'witness': {'hip': {}}})], 'guard.witness.hip.max: is missing; write it, how far'),
    ([('guard', {'witness': {'hip': 0.2}})], 'guard.witness.hip: is 0.2; write a mapping'),
    ([('guard', {'on_moved': 'ask'})], "guard.on_moved: is 'ask'; known are refuse, warn"),
    ([('guard', {'max_age_s': -1})], 'guard.max_age_s: is -1; write a finite number above 0'),
    ([('enable', {})], 'enable.topic: is missing; write it'),
    ([('qos', {'imu/dat': {}})], 'qos.imu/dat: is no topic of inputs, outputs or enable; did you '
     'mean imu/data?'),
    ([('qos', {'imu/data': {'depth': 0}})], 'qos.imu/data.depth: is 0; write a whole number of at'),
]


@pytest.mark.parametrize(('edits', 'said'), WRONG, ids=[said[:60] for _, said in WRONG])
def test_a_wrong_file_is_told_where_what_and_what_to_do(
        tmp_path: Path, edits: list[tuple[str, Any]], said: str) -> None:
    data = changed(ARM, *edits)
    with pytest.raises(Refusal) as caught:
        load_data(tmp_path, data)
    assert caught.value.code is Code.INVALID_POLICY_FILE
    assert said in caught.value.message
    for line in caught.value.details['errors']:
        assert line.startswith('walk.yaml: ')
    own = [line for line in caught.value.details['errors'] if said in line]
    assert own
    assert ';' in own[0], 'says what to do'


def test_the_unchanged_file_is_accepted(tmp_path: Path) -> None:
    load_data(tmp_path, ARM)
    load_data(tmp_path, changed(ARM, STEP, ('outputs.cmd', CMD), LAST))


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    data = changed(ARM, ('policy.period_s', -1), (f'{TERM}.scale', 'x'), (f'{TERM}.jonts', 1),
                   ('outputs.arm.on_stop', ...))
    with pytest.raises(Refusal) as caught:
        load_data(tmp_path, data)
    assert len(caught.value.details['errors']) == 4
    assert len(caught.value.message.splitlines()) == 4


def test_a_file_of_many_errors_stays_readable(tmp_path: Path) -> None:
    data = changed(ARM, *((f'junk{i}', i) for i in range(50)))
    with pytest.raises(Refusal) as caught:
        load_data(tmp_path, data)
    lines = caught.value.message.splitlines()
    assert lines[-1] == 'and 38 more'
    assert len(lines) == 13
    assert len(caught.value.details['errors']) == 50


@pytest.mark.parametrize('word', ['yes', 'on', 'true', '1', '2026-01-01', 'null', '2.5'])
def test_a_joint_that_yaml_reads_as_something_else_must_be_quoted(tmp_path: Path, word: str
                                                                  ) -> None:
    text = write(tmp_path, ARM).read_text().replace('- knee', f'- {word}')
    with pytest.raises(Refusal, match='quotes'):
        load(write(tmp_path, text))
    load(write(tmp_path, text.replace(f'- {word}\n', f"- '{word}'\n")))


def test_joints_may_be_measured_by_a_topic_of_their_own(tmp_path: Path) -> None:
    data = changed(ARM, (OBS, [{'term': 'counter'}]), ('joint_states', 'joint_states'))
    assert load_data(tmp_path, data).joint_states == 'joint_states'


def test_a_walking_policy_needs_no_measured_joints(tmp_path: Path) -> None:
    data = changed(ARM, (OBS, [{'term': 'counter'}]), ('outputs.arm.start_tolerance', None),
                   ('outputs.arm.on_stop', {'do': 'none'}), ('outputs.arm.max_rate', ...))
    load_data(tmp_path, data)
    with pytest.raises(Refusal, match='are never measured, but blend_s needs them'):
        load_data(tmp_path, changed(data, ('run', {'blend_s': 0.5})))
    with pytest.raises(Refusal, match='are never measured, but max_rate needs them'):
        load_data(tmp_path, changed(data, ('outputs.arm.max_rate', 1.0)))
    with pytest.raises(Refusal, match='are never measured, but relative needs them'):
        load_data(tmp_path, changed(data, ('outputs.arm.relative', True)))


def test_a_witness_may_be_a_joint_that_no_term_reads(tmp_path: Path) -> None:
    data = changed(ARM, ('guard', {'witness': {'finger': {'max': 0.01}, 'projected_gravity': {
        'max': 0.1}, 'joint_position.knee': {'max': 0.2}}}))
    assert set(load_data(tmp_path, data).guard.witness) == {
        'finger', 'projected_gravity', 'joint_position.knee'}
