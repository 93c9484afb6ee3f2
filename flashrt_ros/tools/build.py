"""`flashrt-ros build MODEL.onnx`: an engine for this machine, and the policy file to start from."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from flashrt_ros.backends import options, tensorrt_api, tensorrt_engine
from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.files import checked_path
from flashrt_ros.backends.ports import buffer_name
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_build import ANY_ARCH, PRECISIONS
from flashrt_ros.backends.tensorrt_cache import Cached
from flashrt_ros.backends.tensorrt_plan import write_engine
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.tools.model_report import ModelReport


def shapes_of(_: Any, __: Any, values: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Read `--shape NAME=1x3x224x224` (a scalar: `NAME=`) into shapes by name."""
    shapes = {}
    for text in values:
        name, separator, sizes = text.rpartition('=')
        parts = [p for p in sizes.replace(',', 'x').split('x') if p]
        if not separator or not name or not all(p.isdecimal() and int(p) > 0 for p in parts):
            raise click.BadParameter(f'{text!r} is not NAME=1x3x224, sizes above 0')
        shapes[name] = tuple(int(p) for p in parts)
    return shapes


shape_option = click.option(
    '--shape', 'shapes', multiple=True, callback=shapes_of, metavar='NAME=1x47',
    help='Fixed shape of an input with open dimensions; may be given several times.')
root_option = click.option(
    '--model-root', type=click.Path(path_type=Path, exists=True, file_okay=False), default=None,
    help='Folder that the model and its external data lie in; default: the folder of the model.')
json_option = click.option('--json', 'as_json', is_flag=True, help='Print the report as JSON.')


@contextmanager
def shape_hint() -> Iterator[None]:
    """Add to a refusal for an open dimension how its value is given on a command line."""
    try:
        yield
    except Refusal as refusal:
        if 'policy.shapes' not in refusal.message:
            raise
        raise Refusal(refusal.code, f'{refusal.message}; here: --shape NAME=1x47',
                      **refusal.details) from refusal


class Bars:
    """TensorRT's phases as nested progress bars. Told from any thread, one at a time."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, Any] = {}
        self._depth: dict[str, int] = {}

    def start(self, phase: str, parent: str | None, steps: int) -> None:
        """Show a phase."""
        self._depth[phase] = self._depth.get(parent or '', -1) + 1
        if self._depth[phase] < 3:      # deeper ones come and go by the thousand
            self._tasks[phase] = self._bars.add_task('  ' * self._depth[phase] + phase,
                                                     total=steps)

    def step(self, phase: str, step: int) -> None:
        """Advance it."""
        if phase in self._tasks:
            self._bars.update(self._tasks[phase], completed=step + 1)

    def finish(self, phase: str) -> None:
        """Take it away."""
        self._depth.pop(phase, None)
        if phase in self._tasks:
            self._bars.remove_task(self._tasks.pop(phase))


def device_arch(ordinal: int) -> tuple[str, str]:
    """Return `(sm_89, name)` of the card. Raises Refusal where there is none."""
    device = CudaDevice(ordinal)
    try:
        about = device.identity()
        return about['cuda.arch'], about['cuda.device']
    finally:
        device.close()


def target_of(library: Any, arch: str | None, ordinal: int, say: Console) -> str:
    """Return the architecture to build for: as asked, this machine's, or any (RTX only)."""
    if arch is not None:
        if not library.is_rtx:
            raise Refusal(Code.UNSUPPORTED, f'--arch {arch}: {library.title} builds for the card '
                          'of this machine only; leave --arch out')
        return arch
    try:
        found, name = device_arch(ordinal)
    except Refusal as refusal:
        if not library.is_rtx:
            raise Refusal(Code.UNSUPPORTED, f'{library.title} needs the card that it builds for: '
                          f'{refusal.message}') from refusal
        say.print(f'no usable card here: building for every card that {library.title} runs on',
                  soft_wrap=True)
        return ANY_ARCH
    tensorrt_engine.check_device(library, found, name)
    return found


@click.command('build')
@click.argument('model', type=click.Path(path_type=Path, dir_okay=False))
@click.option('-o', '--output', type=click.Path(path_type=Path, dir_okay=False), default=None,
              help='Write the engine here (.engine or .plan); default: the engine cache, where '
              'a policy file that names the ONNX file finds it.')
@click.option('--precision', type=click.Choice(PRECISIONS), default='model', show_default=True,
              help='model: types of the ONNX file, no TF32. fp16 and bf16: full TensorRT only.')
@click.option('--workspace-mib', type=click.IntRange(0), default=0,
              help='Limit of scratch memory; 0: as TensorRT likes.')
@click.option('--optimization-level', type=click.IntRange(0, 5), default=3, show_default=True,
              help='Higher builds longer and may run faster.')
@shape_option
@click.option('--arch', default=None, metavar='sm_89',
              help='Card to build for (TensorRT-RTX only); default: the one in this machine.')
@click.option('--library', type=click.Choice(('tensorrt', 'tensorrt_rtx')), default=None,
              help='Default: the full TensorRT, else TensorRT-RTX.')
@click.option('--ordinal', type=click.IntRange(0), default=0, help='Which card of several.')
@click.option('--cache', default='', help='Folder of the engine cache.')
@root_option
@json_option
def command(model: Path, output: Path | None, precision: str, workspace_mib: int,
            optimization_level: int, shapes: Mapping[str, tuple[int, ...]], arch: str | None,
            library: str | None, ordinal: int, cache: str, model_root: Path | None,
            as_json: bool) -> None:
    """Build a TensorRT engine from MODEL (.onnx) and print what to write into a policy file."""
    say = Console(stderr=True, highlight=False)
    root = model_root or model.parent
    path = checked_path(model.absolute(), Path.cwd(), root, 'MODEL')
    if path.suffix != '.onnx':
        raise Refusal(Code.INVALID_ARGUMENT, f'{path.name} is not an ONNX file (.onnx)')
    if output is not None and output.suffix not in tensorrt_engine.ENGINES:
        raise Refusal(Code.INVALID_ARGUMENT, f'{output.name}: an engine is named .engine or .plan')
    found = tensorrt_api.find(library)
    say.print(f'{found.title}')
    target = target_of(found, arch, ordinal, say)
    given = options.parse({'precision': precision, 'workspace_mib': workspace_mib,
                           'optimization_level': optimization_level, 'cache': cache},
                          tensorrt_engine.OPTIONS)
    spec = PolicySpec(path, model_root=root, shapes=shapes)
    with shape_hint(), Progress(TextColumn('{task.description}'), BarColumn(),
                                TimeElapsedColumn(), console=say, transient=True) as bars:
        built = tensorrt_engine.engine_of_onnx(found, path, spec, given, target, Bars(bars))
    remarks = []
    if not built.note.capturable:
        remarks.append('the engine allocates memory while it runs: it will not be captured as a '
                       'CUDA graph')
    if output is not None:
        write_engine(output, built.plan, built.note)
    elif target == ANY_ARCH:
        remarks.append('a policy file that names the ONNX file has an engine built for its own '
                       'card; to use this one elsewhere, write it with -o and name it there')
    report = _report(path, output, built, target, given, shapes, remarks)
    if as_json:
        click.echo(report.to_json())
    else:
        report.show(Console())


def _report(path: Path, output: Path | None, built: Cached, target: str,
            given: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
            remarks: list[str]) -> ModelReport:
    """Return what was built; a policy file that names the ONNX file repeats how."""
    defaults = tensorrt_engine.OPTIONS
    tensors, key = built.note.tensors, built.note.key
    return ModelReport(
        output or path, 'tensorrt', f'engine of {key["library"]} {key["version"]}',
        tuple(t.info for t in tensors if t.is_input),
        tuple(t.info for t in tensors if not t.is_input),
        facts={'engine': str(output or built.path or 'not kept'),
               'bytes': f'{len(built.plan):,}', 'sha256': built.note.sha256,
               'built for': target, 'precision': given['precision'],
               'from': 'this build' if built.fresh else 'the cache'},
        remarks=tuple(remarks),
        shapes={} if output else {buffer_name(k): v for k, v in shapes.items()},
        options={} if output else {k: v for k, v in given.items() if v != defaults[k].default})
