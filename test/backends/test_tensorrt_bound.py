"""The execution path of the tensorrt backend, on doubles of TensorRT and of the CUDA runtime."""
from __future__ import annotations

from collections.abc import Iterator
import itertools
import logging
import threading
from typing import Any
import weakref

import numpy as np
import pytest

from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.backends.tensorrt_engine import load
from flashrt_ros.core.arena import Arena
from flashrt_ros.core.errors import Code, Refusal
from test.backends.cudart_double import Cudart
from test.backends.tensorrt_double import GRU, STATE, Context, Engine, Trt, forward, plan


class Rig:
    """A policy bound over an arena, both on doubles."""

    def __init__(self, folder: Any, *, name: str = 'tensorrt', **knobs: Any) -> None:
        self.rt = Cudart()
        rtx = name == 'tensorrt_rtx'
        self.trt = Trt(self.rt, name, '1.7.1.116' if rtx else '10.13.3.9')
        tag, version = (b'vtrt', (1, 7, 1, 116)) if rtx else (b'ftrt', (10, 13, 3, 9))
        about = knobs.pop('about', {})
        spec = knobs.pop('spec', {})
        for key, value in knobs.items():
            setattr(self.trt, key, value)
        (folder / 'gru.engine').write_bytes(plan(tag=tag, version=version, **about))
        self.policy, self.device = load(
            PolicySpec(folder / 'gru.engine', model_root=folder,
                       **{'state': STATE, **spec}),
            library=self.trt.library(),
            device_of=lambda ordinal, wait: CudaDevice(ordinal, wait=wait, rt=self.rt))
        self.arena = Arena(self.device, self.policy.layout())
        self.bound = self.policy.bind(self.arena.buffers, self.device)
        for n in spec.get('state', STATE):
            self.write(n, np.zeros_like(self.read(n)))

    def read(self, name: str) -> Any:
        spec = self.policy.layout()[name]
        return self.arena.read(name).view(spec.storage).reshape(spec.shape)

    def write(self, name: str, value: Any) -> None:
        spec = self.policy.layout()[name]
        self.arena.write(name, np.asarray(value, spec.storage).reshape(-1).view(np.uint8))

    def ticks(self, n: int) -> list[Any]:
        out = []
        for i in range(n):
            self.write('obs', np.full((1, 6), i, 'f4'))
            self.bound.enqueue()
            out.append(self.read('actions').copy())
        return out

    def close(self) -> None:
        self.bound.close()
        self.arena.close()
        self.policy.close()
        self.device.close()


def expected(n: int) -> tuple[list[Any], dict[str, Any]]:
    """Return actions and final state as the model alone computes them."""
    state: dict[str, Any] = {'h_in': np.zeros((1, 1, 8), 'f4'), 'c_in': np.zeros((1, 1, 8), 'f4'),
                             't_in': np.zeros((), 'i8')}
    actions = []
    for i in range(n):
        out = forward({**state, 'obs': np.full((1, 6), i, 'f4')})
        state = {k: np.asarray(out[o]).reshape(state[k].shape) for k, o in STATE.items()}
        actions.append(out['actions'])
    return actions, state


@pytest.fixture(params=['tensorrt', 'tensorrt_rtx'])
def rig(request: Any, tmp_path: Any) -> Iterator[Rig]:
    r = Rig(tmp_path, name=request.param)
    yield r
    r.close()


def check_runs(rig: Rig) -> None:
    """Five ticks compute what the model computes, and leave its state in STATE."""
    want, state = expected(5)
    got = rig.ticks(5)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a.reshape(4), b)
    for name, value in state.items():
        np.testing.assert_array_equal(rig.read(name), value)


def test_p22_ticks_compute_the_model_and_feed_its_state_back(rig: Rig) -> None:
    assert rig.bound.captured
    check_runs(rig)


def test_p17_a_tick_is_one_launch_and_binds_nothing(rig: Rig) -> None:
    rig.ticks(2)
    bound = [c._bound for c in rig.trt.contexts]
    blocks = dict(rig.rt.blocks)
    del rig.rt.log[:]
    for _ in range(50):
        rig.bound.enqueue()
    assert set(rig.rt.log) <= {'cudaSetDevice', 'cudaGraphLaunch'}
    assert rig.rt.log.count('cudaGraphLaunch') == 50
    assert [c._bound for c in rig.trt.contexts] == bound == [len(GRU)]
    assert rig.rt.blocks == blocks


def test_no_output_is_bound_onto_an_input(rig: Rig) -> None:
    context = rig.trt.contexts[0]
    places = {n: (a, a + context._array(n).nbytes) for n, a in context._addresses.items()}
    places['activations'] = (context._memory[0], sum(context._memory))
    ordered = sorted(places.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ordered))
    for n, buffer in rig.arena.buffers.items():
        assert context._addresses[n] == buffer.ptr


@pytest.mark.parametrize('knob', ['capturable', 'broken_capture'])
@pytest.mark.parametrize('name', ['tensorrt', 'tensorrt_rtx'])
def test_an_engine_that_cannot_be_captured_runs_uncaptured_and_says_so_once(
        knob: str, name: str, tmp_path: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, 'flashrt_ros.tensorrt'):
        rig = Rig(tmp_path, name=name, **{knob: knob != 'capturable'})
        second = rig.policy.bind(Arena(rig.device, rig.policy.layout()).buffers, rig.device)
    assert not rig.bound.captured
    assert not second.captured
    assert sum('uncaptured' in r.message for r in caplog.records) == 1
    assert rig.rt.last == 0, 'an error of the failed capture is left for the next call'
    check_runs(rig)
    rig.close()


@pytest.mark.parametrize('name', ['tensorrt', 'tensorrt_rtx'])
def test_a_capture_that_breaks_at_its_end_leaves_no_error_behind(name: str, tmp_path: Any
                                                                ) -> None:
    """Without anything to feed back, only cudaStreamEndCapture tells that it went wrong."""
    tensors = [t for t in GRU if t[0] in ('obs', 'actions')]
    rig = Rig(tmp_path, name=name, broken_capture=True, about={'tensors': tensors},
              spec={'state': {}})
    assert not rig.bound.captured
    rig.write('obs', np.arange(6, dtype='f4'))
    rig.bound.enqueue()
    np.testing.assert_array_equal(rig.read('actions').reshape(4), [0, 2, 4, 6])
    rig.close()


def test_rtx_kernels_are_compiled_before_they_run_and_its_own_graphs_are_off(tmp_path: Any
                                                                            ) -> None:
    rig = Rig(tmp_path, name='tensorrt_rtx')
    config = rig.bound._config
    assert config.dynamic_shapes_kernel_specialization_strategy.name == 'EAGER'
    assert config.cuda_graph_strategy.name == 'DISABLED'
    rig.close()


def test_fork_makes_a_second_context_with_memory_of_its_own(rig: Rig) -> None:
    arena = Arena(rig.device, rig.policy.layout())
    fork = rig.policy.bind(arena.buffers, rig.device)
    a, b = rig.trt.contexts
    assert not set(a._addresses.values()) & set(b._addresses.values())
    assert a._memory[0] != b._memory[0]
    present = {n: rig.read(n).copy() for n in STATE}
    for _ in range(3):
        fork.enqueue()
    for n, value in present.items():
        np.testing.assert_array_equal(rig.read(n), value)
    fork.close()
    arena.close()
    check_runs(rig)


def test_an_engine_without_activations_needs_no_device_memory(tmp_path: Any) -> None:
    rig = Rig(tmp_path, about={'activations': 0})
    assert rig.trt.contexts[0]._memory == (0, 0)
    check_runs(rig)
    rig.close()


def test_open_dimensions_take_the_given_shapes(tmp_path: Any) -> None:
    tensors = [[n, i, [-1, *s[1:]] if s else s, d] for n, i, s, d in GRU]
    shapes = {n: tuple([1, *s[1:]]) for n, i, s, _ in GRU if i and s}
    for name in ('tensorrt', 'tensorrt_rtx'):
        rig = Rig(tmp_path, name=name, about={'tensors': tensors, 'open': True},
                  spec={'shapes': shapes})
        assert rig.policy.layout()['actions'].shape == (1, 4)
        check_runs(rig)
        rig.close()


def test_a_published_output_that_is_fed_back_is_copied_from_its_port(tmp_path: Any) -> None:
    rig = Rig(tmp_path, spec={'options': {'publish': ['h_out']}})
    check_runs(rig)
    np.testing.assert_array_equal(rig.read('h_out'), rig.read('h_in'))
    rig.close()


def test_closing_gives_everything_back_in_order(tmp_path: Any) -> None:
    rig = Rig(tmp_path)
    del rig.rt.log[:]
    rig.close()
    calls = [c for c in rig.rt.log if c in ('cudaEventSynchronize', 'cudaGraphExecDestroy',
                                            'cudaFree')]
    assert calls[:3] == ['cudaEventSynchronize', 'cudaGraphExecDestroy', 'cudaFree']
    assert rig.rt.blocks == {}


def test_no_memory_for_a_context_is_named(tmp_path: Any) -> None:
    with pytest.raises(Refusal, match='OutOfMemory') as refused:
        Rig(tmp_path, memory_fails=True)
    assert refused.value.code is Code.NO_MEMORY


def test_activation_memory_that_is_not_taken_is_noticed(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Cudart, 'owns', lambda *_: False)
    with pytest.raises(Refusal, match=r'activation memory is not taken: .*device memory 0x'):
        Rig(tmp_path)


def test_a_failing_run_says_why_and_leaves_no_scratch(tmp_path: Any) -> None:
    rig = Rig(tmp_path, capturable=False)
    rig.trt.contexts[-1]._addresses.pop('obs')
    with pytest.raises(Refusal, match='a tensor has no address') as refused:
        rig.bound.enqueue()
    assert refused.value.code is Code.BACKEND
    rig.close()


@pytest.mark.parametrize('name', ['tensorrt', 'tensorrt_rtx'])
def test_a_context_that_failed_in_a_capture_is_gone_before_the_next_is_made(
        name: str, tmp_path: Any, monkeypatch: Any) -> None:
    made: list[Any] = []
    alive: list[int] = []
    create = Engine.create_execution_context

    def watched(self: Engine, strategy: Any) -> Any:
        alive.append(sum(r() is not None for r in made))
        context = create(self, strategy)
        self._trt.contexts.clear()
        made.append(weakref.ref(context))
        return context

    monkeypatch.setattr(Engine, 'create_execution_context', watched)
    rig = Rig(tmp_path, name=name, broken_capture=True)
    assert alive == [0, 0]
    rig.close()


@pytest.mark.parametrize(('failing', 'code'), [(1, Code.NO_MEMORY), (2, None)])
def test_memory_that_runs_out_in_a_run_is_named_but_in_a_capture_it_only_ends_that(
        failing: int, code: Code | None, tmp_path: Any, monkeypatch: Any) -> None:
    run, calls = Context.execute_async_v3, itertools.count(1)

    def enqueue(self: Context, stream_handle: int) -> bool:
        if next(calls) == failing:
            return self._error('Error Code 2: OutOfMemory (Requested size was 1 bytes.)')
        return run(self, stream_handle)

    monkeypatch.setattr(Context, 'execute_async_v3', enqueue)
    if code is None:
        rig = Rig(tmp_path)
        assert not rig.bound.captured
        check_runs(rig)
        rig.close()
        return
    with pytest.raises(Refusal, match=r'could not enqueue.*OutOfMemory') as refused:
        Rig(tmp_path)
    assert refused.value.code is code


def test_another_thread_closes_with_its_card_made_current_first(tmp_path: Any) -> None:
    rig = Rig(tmp_path)
    del rig.rt.log[:]
    thread = threading.Thread(target=rig.bound.close)
    thread.start()
    thread.join()
    assert rig.rt.log[0] == 'cudaSetDevice'
    rig.close()


def test_the_double_notices_an_output_on_an_input(rig: Rig) -> None:
    """The double itself: it would show a backend that binds h_out onto h_in."""
    context = rig.trt.contexts[0]
    context._addresses['c_out'] = context._addresses['c_in']
    with pytest.raises(AssertionError):
        check_runs(rig)
