"""The figures that need no GPU: `make bench`, or python -m bench [--n N] [--write].

Runs the scripts beside this one and prints their tables; --write replaces the part of
docs/benchmarks.md between its two marks.
"""
from __future__ import annotations

import argparse
from datetime import date
import os
from pathlib import Path
import platform
import subprocess
import sys

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / 'docs/benchmarks.md'
BEGIN, END = '<!-- python -m bench: begin -->', '<!-- python -m bench: end -->'
TABLES = (
    ('A tick of the session over the bare backend call', 'bench.session_tick', '--ticks', 5),
    ('The policy node beside a bare rclpy node', 'bench.ros_node', '--n', 1),
    ('The whole loop with a 640x480 camera', 'bench.ros_camera', '--n', 0.3),
)


def cpu_name() -> str:
    """Return the processor's name."""
    for line in Path('/proc/cpuinfo').read_text().splitlines():
        if line.startswith('model name'):
            return line.split(':', 1)[1].strip()
    return platform.machine()


def main() -> None:
    """Run, print, and write where asked to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--n', type=int, default=1000, help='exchanges of the node tables')
    parser.add_argument('--write', action='store_true', help='replace the tables in docs')
    arguments = parser.parse_args()
    parts = [f'{date.today():%Y-%m-%d}, {cpu_name()}, {os.cpu_count()} cores, Python '
             f'{platform.python_version()}. Medians of alternating calls in one run.']
    for title, module, option, factor in TABLES:
        n = str(max(1, round(arguments.n * factor)))
        out = subprocess.run([sys.executable, '-m', module, option, n],
                             cwd=ROOT, capture_output=True, text=True, check=False)
        if out.returncode != 0:
            sys.exit(f'{module} failed:\n{out.stdout}{out.stderr}')
        table = '\n'.join(line for line in out.stdout.splitlines() if line.startswith('|'))
        parts.append(f'### {title}\n\n{table}')
        print(f'\n{title}\n\n{table}', flush=True)
    if arguments.write:
        page = PAGE.read_text()
        head, rest = page.split(BEGIN)
        PAGE.write_text(head + BEGIN + '\n\n' + '\n\n'.join(parts) + '\n\n' + END
                        + rest.split(END)[1])


if __name__ == '__main__':
    main()
