"""The policy file as people write it: what every key becomes."""
from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role
from flashrt_ros.ingest import spec
from flashrt_ros.ingest.policy_file import check_ports, load, model_path
from test.ingest.policies import ARM, changed, load_data, write

EVERYTHING = """
note: every key of the format once, none at its default
constants:
  pose: [0.1, -0.2]
  gain: 0.25
policy:
  backend: torch
  factory: my_policies.arm:make
  period_s: 0.1
  state: {h_in: h_out}
  shapes: {obs: [1, 40]}
  options: {layers: [1, 2], name: small, deep: {x: true}}
  exact: false
run:
  trigger: timer
  autorun: true
  on_clock_jump: keep
  start_at: 3
  latency_steps: 2
  execute: 4
  blend: ensemble
  ensemble_weight: 1e-1
  publish_hz: 50
  blend_s: 1
  persist_on: [save, goal_end]
  max_tick_s: 0.4
  min_rate: 0.8
  on_slow: catch_up
  exclusive: false
  joint_sources: any
inputs:
  obs:
    - {term: joint_position, topic: joint_states, joints: &j [shoulder, elbow], offset: pose,
       scale: gain, max_age_s: 1}
    - {term: twist, topic: cmd, type: geometry_msgs/msg/TwistStamped, fields: [linear.x],
       latched: true, timeout_s: 0.5, on_timeout: zero}
    - {term: array, topic: force, type: std_msgs/msg/Float64MultiArray, field: data, length: 3}
    - term: history
      of: [{term: joint_velocity, topic: joint_states, joints: *j}]
      length: 4
      order: oldest_first
    - {term: constant, value: [1, 2.5]}
    - {term: prompt, encode: bytes, length: 8, topic: prompt}
    - {term: last_action, output: arm}
    - {term: phase, period_s: 0.8}
    - {term: my_policies.terms:grip, topic: grip, type: my_msgs/msg/Grip, options: {finger: 1}}
  image:
    - {term: image, topic: cam/image_raw, size: [224, 160], crop: [0, 8, 480, 480], layout: CHW,
       encoding: 32FC1, scale: 1e-3, resize: area, fill: 9}
joint_states: other_joints
sync: {max_skew_s: 0.05}
enable: {topic: policy_enable, max_age_s: 0.25}
outputs:
  arm:
    topic: arm/joint_trajectory
    type: trajectory_msgs/msg/JointTrajectory
    kind: position
    joints: *j
    scale: gain
    offset: pose
    clip: [[-1, -2], pose]
    max_rate: [1, 2]
    start_tolerance: 0.1
    relative: true
    on_stop: {do: hold, time_s: 0.4, repeat: true}
    time_s: 0.2
    chunk_as_trajectory: true
    columns: [0, 2]
    port: actions
    frame_id: base
    shared: true
  base:
    topic: cmd_vel
    type: geometry_msgs/msg/TwistStamped
    kind: twist
    fields: [linear.x, angular.z]
    on_stop: {do: zero}
guard:
  witness: {joint_position: {max: 0.2, forceable: true}, elbow: {max: 0.05}}
  max_age_s: 60
  on_moved: warn
qos:
  cmd: {reliable: true, depth: 5}
"""


WALK = """
policy: {backend: onnx, model: walk.onnx, period_s: 0.02, state: {h_in: h_out, c_in: c_out}}
run: {trigger: timer, autorun: false}
constants: {default_pose: [-0.1, 0.3]}
inputs:
  obs:
    - {term: angular_velocity, topic: imu/data, scale: 0.25}
    - {term: projected_gravity, topic: imu/data}
    - {term: twist, topic: cmd_vel, fields: [linear.x, linear.y, angular.z],
       scale: [2.0, 2.0, 0.25], latched: true, timeout_s: 0.5, on_timeout: zero}
    - {term: joint_position, topic: joint_states, joints: &legs [left_hip, left_knee],
       offset: [-0.1, 0.3], max_age_s: 0.1}
    - {term: joint_velocity, topic: joint_states, joints: *legs, scale: 0.05}
    - {term: last_action}            # the policy's raw output
    - {term: phase, period_s: 0.8}
sync: {max_skew_s: 0.05}
enable: {topic: policy_enable, max_age_s: 0.5}
outputs:
  actions: {topic: arm_controller/joint_trajectory, type: trajectory_msgs/msg/JointTrajectory,
            kind: position, joints: *legs, scale: 0.25, offset: default_pose, clip: [-1, 1],
            max_rate: 2.0, start_tolerance: 0.1, on_stop: {do: hold, time_s: 0.2}}
guard: {witness: {joint_position: {max: 0.2, forceable: true}, finger: {max: 0.005}},
        max_age_s: 60, on_moved: refuse}
"""


def test_a_walking_policy_as_people_write_it(tmp_path: Path) -> None:
    pf = load(write(tmp_path, WALK))
    assert pf.outputs['actions'].offset == (-0.1, 0.3)
    check_ports(pf, {
        'obs': BufferSpec('obs', (1, 17), 'F32', Role.INPUT),
        'actions': BufferSpec('actions', (1, 2), 'F32', Role.OUTPUT)})


@pytest.fixture(name='everything')
def everything_fixture(tmp_path: Path) -> spec.PolicyFile:
    return load(write(tmp_path, EVERYTHING), modules=('my_policies',))


def test_every_key_of_the_format_can_be_written(everything: spec.PolicyFile) -> None:
    """A field of spec.py that no YAML reaches is a promise that nobody can use."""
    seen: dict[type, set[str]] = {}

    def walk(item: Any) -> None:
        if hasattr(item, '__dataclass_fields__'):
            for field in fields(item):
                value = getattr(item, field.name)
                default = (field.default_factory() if field.default_factory is not MISSING
                           else field.default)
                if value != default:
                    seen.setdefault(type(item), set()).add(field.name)
                walk(value)
        elif isinstance(item, dict):
            for value in item.values():
                walk(value)
        elif isinstance(item, tuple):
            for value in item:
                walk(value)

    walk(everything)
    only_elsewhere = {'model', 'trigger', 'on_restore'}     # excluded by factory and publish_hz
    for kind, names in seen.items():
        assert {f.name for f in fields(kind)} - names <= only_elsewhere, kind.__name__
    assert {spec.ModelSpec, spec.RunSpec, spec.TermSpec, spec.OutputSpec, spec.OnStop,
            spec.EnableSpec, spec.GuardSpec, spec.WitnessLimit, spec.QosSpec} <= set(seen)


def test_values_arrive_in_their_place(everything: spec.PolicyFile) -> None:
    position, twist, force, history, constant, prompt, action, phase, own = everything.inputs['obs']
    assert (position.joints, position.offset, position.scale) == (
        ('shoulder', 'elbow'), (0.1, -0.2), 0.25)
    assert position.path == 'inputs.obs[0]'
    assert (position.type, position.max_age_s) == ('sensor_msgs/msg/JointState', 1.0)
    assert (twist.type, twist.on_timeout) == ('geometry_msgs/msg/TwistStamped', 'zero')
    assert (force.field, force.length) == ('data', 3)
    assert history.of[0].path == 'inputs.obs[3].of[0]'
    assert (history.of[0].joints, history.length) == (('shoulder', 'elbow'), 4)
    assert constant.value == (1.0, 2.5)
    assert (prompt.encode, prompt.length, action.output, phase.period_s) == ('bytes', 8, 'arm', 0.8)
    assert (own.term, own.function, own.options) == (
        'my_policies.terms:grip', 'my_policies.terms:grip', {'finger': 1})
    image = everything.inputs['image'][0]
    assert (image.size, image.crop, image.layout, image.scale) == (
        (224, 160), (0, 8, 480, 480), 'CHW', 0.001)
    arm, base = everything.outputs['arm'], everything.outputs['base']
    assert arm.clip == ((-1.0, -2.0), (0.1, -0.2))
    assert arm.on_stop == spec.OnStop('hold', 0.4, True)
    assert (arm.columns, arm.port, base.port, base.fields) == (
        (0, 2), 'actions', None, ('linear.x', 'angular.z'))
    assert everything.guard.witness['joint_position'] == spec.WitnessLimit(0.2, True)
    assert everything.qos['cmd'] == spec.QosSpec(True, 5)
    assert everything.policy.options['deep'] == {'x': True}


def test_a_message_type_that_is_not_written_is_the_terms_usual_one(tmp_path: Path) -> None:
    data = changed(ARM, ('inputs.camera', [{'term': 'image', 'topic': 'cam/image_raw/compressed'}]))
    assert load_data(tmp_path, data).inputs['camera'][0].type == 'sensor_msgs/msg/CompressedImage'


def test_lock_step_is_a_list_of_topics(tmp_path: Path) -> None:
    data = changed(ARM, ('run', {'trigger': {'input': ['joint_states', 'imu/data']},
                                 'on_restore': 'continue'}))
    run = load_data(tmp_path, data).run
    assert run.lock_step
    assert run.trigger == ('joint_states', 'imu/data')
    assert run.on_restore == 'continue'
    assert not load_data(tmp_path, ARM).run.lock_step


@pytest.mark.parametrize(('text', 'value'), [
    ('1', 1.0), ('1e-3', 0.001), ('-2E+2', -200.0), ('.5', 0.5), ('[1, 2, 3e0]', (1.0, 2.0, 3.0))])
def test_1_and_1e_3_are_numbers(tmp_path: Path, text: str, value: object) -> None:
    written = write(tmp_path, ARM).read_text().replace('scale: 0.05', f'scale: {text}')
    assert load(write(tmp_path, written)).inputs['obs'][1].scale == value


def test_merge_keys_work_and_a_key_that_is_written_wins(tmp_path: Path) -> None:
    text = write(tmp_path, ARM).read_text() + """
constants: {a: 1.0}
guard:
  witness:
    hip: &limit {max: 0.5, forceable: true}
    knee: &tight {<<: *limit, max: 0.1}
    ankle: {<<: [*tight, *limit]}
"""
    witness = load(write(tmp_path, text)).guard.witness
    assert witness['knee'] == spec.WitnessLimit(0.1, True)
    assert witness['ankle'] == spec.WitnessLimit(0.1, True), 'of several bases the first one wins'


def test_null_turns_the_start_rule_off_but_it_must_be_written(tmp_path: Path) -> None:
    data = changed(ARM, ('outputs.arm.start_tolerance', None))
    assert load_data(tmp_path, data).outputs['arm'].start_tolerance is None
    with pytest.raises(Refusal, match=r'outputs\.arm\.start_tolerance: is missing'):
        load_data(tmp_path, changed(ARM, ('outputs.arm.start_tolerance', ...)))


def test_only_raw_has_a_default_stop(tmp_path: Path) -> None:
    raw = {'topic': 'a', 'type': 'std_msgs/msg/Float32MultiArray', 'kind': 'raw'}
    assert load_data(tmp_path, changed(ARM, ('outputs', {'a': raw}))).outputs['a'].on_stop.do == (
        'none')
    for kind in ('position', 'velocity', 'effort'):
        output = {**raw, 'kind': kind, 'joints': ['hip'], **(
            {'start_tolerance': None} if kind == 'position' else {})}
        with pytest.raises(Refusal, match=r'outputs\.a\.on_stop: is missing; write what is sent'):
            load_data(tmp_path, changed(ARM, ('outputs', {'a': output}),
                                        ('inputs.obs.4', {'term': 'counter'})))


def test_a_corrected_file_loads_after_a_refusal(tmp_path: Path) -> None:
    with pytest.raises(Refusal):
        load_data(tmp_path, changed(ARM, ('policy.period_s', 'often')))
    assert load_data(tmp_path, ARM).policy.period_s == 0.02


def test_model_lies_below_model_root_and_is_checked_again_when_it_is_loaded(tmp_path: Path
                                                                            ) -> None:
    root = tmp_path / 'models'
    root.mkdir()
    path = write(tmp_path, ARM)
    pf = load(path, model_root=root)                  # it need not exist yet
    with pytest.raises(Refusal, match='does not exist; correct the path or model_root'):
        model_path(pf, root)
    (root / 'arm.onnx').write_bytes(b'weights')
    assert model_path(pf, root) == (root / 'arm.onnx').resolve()
    secret = tmp_path / 'secret'
    secret.write_bytes(b'secret')
    (root / 'arm.onnx').unlink()
    (root / 'arm.onnx').symlink_to(secret)
    with pytest.raises(Refusal, match='which a link leads out of') as caught:
        model_path(pf, root)
    assert caught.value.code is Code.INVALID_POLICY_FILE
    with pytest.raises(Refusal, match='which a link leads out of'):
        load(path, model_root=root)


def test_model_root_is_the_folder_of_the_file_unless_given(tmp_path: Path) -> None:
    (tmp_path / 'arm.onnx').write_bytes(b'weights')
    assert model_path(load_data(tmp_path, ARM)) == (tmp_path / 'arm.onnx').resolve()


def test_a_link_within_model_root_is_fine(tmp_path: Path) -> None:
    (tmp_path / 'v2.onnx').write_bytes(b'weights')
    (tmp_path / 'arm.onnx').symlink_to('v2.onnx')
    assert model_path(load_data(tmp_path, ARM)) == (tmp_path / 'v2.onnx').resolve()


def test_a_factory_has_no_model_path(tmp_path: Path) -> None:
    data = changed(ARM, ('policy', {'backend': 'host', 'period_s': 0.1,
                                    'factory': 'flashrt_ros.backends.reference:recurrent'}))
    assert model_path(load_data(tmp_path, data)) is None


def test_code_comes_from_allowed_modules_and_what_lies_below_them(tmp_path: Path) -> None:
    data = changed(ARM, ('policy', {'backend': 'host', 'period_s': 0.1, 'factory': 'mine.a:make'}))
    for modules in (('mine',), ('mine.a',), ('other', 'mine')):
        assert load_data(tmp_path, data, modules=modules).policy.factory == 'mine.a:make'
    for modules in ((), ('min',), ('mine.a.b',), ('mine.ab',)):
        with pytest.raises(Refusal, match=r'policy\.factory: wants code from mine\.a'):
            load_data(tmp_path, data, modules=modules)
