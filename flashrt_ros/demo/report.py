"""The demo's table and picture: actions over time, and what the cell looked like."""
from __future__ import annotations

from collections.abc import Sequence
from math import cos, sin
from pathlib import Path
from typing import Any

import numpy as np

from flashrt_ros.demo.arm import BIN_HALF, BIN_YAWS, BINS, JOINTS, SCANNER, forward
from flashrt_ros.demo.render import COLOURS
from flashrt_ros.demo.watch import Record

LINES = ('#1f4e8c', '#c2571a', '#2f7d4f', '#7a3f8f')
SHADES = {'HOLD': '#d9d9d9', 'PAUSED': '#f3d9a4', 'RUNNING': '#ffffff', 'FAULT': '#e8a0a0'}
# Moments with a frame, and how many seconds later it is taken
SHOWN = {'lamp': 0.0, 'save': 0.1, 'slip': 0.35, 'push': 0.4, 'restore': 0.1, 'placed': 0.1}


def table(rows: Sequence[tuple[str, str]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table
    shown = Table(show_header=False, title='flashrt_ros demo')
    for row in rows:
        shown.add_row(*row)
    Console().print(shown)


def markdown(rows: Sequence[tuple[str, str]], note: str) -> str:
    """Return the table as Markdown."""
    return '\n'.join(['| what | |', '|---|---|', *(f'| {a} | {b} |' for a, b in rows), '',
                      '![actions over time](demo.png)', '', note, ''])


def picture(record: Record, path: Path) -> str:
    """Draw everything; return '' or why there are drawn figures in place of rendered frames."""
    import matplotlib
    matplotlib.use('Agg')
    from matplotlib import pyplot
    why = '' if record.frames else record.no_pictures or 'no picture arrived'
    moments = [(t, text) for t, text in record.marks if text.split()[0] in SHOWN]
    end = max([record.marks[-1][0] + 1.5, *(t for t, _ in record.arm[-1:])])
    drawing = pyplot.figure(figsize=(13, 8.4), layout='constrained')
    grid = drawing.add_gridspec(3, max(1, len(moments)), height_ratios=(1.5, 2.6, 1.5))
    for i, (t, text) in enumerate(moments):
        axes = drawing.add_subplot(grid[0, i])
        axes.set_title(f'{text}\n{t:.1f} s', fontsize=9)
        if why:
            _draw_cell(axes, _nearest(record.facts, t, text))
        else:
            axes.imshow(_nearest(record.frames, t, text))
            axes.set_axis_off()
    _actions(drawing.add_subplot(grid[1, :]), record, end)
    _overlay(drawing.add_subplot(grid[2, :]), record)
    drawing.savefig(path, dpi=110)
    pyplot.close(drawing)
    return why


def _nearest(series: Sequence[tuple[float, Any]], t: float, text: str) -> Any:
    wanted = t + SHOWN[text.split()[0]]
    return min(series, key=lambda entry: abs(entry[0] - wanted))[1]


def _actions(axes: Any, record: Record, end: float) -> None:
    """Commanded joints as steps, measured ones thin, phases shaded, moments marked."""
    for (start, phase), (stop, _) in zip(record.phases, [*record.phases[1:], (end, '')],
                                         strict=True):
        axes.axvspan(max(0.0, start), stop, color=SHADES.get(phase, '#ffffff'), zorder=0)
        if phase != 'RUNNING' and stop - max(0.0, start) > 0.7:
            axes.text(max(0.0, start) + 0.05, -0.9, phase, fontsize=8, color='#555555')
    times = np.array([t for t, _ in record.arm])
    for j, name in enumerate(JOINTS):
        sent = np.array([v[j] for _, v in record.arm])
        gaps = np.where(np.diff(times) > 0.3)[0] + 1
        for part_t, part in zip(np.split(times, gaps), np.split(sent, gaps), strict=True):
            axes.plot(part_t, part, color=LINES[j], linewidth=1.6, drawstyle='steps-post',
                      label=name if part_t[0] == times[0] else None)
        axes.plot([t for t, _ in record.measured], [v[j] for _, v in record.measured],
                  color=LINES[j], linewidth=0.6, alpha=0.6)
    for i, (t, text) in enumerate(record.marks):
        strong = text in ('save', 'stop', 'restore')
        axes.axvline(t, color='black', linewidth=1.4 if strong else 0.6,
                     linestyle='-' if strong else ':')
        axes.text(t + 0.04, 3.05 - 0.24 * (i % 4), text, fontsize=8,
                  weight='bold' if strong else 'normal')
    axes.set(xlim=(0, end), ylim=(-1.0, 3.3), ylabel='rad',
             title='published actions (thick) and measured joints (thin)')
    axes.legend(loc='lower right', ncols=4, fontsize=8, frameon=False)


def _overlay(axes: Any, record: Record) -> None:
    """The actions after the save and those after the restore, from their own beginnings."""
    at = {text: t for t, text in record.marks}
    if 'save' not in at or 'new goal' not in at:
        return
    for j in range(len(JOINTS)):
        for begin, style in ((at['save'], '-'), (at['new goal'], '--')):
            rows = [(t - begin, v[j]) for t, v in record.arm if 0 <= t - begin < 2.2]
            if rows:
                axes.plot(*zip(*rows, strict=True), style, color=LINES[j], linewidth=1.3)
    axes.set(xlabel='s', ylabel='rad', title='actions after the save (solid) and after the restore '
             '(dashed), each from its own beginning')


def _draw_cell(axes: Any, facts: dict[str, Any]) -> None:
    """The cell from above, where nothing could be rendered."""
    from matplotlib.patches import Circle, Polygon
    axes.add_patch(Circle((0, 0), 0.06, color='#333a48'))
    axes.add_patch(Circle(SCANNER, 0.045, color='#e7a3a3'))
    for (x, y), yaw, colour in zip(BINS, BIN_YAWS, COLOURS, strict=True):
        corners = [(x + BIN_HALF * (a * cos(yaw) - b * sin(yaw)),
                    y + BIN_HALF * (a * sin(yaw) + b * cos(yaw)))
                   for a, b in ((1, 1), (1, -1), (-1, -1), (-1, 1))]
        axes.add_patch(Polygon(corners, facecolor='none', edgecolor=colour, linewidth=2))
    hand = forward(facts['joints'])
    axes.plot([0, hand[0]], [0, hand[1]], color='#333a48', linewidth=4, solid_capstyle='round')
    axes.plot(*facts['part'][:2], 's', color='#f28c1e', markersize=6)
    if facts['lit']:
        axes.plot(0.10, -0.26, 'o', color=COLOURS[facts['target']], markersize=8)
    axes.set(xlim=(-0.4, 0.5), ylim=(-0.4, 0.5), aspect='equal')
    axes.set_axis_off()
