"""Files that a policy is loaded from: below the model root, present, and what they pretend to be.

A policy file may come from elsewhere; the paths in it, and those in a model that names further
files, must not reach outside the folder that the operator has chosen.
"""
from __future__ import annotations

import os
from pathlib import Path

from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal

_LFS = b'version https://git-lfs'


def model_path(spec: PolicySpec) -> Path:
    """Return the absolute path of `spec.model`. Raises Refusal that names path and reason."""
    if spec.model is None:
        raise Refusal(Code.INVALID_POLICY_FILE, 'policy.model: this backend loads a file; name it')
    return checked_path(spec.model, spec.model_root, spec.model_root, 'policy.model')


def checked_path(name: Path | str, base: Path, root: Path, what: str) -> Path:
    """Return `name` below `base` as an absolute path; it must be a file below `root`.

    Links are followed for that check only: what lies beside a link belongs to it.
    """
    path = Path(os.path.abspath(base / name))
    if not path.resolve().is_relative_to(root.resolve()):
        raise Refusal(Code.INVALID_POLICY_FILE, f'{what}: {name} leads outside the model root '
                      f'{root.resolve()}; move the file below it or change model_root')
    if not path.is_file():
        raise Refusal(Code.NOT_FOUND, f'{what}: {path} '
                      f'{"is a folder" if path.is_dir() else "does not exist"}')
    try:
        with path.open('rb') as f:
            head = f.read(len(_LFS))
    except OSError as e:
        raise Refusal(Code.IO, f'{what}: {path} cannot be read: {e}') from e
    if head == _LFS:
        raise Refusal(Code.CORRUPT, f'{what}: {path} is a Git LFS pointer, not the file itself; '
                      'run git lfs pull')
    return path
