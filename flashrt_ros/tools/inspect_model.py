"""`flashrt-ros inspect MODEL`: ports, state and feedback pairs of a model file of any backend."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flashrt_ros import backends
from flashrt_ros.backends.files import checked_path
from flashrt_ros.backends.ports import TensorInfo, buffer_name
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_api import EngineTensor, find, tensors_of
from flashrt_ros.backends.tensorrt_engine import ENGINES, deserialise
from flashrt_ros.backends.tensorrt_plan import PlanHeader, check_plan, open_engine
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Role
from flashrt_ros.core.seam import Policy
from flashrt_ros.tools.build import json_option, root_option, shape_hint, shape_option
from flashrt_ros.tools.model_report import ModelReport

Shapes = Mapping[str, tuple[int, ...]]
TORCH = ('.pt', '.pth', '.pt2', '.ts')


def inspect(path: Path, root: Path, shapes: Shapes) -> ModelReport:
    """Return the report of a model file. Raises Refusal for a file that is none."""
    if path.suffix == '.onnx':
        return _onnx(path, root, shapes)
    if path.suffix in ENGINES:
        return _engine(path)
    if path.suffix in TORCH:
        return _torch(path, root, shapes)
    raise Refusal(Code.INVALID_ARGUMENT, f'{path.name}: known are .onnx, {", ".join(ENGINES)}, '
                  f'{", ".join(TORCH)}')


def _onnx(path: Path, root: Path, shapes: Shapes) -> ModelReport:
    from flashrt_ros.backends.onnx_graph import inspect_model
    given = {buffer_name(k): v for k, v in shapes.items()}
    try:
        info = inspect_model(path, root, shapes)
    except Refusal as refusal:
        raw = _raw_onnx(path, given)
        if raw is None:
            raise
        return replace(raw, remarks=(f'would be refused: {refusal.message}',))
    return ModelReport(path, 'onnx', 'ONNX', info.inputs, info.outputs,
                       facts={'sha256': info.weights, **info.summary}, shapes=given)


def _raw_onnx(path: Path, given: Shapes) -> ModelReport | None:
    """Return what an ONNX file says of itself, although a backend would not take it so."""
    import onnx
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception:  # protobuf raises types of its own, which differ between versions
        return None
    names = onnx.TensorProto.DataType.Name
    short = {'FLOAT': 'F32', 'INT64': 'I64', 'FLOAT16': 'F16', 'INT32': 'I32', 'DOUBLE': 'F64'}

    def port(value: Any) -> TensorInfo:
        kind, name = value.type.tensor_type, buffer_name(value.name)
        shape = tuple(d.dim_value if d.HasField('dim_value') else -1 for d in kind.shape.dim)
        element = names(kind.elem_type)
        return TensorInfo(name, given.get(name, shape), short.get(element, element))
    weights = {t.name for t in model.graph.initializer}
    inputs = tuple(port(v) for v in model.graph.input if v.name not in weights)
    outputs = tuple(port(v) for v in model.graph.output)
    if not outputs:
        return None
    return ModelReport(path, 'onnx', 'ONNX', inputs, outputs, shapes=given)


def _engine(path: Path) -> ModelReport:
    file = open_engine(path)
    check_plan(path, file.size, file.header, None)
    assert file.header is not None
    facts = {'built by': file.header.title, 'bytes': f'{file.size:,}'}
    remarks = [file.remark] if file.remark else []
    if file.note is not None:
        file.read()             # compares the digest
        key = file.note.key
        facts.update({'sha256': file.note.sha256, **{
            k: str(key[k]) for k in ('arch', 'precision', 'source') if k in key}})
        tensors = list(file.note.tensors)
        if not file.note.capturable:
            remarks.append('allocates memory while it runs: cannot be captured as a CUDA graph')
    else:
        try:
            tensors = _deserialised(file.read(), path, file.header)
        except Refusal as refusal:
            tensors = []
            remarks.append(f'its inputs and outputs cannot be seen here: {refusal.message}')
    return ModelReport(path, 'tensorrt', 'TensorRT engine',
                       tuple(t.info for t in tensors if t.is_input),
                       tuple(t.info for t in tensors if not t.is_input),
                       facts=facts, remarks=tuple(remarks))


def _deserialised(plan: bytes, path: Path, header: PlanHeader) -> list[EngineTensor]:
    """Load an engine without a note to see its ports; needs its library, driver and card."""
    library = find(header.library)
    check_plan(path, len(plan), header, library)
    _, engine = deserialise(library, plan, path.name)
    return tensors_of(library, engine)


def _torch(path: Path, root: Path, shapes: Shapes) -> ModelReport:
    stateless: list[str] = []
    while True:
        policy, device = backends.load('torch', PolicySpec(
            path, model_root=root, shapes=shapes, options={'stateless': stateless}))
        try:
            return _torch_report(path, policy, shapes)
        except Refusal as refusal:  # a pair that nobody has declared yet: the report suggests it
            name = refusal.details.get('input')
            if refusal.code is not Code.UNDECLARED_STATE or name is None or name in stateless:
                raise
            stateless.append(name)
        finally:
            policy.close()
            device.close()


def _torch_report(path: Path, policy: Policy, shapes: Shapes) -> ModelReport:
    layout = policy.layout()

    def ports(role: Role) -> tuple[TensorInfo, ...]:
        return tuple(TensorInfo(s.name, s.shape, s.dtype) for s in layout.select(role))
    return ModelReport(path, 'torch', 'torch program', ports(Role.INPUT), ports(Role.OUTPUT),
                       ports(Role.STATE), facts={'sha256': policy.identity()[0]['weights']},
                       shapes=dict(shapes))


@click.command('inspect')
@click.argument('model', type=click.Path(path_type=Path, dir_okay=False))
@shape_option
@root_option
@json_option
def command(model: Path, shapes: Shapes, model_root: Path | None, as_json: bool) -> None:
    """Print what MODEL (ONNX, engine, TorchScript, torch.export) takes, gives and keeps."""
    root = model_root or model.parent
    with shape_hint():
        report = inspect(checked_path(model.absolute(), Path.cwd(), root, 'MODEL'), root, shapes)
    if as_json:
        click.echo(report.to_json())
    else:
        report.show(Console())
