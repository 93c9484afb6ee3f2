"""What TensorRT-RTX says to a card that it does not run on, such as an H200.

Three questions, each answered by a sentence that goes into a JSON file (`--out`): what configure
says (this package's own check, before anything is built), what the library's look at an engine's
header says, and what the library says when it is made to load the engine all the same. The engine
is built here from one layer, so neither a model file nor the onnx package is needed. On a card that
the library does run on, the engine is bound, captured and run instead.

    python -m bench.tensorrt_h200 --out tensorrt_h200.json
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from flashrt_ros import backends
from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_api import Library, find, listening
from flashrt_ros.backends.tensorrt_engine import deserialise
from flashrt_ros.core.arena import Arena
from flashrt_ros.core.errors import Refusal


def tiny_engine(library: Library) -> bytes:
    """Return an engine for any card: y = x + x, four float32 values."""
    trt = library.module
    builder = trt.Builder(library.logger)
    network = builder.create_network(0)
    x = network.add_input('x', trt.float32, (4,))
    layer = network.add_elementwise(x, x, trt.ElementWiseOperation.SUM)
    layer.get_output(0).name = 'y'
    network.mark_output(layer.get_output(0))
    config = builder.create_builder_config()
    if hasattr(trt.BuilderFlag, 'REQUIRE_USER_ALLOCATION'):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    with listening(library) as journal:
        memory = builder.build_serialized_network(network, config)
    if memory is None:
        raise journal.refusal('the engine of one layer')
    return bytes(memory)


def configure(library: Library, plan: bytes) -> str:
    """Load the engine as a policy file would; run it where that works."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'tiny.engine'
        path.write_bytes(plan)
        try:
            policy, device = backends.load('tensorrt', PolicySpec(
                path, model_root=path.parent, options={'library': library.name}))
        except Refusal as refusal:
            return str(refusal)
    arena = Arena(device, policy.layout())
    bound = policy.bind(arena.buffers, device)
    try:
        arena.write('x', np.arange(4, dtype='f4').view(np.uint8))
        bound.enqueue()
        got = arena.read('y').view('f4').tolist()
        captured = getattr(bound, 'captured', False)
        return f'runs, {"captured" if captured else "uncaptured"}: x + x = {got}'
    finally:
        bound.close()
        arena.close()
        policy.close()
        device.close()


def header(library: Library, plan: bytes) -> str:
    """Ask the library about the engine's header only, without this package's own check."""
    try:
        deserialise(library, plan, 'tiny.engine')
    except Refusal as refusal:
        return str(refusal)
    return 'loads'


def loaded(library: Library, plan: bytes) -> str:
    """Make the library load it all the same, and return its own words."""
    runtime = library.module.Runtime(library.logger)
    with listening(library) as journal:
        engine = runtime.deserialize_cuda_engine(plan)
    return journal.text or ('loads' if engine is not None else 'nothing, without a word')


def answers(name: str) -> dict[str, Any]:
    """Return the record of this machine."""
    library = find(name)
    record: dict[str, Any] = {'library': library.title, 'knows': [
        f'{a}.{b}' for a, b in library.capabilities()]}
    try:
        device = CudaDevice()
        record.update(device.identity())
        device.close()
    except Refusal as refusal:
        record['cuda.device'] = str(refusal)
    plan = tiny_engine(library)
    return {**record, 'configure': configure(library, plan), 'header': header(library, plan),
            'load': loaded(library, plan)}


def main() -> None:
    """Ask, print, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--library', default='tensorrt_rtx', choices=('tensorrt', 'tensorrt_rtx'))
    parser.add_argument('--out', type=Path)
    given = parser.parse_args()
    text = json.dumps(answers(given.library), indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + '\n')


if __name__ == '__main__':
    main()
