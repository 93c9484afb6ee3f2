"""Builds a TensorRT engine from an ONNX file, with every dimension fixed.

What TensorRT would accept and a session cannot hold is refused here by name: a dimension without a
value, an input that decides shapes, an operation that draws random numbers from a hidden
generator. Data types are those of the ONNX file and TF32 is off, unless `precision` says otherwise.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
import functools
from pathlib import Path
import re
import threading
from typing import Any, Protocol

from flashrt_ros.backends.ports import buffer_name
from flashrt_ros.backends.tensorrt_api import (
    DTYPES,
    LOG,
    Builder,
    Config,
    EngineTensor,
    Journal,
    Library,
    Network,
    Parser,
    Tensor,
    dtype_of,
    listening,
    shape_of,
)
from flashrt_ros.core.errors import Code, Refusal

PRECISIONS = ('model', 'tf32', 'fp16', 'bf16')
ANY_ARCH = 'portable'
_MISSING_FILE = re.compile(r'Failed to open file: ?(.+)')


@dataclass(frozen=True)
class BuildOptions:
    """What an engine is built for. `arch` is sm_89, …, or portable (TensorRT-RTX only)."""

    precision: str = 'model'
    workspace_mib: int = 0              # 0: TensorRT's own default
    optimization_level: int = 3         # TensorRT's 0 to 5
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by input buffer name
    arch: str = ANY_ARCH

    def describe(self) -> dict[str, object]:
        """Return what makes one engine differ from another, as JSON values."""
        return {'precision': self.precision, 'workspace_mib': self.workspace_mib,
                'optimization_level': self.optimization_level, 'arch': self.arch,
                'shapes': {k: list(v) for k, v in sorted(self.shapes.items())}}


@dataclass(frozen=True)
class Built:
    """A serialised engine and what its inputs and outputs are."""

    plan: bytes
    tensors: tuple[EngineTensor, ...]
    capturable: bool    # built so that a CUDA graph can hold it


@dataclass(frozen=True)
class Parsed:
    """A network and what must live as long: the parser owns the weights that it refers to."""

    builder: Builder
    network: Network
    parser: Parser


class Progress(Protocol):
    """Told about the phases of a build, from any thread."""

    def start(self, phase: str, parent: str | None, steps: int) -> None: ...
    def step(self, phase: str, step: int) -> None: ...
    def finish(self, phase: str) -> None: ...


def parse(library: Library, model: Path, *, typed: bool = True) -> Parsed:
    """Parse an ONNX file, external data included. Raises Refusal that names what is wrong.

    `typed`: every kernel computes in the types that the file gives.
    """
    trt = library.module
    with listening(library) as journal:
        try:
            builder: Builder = trt.Builder(library.logger)
        except TypeError as e:  # what the bindings make of a null pointer
            raise journal.refusal(f'{library.title} cannot build engines here') from e
        if not library.is_rtx:
            trt.init_libnvinfer_plugins(library.logger, '')
        network = builder.create_network(
            1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED) if typed else 0)
        parser: Parser = trt.OnnxParser(network, library.logger)
        if not parser.parse_from_file(str(model)):
            raise _parse_refusal(library, model, parser, journal)
        if network.num_outputs == 0:
            raise Refusal(Code.CORRUPT, f'{model} is not an ONNX model: it has no outputs')
    return Parsed(builder, network, parser)


def _parse_refusal(library: Library, model: Path, parser: Parser, journal: Journal) -> Refusal:
    for line in journal.errors:
        missing = _MISSING_FILE.search(line)
        if missing:
            return Refusal(Code.NOT_FOUND, f'{model} keeps weights in {missing[1].strip()}, '
                           'which does not exist or cannot be read; copy it beside the model')
    if parser.num_errors == 0:
        return journal.refusal(f'{library.title} cannot read {model}', Code.CORRUPT)
    error = parser.get_error(0)
    text = ' '.join(error.desc().split())
    node = ''
    if error.node() >= 0:
        node = f' at node {error.node_name() or error.node()} ({error.node_operator()})'
    if 'lugin' in text and 'not found' in text:
        return Refusal(Code.UNSUPPORTED, f'{model}: {library.title} has no operation or plugin '
                       f'{error.node_operator()!r} (node {error.node_name() or error.node()}); '
                       'replace it in the model, or install a TensorRT that has it, or take '
                       f'backend: onnx. It said: {text}')
    if error.code().name in ('MODEL_DESERIALIZE_FAILED', 'INVALID_VALUE'):
        return Refusal(Code.CORRUPT, f'{model} is not a readable ONNX model: {text}')
    return Refusal(Code.UNSUPPORTED, f'{model}: {library.title} cannot take the model{node}: '
                   f'{text}')


def network_tensors(network: Network) -> list[EngineTensor]:
    """Return a network's inputs and outputs, -1 for open dimensions, with the model's names."""
    found = []
    for is_input, count, get in ((True, network.num_inputs, network.get_input),
                                 (False, network.num_outputs, network.get_output)):
        for t in map(get, range(count)):
            shape = tensor_shape(t)
            dims = tuple(t.get_dimension_name(i) or None for i in range(len(shape)))
            found.append(EngineTensor(t.name, is_input, shape, dtype_of(t.dtype), dims))
    return found


def tensor_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return a network tensor's shape. Raises UNSUPPORTED that names it."""
    try:
        return shape_of(tensor.shape)
    except (RuntimeError, Refusal) as e:  # the shapes given do not fit together
        raise Refusal(Code.UNSUPPORTED, f'{tensor.name}: its shape cannot be worked out: '
                      f'{e}') from e


def fix_shapes(network: Network, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give every input a fixed shape, check types and outputs. Raises Refusal by name."""
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    known = {buffer_name(t.name): t for t in inputs}
    for name, wanted in shapes.items():
        tensor = known.get(buffer_name(name))
        if tensor is None:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: the model has no such '
                          f'input; it has {", ".join(known)}')
        check_shape(name, tensor_shape(tensor), wanted)
        tensor.shape = wanted
    for tensor in inputs:
        shape = tensor_shape(tensor)
        if tensor.is_shape_tensor:
            raise Refusal(Code.UNSUPPORTED, f'input {tensor.name} decides the shape of other '
                          'tensors, so they would not be fixed; make it a constant of the model')
        open_dims = [tensor.get_dimension_name(i) or str(i)
                     for i, n in enumerate(shape) if n < 0]
        if open_dims:
            example = ', '.join(str(n) if n >= 0 else '1' for n in shape)
            raise Refusal(Code.INVALID_POLICY_FILE, f'input {tensor.name} has shape {shape}; '
                          f'dimension {", ".join(open_dims)} has no value: write '
                          f'policy.shapes: {{{buffer_name(tensor.name)}: [{example}]}}')
        _check_dtype('input', tensor)
    for i in range(network.num_outputs):
        tensor = network.get_output(i)
        shape = tensor_shape(tensor)
        if any(n < 0 for n in shape):
            raise Refusal(Code.UNSUPPORTED, f'output {tensor.name} has shape {shape} although all '
                          'inputs are fixed: it depends on the data and has no fixed address')
        _check_dtype('output', tensor)


def check_shape(name: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Refuse a shape that does not agree with the dimensions that a model fixes."""
    if (len(wanted) != len(shape) or any(n < 1 for n in wanted)
            or any(n not in (-1, w) for n, w in zip(shape, wanted, strict=True))):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: {list(wanted)} does not '
                      f'fit the model, where it is {list(shape)} (-1: open)')


def _check_dtype(kind: str, tensor: Tensor) -> None:
    if tensor.dtype.name not in DTYPES:
        raise Refusal(Code.UNSUPPORTED, f'{kind} {tensor.name} has type {tensor.dtype.name}; '
                      f'ports may be {", ".join(DTYPES)}')


def check_random(library: Library, network: Network) -> None:
    """Refuse layers that draw random numbers: their generator is no STATE."""
    trt = library.module
    for i in range(network.num_layers):
        layer = network.get_layer(i)
        if layer.type == trt.LayerType.FILL:
            layer.__class__ = trt.IFillLayer  # the bindings return every layer as ILayer
            if layer.operation != trt.FillOperation.LINSPACE:
                raise Refusal(Code.UNDECLARED_STATE, f'layer {layer.name} draws random numbers '
                              f'({layer.operation.name}) from a generator that no capsule holds; '
                              'make the noise an input, or compute it from a counter that is '
                              'STATE')


def build(library: Library, model: Path, options: BuildOptions,
          progress: Progress | None = None) -> Built:
    """Parse, fix, build and serialise. Minutes on a small board. Raises Refusal."""
    flags = library.module.BuilderFlag
    half = options.precision in ('fp16', 'bf16')
    if options.precision not in PRECISIONS:
        raise Refusal(Code.INVALID_POLICY_FILE, f'precision {options.precision!r} is not one of '
                      f'{", ".join(PRECISIONS)}')
    if half and not hasattr(flags, options.precision.upper()):
        raise Refusal(Code.UNSUPPORTED, f'precision {options.precision}: {library.title} takes '
                      'all types from the ONNX file; convert the file (weights, inputs and state) '
                      'and take precision: model')
    parsed = parse(library, model, typed=not half)
    with listening(library) as journal:
        fix_shapes(parsed.network, options.shapes)
        check_random(library, parsed.network)
        tensors = tuple(replace(t, dims=()) for t in network_tensors(parsed.network))
        # TensorRT-RTX must be told to leave all memory to us, or its engine cannot be captured;
        # a model for which it cannot do so is built without, and then runs uncaptured.
        for capturable in (True, False) if hasattr(flags, 'REQUIRE_USER_ALLOCATION') else (None,):
            journal.errors.clear()
            library.logger.interrupted = False
            monitor = _monitor(library.module)(progress, library.logger)
            config = _config(library, parsed.builder, options, bool(capturable))
            config.progress_monitor = monitor
            memory = parsed.builder.build_serialized_network(parsed.network, config)
            if monitor.cancelled:
                raise KeyboardInterrupt
            if memory is not None:
                # The full library has no such flag: whether it captures is seen by trying.
                return Built(bytes(memory), tensors,  # type: ignore[call-overload]
                             capturable is not False)
    raise journal.refusal(f'{library.title} could not build an engine for {options.arch} from '
                          f'{model}')


def _config(library: Library, builder: Builder, options: BuildOptions, capturable: bool
            ) -> Config:
    trt = library.module
    config = builder.create_builder_config()
    if options.precision == 'tf32':
        config.set_flag(trt.BuilderFlag.TF32)
    else:
        config.clear_flag(trt.BuilderFlag.TF32)
    if options.precision in ('fp16', 'bf16'):
        config.set_flag(getattr(trt.BuilderFlag, options.precision.upper()))
    if capturable:
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if options.workspace_mib:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib << 20)
    config.builder_optimization_level = options.optimization_level
    target = getattr(getattr(trt, 'ComputeCapability', None), options.arch.replace('sm_', 'SM'),
                     None)
    if target is not None:
        config.num_compute_capabilities = 1
        if not config.set_compute_capability(target, 0):
            raise Refusal(Code.UNSUPPORTED, f'{library.title} cannot build for {options.arch}')
    elif options.arch != ANY_ARCH and library.is_rtx:
        raise Refusal(Code.UNSUPPORTED, f'{library.title} cannot build for {options.arch}; it '
                      f'knows {", ".join(f"sm_{a}{b}" for a, b in library.capabilities())}')
    return config


@functools.cache
def _monitor(trt: Any) -> Any:
    """Return a class that passes TensorRT's progress on, and Ctrl-C back.

    An exception must not leave a callback, which TensorRT calls as C++ from its own threads.
    """
    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self, progress: Progress | None, logger: Any) -> None:
            trt.IProgressMonitor.__init__(self)
            self.progress = progress
            self.logger = logger
            self.lock = threading.Lock()
            self.cancelled = False

        def _tell(self, method: str, *args: Any) -> None:
            try:
                with self.lock:
                    if self.progress is not None:
                        getattr(self.progress, method)(*args)
            except KeyboardInterrupt:
                self.cancelled = True
            except Exception:
                LOG.exception('progress of a build')
                self.progress = None

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            self._tell('start', phase_name, parent_phase, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            self._tell('step', phase_name, step)
            self.cancelled = self.cancelled or self.logger.interrupted
            return not self.cancelled

        def phase_finish(self, phase_name: str) -> None:
            self._tell('finish', phase_name)

    return Monitor
