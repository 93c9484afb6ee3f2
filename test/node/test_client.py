"""The client library: futures at once, and nothing of its owner is spun. Service introspection."""
from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from rclpy.parameter import Parameter
from rclpy.qos import QoSProfile
from rclpy.task import Future

import flashrt_ros.clients as clients
from flashrt_ros.clients.blocking import BlockingClient
from flashrt_ros.clients.client import PolicyClient, check
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.msg import CapsuleEvent, PolicyStatus
from flashrt_ros.srv import SaveCapsule
from test.node.harness import DOMAIN, Inbox, Probe, Served, until

Serve = Callable[..., Served]


def test_no_client_module_spins_a_node_or_waits_in_it() -> None:
    banned = {'spin', 'spin_once', 'spin_until_future_complete', 'sleep', 'wait_for_service'}
    source = Path(clients.__path__[0]) / 'client.py'
    called = {n.func.attr for n in ast.walk(ast.parse(source.read_text()))
              if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute)}
    assert not called & banned


def test_verbs_work_in_callbacks_of_the_owner_without_blocking_it(
        probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    client = probe.client(node.name)
    seen = []

    done = Future()

    def saved(future: Future) -> None:  # on the owner's executor: ask the next thing from there
        seen.append(future.result())
        client.restore(seen[0].capsule.name).add_done_callback(restored)

    def restored(future: Future) -> None:
        seen.append(future.result())
        done.set_result(True)

    probe.inside(lambda: client.save('a').add_done_callback(saved))
    probe.result(done)
    assert [a.success for a in seen] == [True, True]


def test_check_turns_a_no_into_a_refusal_with_its_details(probe: Probe, serve: Serve) -> None:
    node = serve('arm')
    client = probe.client(node.name)
    with pytest.raises(Refusal) as caught:
        check(probe.call(lambda: client.restore('nobody')))
    assert caught.value.code is Code.NOT_FOUND
    assert caught.value.details['moved'] == []
    with pytest.raises(ValueError, match='fly'):
        client.trigger('fly')


def test_status_and_events_reach_a_client(probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    client = probe.client(node.name)
    status, events = Inbox(), Inbox()
    probe.inside(lambda: (client.on_status(status.put), client.on_event(events.put)))
    assert status.wait().phase == PolicyStatus.HOLD
    assert probe.call(lambda: client.trigger('reset')).success
    assert events.wait().kind == CapsuleEvent.RESET


def test_a_closed_client_leaves_its_owner_as_it_was(probe: Probe) -> None:
    before = len(list(probe.node.clients)), len(list(probe.node.waitables))
    client = probe.inside(lambda: PolicyClient(probe.node, '/nobody'))
    assert len(list(probe.node.clients)) > before[0]
    probe.inside(client.close)
    assert (len(list(probe.node.clients)), len(list(probe.node.waitables))) == before


def test_the_blocking_client_says_who_is_there_when_nobody_answers(serve: Serve) -> None:
    node = serve('arm')
    with BlockingClient(node.name, domain_id=DOMAIN) as good:
        assert good.call(lambda c: c.list()).success
        assert good.call(lambda c: c.drop('nobody')).code == Code.NOT_FOUND
    with BlockingClient('/no/such', timeout_s=1.0, domain_id=DOMAIN) as alone:
        with pytest.raises(Refusal, match=node.name) as caught:
            alone.call(lambda c: c.list())
    assert caught.value.code is Code.NOT_FOUND


def test_introspection_shows_requests_and_answers_when_it_is_switched_on(
        probe: Probe, serve: Serve) -> None:
    node = serve('prompted')
    client = probe.client(node.name)
    inbox = probe.listen(SaveCapsule.Event, f'{node.name}/save_capsule/_service_event',
                         QoSProfile(depth=50))
    result = node.inside(lambda: node.node.set_parameters(
        [Parameter('introspection', value='contents')]))
    assert result[0].successful
    publishers = f'{node.name}/save_capsule/_service_event'
    until(lambda: probe.node.count_publishers(publishers) > 0, 'no introspection topic')
    check(probe.call(lambda: client.save('seen')))
    assert inbox.wait(lambda m: m.request).request[0].name == 'seen'
    assert inbox.wait(lambda m: m.response).response[0].success
