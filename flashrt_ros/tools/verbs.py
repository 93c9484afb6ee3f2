"""The subcommands that ask a running policy node: save, restore, rollback, list, execute, …"""
from __future__ import annotations

from collections.abc import Callable
import functools
import json
import math
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from flashrt_ros.clients.blocking import BlockingClient

Verb = Callable[..., Any]
TIERS = ('device', 'host', 'disk', 'evicted')


def node_options(function: Verb) -> click.decorators.FC:
    """Add what every verb takes: which node, how long to wait, how to print."""
    @click.option('-n', '--node', default='policy_node', show_default=True,
                  envvar='FLASHRT_ROS_NODE', help='Name of the policy node, with its namespace.')
    @click.option('--timeout', default=5.0, show_default=True, help='Seconds to wait.')
    @click.option('--json', 'as_json', is_flag=True, help='Print the whole answer as JSON.')
    @functools.wraps(function)
    def wrapper(node: str, timeout: float, as_json: bool, **arguments: Any) -> None:
        from flashrt_ros.clients.blocking import BlockingClient
        with BlockingClient(node, timeout_s=timeout) as client:
            function(client, as_json, **arguments)
    return wrapper  # type: ignore[return-value]


guarded = [
    click.option('--if-epoch', default=0, help='Refuse if the state was rewound after that epoch.'),
    click.option('--check', is_flag=True, help='Change nothing, only answer.'),
    click.option('--force', is_flag=True, help='Override ROBOT_MOVED where allow_force is set.'),
    click.option('--accept-inexact', is_flag=True,
                 help='Take a capsule of another build of the same policy.'),
]


def options(*many: Verb) -> Callable[[Verb], Verb]:
    """Apply several click options, first on top."""
    def apply(function: Verb) -> Verb:
        for option in reversed(many):
            function = option(function)
        return function
    return apply


@click.command()
@click.argument('name', default='')
@click.option('--note', default='', help='Free text kept with it.')
@click.option('--pin', is_flag=True, help='Never evict it.')
@click.option('--persist', is_flag=True, help='Write it to disk in the background.')
@click.option('--overwrite', is_flag=True, help='Replace a capsule of that name.')
@click.option('--lease', 'lease_s', default=0.0, help='Seconds during which it is not evicted.')
@click.option('--request-id', default='', help='An equal id gets the first answer again.')
@node_options
def save(client: BlockingClient, as_json: bool, **fields: Any) -> None:
    """Name the newest boundary; never waits for an inference."""
    say(client.call(lambda c: c.save(**fields)), as_json)


@click.command()
@click.argument('name', default='')
@click.option('--if-id', default='', help='Refuse if the name now means another capsule.')
@options(*guarded)
@node_options
def restore(client: BlockingClient, as_json: bool, **fields: Any) -> None:
    """Stop, then return to a capsule ('' newest, origin: fresh). Starts no motion."""
    say(client.call(lambda c: c.restore(**fields)), as_json)


@click.command()
@click.option('--capsules', default=0, help='How many capsules back along the lineage.')
@click.option('--steps', default=0, help='How many steps back (lock step only).')
@click.option('--seconds', default=0.0, help='How many seconds back (lock step only).')
@options(*guarded)
@node_options
def rollback(client: BlockingClient, as_json: bool, **fields: Any) -> None:
    """Return along the lineage of the present state."""
    say(client.call(lambda c: c.rollback(**fields)), as_json)


@click.command()
@click.argument('name')
@click.option('--if-id', default='', help='Only that capsule.')
@click.option('--if-epoch', default=0, help='Refuse if the state was rewound after that epoch.')
@node_options
def drop(client: BlockingClient, as_json: bool, **fields: Any) -> None:
    """Forget a capsule, a pinned one too; origin never."""
    say(client.call(lambda c: c.drop(**fields)), as_json)


@click.command()
@click.argument('name', default='')
@click.option('--pin/--unpin', default=None, help='Keep it from eviction, or no longer.')
@click.option('--persist', is_flag=True, help='Write it to disk in the background.')
@click.option('--lease', 'lease_s', default=0.0, help='Seconds during which it is not evicted.')
@node_options
def keep(client: BlockingClient, as_json: bool, **fields: Any) -> None:
    """Pin, unpin, lease or persist a capsule ('' newest)."""
    say(client.call(lambda c: c.keep(**fields)), as_json)


@click.command('list')
@click.argument('prefix', default='')
@node_options
def list_(client: BlockingClient, as_json: bool, prefix: str) -> None:
    """List capsules, oldest first."""
    answer = client.call(lambda c: c.list(prefix))
    if as_json or not answer.success:
        say(answer, as_json)
        return
    table = Table(title=f'{len(answer.capsules)} capsules, epoch {answer.epoch}')
    for column in ('name', 'tick', 'step', 'tier', 'bytes', 'kept', 'parent', 'note'):
        table.add_column(column)
    names = {c.id: c.name for c in answer.capsules}
    for c in answer.capsules:
        kept = ' '.join(word for word, is_set in (
            ('pinned', c.pinned), ('durable', c.durable), ('inexact', not c.exact)) if is_set)
        table.add_row(c.name, str(c.tick), str(c.step), TIERS[c.tier], f'{c.nbytes:,}', kept,
                      names.get(c.parent_id, c.parent_id[:8]), c.note)
    console = Console()
    console.print(table)
    console.print(f'device {answer.device_bytes:,} B, host {answer.host_bytes:,} B, '
                  f'disk {answer.disk_bytes:,} B')


@click.command()
@click.argument('prompt', default='')
@click.option('--capsule', default='', help="Restore it first; 'origin' is a fresh episode.")
@click.option('--max-duration', 'max_duration_s', default=0.0, help='Seconds; 0: 60 s.')
@click.option('--max-ticks', default=0, help='Inferences; 0: no limit.')
@click.option('--shadow', is_flag=True, help='Run and report, command nothing.')
@click.option('--if-epoch', default=0, help='Must equal the present epoch.')
@node_options
def execute(client: BlockingClient, as_json: bool, **goal: Any) -> None:
    """Give permission to move and wait for the end; Ctrl-C cancels and waits for the stop."""
    console = Console(stderr=True)
    with console.status('sent') as line:
        def show(feedback: Any) -> None:
            line.update(f'tick {feedback.tick}, queue {feedback.queue_depth}, '
                        f'input age {feedback.input_age_s:.3f} s')
        execution = client.execute(feedback=show, **goal)
        try:
            result = client.wait(execution.result, timeout_s=math.inf)
        except KeyboardInterrupt:
            line.update('cancelling')
            client.inside(execution.cancel)
            result = client.wait(execution.result)
    say(result, as_json, success=result.code == 0)


def _trigger(verb: str, text: str) -> click.Command:
    @click.command(verb, help=text)
    @node_options
    def command(client: BlockingClient, as_json: bool) -> None:
        say(client.call(lambda c: c.trigger(verb)), as_json)
    return command


start = _trigger('start', 'Start motion as a goal with default limits and no client.')
stop = _trigger('stop', 'Stop: on_stop is sent, the goal ends, the state stays.')
pause = _trigger('pause', 'Stop, and keep the goal open.')
resume = _trigger('resume', 'Go on with a paused goal.')
reset = _trigger('reset', 'Return to origin. Starts no motion.')


@click.command()
@node_options
def status(client: BlockingClient, as_json: bool) -> None:
    """Print the node's latest status."""
    message = client.first_status()
    data = to_dict(message)
    if as_json:
        click.echo(json.dumps(data))
        return
    data['phase'] = phase_name(message)
    table = Table(show_header=False)
    for key, value in data.items():
        if key != 'header':
            table.add_row(key, str(value))
    Console().print(table)


def phase_name(message: Any) -> str:
    """Return the name of a PolicyStatus' phase."""
    kind = type(message)
    return next(name for name in ('UNCONFIGURED', 'HOLD', 'RUNNING', 'PAUSED', 'SHADOW', 'FAULT')
                if getattr(kind, name) == message.phase)


def say(answer: Any, as_json: bool, success: bool | None = None) -> None:
    """Print an answer; a refusal also ends with exit code 1."""
    good = answer.success if success is None else success
    if as_json:
        click.echo(json.dumps(to_dict(answer)))
    else:
        from flashrt_ros.core.errors import Code
        code = '' if good or not hasattr(answer, 'code') else f'{Code(answer.code).name}: '
        click.secho(f'{code}{answer.message}', fg=None if good else 'red', err=not good)
        for moved in zip(getattr(answer, 'moved', ()), getattr(answer, 'distance', ()),
                         getattr(answer, 'limit', ()), strict=False):
            click.echo('  {}: moved {:.4g}, limit {:.4g}'.format(*moved), err=True)
    if not good:
        raise click.exceptions.Exit(1)


def to_dict(message: Any) -> Any:
    """Return a ROS message as plain JSON values."""
    if hasattr(message, 'get_fields_and_field_types'):
        return {name: to_dict(getattr(message, name))
                for name in message.get_fields_and_field_types()}
    if isinstance(message, (str, bool, int, float)):
        return message
    return [to_dict(item) for item in message]
