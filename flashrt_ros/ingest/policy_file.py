"""The policy file: YAML in, frozen and validated data out.

Sections: `policy`, `run`, `inputs`, `joint_states` (a topic for joints that only outputs use),
`sync`, `enable`, `outputs`, `guard`, `qos` (by topic: `{reliable: true, depth: 10}`), `constants`
(by name: a number or a list of numbers; the name then stands wherever numbers do: `offset:
default_pose`) and `note`. Keys, units and defaults stand in
spec.py, terms and message types in schema.py. Every error is Refusal(INVALID_POLICY_FILE) with
one line per mistake: file, path, value, what to do; `details['errors']` holds all of them.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import difflib
from pathlib import Path, PurePosixPath

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import yaml_file
from flashrt_ros.ingest.meaning import exactness, meaning
from flashrt_ros.ingest.policy_inputs import read_inputs
from flashrt_ros.ingest.policy_outputs import check_measured, read_outputs
from flashrt_ros.ingest.ports import check_ports
from flashrt_ros.ingest.reader import Errors, Reader, as_numbers, nearest, shown
from flashrt_ros.ingest.schema import BACKENDS, JOINT_STATE, OF_OUTPUT, TERMS, flat
from flashrt_ros.ingest.spec import (
    EnableSpec,
    GuardSpec,
    ModelSpec,
    Numbers,
    PolicyFile,
    QosSpec,
    RunSpec,
    TermSpec,
    WitnessLimit,
)
from flashrt_ros.ingest.terms import WITNESSES

__all__ = ['check_ports', 'exactness', 'load', 'meaning', 'model_path']

# The package's own policies need no permission; everything else is named by python_modules.
OWN_MODULES = ('flashrt_ros.backends.reference', 'flashrt_ros.demo')


def load(path: str | Path, *, model_root: str | Path | None = None,
         modules: Sequence[str] = ()) -> PolicyFile:
    """Read a policy file. `model_root` is by default its folder; `modules` may supply code."""
    path = Path(path)
    data = yaml_file.read(path)
    errors = Errors(path.name)
    constants = _constants(data.get('constants'), errors)
    top = Reader(data, '', errors, constants)
    top.require('policy', what=' (flashrt-ros inspect MODEL prints a file to start from)')
    top.require('outputs', what=', by name: {topic: …, type: …, kind: …} (flashrt-ros inspect '
                'MODEL prints them)')
    allowed = (*OWN_MODULES, *modules)

    policy = _policy(top.section('policy'), allowed)
    section = top.section('inputs')
    inputs = {} if section is None else read_inputs(section, allowed)
    terms = [t for port in inputs.values() for t in flat(port)]
    topics = {t.topic: None for t in terms if t.topic}
    joint_states = top.topic('joint_states')
    reads_joints = joint_states is not None or any(t.type == JOINT_STATE for t in terms)
    run = _run(top.section('run'), policy.period_s,
               {t.topic: None for t in terms if t.topic and t.term != 'prompt'})
    section = top.section('outputs')
    outputs = {} if section is None else read_outputs(section)
    if section is not None:
        if not section.data:
            top.wrong('outputs', 'at least one output')
        if not reads_joints:
            check_measured(outputs.values(), run.blend_s, section)
    _check_references(terms, outputs, errors)
    sync, enable = top.section('sync'), _enable(top.section('enable'))
    max_skew_s = None if sync is None else sync.maybe_number('max_skew_s', above=0.0)
    if sync is not None:
        sync.close()
    known = [*topics, *(o.topic for o in outputs.values()), *([enable.topic] if enable else []),
             *([joint_states] if joint_states else [])]
    joints = {j for o in outputs.values() for j in o.joints} | {j for t in terms for j in t.joints}
    result = PolicyFile(
        str(path), policy, run, inputs, outputs, max_skew_s, enable,
        _guard(top.section('guard'), terms, joints, reads_joints), _qos(top.section('qos'), known),
        top.text('note'), joint_states)
    top.has('constants')
    top.close(' of a policy file')
    if policy.model is not None:
        fault = _model_fault(policy.model, _root(result, model_root))
        if fault:
            errors.add('policy.model', fault)
    errors.check()
    return result


def model_path(policy_file: PolicyFile, model_root: str | Path | None = None) -> Path | None:
    """Return where the model lies, None for a factory. Checked anew, just before it is loaded:
    the file system may have changed since the policy file was read."""
    model = policy_file.policy.model
    if model is None:
        return None
    root = _root(policy_file, model_root)
    fault = _model_fault(model, root)
    path = root / model
    if not fault and not path.exists():
        fault = f'is {model!r}, and {path} does not exist; correct the path or model_root'
    if fault:
        raise Refusal(Code.INVALID_POLICY_FILE,
                      f'{Path(policy_file.path).name}: policy.model: {fault}')
    return path.resolve()


def _root(policy_file: PolicyFile, model_root: str | Path | None) -> Path:
    return Path(policy_file.path).parent if model_root is None else Path(model_root)


def _model_fault(model: str, root: Path) -> str:
    """Return why a model may not be read from there, '' if it may (whether or not it exists)."""
    pure = PurePosixPath(model)
    if pure.is_absolute() or '..' in pure.parts or '\\' in model or '\0' in model:
        return f'is {model!r}; write a path below model_root, without .. and not absolute'
    try:
        inside = (root / model).resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError):
        inside = False
    return '' if inside else (f'is {model!r}, which a link leads out of {root}; put the file '
                              'itself below model_root')


def _constants(data: object, errors: Errors) -> dict[str, Numbers]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        errors.add('constants', f'is {shown(data)}; write names with numbers or lists of numbers')
        return {}
    found: dict[str, Numbers] = {}
    for name, value in data.items():
        numbers = as_numbers(value, f'constants.{name}', errors, {})
        found[name] = 0.0 if numbers is None else numbers
    return found


def _policy(section: Reader | None, modules: Sequence[str]) -> ModelSpec:
    if section is None:
        return ModelSpec('', 1.0)
    section.require('backend', what=f', one of {", ".join(BACKENDS)}')
    section.require('period_s', what=', the time of one step in seconds')
    backend = section.choice('backend', '', BACKENDS)
    model, factory = section.maybe_text('model'), section.function('factory', modules)
    if section.has('model') == section.has('factory'):
        section.error('model', 'stands beside factory; keep one' if section.has('model') else
                      'is missing; write model: FILE, or factory: module:function')
    elif model is not None and backend == 'host':
        section.error('model', 'is for other backends; host takes factory: module:function')
    elif factory is not None and backend in ('onnx', 'tensorrt'):
        section.error('factory', f'is for host and torch; {backend} takes model: FILE')
    state = section.section('state')
    shapes = section.section('shapes')
    result = ModelSpec(
        backend, section.number('period_s', 1.0, above=0.0), model, factory,
        state={} if state is None else {key: state.text(key) for key in state.data},
        shapes={} if shapes is None else {key: shapes.integers(key, low=1) for key in shapes.data},
        options=section.plain('options'), exact=section.flag('exact', True))
    fed = list(result.state.values())
    for output in sorted({o for o in fed if o and fed.count(o) > 1}):
        section.error('state', f'feeds {output} into two inputs; give each input its own output')
    section.close(' of policy')
    return result


def _run(section: Reader | None, period_s: float, topics: Mapping[str, None]) -> RunSpec:
    if section is None:
        return RunSpec()
    trigger = _trigger(section, topics)
    run = RunSpec(
        trigger, autorun=section.flag('autorun', False),
        on_restore=section.choice('on_restore', 'hold', ('hold', 'continue')),
        on_clock_jump=section.choice('on_clock_jump', 'reset', ('reset', 'keep')),
        start_at=section.integer('start_at', 0), latency_steps=section.integer('latency_steps', 0),
        execute=section.maybe_integer('execute', low=1),
        blend=section.choice('blend', 'latest', ('latest', 'ensemble')),
        ensemble_weight=section.number('ensemble_weight', 0.01),
        publish_hz=section.maybe_number('publish_hz', above=0.0),
        blend_s=section.number('blend_s', 0.0, low=0.0), persist_on=section.names('persist_on'),
        max_tick_s=section.maybe_number('max_tick_s', above=0.0),
        min_rate=section.number('min_rate', 0.5, low=0.0),
        on_slow=section.choice('on_slow', 'stop', ('stop', 'catch_up', 'warn')),
        exclusive=section.flag('exclusive', True),
        joint_sources=section.choice('joint_sources', 'one', ('one', 'any')))
    if run.on_restore == 'continue' and not run.lock_step:
        section.error('on_restore', 'is continue, which would move a live robot by itself; it '
                      'needs lock step (trigger: {input: […]})')
    if section.has('ensemble_weight') and run.blend != 'ensemble':
        section.error('ensemble_weight', 'has no effect with blend: latest; write blend: ensemble')
    for what in run.persist_on:
        if what not in ('save', 'refusal', 'goal_end'):
            section.error('persist_on', f'holds {shown(what)}; '
                          + nearest(what, ('save', 'refusal', 'goal_end')))
    if run.min_rate > 1.0:
        section.error('min_rate', f'is {run.min_rate:g}; it is a share of the steps that period_s '
                      'asks for, between 0 and 1')
    if run.publish_hz is not None:
        parts = run.publish_hz * period_s
        if run.lock_step:
            section.error('publish_hz', 'needs a clock between steps, which lock step has not; '
                          'remove it, or use trigger: timer')
        elif round(parts) < 1 or abs(parts - round(parts)) > 1e-6:
            section.error('publish_hz', f'is {run.publish_hz:g}, which gives {parts:g} values per '
                          f'step of {period_s:g} s; write a whole multiple of {1 / period_s:g}')
    section.close(' of run')
    return run


def _trigger(section: Reader, topics: Mapping[str, None]) -> str | tuple[str, ...]:
    """Return 'timer', or the topics that together make one step of lock step."""
    if not section.has('trigger') or section.data['trigger'] == 'timer':
        return 'timer'
    if not isinstance(section.data['trigger'], Mapping):
        section.wrong('trigger', 'timer, or {input: [topics that make a step]}')
        return 'timer'
    lock_step = Reader(section.data['trigger'], section.at('trigger'), section.errors, {})
    lock_step.require('input', what=', the topics that make a step')
    trigger = lock_step.names('input')
    for topic in trigger:
        if topic not in topics:
            lock_step.error('input', f'holds {shown(topic)}, which no term reads; '
                            f'{nearest(topic, topics)}')
    lock_step.close(' of trigger')
    return trigger


def _enable(section: Reader | None) -> EnableSpec | None:
    if section is None:
        return None
    section.require('topic')
    enable = EnableSpec(section.topic('topic') or '', section.number('max_age_s', 0.5, above=0.0))
    section.close(' of enable')
    return enable


def _guard(section: Reader | None, terms: Sequence[TermSpec], joints: Iterable[str],
           reads_joints: bool) -> GuardSpec:
    if section is None:
        return GuardSpec()
    known: dict[str, None] = {}        # a term, one of its values, or a joint
    for term in terms:
        if term.joints or term.term in WITNESSES:
            known[term.term] = None
            known.update(dict.fromkeys(f'{term.term}.{v}' for v in term.joints or term.fields))
    known.update(dict.fromkeys(sorted(joints)))
    witness = section.section('witness')
    limits: dict[str, WitnessLimit] = {}
    for name in () if witness is None else witness.data:
        entry = witness.section(name) if witness is not None else None
        if entry is None:
            continue
        # Another joint may well be on the JointState topic; what looks like a term is a mistake.
        other_joint = reads_joints and '.' not in name and not difflib.get_close_matches(
            name, TERMS, n=1, cutoff=0.8)
        if name not in known and not other_joint:
            entry.errors.add(entry.path, 'is neither a measured term of inputs nor a joint; '
                             + nearest(name, known))
        entry.require('max', what=', how far it may have moved')
        limits[name] = WitnessLimit(entry.number('max', 0.0, low=0.0),
                                    entry.flag('forceable', False))
        entry.close(' of a witness')
    guard = GuardSpec(limits, section.maybe_number('max_age_s', above=0.0),
                      section.choice('on_moved', 'refuse', ('refuse', 'warn')))
    section.close(' of guard')
    return guard


def _qos(section: Reader | None, topics: Sequence[str]) -> dict[str, QosSpec]:
    result: dict[str, QosSpec] = {}
    for topic in () if section is None else section.data:
        entry = section.section(topic) if section is not None else None
        if entry is None:
            continue
        if topic not in topics:
            entry.errors.add(entry.path, 'is no topic of inputs, outputs or enable; '
                             + nearest(topic, topics))
        reliable = entry.flag('reliable', False) if entry.has('reliable') else None
        result[topic] = QosSpec(reliable, entry.maybe_integer('depth', low=1))
        entry.close(' of qos')
    return result


def _check_references(terms: Sequence[TermSpec], outputs: Mapping[str, object], errors: Errors
                      ) -> None:
    """Terms that speak of an output name one that exists, or there is only one."""
    for term in terms:
        if term.output is not None and term.output not in outputs:
            errors.add(f'{term.path}.output', f'is {shown(term.output)}, which is no output; '
                       f'{nearest(term.output, outputs)}')
        if term.term in OF_OUTPUT and term.output is None and len(outputs) > 1:
            errors.add(f'{term.path}.output', f'is missing; say which of {", ".join(outputs)}')
