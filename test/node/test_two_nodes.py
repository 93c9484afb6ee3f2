"""P31: two nodes in two namespaces of one process share nothing that one could disturb."""
from __future__ import annotations

from collections.abc import Callable

from test.node.harness import Probe, Served, graph
from test.node.robot import Robot

SHARED = {'/clock', '/rosout', '/parameter_events', '/diagnostics'}


def test_p31_two_nodes_share_no_topic_and_no_service(
        probe: Probe, serve: Callable[..., Served]) -> None:
    nodes = [serve('arm'), serve('arm')]
    names: list[set[str]] = []
    for node in nodes:
        seen = graph(probe, node, lambda g: len(g['services']) > 20 and len(g['published']) > 8
                     and any('joint_states' in n for n in g['subscribed']))
        names.append({name for part in seen.values() for name in part})
    assert names[0] & names[1] <= SHARED
    assert all(len(n - SHARED) > 20 for n in names)


def test_p31_verbs_and_goals_of_one_leave_the_other_alone(
        probe: Probe, serve: Callable[..., Served]) -> None:
    robots = [Robot(probe, serve('arm').name) for _ in range(2)]
    for robot in robots:
        robot.say()
        robot.live()
    goal = robots[1].start()
    assert robots[0].call('save_capsule', name='mine').success
    assert robots[0].call('reset').success
    listed = robots[1].call('list_capsules').capsules
    assert [c.name for c in listed] == ['origin']
    assert not goal.result.done()
    assert not robots[0].actions.messages
    sessions = {r.status.messages[-1].session for r in robots}
    assert len(sessions) == 2
    assert robots[1].call('stop').success
