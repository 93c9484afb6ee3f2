"""Small programs in torch for tests of the GPU backend: well-behaved and ill-behaved ones."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from flashrt_ros.core.layout import BufferSpec, Layout, Role

SPECS = (BufferSpec('x', (8,), 'F32', Role.INPUT, low=-1.0, high=1.0),
         BufferSpec('h', (8,), 'F32', Role.STATE),
         BufferSpec('actions', (1, 8), 'F32', Role.OUTPUT))


class Small:
    """h = tanh(h + f(x)); actions = h. `f` is what a test is about."""

    def __init__(self, f: Callable[[Any, Any], Any] = lambda torch, x: x) -> None:
        self.f = f

    def layout(self) -> Layout:
        return Layout(SPECS)

    def initial(self) -> Mapping[str, Any]:
        return {}

    def identity(self) -> Any:
        return {'weights': 'none'}, {}

    def to(self, device: Any) -> None:
        pass

    def constants(self) -> Mapping[str, Any]:
        return {}

    def programs(self) -> Mapping[str, Callable[[Any], None]]:
        return {'tick': self.tick}

    def tick(self, t: Any) -> None:
        import torch
        t['h'].copy_(torch.tanh(t['h'] + self.f(torch, t['x'])))
        t['actions'].copy_(t['h'].view(1, 8))


def asleep(cycles: int) -> Small:
    """Return a program whose tick takes a while."""
    def f(torch: Any, x: Any) -> Any:
        torch.cuda._sleep(cycles)
        return x
    return Small(f)
