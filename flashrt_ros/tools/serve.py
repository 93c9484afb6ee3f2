"""`flashrt-ros serve FILE`: a policy node that configures and activates itself, without launch."""
from __future__ import annotations

from pathlib import Path
import sys
from typing import Any

import click
import yaml


@click.command(context_settings={'ignore_unknown_options': True})
@click.argument('policy_file', type=click.Path(path_type=Path, dir_okay=False))
@click.argument('ros_args', nargs=-1, type=click.UNPROCESSED)
@click.option('--model-root', type=click.Path(path_type=Path, file_okay=False), default=None,
              help='Folder that models are relative to; default: the folder of the file.')
@click.option('--python-module', 'modules', multiple=True,
              help='A Python module that may supply code; may be given several times.')
@click.option('--namespace', default='', help='Namespace of the node.')
@click.option('--name', default='policy_node', show_default=True, help='Name of the node.')
@click.option('-p', '--param', 'params', multiple=True, metavar='NAME:=VALUE',
              help='Any parameter of the node; may be given several times.')
@click.option('--activate/--no-activate', default=True, show_default=True,
              help='Activate it too; without, it stays inactive.')
def serve(policy_file: Path, ros_args: tuple[str, ...], model_root: Path | None,
          modules: tuple[str, ...], namespace: str, name: str, params: tuple[str, ...],
          activate: bool) -> None:
    """Serve a policy file until Ctrl-C. ROS arguments may follow: --ros-args -r a:=b."""
    values: dict[str, Any] = {'policy_file': str(policy_file.absolute())}
    if model_root is not None:
        values['model_root'] = str(model_root.absolute())
    if modules:
        values['python_modules'] = list(modules)
    for text in params:
        key, separator, value = text.partition(':=')
        if not separator:
            raise click.BadParameter(f'{text!r} is not NAME:=VALUE', param_hint='--param')
        values[key] = yaml.safe_load(value)
    from flashrt_ros.node.run import run
    sys.exit(run(list(ros_args), name=name, namespace=namespace, parameters=values,
                 configure=True, activate=activate))
