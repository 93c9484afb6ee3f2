"""What an ONNX file says without being run: ports, shapes, random operations, external data.

Needs the `onnx` library only, so that tools can inspect a model where no runtime is installed.
Weights in external files are hashed and measured, never loaded.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.digests import file_digest
from flashrt_ros.backends.files import checked_path
from flashrt_ros.backends.ports import TensorInfo, buffer_name
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import digest_of

try:
    import onnx
    from onnx import numpy_helper
except ImportError as error:
    raise Refusal(Code.UNSUPPORTED, 'the onnx backend needs the onnx library; install it with '
                  "pip install 'flashrt_ros[onnx]'") from error

# Kernels of these operations keep a generator of their own, seeded or not: it advances with every
# run, no caller can read it, and a restore would not bring it back.
RANDOM = frozenset(('RandomNormal', 'RandomNormalLike', 'RandomUniform', 'RandomUniformLike',
                    'Multinomial', 'Bernoulli', 'Sampling', 'BitmaskDropout', 'BiasDropout',
                    'BitmaskBiasDropout'))
_DTYPES = {'FLOAT': 'F32', 'DOUBLE': 'F64', 'FLOAT16': 'F16', 'BFLOAT16': 'BF16', 'BOOL': 'BOOL',
           'INT8': 'I8', 'INT16': 'I16', 'INT32': 'I32', 'INT64': 'I64', 'UINT8': 'U8',
           'UINT16': 'U16', 'UINT32': 'U32', 'UINT64': 'U64', 'FLOAT8E4M3FN': 'F8_E4M3',
           'FLOAT8E5M2': 'F8_E5M2'}
Dims = tuple['int | str | None', ...]


@dataclass(frozen=True)
class ModelInfo:
    """An ONNX file: complete ports by buffer name, their names in the file, digests."""

    path: Path
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    raw: Mapping[str, str]                   # buffer name -> name in the file
    element: Mapping[str, int]               # buffer name -> onnx.TensorProto data type
    symbols: Mapping[str, int]               # named dimension -> its fixed size
    defaults: Mapping[str, NDArray[Any]]     # inputs that an initializer of the same name fills
    weights: str                             # SHA-256 over the file and all external data
    summary: Mapping[str, str]               # ir version, opsets, producer


def inspect_model(path: Path, root: Path, shapes: Mapping[str, tuple[int, ...]] | None = None,
                  optional: tuple[str, ...] = ()) -> ModelInfo:
    """Read and check an ONNX file below `root`. Raises Refusal that names what is wrong.

    `shapes` completes inputs (and outputs) with dynamic dimensions. Inputs that also have an
    initializer are constants, unless `optional` names them.
    """
    try:
        model = onnx.load(str(path), load_external_data=False)
        graph = model.graph
    except Exception as e:  # protobuf raises types of its own, which differ between versions
        raise Refusal(Code.BACKEND, f'{path} cannot be read as ONNX: {e}') from e
    refuse_random(model)
    shapes = {buffer_name(k): tuple(v) for k, v in (shapes or {}).items()}
    fed = {t.name: t for t in graph.initializer}
    values = [v for v in graph.input if v.name not in fed or buffer_name(v.name) in optional]
    known = [buffer_name(v.name) for v in [*values, *graph.output]]
    for name in shapes:
        if name not in known:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: the model has no input '
                          f'or output of that name; it has {", ".join(known)}')
    symbols: dict[str, int] = {}
    inputs = [_complete(v, shapes, symbols, 'input') for v in values]
    inferred = _inferred(model, shapes)
    outputs = [_complete(inferred.get(v.name, v), shapes, symbols, 'output')
               for v in graph.output]
    return ModelInfo(
        path, tuple(inputs), tuple(outputs),
        {buffer_name(v.name): v.name for v in [*values, *graph.output]},
        {buffer_name(v.name): v.type.tensor_type.elem_type for v in [*values, *graph.output]},
        symbols,
        {buffer_name(v.name): _initial(fed[v.name], path) for v in values if v.name in fed},
        _weights(model, path, root),
        {'ir_version': str(model.ir_version), 'producer': model.producer_name,
         'opsets': ', '.join(f'{o.domain or "ai.onnx"} {o.version}' for o in model.opset_import)})


def refuse_random(model: Any) -> None:
    """Raise Refusal(UNSUPPORTED) that names the first operation with hidden random state."""
    constants = {t.name: t for t in model.graph.initializer}
    places = [(model.graph.node, 'graph')]
    places += [(f.node, f'function {f.name}') for f in model.functions]
    for nodes, where in places:
        for node, place in _walk(nodes, where):
            if node.op_type in RANDOM or (node.op_type == 'Dropout'
                                          and _trains(node, nodes, constants)):
                what = 'in training mode ' if node.op_type == 'Dropout' else ''
                raise Refusal(Code.UNSUPPORTED, f'operation {node.op_type} {what}'
                              f'({node.name or node.output[0]!r} in {place}) draws from a '
                              'generator that no capsule can hold; export the model for '
                              'inference, or make the noise an input')


def _walk(nodes: Any, where: str) -> Iterator[tuple[Any, str]]:
    """Yield `(node, place)` of all nodes, subgraphs of If, Loop and Scan included."""
    for node in nodes:
        yield node, where
        for a in node.attribute:
            for g in [a.g] if a.type == onnx.AttributeProto.GRAPH else list(a.graphs):
                yield from _walk(g.node, f'{a.name} of {node.op_type} {node.name or ""} in {where}')


def _trains(node: Any, nodes: Any, constants: Mapping[str, Any]) -> bool:
    """Whether a Dropout may drop: its training_mode is true, or is not known to be false."""
    if len(node.input) < 3 or not node.input[2]:   # before opset 7 an attribute said so
        return any(a.name == 'is_test' and a.i == 0 for a in node.attribute)
    value = constants.get(node.input[2])
    for other in nodes:
        if other.op_type == 'Constant' and other.output[0] == node.input[2]:
            value = next((a.t for a in other.attribute if a.name == 'value'), None)
    return value is None or bool(numpy_helper.to_array(value).any())


def _dims(value: Any) -> Dims | None:
    """Return a value's dimensions, None where even their number is unknown."""
    if not value.type.tensor_type.HasField('shape'):
        return None
    return tuple(d.dim_value if d.HasField('dim_value') else (d.dim_param or None)
                 for d in value.type.tensor_type.shape.dim)


def _complete(value: Any, shapes: Mapping[str, tuple[int, ...]], symbols: dict[str, int],
              what: str) -> TensorInfo:
    """Return a port with a complete shape, or refuse by name."""
    name = buffer_name(value.name)
    kind = value.type.WhichOneof('value')
    if kind != 'tensor_type':
        raise Refusal(Code.UNSUPPORTED, f'{what} {name} is a {kind or "value without type"}, not '
                      'a tensor')
    element = onnx.TensorProto.DataType.Name(value.type.tensor_type.elem_type)
    if element not in _DTYPES:
        raise Refusal(Code.UNSUPPORTED, f'{what} {name} has data type {element}; supported are '
                      f'{", ".join(_DTYPES)}')
    dims, given = _dims(value), shapes.get(name)
    if given is not None:
        if dims is not None and (len(dims) != len(given) or any(
                isinstance(d, int) and d != g for d, g in zip(dims, given, strict=True))):
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: is {list(given)}, the '
                          f'model says {_show(dims)}')
        for d, g in zip(dims or (), given, strict=False):
            if isinstance(d, str) and symbols.setdefault(d, g) != g:
                raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: dimension {d!r} '
                              f'is {g} here and {symbols[d]} elsewhere')
        return TensorInfo(name, given, _DTYPES[element])
    shape = tuple(symbols.get(d, d) if isinstance(d, str) else d for d in dims or ())
    if dims is None or not all(isinstance(d, int) for d in shape):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{what} {name} has a dynamic shape '
                      f'{_show(dims)}; write policy.shapes: {{{name}: [...]}} with fixed sizes')
    return TensorInfo(name, tuple(int(d) for d in shape if d is not None), _DTYPES[element])


def _show(dims: Dims | None) -> str:
    if dims is None:
        return '(any rank)'
    return f'[{", ".join("?" if d is None else str(d) for d in dims)}]'


def _inferred(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return outputs by name with the shapes that follow from the fixed inputs, as far as known."""
    dynamic = [v for v in model.graph.output
               if any(not isinstance(d, int) for d in _dims(v) or (None,))]
    if not dynamic or not shapes:
        return {}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for value in copy.graph.input:
        if (given := shapes.get(buffer_name(value.name))) is not None:
            value.type.tensor_type.shape.ClearField('dim')
            for n in given:
                value.type.tensor_type.shape.dim.add().dim_value = n
    for value in copy.graph.output:
        value.type.tensor_type.ClearField('shape')
    try:
        out = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph.output
    except Exception:  # inference is a help, not a check; the runtime checks
        return {}
    complete = {v.name: v for v in out}
    return {v.name: complete[v.name] for v in dynamic
            if all(isinstance(d, int) for d in _dims(complete[v.name]) or (None,))}


def _tensors(model: Any) -> Iterator[Any]:
    """Yield every tensor of a model: initializers and constants, in subgraphs and functions."""
    graphs = [model.graph]
    node_lists = [f.node for f in model.functions]
    while graphs or node_lists:
        if graphs:
            g = graphs.pop()
            yield from g.initializer
            for s in g.sparse_initializer:
                yield from (s.values, s.indices)
            node_lists.append(g.node)
        for node in node_lists.pop():
            for a in node.attribute:
                yield from [a.t] if a.type == onnx.AttributeProto.TENSOR else list(a.tensors)
                graphs += [a.g] if a.type == onnx.AttributeProto.GRAPH else list(a.graphs)


def _weights(model: Any, path: Path, root: Path) -> str:
    """Return SHA-256 over the whole file and every external data file. Names a missing one."""
    needed: dict[str, int] = {}
    for tensor in _tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            entry = {e.key: e.value for e in tensor.external_data}
            end = _count(entry, 'offset', tensor) + _count(entry, 'length', tensor)
            location = entry.get('location', '')
            needed[location] = max(needed.get(location, 0), end)
    digests = {'': file_digest(path, 'model')}
    for location, size in sorted(needed.items()):
        file = checked_path(location, path.parent, root, f'external data of {path.name}')
        if file.stat().st_size < size:
            raise Refusal(Code.CORRUPT, f'external data of {path.name}: {file} has '
                          f'{file.stat().st_size} bytes, the model needs {size}')
        digests[location] = file_digest(file, 'external data')
    return digest_of(digests) if needed else digests['']


def _count(entry: Mapping[str, str], key: str, tensor: Any) -> int:
    text = entry.get(key, '0')
    if not text.isdecimal():
        raise Refusal(Code.CORRUPT, f'external data of tensor {tensor.name!r}: {key} is {text!r}')
    return int(text)


def _initial(tensor: Any, path: Path) -> NDArray[Any]:
    """Return an initializer's value in its storage type."""
    array = np.asarray(numpy_helper.to_array(tensor, str(path.parent)))
    # BF16 and F8 come as extension types of the same width: only their bits matter here.
    return array if array.dtype.kind in 'biuf' else array.view(f'u{array.itemsize}')


