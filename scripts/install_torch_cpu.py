#!/usr/bin/env python3
"""Install torch into the running environment, but only where pip offers a CPU build of it.

PyPI serves the CUDA build for Linux (3 GB of wheels), which the tests do not need. pip is asked
what it would install; anything but a CPU build is left alone, in one line that says so. Exit code
0 in both cases; with FLASHRT_ROS_NEED_TORCH set, 1 where torch is not there afterwards.
`--any` takes what pip gives.
"""
from __future__ import annotations

from importlib import metadata
import json
import os
from pathlib import Path
import subprocess
import sys
from typing import Any
from urllib.parse import unquote, urlparse

VERSION = '2.13.0'
LARGEST = 400_000_000  # bytes; CPU wheels have about 200 MB, CUDA wheels 500 and more


def main() -> int:
    """Install or skip; return the exit code."""
    try:
        print(f'torch {metadata.version("torch")} is there')
        return 0
    except metadata.PackageNotFoundError:
        pass
    wanted = f'torch=={VERSION}'
    if '--any' not in sys.argv[1:]:
        offer = ask(wanted)
        reason = 'pip offers none for this Python' if offer is None else refusal(offer)
        if reason:
            print(f'torch: not installed, {reason}; its tests skip')
            return int(bool(os.environ.get('FLASHRT_ROS_NEED_TORCH')))
    print(f'torch: installing {wanted}', flush=True)
    return pip('install', '-qq', wanted).returncode


def pip(*args: str, capture: bool = False) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip."""
    return subprocess.run([sys.executable, '-m', 'pip', *args], text=True, check=False,
                          capture_output=capture)


def ask(wanted: str) -> dict[str, Any] | None:
    """Return pip's report of what it would install, None where it finds nothing."""
    done = pip('install', '-q', '--dry-run', '--no-deps', '--ignore-installed',
               '--report', '-', wanted, capture=True)
    if done.returncode != 0:
        return None
    # Other programs may print before the report.
    report = json.loads(done.stdout[done.stdout.index('{'):])
    installs = report.get('install', [])
    return installs[0] if installs else None


def refusal(offer: dict[str, Any]) -> str:
    """Return why an offered wheel is not a small CPU build, empty if it is one."""
    info = offer['metadata']
    version = info['version']
    url = urlparse(offer['download_info']['url'])
    if url.scheme == 'file':
        size = Path(unquote(url.path)).stat().st_size
        if size > LARGEST:
            return f'the file for {version} has {size / 1e6:.0f} MB, which is no CPU build'
    if version.endswith('+cpu'):
        return ''
    gpu = sorted({name for name in map(requirement, info.get('requires_dist', ()))
                  if name.startswith(('nvidia-', 'cuda-', 'triton'))})
    if gpu:
        return f'pip offers a CUDA build of {version} (it needs {gpu[0]} and {len(gpu) - 1} more)'
    if url.scheme != 'file':
        return f'pip offers {version}, which does not say that it is a CPU build'
    return ''


def requirement(text: str) -> str:
    """Return the name of a requirement that holds here, empty for one that does not."""
    from pip._vendor.packaging.requirements import Requirement
    parsed = Requirement(text)
    holds = parsed.marker is None or parsed.marker.evaluate({'extra': ''})
    return parsed.name.lower() if holds else ''


if __name__ == '__main__':
    sys.exit(main())
