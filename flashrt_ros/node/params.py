"""All parameters of the policy node: names, ranges, descriptions, and the only place of defaults.

config/policy.yaml and the table in the README are compared with PARAMETERS by a test. Parameters
are declared with dynamic typing and checked here, so that `1` is a good value for a float; rclpy's
static typing would refuse it.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter

INTROSPECTION = ('off', 'metadata', 'contents')


@dataclass(frozen=True)
class Param:
    """One parameter. `when`: 'start' is fixed once the node runs, 'configure' may be set while
    the node is unconfigured, 'always' takes effect at once."""

    name: str
    default: Any
    when: str
    description: str
    low: float | None = None
    choices: tuple[str, ...] = ()

    @property
    def type(self) -> str:
        """Return the name of its type as the README writes it."""
        return {bool: 'bool', int: 'int', float: 'float', str: 'string'}.get(
            type(self.default), 'string[]')

    @property
    def spelled(self) -> str:
        """Return the default as YAML writes it."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return '[]' if self.default == () else "''" if self.default == '' else str(self.default)

    def cast(self, value: Any) -> Any:
        """Return the value in this parameter's type. Raises ValueError that says what is wanted."""
        kind = self.type
        good: bool = {
            'bool': isinstance(value, bool),
            'int': isinstance(value, int) and not isinstance(value, bool),
            'float': isinstance(value, (int, float)) and not isinstance(value, bool),
            'string': isinstance(value, str),
            'string[]': value is None or (not isinstance(value, (str, bytes))
                                          and isinstance(value, Sequence)
                                          and all(isinstance(v, str) for v in value)),
        }[kind]
        if not good:
            raise ValueError(f'{self.name} is {value!r}; it must be of type {kind}')
        if self.choices and value not in self.choices:
            raise ValueError(f'{self.name} is {value!r}; it must be one of '
                             + ', '.join(self.choices))
        if self.low is not None and not value >= self.low:
            raise ValueError(f'{self.name} is {value!r}; it must be at least {self.low:g}')
        return (tuple(value or ()) if kind == 'string[]'
                else float(value) if kind == 'float' else value)


PARAMETERS: tuple[Param, ...] = (
    Param('policy_file', '', 'start', 'Path of the policy file (YAML) to serve.'),
    Param('model_root', '', 'start',
          'Folder that models of the policy file are relative to; empty: the folder of the file.'),
    Param('python_modules', (), 'start',
          'Python modules that may supply code (factories, terms) to a policy file; none by '
          'default.'),
    Param('capsule_dir', '', 'start',
          'Folder of durable capsules (persist), loaded again at configure; empty: none.'),
    Param('allow_force', False, 'always',
          'Whether force may override ROBOT_MOVED of witness terms marked forceable.'),
    Param('status_hz', 2.0, 'always',
          'How often ~/status and /diagnostics are published beside every change, in Hz; '
          '0: only on changes.', low=0),
    Param('history', 4, 'configure',
          'Finished ticks kept on the device for rollback by steps; 0 turns the ring off.', low=0),
    Param('device_slots', 8, 'configure',
          'Capsules that fit on the device beside the ring.', low=1),
    Param('host_bytes', 1 << 30, 'configure',
          'Budget of host memory for capsules that left the device, in bytes.', low=0),
    Param('disk_bytes', 10 << 30, 'configure', 'Budget of capsule_dir, in bytes.', low=0),
    Param('max_capsules', 256, 'configure', 'Most capsules the store keeps, all tiers together.',
          low=1),
    Param('segment_bytes', 0, 'configure',
          'Device memory for journal rows (a KV cache) of capsules, in bytes; 0: twice the '
          'journals.', low=0),
    Param('verify', True, 'configure',
          'Whether configure runs the policy twice to find hidden state and non-determinism.'),
    Param('client_timeout_s', 1.0, 'configure',
          'Seconds after the last sign of life of a goal\'s client in which the goal ends; only '
          'for clients that give one.', low=0.1),
    Param('guard_process', True, 'start',
          'Whether a process beside the node stops the robot where the node hangs or dies.'),
    Param('introspection', 'off', 'always',
          'Service introspection of the capsule services: off, metadata or contents.',
          choices=INTROSPECTION),
)
WHEN = {'start': 'fixed after start', 'configure': 'at configure', 'always': 'at once'}
BY_NAME: Mapping[str, Param] = {p.name: p for p in PARAMETERS}


def table() -> str:
    """Return the parameters as the Markdown table of the README."""
    rows = ['| parameter | type | default | takes effect | meaning |', '|---|---|---|---|---|']
    for p in PARAMETERS:
        rows.append(f'| `{p.name}` | {p.type} | `{p.spelled}` | {WHEN[p.when]} | '
                    f'{p.description} |')
    return '\n'.join(rows)


@dataclass(frozen=True)
class Settings:
    """The parameters' values at one moment, with their Python types."""

    policy_file: Path | None
    model_root: Path | None
    python_modules: tuple[str, ...]
    capsule_dir: Path | None
    allow_force: bool
    status_hz: float
    history: int
    device_slots: int
    host_bytes: int
    disk_bytes: int
    max_capsules: int
    segment_bytes: int
    verify: bool
    client_timeout_s: float
    guard_process: bool
    introspection: str


class Parameters:
    """Declares the parameters on a node and guards every later change."""

    def __init__(self, node: Node, *, configured: Callable[[], bool],
                 changed: Callable[[Settings], None]) -> None:
        """`changed` hears of every accepted change after start. Raises ValueError."""
        self._node = node
        self._configured = configured
        self._changed = changed
        self._values: dict[str, Any] = {}
        for param in PARAMETERS:
            default = list(param.default) if isinstance(param.default, tuple) else param.default
            declared = node.declare_parameter(param.name, default, ParameterDescriptor(
                description=param.description, read_only=param.when == 'start',
                dynamic_typing=True,
                additional_constraints=self._constraint(param)))
            self._values[param.name] = param.cast(declared.value)
        node.add_on_set_parameters_callback(self._check)
        node.add_post_set_parameters_callback(self._take)

    @staticmethod
    def _constraint(param: Param) -> str:
        parts = [param.type]
        if param.choices:
            parts.append('one of ' + ', '.join(param.choices))
        if param.low is not None:
            parts.append(f'at least {param.low:g}')
        if param.when == 'configure':
            parts.append('takes effect at configure')
        return '; '.join(parts)

    @property
    def settings(self) -> Settings:
        """Return the present values."""
        values = dict(self._values)
        for name in ('policy_file', 'model_root', 'capsule_dir'):
            values[name] = Path(values[name]).expanduser() if values[name] else None
        return Settings(**values)

    def _check(self, params: list[Parameter]) -> SetParametersResult:
        for given in params:
            param = BY_NAME.get(given.name)
            if param is None:
                continue  # use_sim_time, qos_overrides…
            try:
                param.cast(given.value)
            except ValueError as error:
                return SetParametersResult(successful=False, reason=str(error))
            if param.when == 'configure' and self._configured():
                return SetParametersResult(
                    successful=False, reason=f'{param.name} takes effect at configure; clean up '
                    'the node first, then set it and configure again')
        return SetParametersResult(successful=True)

    def _take(self, params: list[Parameter]) -> None:
        ours = {p.name: BY_NAME[p.name].cast(p.value) for p in params if p.name in BY_NAME}
        if ours:
            self._values.update(ours)
            self._changed(self.settings)
