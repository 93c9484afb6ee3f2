"""The options that every tool which loads a policy file takes."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def policy_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --policy, --model-root and --python-module (`policy`, `model_root`, `modules`)."""
    for option in reversed((
            click.option('--policy', required=True, type=click.Path(path_type=Path, dir_okay=False),
                         help='Policy file.'),
            click.option('--model-root', default=None,
                         type=click.Path(path_type=Path, file_okay=False),
                         help='Folder that models are relative to; default: that of the file.'),
            click.option('--python-module', 'modules', multiple=True,
                         help='A Python module that may supply code; may be given several '
                         'times.'))):
        function = option(function)
    return function
