"""A module with state in attributes as a `TensorProgram`: all of it in buffers, the rest found out.

Before the first layout the program is run twice on made-up inputs, with its attributes compared
before and after: that gives the outputs' shapes, and refuses by name what changed and is not
declared, before a capsule could miss it. All attributes are put back.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import itertools
from typing import Any

from numpy.typing import NDArray

from flashrt_ros.backends.digests import process_generators
from flashrt_ros.backends.ports import TensorInfo, buffer_name, port_specs
from flashrt_ros.backends.tensor_program import TICK, Steps, Tensors, import_torch, torch_dtype
from flashrt_ros.backends.torch_export import dtype_of
from flashrt_ros.backends.torch_state import BufferSlot, MirrorSlot, advice
from flashrt_ros.backends.torch_walk import digest, globals_of, walk
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import Layout, digest_of

PREFILL = 'prefill'
Slot = BufferSlot | MirrorSlot


class ModuleProgram:
    """A callable over tensors, its inputs in order, and the slots of its state."""

    def __init__(self, root: Any, call: Callable[..., Any], inputs: Sequence[TensorInfo],
                 slots: Sequence[Slot], *, feedback: Mapping[str, str],
                 options: Mapping[str, Any], weights: str, source: Any = None) -> None:
        self.root = root
        self.slots = list(slots)
        self._movable = [slot for slot in self.slots if not slot.fixed]
        self._mirrors = [slot for slot in self.slots if slot.host]
        self._call = call
        self._inputs = list(inputs)
        self._feedback = {buffer_name(i): buffer_name(o) for i, o in feedback.items()}
        self._options = options
        self._weights = weights
        self._source = source
        self._device = 'cpu'
        self._layout: Layout | None = None
        self._at: Tensors | None = None     # whose tensors the attributes are
        self._tensor = import_torch().Tensor
        self._refuse_shared()

    def _refuse_shared(self) -> None:
        owners: dict[int, str] = {}
        for slot in self.slots:
            if isinstance(slot, BufferSlot) and slot.first.numel():
                if slot.storage in owners:
                    raise Refusal(Code.UNSUPPORTED, f'{owners[slot.storage]} and {slot.path} share '
                                  'memory; in buffers of their own they would not; clone one')
                owners[slot.storage] = slot.path

    # --- what a TensorProgram has

    def layout(self) -> Layout:
        """Return ports and state. The first call runs the program; see above."""
        if self._layout is None:
            self._layout = self._probe()
        return self._layout

    def initial(self) -> dict[str, NDArray[Any]]:
        """Return the values that the file or the factory gave, in storage type."""
        out = {}
        for slot in self.slots:
            specs = {s.name: s for s in slot.specs()}
            for name, data in slot.initial().items():
                out[name] = data.view(specs[name].storage).reshape(specs[name].shape)
        return out

    def identity(self) -> tuple[Mapping[str, str], Mapping[str, str]]:
        """Return the digests of weights, code and feedback pairs."""
        return {'weights': self._weights, 'feedback': digest_of(self._feedback)}, {}

    def to(self, device: Any) -> None:
        """Bring all modules to a device."""
        torch = import_torch()
        self._device = str(device)
        if self._device != 'cpu':
            for thing in (self.root, *getattr(self.root, '__dict__', {}).values()):
                if isinstance(thing, torch.nn.Module):
                    thing.to(device)
            self._at = None

    def programs(self) -> Mapping[str, Callable[[Tensors], None]]:
        """Return `tick`."""
        return {TICK: self.tick}

    def constants(self) -> dict[str, Any]:
        """Return every attribute that is not declared state, by path: none may change."""
        covered = {slot.path for slot in self.slots}
        found = {path: value for path, value in walk(self.root) if path not in covered}
        return {**found, **(globals_of(self._source) if self._source is not None else {})}

    def digests(self) -> dict[str, str]:
        """Return a digest of each of `constants`, and of generators that nobody may draw from."""
        torch = import_torch()
        found = {path: digest(value) for path, value in self.constants().items()}
        found["torch's global generator"] = digest(torch.get_rng_state())
        return {**found, **process_generators()}

    @property
    def in_python(self) -> str | None:
        """The first piece of state that is decided in Python, so that no graph can hold it."""
        return next((slot.path for slot in self.slots if slot.host), None)

    # --- running

    def tick(self, tensors: Tensors) -> None:
        """Run once over one live set's tensors."""
        outputs = self._run(tensors)
        for name, value in outputs.items():
            buffer = tensors.get(name)
            if buffer is not None:
                buffer.copy_(self._fitting(name, value, buffer))
        if self._feedback or self._movable:
            self._settle([(tensors[i], self._fitting(o, outputs[o], tensors[i]))
                          for i, o in self._feedback.items()], tensors)

    def _load(self, tensors: Tensors) -> None:
        attached = self._at is tensors
        for slot in self._mirrors if attached else self.slots:
            slot.load(tensors)
        self._at = tensors

    def _run(self, tensors: Tensors) -> dict[str, Any]:
        self._load(tensors)
        return self._named(self._call(*[tensors[t.name] for t in self._inputs]))

    def _named(self, result: Any) -> dict[str, Any]:
        """Return a program's result by output name."""
        given = self._options['outputs']
        if isinstance(result, self._tensor):  # first, since most policies return one tensor
            names, values = given or ('actions',), [result]
        elif isinstance(result, Mapping):
            names, values = [str(k) for k in result], list(result.values())
        elif isinstance(result, list | tuple):
            values = list(result)
            names = given or getattr(result, '_fields', None) or [
                'actions', *(f'output_{i}' for i in range(1, len(values)))]
        else:
            raise Refusal(Code.UNSUPPORTED, f'the program returns {type(result).__name__}; return '
                          'a tensor, a tuple or a dict of tensors')
        if len(names) != len(values):
            raise Refusal(Code.INVALID_POLICY_FILE, f'policy.options.outputs: names {list(names)} '
                          f'for {len(values)} outputs')
        for name, value in zip(names, values, strict=True):
            if not isinstance(value, self._tensor):
                raise Refusal(Code.UNSUPPORTED, f'output {name} is {type(value).__name__}, not a '
                              'tensor')
        return {buffer_name(n): v for n, v in zip(names, values, strict=True)}

    @staticmethod
    def _fitting(name: str, value: Any, buffer: Any) -> Any:
        if value.shape != buffer.shape or value.dtype != buffer.dtype:
            raise Refusal(Code.BACKEND, f'output {name} is {value.dtype} {tuple(value.shape)} now; '
                          f'at first it was {buffer.dtype} {tuple(buffer.shape)}')
        return value

    def _settle(self, pairs: list[tuple[Any, Any]], tensors: Tensors) -> None:
        """Copy what was fed back or assigned into the buffers, and put the buffers back.

        A value may share memory with a buffer that is written here as well (two attributes that
        change places), so such values are set aside first.
        """
        moved = [(slot, m) for slot in self._movable if (m := slot.moved(tensors))]
        if not moved and not pairs:
            return
        if moved:
            self._refuse_alias()
        every = [*pairs, *(pair for _, m in moved for pair in m)]
        targets = {t.untyped_storage().data_ptr() for t, _ in every}
        ready = [(t, v.clone() if v.untyped_storage().data_ptr() in targets else v)
                 for t, v in every if v is not t]
        for target, value in ready:
            target.copy_(value)
        for slot, _ in moved:
            if not slot.host:
                slot.load(tensors)

    def _refuse_alias(self) -> None:
        """Refuse two attributes that came to share memory: a later write to one changes both."""
        spans = sorted((*_span(t), slot.path) for slot in self.slots for t in slot.held()
                       if t.numel())
        for (_, end, a), (start, _, b) in itertools.pairwise(spans):
            if start < end and a != b:
                raise Refusal(Code.UNSUPPORTED, f'{a} and {b} came to share memory during a tick; '
                              'in buffers of their own they would not; clone one')

    # --- finding out

    def _probe(self) -> Layout:
        torch = import_torch()
        state = [spec for slot in self.slots for spec in slot.specs()]
        tensors = {s.name: torch.from_numpy(array.copy().reshape(-1).view('u1')).to(self._device)
                   .view(torch_dtype(s.dtype)).view(s.shape)
                   for s in state for array in [self.initial()[s.name]]}
        for t in self._inputs:
            tensors[t.name] = torch.zeros(t.shape, dtype=torch_dtype(t.dtype),
                                          device=self._device)
        values, before = self.constants(), self.digests()
        generator = torch.get_rng_state()
        try:
            with torch.no_grad():
                outputs = self._made_up_ticks(tensors)
            self._compare(values, before)
        finally:
            torch.set_rng_state(generator)
            self._put_back()
        infos = [TensorInfo(n, tuple(v.shape), dtype_of(v)) for n, v in outputs.items()]
        o = self._options
        ports = port_specs(self._inputs, infos, self._feedback, o['stateless'], o['publish'],
                           o['ranges'])
        names = {p.name for p in ports}
        for spec in state:
            if spec.name in names:
                raise Refusal(Code.UNSUPPORTED, f'attribute {spec.name} is state and has the name '
                              'of an input or output; rename one (policy.options.outputs names '
                              'outputs)')
        return Layout([*ports, *state])

    def _made_up_ticks(self, tensors: Tensors) -> dict[str, Any]:
        torch = import_torch()
        outputs: dict[str, Any] = {}
        for k in range(2):
            for t in self._inputs:
                x = tensors[t.name]
                if x.is_floating_point():
                    x.copy_(torch.linspace(-1, 1, x.numel() or 1).add(0.1 * k).reshape(x.shape))
            given = {t.name: tensors[t.name].clone() for t in self._inputs}
            try:
                outputs = self._run(tensors)
                self._settle([], tensors)
            except Refusal:
                raise
            except Exception as e:
                shapes = ', '.join(f'{t.name} {t.dtype} {list(t.shape)}' for t in self._inputs)
                raise Refusal(Code.BACKEND, f'the program raised {type(e).__name__} for {shapes}: '
                              f'{e}') from e
            for name, x in given.items():
                if not torch.equal(x, tensors[name]):
                    raise Refusal(Code.UNSUPPORTED, f'input {name} is written in place; clone it '
                                  'first')
        return outputs

    def _compare(self, values: Mapping[str, Any], before: Mapping[str, str]) -> None:
        """Refuse by name whatever is not as it was."""
        now, after = self.constants(), self.digests()
        changed = [p for p in {**before, **after} if before.get(p) != after.get(p)]
        drawn = [p for p in changed if 'global generator' in p]
        if drawn:
            raise Refusal(Code.UNDECLARED_STATE, f'the program draws from {drawn[0]}, which '
                          'belongs to the whole process; draw from a counter that is a buffer, or '
                          'declare a generator of its own')
        if changed:
            raise Refusal(Code.UNDECLARED_STATE, 'the program keeps state outside its buffers: '
                          + '; '.join(advice(p, values.get(p), now.get(p)) for p in changed[:5])
                          + ('; …' if len(changed) > 5 else ''))

    def _put_back(self) -> None:
        torch = import_torch()
        fresh = {name: torch.from_numpy(array.copy().reshape(-1).view('u1')).to(self._device)
                 for name, array in self.initial().items()}
        self._load({s.name: fresh[s.name].view(torch_dtype(s.dtype)).view(s.shape)
                    for slot in self.slots for s in slot.specs()})
        self._at = None


def _span(tensor: Any) -> tuple[int, int]:
    """Return where a tensor's elements begin and end."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


class PromptedProgram(ModuleProgram):
    """The same for an object that takes in prompts through a method `prefill`."""

    def __init__(self, *args: Any, prefill: Callable[..., Any], prompts: Sequence[str],
                 **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prefill = prefill
        self._prompts = [buffer_name(n) for n in prompts]
        unknown = set(self._prompts) - {t.name for t in self._inputs}
        if unknown:
            raise Refusal(Code.INVALID_POLICY_FILE, f'prefill takes {sorted(unknown)[0]}, which is '
                          'no input of the tick; a prompt is an input of both')

    def programs(self) -> Mapping[str, Callable[[Tensors], None]]:
        """Return `tick` and `prefill`."""
        return {**super().programs(), PREFILL: self._take_prompt}

    def prefill(self, steps: Steps) -> None:
        """Order the program that takes in the prompt."""
        steps.run(PREFILL)

    def _take_prompt(self, tensors: Tensors) -> None:
        self._load(tensors)
        self._prefill(*(tensors[n] for n in self._prompts))
        self._settle([], tensors)
