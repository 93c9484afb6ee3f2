"""A small recurrent policy with a camera: one picture in, four values out."""
from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends.reference import NumpyPolicy
from flashrt_ros.core.layout import BufferSpec, Role

SIZE, CELL, HIDDEN = 96, 8, 32


class Camera(NumpyPolicy):
    """image (3, 96, 96) F32 in 0..1 -> actions (1, 4); STATE h (32,).

    Value 0 of the action is the first pixel, so that whoever reads it knows the picture it is of.
    """

    def __init__(self) -> None:
        features = 3 * (SIZE // CELL) ** 2
        rng = np.random.default_rng(1)
        super().__init__((
            BufferSpec('image', (3, SIZE, SIZE), 'F32', Role.INPUT, low=0.0, high=1.0),
            BufferSpec('h', (HIDDEN,), 'F32', Role.STATE),
            BufferSpec('actions', (1, 4), 'F32', Role.OUTPUT),
        ), {name: (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
            for name, shape in (('x', (HIDDEN, features)), ('h', (HIDDEN, HIDDEN)),
                                ('a', (3, HIDDEN)))}, {})

    def tick(self, b: dict[str, NDArray[Any]]) -> None:
        """h = tanh(W_x cells(image) + W_h h); actions = first pixel, W_a h."""
        cells = SIZE // CELL
        seen = b['image'].reshape(3, cells, CELL, cells, CELL).mean(axis=(2, 4)).reshape(-1)
        b['h'][:] = np.tanh(self._w['x'] @ seen + self._w['h'] @ b['h'])
        b['actions'][0, 0] = b['image'][0, 0, 0]
        b['actions'][0, 1:] = self._w['a'] @ b['h']


def camera() -> Camera:
    """Return the policy; named in the policy file as bench.camera_policy:camera."""
    return Camera()
