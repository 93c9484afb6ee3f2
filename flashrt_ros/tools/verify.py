"""`flashrt-ros verify --policy FILE`: the proof that a capsule holds all that the future needs."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
import json
from pathlib import Path
import subprocess
import sys
import tempfile
from typing import Any

import click
from rich.console import Console

from flashrt_ros.core.capsule import ORIGIN
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.console import console
from flashrt_ros.tools.offline import Offline
from flashrt_ros.tools.policy_options import policy_options
from flashrt_ros.tools.proof import Check, Leaving, Proof
from flashrt_ros.tools.replay_report import plain
from flashrt_ros.tools.script import Player, Step, first_usable
from flashrt_ros.tools.streams import plotting, save_figure
from flashrt_ros.tools.topics import parse_remaps
from flashrt_ros.tools.verify_inputs import Inputs
from flashrt_ros.tools.verifying import Tell, Verifier

CHILD_S = 300.0


def prove(inputs: Inputs, *, tolerance: float = 0.0, child: bool = True,
          tell: Tell = lambda what, done: None) -> Proof:
    """Run the whole proof. What cannot even be configured is a failed check of that name."""
    with tempfile.TemporaryDirectory(prefix='flashrt-verify-') as folder:
        try:
            policy = inputs.open(Path(folder))
        except Refusal as refusal:
            return Proof([Check('configure', False, refusal.message)])
        verifier = None
        try:
            try:
                steps = inputs.steps(policy)
                if inputs.bag is not None:
                    first = first_usable(policy, steps[:len(steps) // 2 + 1])
                    inputs, steps = replace(inputs, first=first), steps[first:]
            except Refusal as refusal:
                return Proof([Check('inputs', False, refusal.message)])
            others = inputs.others(policy, steps)
            if any(s.is_journal for s in policy.session.layout.values()):
                steps = steps[:_room(policy, steps)]
                policy.close()                 # a policy that ran full is in FAULT
                policy = inputs.open(Path(folder))
            verifier = Verifier(policy, steps, others, tolerance, tell,
                                lambda: inputs.open(Path(folder)))
            _prove(verifier, inputs, child=child)
            return verifier.proof
        finally:
            (policy if verifier is None else verifier.policy).close()


def _room(policy: Offline, steps: list[Step]) -> int:
    """Return how many steps leave some room in the journals of a policy."""
    policy.resume_at(ORIGIN)
    try:
        Player(policy, steps).play(0, len(steps))
    except Refusal:
        return policy.session.step * 2 // 3
    return len(steps)


def _prove(verifier: Verifier, inputs: Inputs, *, child: bool) -> None:
    inputs = replace(inputs, save_at=verifier.save_at, future=verifier.future)
    verifier.proof.checks.append(Check('configure', True, _configured(verifier.policy.session)))
    try:
        verifier.twice()
        undisturbed = verifier.restore()
        if child:
            verifier.process(lambda file: _child(inputs, file), undisturbed)
        verifier.leave_out(undisturbed)
    except Refusal as refusal:
        verifier.proof.checks.append(Check('run', False, refusal.message))
    verifier.remark()


def _configured(session: Any) -> str:
    report = session.report
    exact = 'two runs agree to the byte' if report is not None and report.exact else (
        'exact: false, two runs differ in ' + ', '.join(report.different) if report is not None
        else 'not tried')
    return f'{session.state_nbytes:,} bytes of STATE; {exact}'


def _child(inputs: Inputs, capsule: Path) -> str:
    """Go on from the capsule in a new process; return the digest of its actions."""
    try:
        done = subprocess.run(
            [sys.executable, '-m', 'flashrt_ros.tools.verify_child', str(capsule)],
            input=inputs.to_json(), capture_output=True, text=True, timeout=CHILD_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Refusal(Code.INTERNAL, f'the new process did not end within {CHILD_S:g} s'
                      ) from error
    if done.returncode:
        said = done.stderr.strip().splitlines() or ['nothing']
        raise Refusal(Code.INTERNAL, f'the new process ended with {done.returncode}: {said[-1]}')
    return done.stdout.strip()


# -- showing ---------------------------------------------------------------------------------------


def show(proof: Proof, name: str, to: Console) -> None:
    """Print the proof for people."""
    from rich.markup import escape
    from rich.table import Table
    for check in proof.checks:
        mark = '[green]yes[/]' if check.ok else '[bold red]NO [/]'
        to.print(f'{mark} {escape(check.name)}: {escape(check.detail)}', soft_wrap=True)
    if proof.buffers:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title_justify='left',
                      title=f'left out of a restore at step {proof.saved_at}, one at a time')
        for column, side in (('STATE', 'left'), ('holds', 'left'), ('bytes', 'right'),
                             ('bears', 'left'), ('from step', 'right'), ('difference', 'right'),
                             ('', 'left')):
            table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
        for b in proof.buffers:
            table.add_row(escape(b.name), b.what, f'{b.nbytes:,}',
                          '[bold]yes[/]' if b.load_bearing else 'no',
                          '' if b.step is None else f'+{b.step}',
                          '' if b.largest is None or not b.load_bearing else f'{b.largest:.3g}',
                          escape(b.note))
        to.print(table)
    for remark in proof.remarks:
        to.print(f'[yellow]{escape(remark)}[/]', soft_wrap=True)
    verdict = ('[bold green]proved[/]: a capsule holds all that the actions depend on' if proof.ok
               else '[bold red]failed[/]: see NO above')
    to.print(f'{escape(name)} {verdict}', soft_wrap=True)


def draw(proof: Proof, name: str, path: Path) -> None:
    """Draw what each buffer bears. Raises Refusal."""
    pyplot = plotting()
    shown = [b for b in proof.buffers if b.changed]
    if not shown:
        raise Refusal(Code.NOT_FOUND, 'there is nothing to draw: no buffer was left out')
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.32 * len(shown)), layout='constrained')
    values = [_height(b) for b in shown]
    axes.barh([b.name for b in shown], values,
              color=['#c2571a' if b.load_bearing else '#b8b8b8' for b in shown])
    for i, b in enumerate(shown):
        text = f'from step +{b.step}' if b.step is not None else b.note
        axes.text(values[i], i, f'  {text}', va='center', fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale('symlog', linthresh=1e-6)
    axes.set_xlim(0.0, 100.0 * max([*values, 1e-5]))
    axes.set_xlabel('largest difference of an action when it is left out of a restore')
    axes.set_title(f'{name}: {"proved" if proof.ok else "failed"}', fontsize=10)
    save_figure(figure, path)


def _height(b: Leaving) -> float:
    largest = b.largest if b.largest is not None and b.largest != float('inf') else 1.0
    return largest if b.load_bearing else 0.0


@contextmanager
def _progress(*, hidden: bool) -> Iterator[Tell]:
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    terminal = Console(stderr=True)
    with Progress(TextColumn('{task.description}'), BarColumn(), TimeElapsedColumn(),
                  console=terminal, transient=True, disable=hidden or not terminal.is_terminal
                  ) as bars:
        task = bars.add_task('verify', total=1.0)
        yield lambda what, done: bars.update(task, description=what, completed=done)


@click.command('verify')
@policy_options
@click.option('--bag', type=click.Path(path_type=Path), default=None,
              help='Take the inputs from a bag; without, seeded ones are invented.')
@click.option('--remap', 'remaps', multiple=True, metavar='POLICY_TOPIC:=BAG_TOPIC',
              help='Which topic of the bag is meant; may be given several times.')
@click.option('--namespace', default='', help="Namespace of the policy's node in the bag.")
@click.option('--msg-path', 'msg_paths', multiple=True, type=click.Path(path_type=Path),
              help='Folder with .msg files of types that the bag does not define.')
@click.option('--trigger', multiple=True, metavar='TOPIC', help='Step on these topics instead.')
@click.option('--seed', type=click.IntRange(0), default=1, show_default=True,
              help='Of invented inputs.')
@click.option('--tolerance', type=click.FloatRange(0.0), default=0.0, show_default=True,
              help='Differences up to this count as none (policies with exact: false).')
@click.option('--no-process', is_flag=True, help='Leave out the run in a new process.')
@click.option('--picture', type=click.Path(path_type=Path, dir_okay=False), default=None,
              help='Draw the table (.png, .svg).')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON.')
def command(policy: Path, model_root: Path | None, modules: tuple[str, ...], bag: Path | None,
            remaps: tuple[str, ...], namespace: str, msg_paths: tuple[Path, ...],
            trigger: tuple[str, ...], seed: int, tolerance: float, no_process: bool,
            picture: Path | None, as_json: bool) -> None:
    """Prove that a capsule of POLICY holds all that its future actions depend on.

    No ROS is needed. Exit code 0: proved; 1: something was left out, or refused.
    """
    inputs = Inputs(
        str(policy.absolute()), None if model_root is None else str(model_root.absolute()), modules,
        None if bag is None else str(bag.absolute()),
        tuple(parse_remaps(remaps).items()), namespace,
        tuple(str(p.absolute()) for p in msg_paths), trigger, seed)
    with _progress(hidden=as_json) as tell:
        proof = prove(inputs, tolerance=tolerance, child=not no_process, tell=tell)
    if picture is not None and proof.buffers:
        draw(proof, policy.name, picture)
    if as_json:
        click.echo(json.dumps(plain({'policy': str(policy), 'proved': proof.ok, **asdict(proof)}),
                              indent=1))
    else:
        show(proof, policy.name, console())
    sys.exit(0 if proof.ok else 1)
