"""P32: SIGINT and SIGTERM during an inference end the process well; a second one forces it."""
from __future__ import annotations

from pathlib import Path
import signal
import subprocess
import sys
import time

import pytest

from test.node.harness import ENV, POLICIES, Probe, process, until
from test.node.robot import Robot

STAND = [0.4, -0.3, 0.2]
OPTIONS = ('--python-module', 'held_policy')


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize('held', [True, False], ids=['held', 'running'])
def test_p32_a_signal_sends_on_stop_and_ends_with_code_0(
        probe: Probe, tmp_path: Path, number: signal.Signals, held: bool) -> None:
    entered = tmp_path / 'entered'
    with process(probe, POLICIES / 'arm.yaml', *OPTIONS,
                 env={'HELD_FILE': str(entered)}) as (node, child):
        robot = Robot(probe, node)
        robot.position = list(STAND)
        robot.say()
        robot.live()
        goal = robot.start()
        if held:
            hold(robot, entered)
        before = len(robot.actions.messages)
        began = time.monotonic()
        child.send_signal(number)
        stop = robot.actions.wait(lambda m: list(m.points[0].positions)[1:] == STAND[1:],
                                  start=before)
        assert child.wait(5) == 0
        assert time.monotonic() - began < 5
        errors = child.stderr.read()
        assert 'Traceback' not in errors, errors
        assert robot.actions.messages[-1] is stop
        assert robot.result(goal).message


def hold(robot: Robot, entered: Path) -> None:
    """Send what holds the policy's tick, and wait until it is held."""
    robot.silent()
    robot.say([200.0, *STAND[1:]])
    robot.position = list(STAND)
    until(entered.exists, 'the tick is not held')
    robot.say()


def test_p32_a_second_signal_does_not_wait(probe: Probe, tmp_path: Path) -> None:
    entered = tmp_path / 'entered'
    with process(probe, POLICIES / 'arm.yaml', *OPTIONS,
                 env={'HELD_FILE': str(entered)}) as (node, child):
        robot = Robot(probe, node)
        robot.position = list(STAND)
        robot.drive()
        hold(robot, entered)
        child.send_signal(signal.SIGTERM)
        child.send_signal(signal.SIGINT)
        code = child.wait(5)
        assert code in (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_p32_a_node_in_hold_ends_at_once_and_publishes_nothing(probe: Probe) -> None:
    with process(probe, POLICIES / 'arm.yaml', *OPTIONS) as (node, child):
        robot = Robot(probe, node)
        robot.say(STAND)
        began = time.monotonic()
        child.send_signal(signal.SIGTERM)
        assert child.wait(5) == 0
        assert time.monotonic() - began < 3
        assert not robot.actions.messages


def test_p32_a_signal_during_a_configure_that_does_not_return_ends_it_too(tmp_path: Path) -> None:
    entered, policy = tmp_path / 'entered', tmp_path / 'slow.yaml'
    policy.write_text((POLICIES / 'arm.yaml').read_text().replace(':held', ':slow'))
    child = subprocess.Popen(
        [sys.executable, '-m', 'flashrt_ros.tools.cli', 'serve', str(policy), *OPTIONS],
        env={**ENV, 'PYTHONPATH': str(POLICIES), 'HELD_FILE': str(entered)},
        stderr=subprocess.PIPE, text=True)
    until(entered.exists, 'the factory is not called')
    child.send_signal(signal.SIGTERM)
    assert child.wait(6) == 0
    assert 'Traceback' not in child.communicate()[1]


def test_serve_says_why_it_cannot_start_and_ends_with_code_1(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, '-m', 'flashrt_ros.tools.cli', 'serve', str(tmp_path / 'no.yaml')],
        env=ENV, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert 'no.yaml' in done.stderr + done.stdout
    assert 'Traceback' not in done.stderr
