"""The public surface is frozen: names, types and parameters change only together with this file."""
from __future__ import annotations

from collections.abc import Callable
import re

from flashrt_ros.node.params import PARAMETERS, table
from test.node.harness import Probe, Served, graph
from test.shared_data import ROOT

OURS = 'flashrt_ros'
SERVICES = {
    'save_capsule': f'{OURS}/srv/SaveCapsule', 'restore_capsule': f'{OURS}/srv/RestoreCapsule',
    'rollback': f'{OURS}/srv/Rollback', 'list_capsules': f'{OURS}/srv/ListCapsules',
    'drop_capsule': f'{OURS}/srv/DropCapsule', 'keep_capsule': f'{OURS}/srv/KeepCapsule',
    **dict.fromkeys(('checkpoint', 'rewind', 'reset', 'start', 'stop', 'pause', 'resume'),
                    'std_srvs/srv/Trigger')}
TOPICS = {'status': f'{OURS}/msg/PolicyStatus', 'chunk': f'{OURS}/msg/ActionChunk',
          'capsule_events': f'{OURS}/msg/CapsuleEvent'}
PARAMETER_TYPES = {
    'policy_file': 'string', 'model_root': 'string', 'python_modules': 'string[]',
    'capsule_dir': 'string', 'allow_force': 'bool', 'status_hz': 'float', 'history': 'int',
    'device_slots': 'int', 'host_bytes': 'int', 'disk_bytes': 'int', 'max_capsules': 'int',
    'segment_bytes': 'int', 'verify': 'bool', 'client_timeout_s': 'float',
    'guard_process': 'bool', 'introspection': 'string'}
STANDARD_SERVICES = re.compile(
    r'(get|set|list|describe)_parameter\w*|(change_state|get_state|get_available_\w+|'
    r'get_transition_graph|get_type_description)|execute/_action/\w+')


def test_services_topics_and_the_action_are_those_of_the_design(
        probe: Probe, serve: Callable[..., Served]) -> None:
    node = serve('arm', activate=False)
    seen = graph(probe, node, lambda g: len(g['services']) > len(SERVICES) + 10 and
                 f'{node.name}/capsule_events' in g['published'])

    def private(pairs: dict[str, str]) -> dict[str, str]:
        prefix = f'{node.name}/'
        return {n.removeprefix(prefix): t for n, t in pairs.items() if n.startswith(prefix)}

    services = private(seen['services'])
    assert {n: t for n, t in services.items() if not STANDARD_SERVICES.fullmatch(n)} == SERVICES
    assert services['execute/_action/send_goal'] == f'{OURS}/action/ExecutePolicy_SendGoal'
    assert {n: t for n, t in private(seen['published']).items()
            if '_action' not in n and n != 'transition_event'} == TOPICS


def test_parameters_are_those_of_the_list() -> None:
    assert {p.name: p.type for p in PARAMETERS} == PARAMETER_TYPES


def test_the_readme_has_the_table_of_the_parameters() -> None:
    text = (ROOT / 'README.md').read_text()
    assert table() in text, 'replace the table by what flashrt_ros.node.params.table() returns'
