"""Off-screen pictures of the cell through EGL, where it loads; elsewhere a sentence that says why.

MuJoCo chooses its way to OpenGL when it is first imported, so `choose` comes before that.
"""
from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEIGHT, WIDTH = 180, 240
COLOURS = ((0.80, 0.22, 0.24), (0.18, 0.56, 0.34), (0.18, 0.38, 0.74))
DARK = (0.55, 0.55, 0.55)


def choose() -> str:
    """Select EGL for MuJoCo; return '' or why there will be no pictures. Before importing it."""
    if os.environ.get('FLASHRT_ROS_DEMO_RENDER') == '0':
        return 'pictures are off (FLASHRT_ROS_DEMO_RENDER=0)'
    if os.environ.get('MUJOCO_GL', 'egl') != 'egl':
        return ''                      # somebody has chosen another way
    try:
        ctypes.CDLL('libEGL.so.1')
    except OSError:
        os.environ['MUJOCO_GL'] = 'disable'
        return 'libEGL.so.1 is not installed (Debian, Ubuntu: apt install libegl1)'
    os.environ['MUJOCO_GL'] = 'egl'
    return ''


class Camera:
    """The fixed camera. Belongs to the thread that made it; has physics data of its own."""

    def __init__(self, model: Any) -> None:
        import mujoco
        self._mujoco = mujoco
        self._model = model
        self._data = mujoco.MjData(model)
        self._renderer = mujoco.Renderer(model, HEIGHT, WIDTH)
        self._lamp = model.geom('lamp')
        self._person = [model.geom(name) for name in ('legs', 'trunk', 'head')]

    def picture(self, positions: NDArray[np.float64], lit: int | None, person: bool
                ) -> NDArray[np.uint8]:
        """Return (HEIGHT, WIDTH, 3) rgb of joint positions `qpos`; `lit` is the shown bin."""
        self._lamp.rgba[:3] = DARK if lit is None else COLOURS[lit]
        for part in self._person:
            part.rgba[3] = float(person)
        self._data.qpos[:] = positions
        self._mujoco.mj_forward(self._model, self._data)
        self._renderer.update_scene(self._data, 'scene')
        pixels: NDArray[np.uint8] = self._renderer.render()
        return pixels

    def close(self) -> None:
        """Free the OpenGL context, in the thread that made it."""
        self._renderer.close()


def open_camera(model: Any) -> Camera | str:
    """Return a camera, or why there is none."""
    try:
        return Camera(model)
    except Exception as error:  # drivers fail in many ways; a demo without pictures is still one
        return f'EGL is installed but gives no context: {type(error).__name__}: {error}'
