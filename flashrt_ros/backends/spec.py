"""What every backend is given to load a policy from."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class PolicySpec:
    """A policy to load: a model file below `model_root`, or a factory from an allowed module."""

    model: Path | None = None
    factory: str | None = None                     # module:function
    model_root: Path = Path('.')
    modules: tuple[str, ...] = ()                  # modules that may supply code
    state: Mapping[str, str] = field(default_factory=dict)      # input -> output fed back into it
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
