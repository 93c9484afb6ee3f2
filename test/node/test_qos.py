"""Quality of service: best-effort sensors are heard, a mismatch is reported with its topic."""
from __future__ import annotations

from collections.abc import Callable

from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray, String

from test.node.harness import BEST_EFFORT, Probe, Served, matched
from test.node.robot import Robot

Serve = Callable[..., Served]


def mismatch(array: DiagnosticArray, node: Served, topic: str) -> bool:
    """Whether a diagnostic of the node warns of a topic."""
    return any(s.name == f'{node.name}: topics' and s.level == DiagnosticStatus.WARN
               and topic in s.message for s in array.status)


def test_a_best_effort_publisher_is_received(probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    robot.joints = probe.publisher(JointState, f'{node.namespace}/joint_states', BEST_EFFORT)
    matched(robot.joints)
    robot.live()
    robot.start()


def test_a_publisher_that_does_not_fit_becomes_a_diagnostic_that_names_the_topic(
        probe: Probe, serve: Serve) -> None:
    node = serve('numbered', status_hz=20)  # lock step subscribes reliably
    diagnostics = probe.listen(DiagnosticArray, '/diagnostics')
    probe.publisher(JointState, f'{node.namespace}/joint_states', BEST_EFFORT)
    diagnostics.wait(lambda m: mismatch(m, node, 'joint_states')
                     and 'reliability' in str(m.status))


def test_an_override_per_topic_makes_it_fit(probe: Probe, serve: Serve) -> None:
    from test.node.harness import namespace
    ns = namespace()
    node = serve('numbered', ns=ns, **{
        f'qos_overrides.{ns}/joint_states.subscription.reliability': 'best_effort'})
    actions = probe.listen(Float64MultiArray, f'{ns}/action')
    publisher = probe.publisher(JointState, f'{ns}/joint_states', BEST_EFFORT)
    matched(publisher)
    message = JointState(name=['j0', 'j1', 'j2'], position=[0.0] * 3)  # may be lost: repeat it
    probe.inside(lambda: probe.node.create_timer(0.02, lambda: publisher.publish(message)))
    assert actions.wait().data[0] == 1000
    assert not node.node._status.mismatches


def test_a_subscriber_that_asks_too_much_is_reported_too(probe: Probe, serve: Serve) -> None:
    from test.node.harness import LATCHED
    node = serve('numbered', status_hz=20)
    diagnostics = probe.listen(DiagnosticArray, '/diagnostics')
    probe.listen(Float64MultiArray, f'{node.namespace}/action', LATCHED)
    diagnostics.wait(lambda m: mismatch(m, node, 'action'))


def test_another_type_on_a_topic_is_not_mistaken_for_it(probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    robot = Robot(probe, node.name)
    stranger = Probe('stranger')  # one participant cannot have two types on a topic
    try:
        strange = stranger.publisher(String, f'{node.namespace}/joint_states')
        strange.publish(String(data='hello'))
        robot.live()
        goal = robot.start()
        assert not goal.result.done()
        assert node.node.runner.status().rejected_inputs == 0
    finally:
        stranger.close()
