"""The policies that the conformance suite runs on, one per backend and kind of state.

A backend joins by adding a `Case`; those that need a GPU carry a mark, and asking for the mark on a
machine without one fails instead of skipping.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
import tempfile
from typing import Any

import numpy as np
from numpy.typing import NDArray
import pytest

from flashrt_ros.backends import host, reference
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.core.probe import test_input as seeded_input
from flashrt_ros.core.seam import Device, Policy
from flashrt_ros.core.session import Options, Session

OWNER_STATE = [BufferSpec('owner.counter', (1,), 'I64', Role.STATE, Space.HOST),
               BufferSpec('owner.queue', (4, 2), 'F32', Role.STATE, Space.HOST)]
Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """A policy to run the suite on; `load_bearing` names STATE whose loss must show."""

    name: str
    load: Callable[[], tuple[Policy, Device]]
    load_bearing: tuple[str, ...]
    marks: tuple[Any, ...] = ()

    def session(self, kind: type[Session] = Session, **options: Any) -> Owner:
        """Return a session and its owner."""
        policy, device = self.load()
        keywords = {k: options.pop(k) for k in ('on_event', 'steady', 'clock', 'meaning',
                                                'exactness') if k in options}
        return Owner(kind(policy, device, host_state=OWNER_STATE,
                          options=Options(**{'threaded': False, **options}), **keywords))


class Owner:
    """Feeds a session seeded inputs and keeps HOST state of its own that shapes the outputs."""

    def __init__(self, session: Session) -> None:
        self.session = session
        specs = [s for s in session.layout.values() if s.role is Role.INPUT]
        rng = np.random.default_rng(7)
        self._inputs: list[Arrays] = []
        for _ in range(128):
            values = {s.name: seeded_input(s, rng) for s in specs}
            self._inputs.append({n: v for n, v in values.items() if v is not None})

    def step(self, which: int | None = None) -> bytes:
        """Run one tick and step; return everything that left the policy, and the counter."""
        s = self.session
        counter = s.host['owner.counter']
        inputs = self._inputs[int(counter[0]) % 128 if which is None else which]
        for name, value in inputs.items():
            s.inputs[name][...] = value
        inference = s.submit()
        assert inference.wait(60)
        outputs = s.accept(inference)
        counter[0] += 1
        s.host['owner.queue'][int(counter[0]) % 4] += 0.5
        s.commit_step()
        return b''.join(outputs[n].tobytes() for n in sorted(outputs)) + counter.tobytes()

    def run(self, n: int, first: int | None = None) -> list[bytes]:
        """Run `n` steps; with `first` on inputs of another sequence."""
        return [self.step(None if first is None else (first + i) % 128) for i in range(n)]

    def restore(self, name: str = '') -> None:
        """Restore and wait."""
        self.session.apply(self.session.plan_restore(name)).result(60)

    def everything(self) -> dict[str, bytes]:
        """Return the bytes of every STATE buffer, of journals the final rows."""
        s = self.session
        out = {}
        for name, buffer in s._live.arena.buffers.items():
            if buffer.spec.role is Role.STATE:
                data = s._live.arena.read(name)
                if buffer.spec.is_journal:
                    outer, rows, width = buffer.spec.rows()
                    final = s._live.lengths[buffer.spec.length or '']
                    data = data.reshape(outer, rows * width)[:, :final * width]
                out[name] = data.tobytes()
        return out

    def dirty(self) -> None:
        """Overwrite every STATE buffer with other bytes, journals' lengths excepted."""
        s = self.session
        lengths = {b.spec.length for b in s._live.journals}
        for name, buffer in s._live.arena.buffers.items():
            if buffer.spec.role is Role.STATE and name not in lengths:
                old = s._live.arena.read(name)
                if buffer.spec.is_journal:
                    # rows below the length are final until a restore lowers it, that is the
                    # contract; what lies above is nobody's
                    outer, rows, width = buffer.spec.rows()
                    final = s._live.lengths[buffer.spec.length or '']
                    old = old.reshape(outer, rows * width)
                    old[:, final * width:] ^= 0xA5
                else:
                    old = old ^ 0xA5
                s._live.arena.write(name, old.reshape(-1))

    def close(self) -> None:
        """Free the session."""
        self.session.close()


def _onnx() -> tuple[Policy, Device]:
    pytest.importorskip('onnxruntime', reason="onnxruntime is not installed: pip install "
                        "'flashrt_ros[onnx]'")
    from flashrt_ros import backends
    from flashrt_ros.backends.spec import PolicySpec
    from test.conformance.small_onnx import write_gru
    root = Path(tempfile.mkdtemp(prefix='flashrt-onnx-'))
    write_gru(root / 'gru.onnx')
    return backends.load('onnx', PolicySpec(model=root / 'gru.onnx', model_root=root,
                                            state={'h_in': 'h_out'}))


def _tensorrt() -> tuple[Policy, Device]:
    """Load a model on the doubles of TensorRT and CUDA; for real: test_tensorrt_promises.py."""
    from test.backends.tensorrt_double import on_double
    return on_double('tensorrt')()


def _host(make: Callable[..., Any]) -> Callable[[], tuple[Policy, Device]]:
    return lambda: (make(), host.HostDevice())


CASES = [
    Case('host-recurrent', _host(reference.recurrent), ('h', 'rng_key', 'rng_counter')),
    Case('host-chunked', _host(reference.chunked), ('history', 'h')),
    Case('host-journal', _host(reference.journal), ('keys', 'values', 'kv_length')),
    Case('onnx-gru', _onnx, ('h_in',)),
    Case('tensorrt-double', _tensorrt, ('h_in', 'c_in', 't_in')),
]


def parameters() -> list[Any]:
    """Return the cases as pytest parameters."""
    return [pytest.param(c, id=c.name, marks=c.marks) for c in CASES]
