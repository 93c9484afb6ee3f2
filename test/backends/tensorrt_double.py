"""A double of the TensorRT bindings that executes a small recurrent model on host memory.

It has no method that the real bindings lack (test_tensorrt_api.py compares them) and is strict
where NVIDIA's documents are: device memory before a run, every tensor at a 256-byte aligned
address, one run outside of a capture before one inside, nothing shared between contexts. It writes
outputs before it reads inputs and scribbles over its activation memory, as real kernels may.
"""
from __future__ import annotations

from collections.abc import Callable
import ctypes
from enum import IntEnum
import json
from pathlib import Path
import struct
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_api import Library
from flashrt_ros.backends.tensorrt_engine import load
from test.backends.cudart_double import Cudart

STORAGE = {'FLOAT': 'f4', 'INT64': 'i8', 'BF16': 'u2', 'HALF': 'f2'}
# name, is input, shape, type; the real G1 is like this: obs, two states, actions
GRU = [['obs', True, [1, 6], 'FLOAT'], ['h_in', True, [1, 1, 8], 'FLOAT'],
       ['c_in', True, [1, 1, 8], 'FLOAT'], ['t_in', True, [], 'INT64'],
       ['actions', False, [1, 4], 'FLOAT'], ['h_out', False, [1, 1, 8], 'FLOAT'],
       ['c_out', False, [1, 1, 8], 'FLOAT'], ['t_out', False, [], 'INT64']]
STATE = {'h_in': 'h_out', 'c_in': 'c_out', 't_in': 't_out'}
ACTIVATIONS = 1000


def plan(tensors: Any = None, *, tag: bytes = b'ftrt', version: tuple[int, ...] = (10, 13, 3, 9),
         **more: Any) -> bytes:
    """Return an engine file of the double: NVIDIA's header, then JSON."""
    body = json.dumps({'tensors': tensors or GRU, **more}).encode()
    size = 64 + len(body)
    head = tag + struct.pack('<IQQ4B', 0, 2, size, *version)
    return head.ljust(64, b'\0') + body


def forward(values: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Compute the double's model: every state shapes the actions and the next state."""
    if 'h_in' not in values:
        return {'actions': values['obs'].reshape(6)[:4] * 2}
    w = np.linspace(-1, 1, 64, dtype='f4').reshape(8, 8)
    u = np.linspace(1, -1, 48, dtype='f4').reshape(6, 8)
    h, c, t = values['h_in'].reshape(8), values['c_in'].reshape(8), values['t_in']
    new_h = np.tanh(c @ w + values['obs'].reshape(6) @ u)      # h and c cross over: a copy that
    new_c = np.tanh(h @ w.T) * np.float32(0.9)                 # is made too early is seen
    actions = new_h[:4] + h[4:] + np.float32(int(t) % 7)
    return {'actions': actions, 'h_out': new_h, 'c_out': new_c, 't_out': t + 1}


class Trt:
    """The module. `rt` is the CUDA double that it runs on; knobs say what goes wrong."""

    def __init__(self, rt: Cudart, name: str = 'tensorrt', version: str = '10.13.3.9') -> None:
        self.rt = rt
        self.__version__ = version
        self.capturable = True       # False: a run inside a capture fails
        self.broken_capture = False  # True: it allocates, and says nothing
        self.memory_fails = False    # True: no execution context
        self.contexts: list[Context] = []
        for enum, members in ENUMS.items():
            setattr(self, enum, IntEnum(enum, {m: i for i, m in enumerate(members)}))
        self.ILogger = ILogger
        self.Runtime = lambda logger: Runtime(self, logger)
        self.init_libnvinfer_plugins = lambda logger, namespace: True
        self.engine = 'rtx' if name == 'tensorrt_rtx' else 'plain'
        if name == 'tensorrt_rtx':
            for enum, members in RTX_ENUMS.items():
                setattr(self, enum, IntEnum(enum, members))

    def library(self) -> Library:
        """Return it as `tensorrt_api.find` would."""
        name = 'tensorrt_rtx' if hasattr(self, 'CudaGraphStrategy') else 'tensorrt'
        return Library(self, name, self.__version__)


ENUMS = {'TensorIOMode': ('NONE', 'INPUT', 'OUTPUT'), 'TensorLocation': ('DEVICE', 'HOST'),
         'TensorFormat': ('LINEAR', 'CHW2', 'HWC8', 'CHW4'),
         'DataType': ('FLOAT', 'HALF', 'BF16', 'INT8', 'INT32', 'INT64', 'BOOL', 'UINT8', 'FP8',
                      'INT4'),
         'ExecutionContextAllocationStrategy': ('STATIC', 'ON_PROFILE_CHANGE', 'USER_MANAGED')}
RTX_ENUMS = {'CudaGraphStrategy': {'DISABLED': 0, 'WHOLE_GRAPH_CAPTURE': 1},
             'DynamicShapesKernelSpecializationStrategy': {'LAZY': 0, 'EAGER': 1, 'NONE': 2},
             'EngineValidity': {'VALID': 0, 'SUBOPTIMAL': 1, 'INVALID': 2},
             'EngineInvalidityDiagnostics': {'VERSION_MISMATCH': 1, 'UNSUPPORTED_CC': 2,
                                             'INSUFFICIENT_GPU_MEMORY': 16},
             'ComputeCapability': {'NONE': 0, 'CURRENT': 1, 'SM75': 75, 'SM80': 80, 'SM86': 86,
                                   'SM89': 89, 'SM120': 120, 'SM121': 121}}


class ILogger:
    """trt.ILogger."""

    Severity = IntEnum('Severity', {'INTERNAL_ERROR': 0, 'ERROR': 1, 'WARNING': 2, 'INFO': 3,
                                    'VERBOSE': 4})


class Runtime:
    """trt.Runtime."""

    engine_header_size = 64

    def __init__(self, trt: Trt, logger: Any) -> None:
        self._trt, self._logger = trt, logger

    def get_engine_validity(self, buffer: bytes) -> Any:
        kind = self._trt.EngineValidity  # type: ignore[attr-defined]
        major, minor = self._trt.rt.properties.major, self._trt.rt.properties.minor
        if (major, minor) == (9, 0):
            return kind.INVALID, 2
        return kind.VALID, 0

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> Any:
        try:
            about = json.loads(serialized_engine[64:])
        except ValueError:
            self._logger.log(ILogger.Severity.ERROR, 'Error Code 1: Serialization (broken plan)')
            return None
        if about.get('plugin'):
            self._logger.log(ILogger.Severity.ERROR, 'IPluginRegistry::getCreator: Error Code 4: '
                             f'API Usage Error (Cannot find plugin: {about["plugin"]}, version: 1)')
            return None
        if about.get('weights', 0) > self._trt.rt.limit:
            self._logger.log(ILogger.Severity.ERROR, 'Error Code 2: OutOfMemory (Requested size '
                             'was too large.)')
            return None
        if about.get('warn'):
            self._logger.log(ILogger.Severity.WARNING, about['warn'])
        return ENGINES[self._trt.engine](self._trt, self._logger, about)


class Engine:
    """trt.ICudaEngine."""

    def __init__(self, trt: Trt, logger: Any, about: Any) -> None:
        self._trt, self._logger, self._about = trt, logger, about
        self._tensors = {t[0]: t for t in about['tensors']}
        self.num_io_tensors = len(self._tensors)
        self.device_memory_size_v2 = about.get('activations', ACTIVATIONS)

    def get_tensor_name(self, index: int) -> str:
        return list(self._tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        kind: Any = self._trt.TensorIOMode  # type: ignore[attr-defined]
        return kind.INPUT if self._tensors[name][1] else kind.OUTPUT

    def get_tensor_shape(self, name: str) -> Any:
        return self._tensors[name][2]

    def get_tensor_dtype(self, name: str) -> Any:
        return self._trt.DataType[self._tensors[name][3]]  # type: ignore[attr-defined]

    def get_tensor_location(self, name: str) -> Any:
        kind: Any = self._trt.TensorLocation  # type: ignore[attr-defined]
        return kind.HOST if name in self._about.get('host', ()) else kind.DEVICE

    def get_tensor_format(self, name: str) -> Any:
        kind: Any = self._trt.TensorFormat  # type: ignore[attr-defined]
        return kind.HWC8 if name in self._about.get('hwc8', ()) else kind.LINEAR

    def get_tensor_format_desc(self, name: str) -> str:
        return 'Channel major FP16 format where C % 8 == 0'

    def is_shape_inference_io(self, name: str) -> bool:
        return name in self._about.get('host', ())

    def get_aliased_input_tensor(self, name: str) -> str | None:
        alias: str | None = self._about.get('alias', {}).get(name)
        return alias

    def create_execution_context(self, strategy: Any) -> Any:
        trt = self._trt
        if trt.memory_fails:
            self._logger.log(ILogger.Severity.ERROR, 'createExecutionContext: Error Code 2: '
                             'OutOfMemory (Requested size was 1 bytes.)')
            return None
        chosen = getattr(strategy, 'strategy', strategy)
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED  # type: ignore[attr-defined]
        assert chosen == managed, 'TensorRT would allocate activation memory itself'
        kind = RtxContext if hasattr(strategy, 'strategy') else Context
        trt.contexts.append(kind(self, self._logger))
        return trt.contexts[-1]


class RtxEngine(Engine):
    """trt.ICudaEngine of TensorRT-RTX."""

    def create_runtime_config(self) -> Any:
        return RuntimeConfig()

    def create_execution_context(self, strategy: Any) -> Any:
        assert isinstance(strategy, RuntimeConfig) or self._about.get('open'), 'no runtime config'
        return super().create_execution_context(strategy)


ENGINES = {'plain': Engine, 'rtx': RtxEngine}


class RuntimeConfig:
    """trt.IRuntimeConfig."""

    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy


class Context:
    """trt.IExecutionContext. Counters tell a test what was called how often."""

    def __init__(self, engine: Engine, logger: Any) -> None:
        self._engine, self._trt, self._logger = engine, engine._trt, logger
        self._memory = (0, 0)
        self._addresses: dict[str, int] = {}
        self._shapes = {n: list(t[2]) for n, t in engine._tensors.items()}
        self._warm = self._spoiled = False
        self._bound = 0

    def _error(self, text: str) -> bool:
        self._logger.log(ILogger.Severity.ERROR, f'IExecutionContext::enqueueV3: Error Code 3: '
                         f'API Usage Error ({text})')
        return False

    def set_device_memory(self, memory: int, size: int) -> None:
        if memory % 256 or size < self._engine.device_memory_size_v2 or (
                not self._trt.rt.owns(memory, size)):
            self._error(f'device memory {memory:#x} of {size} bytes')
            return
        self._memory = memory, size

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        want = self._engine._tensors[name][2]
        if len(want) != len(shape) or any(w not in (-1, s) for w, s in zip(want, shape,
                                                                          strict=True)):
            return self._error(f'shape of {name}')
        self._shapes[name] = list(shape)
        return True

    def get_tensor_shape(self, name: str) -> Any:
        shape = self._shapes[name]
        first = next(s for n, s in self._shapes.items() if self._engine._tensors[n][1])
        # an open dimension is the batch, which all tensors share
        return [first[0] if n == -1 and first[0] > 0 and not self._engine._about.get('data')
                else n for n in shape]

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in self._shapes or memory % 256:
            return self._error(f'address {memory:#x} of {name}')
        self._addresses[name] = memory
        self._bound += 1
        return True

    def infer_shapes(self) -> list[str]:
        return [n for n, s in self._shapes.items() if -1 in s and self._engine._tensors[n][1]]

    def execute_async_v3(self, stream_handle: int) -> bool:
        rt, stream = self._trt.rt, self._trt.rt.stream(stream_handle)
        if self._engine.device_memory_size_v2 and not self._memory[0]:
            return self._error('no device memory')
        if set(self._addresses) != set(self._shapes):
            return self._error('a tensor has no address')
        if stream.captured is not None and not self._warm:
            return self._error('shapes changed and enqueueV3 was not called once before a capture')
        if self._spoiled:
            return self._error('used after a capture that failed in it')
        if rt.last:   # kernels are checked with cudaGetLastError, whoever caused the error
            return self._error(f'Cuda Runtime ({rt.last.name})')
        if stream.captured is not None and not self._trt.capturable:
            self._spoiled = True
            return self._error('operation not permitted when stream is capturing')
        if stream.captured is not None and self._trt.broken_capture:
            self._spoiled = True
            rt.cudaMalloc(16)
            return True
        for name, address in self._addresses.items():
            if not rt.owns(address, self._array(name).nbytes):
                return self._error(f'{name} lies outside of any allocation')
        self._warm = True
        return rt.order(stream_handle, self._kernels) == 0

    def _array(self, name: str) -> NDArray[Any]:
        dtype = np.dtype(STORAGE[self._engine._tensors[name][3]])
        shape = [int(n) for n in self.get_tensor_shape(name)]
        nbytes = int(np.prod(shape, dtype=int)) * dtype.itemsize
        memory = (ctypes.c_uint8 * nbytes).from_address(self._addresses[name])
        return np.frombuffer(memory, dtype).reshape(shape)

    def _kernels(self) -> None:
        about = self._engine._tensors
        inputs = {n: self._array(n).copy() for n, t in about.items() if t[1]}
        for n, t in about.items():
            if not t[1]:
                self._array(n)[...] = 0          # may be written before inputs are read …
        ctypes.memset(self._memory[0] or 0, 0xAB, self._memory[1])
        for n, before in inputs.items():         # … so an output on an input is noticed
            now = self._array(n)
            if now.tobytes() != before.tobytes():
                inputs[n] = now.copy()
        for n, value in forward(inputs).items():
            self._array(n)[...] = value.reshape(self._array(n).shape)
        ctypes.memset(self._memory[0] or 0, 0xBA, self._memory[1])


class RtxContext(Context):
    """trt.IExecutionContext of TensorRT-RTX."""

    def is_stream_capturable(self, stream: int) -> bool:
        return bool(self._trt.capturable)


def on_double(name: str, **knobs: Any) -> Callable[[], Any]:
    """Return a loader of the double's model, with knobs of the double set."""
    def make() -> Any:
        rtx = name == 'tensorrt_rtx'
        trt = Trt(Cudart(), name, '1.7.1.116' if rtx else '10.13.3.9')
        for key, value in knobs.items():
            setattr(trt, key, value)
        root = Path(tempfile.mkdtemp(prefix='flashrt-trt-'))
        (root / 'gru.engine').write_bytes(plan(
            tag=b'vtrt' if rtx else b'ftrt', version=(1, 7, 1, 116) if rtx else (10, 13, 3, 9)))
        return load(PolicySpec(root / 'gru.engine', model_root=root, state=STATE),
                    library=trt.library(), device_of=lambda ordinal, wait: CudaDevice(
                        ordinal, wait=wait, rt=trt.rt))
    return make
