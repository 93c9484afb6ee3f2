"""The host backend: a Python factory that returns a `Policy`, run on ordinary memory."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from flashrt_ros.backends.digests import file_digest, process_generators, source_digest
from flashrt_ros.backends.factory import call_factory, find_factory
from flashrt_ros.backends.host import HostDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Layout, digest_of
from flashrt_ros.core.seam import Bound, Buffer, Device, Policy

_METHODS = ('layout', 'identity', 'initial', 'bind', 'hidden', 'close')


class FactoryPolicy:
    """A factory's policy, whose weights digest also covers the factory's source and files."""

    def __init__(self, policy: Policy, sources: str) -> None:
        self._policy = policy
        self._sources = sources

    def layout(self) -> Layout:
        """Return the policy's buffers."""
        return self._policy.layout()

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the policy's fields, the source in `weights`."""
        meaning, exactness = self._policy.identity()
        weights = digest_of([meaning.get('weights', ''), self._sources])
        return {**meaning, 'weights': weights}, exactness

    def initial(self) -> Mapping[str, NDArray[Any]]:
        """Return the policy's initial values."""
        return self._policy.initial()

    def bind(self, buffers: Mapping[str, Buffer], device: Device) -> Bound:
        """Bind the policy."""
        return self._policy.bind(buffers, device)

    def hidden(self) -> Mapping[str, str]:
        """Return the policy's digests, and those of generators that nobody may draw from."""
        return {**self._policy.hidden(), **process_generators()}

    def close(self) -> None:
        """Close the policy."""
        self._policy.close()


def load(spec: PolicySpec) -> tuple[FactoryPolicy, HostDevice]:
    """Call the factory, with `model=` its path where the policy file names one."""
    if spec.factory is None:
        raise Refusal(Code.INVALID_POLICY_FILE, 'policy.factory: the host backend runs a Python '
                      'factory; write factory: module:function')
    if spec.state:
        raise Refusal(Code.INVALID_POLICY_FILE, 'policy.state: the host backend has no feedback '
                      'pairs; the policy declares its STATE buffers itself')
    function = find_factory(spec)
    extra = {} if spec.model is None else {'model': spec.model}
    policy = call_factory(function, spec, **extra)
    missing = [m for m in _METHODS if not callable(getattr(policy, m, None))]
    if missing:
        raise Refusal(Code.INVALID_POLICY_FILE, f'policy.factory: {spec.factory} returned '
                      f'{type(policy).__name__} without {", ".join(missing)}; see '
                      'flashrt_ros.core.seam.Policy')
    sources = [source_digest(function, type(policy))]
    if spec.model is not None:
        sources.append(file_digest(spec.model, 'policy.model'))
    return FactoryPolicy(policy, digest_of(sources)), HostDevice()
