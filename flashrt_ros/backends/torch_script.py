"""TorchScript: what `forward` changes, found in its graph before anything is run.

State of a TorchScript module is a tensor that `forward`, or any method or submodule that it
calls, writes in place (through any view) or assigns. Anything else that it changes (an integer, a
list, an optional tensor) cannot lie in a buffer and is refused by name.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from flashrt_ros.backends.aliases import RANDOM, Found, parse_schema
from flashrt_ros.backends.tensor_program import import_torch
from flashrt_ros.core.errors import Code, Refusal

_INPUT = 'input '   # origin of a value that came in; no attribute path has a blank


def load_script(path: Path) -> Any:
    """Return the module on the CPU, in evaluation mode."""
    torch = import_torch()
    try:
        return torch.jit.load(str(path), map_location='cpu').eval()
    except Exception as e:  # torch raises RuntimeError, or what its reader raises
        raise Refusal(Code.BACKEND, f'{path.name} cannot be read as TorchScript: {e}') from e


def input_names(module: Any) -> list[str]:
    """Return the names of forward's arguments."""
    # Debug names carry a number where a name is used twice: x.1
    return [v.debugName().split('.')[0] for v in list(module.graph.inputs())[1:]]


def state_of(module: Any) -> tuple[dict[str, bool], dict[str, str]]:
    """Return `({path of a tensor that is state: whether it is written in place only},
    {path of any attribute that is read or written: its type})`."""
    found = analyse(module)
    for path, kind in {**found.read, **found.assigned}.items():
        if path not in found.assigned and path not in found.written:
            continue
        if kind != 'TensorType':
            raise Refusal(Code.UNDECLARED_STATE, f'attribute {path} ({kind.removesuffix("Type")}) '
                          'is changed by forward and is no tensor, so no capsule can hold it; '
                          'make it a tensor buffer, changed in place')
        if get_path(module, path) is None:
            raise Refusal(Code.UNDECLARED_STATE, f'attribute {path} is None until forward sets '
                          'it; make it a buffer of its final shape with a flag buffer that says '
                          'whether it is valid')
    for path in sorted(found.written):
        if path.startswith(_INPUT):
            raise Refusal(Code.UNSUPPORTED, f'{path} is written in place; clone it first')
    if found.random:
        raise Refusal(Code.UNSUPPORTED, f'operation {found.random[0]} draws from torch\'s global '
                      'generator, which belongs to the whole process; draw from a counter that '
                      'is a buffer, or make the noise an input')
    state = {p: p not in found.assigned for p in sorted(set(found.assigned) | found.written)}
    return state, {**found.read, **found.assigned}


def get_path(module: Any, path: str) -> Any:
    """Return an attribute by dotted path."""
    for name in path.split('.'):
        module = getattr(module, name)
    return module


def analyse(module: Any) -> Found:
    """Follow every value of forward's graph, methods and submodules inlined."""
    graph = module.inlined_graph
    inputs = [v.debugName() for v in graph.inputs()]
    walk = _Walk(inputs[0], inputs[1:])
    walk.block(graph)
    return walk.found


class _Walk:
    """Values by debug name: which module they are, where they come from, which truth they have."""

    def __init__(self, self_name: str, inputs: list[str]) -> None:
        self.found = Found()
        self.paths = {self_name: ''}
        self.origins: dict[str, set[str]] = {v: {_INPUT + v} for v in inputs}
        self.known: dict[str, bool] = {}  # what depends on nothing but `training`, which is False

    def of(self, name: str) -> set[str]:
        """Return where a value may come from."""
        return self.origins.get(name, set())

    def block(self, block: Any) -> None:
        """Follow a block's operations in order."""
        for node in block.nodes():
            ins = [v.debugName() for v in node.inputs()]
            kind = node.kind()
            if kind == 'prim::GetAttr':
                self._get(node, ins[0])
            elif kind == 'prim::SetAttr':
                if ins[0] in self.paths:
                    path = self._join(ins[0], node)
                    self.found.assigned[path] = list(node.inputs())[1].type().kind()
                else:  # an object of a script class; only one that outlives the tick is state
                    self.found.written |= self.of(ins[0])
            elif kind == 'prim::If':
                self._branch(node, ins[0])
            elif kind == 'prim::Loop':
                self._loop(node, ins)
            elif kind in ('prim::CallMethod', 'prim::CallFunction', 'prim::PythonOp'):
                raise Refusal(Code.UNSUPPORTED, f'forward calls {node} through an interface, so '
                              'what it changes cannot be found')
            else:
                self._operation(node, ins)

    def _join(self, owner: str, node: Any) -> str:
        return f'{self.paths[owner]}.{node.s("name")}'.lstrip('.')

    def _get(self, node: Any, owner: str) -> None:
        out, name = node.output(), node.output().debugName()
        if owner not in self.paths:  # a field of an object: as the object
            self.origins[name] = set(self.of(owner))
            return
        path = self._join(owner, node)
        if out.type().kind() == 'ClassType':
            self.paths[name] = path
        else:
            self.found.read.setdefault(path, out.type().kind())
            self.origins[name] = {path}
        if node.s('name') == 'training':
            self.known[name] = False

    def _branch(self, node: Any, condition: str) -> None:
        blocks = list(node.blocks())
        if condition in self.known:
            blocks = blocks[:1] if self.known[condition] else blocks[1:]
        for block in blocks:
            self.block(block)
            for out, value in zip(node.outputs(), block.outputs(), strict=True):
                name, source = out.debugName(), value.debugName()
                self.origins.setdefault(name, set()).update(self.of(source))
                if len(blocks) == 1 and source in self.known:
                    self.known[name] = self.known[source]

    def _loop(self, node: Any, ins: list[str]) -> None:
        body = next(iter(node.blocks()))
        carried = [v.debugName() for v in list(body.inputs())[1:]]
        for name, value in zip(carried, ins[2:], strict=True):
            self.origins.setdefault(name, set()).update(self.of(value))
        while True:  # origins only grow, so this ends
            before = [len(self.of(c)) for c in carried]
            self.block(body)
            for c, v in zip(carried, list(body.outputs())[1:], strict=True):
                self.origins[c] |= self.of(v.debugName())
            if before == [len(self.of(c)) for c in carried]:
                break
        for out, c in zip(node.outputs(), carried, strict=True):
            self.origins[out.debugName()] = set(self.of(c))

    def _operation(self, node: Any, ins: list[str]) -> None:
        name = node.kind().partition('::')[2]
        if name in RANDOM and not any(str(v.type()) == 'Generator' for v in node.inputs()):
            self.found.random.append(node.kind())
        everything = set().union(*map(self.of, ins))
        if node.schema() == '(no schema)':  # tuples, lists, casts: results hold what went in
            shares = True
            if node.hasAttribute('Subgraph'):
                self.found.written |= everything  # what a graph within writes is not followed
        else:
            arguments, shares = parse_schema(node.schema())
            for value, argument in zip(ins, arguments, strict=False):
                if argument.written:
                    self.found.written |= self.of(value)
                    if any(a.kept for a in arguments):  # a container takes something in
                        self.origins.setdefault(value, set()).update(everything)
        for out in node.outputs():
            self.origins[out.debugName()] = set(everything) if shares else set()
        self._truth(node, ins)

    def _truth(self, node: Any, ins: list[str]) -> None:
        out = list(node.outputs())
        if node.kind() == 'aten::__not__' and ins[0] in self.known:
            self.known[out[0].debugName()] = not self.known[ins[0]]
        elif node.kind() == 'prim::Constant' and out[0].type().kind() == 'BoolType':
            self.known[out[0].debugName()] = bool(node.i('value'))
