"""The launch file with the real launch and launch_ros, where a ROS installation brings them."""
from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from sensor_msgs.msg import JointState

from flashrt_ros.msg import PolicyStatus
from test.node.harness import ENV, LATCHED, POLICIES, Probe, namespace
from test.shared_data import ROOT

HAVE = all(importlib.util.find_spec(m) is not None for m in ('launch', 'launch_ros')) and (
    getattr(importlib.util.find_spec('launch'), 'origin', None) is not None)
REASON = 'launch and launch_ros are not installed; they come with a ROS installation'
RUN = ('import sys; from launch import LaunchService; '
       'from launch.actions import IncludeLaunchDescription as Include; '
       'from launch.launch_description_sources import PythonLaunchDescriptionSource as Source; '
       'from launch import LaunchDescription; '
       's = LaunchService(); s.include_launch_description(LaunchDescription([Include('
       'Source(sys.argv[1]), launch_arguments=[a.split(":=") for a in sys.argv[2:]])])); '
       'sys.exit(s.run())')


def test_the_launch_file_compiles_and_names_its_arguments() -> None:
    source = (ROOT / 'launch/policy.launch.py').read_text()
    compile(source, 'policy.launch.py', 'exec')
    for name in ('policy_file', 'namespace', 'autostart', 'model_root', 'params_file'):
        assert f"DeclareLaunchArgument('{name}'" in source


@pytest.mark.launch
@pytest.mark.skipif(not HAVE, reason=REASON)
@pytest.mark.parametrize(('autostart', 'phase'), [('true', 'HOLD'), ('false', 'UNCONFIGURED')])
def test_launch_brings_the_node_to_active_or_leaves_it(
        probe: Probe, autostart: str, phase: str) -> None:
    ns = namespace()
    status = probe.listen(PolicyStatus, f'{ns}/policy_node/status', LATCHED)
    child = subprocess.Popen(
        [sys.executable, '-c', RUN, str(ROOT / 'launch/policy.launch.py'),
         f'policy_file:={POLICIES / "arm.yaml"}', f'namespace:={ns}', f'autostart:={autostart}',
         f'params_file:={POLICIES / "arm_params.yaml"}'],
        env={'AMENT_PREFIX_PATH': sys.prefix, **ENV, 'PYTHONPATH': os.pathsep.join(
            [str(POLICIES), os.environ.get('PYTHONPATH', '')])},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        status.wait(lambda m: m.phase == getattr(PolicyStatus, phase))
        assert probe.publisher(JointState, f'{ns}/joint_states')
    finally:
        child.send_signal(signal.SIGINT)
        output, _ = child.communicate(timeout=15)
    assert 'process has finished cleanly' in output, output
