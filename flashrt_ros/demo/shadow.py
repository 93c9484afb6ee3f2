"""An outsider's proof that a restore was exact.

`Shadow` sits in another process than the policy node, hears the same sensor messages and every
`~/chunk`, and computes each inference again with an ONNX Runtime session of its own. A chunk's
record names the messages that it was computed from by digest, so the observation is rebuilt to the
byte; the GRU's state it keeps itself, tick by tick. After a restore to tick K it goes on from its
own copy of the state after tick K. If the node's memory were not what it was at the save, byte for
byte, the actions would differ.
"""
from __future__ import annotations

from dataclasses import dataclass
import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.demo.arm import JOINTS
from flashrt_ros.demo.rollout import CHUNK, HIDDEN, Model, normalise

TOPICS = ('joint_states', 'part_in_hand', 'cue')
WIDTHS = {'arm': 4, 'gripper': 1}


def digest(raw: bytes) -> int:
    """Return the first 8 bytes of SHA-256, as the node notes them."""
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], 'big')


@dataclass
class Verdict:
    """How the node's chunks compare with the shadow's."""

    equal: int = 0             # byte for byte
    different: int = 0
    unknown: int = 0           # a message of its record was not heard here
    first_difference: str = ''

    def __str__(self) -> str:
        total = self.equal + self.different + self.unknown
        text = f'{self.equal} of {total}'
        if self.unknown:
            text += f' ({self.unknown} not checked: the recorder missed a message)'
        return text + (f'; first difference {self.first_difference}' if self.different else '')


class Shadow:
    """Collects while the story runs; `verdict` computes afterwards."""

    def __init__(self) -> None:
        self._messages: dict[tuple[str, int], Any] = {}
        self._chunks: list[Any] = []

    def hear(self, topic: str, raw: bytes, message: Any) -> None:
        """Note a sensor message, serialised and not."""
        self._messages[topic, digest(raw)] = message

    def hear_chunk(self, chunk: Any) -> None:
        """Note a message of `~/chunk`."""
        self._chunks.append(chunk)

    def verdict(self, model: Model, *, since_epoch: int = 0) -> Verdict:
        """Compute everything again. Chunks of epochs before `since_epoch` are not counted."""
        found = Verdict()
        states: dict[int, NDArray[np.float32] | None] = {0: np.zeros((1, 1, HIDDEN), np.float32)}
        newest: dict[str, int] = {}
        rows: NDArray[np.float32] | None = None
        computed: tuple[int, int] | None = None
        for chunk in self._chunks:
            if computed != (chunk.epoch, chunk.tick):      # once for both outputs
                computed = (chunk.epoch, chunk.tick)
                for name, _, value in zip(chunk.input_names, chunk.input_stamps,
                                          chunk.input_digests, strict=True):
                    newest[name.rpartition('/')[2]] = value
                obs, h = self._observation(newest), states.get(chunk.tick - 1)
                rows = None
                states[chunk.tick] = None
                if obs is not None and h is not None:
                    rows, states[chunk.tick] = model(obs, h)
            if chunk.epoch >= since_epoch:
                self._judge(found, chunk, rows)
        return found

    def _judge(self, found: Verdict, chunk: Any, rows: NDArray[np.float32] | None) -> None:
        if rows is None:
            found.unknown += 1
            return
        ours = rows[:, :4] if chunk.output == 'arm' else rows[:, 4:]
        theirs = np.array(chunk.data, np.float32).reshape(CHUNK, WIDTHS[chunk.output])
        if np.ascontiguousarray(ours).tobytes() == theirs.tobytes():
            found.equal += 1
            return
        found.different += 1
        found.first_difference = found.first_difference or (
            f'{chunk.output} of tick {chunk.tick}: {np.abs(ours - theirs).max():.3g}')

    def _observation(self, newest: dict[str, int]) -> NDArray[np.float32] | None:
        keys = [(topic, newest.get(topic, 0)) for topic in TOPICS]
        if not all(key in self._messages for key in keys):
            return None
        joints, part, cue = (self._messages[key] for key in keys)
        position = dict(zip(joints.name, joints.position, strict=True))
        raw = np.array([*(position[j] for j in (*JOINTS, 'finger')), *part.data, *cue.data])
        return normalise(raw)
