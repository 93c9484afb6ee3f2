"""The example of docs/behaviour_trees.md is real, and its tables say what the trees use."""
from __future__ import annotations

from pathlib import Path
import re
import xml.etree.ElementTree as ElementTree

from py_trees.common import Status
from py_trees.display import unicode_tree
import pytest

import flashrt_ros.clients
from flashrt_ros.core.errors import Code
from test.clients.trees import Leaf, Ticker, board
from test.node.harness import Probe

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / 'docs/behaviour_trees.md').read_text()
TREES = sorted((Path(flashrt_ros.clients.__path__[0]) / 'trees').glob('*.xml'))
PORTS = {node: set(re.findall(r'`(\w+)`', row)) for node, row in
         re.findall(r'^\| `(\w+)` \| (`.*)\|$', PAGE, re.MULTILINE)}


def test_the_example_makes_a_tree(probe: Probe) -> None:
    example = re.search(r'```python\n(.*?)```', PAGE, re.DOTALL)
    assert example is not None
    names: dict[str, object] = {}
    exec(compile(example[1], 'behaviour_trees.md', 'exec'), names)
    drive, look = Leaf('drive'), Leaf('look')
    tree = probe.inside(lambda: names['make'](probe.node, drive, look))
    shown = unicode_tree(tree)
    assert all(name in shown for name in ('reach', 'before the grasp', 'close', 'look', 'drive'))
    assert Ticker(probe, tree).once() is Status.FAILURE      # nobody is there
    assert board('reach') == Code.UNSUPPORTED


@pytest.mark.parametrize('path', TREES, ids=lambda p: p.name)
def test_every_port_that_a_tree_uses_is_documented(path: Path) -> None:
    root = ElementTree.parse(path).getroot()
    used = [e for e in root.iter() if e.tag in PORTS]
    assert {e.tag for e in used} >= {'TriggerService'}
    for element in used:
        ports = {a for a in element.attrib if not a.startswith('_')}
        assert ports <= PORTS[element.tag], f'{element.tag} of {path.name}'


@pytest.mark.parametrize('path', TREES, ids=lambda p: p.name)
def test_a_tree_knows_only_the_codes_that_it_names(path: Path) -> None:
    text = path.read_text()
    root = ElementTree.fromstring(text)
    numbers = {int(n) for e in root.iter('ScriptCondition')
               for n in re.findall(r'== (\d+)', e.attrib['code'])}
    assert numbers <= {Code.ROBOT_MOVED, Code.STALE_EPOCH}
    for number in numbers:
        assert f'{number} {Code(number).name}' in text or path.name != 'capsule_scope.xml'


def test_the_files_are_installed_and_named_on_the_page() -> None:
    assert [p.name for p in TREES] == sorted(re.findall(r'^\| `(\w+\.xml)`', PAGE, re.MULTILINE))
    assert 'flashrt_ros/clients/trees DESTINATION share' in (ROOT / 'CMakeLists.txt').read_text()
