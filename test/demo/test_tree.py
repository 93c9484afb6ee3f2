"""The demo's story as a behaviour tree."""
from __future__ import annotations

from pathlib import Path
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip('mujoco', reason="the cell needs mujoco: pip install 'flashrt_ros[demo]'")
pytest.importorskip('onnxruntime', reason="pip install 'flashrt_ros[onnx]'")
pytest.importorskip('py_trees', reason="pip install 'flashrt_ros[trees]'")

from py_trees.common import Status
from py_trees.display import unicode_tree

from flashrt_ros.demo import tree

SCRIPT = """
from flashrt_ros.demo.watch_env import isolate
isolate()
from pathlib import Path
import sys
from flashrt_ros.demo import tree
from flashrt_ros.demo.watch import Watch, processes
with processes(Path(sys.argv[1])):
    watch = Watch()
    try:
        result = tree.run(watch)
    finally:
        watch.close()
for row in result.rows:
    print(*row, sep=': ')
sys.exit(not result.good)
"""


def facts(**changes: Any) -> dict[str, Any]:
    """Return what the cell says while the part is carried."""
    return {'held': True, 'scanned': True, 'success': False, 'part': [0.3, 0.0, 0.2],
            'finger': 0.015, 'seen': [0.0, 0.0, 0.0], 'lit': False, **changes}


def test_the_tree_fails_where_the_part_is_lost_and_ends_where_it_is_placed() -> None:
    watch: Any = SimpleNamespace(record=SimpleNamespace(facts=[]))
    lost = tree.Until('lost', watch, tree._lost, Status.FAILURE)
    placed = tree.Until('placed', watch, tree._placed)
    for changes, ends in (
            (None, (Status.RUNNING, Status.RUNNING)),
            ({}, (Status.RUNNING, Status.RUNNING)),
            ({'held': False, 'part': [0.3, 0.0, 0.03], 'finger': 0.01},
             (Status.FAILURE, Status.RUNNING)),
            ({'held': False, 'success': True, 'finger': 0.03}, (Status.RUNNING, Status.RUNNING)),
            ({'held': False, 'success': True, 'finger': 0.03, 'seen': [0.2, 0.0, 0.0]},
             (Status.RUNNING, Status.SUCCESS))):
        if changes is not None:
            watch.record.facts.append((0.0, facts(**changes)))
        lost.tick_once()
        placed.tick_once()
        assert (lost.status, placed.status) == ends, changes


def test_the_tree_is_the_one_that_the_page_describes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(create_publisher=lambda *_: None,
                           create_timer=lambda *_: None)
    watch: Any = SimpleNamespace(client=SimpleNamespace(node=made, client=None))
    shown = unicode_tree(tree.Story(watch).root)
    names = ['sort the part', 'lamp', 'approach', 'twice', 'before the grasp', 'carry', 'recover']
    for text in (shown, tree.__doc__ or ''):
        order = [text.index(name) for name in names]
        assert order == sorted(order)


@pytest.mark.long
def test_the_whole_story_as_a_tree(tmp_path: Path) -> None:
    pytest.importorskip('rclpy')
    ended = subprocess.run([sys.executable, '-c', SCRIPT, str(tmp_path)], timeout=150,
                           capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert 'True (blue)' in ended.stdout
    assert 'ROBOT_MOVED' in ended.stdout
    assert 'Traceback' not in ended.stderr
