"""The onnx backend: ONNX Runtime on the CPU, inputs and outputs bound to the arena, once.

A model's memory is what it is fed again: `state: {h_in: h_out}` makes h_in a STATE buffer. The
runtime may write an output before it has read all inputs, so h_out is never bound onto h_in's
address: it goes to scratch and is copied after the run. A run that fails leaves STATE untouched.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends import options
from flashrt_ros.backends.digests import attribute_digests
from flashrt_ros.backends.files import model_path
from flashrt_ros.backends.host import HostBlock, HostDevice
from flashrt_ros.backends.onnx_graph import ModelInfo, inspect_model
from flashrt_ros.backends.ports import buffer_name, port_specs
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BIT_TYPES, Layout, Role, Space, digest_of
from flashrt_ros.core.seam import Buffer, Device

try:
    import onnxruntime as ort
except ImportError as error:
    raise Refusal(Code.UNSUPPORTED, 'the onnx backend needs ONNX Runtime; install it with '
                  "pip install 'flashrt_ros[onnx]'") from error

_LEVELS = {'disable': 'ORT_DISABLE_ALL', 'basic': 'ORT_ENABLE_BASIC',
           'extended': 'ORT_ENABLE_EXTENDED', 'all': 'ORT_ENABLE_ALL'}
# One thread by default: a robot's policy is small, and the number of threads is part of the
# order in which sums are taken.
OPTIONS = {
    'intra_op_num_threads': options.whole(1, 1),
    'inter_op_num_threads': options.whole(1, 1),
    'graph_optimization_level': options.choice('all', *_LEVELS),
    'execution_mode': options.choice('sequential', 'sequential', 'parallel'),
    'deterministic': options.flag(True),
    'provider': options.choice('CPUExecutionProvider', 'CPUExecutionProvider'),
    'session_config': options.mapping('a mapping of ONNX Runtime session configuration keys'),
    'stateless': options.names(),
    'publish': options.names(),
    'ranges': options.mapping('a mapping of input names to [low, high]'),
    'initial': options.mapping('a mapping of fed back inputs to their first value'),
}


class OnnxPolicy:
    """A model in an ONNX Runtime session. Owns weights and the runtime's scratch."""

    def __init__(self, spec: PolicySpec) -> None:
        if spec.factory is not None:
            raise Refusal(Code.INVALID_POLICY_FILE, 'policy.factory: the onnx backend loads a '
                          'model file; a factory belongs to the backends host and torch')
        self._options = options.parse(spec.options, OPTIONS)
        self._state = {buffer_name(i): buffer_name(o) for i, o in spec.state.items()}
        self.info = inspect_model(model_path(spec), spec.model_root, spec.shapes,
                                  tuple(self._state))
        chosen = {k: [buffer_name(n) for n in self._options[k]] for k in ('stateless', 'publish')}
        self._layout = Layout(port_specs(
            self.info.inputs, self.info.outputs, self._state, chosen['stateless'],
            chosen['publish'],
            {buffer_name(k): v for k, v in self._options['ranges'].items()}))
        self._initial = {**self.info.defaults, **self._given_initial()}
        self._session = self._start()

    def _given_initial(self) -> dict[str, NDArray[Any]]:
        out = {}
        for raw, value in self._options['initial'].items():
            name = buffer_name(raw)
            where = f'policy.options.initial.{raw}'
            if name not in self._state:
                raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: only fed back inputs have a '
                              f'first value; they are {", ".join(self._state) or "none"}')
            spec = self._layout[name]
            if spec.dtype in BIT_TYPES:
                raise Refusal(Code.UNSUPPORTED, f'{where}: not for data type {spec.dtype}')
            try:
                array = np.asarray(value, spec.storage)
                out[name] = np.array(np.broadcast_to(array, spec.shape))
            except (TypeError, ValueError) as e:
                raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: does not fit {spec.dtype} '
                              f'{spec.shape}: {e}') from e
        return out

    def _start(self) -> Any:
        """Return the runtime's session over the file; nothing is run yet."""
        o, given = ort.SessionOptions(), self._options
        o.intra_op_num_threads = given['intra_op_num_threads']
        o.inter_op_num_threads = given['inter_op_num_threads']
        o.graph_optimization_level = getattr(ort.GraphOptimizationLevel,
                                             _LEVELS[given['graph_optimization_level']])
        o.execution_mode = getattr(ort.ExecutionMode,
                                   f'ORT_{given["execution_mode"].upper()}')
        o.use_deterministic_compute = given['deterministic']
        o.log_severity_level = 3
        for name, size in self.info.symbols.items():
            o.add_free_dimension_override_by_name(name, size)
        try:
            for key, value in given['session_config'].items():
                o.add_session_config_entry(key, str(value))
            return ort.InferenceSession(str(self.info.path), o, providers=[given['provider']])
        except Exception as e:  # the runtime's exceptions share no base class of its own
            raise Refusal(Code.BACKEND, f'ONNX Runtime {ort.__version__} cannot load '
                          f'{self.info.path.name}: {e}') from e

    def layout(self) -> Layout:
        """Return the model's ports and one STATE buffer per feedback pair."""
        return self._layout

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the digests of the files and pairs; and what decides the last bits."""
        decisive = {k: v for k, v in self._options.items()
                    if k not in ('stateless', 'publish', 'ranges', 'initial')}
        initial = {k: v.tobytes().hex() for k, v in self._initial.items()}
        return ({'weights': self.info.weights, 'feedback': digest_of(self._state),
                 'initial': digest_of(initial)},
                {'onnxruntime': ort.__version__,
                 **{k: str(v) for k, v in sorted(decisive.items())}})

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return first values: an initializer of the input's name, or the option's."""
        return self._initial

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> OnnxBound:
        """Bind to the buffers' addresses and run once, without feeding back."""
        if device.kind != 'host':
            raise Refusal(Code.UNSUPPORTED, f'the onnx backend runs on the host, not on '
                          f'{device.kind}')
        return OnnxBound(self._session, self.info, self._state, buffers)

    def hidden(self) -> Mapping[str, str]:
        """Return digests of our attributes; the runtime keeps nothing between runs, as operations
        that would were refused by name."""
        return attribute_digests(self)

    def close(self) -> None:
        """Free the runtime's session."""
        self._session = None


class OnnxBound:
    """An I/O binding over one live set's addresses, and the scratch of its fed back outputs."""

    def __init__(self, session: Any, info: ModelInfo, state: Mapping[str, str],
                 buffers: Mapping[str, Buffer]) -> None:
        self._session = session
        self._binding = session.io_binding()
        self._scratch: list[HostBlock] = []
        self._feed: list[tuple[NDArray[Any], NDArray[Any]]] = []  # (STATE, the output's bytes)
        where: dict[str, tuple[int, NDArray[Any] | None]] = {}
        try:
            for t in info.inputs:
                b = buffers[t.name]
                self._binding.bind_input(info.raw[t.name], 'cpu', 0, _element(info, t.name, b),
                                         list(t.shape), b.ptr)
            for t in info.outputs:
                b = buffers.get(t.name) or next(buffers[i] for i, o in state.items()
                                                if o == t.name)
                if b.spec.role is Role.OUTPUT:
                    where[t.name] = b.ptr, b.array
                else:
                    block = HostBlock(b.spec.nbytes, Space.HOST)
                    self._scratch.append(block)
                    where[t.name] = block.ptr, block.data.view(b.spec.storage).reshape(t.shape)
                self._binding.bind_output(info.raw[t.name], 'cpu', 0, _element(info, t.name, b),
                                          list(t.shape), where[t.name][0])
            self._run()
        except Refusal:
            raise
        except Exception as e:
            raise Refusal(Code.BACKEND, f'{info.path.name} cannot be bound: {e}') from e
        for i, o in state.items():
            source, target = where[o][1], buffers[i].array
            assert source is not None
            assert target is not None
            self._feed.append((target, source))

    def _run(self) -> None:
        try:
            self._session.run_with_iobinding(self._binding)
        except Exception as e:
            raise Refusal(Code.BACKEND, f'ONNX Runtime: {e}') from e

    def enqueue(self) -> None:
        """Run one tick, then feed its outputs back."""
        self._run()
        for target, source in self._feed:
            target[...] = source

    def close(self) -> None:
        """Let go of the binding and its scratch."""
        self._binding = None
        self._feed.clear()
        self._scratch.clear()


def _element(info: ModelInfo, name: str, buffer: Buffer) -> Any:
    """Return the element type as the binding takes it: numpy's, or ONNX's where numpy has none."""
    spec = buffer.spec
    return info.element[name] if spec.dtype in BIT_TYPES else spec.storage.type


def load(spec: PolicySpec) -> tuple[OnnxPolicy, HostDevice]:
    """Load an ONNX model without running it."""
    return OnnxPolicy(spec), HostDevice()
