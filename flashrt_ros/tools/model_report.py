"""What a model file holds, as a table for people, as JSON, and as the policy file to start from.

Read from ONNX files, TensorRT engines, TorchScript and torch.export alike, without running them.
What a backend would refuse is part of the report, not the end of it.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashrt_ros.backends.ports import TensorInfo, suggest_pairs

if TYPE_CHECKING:
    from rich.console import Console

_IMAGE_WORDS = ('image', 'img', 'camera', 'rgb', 'depth', 'pixel')
_PROMPT_WORDS = ('prompt', 'token', 'text', 'instruction', 'input_ids')


@dataclass(frozen=True)
class ModelReport:
    """A model's ports under their buffer names; -1 is a dimension without a value."""

    path: Path
    backend: str                      # which backend runs it
    kind: str                         # ONNX, TensorRT engine, …
    inputs: tuple[TensorInfo, ...]    # state that is fed back included
    outputs: tuple[TensorInfo, ...]
    state: tuple[TensorInfo, ...] = ()    # what the program keeps itself (torch)
    facts: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()     # what a backend would refuse, and other surprises
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # given by the caller
    options: Mapping[str, Any] = field(default_factory=dict)             # policy.options to write

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Suggested feedback pairs: same shape and type, and names that belong together."""
        return suggest_pairs(self.inputs, self.outputs)

    def to_json(self) -> str:
        """Return it for a program."""
        def ports(tensors: Sequence[TensorInfo]) -> list[dict[str, Any]]:
            return [{'name': t.name, 'dtype': t.dtype, 'shape': list(t.shape)} for t in tensors]
        return json.dumps({
            'path': str(self.path), 'backend': self.backend, 'kind': self.kind,
            'inputs': ports(self.inputs), 'outputs': ports(self.outputs),
            'state': ports(self.state), 'pairs': dict(self.pairs), 'facts': dict(self.facts),
            'remarks': list(self.remarks), 'policy_file': self.policy_file()}, indent=1)

    def show(self, console: Console) -> None:
        """Print it."""
        from rich.markup import escape
        from rich.table import Table
        console.print(f'[bold]{escape(self.path.name)}[/]  {self.kind}', highlight=False)
        for key, value in self.facts.items():
            console.print(f'  {key}: {escape(value)}', highlight=False, soft_wrap=True)
        if self.inputs or self.outputs:
            fed = dict(self.pairs)
            table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
            for column in ('', 'name', 'type', 'shape', 'values', ''):
                table.add_column(column)
            for what, tensors in (('input', self.inputs), ('state', self.state),
                                  ('output', self.outputs)):
                for t in tensors:
                    note = f'<- {fed[t.name]}' if what == 'input' and t.name in fed else ''
                    table.add_row(what, escape(t.name), t.dtype, escape(_spell(t.shape)),
                                  str(math.prod(t.shape)) if -1 not in t.shape else '?',
                                  escape(note))
            console.print(table)
        for a, b in self.pairs:
            console.print(f'suggested feedback pair: {escape(a)}: {escape(b)}', highlight=False)
        for remark in self.remarks:
            console.print(f'[yellow]{escape(remark)}[/]', highlight=False, soft_wrap=True)
        if self.outputs:
            console.print('\n[bold]A policy file to start from[/] (topics, terms and period are '
                          'yours to fill in):')
            console.print(self.policy_file(), highlight=False, markup=False, soft_wrap=True)

    def policy_file(self) -> str:
        """Return YAML that loads, with every port fed from a plain topic."""
        pairs = dict(self.pairs)
        ports = [t for t in self.outputs if t.name not in pairs.values()]
        options = dict(self.options)
        if not ports:                   # all it gives is fed back; something must come out
            ports = list(self.outputs)
            options['publish'] = [t.name for t in ports]
        lines = ['policy:', f'  backend: {self.backend}', f'  model: {_scalar(self.path.name)}',
                 '  period_s: 0.02']
        if pairs:
            lines.append('  state: {' + ', '.join(f'{_scalar(a)}: {_scalar(b)}'
                                                  for a, b in pairs.items()) + '}')
        if self.shapes:
            lines.append('  shapes: {' + ', '.join(
                f'{_scalar(n)}: [{", ".join(map(str, s))}]' for n, s in self.shapes.items()) + '}')
        if options:
            lines.append('  options: ' + json.dumps(options))
        fed = [t for t in self.inputs if t.name not in pairs]
        lines += ['run: {trigger: timer}', 'inputs:' if fed else 'inputs: {}']
        for t in fed:
            lines += [f'  {_scalar(t.name)}:   # {t.dtype} {_spell(t.shape)}',
                      f'    - {_term(t)}']
        lines.append('outputs:')
        for t in ports:
            lines.append(f'  {_scalar(t.name)}: {{topic: policy/{_topic(t.name)}, type: '
                         f'std_msgs/msg/Float32MultiArray, kind: raw}}   # {t.dtype} '
                         f'{_spell(t.shape)}')
        return '\n'.join(lines) + '\n'


def _spell(shape: Sequence[int]) -> str:
    return f'[{", ".join("?" if n < 0 else str(n) for n in shape)}]'


def _topic(name: str) -> str:
    """Return a ROS topic name: letters, digits and underscores, no digit in front."""
    text = ''.join(c if c.isascii() and c.isalnum() else '_' for c in name).strip('_') or 'port'
    return text if not text[0].isdigit() else f'_{text}'


def _scalar(text: str) -> str:
    """Return a YAML scalar that reads back as this text."""
    plain = text.replace('_', 'a').replace('.', 'a').replace('/', 'a').replace('-', 'a')
    words = ('null', 'true', 'false', 'yes', 'no', 'on', 'off', 'y', 'n')
    if plain.isalnum() and text[0].isalpha() and text.lower() not in words:
        return text
    return json.dumps(text, ensure_ascii=True)


def _term(t: TensorInfo) -> str:
    """Return a term that can feed a port, guessed from its name and shape."""
    topic, name = f'policy/{_topic(t.name)}', t.name.lower()
    shape = [n for n in t.shape if n != 1]
    if len(shape) >= 2 and any(w in name for w in _IMAGE_WORDS) and -1 not in t.shape:
        dims = list(t.shape[-3:]) if len(t.shape) >= 3 else [*t.shape, 1]
        layout = 'CHW' if dims[0] in (1, 3, 4) and dims[-1] not in (1, 3, 4) else 'HWC'
        size = dims[1:] if layout == 'CHW' else dims[:2]
        return (f'{{term: image, topic: {topic}, size: [{size[0]}, {size[1]}], layout: {layout}'
                + (', scale: 0.00392156862745098}' if t.dtype[0] in 'FB' else '}'))
    if any(w in name for w in _PROMPT_WORDS) and -1 not in t.shape:
        return (f'{{term: prompt, topic: {topic}, encode: bytes, '
                f'length: {math.prod(t.shape)}}}')
    length = '' if -1 in t.shape else f', length: {math.prod(t.shape)}'
    return f'{{term: array, topic: {topic}, field: data{length}}}'
