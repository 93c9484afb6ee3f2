"""The lifecycle: failures say why, can be mended, and leave the node alive."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState

from flashrt_ros.core.errors import Code
from flashrt_ros.msg import PolicyStatus
from test.node.harness import LATCHED, POLICIES, Probe, Served

Serve = Callable[..., Served]


class Lifecycle:
    """What `ros2 lifecycle` does."""

    def __init__(self, probe: Probe, node: Served) -> None:
        self._probe = probe
        self._change = probe.service(ChangeState, f'{node.name}/change_state')
        self._get = probe.service(GetState, f'{node.name}/get_state')

    def change(self, number: int) -> bool:
        request = ChangeState.Request(transition=Transition(id=number))
        return bool(self._probe.call(lambda: self._change.call_async(request)).success)

    @property
    def state(self) -> str:
        answer = self._probe.call(lambda: self._get.call_async(GetState.Request()))
        return str(answer.current_state.label)


def test_a_bad_path_fails_with_its_name_and_works_once_the_file_is_there(
        probe: Probe, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / 'late.yaml'
    node = serve(path, activate=False)
    lifecycle = Lifecycle(probe, node)
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    assert not lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert lifecycle.state == 'unconfigured'
    said = status.wait(lambda m: 'late.yaml' in m.last_refusal)
    assert said.phase == PolicyStatus.UNCONFIGURED
    path.write_text('policy: {backend: host, nonsense: 1}\n')
    assert not lifecycle.change(Transition.TRANSITION_CONFIGURE)
    status.wait(lambda m: 'nonsense' in m.last_refusal)
    path.write_text((POLICIES / 'arm.yaml').read_text())
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert lifecycle.change(Transition.TRANSITION_ACTIVATE)
    assert lifecycle.state == 'active'
    status.wait(lambda m: m.phase == PolicyStatus.HOLD and not m.last_refusal)


def test_an_impossible_transition_is_refused_and_the_node_lives(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', activate=False)
    lifecycle = Lifecycle(probe, node)
    assert not lifecycle.change(Transition.TRANSITION_ACTIVATE)
    assert not lifecycle.change(Transition.TRANSITION_DEACTIVATE)
    assert not lifecycle.change(250)
    assert lifecycle.state == 'unconfigured'
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert not lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert lifecycle.state == 'inactive'


def test_an_unconfigured_node_answers_every_service_with_not_configured(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', activate=False)
    client = probe.client(node.name)
    for verb in ('save_capsule', 'restore_capsule', 'rollback', 'list_capsules', 'drop_capsule',
                 'keep_capsule'):
        answer = probe.call(lambda v=verb: client.call(v))
        assert (answer.success, answer.code) == (False, Code.NOT_CONFIGURED)
        assert node.name in answer.message
    for verb in ('checkpoint', 'rewind', 'reset', 'start', 'stop', 'pause', 'resume'):
        answer = probe.call(lambda v=verb: client.trigger(v))
        assert not answer.success
        assert answer.message.startswith('NOT_CONFIGURED')
    execution = probe.inside(lambda: client.execute())
    assert probe.result(execution.result).code == Code.NOT_CONFIGURED


def test_inactive_accepts_capsule_verbs_and_no_motion(probe: Probe, serve: Serve) -> None:
    node = serve('prompted', activate=False)
    lifecycle = Lifecycle(probe, node)
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    client = probe.client(node.name)
    assert probe.call(lambda: client.save('a')).success
    assert probe.call(lambda: client.restore('a')).success
    execution = probe.inside(lambda: client.execute())
    assert probe.result(execution.result).code == Code.WRONG_PHASE


def test_cleanup_gives_everything_back_and_configure_makes_a_new_session(
        probe: Probe, serve: Serve) -> None:
    node = serve('arm', activate=False)
    lifecycle = Lifecycle(probe, node)
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    sessions = set()
    for _ in range(2):
        assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
        sessions.add(status.wait(lambda m: m.session not in (0, *sessions)).session)
        topics = {t for t, _ in probe.node.get_topic_names_and_types()}
        assert f'{node.namespace}/joint_states' in topics
        assert lifecycle.change(Transition.TRANSITION_CLEANUP)
        assert node.node._inputs is None
    assert len(sessions) == 2
    assert lifecycle.state == 'unconfigured'


def test_a_policy_that_raises_while_it_is_built_fails_configure_with_its_words(
        probe: Probe, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / 'raises.yaml'
    path.write_text((POLICIES / 'arm.yaml').read_text().replace('noise: 0.0', 'no_option: 1'))
    node = serve(path, activate=False)
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    lifecycle = Lifecycle(probe, node)
    assert not lifecycle.change(Transition.TRANSITION_CONFIGURE)
    status.wait(lambda m: 'no_option' in m.last_refusal)
    assert lifecycle.state == 'unconfigured'


def test_a_message_type_that_is_not_installed_leaves_nothing_half_configured(
        probe: Probe, serve: Serve, tmp_path: Path) -> None:
    good = (POLICIES / 'arm.yaml').read_text()
    path = tmp_path / 'types.yaml'
    path.write_text(good.replace(
        '    - {term: joint_velocity, topic: joint_states, joints: *arm, max_age_s: 5.0}',
        '    - {term: array, topic: other, type: no_such_msgs/msg/Thing, field: data, length: 3}'))
    node = serve(path, activate=False)
    status = probe.listen(PolicyStatus, f'{node.name}/status', LATCHED)
    lifecycle = Lifecycle(probe, node)
    client = probe.client(node.name)
    assert not lifecycle.change(Transition.TRANSITION_CONFIGURE)
    status.wait(lambda m: 'no_such_msgs' in m.last_refusal)
    assert probe.call(lambda: client.save()).code == Code.NOT_CONFIGURED
    path.write_text(good)
    assert lifecycle.change(Transition.TRANSITION_CONFIGURE)
    assert probe.call(lambda: client.save()).success


def test_the_policy_file_cannot_be_changed_while_the_node_runs(serve: Any) -> None:
    node = serve('arm')
    from rclpy.parameter import Parameter
    result = node.inside(lambda: node.node.set_parameters([Parameter('policy_file', value='x')]))
    assert not result[0].successful
