#!/usr/bin/env python3
"""colcon build of this root, as a ROS workspace does it, and a look whether the result works.

Where no ROS installation is sourced, the wheels stand in for it, in an environment of their own
(~/.cache/flashrt_ros/colcon-<distro>): colcon, the ament and rosidl CMake packages, and the run
dependencies. It cannot lie in this folder: CMake refuses to export numpy's include directory from
below the source directory.
"""
from __future__ import annotations

import os
from pathlib import Path
import subprocess
import sys

sys.path.insert(0, str(Path(__file__).resolve().parent))
from setup_venv import ROOT, clean_env, fail, find_python, sourced_ros, step

CHECK = '''
from ament_index_python.packages import get_package_share_directory
from flashrt_ros.action import ExecutePolicy
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import Code as Codes
from flashrt_ros.srv import SaveCapsule
import flashrt_ros.node.policy_node
import pathlib
share = pathlib.Path(get_package_share_directory("flashrt_ros"))
assert (share / "launch/policy.launch.py").exists() and Codes.BUSY == Code.BUSY
print("import, interfaces and package index: good,", len(list(share.rglob("*"))), "shared files")
'''


def requirements(python: Path) -> list[str]:
    """Return what the build and the package need, as setup.py says."""
    out = subprocess.run(
        [str(python), '-c', 'import runpy, setuptools; setuptools.setup = lambda **k: None\n'
         'g = runpy.run_path("setup.py"); print("\\n".join('
         'g["BUILD_REQUIRES"] + g["REQUIRES"] + g["ROS_REQUIRES"]))'],
        cwd=ROOT, capture_output=True, text=True, check=True)
    return out.stdout.split()


def main() -> int:
    """Build and check; return the exit code."""
    distro = os.environ.get('FLASHRT_ROS_DISTRO', 'jazzy')
    ros = sourced_ros()
    env = dict(os.environ)
    arguments = ['-DCMAKE_BUILD_TYPE=Release', '-DBUILD_TESTING=OFF']
    if ros is None:
        cache = Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache')
        venv = cache / 'flashrt_ros' / f'colcon-{distro}'
        python = venv / 'bin/python'
        if not python.exists():
            base = find_python('python3')
            if base is None:
                return fail('no supported Python on PATH')
            subprocess.run([base, '-m', 'venv', str(venv)], check=True)
        stamp = venv / '.stamp'
        if not stamp.exists():
            if not step(venv, 'colcon', ['install', 'setuptools>=77,<80',
                                         'colcon-common-extensions']):
                return 1
            if not step(venv, f'the ROS {distro} wheels', ['install', *requirements(python)]):
                return 1
            stamp.touch()
        env = clean_env()
        env.update(PATH=f'{venv}/bin:{env["PATH"]}', AMENT_PREFIX_PATH=str(venv),
                   CMAKE_PREFIX_PATH=str(venv), LD_LIBRARY_PATH=f'{venv}/lib',
                   VIRTUAL_ENV=str(venv))
        arguments += [f'-DPython3_EXECUTABLE={python}', '-DCMAKE_POLICY_VERSION_MINIMUM=3.5',
                      f'-DCMAKE_PROJECT_INCLUDE={ROOT}/cmake/pip_wheel_fixups.cmake']
        colcon, interpreter = str(venv / 'bin/colcon'), str(python)
    else:
        colcon, interpreter = 'colcon', 'python3'
    command = [colcon, '--log-base', 'log', 'build', '--build-base', 'build/colcon',
               '--install-base', 'install', '--event-handlers', 'desktop_notification-',
               '--cmake-args', *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, check=False)
    if done.returncode != 0:
        return done.returncode
    # As a shell that sourced the workspace, started outside the source tree.
    setup = ROOT / 'install/setup.sh'
    check = subprocess.run(['sh', '-c', f'. {setup} && exec "$0" -c "$1"', interpreter, CHECK],
                           cwd='/', env={**env, 'COLCON_CURRENT_PREFIX': str(ROOT / 'install')},
                           check=False)
    return check.returncode


if __name__ == '__main__':
    sys.exit(main())
