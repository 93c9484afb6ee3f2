"""`python -m flashrt_ros.demo`: policy node, simulated cell and scenario in three processes.

Prints a table, writes `demo.md` and `demo.png`, and ends with code 1 where something was not as
promised. Under a minute; needs the extras of `pip install 'flashrt_ros[demo]'`, no torch.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import tempfile

from flashrt_ros.demo.watch_env import isolate

isolate()

from flashrt_ros.demo import report, scenario  # noqa: E402
from flashrt_ros.demo.watch import TooBusyError, Watch, processes  # noqa: E402


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(prog='python -m flashrt_ros.demo',
                                     description=(__doc__ or '').partition('\n')[0])
    parser.add_argument('--out', type=Path, default=Path('build/demo'),
                        help='folder of demo.md and demo.png; default: build/demo')
    parser.add_argument('--tree', action='store_true',
                        help='tell the story as a py_trees tree instead of a script')
    arguments = parser.parse_args()
    out: Path = arguments.out
    tell = story(arguments.tree)
    out.mkdir(parents=True, exist_ok=True)
    try:
        watch, result = play(tell)
    except TooBusyError as error:           # three real-time processes on a loaded machine
        print(f'{error}\nThe machine is too busy for real time; once more.')
        watch, result = play(tell)
    why = report.picture(watch.record, out / 'demo.png')
    note = f'Figures are drawn, not rendered: {why}.' if why else ''
    report.table(result.rows)
    (out / 'demo.md').write_text(report.markdown(result.rows, note), encoding='utf-8')
    print(f'{note}\n' if note else '', end='')
    print(f'picture: {out / "demo.png"}')
    return 0 if result.good else 1


def story(as_tree: bool) -> Callable[[Watch], scenario.Result]:
    """Return what plays the story: the script, or the same as a behaviour tree."""
    if not as_tree:
        return scenario.run
    from flashrt_ros.demo import tree
    return tree.run


def play(tell: Callable[[Watch], scenario.Result]) -> tuple[Watch, scenario.Result]:
    """Start the processes, play the story, end them."""
    with tempfile.TemporaryDirectory() as folder, processes(Path(folder)):
        watch = Watch()
        try:
            return watch, tell(watch)
        finally:
            watch.close()


if __name__ == '__main__':
    sys.exit(main())
