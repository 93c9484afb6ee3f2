"""Recorded and replayed values as a file (.npz, .csv) and as a picture."""
from __future__ import annotations

from collections.abc import Sequence
import csv
from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.compare import Series, distance

PANELS = 6                 # values of one output that are drawn: those that differ most


def write(series: Sequence[Series], path: Path) -> None:
    """Write both streams. Raises Refusal for another suffix, or where it cannot be written."""
    try:
        if path.suffix == '.npz':
            _npz(series, path)
        elif path.suffix == '.csv':
            _csv(series, path)
        else:
            raise Refusal(Code.INVALID_ARGUMENT, f'{path}: streams are written as .npz or .csv')
    except OSError as error:
        raise Refusal(Code.IO, f'{path} cannot be written: {error.strerror}') from error


def _npz(series: Sequence[Series], path: Path) -> None:
    arrays: dict[str, Any] = {}
    for s in series:
        key = f'{s.output}/{s.what}'
        arrays[f'{key}/names'] = np.array(s.names, np.str_)
        for kind, rows in (('recorded', s.recorded), ('replayed', s.replayed)):
            shapes = {r.values.shape for r in rows}
            if len(shapes) == 1:       # trajectories of varying length have a CSV only
                arrays[f'{key}/{kind}'] = np.stack([r.values for r in rows])
            arrays[f'{key}/{kind}/time_ns'] = np.array([r.time_ns for r in rows], np.int64)
        arrays[f'{key}/step'] = np.array([r.step for r in s.replayed], np.int64)
    with path.open('wb') as file:
        np.savez_compressed(file, **arrays)


def _csv(series: Sequence[Series], path: Path) -> None:
    with path.open('w', newline='') as file:
        out = csv.writer(file)
        out.writerow(['output', 'of', 'step', 'tick', 'time_ns', 'row', 'value', 'recorded',
                      'replayed'])
        for s in series:
            for a, b in zip(s.recorded, s.replayed, strict=False):
                x, y = np.atleast_2d(a.values), np.atleast_2d(b.values)
                for i in range(min(len(x), len(y))):
                    for j in range(min(x.shape[1], y.shape[1])):
                        name = s.names[j] if j < len(s.names) else str(j)
                        out.writerow([s.output, s.what, b.step, b.tick, a.time_ns, i, name,
                                      repr(float(x[i, j])), repr(float(y[i, j]))])


def draw(series: Sequence[Series], path: Path, title: str) -> None:
    """Draw recorded and replayed values over steps, and their difference. Raises Refusal."""
    pyplot = plotting()
    drawn = [s for s in series if s.recorded and s.replayed]
    if not drawn:
        raise Refusal(Code.NOT_FOUND, 'there is nothing to draw: nothing was compared')
    series_ = next((s for s in drawn if s.what == 'actions'), drawn[0])
    n = min(len(series_.recorded), len(series_.replayed))
    first = [np.atleast_2d(r.values)[0] for r in series_.recorded[:n]]
    second = [np.atleast_2d(r.values)[0] for r in series_.replayed[:n]]
    width = min(len(v) for v in [*first, *second])
    a = np.array([v[:width] for v in first])
    b = np.array([v[:width] for v in second])
    apart = distance(a, b)
    shown = sorted(np.argsort(-apart.max(axis=0), kind='stable')[:PANELS].tolist())
    figure, axes = pyplot.subplots(len(shown) + 1, 1, sharex=True, squeeze=False, layout=(
        'constrained'), figsize=(11, 1.5 * len(shown) + 2.2))
    steps = [r.step for r in series_.replayed[:n]]
    for axis, j in zip(axes[:, 0], shown, strict=False):
        axis.plot(steps, a[:, j], color='#1f4e8c', linewidth=2.0, label='recorded')
        axis.plot(steps, b[:, j], color='#c2571a', linewidth=0.9, linestyle='--', label='replayed')
        axis.set_ylabel(series_.names[j] if j < len(series_.names) else f'[{j}]', fontsize=8)
    axes[0, 0].set_title(title, fontsize=10)
    axes[0, 0].legend(loc='upper right', ncols=2, fontsize=8, frameon=False)
    last = axes[-1, 0]
    largest = apart.max(axis=1)
    last.plot(steps, largest, color='#333333', linewidth=1.0)
    if (largest > 0).any():
        last.set_yscale('symlog', linthresh=1e-9)
    last.set_ylabel('difference', fontsize=8)
    last.set_xlabel(f'step ({series_.what} of {series_.output})')
    save_figure(figure, path)


def plotting() -> Any:
    """Return matplotlib's pyplot without a screen. Raises Refusal(UNSUPPORTED)."""
    try:
        import matplotlib
        matplotlib.use('Agg')
        from matplotlib import pyplot
    except ImportError as error:
        raise Refusal(Code.UNSUPPORTED, "a picture needs matplotlib; install it with pip install "
                      "'flashrt_ros[plot]'") from error
    return pyplot


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure and let it go. Raises Refusal."""
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise Refusal(Code.IO, f'{path} cannot be drawn: {error}') from error
    finally:
        plotting().close(figure)
