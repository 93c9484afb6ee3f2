"""A flow-matching action head: noise drawn in the tick, carried to a chunk of actions.

A small velocity field, conditioned on the observation and on a recurrent memory, moves a sample
from noise to actions in a few Euler steps. The noise is counter-based, so random key and counter
are STATE like the memory. (Lipman et al., Flow matching for generative modeling, 2022.)
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.backends import philox
from flashrt_ros.backends.digests import source_digest
from flashrt_ros.backends.tensor_program import Tensors, import_torch
from flashrt_ros.core.layout import BufferSpec, Layout, Role, digest_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FlowHead:
    """obs (observation,) -> actions (horizon, action_dim); STATE memory, rng_key, rng_counter."""

    precision = 'highest'

    def __init__(self, observation: int = 8, horizon: int = 8, action_dim: int = 4,
                 width: int = 64, steps: int = 4, noise: float = 1.0, seed: int = 0,
                 key: int = 1) -> None:
        self._sizes = {'observation': observation, 'horizon': horizon, 'action_dim': action_dim,
                       'width': width, 'steps': steps, 'noise': noise, 'seed': seed, 'key': key}
        self.observation, self.horizon, self.action_dim = observation, horizon, action_dim
        self.width, self.steps, self.noise, self.seed, self.key = width, steps, noise, seed, key
        self._weights: dict[str, Tensor] = {}

    def layout(self) -> Layout:
        """Return ports and state."""
        return Layout([
            BufferSpec('obs', (self.observation,), 'F32', Role.INPUT, low=-1.0, high=1.0),
            BufferSpec('memory', (self.width,), 'F32', Role.STATE),
            *philox.specs(),
            BufferSpec('actions', (self.horizon, self.action_dim), 'F32', Role.OUTPUT)])

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return the random key."""
        return {'rng_key': np.array([self.key & 0xFFFFFFFF, self.key >> 32], np.int64)}

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the sizes, which the weights are drawn from, and the code."""
        return {'weights': digest_of([self._sizes, source_digest(FlowHead, philox)])}, {}

    def to(self, device: torch.device) -> None:
        """Draw the weights."""
        torch = import_torch()
        generator = torch.Generator().manual_seed(self.seed)
        flat, w = self.horizon * self.action_dim, self.width
        for name, (rows, columns) in {
                'obs': (self.observation, w), 'memory': (w, w), 'sample': (flat, w), 'time': (1, w),
                'condition': (w, w), 'middle': (w, w), 'velocity': (w, flat)}.items():
            matrix = torch.randn((rows, columns), generator=generator) / math.sqrt(rows)
            self._weights[name] = matrix.to(device)

    def constants(self) -> Mapping[str, Any]:
        """Return the weights."""
        return dict(self._weights)

    def programs(self) -> Mapping[str, Callable[[Tensors], None]]:
        """Return the tick."""
        return {'tick': self.tick}

    def tick(self, t: Tensors) -> None:
        """Advance the memory, draw noise, integrate the velocity field."""
        torch = import_torch()
        w = self._weights
        memory = torch.tanh(t['obs'] @ w['obs'] + t['memory'] @ w['memory'])
        t['memory'].copy_(memory)
        condition = memory @ w['condition']
        x = philox.normal(t['rng_key'], t['rng_counter'], (self.horizon * self.action_dim,))
        x = x * self.noise
        for i in range(self.steps):
            h = torch.tanh(x @ w['sample'] + condition + w['time'][0] * (i / self.steps))
            h = torch.nn.functional.silu(h @ w['middle'])
            x = x + (h @ w['velocity'] - x) / self.steps
        t['actions'].copy_(x.view(self.horizon, self.action_dim))
