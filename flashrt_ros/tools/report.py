"""`flashrt-ros report BAG`: what a bag holds, which terms could read it, what a run did in it."""
from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from flashrt_ros.core.capsule import EventKind
from flashrt_ros.core.errors import Refusal
from flashrt_ros.tools.bags import Bag, open_bag
from flashrt_ros.tools.console import console
from flashrt_ros.tools.record import CHUNK, REWINDS, find_node, read_run
from flashrt_ros.tools.replay_report import plain
from flashrt_ros.tools.suggest import terms


@dataclass
class TopicReport:
    """One topic: how often, and the terms that could read it."""

    name: str
    type: str
    count: int
    hz: float
    terms: list[str] = field(default_factory=list)
    trouble: str = ''


@dataclass
class RunReport:
    """What a policy node did."""

    node: str
    session: int
    ticks: int
    steps: int
    rewinds: list[str]
    capsules: list[str]                # durable ones: `replay --from NAME`
    refusals: dict[str, int]


@dataclass
class BagReport:
    """What a bag holds."""

    bag: str
    seconds: float
    messages: int
    distro: str
    remarks: list[str]
    topics: list[TopicReport]
    runs: list[RunReport] = field(default_factory=list)


def report(bag: Bag) -> BagReport:
    """Look into an open bag. Raises Refusal where it cannot be read at all."""
    topics = {n: TopicReport(n, ', '.join(t.types), t.count,
                             t.count / bag.seconds if bag.seconds else 0.0)
              for n, t in bag.topics.items()}
    open_ = {n for n, t in bag.topics.items() if t.count and not t.foreign}
    for name, topic in bag.topics.items():
        if topic.foreign:
            topics[name].trouble = f'serialised as {topic.foreign}'
    for message in bag.messages(open_) if open_ else ():
        if message.topic in open_:
            open_.discard(message.topic)
            try:
                topics[message.topic].terms = terms(message.topic, message.type,
                                                    bag.decode(message))
            except Refusal as refusal:
                topics[message.topic].trouble = refusal.message
        if not open_:
            break
    found = BagReport(bag.name, bag.seconds, bag.count, bag.distro, bag.remarks,
                      list(topics.values()))
    for name, topic in bag.topics.items():
        if CHUNK in topic.types and topic.count:
            found.runs.append(_run(bag, name.rpartition('/')[0]))
    return found


def _run(bag: Bag, node: str) -> RunReport:
    run = read_run(bag, find_node(bag, node) or node)
    events = run.events
    return RunReport(
        node, run.session, len(run.ticks), max((t.step for t in run.ticks), default=0) + 1,
        [f'{e.kind.name.lower()} {e.name or f"step {e.step}"}' for e in events
         if e.kind in REWINDS],
        [e.name for e in events if e.kind is EventKind.PERSISTED],
        dict(Counter(e.message for e in events if e.kind is EventKind.REFUSED)))


def show(found: BagReport, to: Console) -> None:
    """Print it."""
    from rich.markup import escape
    distro = f', recorded with {found.distro}' if found.distro else ''
    to.print(f'[bold]{escape(found.bag)}[/]: {found.messages:,} messages in {found.seconds:.2f} s'
             f'{escape(distro)}')
    for remark in found.remarks:
        to.print(f'[yellow]  {escape(remark)}[/]', soft_wrap=True)
    for t in found.topics:
        rate = f', {t.hz:.3g} Hz' if t.count > 1 else ''
        to.print(f'\n[bold]{escape(t.name)}[/]  {escape(t.type)}  {t.count:,}{rate}',
                 soft_wrap=True)
        for term in t.terms:
            to.print(f'    - {escape(term)}', soft_wrap=True)
        if t.trouble:
            to.print(f'    [yellow]{escape(t.trouble)}[/]', soft_wrap=True)
    for run in found.runs:
        to.print(f'\n[bold]run of {escape(run.node)}[/]: {run.ticks} ticks, session {run.session}')
        for what, names in (('rewinds', run.rewinds), ('durable capsules', run.capsules)):
            if names:
                to.print(f'    {what}: {escape(", ".join(names[:20]))}', soft_wrap=True)
        for why, n in run.refusals.items():
            to.print(f'    refused {n}x: {escape(why)}', soft_wrap=True)
    if not found.runs:
        to.print('\nNo policy node has been recorded: a replay feeds the messages as they are.')


@click.command('report')
@click.argument('bag', type=click.Path(path_type=Path))
@click.option('--msg-path', 'msg_paths', multiple=True, type=click.Path(path_type=Path),
              help='Folder with .msg files of types that the bag does not define.')
@click.option('--json', 'as_json', is_flag=True, help='Print JSON.')
def command(bag: Path, msg_paths: tuple[Path, ...], as_json: bool) -> None:
    """Print what BAG holds: topics, the terms that could read them, and runs of policies."""
    with open_bag(bag, msg_paths=msg_paths) as opened:
        found = report(opened)
    if as_json:
        from dataclasses import asdict
        data: Any = plain(asdict(found))
        click.echo(json.dumps(data, indent=1))
    else:
        show(found, console())
