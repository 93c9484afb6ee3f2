"""torch.export programs: which buffers they change, from signature and graph.

A program's signature names mutated buffers only after decomposition; as exported, it holds the
in-place operations themselves. So the graph is followed as well, through views and branches.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from flashrt_ros.backends.aliases import RANDOM, Found
from flashrt_ros.backends.ports import TensorInfo, buffer_name
from flashrt_ros.backends.tensor_program import TORCH_TYPES, import_torch
from flashrt_ros.backends.torch_archive import export_without_pickles
from flashrt_ros.core.errors import Code, Refusal

_INPUT = 'input '


def load_export(path: Path, device: str = 'cpu') -> tuple[Any, list[TensorInfo], list[str]]:
    """Return `(module, inputs, paths of buffers that are state)`."""
    torch = import_torch()
    data = export_without_pickles(path)
    try:
        program = torch.export.load(data)
        if device != 'cpu':
            from torch.export.passes import move_to_device_pass
            program = move_to_device_pass(program, device)
        module = _module(program)
    except Exception as e:  # torch raises what its deserialiser raises
        raise Refusal(Code.BACKEND, f'{path.name} cannot be read as a torch.export program: '
                      f'{type(e).__name__}: {e}') from e
    found = analyse(module)
    signature = program.graph_signature
    for name in getattr(signature, 'user_inputs_to_mutate', {}).values():
        found.written.add(_INPUT + name)
    for name in sorted(found.written):
        if name.startswith(_INPUT):
            raise Refusal(Code.UNSUPPORTED, f'{name} is written in place; clone it first')
    if found.random:
        raise Refusal(Code.UNSUPPORTED, f'operation {found.random[0]} draws from torch\'s global '
                      'generator, which belongs to the whole process; draw from a counter that '
                      'is a buffer, or make the noise an input')
    state = sorted(found.written | set(signature.buffers_to_mutate.values()))
    return module, [_input(n) for n in module.graph.nodes if n.op == 'placeholder'], state


def _module(program: Any) -> Any:
    """Return the callable module. Its guards repeat what fixed ports hold anyway."""
    try:
        return program.module(check_guards=False)
    except TypeError:  # before torch 2.9
        return program.module()


def _input(node: Any) -> TensorInfo:
    torch = import_torch()
    value = node.meta.get('val')
    if not isinstance(value, torch.Tensor) or not all(isinstance(n, int) for n in value.shape):
        raise Refusal(Code.UNSUPPORTED, f'input {node.name} is no tensor of a fixed shape')
    return TensorInfo(buffer_name(node.name), tuple(value.shape), dtype_of(value))


def dtype_of(tensor: Any) -> str:
    """Return the safetensors name of a tensor's type."""
    wanted = str(tensor.dtype).removeprefix('torch.')
    for name, torch_name in TORCH_TYPES.items():
        if torch_name == wanted:
            return name
    raise Refusal(Code.UNSUPPORTED, f'data type {tensor.dtype} has no safetensors name')


def analyse(module: Any) -> Found:
    """Follow every value of a module's graph."""
    found = Found()
    _graph(module, {}, found)
    return found


def _graph(module: Any, given: dict[str, set[str]], found: Found) -> None:
    torch = import_torch()
    origins: dict[Any, set[str]] = {}
    inner: dict[Any, Any] = {}
    for node in module.graph.nodes:
        everything: set[str] = set().union(*(origins.get(n, set()) for n in node.all_input_nodes))
        if node.op == 'placeholder':
            everything = given.get(node.name, {_INPUT + node.name})
        elif node.op == 'get_attr':
            value = _resolve(module, node.target)
            if isinstance(value, torch.fx.GraphModule):
                inner[node] = value
            elif not given:  # attributes of a branch are its own constants
                found.read[node.target] = type(value).__name__
                everything = {node.target}
        elif node.op == 'call_function':
            if isinstance(node.target, torch._ops.OpOverload):
                everything = _operation(node, origins, found)
            else:  # a branch or a loop: its graphs may touch whatever they are given
                for used in node.all_input_nodes:
                    if used in inner:
                        names = [n.name for n in inner[used].graph.nodes if n.op == 'placeholder']
                        _graph(inner[used], dict.fromkeys(names, everything) or {'': set()}, found)
        elif node.op not in ('output', 'call_module'):
            raise Refusal(Code.UNSUPPORTED, f'the program calls {node.target} by name, so what it '
                          'changes cannot be found')
        origins[node] = everything


def _resolve(module: Any, path: str) -> Any:
    for name in path.split('.'):
        module = getattr(module, name)
    return module


def _operation(node: Any, origins: dict[Any, set[str]], found: Found) -> set[str]:
    """Note what an operation writes; return what its results may share memory with."""
    schema = node.target._schema
    shared: set[str] = set()
    generator = False
    for i, argument in enumerate(schema.arguments):
        value = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
        nodes = value if isinstance(value, list | tuple) else [value]
        sources: set[str] = set().union(
            *(origins[n] for n in nodes if getattr(n, 'op', None) and n in origins))
        shared |= sources if argument.alias_info is not None else set()
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.written |= sources
        generator = generator or (argument.name == 'generator' and value is not None)
    name = schema.name.partition('::')[2]
    if name in RANDOM and not generator:
        found.random.append(schema.name)
    return shared if any(r.alias_info is not None for r in schema.returns) else set()
