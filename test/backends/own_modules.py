"""Factories of torch modules that tests load by name, as a user's module would supply them."""
from __future__ import annotations

from collections import deque
import itertools
import random

import numpy as np
import torch
from torch import nn

CACHE: dict[str, int] = {}


class Cell(nn.Module):
    """obs (1, 4) -> actions (1, 4), state in a registered buffer that is assigned."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.w = nn.Parameter(torch.randn(4, 4, generator=g) * 0.5)
        self.register_buffer('h', torch.full((1, 4), 0.25))

    def forward(self, obs):
        self.h = torch.tanh(obs @ self.w + self.h)
        return self.h * 2


class InPlace(Cell):
    """The same, written in place through a view, with a counter and a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('n', torch.zeros((), dtype=torch.int64))
        self.register_buffer('table', torch.arange(4.0))

    def forward(self, obs):
        self.h[0].copy_(torch.tanh(obs @ self.w + self.h)[0])
        self.n += 1
        return self.h + self.table * self.n


class Swap(nn.Module):
    """Two buffers that change places every tick."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('a', torch.ones(1, 4))
        self.register_buffer('b', torch.full((1, 4), 2.0))

    def forward(self, obs):
        self.a, self.b = self.b, self.a
        return self.a + obs


class Alias(Swap):
    def forward(self, obs):
        self.a = self.b
        return self.a + obs


class Previous(nn.Module):
    """An attribute that is None until the first tick."""

    def __init__(self) -> None:
        super().__init__()
        self.last = None

    def forward(self, obs):
        out = obs - self.last if self.last is not None else torch.zeros_like(obs)
        self.last = obs.clone()
        return out


LAST = {'last': {'kind': 'optional', 'dtype': 'F32', 'shape': [1, 4]}}


class PreviousDeclared(Previous):
    declared_state = LAST


class Keeps(Previous):
    """Keeps the very tensor that it was given: its bytes change with the next input."""

    declared_state = LAST

    def forward(self, obs):
        out = obs - self.last if self.last is not None else torch.zeros_like(obs)
        self.last = obs
        return out


class Remembers(Cell):
    """A deque that refers to a buffer which is later written in place."""

    declared_state = {'seen': {'kind': 'deque', 'shape': [1, 4], 'length': 3}}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.seen = deque(maxlen=3)

    def forward(self, obs):
        self.h.add_(obs)
        self.seen.append(self.h)
        return torch.stack(tuple(self.seen)).sum(0)


class Queue(nn.Module):
    """Two attributes that refer to different rows of one tensor."""

    declared_state = {'queue': {'kind': 'deque', 'shape': [4], 'length': 3},  # noqa: RUF012
                      'last': {'kind': 'optional', 'shape': [4]}}

    def __init__(self) -> None:
        super().__init__()
        self.queue = deque()
        self.last = None

    def forward(self, obs):
        if not self.queue:
            self.queue.extend((obs * torch.arange(1, 4).view(3, 1)).unbind(0))
        before = self.last if self.last is not None else torch.zeros(4)
        self.last = self.queue.popleft()
        return self.last + before


class Window:
    """An object with a tick, no module: a deque of observations and a number."""

    def __init__(self, length: int = 3, net: nn.Module | None = None) -> None:
        self.window = deque(maxlen=length)
        self.count = 0
        self.net = net

    def tick(self, obs):
        self.window.append(obs.clone())
        self.count += 1
        out = torch.stack(tuple(self.window)).mean(0) + 100 * self.count
        return {'actions': out if self.net is None else self.net(out)}


class Ensembler:
    """Temporal ensembling as ACT does it: tensors that change their length."""

    def __init__(self) -> None:
        self.actions = None
        self.weight = None

    def update(self, chunk):                                    # chunk: (1, rows, dim)
        if self.actions is None:
            self.actions = chunk.clone()
            self.weight = torch.ones(chunk.shape[1], 1)
        else:
            kept = (self.actions * self.weight + chunk[:, :-1]) / (self.weight + 1)
            self.actions = torch.cat([kept, chunk[:, -1:]], 1)
            self.weight = torch.cat([self.weight + 1, torch.ones(1, 1)])
        action, self.actions = self.actions[:, 0], self.actions[:, 1:]
        self.weight = self.weight[1:]
        return action


class Ensembled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 12)
        nn.init.constant_(self.net.weight, 0.3)
        nn.init.zeros_(self.net.bias)
        self.ensembler = Ensembler()

    def forward(self, obs):
        return self.ensembler.update(torch.tanh(self.net(obs)).view(1, 3, 4)
                                     * torch.arange(1, 4).view(1, 3, 1))


class Noisy(nn.Module):
    """Draws from wherever it is told to."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.own = torch.Generator().manual_seed(4)
        self.steps = itertools.count()

    def forward(self, obs):
        if self.source == 'torch':
            return obs + torch.rand(1)
        if self.source == 'random':
            return obs + random.random()
        if self.source == 'numpy':
            return obs + float(np.random.rand())
        if self.source == 'global':
            CACHE['n'] = CACHE.get('n', 0) + 1
            return obs + CACHE['n']
        if self.source == 'iterator':
            return obs + next(self.steps)
        return obs + torch.randn(obs.shape, generator=self.own)


class WritesInput(nn.Module):
    def forward(self, obs):
        return obs.mul_(2)


class Grows(Cell):
    def forward(self, obs):
        self.h = torch.cat([self.h, obs])
        return self.h[-1:]


class Shrinks(nn.Module):
    """An output whose shape depends on values."""

    def forward(self, obs):
        return obs if bool(obs.sum() < 100) else obs[:, :2]


class Raises(nn.Module):
    def forward(self, obs):
        if bool((obs == 7).any()):
            raise ValueError('seven')
        return obs + 1


class Prompted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer('goal', torch.zeros(1, 4))

    def prefill(self, prompt):
        self.goal = prompt.float()

    def forward(self, obs, prompt):
        return obs + self.goal


def cell(**o):
    return Cell(**o)


def in_place():
    return InPlace()


def swap():
    return Swap()


def alias():
    return Alias()


def previous():
    return Previous()


def previous_declared():
    return PreviousDeclared()


def keeps():
    return Keeps()


def remembers():
    return Remembers()


def queue():
    return Queue()


def window(**o):
    return Window(**o)


def window_with_net():
    return Window(net=Cell())


def ensembled():
    return Ensembled()


def noisy(source):
    return Noisy(source)


def writes_input():
    return WritesInput()


def grows():
    return Grows()


def shrinks():
    return Shrinks()


def raises():
    return Raises()


def prompted():
    return Prompted()


def nothing():
    return 5


def tied():
    module = Swap()
    module.b = module.a
    return module
