"""What a replay found: for people as a table, for programs as JSON."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
import json
import math
from typing import TYPE_CHECKING, Any

from flashrt_ros.tools.compare import Comparison, Difference, Verdict
from flashrt_ros.tools.services import Answer

if TYPE_CHECKING:
    from rich.console import Console

COLOURS = {Verdict.SAME: 'green', Verdict.DIFFERENT: 'red', Verdict.INCOMPLETE: 'yellow'}


@dataclass
class Report:
    """What a replay found."""

    bag: str
    policy: str
    mode: str
    verdict: Verdict = Verdict.SAME
    reasons: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    outputs: list[Comparison] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)   # of repeated service calls
    missing: list[str] = field(default_factory=list)
    steps: int = 0
    ticks: int = 0
    start: str = ''
    bag_s: float = 0.0
    took_s: float = 0.0
    tolerance: float = 0.0

    def incomplete(self, reason: str) -> None:
        """Note that something is missing."""
        self.reasons.append(reason)
        if self.verdict is Verdict.SAME:
            self.verdict = Verdict.INCOMPLETE

    def different(self, reason: str) -> None:
        """Note a difference."""
        self.reasons.append(reason)
        self.verdict = Verdict.DIFFERENT

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; numbers that JSON lacks become null."""
        data = asdict(self)
        data['verdict'] = self.verdict.value
        return dict(plain(data))

    def to_json(self, **more: Any) -> str:
        """Return it as JSON text, with more fields beside."""
        return json.dumps({**self.to_dict(), **more}, indent=1)

    def show(self, console: Console) -> None:
        """Print it."""
        from rich.markup import escape
        start = f' from {self.start}' if self.start else ''
        console.print(f'[bold]{escape(self.bag)}[/] with {escape(self.policy)}: {self.mode}'
                      f'{escape(start)}', highlight=False)
        console.print(f'  {self.steps} steps, {self.ticks} ticks, {self.bag_s:.2f} s of bag in '
                      f'{self.took_s:.2f} s', highlight=False)
        if self.outputs:
            console.print(_table(self.outputs))
        for c in self.outputs:
            if c.first is not None:
                console.print(escape(f'  {c.output}: first at {_where(c.first)}'),
                              highlight=False, soft_wrap=True)
        for answer in self.answers:
            console.print(escape(f'  {answer.verb} {answer.name!r}: recorded {answer.recorded}, '
                                 f'replayed {answer.replayed}'), highlight=False)
        for remark in self.remarks:
            console.print(f'[yellow]  {escape(remark)}[/]', highlight=False, soft_wrap=True)
        for missing in self.missing[:10]:
            console.print(f'  missing: {escape(missing)}', highlight=False, soft_wrap=True)
        if len(self.missing) > 10:
            console.print(f'  … and {len(self.missing) - 10} more')
        console.print(f'[bold {COLOURS[self.verdict]}]{self.verdict.value}[/]: '
                      f'{escape(self.summary())}', highlight=False, soft_wrap=True)

    def summary(self) -> str:
        """Return the verdict in a sentence."""
        if self.reasons:
            return '; '.join(self.reasons)
        if not any(c.compared for c in self.outputs):
            return 'it ran to the end; nothing was compared'
        if all(c.same_bytes for c in self.outputs if c.compared):
            return 'what was replayed equals the record byte for byte'
        largest = max(c.largest for c in self.outputs if c.compared)
        return f'the largest difference is {largest:.3g}, the tolerance {self.tolerance:g}'


def _table(outputs: Sequence[Comparison]) -> Any:
    from rich.table import Table
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for name, side in (('output', 'left'), ('of', 'left'), ('recorded', 'right'),
                       ('replayed', 'right'), ('compared', 'right'),
                       ('beyond', 'right'), ('largest difference', 'right')):
        table.add_column(name, justify=side)  # type: ignore[arg-type]
    for c in outputs:
        largest = '-' if math.isnan(c.largest) else f'{c.largest:.3g}'
        table.add_row(c.output, c.what, str(c.recorded), str(c.replayed), str(c.compared),
                      str(c.beyond), largest)
    return table


def _where(d: Difference) -> str:
    where = f'tick {d.tick}' if d.tick >= 0 else f'step {d.step}'
    return f'{where}, {d.value}: {d.recorded:.9g} recorded, {d.replayed:.9g} replayed'


def plain(value: Any) -> Any:
    """Return a value with only what JSON knows: NaN and infinity become null."""
    if isinstance(value, float):
        return value if value == value and abs(value) != float('inf') else None
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(v) for v in value]
    return value
