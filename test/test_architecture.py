"""The layers of the package docstring, read from the sources."""
from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / 'flashrt_ros'
LAYERS = {
    'core': set(),
    'backends': {'core'},
    'ingest': {'core'},
    'runtime': {'core', 'ingest', 'backends'},
    'clients': {'core', 'msg', 'srv', 'action'},
    'node': {'core', 'ingest', 'runtime', 'msg', 'srv', 'action'},
    'tools': {'core', 'backends', 'ingest', 'runtime', 'node', 'clients', 'msg', 'srv', 'action'},
}
ROS = {'rclpy', 'rcl_interfaces', 'builtin_interfaces', 'sensor_msgs', 'std_msgs', 'std_srvs',
       'geometry_msgs', 'nav_msgs', 'trajectory_msgs', 'lifecycle_msgs', 'diagnostic_msgs',
       'action_msgs', 'rosgraph_msgs', 'control_msgs', 'launch', 'launch_ros'}
OPTIONAL = {'torch', 'tensorrt', 'tensorrt_rtx_bindings', 'cuda', 'onnx', 'onnxruntime', 'rosbags',
            'py_trees', 'PIL', 'matplotlib', 'mujoco'}
MADE_FOR = {'clients/scope.py': 'py_trees'}  # clients/behaviours.py, which it imports, refuses
FORBIDDEN = {'pickle', 'dill', 'cloudpickle', 'shelve', 'marshal'}
FILES = sorted(PACKAGE.rglob('*.py'))


def imports(path: Path, *, top_level: bool) -> set[str]:
    """Return the modules that a file imports, at its top level or anywhere."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else list(ast.walk(tree))
    out = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            out |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f'{path}: relative import'
            out.add(node.module)
            if node.module == 'flashrt_ros':
                out |= {f'flashrt_ros.{a.name}' for a in node.names}
    return out


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_each_layer_imports_only_what_it_may(path: Path) -> None:
    layer = path.relative_to(PACKAGE).parts[0]
    if layer not in LAYERS:
        return
    for module in imports(path, top_level=False):
        parts = module.split('.')
        if parts[0] == 'flashrt_ros' and len(parts) > 1:
            assert parts[1] == layer or parts[1] in LAYERS[layer], f'{layer} imports {module}'
        if layer in ('core', 'backends', 'ingest', 'runtime'):
            assert parts[0] not in ROS, f'{layer} imports {module}'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_optional_libraries_are_imported_when_needed(path: Path) -> None:
    parts = path.relative_to(PACKAGE).parts
    if parts[0] == 'demo':
        return
    allowed = MADE_FOR.get('/'.join(parts))
    for module in imports(path, top_level=True):
        name = module.split('.')[0]
        assert name not in OPTIONAL or name == allowed, f'{module} at the top of {path.name}'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_code_comes_from_data(path: Path) -> None:
    assert not {m.split('.')[0] for m in imports(path, top_level=False)} & FORBIDDEN
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            assert name not in ('eval', 'exec', 'torch.load', 'compile'), f'{name} in {path.name}'


@pytest.mark.parametrize('path', FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_has_one_job(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
