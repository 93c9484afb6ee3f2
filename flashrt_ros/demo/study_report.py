"""The study's table, figure and raw outcomes: study.md, study.png, study.json."""
from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
import hashlib
import json
from math import sqrt
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from flashrt_ros.demo.rollout import MODEL

Rows = Sequence[Mapping[str, Any]]
TITLES = {'slip': 'slip', 'push': 'push', 'person': 'person steps in',
          'urgent': 'urgent job in between', 'restart': 'policy process restarted',
          'moved': 'part put down elsewhere', 'retarget': 'another bin is wanted now'}
COLOURS = {'restore': '#1f6f4a', 'retry': '#c08a1e', 'reset': '#8c8c8c'}


def wilson(successes: int, n: int, z: float = 1.96) -> tuple[float, float]:
    """Return the 95 % Wilson interval of a proportion.

    >>> low, high = wilson(45, 50)
    >>> f'{low:.3f} {high:.3f}'
    '0.786 0.957'
    """
    if not n:
        return 0.0, 1.0
    p = successes / n
    middle, spread = p + z * z / (2 * n), z * sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    return max(0.0, (middle - spread) / scale), min(1.0, (middle + spread) / scale)


def select(outcomes: Rows, kind: str, method: str) -> list[Mapping[str, Any]]:
    """Return the outcomes of one cell of the table."""
    return [o for o in outcomes if o['kind'] == kind and o['method'] == method]


def _cell(outcomes: Rows) -> str:
    good, n = sum(o['success'] for o in outcomes), len(outcomes)
    low, high = wilson(good, n)
    return f'{good}/{n} ({100 * low:.0f}–{100 * high:.0f} %)'


def _seconds(outcomes: Rows) -> str:
    done = [o['seconds'] for o in outcomes if o['success']]
    return f'{median(done):.1f}' if done else '–'


def _failures(outcomes: Rows) -> str:
    wrong = Counter(o['wrong'] for o in outcomes if not o['success'])
    return ', '.join(f'{n} {what}' for what, n in wrong.most_common()) or '–'


def better(outcomes: Rows, kind: str) -> tuple[int, int, float]:
    """Compare restore with retry on equal seeds: `(only restore, only retry, two-sided p)`.

    The exact McNemar test: of the seeds on which they differ, how uneven is the split?
    """
    by_seed = {o['seed']: o['success'] for o in select(outcomes, kind, 'retry')}
    pairs = [(o['success'], by_seed[o['seed']]) for o in select(outcomes, kind, 'restore')]
    ours, theirs = sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs)
    n, k = ours + theirs, max(ours, theirs)
    choose, tail = 1, 0
    for i in range(n + 1):
        if i >= k:
            tail += choose
        choose = choose * (n - i) // (i + 1)
    return ours, theirs, min(1.0, 2 * tail / 2 ** n)


def markdown(outcomes: Rows, seconds: float) -> str:
    """Return the report."""
    kinds = list(dict.fromkeys(o['kind'] for o in outcomes if o['kind']))
    seeds = len({o['seed'] for o in outcomes})
    plain = select(outcomes, '', '')
    early = sum(bool(o['kind']) and not o['interrupted'] for o in outcomes)
    simulated = sum(o['seconds'] for o in outcomes)
    lines = [
        '# Does a capsule help?', '',
        f'{len(outcomes)} episodes over {seeds} seeds of the sorting cell, {simulated:.0f} s '
        f'simulated in {seconds:.0f} s. The protocol, fixed before the run, is the docstring of '
        '`flashrt_ros/demo/study.py`; `python -m flashrt_ros.demo.study --seeds '
        f'{seeds}` repeats it. Intervals are 95 % Wilson.', '',
        f'Without any interruption: {_cell(plain)}, median {_seconds(plain)} s. In {early} '
        'episodes the interruption never came, because the part was not lifted.', '',
        '| interruption | capsule, witness, restore | retry, state as it is | reset the policy | '
        'restore only / retry only succeeds (McNemar p) |', '|---|---|---|---|---|']
    for kind in kinds:
        ours, theirs, p = better(outcomes, kind)
        lines.append('| ' + ' | '.join([
            TITLES[kind], *(_cell(select(outcomes, kind, m)) for m in COLOURS),
            f'{ours} / {theirs} (p = {p:.2g})']) + ' |')
    lines += ['', 'Median seconds to success, and what the failures were:', '',
              '| interruption | restore | retry | reset |', '|---|---|---|---|']
    for kind in kinds:
        cells = [select(outcomes, kind, m) for m in COLOURS]
        lines.append('| ' + ' | '.join([TITLES[kind], *(
            f'{_seconds(c)} s; {_failures(c)}' for c in cells)]) + ' |')
    lines += ['', *_scan(outcomes, kinds), '', '![success by interruption](study.png)', '']
    return '\n'.join(lines)


def _scan(outcomes: Rows, kinds: Sequence[str]) -> list[str]:
    """Break the retries down by whether the part had been scanned when the interruption came."""
    lines = ['The part had (or had not) been scanned when the interruption came:', '',
             '| interruption | restore, scanned | restore, not yet | retry, scanned | '
             'retry, not yet |', '|---|---|---|---|---|']
    for kind in kinds:
        cells = [[o for o in select(outcomes, kind, m) if o['interrupted']
                  and o['scanned_before'] is before] for m in ('restore', 'retry')
                 for before in (True, False)]
        lines.append('| ' + ' | '.join([TITLES[kind], *map(_cell, cells)]) + ' |')
    return lines


def figure(outcomes: Rows, path: Path) -> None:
    """Draw the table."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    kinds = list(dict.fromkeys(o['kind'] for o in outcomes if o['kind']))
    drawing, axes = pyplot.subplots(figsize=(10, 4.2), layout='constrained')
    for i, (method, colour) in enumerate(COLOURS.items()):
        for j, kind in enumerate(kinds):
            cell = select(outcomes, kind, method)
            good = sum(o['success'] for o in cell)
            low, high = wilson(good, len(cell))
            share, x = good / max(1, len(cell)), j + 0.27 * (i - 1)
            axes.bar(x, share, 0.25, color=colour, label=method if not j else None)
            axes.plot([x, x], [low, high], color='black', linewidth=1.2)
    axes.set_xticks(range(len(kinds)), [fill(TITLES[k], 12) for k in kinds])
    axes.set_ylim(0, 1.05)
    axes.set_ylabel('task success')
    axes.spines[['top', 'right']].set_visible(False)
    axes.legend(frameon=False, ncols=3, loc='lower center', bbox_to_anchor=(0.5, 1.0))
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)


def write(outcomes: Rows, folder: Path, seconds: float) -> None:
    """Write all three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / 'study.md').write_text(markdown(outcomes, seconds), encoding='utf-8')
    fields = list(outcomes[0])
    rows = ',\n'.join(json.dumps([o[f] for f in fields]) for o in outcomes)
    sha256 = hashlib.sha256(MODEL.read_bytes()).hexdigest()
    (folder / 'study.json').write_text(
        f'{{"policy_sha256": "{sha256}",\n"wall_s": {seconds:.1f},\n'
        f'"fields": {json.dumps(fields)},\n"outcomes": [\n{rows}\n]}}\n', encoding='utf-8')
    figure(outcomes, folder / 'study.png')
