"""Prompts: prefill against a restored capsule, decoding after it, rollback, saves that grow."""
from __future__ import annotations

from collections.abc import Iterable
from functools import partial
import time
from typing import Any

import numpy as np

from bench.gpu_common import REPEATS, WARM_UPS, Results, Series, TimedDevice, p50, wall_us
from flashrt_ros.backends.hybrid import Decoder, DecoderConfig, decoder
from flashrt_ros.backends.torch_program import ProgramPolicy
from flashrt_ros.core.session import Options, Session

LENGTHS = (2048, 4096, 8192, 16384, 32768)
SUFFIX = 128              # tokens of the suffix: one chunk of the smallest size
COLD_WARM_UPS, COLD_REPEATS = 2, 10
DECODED = 256             # tokens that must be identical
ROUNDS = 3                # of decoding after a cold prefill and after a restore, turn about
BACK = 64                 # tokens that a rollback undoes
GROWTH = (1, 16, 64, 256, 1024)


class Rig:
    """A decoder in a session, with what the tables do to it."""

    def __init__(self, device: TimedDevice, policy: ProgramPolicy, **options: Any) -> None:
        self.device = device
        program = policy.program
        assert isinstance(program, Decoder)
        self.config: DecoderConfig = program.config
        self.session = Session(policy, device, options=Options(
            **{'verify': False, 'device_slots': 4, **options}))
        self.moved = 0
        live = self.session._live
        load = live.load

        def counted(*args: Any) -> int:
            self.moved = load(*args)
            return self.moved
        live.load = counted  # type: ignore[method-assign]

    def tokens(self, seed: int, n: int) -> np.ndarray:
        """Return a prompt."""
        return np.random.default_rng(seed).integers(0, self.config.vocabulary, n).astype(np.int32)

    def prefill(self, tokens: np.ndarray) -> int:
        """Append a prompt; return the token that follows."""
        s = self.session
        s.inputs['prompt'][:len(tokens)] = tokens
        s.inputs['prompt_length'][0] = len(tokens)
        inference = s.submit(prefill=True)
        inference.wait()
        out = s.accept(inference)
        s.commit_step()
        return int(out['tokens'][0])

    def tick(self) -> list[int]:
        """Decode once; return one or two tokens."""
        s = self.session
        inference = s.submit()
        inference.wait()
        out = s.accept(inference)
        s.commit_step()
        return [int(t) for t in out['tokens'] if t >= 0]

    def decode(self, n: int) -> tuple[list[int], Series]:
        """Return n tokens and the times of each tick: the caller's, and the card's with commit."""
        said: list[int] = []
        times = Series()
        self.session.inputs['observation'][:] = np.linspace(-1, 1, self.config.observation)
        while len(said) < n:
            self.device.arm(spin=False)
            started = time.perf_counter()
            said += self.tick()
            times.wall.append((time.perf_counter() - started) * 1e6)
            times.gpu.append(self.device.elapsed_us())
        return said[:n], times

    def restore(self, name: str) -> None:
        """Restore and wait."""
        self.session.apply(self.session.plan_restore(name)).result()

    def reset(self) -> None:
        """Back to the fresh start."""
        self.session.apply(self.session.plan_reset()).result()


def flops(c: DecoderConfig, weights: dict[str, Any], tokens: int) -> float:
    """Return the floating-point operations of a prefill: products with weights, and attention.

    The scan, the convolution and everything element by element are not counted.
    """
    matrices = sum(w.numel() for n, w in weights.items()
                   if w.dim() == 2 and n[0].isdigit() and not n.endswith('taps'))
    drafts = 2 * c.width * c.width + c.width * 2 * c.kv_heads * c.head_dim
    attention = 4 * c.heads * c.head_dim * (tokens * tokens / 2) * c.full
    return 2.0 * tokens * (matrices + drafts) + attention


def run(results: Results, device: TimedDevice, peak: float, size: str = '1b',
        lengths: Iterable[int] = LENGTHS, *, whole: bool = True) -> None:
    """Fill the tables `prompts`, and with `whole` `rollback`, `growth` and `ring`."""
    policy = ProgramPolicy(decoder(size))
    rig = Rig(device, policy)
    weights = policy.program.constants()
    parameters = sum(w.numel() for w in weights.values())
    results.note(f'{size}: {parameters / 1e9:.2f} billion parameters, plain STATE '
                 f'{rig.session._live.plain.nbytes / 1e6:.1f} MB')
    try:
        for n in lengths:
            _one_length(results, rig, peak, size, n, parameters, weights)
        if whole:
            rollback(results, rig, lengths)
            growth(results, rig)
    finally:
        rig.session.close()
    if whole:
        ring(results, device, policy)


def _one_length(results: Results, rig: Rig, peak: float, size: str, n: int, parameters: int,
                weights: dict[str, Any]) -> None:
    prefix, suffix, other = n - SUFFIX, rig.tokens(2, SUFFIX), rig.tokens(3, n - SUFFIX)
    prompt = rig.tokens(1, prefix)
    s = rig.session
    rig.reset()
    rig.prefill(other)
    s.save('other')
    cold: list[float] = []
    for i in range(COLD_WARM_UPS + COLD_REPEATS):
        rig.reset()
        started = time.perf_counter()
        rig.prefill(prompt)
        rig.prefill(suffix)
        if i >= COLD_WARM_UPS:
            cold.append((time.perf_counter() - started) * 1e6)
    rig.reset()
    rig.prefill(prompt)
    s.save('prompt')
    warm: list[float] = []
    for i in range(5 + REPEATS // 2):
        rig.restore('other')        # the live set holds another prompt of the same length
        started = time.perf_counter()
        rig.restore('prompt')
        rig.prefill(suffix)
        if i >= 5:
            warm.append((time.perf_counter() - started) * 1e6)
    gpu = []
    for _ in range(10):
        rig.restore('other')
        rig.device.arm()
        rig.restore('prompt')
        gpu.append(rig.device.elapsed_us())
    moved = rig.moved
    before, after, identical = Series(), Series(), True
    for _ in range(ROUNDS):         # turn about, as the machine's own speed wanders
        runs = []
        for how, series in (('cold', before), ('restored', after)):
            if how == 'cold':
                rig.reset()
                rig.prefill(prompt)
            else:
                rig.restore('other')
                rig.restore('prompt')
            first = rig.prefill(suffix)
            said, times = rig.decode(DECODED - 1)
            series.wall += times.wall
            series.gpu += times.gpu
            runs.append([first, *said])
        identical = identical and runs[0] == runs[1]
    rounds = [p50(part) for part in np.array_split(before.wall, ROUNDS)]
    noise = max(rounds) / min(rounds) - 1
    seconds = p50(cold) / 1e6
    rate = flops(rig.config, weights, n) / seconds / 1e12
    results.add(
        'prompts', model=size, parameters=parameters, tokens=n,
        cold_ms_p50=round(p50(cold) / 1e3, 3),
        cold_ms_p95=round(float(np.percentile(cold, 95)) / 1e3, 3),
        restored_ms_p50=round(p50(warm) / 1e3, 3),
        restored_ms_p95=round(float(np.percentile(warm, 95)) / 1e3, 3),
        factor=round(p50(cold) / p50(warm), 2),
        restore_gpu_us=round(p50(gpu), 1), restored_bytes=moved,
        prefill_tokens_per_s=round(n / seconds), prefill_tflops=round(rate, 1),
        share_of_peak=round(rate / peak, 3), identical_tokens=DECODED if identical else 0,
        tick_before_gpu_us=round(p50(before.gpu), 1), tick_after_gpu_us=round(p50(after.gpu), 1),
        tick_before_wall_us=round(p50(before.wall), 1),
        tick_after_wall_us=round(p50(after.wall), 1), wall_noise=round(noise, 4),
        tokens_per_tick=round(ROUNDS * (DECODED - 1) / len(after.gpu), 3))
    s.drop('prompt')
    s.drop('other')


def judge(results: Results, size: str) -> None:
    """Judge what the tables of prompts say of a model."""
    rows = {r['tokens']: r for r in results.tables['prompts'] if r['model'] == size}
    for n, least in ((2048, 3.9), (16384, 27.0)):
        if n in rows:
            share = rows[n]['share_of_peak']
            results.target(f'{size}: first token, restored against cold, {n} tokens',
                           f'beyond {least} times', f'{rows[n]["factor"]} times',
                           rows[n]['factor'] > least,
                           '' if share >= 0.4 else f'cold prefill at {share:.0%} of the matrix '
                           'peak, under the 40 % from which factors count')
    results.target(f'{size}: {DECODED} tokens after a restore', 'identical',
                   ', '.join(str(r['identical_tokens']) for r in rows.values()),
                   all(r['identical_tokens'] == DECODED for r in rows.values()))
    for clock in ('gpu', 'wall'):
        change = [r[f'tick_after_{clock}_us'] / r[f'tick_before_{clock}_us'] - 1
                  for r in rows.values()]
        noise = max(r['wall_noise'] for r in rows.values())
        results.target(f'{size}: decode speed after a restore, {clock} time',
                       'within 2 % of before', ', '.join(f'{v:+.2%}' for v in change),
                       all(abs(v) <= 0.02 for v in change),
                       '' if clock == 'gpu' else 'rounds of the same run, before, differ among '
                       f'themselves by up to {noise:.1%}')


def rollback(results: Results, rig: Rig, lengths: Iterable[int]) -> None:
    """Table `rollback`: 64 tokens back along the live lineage."""
    s = rig.session
    for n in lengths:
        rig.reset()
        rig.prefill(rig.tokens(1, n))
        s.save('here')
        series, moved = Series(), []
        more = rig.tokens(4, BACK)
        for i in range(WARM_UPS + REPEATS):
            rig.prefill(more)
            wall = wall_us(lambda: s.apply(s.plan_rollback()).result())
            rig.prefill(more)
            rig.device.arm()
            s.apply(s.plan_rollback()).result()
            us = rig.device.elapsed_us()
            if i >= WARM_UPS:
                series.gpu.append(us)
                series.wall.append(wall)
                moved.append(rig.moved)
        plain = s._live.plain.nbytes
        results.add('rollback', tokens=n, back=BACK, bytes=int(p50(moved)),
                    journal_bytes=int(p50(moved)) - plain, **series.row())
        s.drop('here')
    rows = results.tables['rollback']
    results.target(f'rollback by {BACK} tokens on the live lineage', 'no KV bytes',
                   ', '.join(str(r['journal_bytes']) for r in rows),
                   all(r['journal_bytes'] == 0 for r in rows))
    for clock in ('gpu', 'wall'):
        ratio = rows[-1][f'{clock}_p50_us'] / rows[0][f'{clock}_p50_us']
        results.target(f'rollback at {rows[-1]["tokens"]} against {rows[0]["tokens"]} tokens, '
                       f'{clock} time', 'within 1.3 times', f'{ratio:.2f} times', ratio <= 1.3)


def growth(results: Results, rig: Rig) -> None:
    """Table `growth`: a save after n new tokens copies n rows."""
    s = rig.session
    rig.reset()
    rig.prefill(rig.tokens(1, 8192))
    s.save('here')
    for n in GROWTH:
        wall, gpu, copied = [], [], 0
        for i in range(5 + 20):
            for timed in ('wall', 'gpu'):
                rig.prefill(rig.tokens(5, n))
                used = s._segments.used
                if timed == 'gpu':
                    rig.device.arm()
                took = wall_us(lambda: s.save('grown'))
                if timed == 'gpu':
                    us = rig.device.elapsed_us()
                else:
                    lasted = took
                copied = s._segments.used - used
                s.apply(s.plan_rollback(2)).result()
                s.drop('grown')
            if i >= 5:
                wall.append(lasted)
                gpu.append(us)
        results.add('growth', tokens=n, bytes=copied, bytes_per_token=round(copied / n),
                    save_wall_p50_us=round(p50(wall), 1), copy_gpu_p50_us=round(p50(gpu), 1))
    rows = results.tables['growth']
    per = [r['bytes_per_token'] for r in rows[1:]]
    results.target('bytes of a save after n new tokens', 'proportional to n',
                   ', '.join(f'{r["tokens"]}: {r["bytes"]}' for r in rows),
                   max(per) <= 1.05 * min(per))
    s.drop('here')


def ring(results: Results, device: TimedDevice, policy: ProgramPolicy) -> None:
    """Table `ring`: what committing every boundary costs a token, with history 0 beside it."""
    medians = {}
    for history in (4, 0):
        rig = Rig(device, policy, history=history)
        rig.prefill(rig.tokens(1, 2048))
        rig.decode(30)
        times = [wall_us(rig.tick) for _ in range(DECODED)]
        medians[history] = p50(times)
        if history:
            live, slot = rig.session._live, rig.session._pool.take()
            with_slot = device.measure(partial(live.run, slot), warm_ups=5)
            without = device.measure(partial(live.run, None), warm_ups=5)
            slot.release()
            commit = p50(with_slot.gpu) - p50(without.gpu)
            nbytes = live.plain.nbytes
        results.add('ring', history=history, tick_wall_p50_us=round(medians[history], 1),
                    **({'commit_gpu_us': round(commit, 1), 'bytes': nbytes} if history else {}))
        rig.session.close()
    results.target('the ring per token', 'its own row (no limit)',
                   f'{medians[4] - medians[0]:+.1f} µs of {medians[0]:.0f} µs', True,
                   'GPU time of the commit stands in the table; wall times wander by more')
