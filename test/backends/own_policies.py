"""Factories that tests load by name, as a user's module would supply them."""
from __future__ import annotations

import random

from flashrt_ros.backends.reference import Recurrent

MADE: list[dict] = []
not_callable = 3


def plain(**options):
    MADE.append(options)
    return Recurrent(obs_dim=options.get('obs_dim', 8))


def fails():
    raise RuntimeError('no camera')


def wrong_kind():
    return object()


class _Draws(Recurrent):
    def tick(self, b):
        super().tick(b)
        b['actions'] += random.random()


def draws():
    return _Draws()
