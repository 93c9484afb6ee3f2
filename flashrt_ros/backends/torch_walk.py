"""All attributes of a module or an object by dotted path, to see which of them a tick changes."""
from __future__ import annotations

from collections.abc import Iterator
import inspect
import sys
import types
from typing import Any

from flashrt_ros.backends.digests import value_digest
from flashrt_ros.backends.tensor_program import import_torch
from flashrt_ros.backends.torch_program import checksum

_DEPTH = 8


def walk(root: Any) -> Iterator[tuple[str, Any]]:
    """Yield `(path, value)`; objects of one's own and modules are entered, the rest are leaves."""
    yield from _walk(root, '', set(), 0)


def _walk(thing: Any, path: str, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    torch = import_torch()
    if id(thing) in seen or depth > _DEPTH:
        return
    seen.add(id(thing))
    if isinstance(thing, torch.jit.ScriptModule):
        items = script_attributes(thing)
    elif isinstance(thing, torch.nn.Module):
        internal = set(torch.nn.Module().__dict__) - {'training'}
        items = {**thing._parameters, **thing._buffers, **thing._modules}
        if not isinstance(thing, torch.fx.GraphModule):  # its attributes are the graph and caches
            items |= {k: v for k, v in vars(thing).items() if k not in internal}
    else:
        items = vars(thing)
    for name, value in items.items():
        at = f'{path}.{name}' if path else name
        if isinstance(value, torch.nn.Module) or _own(value):
            yield from _walk(value, at, seen, depth + 1)
        else:
            yield at, value


def script_attributes(module: Any) -> dict[str, Any]:
    """Return what TorchScript's forward reads or writes, by dotted path."""
    from flashrt_ros.backends.torch_script import get_path, state_of
    if not module._c._has_method('forward'):
        return dict(module.named_buffers())
    _, types_by_path = state_of(module)
    return {path: get_path(module, path) for path in types_by_path}


def _own(value: Any) -> bool:
    """Whether a value is an object of a class that neither Python nor a library supplies."""
    module = type(value).__module__.partition('.')[0]
    return (hasattr(value, '__dict__') and module not in ('torch', 'numpy', 'builtins')
            and not isinstance(value, type | types.ModuleType | types.FunctionType
                               | types.MethodType)
            and module not in sys.stdlib_module_names)


def digest(value: Any) -> str:
    """Return a digest of a leaf's whole content."""
    return value_digest(value, tensor_bytes)


def tensor_bytes(value: Any) -> bytes | None:
    """Return bytes that stand for a tensor's or a generator's content; None for the rest."""
    torch = import_torch()
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().numpy().tobytes())
    if isinstance(value, torch.Tensor):
        return f'{value.dtype}{tuple(value.shape)}'.encode() + bytes(checksum(value))
    return None


def globals_of(function: Any) -> dict[str, Any]:
    """Return the variables of a function's module, where code might keep something as well."""
    module = inspect.getmodule(function)
    return {f'{module.__name__}.{k}': v for k, v in vars(module).items()
            if not k.startswith('__') and not callable(v)
            and not isinstance(v, types.ModuleType)} if module else {}
