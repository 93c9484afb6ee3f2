"""The record of what each inference gave: one ChunkRecord per output and tick."""
from __future__ import annotations

from collections.abc import Mapping
import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.layout import BufferSpec
from flashrt_ros.ingest.ports import ActionShape, action_shape
from flashrt_ros.runtime.hub import Flight, Hub
from flashrt_ros.runtime.sink import ChunkRecord


class Chunks:
    """Tells the sink of every accepted tick, used or not."""

    def __init__(self, hub: Hub, ports: Mapping[str, BufferSpec]) -> None:
        self._hub = hub
        self._step_s = hub.file.policy.period_s
        self._outputs: list[tuple[str, ActionShape, tuple[str, ...], bool]] = []
        for name, spec in hub.file.outputs.items():
            shape = action_shape(spec, ports)
            names = spec.joints or spec.fields or tuple(f'[{i}]' for i in range(shape.dim))
            self._outputs.append((name, shape, names, ports[shape.port].dtype == 'BF16'))

    def record(self, flight: Flight, outputs: Mapping[str, NDArray[Any]], *, used: bool) -> None:
        """Record the tick that was accepted just now, once its action is out and the lock free."""
        tick = self._hub.session.tick
        self._hub.later(functools.partial(self._tell, flight, outputs, tick, used))

    def _tell(self, flight: Flight, outputs: Mapping[str, NDArray[Any]], tick: int, used: bool
              ) -> None:
        hub = self._hub
        for name, shape, names, bits in self._outputs:
            rows = outputs[shape.port]
            if bits:                   # numpy has no BF16: its bits are the upper half of an F32
                rows = (rows.astype(np.uint32) << 16).view(np.float32)
            data = rows.reshape(shape.rows, -1)[:, shape.first:shape.last].astype(np.float64)
            hub.sink.chunk(ChunkRecord(
                name, flight.mark.stamp_ns, flight.start_ns, hub.session.id,
                flight.inference.epoch, tick, flight.step, self._step_s, names, data,
                flight.latched, used))
