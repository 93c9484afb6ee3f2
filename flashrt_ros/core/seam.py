"""The protocols that a backend implements; the core knows nothing else of devices and policies.

Ownership: the `Policy` owns weights and scratch, the `Arena` owns every byte that outlives a tick
and every input and output, a `Bound` owns programs over the arena's addresses and frees them in
`close`. Ordering: `copy`, `copy2d` and `Bound.enqueue` of one device are carried out in the order
in which they were called, on the device thread; `side_copy2d` may overlap a running program.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.layout import BufferSpec, Layout, Space

Bytes = NDArray[np.uint8]


@runtime_checkable
class Block(Protocol):
    """One allocation. `ptr` is its address in its space; it never moves."""

    ptr: int
    nbytes: int
    space: Space


@dataclass(frozen=True)
class Buffer:
    """A buffer in the arena: `ptr` for programs, `array` for whatever the CPU may touch.

    `array` has the shape and storage type of the spec; it is None where the CPU cannot reach the
    buffer (DEVICE space of a discrete GPU).
    """

    spec: BufferSpec
    block: Any
    offset: int
    ptr: int
    array: NDArray[Any] | None


class Device(Protocol):
    """Memory and order of one accelerator, or of the host itself."""

    kind: str  # 'host', 'cuda'

    def alloc(self, nbytes: int, space: Space) -> Any:
        """Return a block, 256-byte aligned, zeroed. Raises Refusal(NO_MEMORY)."""

    def free(self, block: Any) -> None:
        """Give a block back. No work on it may be outstanding."""

    def copy(self, dst: Any, dst_offset: int, src: Any, src_offset: int, nbytes: int) -> None:
        """Copy bytes between any two blocks, in stream order."""

    def copy2d(self, dst: Any, dst_offset: int, dst_pitch: int, src: Any, src_offset: int,
               src_pitch: int, width: int, height: int) -> None:
        """Copy `height` runs of `width` bytes, in stream order."""

    def side_copy2d(self, dst: Any, dst_offset: int, dst_pitch: int, src: Any, src_offset: int,
                    src_pitch: int, width: int, height: int) -> None:
        """As copy2d, from any thread, beside a running program, over bytes that it does not
        change. Every later `copy`, `copy2d` and program waits for it."""

    def view(self, block: Any, offset: int, nbytes: int) -> Bytes | None:
        """Return the bytes as an array over the same memory; None where the CPU cannot reach."""

    def mark(self) -> Any:
        """Return an event that fires when all that was ordered so far is done."""

    def done(self, event: Any) -> bool:
        """Whether it fired. Never blocks."""

    def sync(self, event: Any = None) -> None:
        """Wait for an event, or for all that was ordered. Raises Refusal(BACKEND)."""

    def identity(self) -> Mapping[str, str]:
        """Return exactness fields: architecture, driver, library versions."""

    def close(self) -> None:
        """Free streams and events; blocks must be free already."""


class Bound(Protocol):
    """The programs of one live set, bound to fixed addresses."""

    def enqueue(self) -> None:
        """Order one tick. On an asynchronous device it returns at once. Allocates nothing of
        ours and reads and writes only the buffers it was bound to, weights and scratch."""

    def close(self) -> None:
        """Free programs; the buffers stay the arena's."""


@runtime_checkable
class Prefills(Protocol):
    """A Bound that can also take in a new prompt.

    One whose attribute `prefill_appends` is true only adds rows to its journals, so that capsules
    from before a prompt go on sharing rows with it; of others that is not taken for granted.
    """

    def prefill(self) -> None:
        """Order the program that reads the prompt's buffers and writes STATE."""


class Policy(Protocol):
    """A program with weights. Loading it must not run it."""

    def layout(self) -> Layout:
        """Return its buffers: ports (INPUT, OUTPUT) and all STATE. State that cannot be declared
        is refused here by name (UNDECLARED_STATE or UNSUPPORTED)."""

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return fingerprint fields `(meaning, exactness)`; `weights` is one of the first."""

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return initial values of STATE buffers by name, in storage type; absent ones are 0."""

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> Bound:
        """Bind to addresses, warm up, capture. STATE is put back by the session afterwards."""

    def hidden(self) -> Mapping[str, str]:
        """Return digests of everything mutable that is not a buffer, by name (attributes, global
        generators). Configure compares it before and after ticks: what changes is hidden state."""

    def close(self) -> None:
        """Free weights."""
