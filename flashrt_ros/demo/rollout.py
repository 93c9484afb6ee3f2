"""What the policy sees and how its chunks are executed, with nothing but ONNX Runtime.

Training and the tests use this loop; the node does the same work from messages and from
sorting.yaml. A test holds the two equal.

Observation (11,) f32: joints 4, finger 1, part in the hand's frame 3, cue 3 (one-hot in the first
inference of an episode, zero in all others). Action row (5,): joints and finger,
`raw * ACTION_SCALE + ACTION_OFFSET`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.demo.arm import Cell

MODEL = Path(__file__).with_name('sorting.onnx')
POLICY_FILE = Path(__file__).with_name('sorting.yaml')

OBS, HIDDEN, CHUNK, ACTIONS = 11, 96, 8, 5
EXECUTE = 4                     # rows of a chunk that are executed
START_AT = 1                    # an inference starts when this many rows are left
# Offsets that float32 holds exactly, so that it does not matter in which type they are added.
OBS_OFFSET = np.array([-0.5, -0.625, -1.625, -1.0, -0.015625, 0, 0, 0, 0, 0, 0])
OBS_SCALE = np.array([1, 2, 2, 2, 50, 4, 4, 4, 1, 1, 1], np.float64)
ACTION_SCALE = np.array([0.5, 0.5, 0.5, 0.5, 0.015])
ACTION_OFFSET = np.array([0.5, 0.625, 1.625, 1.0, 0.017])
FINGER_CLIP = (0.0, 0.032)      # m, what the gripper can be told

Vector = NDArray[np.float64]
Model = Callable[[NDArray[np.float32], NDArray[np.float32]],
                 tuple[NDArray[np.float32], NDArray[np.float32]]]


def cue(target: int) -> Vector:
    """Return what the cue shows of a target: one-hot (3,)."""
    shown: Vector = np.eye(3)[target]
    return shown


def observe(cell: Cell, shown: Vector | None) -> NDArray[np.float32]:
    """Return the observation (11,); `shown` is the cue, None when it is dark."""
    dark = np.zeros(3) if shown is None else shown
    raw = np.concatenate((cell.joints, [cell.finger], cell.seen, dark))
    return normalise(raw)


def normalise(raw: Vector) -> NDArray[np.float32]:
    """Return what the network is given of raw values (11,)."""
    values: NDArray[np.float32] = ((raw + OBS_OFFSET) * OBS_SCALE).astype(np.float32)
    return values


def load(path: Path = MODEL) -> Model:
    """Return the policy as a function `(obs (11,), h (1, 1, H)) -> (raw chunk (8, 5), h)`."""
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, ['CPUExecutionProvider'])

    def run(obs: NDArray[np.float32], h: NDArray[np.float32]
            ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        actions, h_out = session.run(['actions', 'h_out'], {'obs': obs[None], 'h_in': h})
        return actions[0], h_out
    return run


class Player:
    """Executes chunks as the node does with `start_at: 1, latency_steps: 1, execute: 4`.

    An inference starts when one row is left and is used from the next step on, so that its row 0
    has passed by then. The first one of an episode is waited for.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.h = np.zeros((1, 1, HIDDEN), np.float32)
        self.queue: list[Vector] = []
        self.next: list[Vector] = []
        self.first = True

    def infer(self, cell: Cell) -> Vector:
        """Return the published chunk (8, 5) and move the state on."""
        shown = cue(cell.task.target) if self.first else None
        raw, self.h = self.model(observe(cell, shown), self.h)
        self.first = False
        chunk: Vector = raw.astype(np.float64) * ACTION_SCALE + ACTION_OFFSET
        chunk[:, 4] = np.clip(chunk[:, 4], *FINGER_CLIP)
        return chunk

    def step(self, cell: Cell) -> Vector:
        """Return the row (5,) to execute now."""
        if not self.queue:
            self.queue = self.next or list(self.infer(cell)[:EXECUTE])
        row = self.queue.pop(0)
        if len(self.queue) == START_AT - 1:
            self.next = list(self.infer(cell)[START_AT:START_AT + EXECUTE])
        return row


def run_episode(cell: Cell, player: Player, steps: int = 260) -> Iterator[int]:
    """Let the player work on a cell; yields the number of steps done, ends with success."""
    for i in range(steps):
        row = player.step(cell)
        cell.command(row[:4])
        cell.grip = float(row[4])
        cell.step()
        yield i + 1
        if cell.success and cell.finger > 0.02 and np.linalg.norm(cell.seen) > 0.06:
            return
