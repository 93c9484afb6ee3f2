"""What a torch file is, told from its table of contents; and torch.export files without pickles.

`torch.load` is never called: a pickle runs code of its author's choice while it is read.
TorchScript goes through torch.jit.load, whose reader is written in C++ and builds tensors and
script classes only. torch.export.load may still unpickle: sample inputs (it falls back to an
unrestricted pickle when the restricted one fails), tensor subclasses and opaque constants. So
what it is given is a copy of the archive without sample inputs, from which everything else that
would be unpickled, evaluated as a symbolic expression or looked up outside torch's operators was
refused. That keeps pickles out; it is no sandbox: a program is code, as a factory is.
"""
from __future__ import annotations

from collections.abc import Iterator
import io
import json
from pathlib import Path
import re
from typing import Any
import zipfile

from flashrt_ros.core.errors import Code, Refusal

SCRIPT, EXPORT, WEIGHTS = 'TorchScript', 'torch.export', 'safetensors'
_OPERATOR = re.compile(r'torch\.ops\.(?!_|load_)\w+\.\w+(\.\w+)?|_operator\.\w+|math\.\w+'
                       r'|torch\.sym_\w+')


def kind_of(path: Path) -> str:
    """Return SCRIPT, EXPORT or WEIGHTS. Refuses pickled checkpoints and everything else."""
    if path.suffix == '.safetensors':
        return WEIGHTS
    names = [n.partition('/')[2] for n in _open(path).namelist()]
    if 'archive_format' in names:
        return EXPORT
    if 'constants.pkl' in names and any(n.startswith('code/') for n in names):
        return SCRIPT
    if 'data.pkl' in names:
        raise Refusal(Code.UNSUPPORTED, f'{path.name} is a pickled checkpoint (torch.save): '
                      'reading it would run code from the file; save a TorchScript or torch.export '
                      'program, or weights as safetensors beside a factory')
    raise Refusal(Code.UNSUPPORTED, f'{path.name} is neither TorchScript nor a torch.export '
                  'program of the present format (export it again with torch 2.9 or newer)')


def _open(path: Path) -> zipfile.ZipFile:
    try:
        archive = zipfile.ZipFile(path)
    except (OSError, zipfile.BadZipFile) as e:
        raise Refusal(Code.BACKEND, f'{path.name} is no torch file: {e}; the torch backend loads '
                      'TorchScript, torch.export programs and safetensors') from e
    if len(set(archive.namelist())) != len(archive.namelist()):
        raise Refusal(Code.CORRUPT, f'{path.name} holds two entries of one name')
    return archive


def export_without_pickles(path: Path) -> io.BytesIO:
    """Return a copy of a .pt2 file that torch.export.load reads without unpickling anything."""
    copy = io.BytesIO()
    with _open(path) as source, zipfile.ZipFile(copy, 'w', zipfile.ZIP_STORED) as target:
        for entry in source.namelist():
            data = source.read(entry)
            name = entry.partition('/')[2]
            if name.startswith('data/sample_inputs/'):
                data = b''
            elif name.startswith(('data/weights/', 'data/constants/')) and name.endswith('.json'):
                _refuse_pickles(path.name, _json(path.name, entry, data))
            elif name.startswith('models/'):
                _check_program(path.name, _json(path.name, entry, data))
            elif name.startswith('data/aotinductor/'):
                raise Refusal(Code.UNSUPPORTED, f'{path.name} holds compiled code ({entry}); give '
                              'the exported program itself')
            target.writestr(entry, data)
    copy.seek(0)
    return copy


def _json(file: str, entry: str, data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError as e:
        raise Refusal(Code.CORRUPT, f'{file}: {entry} is no JSON: {e}') from e


def _refuse_pickles(file: str, config: Any) -> None:
    for name, meta in dict(config.get('config', {})).items():
        if meta.get('use_pickle') or not str(meta.get('path_name', '')).startswith(
                ('weight_', 'tensor_')):
            raise Refusal(Code.UNSUPPORTED, f'{file}: {name} is stored as a pickle or a custom '
                          'object; only plain tensors are read')


def _check_program(file: str, program: Any) -> None:
    for key, value in _pairs(program):
        if key in ('as_expr', 'expr_str'):
            raise Refusal(Code.UNSUPPORTED, f'{file} has dynamic shapes ({value!r}); export it '
                          'with fixed ones')
        if key == 'target' and not _OPERATOR.fullmatch(str(value)):
            raise Refusal(Code.UNSUPPORTED, f'{file}: operation {value!r} is none of torch.ops')


def _pairs(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield all keys with their values, at any depth; a node's own keys only where it is one."""
    stack = [value]
    while stack:
        top = stack.pop()
        if isinstance(top, dict):
            # `target` also names the fields of signatures; only nodes have `inputs` beside it.
            yield from ((k, v) for k, v in top.items() if k != 'target' or 'inputs' in top)
            stack += top.values()
        elif isinstance(top, list):
            stack += top
