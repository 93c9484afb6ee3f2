"""Builds an observation from the policy file: terms into ports, topics into sources.

Everything that can be wrong between the policy file and the model is refused here, at configure.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
import math
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Role, Space
from flashrt_ros.ingest.images import ImageTerm
from flashrt_ros.ingest.input_port import (
    PREFIXES,
    Array,
    Fill,
    History,
    Leaf,
    Part,
    Port,
    working_type,
)
from flashrt_ros.ingest.joints import QUANTITIES
from flashrt_ros.ingest.policy_file import OWN_MODULES
from flashrt_ros.ingest.ports import action_shape, check_ports, port_sizes
from flashrt_ros.ingest.schema import JOINT_STATE, term_size
from flashrt_ros.ingest.sources import JointSource, LevelSource
from flashrt_ros.ingest.spec import DEFAULT_MAX_AGE_S, PolicyFile, TermSpec
from flashrt_ros.ingest.terms import Read, bad_term, encode_prompt, load_function, vector_reader

PROMPT_BYTES = 1024
_GENERATED = ('constant', 'phase', 'counter', 'episode_start', 'last_action', 'prompt', *PREFIXES)


@dataclass
class Prompt:
    """A prompt term: how its text becomes values, and the STATE that holds them."""

    state: BufferSpec
    path: str
    encoder: Callable[[str], Any] | None
    length: int

    def encode(self, text: str) -> Array:
        """Return the `(length,)` values of a text. Raises Refusal(INVALID_ARGUMENT)."""
        return encode_prompt(text, self.encoder, self.length, self.path)


@dataclass
class Assembly:
    """What the builder found: everything by name, in the order of the policy file."""

    ports: dict[str, Port] = field(default_factory=dict)
    sources: dict[str, LevelSource | JointSource] = field(default_factory=dict)
    prompts: list[Prompt] = field(default_factory=list)
    prompt_topics: list[str] = field(default_factory=list)
    last_actions: dict[str, BufferSpec] = field(default_factory=dict)     # by output
    prefixes: set[str] = field(default_factory=set)                       # outputs


class Builder:
    """Reads `policy_file.inputs` once; `host` is the STATE that terms' functions look at."""

    def __init__(self, policy_file: PolicyFile, ports: Mapping[str, BufferSpec],
                 modules: Sequence[str], host: Mapping[str, Array]) -> None:
        self._file = policy_file
        self._specs = ports
        self._modules = (*OWN_MODULES, *modules)
        self._host = host
        self._reads: dict[int, Read] = {}
        self._types: dict[int, str] = {}
        self._widths: dict[str, int] = {}
        self._made = Assembly()

    def build(self) -> Assembly:
        """Return ports and sources. Raises Refusal(INVALID_POLICY_FILE)."""
        check_ports(self._file, self._specs)
        self._widths = {name: action_shape(output, self._specs).dim
                        for name, output in self._file.outputs.items()}
        for name, terms in self._file.inputs.items():
            self._made.ports[name] = self._port(name, terms)
        self._connect()
        return self._made

    def _port(self, name: str, terms: tuple[TermSpec, ...]) -> Port:
        spec = self._specs[name]
        sizes = port_sizes(terms, math.prod(spec.shape), self._widths)
        assert sizes is not None            # check_ports has refused it
        parts: list[Part] = []
        for i, (term, size) in enumerate(zip(terms, sizes, strict=True)):
            place = f'obs.{name}' if len(terms) == 1 else f'obs.{name}.{i}'
            if term.term == 'history':
                leaves = [self._leaf(f'{place}.{j}', t, term_size(t, self._widths), None)
                          for j, t in enumerate(term.of)]
                if any(leaf.spec.term in (*PREFIXES, 'prompt') for leaf in leaves):
                    raise bad_term(term, 'cannot hold a prompt or a prefix, which no step measures')
                parts.append(History(f'{place}.history', term, leaves, working_type(spec)))
            else:
                parts.append(self._leaf(place, term, size, spec.shape if len(terms) == 1 else None))
        return Port(spec, parts)

    def _leaf(self, place: str, term: TermSpec, size: int | None, shape: tuple[int, ...] | None
              ) -> Leaf:
        if term.function is None and term.term in _GENERATED:
            return self._generated(place, term, size)
        leaf: Leaf
        if term.function is None and term.term.startswith('joint_'):
            leaf = self._joint(term)
        elif term.function is None and term.term == 'image':
            image = ImageTerm(term, shape)
            leaf = Leaf(term, image.size, image=image)
            self._types[id(leaf)] = image.type
        else:
            reader = vector_reader(term, self._modules, size)
            leaf = Leaf(term, len(reader.names), names=reader.names)
            self._reads[id(leaf)] = reader.read
            self._types[id(leaf)] = reader.type
        self._limits(leaf)
        return leaf

    def _joint(self, term: TermSpec) -> Leaf:
        quantity = term.term.removeprefix('joint_')
        if quantity not in QUANTITIES:
            raise bad_term(term, f'is not built in; joints have {", ".join(QUANTITIES)}')
        if not term.joints or term.topic is None:
            raise bad_term(term, 'needs topic and joints')
        leaf = Leaf(term, len(term.joints), names=term.joints)
        leaf.quantity = QUANTITIES.index(quantity)
        self._types[id(leaf)] = JOINT_STATE
        return leaf

    def _limits(self, leaf: Leaf) -> None:
        term = leaf.spec
        timeout = None if term.timeout_s is None else round(term.timeout_s * 1e9)
        if not term.latched:
            limit = DEFAULT_MAX_AGE_S if term.max_age_s is None else term.max_age_s
            leaf.limit_ns = round(limit * 1e9) if math.isfinite(limit) else None
        elif term.on_timeout == 'stop':
            leaf.limit_ns = timeout
        elif leaf.quantity >= 0 or leaf.image is not None:
            raise bad_term(term, 'cannot be zero after a timeout: nobody measured that; write '
                           'on_timeout: stop')
        else:
            leaf.zero_ns = timeout

    # --- terms without a message

    def _generated(self, place: str, term: TermSpec, size: int | None) -> Leaf:
        name = term.term
        if name == 'constant':
            return Leaf(term, len(term.value))
        if name == 'phase':
            return Leaf(term, 2, names=('sin', 'cos'), fill=self._phase(term))
        if name == 'counter':
            return Leaf(term, 1, fill=_counter)
        if name == 'episode_start':
            return Leaf(term, 1, fill=_episode_start)
        if name == 'prefix_rows':
            return Leaf(self._of_output(term), 1)
        if name == 'prefix':
            own = self._of_output(term)
            width = self._widths[self._output(term)]
            n = size if size is not None else (term.length or 0) * width
            if n < 1 or n % width:
                raise bad_term(term, f'fills {n} values, no multiple of the {width} of an action; '
                               'write length: (rows)')
            return Leaf(own, n)
        if name == 'last_action':
            return self._last_action(term)
        return self._prompt(place, term)

    def _of_output(self, term: TermSpec) -> TermSpec:
        """Return a term with its output written out; prefix_rows with the length of its prefix."""
        output = self._output(term)
        self._made.prefixes.add(output)
        lengths = [t.length for terms in self._file.inputs.values() for t in terms
                   if t.term == 'prefix' and self._output(t) == output]
        return replace(term, output=output, length=max(
            (n for n in lengths if n is not None), default=None))

    def _phase(self, term: TermSpec) -> Fill:
        period, step_s = term.period_s, self._file.policy.period_s
        if not period or period <= 0:
            raise bad_term(term, 'needs period_s above 0')

        def fill(raw: Array, step: int) -> None:
            angle = 2 * math.pi * (step * step_s % period / period)
            raw[0] = math.sin(angle)
            raw[1] = math.cos(angle)
        return fill

    def _last_action(self, term: TermSpec) -> Leaf:
        output, width = self._output(term), self._widths[self._output(term)]
        wide = self._specs[action_shape(self._file.outputs[output], self._specs).port].dtype
        state = BufferSpec(f'obs.last_action.{output}', (width,), 'F64' if wide == 'F64' else 'F32',
                           Role.STATE, Space.HOST)
        self._made.last_actions[output] = state
        host = self._host

        def fill(raw: Array, _: int) -> None:
            raw[:] = host[state.name]
        return Leaf(term, width, fill=fill)

    def _prompt(self, place: str, term: TermSpec) -> Leaf:
        length = term.length
        if length is None or length < 1:
            raise bad_term(term, 'needs length of at least 1')
        state = BufferSpec(f'{place}.prompt', (length,), 'F64', Role.STATE, Space.HOST)
        host = self._host

        def fill(raw: Array, _: int) -> None:
            raw[:] = host[state.name]
        encoder = (None if term.encode in (None, 'bytes')
                   else load_function(term.encode or '', self._modules, term.path))
        self._made.prompts.append(Prompt(state, term.path, encoder, length))
        if term.topic is not None and term.topic not in self._made.prompt_topics:
            self._made.prompt_topics.append(term.topic)
        return Leaf(term, length, fill=fill)

    def _output(self, term: TermSpec) -> str:
        outputs = self._file.outputs
        if term.output is None and len(outputs) != 1:
            raise bad_term(term, f'does not say which output; write output: one of '
                           f'{", ".join(outputs)}')
        name = next(iter(outputs)) if term.output is None else term.output
        if name not in outputs:
            raise bad_term(term, f'names the output {name!r}; there are {", ".join(outputs)}')
        return name

    # --- topics

    def _connect(self) -> None:
        by_topic: dict[str, list[Leaf]] = {}
        for port in self._made.ports.values():
            for leaf in port.leaves:
                if leaf.measured:
                    by_topic.setdefault(leaf.topic, []).append(leaf)
        own = self._file.joint_states
        if own is not None:
            by_topic.setdefault(own, [])
        for topic, leaves in by_topic.items():
            kinds = {self._types[id(leaf)] for leaf in leaves}
            if topic == own:
                kinds.add(JOINT_STATE)
            if len(kinds) > 1:
                raise Refusal(Code.INVALID_POLICY_FILE, f'inputs: the topic {topic} is read as '
                              f'{" and as ".join(sorted(kinds))}; a topic has one type')
            self._made.sources[topic] = self._source(topic, next(iter(kinds)), leaves)

    def _source(self, topic: str, kind: str, leaves: Sequence[Leaf]) -> LevelSource | JointSource:
        if kind == JOINT_STATE and all(leaf.quantity >= 0 for leaf in leaves):
            return JointSource(topic, leaves, self._tracked())
        if any(leaf.quantity >= 0 for leaf in leaves):
            raise Refusal(Code.INVALID_POLICY_FILE, f'inputs: the topic {topic} is read both by '
                          'joint terms and by a function; let the function read another topic')
        source = LevelSource(topic, kind)
        for leaf in leaves:
            source.add(leaf, self._reads.get(id(leaf)))
        return source

    def _tracked(self) -> list[str]:
        """Return joints that no term need use: those of outputs, and of the guard."""
        joints = [j for output in self._file.outputs.values() for j in output.joints]
        terms = {leaf.spec.term for port in self._made.ports.values() for leaf in port.leaves}
        known = {*terms, *(f'joint_{q}' for q in QUANTITIES)}
        return joints + [name for name in self._file.guard.witness if name not in known]


def _counter(raw: Array, step: int) -> None:
    raw[0] = step


def _episode_start(raw: Array, step: int) -> None:
    raw[0] = step == 1
