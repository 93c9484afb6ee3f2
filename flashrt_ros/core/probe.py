"""Configure's look at a policy: two runs from one state must agree, and nothing may hide.

Five ticks are run twice from a fresh start on seeded inputs. Equal bytes are demanded of every
STATE and OUTPUT buffer; what the policy calls `hidden()` must be the same before and after.
"""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BIT_TYPES, BufferSpec, Role
from flashrt_ros.core.live import LiveSet
from flashrt_ros.core.seam import Policy

if TYPE_CHECKING:
    from flashrt_ros.core.session import Session

TICKS = 5
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Report:
    """What two runs showed: whether they agreed to the byte, and what was left untried."""

    exact: bool
    different: tuple[str, ...] = ()     # buffers that differed
    zero_inputs: tuple[str, ...] = ()   # inputs that were tried with zeros only


def test_input(spec: BufferSpec, rng: np.random.Generator) -> NDArray[Any] | None:
    """Return a seeded value within the port's range; None: nothing but zeros is known to be safe.

    Floats without a range are normal; integers, bits and booleans without one are zero.
    """
    kind = spec.storage.kind
    if spec.low is not None and spec.high is not None and spec.dtype not in BIT_TYPES:
        if kind in 'iu':
            return rng.integers(int(spec.low), int(spec.high), spec.shape,
                                endpoint=True).astype(spec.storage)
        return rng.uniform(spec.low, spec.high, spec.shape).astype(spec.storage)
    if kind == 'f':
        return rng.standard_normal(spec.shape).astype(spec.storage)
    return None


def digest(live: LiveSet) -> dict[str, str]:
    """Return SHA-256 of every STATE buffer; of a journal only the final rows count."""
    out = {}
    for name, buffer in live.arena.buffers.items():
        if buffer.spec.role is not Role.STATE:
            continue
        data = live.arena.read(name)
        if buffer.spec.is_journal:
            outer, rows, width = buffer.spec.rows()
            final = live.lengths[buffer.spec.length or '']
            data = data.reshape(outer, rows * width)[:, :final * width]
        out[name] = hashlib.sha256(np.ascontiguousarray(data).tobytes()).hexdigest()
    return out


def double_run(live: LiveSet, policy: Policy, start: Arrays, *, exact: bool) -> Report:
    """Run twice from a fresh start; refuse hidden state; leave a fresh start behind."""
    specs = [b.spec for b in live.arena.buffers.values()]
    zero = tuple(s.name for s in specs if s.role is Role.INPUT
                 and test_input(s, np.random.default_rng(0)) is None)
    before = dict(policy.hidden())
    runs = []
    for _ in range(2):
        live.start(start)
        rng = np.random.default_rng(20240229)
        seen: list[dict[str, str]] = []
        for _ in range(TICKS):
            for spec in specs:
                if spec.role is Role.INPUT:
                    value = test_input(spec, rng)
                    live.inputs[spec.name][...] = 0 if value is None else value
            outputs = live.run(None)
            state = digest(live)
            state.update({f'output {n}': hashlib.sha256(np.ascontiguousarray(a).tobytes())
                          .hexdigest() for n, a in outputs.items()})
            seen.append(state)
        runs.append(seen)
    after = dict(policy.hidden())
    hidden = sorted(k for k in {*before, *after} if before.get(k) != after.get(k))
    if hidden:
        raise Refusal(Code.UNDECLARED_STATE, f'{", ".join(hidden)} changed during five ticks and '
                      'is no declared buffer: a restore would not bring it back; make it a STATE '
                      'buffer', hidden=hidden)
    different = tuple(sorted({n for a, b in zip(*runs, strict=True) for n in a if a[n] != b[n]}))
    if different and exact:
        raise Refusal(Code.UNDECLARED_STATE, 'two runs from the same state on the same inputs '
                      f'differ in {", ".join(different)}: the policy keeps state that is not '
                      'declared, or is not deterministic; declare the state, or write exact: '
                      'false to accept results that differ', different=list(different))
    live.start(start)
    for name in live.inputs:
        live.inputs[name][...] = 0
    return Report(not different, different, zero)


def read_state(session: Session, name: str) -> bytes:
    """Return a STATE buffer's bytes. Waits; for tools, between inferences."""
    live = session._live
    return session._worker.call(lambda: live.arena.read(name).tobytes()).result()


def write_state(session: Session, name: str, data: bytes) -> None:
    """Overwrite a STATE buffer, as no policy would: what a restore brings back shows then. Waits.

    Rows of a journal that capsules share are final; overwriting them would change capsules.
    """
    live = session._live
    session._worker.call(
        lambda: live.arena.write(name, np.frombuffer(data, np.uint8))).result()
