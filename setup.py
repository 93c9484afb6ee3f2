"""pip build of flashrt_ros: drives the same CMakeLists.txt that colcon builds.

The ament and rosidl CMake packages come from the ROS wheels on PyPI, or from a sourced ROS 2
installation where there is one (AMENT_PREFIX_PATH with an ament index, and --no-build-isolation).
FLASHRT_ROS_DISTRO chooses the wheels: jazzy (default) or kilted.
"""
import os
from pathlib import Path
import re
import shutil
import subprocess
import sys

from setuptools import Distribution, Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
NAME = 'flashrt_ros'
DISTRO = os.environ.get('FLASHRT_ROS_DISTRO', 'jazzy')
VERSION = re.search(r'<version>([^<]+)</version>', (ROOT / 'package.xml').read_text()).group(1)

# What rosidl_generate_interfaces() and ament_cmake need at configure time. The wheels declare
# only their run dependencies, so the build tools are listed by hand.
_BUILD = [
    'ament-package', 'ament-cmake', 'ament-cmake-include-directories',
    'rosidl-default-generators', 'rosidl-core-generators', 'rosidl-core-runtime',
    'rosidl-generator-py', 'builtin-interfaces', 'service-msgs', 'rmw-fastrtps-cpp',
    'std-msgs', 'action-msgs',
] + {
    'jazzy': ['ament-cmake-ros', 'ament-cmake-gmock', 'ament-cmake-gtest',
              'ament-cmake-pytest', 'python-cmake-module'],
    'kilted': ['ament-cmake-ros-core'],
}[DISTRO]
_RUN = [
    'rosidl-default-runtime', 'rosidl-generator-py', 'action-msgs', 'builtin-interfaces',
    'diagnostic-msgs', 'geometry-msgs', 'lifecycle-msgs', 'nav-msgs', 'rosgraph-msgs',
    'sensor-msgs', 'service-msgs', 'std-msgs', 'std-srvs', 'trajectory-msgs',
]
BUILD_REQUIRES = ['cmake>=3.27', 'ninja', 'catkin-pkg', 'numpy',
                  *(f'ros-{DISTRO}-{p}' for p in _BUILD)]
ROS_REQUIRES = [f'ros-{DISTRO}-rclpy[fastrtps]', *(f'ros-{DISTRO}-{p}' for p in _RUN)]
REQUIRES = ['numpy>=1.23', 'PyYAML>=6', 'safetensors>=0.4.5', 'click>=8.1', 'rich>=13']
EXTRAS = {
    'onnx': ['onnxruntime>=1.17', 'onnx>=1.16'],
    'torch': ['torch>=2.9'],
    'cuda': ['cuda-bindings>=12.9'],
    'tensorrt-rtx': ['tensorrt-rtx-cu13-libs', 'tensorrt-rtx-cu13-bindings'],
    'bags': ['rosbags>=0.10'],
    'trees': ['py_trees>=2.2,<3'],
    'image': ['pillow>=10'],
    'plot': ['matplotlib>=3.7'],
    'demo': ['onnxruntime>=1.17', 'onnx>=1.16', 'mujoco>=3.2', 'py_trees>=2.2,<3',
             'matplotlib>=3.7', 'pillow>=10', 'rosbags>=0.10'],
    # The engine of BehaviorTree.CPP; there are wheels for this platform only, tests skip elsewhere.
    'test': ['pytest>=8', 'hypothesis>=6.100',
             'libfaketime>=3.0.1; sys_platform=="linux"',  # steps the system clock of one process
             'behaviortreepy>=0.1.4,<0.2; platform_machine=="x86_64" and sys_platform=="linux"'],
}


def sourced_ros():
    """True where a ROS 2 installation is sourced: its packages are used then, not the wheels."""
    return any((Path(p) / 'share/ament_index/resource_index/packages/rclpy').exists()
               for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep)
               if p and Path(p).resolve() != Path(sys.prefix).resolve())


if sourced_ros():
    BUILD_REQUIRES, ROS_REQUIRES = [], []


def ros_prefix():
    """Return the prefix that holds share/ament_cmake: build overlay, venv or /opt/ros/X."""
    import ament_package
    return Path(ament_package.__file__).resolve().parents[4]


class Dist(Distribution):
    """Adds the has_data() that setuptools' editable_wheel asks for."""

    def has_data(self):
        return self.has_data_files()


class CMakeBuild(build_ext):
    """Configures, builds and installs the CMake project into a stage, and ships the stage."""

    def run(self):
        prefix = ros_prefix()
        tmp = (ROOT / self.build_temp).resolve()
        stage = tmp / 'stage'
        shutil.rmtree(stage, ignore_errors=True)
        env = dict(os.environ)
        for var in ('AMENT_PREFIX_PATH', 'CMAKE_PREFIX_PATH'):
            env[var] = os.pathsep.join(filter(None, [str(prefix), env.get(var)]))
        py = 'lib/python%d.%d/site-packages' % sys.version_info[:2]
        try:
            import cmake as cmake_wheel
            cmake = os.path.join(cmake_wheel.CMAKE_BIN_DIR, 'cmake')
        except ImportError:
            cmake = 'cmake'
        # A fresh build tree: the isolated build environment moves from one call to the next.
        shutil.rmtree(tmp / 'cmake', ignore_errors=True)
        args = [cmake, '-S', str(ROOT), '-B', str(tmp / 'cmake')]
        try:
            import ninja
            args += ['-G', 'Ninja',
                     '-DCMAKE_MAKE_PROGRAM=' + os.path.join(ninja.BIN_DIR, 'ninja')]
        except ImportError:
            pass
        args += [
            '-DCMAKE_BUILD_TYPE=Release', '-DBUILD_TESTING=OFF',
            '-DCMAKE_INSTALL_PREFIX=' + str(stage),
            '-DCMAKE_INSTALL_RPATH=$ORIGIN;$ORIGIN/../../..',
            '-DCMAKE_POLICY_VERSION_MINIMUM=3.5',
            '-DCMAKE_PROJECT_INCLUDE=' + str(ROOT / 'cmake/pip_wheel_fixups.cmake'),
            '-DPYTHON_INSTALL_DIR=' + py,
            '-DPython3_EXECUTABLE=' + sys.executable,
        ]
        subprocess.check_call(args, env=env)
        subprocess.check_call([cmake, '--build', str(tmp / 'cmake'), '--target', 'install',
                               '--parallel', str(os.cpu_count() or 2)], env=env)
        self._collect(stage, py)

    def _collect(self, stage, py):
        gen = stage / py / NAME
        if self.editable_mode:
            # import flashrt_ros comes from the checkout; the generated half is a second
            # portion of the package (see flashrt_ros/__init__.py).
            keep = [p for p in gen.rglob('*') if p.is_file() and
                    (p.suffix == '.so' or p.relative_to(gen).parts[0] in ('msg', 'srv', 'action'))]
            self._data(keep, stage)
        else:
            shutil.copytree(gen, Path(self.build_lib) / NAME, dirs_exist_ok=True,
                            ignore=shutil.ignore_patterns('__pycache__', '*.c'))
        skip = ('environment', 'local_setup', 'package.dsv', 'parent_prefix_path')
        rest = [p for d in ('lib', 'share', 'include') for p in (stage / d).rglob('*')
                if p.is_file() and not str(p).startswith(str(stage / py)) and
                not any(s in part for part in p.relative_to(stage).parts for s in skip)]
        self._data(rest, stage)

    def _data(self, files, stage):
        by_dir = {}
        for p in files:
            if '__pycache__' not in p.parts:
                by_dir.setdefault(str(p.parent.relative_to(stage)), []).append(str(p))
        self.distribution.data_files += sorted(by_dir.items())

    def get_outputs(self):
        return []


setup(
    name=NAME,
    version=VERSION,
    description='Serve a robot policy as a ROS 2 node; save, restore and roll back its state.',
    long_description=(ROOT / 'README.md').read_text() if (ROOT / 'README.md').exists() else '',
    long_description_content_type='text/markdown',
    license='Apache-2.0',
    distclass=Dist,
    packages=find_packages(include=[NAME, NAME + '.*']),
    package_data={NAME: ['py.typed', '**/*.onnx', '**/*.yaml', '**/*.xml', '**/*.npz']},
    # {'': '.'} makes `pip install -e` write a plain .pth; the default import hook would lose
    # to the generated portion in site-packages.
    package_dir={'': '.'},
    python_requires='>=3.10',
    setup_requires=BUILD_REQUIRES,
    install_requires=REQUIRES + ROS_REQUIRES,
    extras_require=EXTRAS,
    ext_modules=[Extension(NAME + '._rosidl', sources=[])],
    cmdclass={'build_ext': CMakeBuild},
    data_files=[],
    entry_points={'console_scripts': [
        'flashrt-ros = flashrt_ros.tools.cli:main',
        'policy_node = flashrt_ros.node.policy_node:main',
    ]},
    zip_safe=False,
)
