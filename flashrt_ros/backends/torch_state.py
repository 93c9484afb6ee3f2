"""State that a module keeps in attributes, brought into buffers: one slot for each piece.

`BufferSlot`: a tensor attribute lies in the arena. The module writes it in place, or assigns
another tensor, which is copied into the arena and taken out again.
`MirrorSlot`: what cannot lie in an arena (a tensor that is None at first or changes its length, a
deque, a number, a generator) is rebuilt from its buffers before a tick and written to them after
it. Only what is declared is mirrored; what is not declared and changes is refused by name.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.ports import buffer_name
from flashrt_ros.backends.tensor_program import TORCH_TYPES, Tensors, import_torch, torch_dtype
from flashrt_ros.backends.torch_export import dtype_of
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role

NUMBERS = {'int': 'I64', 'float': 'F64', 'bool': 'BOOL'}
KINDS = ('tensor', 'optional', 'rows', 'deque', 'generator', *NUMBERS)


def bits(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor's bytes as uint8 (nbytes,)."""
    torch = import_torch()
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return np.array(flat.numpy())


class BufferSlot:
    """A tensor attribute of `owner`, always a tensor of one shape and type.

    `fixed`: the program was seen to write it in place only, so that nothing need be looked up.
    """

    host = False  # nothing is decided in Python, so a graph may hold it

    def __init__(self, owner: Any, attribute: str, path: str, fixed: bool = False) -> None:
        torch = import_torch()
        self.owner, self.attribute, self.path, self.fixed = owner, attribute, path, fixed
        self.name = buffer_name(path)
        # A module's own table, where there is one: its attribute access costs microseconds.
        registered = (isinstance(owner, torch.nn.Module)
                      and not isinstance(owner, torch.jit.ScriptModule)
                      and attribute in owner._buffers)
        self._table: dict[str, Any] | None = owner._buffers if registered else None
        value = self.value()
        self.first = value.detach().clone().contiguous()
        self.storage = value.untyped_storage().data_ptr()

    def specs(self) -> list[BufferSpec]:
        """Return its buffer."""
        return [BufferSpec(self.name, tuple(self.first.shape), dtype_of(self.first), Role.STATE)]

    def initial(self) -> dict[str, NDArray[Any]]:
        """Return the bytes that the file or the factory gave it."""
        return {self.name: bits(self.first)}

    def value(self) -> Any:
        """Return the attribute."""
        if self._table is not None:
            return self._table[self.attribute]
        return getattr(self.owner, self.attribute)

    def load(self, tensors: Tensors) -> None:
        """Put the buffer in the attribute's place."""
        if self._table is not None:
            self._table[self.attribute] = tensors[self.name]
        else:
            setattr(self.owner, self.attribute, tensors[self.name])

    def held(self) -> list[Any]:
        """Return the tensors that the attribute refers to."""
        return [self.value()]

    def moved(self, tensors: Tensors) -> list[tuple[Any, Any]]:
        """Return `(buffer, value)` if another tensor was assigned."""
        value, buffer = self.value(), tensors[self.name]
        if value is buffer:
            return []
        return [(buffer, fitting(value, buffer, self.path))]


def fitting(value: Any, buffer: Any, path: str) -> Any:
    """Return a value that has the buffer's shape and type, or refuse: a copy would broadcast."""
    torch = import_torch()
    if not isinstance(value, torch.Tensor):
        raise Refusal(Code.UNDECLARED_STATE, f'{path} became {type(value).__name__}; it was a '
                      'tensor')
    if value.shape != buffer.shape or value.dtype != buffer.dtype:
        raise Refusal(Code.BACKEND, f'{path} became {value.dtype} {tuple(value.shape)}; its buffer '
                      f'is {buffer.dtype} {tuple(buffer.shape)}')
    return value


class MirrorSlot:
    """Declared state of one kind, see `KINDS`; `shape` and `dtype` are those of a tensor in it.

    `rows`: the tensor's length along `axis` varies up to `shape[axis]`, or it is None. `deque`:
    up to `length` tensors. Beside the data stand `<path>.valid` or `<path>.count`, -1 for None.
    """

    host = True
    fixed = False

    def __init__(self, owner: Any, attribute: str, path: str, kind: str,
                 given: Mapping[str, Any]) -> None:
        self.owner, self.attribute, self.path, self.kind = owner, attribute, path, kind
        self.name = buffer_name(path)
        self.axis = int(given.get('axis', 0))
        self.shape = tuple(given.get('shape', ()))
        self.dtype = NUMBERS.get(kind) or str(given.get('dtype', 'F32'))
        self.length = int(given.get('length', 0))
        self.first = getattr(owner, attribute)
        self.extra = {'optional': ('valid', 'BOOL'), 'rows': ('count', 'I64'),
                      'deque': ('count', 'I64')}.get(kind)
        if kind in NUMBERS:
            self.shape = (1,)
        elif kind == 'generator':
            self.shape, self.dtype = tuple(self.first.get_state().shape), 'U8'
        elif kind == 'deque':
            self.shape = (self.length, *self.shape)
        # What the factory gave, apart from the live object, which a run changes.
        if isinstance(self.first, list | deque):
            self.first = type(self.first)((t.clone() for t in self.first), *_bound(self.first))
        elif kind == 'generator':
            self.first = self.first.get_state()
        elif kind in ('optional', 'rows') and self.first is not None:
            self.first = self.first.detach().clone()

    def specs(self) -> list[BufferSpec]:
        """Return the data's buffer, and the one that says what of it counts."""
        data = BufferSpec(self.name, self.shape, self.dtype, Role.STATE)
        if self.extra is None:
            return [data]
        return [data, BufferSpec(f'{self.name}.{self.extra[0]}', (1,), self.extra[1], Role.STATE)]

    def initial(self) -> dict[str, NDArray[Any]]:
        """Return the buffers' bytes for the value that the factory gave."""
        torch = import_torch()
        made = {s.name: torch.zeros(s.shape, dtype=torch_dtype(s.dtype)) for s in self.specs()}
        for buffer, value in self._pairs(self.first, made):
            buffer.copy_(value)
        return {name: bits(t) for name, t in made.items()}

    def load(self, tensors: Tensors) -> None:
        """Rebuild the attribute from the buffers."""
        data = tensors[self.name]
        if self.kind in NUMBERS:
            setattr(self.owner, self.attribute, data.item())
        elif self.kind == 'generator':
            getattr(self.owner, self.attribute).set_state(data.cpu())
        elif self.kind == 'optional':
            setattr(self.owner, self.attribute, data if bool(self._extra(tensors)) else None)
        else:
            n = int(self._extra(tensors))
            value: Any = None
            if self.kind == 'rows' and n >= 0:
                value = data.narrow(self.axis, 0, n).clone()
            elif self.kind == 'deque':
                value = type(self.first)((data[i].clone() for i in range(n)), *_bound(self.first))
            setattr(self.owner, self.attribute, value)

    def held(self) -> list[Any]:
        """Return the tensors that the attribute refers to."""
        torch = import_torch()
        value = getattr(self.owner, self.attribute)
        values = value if self.kind == 'deque' else [value]
        return [v for v in values if isinstance(v, torch.Tensor)]

    def moved(self, tensors: Tensors) -> list[tuple[Any, Any]]:
        """Return `(buffer, value)` of all that has to be written to the buffers."""
        return [(b, v) for b, v in self._pairs(getattr(self.owner, self.attribute), tensors)
                if v is not b]

    def _extra(self, tensors: Tensors) -> Any:
        assert self.extra is not None
        return tensors[f'{self.name}.{self.extra[0]}'].item()

    def _pairs(self, value: Any, tensors: Tensors) -> list[tuple[Any, Any]]:
        torch = import_torch()
        data = tensors[self.name]
        if self.kind in NUMBERS:
            if type(value).__name__ != self.kind:
                raise Refusal(Code.UNDECLARED_STATE, f'{self.path} became {value!r}; it was '
                              f'declared {self.kind}')
            return [(data, torch.tensor([value], dtype=data.dtype))]
        if self.kind == 'generator':
            return [(data, value if value is self.first else value.get_state())]
        assert self.extra is not None
        flag = tensors[f'{self.name}.{self.extra[0]}']
        if value is None:
            none = -1 if self.extra[0] == 'count' else 0
            return [(data, torch.zeros_like(data)), (flag, torch.full_like(flag, none))]
        if self.kind == 'optional':
            return [(data, fitting(value, data, self.path)), (flag, torch.ones_like(flag))]
        return self._counted(value, data, flag)

    def _counted(self, value: Any, data: Any, flag: Any) -> list[tuple[Any, Any]]:
        torch = import_torch()
        axis, n = (0, len(value)) if self.kind == 'deque' else (self.axis, value.shape[self.axis])
        if n > data.shape[axis]:
            raise Refusal(Code.BACKEND, f'{self.path} holds {n} entries, {data.shape[axis]} were '
                          'declared')
        full = torch.zeros_like(data)
        for i in range(n if self.kind == 'deque' else 0):
            full[i] = fitting(value[i], data[i], self.path)
        if self.kind == 'rows':
            part = full.narrow(axis, 0, n)
            part.copy_(fitting(value, part, self.path))
        return [(data, full), (flag, torch.full_like(flag, n))]


def _bound(value: Any) -> tuple[Any, ...]:
    return (value.maxlen,) if isinstance(value, deque) else ()


def declared_slot(root: Any, path: str, given: Any) -> BufferSlot | MirrorSlot:
    """Return the slot of one declaration. Raises Refusal(INVALID_POLICY_FILE) that names it."""
    torch = import_torch()
    where = f'declared state {path}'
    owner, _, attribute = path.rpartition('.')
    try:
        for name in filter(None, owner.split('.')):
            root = getattr(root, name)
        value = getattr(root, attribute)
    except AttributeError as e:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: {e}') from e
    if not isinstance(given, Mapping) or given.get('kind') not in KINDS:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: write a kind, one of '
                      f'{", ".join(KINDS)}')
    kind = given['kind']
    wanted = {'tensor': torch.Tensor, 'optional': (torch.Tensor, type(None)),
              'rows': (torch.Tensor, type(None)), 'deque': (list, deque),
              'generator': torch.Generator, 'int': int, 'float': float, 'bool': bool}[kind]
    if not isinstance(value, wanted) or (kind == 'int' and isinstance(value, bool)):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: is {type(value).__name__}, which kind '
                      f'{kind} does not hold')
    if kind == 'tensor':
        return BufferSlot(root, attribute, path)
    shape = given.get('shape', ())
    if (kind in ('optional', 'rows', 'deque') and (
            'shape' not in given or given.get('dtype', 'F32') not in TORCH_TYPES
            or (kind == 'rows' and not 0 <= given.get('axis', 0) < len(shape))
            or (kind == 'deque' and given.get('length', 0) < 1))):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: write shape and dtype of a tensor in '
                      'it; for rows an axis within the shape, for a deque its length')
    return MirrorSlot(root, attribute, path, kind, given)


def advice(path: str, before: Any, after: Any) -> str:
    """Return how state that was found by running could be declared."""
    torch = import_torch()
    sample = after if after is not None else before
    if isinstance(sample, list | deque) and sample and isinstance(sample[0], torch.Tensor):
        n = getattr(sample, 'maxlen', None) or len(sample)
        how = f'{{kind: deque, {_tensor(sample[0])}, length: {n}}}'
    elif isinstance(sample, torch.Tensor):
        if before is None:
            how = f'{{kind: optional, {_tensor(sample)}}}'
        elif isinstance(before, torch.Tensor) and before.shape != after.shape:
            how = f'{{kind: rows, {_tensor(sample)}, axis: …}} with the greatest shape'
        else:
            how = '{kind: tensor}, or register it as a buffer'
    elif isinstance(sample, torch.Generator):
        how = '{kind: generator}'
    elif type(sample).__name__ in NUMBERS:
        how = f'{{kind: {type(sample).__name__}}}'
    else:
        return f'{path} ({type(sample).__name__}): keep it in a tensor buffer'
    return f'{path} ({type(before).__name__}): declare {path}: {how}'


def _tensor(t: Any) -> str:
    return f'dtype: {dtype_of(t)}, shape: {list(t.shape)}'
