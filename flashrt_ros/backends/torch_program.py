"""A `TensorProgram` as a policy: eager over host memory, captured once over a CUDA arena."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
import os
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.digests import attribute_digests
from flashrt_ros.backends.tensor_program import (
    TICK,
    PrefillsInSteps,
    TensorProgram,
    Tensors,
    host_tensor,
    import_torch,
)
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Layout, Role
from flashrt_ros.core.seam import Bound, Buffer, Device

if TYPE_CHECKING:
    import torch

WORKSPACE = ':4096:8'  # of cuBLAS: fixed, so that a product's order of sums does not vary
_ROW = 4096  # words of a checksum's row
GENERATOR = 'torch.generator'  # STATE (2,) I64: seed and offset, where torch's own is opted in


class ProgramPolicy:
    """What a session runs. Owns the program, and through it the weights.

    `exact`: demand deterministic operations. `generator`: torch's own generator may be drawn from,
    and its state becomes STATE; refused otherwise, for no capsule would hold it.
    """

    def __init__(self, program: TensorProgram, *, exact: bool = True,
                 generator: bool = False) -> None:
        self.program = program
        self.exact = exact
        self.generator = generator
        self._placed: str | None = None

    def layout(self) -> Layout:
        """Return the program's buffers."""
        extra = [BufferSpec(GENERATOR, (2,), 'I64', Role.STATE)] if self.generator else []
        return Layout([*self.program.layout().values(), *extra])

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return the program's initial values."""
        seed = {GENERATOR: np.zeros(2, np.int64)} if self.generator else {}
        return {**self.program.initial(), **seed}

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the program's fields, and what of torch results may depend on."""
        torch = import_torch()
        meaning, exactness = self.program.identity()
        return meaning, {
            **exactness, 'torch': str(torch.__version__),
            'torch.deterministic': str(self.exact),
            'torch.precision': getattr(self.program, 'precision', 'highest'),
            'torch.cublas_workspace': os.environ.get('CUBLAS_WORKSPACE_CONFIG', ''),
            'torch.cudnn': str(torch.backends.cudnn.version())}

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> Bound:
        """Bring the weights to the device, then run or capture the programs over the buffers."""
        torch = import_torch()
        if device.kind == 'cuda':
            from flashrt_ros.backends import torch_cuda
            return torch_cuda.bind(self, buffers, cast(Any, device))
        self._place(torch.device('cpu'))
        tensors = {}
        for name, buffer in buffers.items():
            if buffer.array is not None:
                tensors[name] = host_tensor(buffer.array, buffer.spec.dtype)
        return eager(self, tensors, buffers)

    def _place(self, device: torch.device) -> None:
        if self._placed is None:
            self.program.to(device)
            self._placed = str(device)
        elif self._placed != str(device):
            raise Refusal(Code.UNSUPPORTED, f'the weights lie on {self._placed} and cannot be '
                          f'bound on {device}; load the policy again')

    place = _place

    def hidden(self) -> Mapping[str, str]:
        """Return digests of the program's attributes and tensors, and of torch's generators."""
        torch = import_torch()
        found = dict(attribute_digests(self.program, array_bytes=checksum))
        for name, value in self.program.constants().items():
            data = checksum(value)
            found[f'constants.{name}'] = (data or repr(value).encode()).hex()
        if not self.generator:
            found['torch generator (cpu)'] = checksum(torch.get_rng_state()).hex()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                found['torch generator (cuda)'] = checksum(torch.cuda.get_rng_state()).hex()
        return found

    def close(self) -> None:
        """Let go of the weights."""
        self._placed = None


def checksum(value: Any) -> Any:
    """Return 8 bytes that change when a tensor's bytes do; None for anything else.

    Computed where the tensor lies: a digest on the host would move gigabytes.
    """
    torch = import_torch()
    if not isinstance(value, torch.Tensor):
        return None
    flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # part of a larger tensor: words must be aligned to be seen so
        flat = flat.clone()
    wide = flat[:flat.numel() // 8 * 8].view(torch.int64)
    rest = flat[wide.numel() * 8:].to(torch.int64)
    total = 0
    for part in (wide[:wide.numel() // _ROW * _ROW].view(-1, _ROW), wide[-(wide.numel() % _ROW):],
                 rest):
        if part.numel():
            # the place within a row counts, so that words that change places are seen
            place = torch.arange(1, part.shape[-1] + 1, device=part.device)
            total = 31 * total + int(((part ^ (part >> 29)) * place).sum())
    return (total & (1 << 64) - 1).to_bytes(8, 'little')


@contextmanager
def settings(policy: ProgramPolicy) -> Iterator[None]:
    """Run a block with the policy's numeric settings; put the process's own back after it."""
    torch = import_torch()
    before = (torch.are_deterministic_algorithms_enabled(),
              torch.is_deterministic_algorithms_warn_only_enabled(),
              torch.utils.deterministic.fill_uninitialized_memory,
              torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark)
    try:
        torch.use_deterministic_algorithms(policy.exact)
        torch.utils.deterministic.fill_uninitialized_memory = False  # a kernel per allocation
        torch.set_float32_matmul_precision(getattr(policy.program, 'precision', 'highest'))
        torch.backends.cudnn.benchmark = False
        with torch.no_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]
        torch.set_float32_matmul_precision(before[3])
        torch.backends.cudnn.benchmark = before[4]


class EagerBound:
    """Programs that run operation by operation, in host memory or for comparison on a GPU."""

    def __init__(self, policy: ProgramPolicy, tensors: Tensors) -> None:
        self._policy = policy
        self._tensors = tensors
        self._programs: Mapping[str, Callable[[Tensors], None]] = policy.program.programs()

    @property
    def prefill_appends(self) -> bool:
        """Whether prompts only add rows to journals, as those in steps promise."""
        return isinstance(self._policy.program, PrefillsInSteps)

    def run(self, program: str) -> None:
        """Run a program."""
        with settings(self._policy):
            self._programs[program](self._tensors)

    def read(self, buffer: str) -> NDArray[Any]:
        """Return a copy of a buffer's value."""
        return np.array(self._tensors[buffer].cpu().numpy())

    def enqueue(self) -> None:
        """Run one tick."""
        self.run(TICK)

    def close(self) -> None:
        """Let go of the tensors."""
        self._tensors = {}
        self._programs = {}


class EagerPrefillBound(EagerBound):
    """The same for a program that takes in prompts."""

    def prefill(self) -> None:
        """Take in the prompt."""
        program = self._policy.program
        assert isinstance(program, PrefillsInSteps)
        program.prefill(self)


def eager(policy: ProgramPolicy, tensors: Tensors, buffers: Mapping[str, Buffer]) -> Bound:
    """Return a program's eager form. Refuses one that draws from torch's generator."""
    if policy.generator:
        raise Refusal(Code.UNSUPPORTED, "torch's own generator as STATE is supported on CUDA "
                      'only; draw from flashrt_ros.backends.philox')
    missing = sorted(set(policy.program.layout()) - set(tensors))
    if missing:
        raise Refusal(Code.UNSUPPORTED, f'buffer {missing[0]} lies where the CPU cannot reach it')
    if isinstance(policy.program, PrefillsInSteps):
        return EagerPrefillBound(policy, tensors)
    return EagerBound(policy, tensors)
