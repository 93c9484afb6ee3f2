"""One live set of an engine: an execution context over the arena's addresses, in a CUDA graph.

Everything that a tick touches is bound once: inputs, STATE and outputs to their buffers, outputs
that are fed back to scratch, activations to scratch too (the context is created USER_MANAGED, so
TensorRT allocates nothing while it runs). A tick is the engine's kernels and then one copy per
feedback pair from scratch to STATE; TensorRT may write an output before it has read all inputs, so
an output is never bound onto an input.

NVIDIA's order is kept: device memory, shapes, addresses, one enqueueV3 outside of a capture (it
updates what depends on shapes), then the capture of a second one. A context belongs to one graph:
a fork makes another context.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashrt_ros.backends.ports import buffer_name
from flashrt_ros.backends.tensorrt_api import (
    Context,
    Engine,
    EngineTensor,
    Library,
    RuntimeConfig,
    Say,
    listening,
    shape_of,
)
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import ALIGNMENT, Space, align
from flashrt_ros.core.seam import Buffer


class EngineBound:
    """Ticks of one live set. `captured` tells whether a CUDA graph holds them."""

    def __init__(self, library: Library, engine: Engine, tensors: list[EngineTensor],
                 state: Mapping[str, str], buffers: Mapping[str, Buffer], device: Any,
                 name: str, say: Say) -> None:
        self._library = library
        self._engine = engine
        self._tensors = tensors
        self._device = device
        self._name = name
        self._say = say
        self._scratch: Any = None
        self._graph: Any = None
        self._context: Context | None = None
        self._config: RuntimeConfig | None = None  # outlives the context that it made
        self._place(state, buffers)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def captured(self) -> bool:
        """Whether a tick is one launch of a graph."""
        return self._graph is not None

    def _place(self, state: Mapping[str, str], buffers: Mapping[str, Buffer]) -> None:
        """Decide where every tensor lies and what is copied back; allocate scratch."""
        self._activations = int(self._engine.device_memory_size_v2)
        offset = align(self._activations)
        fed: dict[str, tuple[int, int]] = {}             # output -> (offset in scratch, bytes)
        for i, o in state.items():
            if o not in buffers and o not in fed:        # an output that is also a port has its own
                fed[o] = offset, buffers[i].spec.nbytes
                offset = align(offset + buffers[i].spec.nbytes)
        self._scratch = self._device.alloc(max(offset, ALIGNMENT), Space.DEVICE)
        base = int(self._scratch.ptr)
        self._addresses: dict[str, int] = {}
        for t in self._tensors:
            where = buffer_name(t.name)
            self._addresses[t.name] = (buffers[where].ptr if where in buffers
                                       else base + fed[where][0])
        # (to, from, bytes): what the next tick reads as STATE
        self._feed = [(buffers[i].ptr, buffers[o].ptr if o in buffers else base + fed[o][0],
                       buffers[i].spec.nbytes) for i, o in state.items()]

    def _open(self) -> None:
        self._device.enter()
        self._context = self._new_context()
        self._run(self._device.stream_ptr)   # NVIDIA: once before a capture
        self._device.sync()
        try:
            self._capture()
        except Refusal as e:
            if e.code is Code.NO_MEMORY:
                raise
            self._say(f'{self._name} cannot be captured as a CUDA graph and runs uncaptured, '
                      f'kernel by kernel ({e.message})')
            self._device.rt.cudaGetLastError()  # TensorRT would take it for an error of its own
        else:
            return
        # What a failed capture leaves behind in a context is not documented. The first one goes
        # here, not in the handler, where the traceback would keep it beside the second.
        self._context = None
        self._context = self._new_context()
        self._run(self._device.stream_ptr)
        self._device.sync()

    def _new_context(self) -> Context:
        """Return a context with memory, shapes and addresses set. Raises Refusal."""
        trt, what = self._library.module, f'{self._name} on {self._library.title}'
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        with listening(self._library) as journal:
            context = self._engine.create_execution_context(self._strategy(managed))
            if context is None:
                raise journal.refusal(f'{what}: no execution context')
            if self._activations:
                before = len(journal.errors)
                context.set_device_memory(int(self._scratch.ptr), self._activations)
                if len(journal.errors) > before:  # it returns nothing and only complains
                    raise journal.refusal(f'{what}: its activation memory is not taken')
            for t in self._tensors:
                is_open = -1 in shape_of(self._engine.get_tensor_shape(t.name))
                if t.is_input and is_open and not context.set_input_shape(t.name, t.shape):
                    raise journal.refusal(f'{what}: input {t.name} does not take shape {t.shape}')
                if not context.set_tensor_address(t.name, self._addresses[t.name]):
                    raise journal.refusal(f'{what}: {t.name} cannot be bound')
            try:
                lacking = context.infer_shapes()
            except RuntimeError as e:
                raise journal.refusal(f'{what}: shapes do not fit together') from e
            if lacking:
                raise journal.refusal(f'{what}: {", ".join(lacking)} not fully specified')
            for t in self._tensors:
                got = shape_of(context.get_tensor_shape(t.name))
                if got != t.shape:
                    raise Refusal(Code.BACKEND, f'{what}: {t.name} has shape {got}, expected '
                                  f'{t.shape}')
        return context

    def _strategy(self, managed: Any) -> Any:
        """Return what to create a context with: how its memory and, on RTX, its kernels come."""
        if not self._library.is_rtx:
            return managed
        trt = self._library.module
        self._config = config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(managed)
        # Kernels that are swapped in the background would change the last bits in mid-run, and a
        # graph of the library's own would hide the kernels from ours.
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER)
        config.cuda_graph_strategy = trt.CudaGraphStrategy.DISABLED
        return config

    def _run(self, stream: int) -> None:
        """Order the engine's kernels and the copies of what is fed back on a stream."""
        assert self._context is not None
        with listening(self._library) as journal:
            if not self._context.execute_async_v3(stream):
                e = journal.refusal(f'{self._name}: {self._library.title} could not enqueue')
                # In a capture an allocation that is merely forbidden may be called OutOfMemory.
                raise e if stream == self._device.stream_ptr else Refusal(Code.BACKEND, e.message)
        rt = self._device.rt
        for to, source, nbytes in self._feed:
            self._device.call('cudaMemcpyAsync', to, source, nbytes,
                              rt.cudaMemcpyKind.cudaMemcpyDeviceToDevice, stream)

    def _capture(self) -> None:
        """Capture a tick. Raises Refusal where that cannot be done."""
        from flashrt_ros.backends.cuda_graph import capture
        context = self._context
        assert context is not None
        if self._library.is_rtx and not context.is_stream_capturable(self._device.stream_ptr):
            raise Refusal(Code.UNSUPPORTED, f'{self._library.title} says that it cannot be')
        with listening(self._library):  # its complaints are ours to word
            self._graph = capture(self._device, lambda stream: self._run(int(stream)))

    def enqueue(self) -> None:
        """Order one tick: one launch, or the kernels one by one."""
        if self._graph is not None:
            self._graph.launch()
            return
        self._device.enter()
        self._device.join()
        self._run(self._device.stream_ptr)

    def close(self) -> None:
        """Free graph, context and scratch, in this order. Waits for what was ordered."""
        if self._scratch is None:
            return
        scratch, self._scratch = self._scratch, None
        try:
            self._device.enter()  # the context goes before `free` would make the card current
            self._device.sync()
            if self._graph is not None:
                self._graph.close()
        finally:
            self._graph = None
            self._context = self._config = None
            self._device.free(scratch)
