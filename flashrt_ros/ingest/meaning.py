"""What a policy file means, apart from how it is written: its part of a fingerprint.

`meaning` holds whatever decides what the bytes of a capsule mean and which actions follow from
them: ports, terms, joints, scales, offsets, histories, periods, limits, chunk rules, output
contract. It leaves out where data travels (topics, quality of service), where files lie, notes, the
names of constants, and what only decides when a robot may move (trigger, autorun, on_restore,
enable, guard): a capsule of a live run may return to a replay in lock step. Values that equal
their default are left out, so that a default written out changes nothing, and a key that a later
version adds leaves older capsules valid.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, is_dataclass, replace
import json
from typing import Any

from flashrt_ros.ingest.spec import DEFAULT_MAX_AGE_S, PolicyFile, TermSpec

_SKIP_TERM = ('path', 'topic')
_SKIP_OUTPUT = ('name', 'path', 'topic', 'shared')
_RUN = ('start_at', 'latency_steps', 'execute', 'blend', 'ensemble_weight', 'publish_hz', 'blend_s')
_PER_VALUE = ('offset', 'scale', 'max_rate')     # one number for all, or one for each value


def meaning(policy_file: PolicyFile) -> dict[str, str]:
    """Return fields such as `inputs.obs[3].scale`, each as canonical JSON."""
    pf = policy_file
    found: dict[str, Any] = {'policy.period_s': pf.policy.period_s}
    if pf.policy.state:
        found['policy.state'] = dict(pf.policy.state)
    if pf.policy.shapes:
        found['policy.shapes'] = _plain(pf.policy.shapes)
    if pf.policy.factory is not None:     # what a factory is given decides what it makes
        found['policy.factory'] = pf.policy.factory
        if pf.policy.options:
            found['policy.options'] = _plain(pf.policy.options)
    if pf.max_skew_s is not None:
        found['sync.max_skew_s'] = pf.max_skew_s
    for key, value in _record(pf.run).items():
        if key in _RUN:
            found[f'run.{key}'] = value
    for port, terms in pf.inputs.items():
        for i, term in enumerate(terms):
            for key, value in _record(_named(term, pf), _SKIP_TERM).items():
                found[f'inputs.{port}[{i}].{key}'] = value
    for name, output in pf.outputs.items():
        named = replace(output, port=None if output.port == name else output.port)
        for key, value in _record(named, _SKIP_OUTPUT).items():
            found[f'outputs.{name}.{key}'] = value
    return {key: _json(value) for key, value in found.items()}


def exactness(policy_file: PolicyFile) -> dict[str, str]:
    """Return what may change the last bits of actions but not their meaning."""
    policy = policy_file.policy
    found: dict[str, Any] = {'policy.backend': policy.backend, 'policy.exact': policy.exact}
    if policy.factory is None and policy.options:
        found['policy.options'] = _plain(policy.options)
    return {key: _json(value) for key, value in found.items()}


def _named(term: TermSpec, pf: PolicyFile) -> TermSpec:
    """Return a term with the only output left unnamed, as it may be written either way."""
    only = len(pf.outputs) == 1 and term.output in pf.outputs
    return replace(term, output=None if only else term.output,
                   of=tuple(_named(part, pf) for part in term.of))


def _json(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(',', ':'), ensure_ascii=False,
                      allow_nan=False)


def _record(item: Any, skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their default."""
    record = {}
    for field in fields(item):
        if field.name in skip:
            continue
        value = getattr(item, field.name)
        if isinstance(item, TermSpec) and field.name == 'max_age_s' and value == DEFAULT_MAX_AGE_S:
            value = None
        if field.name in _PER_VALUE:
            value = _collapsed(value)
        elif field.name == 'clip' and value is not None:
            value = tuple(_collapsed(bound) for bound in value)
        default = (field.default_factory() if field.default_factory is not MISSING
                   else field.default)
        if value != default:
            record[field.name] = _plain(value, skip)
    return record


def _collapsed(value: Any) -> Any:
    """Return one number for a list of equal ones; -0.0 is 0.0."""
    if isinstance(value, tuple):
        return value[0] + 0.0 if len(set(value)) == 1 else tuple(v + 0.0 for v in value)
    return value if value is None else value + 0.0


def _plain(value: Any, skip: Collection[str] = ()) -> Any:
    if is_dataclass(value):
        return _record(value, skip)
    if isinstance(value, Mapping):
        return {key: _plain(v, skip) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, skip) for v in value]
    return value
