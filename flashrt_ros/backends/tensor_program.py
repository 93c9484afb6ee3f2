"""Programs in torch over tensors that they are given: what a factory may return, too.

A module hides its state in attributes, so a backend must search it. A `TensorProgram` declares
every buffer, is handed one tensor per buffer (on a GPU at the arena's addresses, in host memory on
the CPU) and reads and writes those in place. Each of its programs has fixed shapes and no branch
on values, so that it can be captured once; what must be decided on the host between programs
stands in `prefill`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Tensors = Mapping[str, 'Tensor']
TICK = 'tick'  # the program that every TensorProgram has
PREFILL = 'prefill'  # one that takes in a prompt in a single launch

# safetensors name -> name in torch
TORCH_TYPES: Mapping[str, str] = {
    'BOOL': 'bool', 'U8': 'uint8', 'I8': 'int8', 'U16': 'uint16', 'I16': 'int16', 'U32': 'uint32',
    'I32': 'int32', 'U64': 'uint64', 'I64': 'int64', 'F16': 'float16', 'F32': 'float32',
    'F64': 'float64', 'BF16': 'bfloat16', 'F8_E4M3': 'float8_e4m3fn', 'F8_E5M2': 'float8_e5m2',
}


class Steps(Protocol):
    """What `prefill` may do: order programs, and look at a few bytes."""

    def run(self, program: str) -> None:
        """Order a program."""

    def read(self, buffer: str) -> NDArray[Any]:
        """Return a copy of a small buffer's present value. Waits for the device."""


@runtime_checkable
class TensorProgram(Protocol):
    """A model whose memory is all declared."""

    def layout(self) -> Layout:
        """Return its buffers."""

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return initial values of STATE in storage type; absent ones are 0."""

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return fingerprint fields `(meaning, exactness)`, `weights` among the first."""

    def to(self, device: torch.device) -> None:
        """Bring the weights to a device, once, before any program runs."""

    def programs(self) -> Mapping[str, Callable[[Tensors], None]]:
        """Return the programs by name, `tick` among them. Shapes fixed, no branch on values."""

    def constants(self) -> Mapping[str, Any]:
        """Return everything mutable that it refers to, for the search for hidden state."""


@runtime_checkable
class PrefillsInSteps(Protocol):
    """A TensorProgram that can take in a prompt."""

    def prefill(self, steps: Steps) -> None:
        """Order the programs that read the prompt's buffers and append to STATE."""


def import_torch() -> Any:
    """Return torch, or refuse with how to get it."""
    try:
        import torch
    except ImportError as e:
        raise Refusal(Code.UNSUPPORTED, f'torch is not installed ({e}); install it with '
                      "pip install 'flashrt_ros[torch]'") from e
    return torch


def torch_dtype(name: str) -> Any:
    """Return the torch type of a safetensors name."""
    return getattr(import_torch(), TORCH_TYPES[name])


def host_tensor(array: NDArray[Any], dtype: str) -> Tensor:
    """Return a tensor over the memory of an array in storage type."""
    torch = import_torch()
    flat = torch.from_numpy(array.reshape(-1).view(np.uint8))
    tensor: Tensor = flat.view(torch_dtype(dtype)).view(array.shape)
    return tensor
