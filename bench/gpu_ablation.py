"""What each class of state carries: leave one out of a restore and see when the future differs."""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bench.gpu_common import Results
from flashrt_ros.backends.hybrid import decoder, flow
from flashrt_ros.backends.torch_program import ProgramPolicy
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.core.seam import Device
from flashrt_ros.core.session import Options, Session

STEPS = 64
DISTURBANCE = 7   # steps; no multiple of any period here
QUEUE = 4         # rows of a chunk that are played before the next inference
OWNER = [BufferSpec('owner.counter', (1,), 'I64', Role.STATE, Space.HOST),
         BufferSpec('owner.queue', (QUEUE,), 'F64', Role.STATE, Space.HOST),
         BufferSpec('owner.cursor', (1,), 'I64', Role.STATE, Space.HOST)]
HOST_CLASSES = {'host counters': ('owner.counter',), 'queue and cursor': ('owner.queue',
                                                                         'owner.cursor')}
DECODER_CLASSES = {
    'KV': ('kv',), 'recurrent': ('recurrent',), 'conv': ('conv',),
    'MTP (journal and hidden tail)': ('mtp_kv', 'tail_hidden'),
    'last tokens': ('tail_tokens', 'tail_count'), **HOST_CLASSES}
FLOW_CLASSES = {'random key': ('rng_key',), 'random counter': ('rng_counter',),
                'recurrent memory': ('memory',), **HOST_CLASSES}


class Owner:
    """Plays an action a step from a queue; inputs follow a counter. All of it is HOST STATE."""

    def __init__(self, session: Session, inputs: str, output: str) -> None:
        self.session, self._input, self._output = session, inputs, output

    def step(self, shift: float = 0.0) -> bytes:
        """Run one step; return the action that it played."""
        s = self.session
        counter, queue, cursor = (s.host[b.name] for b in OWNER)
        if int(cursor[0]) % QUEUE == 0:
            array = s.inputs[self._input]
            array[...] = np.sin(0.37 * int(counter[0]) + np.arange(array.size) + shift)
            inference = s.submit()
            inference.wait()
            rows = np.asarray(s.accept(inference)[self._output], np.float64).reshape(-1)
            queue[...] = np.resize(rows, QUEUE) + np.arange(QUEUE)
        counter[0] += 1
        action = queue[int(cursor[0]) % QUEUE].tobytes()
        cursor[0] += 1
        s.commit_step()
        return action

    def run(self, steps: int, shift: float = 0.0) -> list[bytes]:
        """Run several."""
        return [self.step(shift) for _ in range(steps)]


def run(results: Results, device: Device, size: str = 'small') -> None:
    """Fill the table `ablation`."""
    program = decoder(size)

    def prompt(s: Session, seed: int) -> None:
        rng = np.random.default_rng(seed)
        s.inputs['prompt'][:100] = rng.integers(0, program.config.vocabulary, 100)
        s.inputs['prompt_length'][0] = 100
        inference = s.submit(prefill=True)
        inference.wait()
        s.accept(inference)
        s.commit_step()
    _one(results, device, 'hybrid decoder', ProgramPolicy(program), 'observation', 'actions',
         DECODER_CLASSES, prompt)
    _one(results, device, 'flow head', ProgramPolicy(flow()), 'obs', 'actions', FLOW_CLASSES, None)
    rows = results.tables['ablation']
    full = [r for r in rows if r['left_out'] == 'nothing']
    null = [r for r in rows if r['left_out'].startswith('everything')]
    results.target('full restore', 'no divergence',
                   ', '.join(str(r['first_divergent_action']) for r in full),
                   all(r['first_divergent_action'] is None for r in full))
    results.target('null control: a restore that does nothing', 'diverges',
                   ', '.join(str(r['first_divergent_action']) for r in null),
                   all(r['first_divergent_action'] is not None for r in null))


def _one(results: Results, device: Device, name: str, policy: ProgramPolicy, inputs: str,
         output: str, classes: dict[str, tuple[str, ...]],
         prompt: Callable[[Session, int], None] | None) -> None:
    s = Session(policy, device, host_state=OWNER, options=Options(verify=False))
    owner = Owner(s, inputs, output)
    arena = s._live.arena

    def restore(left_out: Iterable[str]) -> None:
        kept = {n: arena.read(n) for n in left_out}
        s.apply(s.plan_restore('a')).result()
        for n, data in kept.items():
            arena.write(n, data)
    try:
        if prompt is not None:
            prompt(s, 1)
        owner.run(10)
        s.save('a', pin=True)
        never = owner.run(STEPS)
        s.apply(s.plan_restore('a')).result()
        trials: dict[str, tuple[str, ...] | None] = {'nothing': (), **classes,
                                                     'everything (no-op restore)': None}
        for left_out, buffers in trials.items():
            s.apply(s.plan_reset()).result()
            if prompt is not None:
                prompt(s, 2)
            owner.run(10 + DISTURBANCE, shift=1.0)
            if buffers is not None:
                restore(buffers)
            after = owner.run(STEPS)
            first = next((i for i, (x, y) in enumerate(zip(never, after, strict=True)) if x != y),
                         None)
            row: dict[str, Any] = {'policy': name, 'left_out': left_out,
                                   'first_divergent_action': first,
                                   'different_of_64': sum(x != y for x, y in
                                                          zip(never, after, strict=True))}
            results.add('ablation', **row)
    finally:
        s.close()
