"""`flashrt-ros replay BAG --policy FILE`: does the policy still do what was recorded?"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
import sys

import click
from rich.console import Console

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools import streams, trace
from flashrt_ros.tools.compare import Verdict
from flashrt_ros.tools.console import console
from flashrt_ros.tools.policy_options import policy_options
from flashrt_ros.tools.replaying import Ask, Result, replay
from flashrt_ros.tools.topics import parse_remaps

_FILE = click.Path(path_type=Path, dir_okay=False)


def parse_until(text: str) -> dict[str, float | int]:
    """Return the field of Ask that `--until` sets: seconds of bag, `tick=N` or `step=N`."""
    key, separator, number = text.partition('=')
    try:
        if not separator:
            return {'until_s': float(text.removesuffix('s'))}
        if key in ('tick', 'step') and int(number) >= 0:
            return {f'until_{key}': int(number)}
    except ValueError:
        pass
    raise click.BadParameter(f'{text!r} is neither seconds, tick=N nor step=N',
                             param_hint='--until')


@contextmanager
def progress(what: str, *, hidden: bool) -> Iterator[Callable[[float], None]]:
    """Show a bar on a terminal's stderr; yield what moves it, from 0 to 1."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    terminal = Console(stderr=True)
    with Progress(TextColumn('{task.description}'), BarColumn(), TimeElapsedColumn(),
                  console=terminal, transient=True, disable=hidden or not terminal.is_terminal
                  ) as bars:
        task = bars.add_task(what, total=1.0)
        yield lambda done: bars.update(task, completed=done)


@click.command('replay')
@click.argument('bag', type=click.Path(path_type=Path))
@policy_options
@click.option('--tolerance', type=click.FloatRange(0.0), default=0.0, show_default=True,
              help='How far a value may be from the recorded one.')
@click.option('--until', default='', metavar='SECONDS|tick=N|step=N', help='Where to end.')
@click.option('--from', 'start', default='', metavar='CAPSULE',
              help='Go on from a saved capsule at its place in the bag: a file, or a name that '
              'the bag tells of.')
@click.option('--capsules', type=click.Path(path_type=Path, file_okay=False), default=None,
              help='Folder where capsule files lie now.')
@click.option('--accept-inexact', is_flag=True, help='Take a capsule of another build.')
@click.option('--diff', 'other', default=None, metavar='POLICY|TRACE',
              help='Find the first tick at which another policy file, or a trace of another '
              'machine, differs, and in which input or buffer.')
@click.option('--trace', 'trace_path', type=_FILE, default=None,
              help='Write what each tick read and left (.npz), for --diff elsewhere.')
@click.option('--save', 'save_path', type=_FILE, default=None,
              help='Write recorded and replayed values (.npz or .csv).')
@click.option('--picture', type=_FILE, default=None, help='Draw them (.png, .svg).')
@click.option('--remap', 'remaps', multiple=True, metavar='POLICY_TOPIC:=BAG_TOPIC',
              help='Which topic of the bag is meant; may be given several times.')
@click.option('--namespace', default='', help="Namespace of the policy's node in the bag.")
@click.option('--node', default='', help='Whose ~/chunk to follow, if there are several.')
@click.option('--session', type=click.IntRange(0), default=0, help='Which run, if there are more.')
@click.option('--trigger', multiple=True, metavar='TOPIC',
              help='Step when each of these topics has a new message, whatever the policy file '
              'says.')
@click.option('--as-is', is_flag=True, help='Feed the messages as they come, although ~/chunk '
              'tells which were used.')
@click.option('--prompt', default='', help='Prompt of a bag without ~/status.')
@click.option('--msg-path', 'msg_paths', multiple=True, type=click.Path(path_type=Path),
              help='Folder with .msg files of types that the bag does not define.')
@click.option('--no-compare', is_flag=True, help='Only run; nothing recorded is needed.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON.')
def command(bag: Path, policy: Path, model_root: Path | None, modules: tuple[str, ...],
            tolerance: float, until: str, start: str, capsules: Path | None, accept_inexact: bool,
            other: str | None, trace_path: Path | None, save_path: Path | None,
            picture: Path | None, remaps: tuple[str, ...], namespace: str, node: str, session: int,
            trigger: tuple[str, ...], as_is: bool, prompt: str, msg_paths: tuple[Path, ...],
            no_compare: bool, as_json: bool) -> None:
    """Run POLICY on the inputs in BAG and compare its actions with the recorded ones.

    No ROS is needed. Exit code 0: the same; 1: different, incomplete or refused.
    """
    limits = parse_until(until) if until else {}
    ask = Ask(bag, policy, model_root, modules, msg_paths, parse_remaps(remaps), namespace, node,
              session, prompt, trigger, as_is, start, capsules, accept_inexact,
              tolerance=tolerance, compare=not no_compare,
              trace=other is not None or trace_path is not None,
              **limits)  # type: ignore[arg-type]
    with progress('replay', hidden=as_json) as tell:
        result = replay(ask, tell)
    if trace_path is not None and result.trace is not None:
        trace.save(result.trace, trace_path)
    if save_path is not None:
        streams.write(result.series, save_path)
    if picture is not None:
        report = result.report
        streams.draw(result.series, picture, f'{report.bag} with {report.policy}: '
                     f'{report.verdict.value}')
    good = result.report.verdict is Verdict.SAME
    found: dict[str, object] = {}
    text = ''
    if other is not None:
        found, text = _diff(ask, result, other, hidden=as_json)
        good = good and not found['differs']
    if as_json:
        click.echo(result.report.to_json(**({'diff': found} if found else {})))
    else:
        to = console()
        result.report.show(to)
        if text:
            to.print(text, markup=False, soft_wrap=True)
    sys.exit(0 if good else 1)


def _diff(ask: Ask, result: Result, other: str, *, hidden: bool) -> tuple[dict[str, object], str]:
    """Return where another policy or trace parts from this one, for programs and for people."""
    path = Path(other)
    assert result.trace is not None
    if path.suffix == '.npz':
        second = trace.load(path)
    else:
        if not path.exists():
            raise Refusal(Code.NOT_FOUND, f'--diff {other}: there is no such policy file or trace')
        with progress('other policy', hidden=hidden) as tell:
            answer = replay(replace(ask, policy=path, start='' if not ask.start else ask.start,
                                    compare=False), tell)
        assert answer.trace is not None
        second = answer.trace
        if answer.report.reasons:
            click.echo(f'{path.name}: {answer.report.summary()}', err=True)
    first = result.trace
    both = min(len(first.steps), len(second.steps))
    parting = trace.part(first, second, ask.tolerance)
    uneven = len(first.steps) != len(second.steps)
    if parting is None:
        text = f'no difference in {both} ticks between {first.policy} and {second.policy}'
        if uneven:
            text += f', but one has {len(first.steps)} and the other {len(second.steps)}'
        return {'differs': uneven, 'ticks': both}, text
    at = parting.buffers[0]
    if parting.index is not None and at.startswith('input '):
        from flashrt_ros.tools.labels import label
        from flashrt_ros.tools.offline import open_policy
        runner = open_policy(ask.policy, model_root=ask.model_root, modules=ask.modules,
                             verify=False)
        try:
            port = at.removeprefix('input ').partition(' / ')[0]
            at = 'input ' + label(runner.file, runner.session.layout, port, parting.index)
        finally:
            runner.close()
    text = (f'{first.policy} and {second.policy} part at tick {parting.tick} (step {parting.step}) '
            f'in {at}')
    if parting.first is not None:
        text += (f': {parting.first[0]:.9g} and {parting.first[1]:.9g}, largest difference '
                 f'{parting.largest:.3g}')
    if len(parting.buffers) > 1:
        text += f'; also in {", ".join(parting.buffers[1:6])}'
    return {'differs': True, 'tick': parting.tick, 'step': parting.step, 'where': at,
            'buffers': list(parting.buffers), 'index': parting.index,
            'largest': parting.largest}, text
