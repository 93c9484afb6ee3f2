"""Save, restore and rollback between two processes: the node in one, the caller in another."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
import json
import subprocess
import sys

from click.testing import CliRunner
import pytest
from sensor_msgs.msg import JointState
from std_msgs.msg import Float64MultiArray

from flashrt_ros.clients import blocking
from flashrt_ros.clients.blocking import BlockingClient
from flashrt_ros.clients.client import check
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import PolicyStatus
from flashrt_ros.tools import cli as tools
from test.node.harness import DOMAIN, ENV, POLICIES, Probe, matched, process


@pytest.fixture(scope='module')
def probe() -> Iterator[Probe]:
    made = Probe()
    yield made
    made.close()


@pytest.fixture(scope='module')
def node(probe: Probe) -> Iterator[str]:
    with process(probe, POLICIES / 'numbered.yaml') as (name, _):
        yield name


@pytest.fixture(scope='module')
def moving(probe: Probe, node: str) -> Robot:
    return Robot(probe, node)


class Robot:
    """Feeds one set of joints per step and returns the action that it led to."""

    def __init__(self, probe: Probe, node: str) -> None:
        ns = node.rpartition('/')[0]
        self.probe = probe
        self.client = probe.client(node)
        self.inbox = probe.listen(Float64MultiArray, f'{ns}/action')
        self.publisher = probe.publisher(JointState, f'{ns}/joint_states')
        matched(self.publisher)
        self.n = 0

    def step(self, value: float = 0.1) -> list[float]:
        self.n += 1
        message = JointState(name=['j0', 'j1', 'j2'], position=[value, 2 * value, self.n * 0.0])
        message.header.stamp.sec = self.n
        start = len(self.inbox.messages)
        self.publisher.publish(message)
        return list(self.inbox.wait(start=start).data)


@pytest.fixture
def robot(moving: Robot) -> Robot:
    """The robot, with the policy in a fresh episode."""
    check(moving.probe.call(lambda: moving.client.restore('origin')))
    return moving


def test_p2_actions_after_a_restore_equal_those_without_it(
        probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    for i in range(7):  # the cursor stands inside the second chunk of 5
        robot.step(0.01 * i)
    saved = check(probe.call(lambda: client.save('a', overwrite=True)))
    assert (saved.capsule.tick, saved.capsule.step) == (2, 7)
    inputs = [0.3, -0.2, 0.5, 0.1, 0.0, -0.4, 0.2, 0.9]
    wanted = [robot.step(v) for v in inputs]
    for v in (0.7, 0.6, 0.5):
        robot.step(v)  # a disturbance that is no multiple of the chunk
    answer = check(probe.call(lambda: client.restore('a')))
    assert answer.capsule.id == saved.capsule.id
    assert answer.epoch > saved.epoch
    assert [robot.step(v) for v in inputs] == wanted


def test_rollback_goes_to_the_nearest_capsule_and_by_steps_in_lock_step(
        probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    for _ in range(3):
        robot.step()
    saved = check(probe.call(lambda: client.save('b', overwrite=True)))
    after = [robot.step(0.2) for _ in range(6)]
    answer = check(probe.call(lambda: client.rollback()))
    assert answer.capsule.id == saved.capsule.id
    assert [robot.step(0.2) for _ in range(6)] == after
    answer = check(probe.call(lambda: client.rollback(steps=2)))
    assert answer.capsule.step == 7
    assert [robot.step(0.2) for _ in range(2)] == after[4:]


def test_p7_check_answers_as_the_real_call_would_and_changes_nothing(
        probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    robot.step()
    check(probe.call(lambda: client.save('c', overwrite=True)))
    before = check(probe.call(lambda: client.list())).epoch
    would = check(probe.call(lambda: client.restore('c', check=True)))
    assert would.capsule.name == 'c'
    refused = probe.call(lambda: client.restore('nobody', check=True))
    assert (refused.success, refused.code) == (False, Code.NOT_FOUND)
    assert check(probe.call(lambda: client.list())).epoch == before


def test_empty_requests_work_and_drop_wants_a_name(
        probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    robot.step()
    for verb in ('save_capsule', 'restore_capsule', 'rollback', 'list_capsules', 'keep_capsule'):
        answer = check(probe.call(lambda v=verb: client.call(v)))
        assert answer.message
    refused = probe.call(lambda: client.call('drop_capsule'))
    assert (refused.success, refused.code) == (False, Code.INVALID_NAME)


def test_p28_a_stale_epoch_and_a_repeated_save_do_nothing(
        probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    robot.step()
    first = check(probe.call(lambda: client.save('d', overwrite=True, request_id='once')))
    robot.step()
    again = check(probe.call(lambda: client.save('d', overwrite=True, request_id='once')))
    assert again.capsule.id == first.capsule.id
    check(probe.call(lambda: client.restore('d')))
    for late in (lambda: client.restore('d', if_epoch=first.epoch),
                 lambda: client.drop('d', if_epoch=first.epoch),
                 lambda: client.rollback(if_epoch=first.epoch)):
        answer = probe.call(late)
        assert (answer.success, answer.code) == (False, Code.STALE_EPOCH)
    check(probe.call(lambda: client.drop('d')))
    assert probe.call(lambda: client.restore('d')).code == Code.NOT_FOUND


def test_triggers_work_without_any_argument(probe: Probe, node: str, robot: Robot) -> None:
    client = robot.client
    robot.step()
    for verb in ('checkpoint', 'rewind', 'reset'):
        answer = probe.call(lambda v=verb: client.trigger(v))
        assert answer.success, answer.message
    answer = probe.call(lambda: client.trigger('resume'))  # there is nothing to resume
    assert not answer.success
    assert 'WRONG_PHASE' in answer.message


@pytest.fixture(scope='module')
def shared(node: str) -> Iterator[BlockingClient]:
    with BlockingClient(node, domain_id=DOMAIN) as client:
        yield client


@pytest.fixture
def cli(node: str, shared: BlockingClient, monkeypatch: pytest.MonkeyPatch
        ) -> Callable[..., tuple[int, str]]:
    """Run `flashrt-ros` in this process, over one connection; return exit code and output."""
    monkeypatch.setattr(blocking, 'BlockingClient', lambda *_, **__: nullcontext(shared))

    def run(*arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(tools.cli, [*arguments, '--node', node])
        return done.exit_code, done.output
    return run


def test_the_command_line_saves_lists_restores_and_refuses(
        probe: Probe, node: str, robot: Robot, cli: Callable[..., tuple[int, str]]) -> None:
    robot.step()
    code, said = cli('save', 'from_cli', '--note', 'by hand', '--overwrite')
    assert (code, 'from_cli' in said) == (0, True)
    code, said = cli('list', 'from_', '--json')
    assert [c['note'] for c in json.loads(said)['capsules']] == ['by hand']
    assert 'from_cli' in cli('list')[1]
    assert cli('keep', 'from_cli', '--pin')[0] == 0
    assert cli('rollback', '--check')[0] == 0
    assert cli('restore', 'from_cli')[0] == 0
    code, said = cli('restore', 'nobody')
    assert (code, 'NOT_FOUND' in said) == (1, True)
    assert cli('drop', 'from_cli')[0] == 0
    assert cli('reset')[0] == 0
    code, said = cli('resume')
    assert (code, 'WRONG_PHASE' in said) == (1, True)
    code, said = cli('status', '--json')
    assert json.loads(said)['phase'] == PolicyStatus.RUNNING
    assert 'RUNNING' in cli('status')[1]


def test_the_command_line_executes_a_goal_and_prints_its_end(
        node: str, robot: Robot, cli: Callable[..., tuple[int, str]]) -> None:
    code, said = cli('execute', '--if-epoch', '987')
    assert (code, 'STALE_EPOCH' in said) == (1, True)


def test_the_command_line_names_the_nodes_that_it_sees(node: str) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.tools.cli', 'save', '--node', '/no/such',
         '--timeout', '4'], env=ENV, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert node in done.stderr
    assert 'seen: /no/such' not in done.stderr
    assert 'Traceback' not in done.stderr
