"""The engine cache: one file per model, library version, device architecture and options.

The name of an entry is the digest of its key, so a newer library or another card finds nothing and
builds; an entry that is cut, damaged or says something else than its name is recognised from its
header and replaced. Of two processes that build at once the first one to finish keeps its entry
and the other one loads that, so both run the same engine; a lock lost against this, since a build
that hangs would hold everybody else up.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
import os
from pathlib import Path
from typing import Any

from flashrt_ros.backends.tensorrt_api import LOG, Library
from flashrt_ros.backends.tensorrt_build import BuildOptions, Built
from flashrt_ros.backends.tensorrt_plan import (
    EngineFile,
    Note,
    check_plan,
    note_of,
    open_engine,
    write_entry,
)
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import digest_of


def default_folder() -> Path:
    """Return the user's cache folder for engines."""
    base = os.environ.get('XDG_CACHE_HOME') or os.path.expanduser('~/.cache')
    return Path(base) / 'flashrt_ros' / 'engines'


def key_of(source: str, library: Library, options: BuildOptions) -> dict[str, Any]:
    """Return what an engine depends on. `source`: digest of the ONNX file and its data."""
    return {'source': source, 'library': library.name, 'version': library.version,
            **options.describe()}


@dataclass(frozen=True)
class Cached:
    """An engine from the cache."""

    plan: bytes
    note: Note
    path: Path | None            # None: the cache could not be written
    fresh: bool                  # built just now


class EngineCache:
    """Engines in a folder. Nothing in it is trusted before its digest was compared."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else default_folder()

    def path(self, key: Mapping[str, Any]) -> Path:
        """Return where the entry of a key lies."""
        return self.folder / f'{digest_of(dict(key))[:32]}.engine'

    def find(self, key: Mapping[str, Any], library: Library) -> EngineFile | None:
        """Return the entry of a key after a look at its header; a bad one is None."""
        path = self.path(key)
        if not path.exists():
            return None
        try:
            entry = open_engine(path)
            if entry.note is None or dict(entry.note.key) != dict(key):
                raise Refusal(Code.CORRUPT, f'{path} is not the entry that its name says')
            check_plan(path, entry.size, entry.header, library)
        except Refusal as e:
            LOG.warning('building again: %s', e.message)
            return None
        return entry

    def get(self, key: Mapping[str, Any], library: Library, build: Callable[[], Built]) -> Cached:
        """Return the engine of a key, built where there is none. Raises what `build` raises."""
        kept = self._read(key, library)
        if kept is not None:
            return kept
        built = build()
        note = note_of(built.plan, key, built.tensors, built.capturable)
        path = self.path(key)
        try:
            if not write_entry(path, built.plan, note):
                other = self._read(key, library)  # another process was first
                if other is not None:
                    return other
                write_entry(path, built.plan, note, replace=True)  # what lay there was bad
        except OSError as e:
            LOG.warning('the engine is not kept, %s cannot be written: %s', path, e)
            return Cached(built.plan, note, None, fresh=True)
        return Cached(built.plan, note, path, fresh=True)

    def _read(self, key: Mapping[str, Any], library: Library) -> Cached | None:
        entry = self.find(key, library)
        if entry is None or entry.note is None:
            return None
        try:
            return Cached(entry.read(), entry.note, entry.path, fresh=False)
        except (Refusal, OSError) as e:
            LOG.warning('building again: %s', e)
            return None
