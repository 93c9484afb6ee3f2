"""TensorRT as this package sees it: which library, which of its methods, its types, its log.

`tensorrt` is the full library (JetPack, NVIDIA's containers); `tensorrt_rtx` is its sibling for RTX
cards, whose wheels are on PyPI. Both have one API. The protocols below list every method that the
backend calls, with NVIDIA's own parameter names, and mypy holds the backend to them; a test
compares them with the real bindings, so neither the backend nor a test double can invent a method.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
import functools
import importlib
import logging
import re
import threading
from typing import Any, Protocol

from flashrt_ros.backends.ports import TensorInfo, buffer_name
from flashrt_ros.core.errors import Code, Refusal

LOG = logging.getLogger('flashrt_ros.tensorrt')

# Name in the policy file -> modules to try. The wheels of TensorRT-RTX carry the second name.
MODULES = {'tensorrt': ('tensorrt',), 'tensorrt_rtx': ('tensorrt_rtx', 'tensorrt_rtx_bindings')}
# set_device_memory() and device_memory_size_v2 are as old as 10.1; is_stream_capturable() and the
# flag that makes an engine capturable came to TensorRT-RTX with 1.2.
OLDEST = {'tensorrt': (10, 1), 'tensorrt_rtx': (1, 2)}
INSTALL = ('TensorRT comes with JetPack or from NVIDIA; for an RTX card: '
           "pip install 'flashrt_ros[tensorrt-rtx]'")

# DataType member -> safetensors name. INT4, FP4 and E8M0 have none: no port can carry them.
DTYPES = {'FLOAT': 'F32', 'HALF': 'F16', 'BF16': 'BF16', 'INT8': 'I8', 'INT32': 'I32',
          'INT64': 'I64', 'BOOL': 'BOOL', 'UINT8': 'U8', 'FP8': 'F8_E4M3'}

_NO_MEMORY = re.compile(r'out of memory|outofmemory|cudaError 2[ :)]|FAILED_ALLOCATION|'
                        r'MEM_ALLOC_FAILED|allocation failed|insufficient gpu memory', re.I)
_NO_DRIVER = re.compile(r'cudaError (35|100)[ :)]|driver version is insufficient|'
                        r'no CUDA-capable device', re.I)
_NOISE = ('Thread context has not been set', 'is unsupported in TensorRT-RTX')


class HostMemory(Protocol):
    """trt.IHostMemory: bytes that the library owns; bytes(x) copies them."""

    @property
    def nbytes(self) -> int: ...


class Tensor(Protocol):
    """trt.ITensor: an input or output of a network that is being built. Shapes may be set."""

    name: str
    shape: Any
    dtype: Any
    is_shape_tensor: bool

    def get_dimension_name(self, index: int) -> str | None: ...


class Network(Protocol):
    """trt.INetworkDefinition: what the parser fills in."""

    num_inputs: int
    num_outputs: int
    num_layers: int

    def get_input(self, index: int) -> Tensor: ...
    def get_output(self, index: int) -> Tensor: ...
    def get_layer(self, index: int) -> Any: ...


class ParserError(Protocol):
    """trt.ParserError: one of the parser's complaints."""

    def code(self) -> Any: ...
    def desc(self) -> str: ...
    def node(self) -> int: ...
    def node_name(self) -> str: ...
    def node_operator(self) -> str: ...


class Parser(Protocol):
    """trt.OnnxParser."""

    num_errors: int

    def parse_from_file(self, model: str) -> bool: ...
    def get_error(self, index: int) -> ParserError: ...


class Config(Protocol):
    """trt.IBuilderConfig."""

    progress_monitor: Any
    builder_optimization_level: int
    num_compute_capabilities: int

    def set_flag(self, flag: Any) -> None: ...
    def clear_flag(self, flag: Any) -> None: ...
    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None: ...
    def set_compute_capability(self, compute_capability: Any, index: int) -> bool: ...


class Builder(Protocol):
    """trt.Builder."""

    def create_network(self, flags: int = 0) -> Network: ...
    def create_builder_config(self) -> Config: ...
    def build_serialized_network(self, network: Network, config: Config
                                 ) -> HostMemory | None: ...


class RuntimeConfig(Protocol):
    """trt.IRuntimeConfig (TensorRT-RTX: how its kernels are compiled at run time)."""

    cuda_graph_strategy: Any
    dynamic_shapes_kernel_specialization_strategy: Any

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None: ...


class Context(Protocol):
    """trt.IExecutionContext: one live set's bindings and activation memory."""

    def set_device_memory(self, memory: int, size: int) -> None: ...
    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool: ...
    def get_tensor_shape(self, name: str) -> Any: ...
    def set_tensor_address(self, name: str, memory: int) -> bool: ...
    def infer_shapes(self) -> list[str]: ...
    def execute_async_v3(self, stream_handle: int) -> bool: ...
    def is_stream_capturable(self, stream: int) -> bool: ...


class Engine(Protocol):
    """trt.ICudaEngine: the weights and kernels that all live sets share."""

    @property
    def num_io_tensors(self) -> int: ...
    @property
    def device_memory_size_v2(self) -> int: ...

    def get_tensor_name(self, index: int) -> str: ...
    def get_tensor_mode(self, name: str) -> Any: ...
    def get_tensor_shape(self, name: str) -> Any: ...
    def get_tensor_dtype(self, name: str) -> Any: ...
    def get_tensor_location(self, name: str) -> Any: ...
    def get_tensor_format(self, name: str) -> Any: ...
    def get_tensor_format_desc(self, name: str) -> str: ...
    def is_shape_inference_io(self, name: str) -> bool: ...
    def get_aliased_input_tensor(self, name: str) -> str | None: ...
    def create_runtime_config(self) -> RuntimeConfig: ...
    def create_execution_context(self, strategy: Any) -> Context | None: ...


class Runtime(Protocol):
    """trt.Runtime."""

    @property
    def engine_header_size(self) -> int: ...

    def get_engine_validity(self, buffer: bytes) -> tuple[Any, int]: ...
    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Engine | None: ...


# What only some libraries have; the backend asks before it calls.
OPTIONAL = {'Config': ('num_compute_capabilities', 'set_compute_capability'),
            'RuntimeConfig': ('cuda_graph_strategy',
                              'dynamic_shapes_kernel_specialization_strategy'),
            'Context': ('is_stream_capturable',),
            'Engine': ('get_aliased_input_tensor', 'create_runtime_config'),
            'Runtime': ('engine_header_size', 'get_engine_validity')}
# Protocol -> class of the bindings.
BINDINGS = {'HostMemory': 'IHostMemory', 'Tensor': 'ITensor', 'Network': 'INetworkDefinition',
            'ParserError': 'ParserError', 'Parser': 'OnnxParser', 'Config': 'IBuilderConfig',
            'Builder': 'Builder', 'RuntimeConfig': 'IRuntimeConfig',
            'Context': 'IExecutionContext', 'Engine': 'ICudaEngine', 'Runtime': 'Runtime'}


@dataclass(frozen=True)
class EngineTensor:
    """An input or output of an engine or network; -1 is a dimension that is not fixed."""

    name: str
    is_input: bool
    shape: tuple[int, ...]
    dtype: str                        # safetensors name, or TensorRT's own where there is none
    dims: tuple[str | None, ...] = ()  # the model's names of its dimensions

    @property
    def info(self) -> TensorInfo:
        """Return it under the name that its buffer has."""
        return TensorInfo(buffer_name(self.name), self.shape, self.dtype)

    def describe(self) -> dict[str, object]:
        """Return it as JSON values."""
        return {'name': self.name, 'input': self.is_input, 'shape': list(self.shape),
                'dtype': self.dtype}


@dataclass(frozen=True)
class Library:
    """The TensorRT that was found."""

    module: Any
    name: str      # tensorrt, tensorrt_rtx
    version: str

    @property
    def is_rtx(self) -> bool:
        """Whether it is TensorRT-RTX."""
        return self.name == 'tensorrt_rtx'

    @property
    def title(self) -> str:
        """Its name and version, for messages and fingerprints."""
        return f'{"TensorRT-RTX" if self.is_rtx else "TensorRT"} {self.version}'

    @property
    def logger(self) -> Any:
        """The logger to hand to it."""
        return _logger(self.module)

    def capabilities(self) -> list[tuple[int, int]]:
        """Return the compute capabilities that it names; empty where it names none."""
        kind = getattr(self.module, 'ComputeCapability', None)
        names = getattr(kind, '__members__', {})
        found = [int(n[2:]) for n in names if re.fullmatch(r'SM\d+', n)]
        return sorted(divmod(n, 10) for n in found)


def find(wanted: str | None = None) -> Library:
    """Import the full TensorRT, or TensorRT-RTX where that is absent. Raises UNSUPPORTED."""
    if wanted is not None and wanted not in MODULES:
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.library: {wanted!r} is not one '
                      f'of {", ".join(MODULES)}')
    reasons = []
    for name in (wanted,) if wanted else MODULES:
        for module_name in MODULES[name]:
            try:
                module = importlib.import_module(module_name)
            except Exception as e:  # a broken installation raises OSError, RuntimeError, …
                reasons.append(f'{module_name}: {e}')
                continue
            if not all(hasattr(module, a) for a in ('Runtime', 'ILogger', '__version__')):
                reasons.append(f'{module_name}: a package without the library')
                continue
            library = Library(module, name, str(module.__version__))
            if version_tuple(library.version) < OLDEST[name]:
                reasons.append(f'{library.title} is older than '
                               f'{".".join(map(str, OLDEST[name]))}')
                continue
            return library
    raise Refusal(Code.UNSUPPORTED, f'backend tensorrt: no TensorRT found ({"; ".join(reasons)}). '
                  f'{INSTALL}')


def version_tuple(version: str) -> tuple[int, ...]:
    """Return the numbers of a version.

    >>> version_tuple('10.13.3.9')
    (10, 13, 3, 9)
    """
    return tuple(int(n) for n in re.findall(r'\d+', version)[:4])


def dtype_of(member: Any) -> str:
    """Return the safetensors name of a trt.DataType, or its own name where there is none."""
    name = str(member.name)
    return DTYPES.get(name, name)


def shape_of(dims: Any) -> tuple[int, ...]:
    """Return trt.Dims as a tuple. Raises UNSUPPORTED where not even the rank is known."""
    try:
        return tuple(int(n) for n in dims)
    except ValueError as e:
        raise Refusal(Code.UNSUPPORTED, 'the number of dimensions depends on the data') from e


class Journal:
    """What TensorRT said while it was asked for something."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def __contains__(self, pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(m) for m in self.errors)

    @property
    def text(self) -> str:
        """Its complaints in one line, the last ones first to go when there are too many."""
        lines = [' '.join(m.split()) for m in self.errors]
        return ' | '.join(m if len(m) <= 400 else m[:400] + '…' for m in lines[:4])

    def refusal(self, what: str, code: Code = Code.BACKEND, advice: str = '') -> Refusal:
        """Return a refusal with TensorRT's own words, and the code that they call for."""
        said = f': {self.text}' if self.errors else ' without saying why'
        if _NO_MEMORY in self:
            code, advice = Code.NO_MEMORY, ('free GPU memory or lower device_slots, live sets or '
                                            'the workspace')
        elif _NO_DRIVER in self:
            code, advice = Code.UNSUPPORTED, ('this machine has no usable NVIDIA driver; install '
                                              'one, or take backend: onnx')
        return Refusal(code, f'{what}{said}{"; " + advice if advice else ""}')


@functools.cache
def _logger(module: Any) -> Any:
    """Return the one logger of a library.

    TensorRT keeps a process-wide pointer to the first logger that it is given and uses it from its
    own threads, so a logger per session would dangle: this one lives as long as the process.
    """
    severity = module.ILogger.Severity

    class Logger(module.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            module.ILogger.__init__(self)
            self.lock = threading.Lock()
            self.journals: list[Journal] = []
            self.interrupted = False

        def log(self, level: Any, message: str) -> None:
            try:
                self._log(level, message)
            except KeyboardInterrupt:  # no exception may pass through C++; a build asks for it
                self.interrupted = True

        def _log(self, level: Any, message: str) -> None:
            bad = level in (severity.ERROR, severity.INTERNAL_ERROR)
            if any(noise in message for noise in _NOISE):
                return
            with self.lock:
                for journal in self.journals:
                    if bad:
                        journal.errors.append(message)
                    elif level == severity.WARNING:
                        journal.warnings.append(message)
                heard = bool(self.journals)
            LOG.log(logging.ERROR if bad and not heard else logging.DEBUG, '%s', message)

    return Logger()


@contextmanager
def listening(library: Library) -> Iterator[Journal]:
    """Collect what the library says inside the block."""
    logger, journal = library.logger, Journal()
    with logger.lock:
        logger.journals.append(journal)
    try:
        yield journal
    finally:
        with logger.lock:
            logger.journals.remove(journal)


def tensors_of(library: Library, engine: Engine) -> list[EngineTensor]:
    """Return an engine's inputs and outputs in its own order."""
    mode = library.module.TensorIOMode
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    return [EngineTensor(name, engine.get_tensor_mode(name) == mode.INPUT,
                       shape_of(engine.get_tensor_shape(name)),
                       dtype_of(engine.get_tensor_dtype(name))) for name in names]


Say = Callable[[str], None]
