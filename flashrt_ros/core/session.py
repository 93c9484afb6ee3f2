"""One configured policy at work: ticks, steps, boundaries, epochs.

Threads. The *owner* (one thread at a time, under a lock of its own) latches inputs, submits,
accepts and commits steps. The *device thread* runs ticks, restores and tier moves in order. Verbs
may come from any thread. One lock stands over store and ring; it is never held across a device
call, an inference or a file operation. Events are told after it is released.

Every accepted tick leaves its plain STATE in a slot and every step commits a boundary, so a save
only gives a name to something that already exists. An earlier design queued saves behind the
running inference: with ticks of 50 ms they took 37 ms in the middle, this one takes microseconds.
The slot of a boundary is that of the last *accepted* tick; a tick that has finished and was not yet
accepted belongs to the future, and the boundary keeps the inputs that it latched. So boundaries do
not depend on how fast an inference was.
"""
from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError
from contextlib import suppress
from dataclasses import dataclass
import itertools
from pathlib import Path
import secrets
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core import probe
from flashrt_ros.core.capsule import ORIGIN, Boundary, CapsuleInfo, Event, Latch, Mark
from flashrt_ros.core.disk import CapsuleFolder
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.fork import Forks
from flashrt_ros.core.inference import Inference
from flashrt_ros.core.journal import Strands, shared_rows
from flashrt_ros.core.layout import BufferSpec, Fingerprint, Layout, Role, Space
from flashrt_ros.core.live import LiveSet
from flashrt_ros.core.load import Loading
from flashrt_ros.core.payload import HostBlocks, Payload, SegmentPool, SlotPool
from flashrt_ros.core.rewind import Rewinding
from flashrt_ros.core.saving import Saving
from flashrt_ros.core.seam import Device, Policy, Prefills
from flashrt_ros.core.store import Budgets, Store
from flashrt_ros.core.worker import Worker

FORMAT = '1'                     # of boundaries, in files and fingerprints
COUNTERS = ('session.tick', 'session.step')
MAX_BOUNDARIES = 4096            # steps in the ring, whatever the length of a chunk
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Options:
    """How a session keeps its boundaries. All memory is taken at configure."""

    history: int = 4             # ticks kept on the device for rollback by steps; 0: no ring
    device_slots: int = 8        # capsules on the device
    host_bytes: int = 1 << 30    # capsules in pinned host memory
    max_capsules: int = 256
    segment_bytes: int = 0       # device memory for journal rows of capsules; 0: as the journals
    exact: bool = True           # configure demands equal bytes from two runs
    threaded: bool = True        # False: ticks run on the caller's thread
    live_sets: int = 1           # 1 + the number of forks that may live at once
    directory: Path | None = None  # where durable capsules lie; None: no DISK tier
    disk_bytes: int = 10 << 30
    verify: bool = True          # run twice from origin at configure


@dataclass(frozen=True)
class Stats:
    """Seconds."""

    tick_p50_s: float
    tick_p99_s: float
    restore_bound_s: float


class Session(Saving, Loading, Rewinding, Forks):
    """A policy bound to one or more live sets, with its store of capsules.

    The constructor configures: it binds, warms up, looks for hidden state and commits `origin`;
    it raises Refusal. `close` frees everything.
    """

    def __init__(self, policy: Policy, device: Device, *, host_state: Sequence[BufferSpec] = (),
                 initial: Arrays | None = None, meaning: Mapping[str, str] | None = None,
                 exactness: Mapping[str, str] | None = None, options: Options | None = None,
                 clock: Callable[[], int] = time.time_ns,
                 steady: Callable[[], float] = time.monotonic,
                 on_event: Callable[[Event], None] | None = None,
                 worker: Worker | None = None) -> None:
        """`worker` runs ticks and restores in place of a thread of its own: a replay's pump."""
        self.policy = policy
        self.device = device
        self.options = options = options or Options()
        self.id = secrets.randbits(63) | 1
        self.epoch = 1
        self.rewind_epoch = 1
        self.fault: Refusal | None = None
        self._build_exact = options.exact  # whether this deployment repeats to the byte
        self.exact = options.exact  # the same, and the state came from one that does
        self._clock = clock
        self._steady = steady
        self._on_event = on_event
        self._lock = threading.RLock()
        self._events: list[Event] = []
        counters = [BufferSpec(n, (1,), 'U64', Role.STATE, Space.HOST) for n in COUNTERS]
        theirs = policy.layout()
        for spec in theirs.select(Role.STATE, Space.HOST):
            # HOST state is written by the owner while a tick runs; a program must not see that
            raise Refusal(Code.UNSUPPORTED, f'policy STATE {spec.name} is declared in HOST space; '
                          'declare what a program reads or writes in DEVICE space')
        self.layout = Layout([*theirs.values(), *counters, *host_state])
        self.fingerprint = self._fingerprint(meaning or {}, exactness or {})
        self._fingerprint_digest = self.fingerprint.digest()
        self.state_nbytes = self.layout.nbytes(Role.STATE)
        self.in_flight: Inference | None = None
        self.report: probe.Report | None = None
        self._durations: deque[float] = deque(maxlen=512)
        self._restore_s = 0.0
        self._worker = worker or Worker('flashrt-device', threaded=options.threaded)
        self._spill = Worker('flashrt-spill', threaded=options.threaded)
        self._closers: list[Callable[[], None]] = [policy.close]
        self._head_slot: Payload | None = None
        self._head_lengths: Mapping[str, int] = {}
        self._head_strands: Mapping[str, Strands] = {}
        self._moved = False
        self.pending_after_restore: Latch | None = None
        try:
            self._open(initial or {})
        except BaseException:
            self.close()
            raise

    def _fingerprint(self, meaning: Mapping[str, str], exactness: Mapping[str, str]
                     ) -> Fingerprint:
        theirs, builds = self.policy.identity()
        return Fingerprint({**theirs, **meaning, 'format': FORMAT, 'layout': self.layout.digest()},
                           {**builds, **self.device.identity(), **exactness})

    def _open(self, initial: Arrays) -> None:
        o = self.options
        ids = self._strand_ids = itertools.count(1)
        self._folder = CapsuleFolder(o.directory) if o.directory is not None else None
        if self._folder is not None:
            self._closers.append(self._folder.close)
        self._sets = []
        for _ in range(max(1, o.live_sets)):
            live = self._worker.call(
                lambda: LiveSet(self.device, self.layout, self.policy, ids)).result()
            self._sets.append(live)
            self._closers.append(live.close)
        self._live = self._sets[0]
        self._spare_sets = self._sets[1:]
        self.inputs: Mapping[str, NDArray[Any]] = self._live.inputs
        self.host: Mapping[str, NDArray[Any]] = self._live.host
        self._tick, self._step = (self._live.host[n] for n in COUNTERS)
        nbytes = self._live.plain.nbytes
        # ring + tick in flight + origin + one whose capsule is on its way to the host
        self._pool = SlotPool(self.device, nbytes, max(o.history, 1) + 3 + o.device_slots)
        self._closers.append(self._pool.close)
        self._host_blocks = HostBlocks(self.device, nbytes)
        self._closers.append(self._host_blocks.close)
        journals = sum(b.spec.nbytes for b in self._live.journals)
        self._segments = SegmentPool(self.device, o.segment_bytes or 2 * journals)
        self._closers.append(self._segments.close)
        self._store = Store(Budgets(o.device_slots, o.host_bytes, o.max_capsules), self._steady)
        self._ring: deque[Boundary] = deque()
        self._parent = ''
        self._answers: dict[str, CapsuleInfo] = {}
        self._orders = itertools.count()
        self._names = itertools.count(1)
        start = {**self.policy.initial(), **initial}

        def begin() -> None:
            self._live.start(start)
            if o.verify:
                self.report = probe.double_run(self._live, self.policy, start, exact=o.exact)
                self.exact = self._build_exact = o.exact and self.report.exact
            self._commit_origin()
        self._worker.call(begin).result()
        self._scan_folder()
        self._flush_events()

    def _commit_origin(self) -> None:
        slot = self._pool.take()
        self._live.save_plain(slot)
        boundary = Boundary(slot, self._live.host_block(), 0, 0, Mark(), None,
                            dict(self._live.lengths), dict(self._live.strands), '')
        self._set_head(slot, boundary.lengths, boundary.strands)
        boundary.pieces = self._save_journals(boundary)
        capsule = self._enter(ORIGIN, boundary, pin=True)
        self._parent = capsule.id
        self._set_newest(boundary.held(), capsule.id)
        started = time.perf_counter()
        self._live.load(slot, boundary.lengths, boundary.strands, boundary.pieces)
        self._restore_s = time.perf_counter() - started

    # -- ticks and steps: for the owner ---------------------------------------------------

    @property
    def tick(self) -> int:
        """Accepted inferences since origin."""
        return int(self._tick[0])

    @property
    def step(self) -> int:
        """Committed steps since origin."""
        return int(self._step[0])

    @property
    def prefills(self) -> bool:
        """Whether the policy has a program that takes in a new prompt."""
        return isinstance(self._live.bound, Prefills)

    def submit(self, latch: Latch | None = None, *, prefill: bool = False) -> Inference:
        """Start one tick and return at once (unthreaded: when it has run).

        Raises Refusal: BUSY while another is in flight, FAULT after a device failure.
        """
        latch = latch or Latch(step=self.step)
        with self._lock:
            if self.fault is not None:
                raise Refusal(Code.FAULT, f'{self.fault.message}; clean up and configure')
            if self.in_flight is not None:
                raise Refusal(Code.BUSY, 'an inference is in flight; accept or discard it first')
            inference = Inference(latch, self.epoch, prefill=prefill)
            self.in_flight = inference
        self._worker.post(lambda: self._run(inference))
        return inference

    def _run(self, inference: Inference) -> None:
        """On the device thread: latch, run, commit into a slot."""
        started = time.perf_counter()
        try:
            if self.fault is not None:
                raise Refusal(Code.FAULT, self.fault.message)
            for name, data in inference.latch.inputs.items():
                array = self.inputs[name]
                array[...] = np.frombuffer(data, array.dtype).reshape(array.shape)
            if self.options.history:
                with self._lock:
                    inference.slot = self._pool.take()
            inference.outputs = self._live.run(inference.slot, prefill=inference.prefill)
            inference.lengths = dict(self._live.lengths)
            inference.strands = dict(self._live.strands)
        except Refusal as error:
            inference.error = error
        except BaseException as error:  # whatever a policy raises, SystemExit too, is its owner's
            inference.error = Refusal(Code.BACKEND, f'{type(error).__name__}: {error}')
            inference.error.__cause__ = error
        inference.duration_s = time.perf_counter() - started
        with self._lock:
            self._durations.append(inference.duration_s)
            if inference.error is not None and self.fault is None:
                # the program may have stopped half-way: the live set is no boundary any more
                self.fault = inference.error
            if inference.settled:
                self._release_slot(inference)
        inference.finish()

    def accept(self, inference: Inference) -> Arrays:
        """Count a finished tick: its slot becomes the newest; return copies of its outputs.

        Raises the Refusal with which it failed.
        """
        with self._lock:
            if inference.settled or not inference.done:
                raise Refusal(Code.WRONG_PHASE, 'this inference is not finished, or was accepted '
                              'or discarded before')
            self._settle(inference)
            if inference.error is not None:
                self._release_slot(inference)
                raise inference.error
            if any(shared_rows(strands, self._head_lengths[n], inference.strands[n],
                               inference.lengths[n]) < self._head_lengths[n]
                   for n, strands in self._head_strands.items()):
                # a journal was rewritten, and the rows of older boundaries are gone; the newest
                # stays as what a save may name until the next step is committed
                self._trim_ring(keep=1)
            self._set_head(inference.slot, inference.lengths, inference.strands)
            self._release_slot(inference)
            self._tick[0] += 1
            self._moved = self._head_slot is None
            return inference.outputs

    def commit_step(self, mark: Mark | None = None, pending: Latch | None = None) -> None:
        """Count a step and commit its boundary: slot of the last accepted tick, a copy of HOST
        state, and the latch of an inference that was started and not yet accepted."""
        with self._lock:
            self._step[0] += 1
            self._moved = False
            slot = self._head_slot
            newest = self._ring[-1]
            self._ring.append(Boundary(
                slot.hold() if slot is not None else None, self._live.host_block(), self.tick,
                self.step, mark if mark is not None else newest.mark, pending,
                self._head_lengths, self._head_strands, self._parent))
            if len(self._ring) > MAX_BOUNDARIES:
                self._ring.popleft().release()
            if slot is None:
                while len(self._ring) > 1:
                    self._ring.popleft().release()
            elif newest.payload is not slot:
                self._trim_ring(keep=self.options.history)

    def recommit(self) -> None:
        """Take HOST state that changed between two steps, a new prompt, into the newest boundary.

        An inference in flight was started before the change: the boundary forgets it.
        """
        with self._lock:
            self._ring[-1].host = self._live.host_block()
            self._ring[-1].pending = None

    def tick_now(self, inputs: Arrays) -> Arrays:
        """Run one tick and one step: `inputs` by INPUT buffer in, copies of the outputs out."""
        with self._lock:
            if self.in_flight is not None:
                raise Refusal(Code.BUSY, 'an inference is in flight; accept or discard it first')
        for name, value in inputs.items():
            self.inputs[name][...] = value
        inference = self.submit()
        inference.wait()
        outputs = self.accept(inference)
        self.commit_step()
        return outputs

    # -- telling --------------------------------------------------------------------------

    def digest(self) -> dict[str, str]:
        """Return SHA-256 of every STATE buffer (of journals the final rows). Waits."""
        return self._worker.call(lambda: probe.digest(self._live)).result()

    def stats(self) -> Stats:
        """Return times of recent ticks and within what time a restore answers."""
        with self._lock:
            d = sorted(self._durations)
        if not d:
            return Stats(0.0, 0.0, self._restore_s)
        return Stats(d[len(d) // 2], d[min(len(d) - 1, len(d) * 99 // 100)],
                     d[-1] + self._restore_s)

    def close(self, timeout: float = 5.0) -> bool:
        """End the device thread and free everything; return whether that was possible.

        Where a program does not return within `timeout` seconds its memory cannot be freed and is
        left to the process.
        """
        with suppress(TimeoutError, Refusal):  # busy, or closed before
            self._worker.call(lambda: None).result(timeout)
        spilled = self._spill.close(timeout)  # what was ordered durable is written first
        returned = self._worker.close(timeout) and spilled
        while returned and self._closers:
            self._closers.pop()()
        return returned
