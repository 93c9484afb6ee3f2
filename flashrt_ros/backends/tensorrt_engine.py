"""The tensorrt backend: an engine, or an ONNX file that is built into one, over the arena.

A model's memory is what it is fed again: `state: {h_in: h_out}` makes h_in a STATE buffer, and
h_out is copied there inside the captured graph. Nothing of torch is needed. An engine that another
version or card made is recognised from its first bytes and refused, or, where the policy file names
the ONNX file, built again.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
import hashlib
import logging
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends import options
from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.files import model_path
from flashrt_ros.backends.ports import buffer_name, port_specs
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_api import (
    DTYPES,
    LOG,
    Engine,
    EngineTensor,
    Library,
    Runtime,
    find,
    listening,
    shape_of,
    tensors_of,
)
from flashrt_ros.backends.tensorrt_bound import EngineBound
from flashrt_ros.backends.tensorrt_build import (
    ANY_ARCH,
    PRECISIONS,
    BuildOptions,
    Progress,
    build,
    check_shape,
)
from flashrt_ros.backends.tensorrt_cache import Cached, EngineCache, key_of
from flashrt_ros.backends.tensorrt_plan import Note, check_plan, open_engine
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BIT_TYPES, Layout, digest_of
from flashrt_ros.core.seam import Buffer, Device

ENGINES = ('.engine', '.plan')
OPTIONS = {
    'library': options.choice('', '', 'tensorrt', 'tensorrt_rtx'),
    'ordinal': options.whole(0, 0),
    'wait': options.choice('spin', 'spin', 'block'),
    'precision': options.choice('model', *PRECISIONS),
    'workspace_mib': options.whole(0, 0),
    'optimization_level': options.whole(3, 0),
    'cache': options.Option('', lambda v: isinstance(v, str), 'a folder for engines'),
    'stateless': options.names(),
    'publish': options.names(),
    'ranges': options.mapping('a mapping of input names to [low, high]'),
    'initial': options.mapping('a mapping of fed back inputs to their first value'),
}


class EnginePolicy:
    """A deserialised engine. Owns weights; each live set's memory belongs to its Bound."""

    def __init__(self, spec: PolicySpec, given: Mapping[str, Any], library: Library,
                 engine: Engine, runtime: Runtime, source: str, engine_digest: str,
                 precision: str) -> None:
        self.library = library
        self._runtime: Runtime | None = runtime
        self._engine: Engine | None = engine
        self._said = False
        self._name = Path(spec.model or 'engine').name
        self._state = {buffer_name(i): buffer_name(o) for i, o in spec.state.items()}
        self._tensors = fixed_tensors(library, engine, spec.shapes)
        inputs = [t.info for t in self._tensors if t.is_input]
        outputs = [t.info for t in self._tensors if not t.is_input]
        stateless, publish = ([buffer_name(n) for n in given[k]] for k in ('stateless', 'publish'))
        self._layout = Layout(port_specs(inputs, outputs, self._state, stateless, publish, {
            buffer_name(k): v for k, v in given['ranges'].items()}))
        self._initial = initial_values(given['initial'], self._state, self._layout)
        self._meaning = {'weights': source, 'feedback': digest_of(self._state),
                         'initial': digest_of({k: v.tobytes().hex()
                                               for k, v in self._initial.items()})}
        self._exactness = {'tensorrt': library.title, 'engine': engine_digest,
                           'precision': precision}

    def layout(self) -> Layout:
        """Return the engine's ports and one STATE buffer per feedback pair."""
        return self._layout

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the model's digest and pairs; and library version, engine digest, precision."""
        return self._meaning, self._exactness

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return first values of STATE that the options give."""
        return self._initial

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> EngineBound:
        """Make an execution context over these addresses, warm it up and capture it."""
        if device.kind != 'cuda':
            raise Refusal(Code.UNSUPPORTED, 'the tensorrt backend runs on a CUDA device, not on '
                          f'{device.kind}')
        if self._engine is None:
            raise Refusal(Code.BACKEND, f'{self._name} is closed')
        return EngineBound(self.library, self._engine, self._tensors, self._state, buffers,
                           device, self._name, self._say_once)

    def _say_once(self, text: str) -> None:
        """Warn of what the first live set met; the others will meet it too."""
        LOG.log(logging.DEBUG if self._said else logging.WARNING, '%s', text)
        self._said = True

    def hidden(self) -> Mapping[str, str]:
        """Return nothing: what an engine would hide lies on the device, and equal outputs of two
        runs from origin show that it hides nothing."""
        return {}

    def close(self) -> None:
        """Free the engine; its contexts must be gone already."""
        self._engine = None
        self._runtime = None


def fixed_tensors(library: Library, engine: Engine, shapes: Mapping[str, tuple[int, ...]]
                  ) -> list[EngineTensor]:
    """Return an engine's inputs and outputs with fixed shapes. Raises Refusal by name."""
    trt = library.module
    tensors = tensors_of(library, engine)
    given = {buffer_name(k): tuple(v) for k, v in shapes.items()}
    known = [buffer_name(t.name) for t in tensors if t.is_input]
    for name in given:
        if name not in known:
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.shapes.{name}: the engine has no '
                          f'such input; it has {", ".join(known)}')
    fixed = []
    for t in tensors:
        kind = 'input' if t.is_input else 'output'
        if t.dtype not in DTYPES.values():
            raise Refusal(Code.UNSUPPORTED, f'{kind} {t.name} has type {t.dtype}; ports may be '
                          f'{", ".join(DTYPES.values())}')
        if (engine.get_tensor_location(t.name) != trt.TensorLocation.DEVICE
                or engine.is_shape_inference_io(t.name)):
            raise Refusal(Code.UNSUPPORTED, f'{kind} {t.name} decides the shape of other tensors '
                          'and lies in host memory, where no captured graph reads it anew; make '
                          'it a constant of the model and build again')
        if engine.get_tensor_format(t.name) != trt.TensorFormat.LINEAR:
            raise Refusal(Code.UNSUPPORTED, f'{kind} {t.name} is stored as '
                          f'{engine.get_tensor_format_desc(t.name)!r}; build the engine with '
                          'row-major inputs and outputs')
        alias = (engine.get_aliased_input_tensor(t.name) if not t.is_input
                 and hasattr(engine, 'get_aliased_input_tensor') else None)
        if alias:
            raise Refusal(Code.UNSUPPORTED, f'output {t.name} must share the memory of input '
                          f'{alias}; build the engine from a model without in-place updates '
                          '(KVCacheUpdate), so that a failed tick cannot leave half a state')
        name = buffer_name(t.name)
        if name in given and t.is_input:
            check_shape(name, t.shape, given[name])
            t = replace(t, shape=given[name])
        fixed.append(t)
    return _outputs_fixed(library, engine, fixed)


def _outputs_fixed(library: Library, engine: Engine, tensors: list[EngineTensor]
                   ) -> list[EngineTensor]:
    """Complete outputs with open dimensions by asking a context without memory."""
    for t in tensors:
        if t.is_input and any(n < 0 for n in t.shape):
            raise Refusal(Code.INVALID_POLICY_FILE, f'input {t.name} has shape {t.shape} with an '
                          f'open dimension; write policy.shapes: {{{buffer_name(t.name)}: [...]}} '
                          'with the sizes to run with')
    if all(n >= 0 for t in tensors for n in t.shape):
        return tensors
    trt = library.module
    with listening(library) as journal:
        context = engine.create_execution_context(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise journal.refusal('no execution context')
        for t in tensors:
            if t.is_input and not context.set_input_shape(t.name, t.shape):
                raise journal.refusal(f'input {t.name} does not take shape {t.shape}',
                                      Code.INVALID_POLICY_FILE)
        try:
            context.infer_shapes()  # names that it lacks stay open and are refused below
        except RuntimeError as e:
            raise journal.refusal('shapes do not fit together', Code.INVALID_POLICY_FILE) from e
        done = [replace(t, shape=shape_of(context.get_tensor_shape(t.name))) for t in tensors]
    for t in done:
        if any(n < 0 for n in t.shape):
            raise Refusal(Code.UNSUPPORTED, f'output {t.name} has shape {t.shape} although all '
                          'inputs are fixed: it depends on the data and has no fixed address')
    return done


def initial_values(given: Mapping[str, Any], state: Mapping[str, str], layout: Layout
                   ) -> dict[str, NDArray[Any]]:
    """Return first values of STATE in storage type. Raises INVALID_POLICY_FILE by name."""
    out = {}
    for raw, value in given.items():
        name, where = buffer_name(raw), f'policy.options.initial.{raw}'
        if name not in state:
            raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: only fed back inputs have a first '
                          f'value; they are {", ".join(state) or "none"}')
        spec = layout[name]
        if spec.dtype in BIT_TYPES:
            raise Refusal(Code.UNSUPPORTED, f'{where}: not for data type {spec.dtype}')
        try:
            out[name] = np.array(np.broadcast_to(np.asarray(value, spec.storage), spec.shape))
        except (TypeError, ValueError) as e:
            raise Refusal(Code.INVALID_POLICY_FILE, f'{where}: does not fit {spec.dtype} '
                          f'{spec.shape}: {e}') from e
    return out


def check_device(library: Library, arch: str, name: str) -> None:
    """Refuse a card that the library does not run on, before anything is built for it."""
    capable = library.capabilities() if library.is_rtx else []  # the full one names none
    ours = divmod(int(arch.removeprefix('sm_')), 10)
    if capable and ours not in capable and ours < max(capable):
        raise Refusal(Code.UNSUPPORTED, f'{library.title} does not run on {name} (compute '
                      f'capability {ours[0]}.{ours[1]}); it runs on '
                      f'{", ".join(f"{a}.{b}" for a, b in capable)}. Use the full TensorRT '
                      '(package tensorrt, from NVIDIA) on this card, or backend: torch or onnx')


def check_arch(name: str, note: Note, arch: str, card: str) -> None:
    """Refuse an engine whose note says that it was built for another card."""
    built_for = str(note.key.get('arch', ANY_ARCH))
    if built_for not in (ANY_ARCH, arch):
        raise Refusal(Code.UNSUPPORTED, f'{name} was built for {built_for}, {card} is {arch}: '
                      'build it again here with flashrt-ros build, or name the ONNX file as the '
                      'model')


def engine_of_onnx(library: Library, path: Path, spec: PolicySpec, given: Mapping[str, Any],
                   arch: str, progress: Progress | None = None) -> Cached:
    """Return the engine of an ONNX file from the cache, built where it is not there."""
    from flashrt_ros.backends.onnx_graph import inspect_model
    info = inspect_model(path, spec.model_root, spec.shapes)
    for t in (*info.inputs, *info.outputs):
        if t.dtype not in DTYPES.values() and t.dtype != 'F64':  # double is taken as float
            raise Refusal(Code.UNSUPPORTED, f'{t.name} has type {t.dtype}, which TensorRT lacks; '
                          'export it as I32, I64 or F32, or take backend: onnx')
    wanted = BuildOptions(given['precision'], given['workspace_mib'], given['optimization_level'],
                          {t.name: t.shape for t in info.inputs}, arch)
    cache = EngineCache(Path(given['cache']).expanduser() if given['cache'] else None)

    def make() -> Any:
        LOG.warning('building an engine for %s with %s, which may take minutes', path.name,
                    library.title)
        return build(library, path, wanted, progress)
    return cache.get(key_of(info.weights, library, wanted), library, make)


def deserialise(library: Library, plan: bytes, what: str) -> tuple[Runtime, Engine]:
    """Load a plan whose header was checked. Raises Refusal with TensorRT's own words."""
    trt = library.module
    with listening(library) as journal:
        if not library.is_rtx:
            if not trt.init_libnvinfer_plugins(library.logger, ''):
                LOG.warning('%s: plugins not registered: %s', library.title, journal.text)
        try:
            runtime: Runtime = trt.Runtime(library.logger)
        except TypeError as e:  # what the bindings make of a null pointer
            raise journal.refusal(f'{library.title} cannot run here') from e
        if library.is_rtx:
            _check_validity(library, runtime, plan, what)
        engine = runtime.deserialize_cuda_engine(plan)
        if engine is None:
            raise journal.refusal(f'{library.title} cannot load {what}', Code.UNSUPPORTED,
                                  'build it again here with flashrt-ros build')
    for warning in journal.warnings:    # built on another model of card, for example
        LOG.warning('%s: %s', what, ' '.join(warning.split()))
    return runtime, engine


def _check_validity(library: Library, runtime: Runtime, plan: bytes, what: str) -> None:
    """Ask TensorRT-RTX about an engine's header before the engine is loaded."""
    trt = library.module
    validity, why = runtime.get_engine_validity(plan[:runtime.engine_header_size])
    if validity == trt.EngineValidity.INVALID:
        kinds = trt.EngineInvalidityDiagnostics.__members__
        reasons = [n for n, member in kinds.items() if int(why) & int(member)]
        what = f'{library.title} cannot run {what}: '
        if not reasons:
            raise Refusal(Code.UNSUPPORTED, what + 'no usable NVIDIA driver; install or update it')
        if 'INSUFFICIENT_GPU_MEMORY' in reasons:
            raise Refusal(Code.NO_MEMORY, what + f'{", ".join(reasons)}; free GPU memory')
        raise Refusal(Code.UNSUPPORTED, what + f'{", ".join(reasons)}; build it again here with '
                      'flashrt-ros build, or update the driver')


def open_device(given: Mapping[str, Any], device_of: Callable[..., Any]) -> Any:
    """Return the card. Raises UNSUPPORTED where there is no driver."""
    try:
        return device_of(given['ordinal'], wait=given['wait'])
    except Refusal as e:
        if 'cudaGetDeviceCount' not in e.message:
            raise
        raise Refusal(Code.UNSUPPORTED, f'no usable NVIDIA driver or card ({e.message}); install '
                      'or update the driver, or take backend: onnx') from e


def load(spec: PolicySpec, *, library: Library | None = None,
         device_of: Callable[..., Any] = CudaDevice, progress: Progress | None = None
         ) -> tuple[EnginePolicy, Any]:
    """Load an engine, or build it from an ONNX file, without running it."""
    if spec.factory is not None:
        raise Refusal(Code.INVALID_POLICY_FILE, 'policy.factory: the tensorrt backend loads a '
                      'model file; a factory belongs to the backends host and torch')
    given = options.parse(spec.options, OPTIONS)
    path = model_path(spec)
    if path.suffix not in (*ENGINES, '.onnx'):
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.model: {path.name} is not .onnx, '
                      f'{" or ".join(ENGINES)}')
    library = library or find(given['library'] or None)
    if path.suffix in ENGINES:  # a stale engine is refused on any machine
        file = open_engine(path)
        check_plan(path, file.size, file.header, library)
    device = open_device(given, device_of)
    try:
        about = device.identity()
        arch = about['cuda.arch']
        check_device(library, arch, about['cuda.device'])
        if path.suffix in ENGINES:
            plan = file.read()
            source = digest = hashlib.sha256(plan).hexdigest()
            precision = 'of the engine'
            if file.note is not None:  # the same model may be built again; only bits may differ
                check_arch(path.name, file.note, arch, about['cuda.device'])
                source = str(file.note.key.get('source', source))
                precision = str(file.note.key.get('precision', precision))
        else:
            cached = engine_of_onnx(library, path, spec, given, arch, progress)
            plan, source, digest = cached.plan, str(cached.note.key['source']), cached.note.sha256
            precision = given['precision']
        runtime, engine = deserialise(library, plan, path.name)
        LOG.info('%s runs on %s (%s)', path.name, library.title, about['cuda.device'])
        return EnginePolicy(spec, given, library, engine, runtime, source, digest,
                            precision), device
    except BaseException:
        device.close()
        raise
