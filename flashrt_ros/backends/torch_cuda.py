"""Programs in torch on a CUDA card: buffers at arena addresses, captured once, launched per tick.

Order of `bind`: weights to the card, one tensor per buffer over the arena's memory, every program
run eagerly (twice: libraries choose kernels and take their workspaces), every program captured.
From then on a tick is one launch. Scratch lies in a memory pool of torch that the graphs of a live
set share; they run one after the other, so they may overlap in it.

A program may not draw from torch's generator, whose state would be hidden, unless that is opted
in; then its seed and offset are STATE, read before and written after each launch, and torch's own
replay is used, since only that hands the offset to the graph.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
import functools
import os
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.cuda import CudaBlock, CudaDevice
from flashrt_ros.backends.cuda_graph import CudaGraph
from flashrt_ros.backends.tensor_program import (
    PREFILL,
    TICK,
    PrefillsInSteps,
    Tensors,
    import_torch,
    torch_dtype,
)
from flashrt_ros.backends.torch_program import GENERATOR, WORKSPACE, ProgramPolicy, settings
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Space
from flashrt_ros.core.seam import Bound, Buffer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Torch prepares a capture by waiting for the whole card, which breaks a capture under way in
# another thread; so programs are bound one after the other in a process. Ticks are not concerned.
_BINDING = threading.Lock()
WARM_UPS = 3       # TorchScript watches two runs, then optimises
_READ_BYTES = 256  # of the staging block that prefill looks at buffers through


def prepare() -> None:
    """Fix cuBLAS's workspace; it is read when the first handle is made, so call this first."""
    torch = import_torch()
    if not torch.cuda.is_available():
        raise Refusal(Code.UNSUPPORTED, 'torch sees no CUDA card; choose device: cpu, or install '
                      'a CUDA build of torch and a driver')
    if 'CUBLAS_WORKSPACE_CONFIG' not in os.environ:
        if torch.cuda.is_initialized():
            raise Refusal(Code.UNSUPPORTED, 'CUDA was initialised in this process before '
                          f'CUBLAS_WORKSPACE_CONFIG was set; start it with {WORKSPACE}')
        os.environ['CUBLAS_WORKSPACE_CONFIG'] = WORKSPACE


class _Memory:
    """A stretch of device memory in the form in which torch takes it over without a copy."""

    def __init__(self, ptr: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {'shape': (nbytes,), 'typestr': '|u1',
                                         'data': (ptr, False), 'version': 3, 'strides': None}


def device_tensor(buffer: Buffer, device: torch.device) -> Tensor:
    """Return a tensor over a buffer's memory, at its very address."""
    torch = import_torch()
    flat = torch.as_tensor(_Memory(buffer.ptr, buffer.spec.nbytes), device=device)
    tensor: Tensor = flat.view(torch_dtype(buffer.spec.dtype)).view(buffer.spec.shape)
    if tensor.data_ptr() != buffer.ptr:
        raise Refusal(Code.BACKEND, f'torch copied buffer {buffer.spec.name} instead of using it '
                      'where it lies')
    return tensor


def bind(policy: ProgramPolicy, buffers: Mapping[str, Buffer], device: CudaDevice) -> Bound:
    """Bind a program to a live set: warm up and capture."""
    prepare()
    torch = import_torch()
    card = torch.device('cuda', device.ordinal)
    device.enter()
    with _BINDING, torch.cuda.device(card):
        policy.place(card)
        tensors = {n: device_tensor(b, card) for n, b in buffers.items()
                   if b.spec.space is Space.DEVICE}
        in_steps = isinstance(policy.program, PrefillsInSteps)
        kind = PrefillGraphs if in_steps or PREFILL in policy.program.programs() else TickGraphs
        return kind(policy, tensors, buffers, device)


class TickGraphs:
    """The captured programs of one live set."""

    def __init__(self, policy: ProgramPolicy, tensors: Tensors, buffers: Mapping[str, Buffer],
                 device: CudaDevice) -> None:
        torch = import_torch()
        self._policy = policy
        self._device = device
        self._buffers = buffers
        self._stream = torch.cuda.ExternalStream(device.stream_ptr,
                                                 device=torch.device('cuda', device.ordinal))
        self._graphs: dict[str, CudaGraph] = {}
        self._owners: list[Any] = []      # torch's graphs; they own the scratch
        self._stage: CudaBlock | None = device.alloc(_READ_BYTES, Space.HOST)
        try:
            programs = policy.program.programs()
            if TICK not in programs:
                raise Refusal(Code.UNSUPPORTED, f'the program has no {TICK!r}')
            with settings(policy):
                self._start(tensors)
                for name, program in programs.items():
                    self._warm_up(name, program, tensors)
                pool = torch.cuda.graph_pool_handle()
                for name, program in programs.items():
                    self._capture(name, program, tensors, pool)
            device.sync()
        except BaseException:
            with suppress(Refusal):  # the first error is the one to tell
                self.close()
            raise

    def _start(self, tensors: Tensors) -> None:
        """Put initial values in place: programs may take for granted what these say."""
        torch = import_torch()
        for name, value in self._policy.initial().items():
            if name in tensors:
                flat = torch.from_numpy(np.ascontiguousarray(value).reshape(-1).view(np.uint8))
                tensors[name].view(-1).view(torch.uint8).copy_(flat)
        torch.cuda.synchronize()

    def _warm_up(self, name: str, program: Callable[[Tensors], None], tensors: Tensors) -> None:
        torch = import_torch()
        with torch.cuda.stream(self._stream):
            with watched(name, allow_random=self._policy.generator):
                program(tensors)
            for _ in range(WARM_UPS - 1):
                program(tensors)
        self._device.sync()

    def _capture(self, name: str, program: Callable[[Tensors], None], tensors: Tensors,
                 pool: Any) -> None:
        torch = import_torch()
        raw = hasattr(torch.cuda.CUDAGraph, 'raw_cuda_graph') and not self._policy.generator
        graph = torch.cuda.CUDAGraph(keep_graph=True) if raw else torch.cuda.CUDAGraph()
        # A stream of its own: saves by other threads put waits into the device's stream.
        stream = torch.cuda.Stream()
        with watched(name, allow_random=self._policy.generator):
            try:
                with torch.cuda.graph(graph, pool=pool, stream=stream,
                                      capture_error_mode='thread_local'):
                    program(tensors)
            except BaseException:
                graph.reset()
                raise
        self._owners.append(graph)
        if raw:
            self._graphs[name] = CudaGraph(self._device, graph.raw_cuda_graph(), owned=False)
        else:
            self._graphs[name] = TorchReplay(self._device, graph, self._stream,
                                             self._buffers.get(GENERATOR), self._stage)

    # -- running --------------------------------------------------------------------------

    @property
    def prefill_appends(self) -> bool:
        """Whether prompts only add rows to journals, as those in steps promise."""
        return isinstance(self._policy.program, PrefillsInSteps)

    def enqueue(self) -> None:
        """Order one tick."""
        self._graphs[TICK].launch()

    def run(self, program: str) -> None:
        """Order a program by name."""
        self._graphs[program].launch()

    def read(self, buffer: str) -> NDArray[Any]:
        """Return a copy of a small buffer's present value. Waits."""
        b, stage = self._buffers[buffer], self._stage
        assert stage is not None
        n = b.spec.nbytes
        self._device.copy(stage, 0, b.block, b.offset, n)
        self._device.sync()
        view = self._device.view(stage, 0, n)
        assert view is not None
        return np.array(view.view(b.spec.storage).reshape(b.spec.shape))

    def close(self) -> None:
        """Free the graphs, then their scratch."""
        while self._graphs:
            self._graphs.popitem()[1].close()
        while self._owners:
            self._owners.pop().reset()
        stage, self._stage = self._stage, None
        if stage is not None:
            self._device.free(stage)


class PrefillGraphs(TickGraphs):
    """The same for a program that takes in prompts."""

    def prefill(self) -> None:
        """Order the programs that take in the prompt."""
        program = self._policy.program
        if PREFILL in self._graphs:
            self.run(PREFILL)
        elif isinstance(program, PrefillsInSteps):
            program.prefill(self)


class TorchReplay(CudaGraph):
    """A graph launched by torch, with torch's generator taken from STATE and put back into it."""

    def __init__(self, device: CudaDevice, graph: Any, stream: Any, state: Buffer | None,
                 stage: Any) -> None:
        self._cuda = device
        self._torch_graph = graph
        self._stream = stream
        self._state = state
        self._stage = stage

    def launch(self) -> None:
        """Replay. With a generator this waits for the device twice: its state is the host's."""
        torch = import_torch()
        device = self._cuda
        device.join()
        if self._state is None:
            with torch.cuda.stream(self._stream):
                self._torch_graph.replay()
            return
        b = self._state
        view = device.view(self._stage, 0, 16)
        assert view is not None
        words = view.view(np.int64)
        device.copy(self._stage, 0, b.block, b.offset, 16)
        device.sync()
        generator = torch.cuda.default_generators[device.ordinal]
        before = generator.get_state()
        try:
            generator.manual_seed(int(words[0]))
            generator.set_offset(int(words[1]))
            with torch.cuda.stream(self._stream):
                self._torch_graph.replay()
            words[1] = generator.get_offset()
        finally:
            generator.set_state(before)
        device.copy(b.block, b.offset, self._stage, 0, 16)
        device.sync()  # the stage is used again by the next launch

    def close(self) -> None:
        """Nothing of ours to free."""


@contextmanager
def watched(program: str, *, allow_random: bool) -> Iterator[None]:
    """Run torch operations of a program; refuse random ones, and name the one that failed."""
    watch = _watch_class()(allow_random)
    try:
        with watch:
            yield
    except Exception as e:
        if watch.refusal is not None:  # a scripted module wraps what its operations raise
            raise watch.refusal from e
        if isinstance(e, Refusal):
            raise
        text = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        if 'deterministic' in text:
            advice = ('use another operation, or write exact: false into the policy file and '
                      'accept results that differ between runs')
        else:
            advice = ('programs have fixed shapes, stay on the card and read no value on the host '
                      '(.item(), .cpu(), indexing by a mask, tensors made from lists)')
        raise Refusal(Code.UNSUPPORTED, f'program {program!r} cannot be captured: operation '
                      f'{watch.last or "(none)"} failed with: {text}; {advice}') from e


def _draws(torch: Any, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation draws from a generator; attention and RNNs do only for dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | dict(kwargs)
    defaults = {a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}
    known = {**defaults, **given}
    return (all(known.get(n) is not False for n in ('train', 'training'))
            and all(known.get(n, 1.0) != 0.0 for n in ('dropout_p', 'dropout')))


@functools.cache
def _watch_class() -> Any:
    """Return the class, made once torch is there."""
    torch = import_torch()
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
        """Remembers the operation under way; refuses draws from torch's generators."""

        def __init__(self, allow_random: bool) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.last = ''
            self.refusal: Refusal | None = None
            self._allow_random = allow_random

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None
                               ) -> Any:
            self.last = str(func)
            if not self._allow_random and _draws(torch, func, args, kwargs or {}):
                self.refusal = Refusal(
                    Code.UNDECLARED_STATE, f"operation {func} draws from torch's generator, whose "
                    'state no capsule holds; draw from flashrt_ros.backends.philox, which keeps '
                    'key and counter in STATE, or write policy.options.generator: true')
                raise self.refusal
            return func(*args, **(kwargs or {}))

    return Watch
