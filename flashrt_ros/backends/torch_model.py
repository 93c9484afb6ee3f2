"""The torch backend: torch programs in host memory, or captured on a CUDA card.

On the host a tick is the program itself, over tensors that are the arena's memory: outputs equal
those of the bare module byte for byte. One thread by default, because the number of threads is
part of the order in which sums are taken.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensor_program import (
    TICK,
    PrefillsInSteps,
    TensorProgram,
    Tensors,
    host_tensor,
    import_torch,
)
from flashrt_ros.backends.torch_load import load_program
from flashrt_ros.backends.torch_module import ModuleProgram
from flashrt_ros.backends.torch_program import EagerBound, ProgramPolicy
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import digest_of
from flashrt_ros.core.seam import Bound, Buffer, Device

_WARM_UP = 3  # TorchScript watches two runs, then optimises


class TorchPolicy(ProgramPolicy):
    """A program of any kind, with its settings."""

    def __init__(self, program: TensorProgram, *, exact: bool, generator: bool,
                 threads: int, source: str = '') -> None:
        super().__init__(program, exact=exact, generator=generator)
        self.threads = threads
        self._source = source
        self._precision = getattr(program, 'precision', 'highest')
        self._before: tuple[int, bool, bool, str] | None = None  # the process's own settings

    def apply_settings(self) -> None:
        """Set what differs from this policy's settings: another one may have set its own.

        They stay set between ticks, as setting them costs as much as a small policy; `close` puts
        the process's own back.
        """
        torch = import_torch()
        threads, exact = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        precision = torch.get_float32_matmul_precision()
        if self._before is None:
            warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
            self._before = threads, exact, warn_only, precision
        if threads != self.threads:
            torch.set_num_threads(self.threads)
        if exact != self.exact:
            torch.use_deterministic_algorithms(self.exact)
        if precision != self._precision:
            torch.set_float32_matmul_precision(self._precision)

    def close(self) -> None:
        """Let go of the weights, and put the process's settings back."""
        torch = import_torch()
        super().close()
        before, self._before = self._before, None
        if before is not None:
            torch.set_num_threads(before[0])
            torch.use_deterministic_algorithms(before[1], warn_only=before[2])
            torch.set_float32_matmul_precision(before[3])

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the program's fields, and what of torch the last bits depend on."""
        torch = import_torch()
        meaning, exactness = super().identity()
        weights = digest_of([meaning['weights'], self._source]) if self._source else meaning[
            'weights']
        return {**meaning, 'weights': weights}, {**exactness, 'torch.threads': str(self.threads),
                         'torch.cpu': torch.backends.cpu.get_cpu_capability(),
                         'torch.mkldnn': str(torch.backends.mkldnn.enabled)}

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> Bound:
        """Run in host memory, or capture on a card what no Python decides."""
        torch = import_torch()
        if device.kind != 'host':
            at = self.program.in_python if isinstance(self.program, ModuleProgram) else None
            if at is not None:
                raise Refusal(Code.UNSUPPORTED, f'{at} is state that Python code decides on, which '
                              'no captured graph can hold; make it a tensor buffer of fixed shape, '
                              'or write policy.options.device: cpu')
            return super().bind(buffers, device)
        self.place(torch.device('cpu'))
        tensors = {}
        for name, buffer in buffers.items():
            if buffer.array is None:
                raise Refusal(Code.UNSUPPORTED, f'buffer {name} lies where the CPU cannot reach it')
            tensors[name] = host_tensor(buffer.array, buffer.spec.dtype)
        if self.generator:
            raise Refusal(Code.UNSUPPORTED, "policy.options.generator: torch's own generator as "
                          'STATE is supported on CUDA only; declare a generator of your own')
        for name, value in self.initial().items():
            buffers[name].array[...] = value  # type: ignore[index]  # else the warm-up may fail
        prefills = isinstance(self.program, PrefillsInSteps)
        return (HostPrefillBound if prefills else HostBound)(self, tensors)

    def hidden(self) -> Mapping[str, str]:
        """Return digests of all that must not change; see ModuleProgram.digests."""
        if isinstance(self.program, ModuleProgram):
            return self.program.digests()
        return super().hidden()


class HostBound(EagerBound):
    """A program's runs over host memory, with the policy's numeric settings around each."""

    def __init__(self, policy: TorchPolicy, tensors: Tensors) -> None:
        super().__init__(policy, tensors)
        self._owner = policy
        self._no_grad: Any = import_torch().no_grad()
        for _ in range(_WARM_UP):
            self.run(TICK)

    def run(self, program: str) -> None:
        """Run a program. What it raises becomes a refusal."""
        self._owner.apply_settings()
        try:
            with self._no_grad:
                self._programs[program](self._tensors)
        except Refusal:
            raise
        except Exception as e:  # a policy's code may raise anything
            raise Refusal(Code.BACKEND, f'the program raised {type(e).__name__}: {e}') from e


class HostPrefillBound(HostBound):
    """The same for a program that takes in prompts."""

    def prefill(self) -> None:
        """Take in the prompt."""
        if isinstance(self._owner.program, PrefillsInSteps):
            self._owner.program.prefill(self)


def load(spec: PolicySpec) -> tuple[TorchPolicy, Any]:
    """Load a torch program without running it, and the device that it runs on."""
    if spec.options.get('device') == 'cuda':
        from flashrt_ros.backends import torch_cuda
        torch_cuda.prepare()  # before anything makes a handle of cuBLAS
    program, given, source = load_program(spec)
    policy = TorchPolicy(program, exact=spec.exact, generator=given['generator'],
                         threads=given['threads'], source=source)
    if given['device'] == 'cuda':
        from flashrt_ros.backends.cuda import CudaDevice
        from flashrt_ros.backends.torch_cuda import prepare
        prepare()
        return policy, CudaDevice()
    return policy, HostDevice()
