"""Parameters: every one described, `1` good for a float, fixed ones fixed, wrong ones refused."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter
import yaml

from flashrt_ros.node.params import PARAMETERS, Parameters, Settings
from test.node.harness import DOMAIN, namespace
from test.shared_data import ROOT


@pytest.fixture(name='make')
def make_fixture() -> Iterator[Any]:
    context = Context()
    context.init(args=[], domain_id=DOMAIN)
    nodes = []

    def make(**values: Any) -> tuple[Node, Parameters, dict[str, Any], list[Settings]]:
        node = Node('params', namespace=namespace(), context=context, use_global_arguments=False,
                    parameter_overrides=[Parameter(k, value=v) for k, v in values.items()])
        nodes.append(node)
        state: dict[str, Any] = {'configured': False}
        heard: list[Settings] = []
        return node, Parameters(node, configured=lambda: state['configured'],
                                changed=heard.append), state, heard
    yield make
    for node in nodes:
        node.destroy_node()
    context.try_shutdown()


def set_one(node: Node, name: str, value: Any) -> tuple[bool, str]:
    result = node.set_parameters([Parameter(name, value=value)])[0]
    return result.successful, result.reason


def test_an_integer_is_accepted_for_a_float_at_start_and_later(make: Any) -> None:
    node, parameters, _, heard = make(status_hz=1)
    assert parameters.settings.status_hz == 1.0
    assert set_one(node, 'status_hz', 5) == (True, '')
    assert heard[-1].status_hz == 5.0
    assert isinstance(heard[-1].status_hz, float)


def test_parameters_of_the_policy_are_fixed_after_start(make: Any) -> None:
    node, parameters, _, _ = make(policy_file='a.yaml')
    assert str(parameters.settings.policy_file) == 'a.yaml'
    for name in ('policy_file', 'model_root'):
        assert not set_one(node, name, 'b.yaml')[0]
    assert not set_one(node, 'python_modules', ['os'])[0]
    assert str(parameters.settings.policy_file) == 'a.yaml'


def test_store_sizes_change_while_unconfigured_only(make: Any) -> None:
    node, parameters, state, _ = make()
    assert set_one(node, 'history', 7)[0]
    state['configured'] = True
    good, reason = set_one(node, 'history', 9)
    assert not good
    assert 'clean up' in reason
    assert parameters.settings.history == 7


@pytest.mark.parametrize(('name', 'value', 'said'), [
    ('status_hz', 'often', 'type float'), ('history', 1.5, 'type int'), ('history', -1, 'least 0'),
    ('introspection', 'all', 'off, metadata, contents'), ('verify', 1, 'type bool')])
def test_a_wrong_value_is_refused_with_what_is_wanted(
        make: Any, name: str, value: Any, said: str) -> None:
    node, _, _, heard = make()
    good, reason = set_one(node, name, value)
    assert not good
    assert said in reason
    assert not heard
    with pytest.raises(ValueError, match=said):
        make(**{name: value})


def test_every_parameter_has_a_descriptor(make: Any) -> None:
    node, _, _, _ = make()
    for param in PARAMETERS:
        descriptor = node.describe_parameter(param.name)
        assert len(descriptor.description) > 20
        assert descriptor.read_only == (param.when == 'start')
        assert param.type in descriptor.additional_constraints


def test_the_yaml_of_config_lists_exactly_the_parameters_with_their_defaults() -> None:
    data = yaml.safe_load((ROOT / 'config/policy.yaml').read_text())
    listed = data['/**']['ros__parameters']
    assert listed == {p.name: list(p.default) if isinstance(p.default, tuple) else p.default
                      for p in PARAMETERS if p.name != 'policy_file'}
