"""From a policy file to a torch program: TorchScript, torch.export, or a Python factory.

Where state is looked for:
- TorchScript: tensors that `forward` writes or assigns, found in its graph (torch_script.py).
- torch.export: buffers that the graph changes (torch_export.py).
- A factory's module: every registered buffer but those that `options.constants` names; other
  attributes are state only where they are declared, by an attribute `declared_state` or by
  `options.declare`: {path: {kind: optional, dtype: F32, shape: [1, 12]}} (torch_state.py).
- A factory's `TensorProgram`: what it says.
"""
from __future__ import annotations

from collections.abc import Mapping
import fnmatch
import inspect
from typing import Any

from flashrt_ros.backends import options
from flashrt_ros.backends.digests import file_digest, source_digest
from flashrt_ros.backends.factory import call_factory, find_factory
from flashrt_ros.backends.files import model_path
from flashrt_ros.backends.ports import TensorInfo, buffer_name
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensor_program import TensorProgram, import_torch
from flashrt_ros.backends.torch_archive import EXPORT, WEIGHTS, kind_of
from flashrt_ros.backends.torch_export import load_export
from flashrt_ros.backends.torch_module import PREFILL, ModuleProgram, PromptedProgram, Slot
from flashrt_ros.backends.torch_script import input_names, load_script, state_of
from flashrt_ros.backends.torch_state import BufferSlot, declared_slot
from flashrt_ros.backends.torch_walk import digest
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import DTYPES, digest_of

# Of a factory, every other key of policy.options is one of its arguments.
OPTIONS = {
    'device': options.choice('cpu', 'cpu', 'cuda'),
    'threads': options.whole(1, 1),
    'generator': options.flag(False),
    'outputs': options.names(),
    'dtypes': options.mapping('a mapping of input names to data types'),
    'stateless': options.names(),
    'publish': options.names(),
    'ranges': options.mapping('a mapping of input names to [low, high]'),
    'constants': options.names(),
    'declare': options.mapping('a mapping of attribute paths to {kind: …, dtype: …, shape: […]}'),
}


def load_program(spec: PolicySpec) -> tuple[TensorProgram, dict[str, Any], str]:
    """Return the program, the parsed options, and a digest of the factory's source ('' without).

    Nothing is run yet. Raises Refusal.
    """
    if spec.factory is not None:
        own = {k: v for k, v in spec.options.items() if k in OPTIONS}
        arguments = {k: v for k, v in spec.options.items() if k not in OPTIONS}
        return _from_factory(spec, options.parse(own, OPTIONS), arguments)
    given = options.parse(spec.options, OPTIONS)
    path = model_path(spec)
    kind = kind_of(path)
    if kind == WEIGHTS:
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.model: {path.name} holds weights only; '
                      'add factory: module:function, which makes the module that they fit')
    for key in ('constants', 'declare'):
        if given[key]:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.{key}: is for factories; '
                          f'state of a {kind} program is found in the program')
    if kind == EXPORT:
        module, inputs, written = load_export(path, given['device'])
        state = dict.fromkeys(written, True)  # a program's graph has no assignments
        _check_shapes(spec, inputs)
    else:
        module = load_script(path)
        state = state_of(module)[0]
        inputs = _described(input_names(module), spec, given)
    slots = [_buffer_slot(module, path, fixed) for path, fixed in state.items()]
    return ModuleProgram(module, module, inputs, slots, feedback=spec.state, options=given,
                         weights=file_digest(path, 'policy.model')), given, ''


def _buffer_slot(root: Any, path: str, fixed: bool = False) -> BufferSlot:
    owner, _, name = path.rpartition('.')
    for part in filter(None, owner.split('.')):
        root = getattr(root, part)
    return BufferSlot(root, name, path, fixed)


def _described(names: list[str], spec: PolicySpec, given: Mapping[str, Any]) -> list[TensorInfo]:
    """Return inputs with the shapes and types that the policy file gives."""
    for what, keys in (('policy.shapes', spec.shapes), ('policy.options.dtypes', given['dtypes'])):
        for key in keys:
            if key not in names:
                raise Refusal(Code.INVALID_POLICY_FILE, f'{what}.{key}: the program has no such '
                              f'input; it has {", ".join(names)}')
    missing = [n for n in names if n not in spec.shapes]
    if missing:
        raise Refusal(Code.INVALID_POLICY_FILE, f'input {missing[0]} has no shape in the program; '
                      f'write policy.shapes: {{{missing[0]}: [1, …]}}')
    for name, dtype in given['dtypes'].items():
        if dtype not in DTYPES:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.dtypes.{name}: {dtype!r} is '
                          f'none of {", ".join(DTYPES)}')
    return [TensorInfo(buffer_name(n), tuple(spec.shapes[n]), given['dtypes'].get(n, 'F32'))
            for n in names]


def _check_shapes(spec: PolicySpec, inputs: list[TensorInfo]) -> None:
    known = {t.name: t for t in inputs}
    for name, shape in spec.shapes.items():
        if name not in known or known[name].shape != tuple(shape):
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: the program has '
                          + ', '.join(f'{t.name} {list(t.shape)}' for t in inputs))


def _from_factory(spec: PolicySpec, given: dict[str, Any],
                  arguments: Mapping[str, Any]) -> tuple[TensorProgram, dict[str, Any], str]:
    torch = import_torch()
    function = find_factory(spec)
    made = call_factory(function, PolicySpec(factory=spec.factory, options=arguments))
    if isinstance(made, TensorProgram) and not isinstance(made, torch.nn.Module):
        return made, given, source_digest(function, type(made))
    if isinstance(made, torch.nn.Module):
        made.eval()
    call = made if isinstance(made, torch.nn.Module) else getattr(made, 'tick', None)
    if not callable(call):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: {spec.factory} returned '
                      f'{type(made).__name__}; return a torch.nn.Module, an object with a method '
                      'tick, or a TensorProgram')
    source = source_digest(function, type(made))
    weights = []
    if spec.model is not None:
        weights.append(_load_weights(made, spec))
    modules = _modules(made)
    sources = {type(m) for module in modules.values() for m in module.modules()
               if not type(m).__module__.startswith('torch.')}
    weights += [source_digest(c) for c in sorted(sources, key=lambda c: c.__qualname__)]
    slots = _factory_slots(made, modules, given)
    covered = {slot.path for slot in slots}
    weights.append(digest_of({f'{at}{n}': digest(v) for at, m in modules.items()
                              for n, v in m.state_dict().items() if at + n not in covered}))
    named = made.forward if isinstance(made, torch.nn.Module) else call
    prefill = getattr(made, PREFILL, None)
    inputs = _described(_arguments(named), spec, given)
    rest: dict[str, Any] = {'feedback': spec.state, 'options': given, 'source': function,
                            'weights': digest_of(weights)}
    if callable(prefill):
        return PromptedProgram(made, call, inputs, slots, prefill=prefill,
                               prompts=_arguments(prefill), **rest), given, source
    return ModuleProgram(made, call, inputs, slots, **rest), given, source


def _arguments(function: Any) -> list[str]:
    """Return the names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [n for n, p in inspect.signature(function).parameters.items()
            if p.kind in kinds and p.default is inspect.Parameter.empty]


def _modules(made: Any) -> dict[str, Any]:
    """Return the modules of a factory's object, by the prefix of their attributes' paths."""
    torch = import_torch()
    if isinstance(made, torch.nn.Module):
        return {'': made}
    return {f'{n}.': v for n, v in vars(made).items() if isinstance(v, torch.nn.Module)}


def _load_weights(made: Any, spec: PolicySpec) -> str:
    """Fill the module from a safetensors file, every name or none; return the file's digest."""
    torch = import_torch()
    path = model_path(spec)
    if kind_of(path) != WEIGHTS or not isinstance(made, torch.nn.Module):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.model: beside a factory, {path.name} must '
                      'be safetensors and the factory must return a torch.nn.Module')
    from safetensors.torch import load_file
    try:
        made.load_state_dict(load_file(path))
    except Exception as e:
        raise Refusal(Code.BACKEND, f'policy.model: {path.name} does not fit what {spec.factory} '
                      f'made: {e}') from e
    return file_digest(path, 'policy.model')


def _factory_slots(made: Any, modules: Mapping[str, Any], given: Mapping[str, Any]) -> list[Slot]:
    declared = {**getattr(made, 'declared_state', {}), **given['declare']}
    slots: list[Slot] = [declared_slot(made, path, d) for path, d in declared.items()]
    used = set()
    for prefix, module in modules.items():
        for name, value in module.named_buffers(remove_duplicate=False):
            path = prefix + name
            matches = [p for p in given['constants'] if fnmatch.fnmatch(path, p)]
            used.update(matches)
            if value is not None and not matches and path not in declared:
                slots.append(_buffer_slot(made, path))
    for pattern in given['constants']:
        if pattern not in used:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.constants: no buffer is named '
                          f'{pattern!r}')
    return slots
