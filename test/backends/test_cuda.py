"""The CUDA device against the protocol's words, on a double of the runtime and on a real card."""
from __future__ import annotations

import threading

import numpy as np
import pytest

from flashrt_ros.backends.cuda import CudaDevice
from flashrt_ros.backends.cuda_graph import CudaGraph, capture
from flashrt_ros.core.arena import Arena
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import BufferSpec, Layout, Role, Space
from test.backends.cudart_double import Cudart
from test.gpu import cuda_device, cuda_torch


@pytest.fixture(params=['double', pytest.param('card', marks=pytest.mark.gpu)])
def device(request):
    return CudaDevice(rt=Cudart()) if request.param == 'double' else cuda_device(request)


@pytest.fixture
def card(request):
    return cuda_device(request)


def put(device, block, data) -> None:
    stage = device.alloc(len(data), Space.HOST)
    device.view(stage, 0, len(data))[:] = data
    device.copy(block, 0, stage, 0, len(data))
    device.sync()
    device.free(stage)


def get(device, block) -> np.ndarray:
    stage = device.alloc(block.nbytes, Space.HOST)
    device.copy(stage, 0, block, 0, block.nbytes)
    device.sync()
    data = device.view(stage, 0, block.nbytes).copy()
    device.free(stage)
    return data


def test_blocks_are_zeroed_aligned_and_in_their_space(device):
    for space in Space:
        block = device.alloc(1000, space)
        assert block.ptr % 256 == 0
        assert block.space is space
        assert not get(device, block).any()
        assert (device.view(block, 0, 10) is None) is (space is Space.DEVICE)
        device.free(block)


def test_copies_carry_bytes_between_all_spaces_in_order(device):
    data = np.random.default_rng(0).integers(0, 256, 4096, np.uint8)
    a, b = device.alloc(4096, Space.DEVICE), device.alloc(4096, Space.DEVICE)
    put(device, a, data)
    device.copy(b, 0, a, 0, 4096)
    device.copy(a, 0, a, 2048, 2048)      # ordered behind the first: b has the old bytes
    assert np.array_equal(get(device, b), data)
    assert np.array_equal(get(device, a)[:2048], data[2048:])
    for block in (a, b):
        device.free(block)


@pytest.mark.parametrize('copy', ['copy2d', 'side_copy2d'])
@pytest.mark.parametrize(('width', 'height', 'dst_pitch', 'src_pitch'),
                         [(16, 5, 64, 32), (32, 4, 32, 32), (48, 1, 100, 90), (7, 3, 9, 11)])
def test_copy2d_moves_exactly_its_rows(device, copy, width, height, dst_pitch, src_pitch):
    data = np.random.default_rng(1).integers(1, 256, 1024, np.uint8)
    a, b = device.alloc(1024, Space.DEVICE), device.alloc(1024, Space.DEVICE)
    put(device, a, data)
    getattr(device, copy)(b, 8, dst_pitch, a, 24, src_pitch, width, height)
    want = np.zeros(1024, np.uint8)
    for i in range(height):
        want[8 + i * dst_pitch:][:width] = data[24 + i * src_pitch:][:width]
    assert np.array_equal(get(device, b), want)  # get's copy waits for the side stream
    for block in (a, b):
        device.free(block)


def test_nothing_beyond_a_block_is_touched(device):
    a = device.alloc(100, Space.DEVICE)
    for call in (lambda: device.copy(a, 0, a, 50, 51), lambda: device.copy(a, -1, a, 0, 1),
                 lambda: device.copy2d(a, 0, 60, a, 0, 10, 50, 2),
                 lambda: device.view(a, 90, 11)):
        with pytest.raises(ValueError, match='block of 100'):
            call()
    device.free(a)


def test_allocation_that_does_not_fit_says_no_memory_and_leaves_the_device_well(device):
    for space in Space:
        with pytest.raises(Refusal) as refused:
            device.alloc(1 << 50, space)
        assert refused.value.code is Code.NO_MEMORY
        assert 'cudaMalloc' in refused.value.message or 'cudaHostAlloc' in refused.value.message
    device.free(device.alloc(16, Space.DEVICE))
    device.sync()


def test_an_error_names_the_call(device):
    if isinstance(device.rt, Cudart):
        with pytest.raises(Refusal, match='cudaMemcpyAsync failed: cudaErrorInvalidValue'):
            device._copy(16, 32, 8, device.stream)
    else:
        with pytest.raises(Refusal, match='cudaSetDevice failed: cudaErrorInvalidDevice'):
            device.call('cudaSetDevice', 4711)
    with pytest.raises(Refusal, match=r'CUDA device 99 of \d+'):
        CudaDevice(99, rt=device.rt)
    with pytest.raises(Refusal, match='spin or block'):
        CudaDevice(rt=device.rt, wait='poll')


def test_events_fire_and_their_handles_are_used_again(device):
    events = [device.mark() for _ in range(8)]
    device.sync(events[-1])
    assert all(device.done(e) for e in events)
    del events
    spare = len(device._spare_events)
    for _ in range(100):
        device.sync(device.mark())
    assert len(device._spare_events) == spare


def test_a_graph_does_its_work_at_launch_and_not_at_capture(device):
    a, b = device.alloc(64, Space.DEVICE), device.alloc(64, Space.DEVICE)
    put(device, a, np.full(64, 7, np.uint8))
    graph = capture(device, lambda stream: device._copy(b.ptr, a.ptr, 64, stream))
    assert not get(device, b).any()
    for value in (7, 9):
        put(device, a, np.full(64, value, np.uint8))
        graph.launch()
        assert (get(device, b) == value).all()
    graph.close()
    for block in (a, b):
        device.free(block)


def test_a_capture_that_fails_leaves_the_device_well(device):
    def work(stream):
        raise RuntimeError('mid-way')
    with pytest.raises(RuntimeError, match='mid-way'):
        capture(device, work)
    with pytest.raises(Refusal, match=r'cudaMalloc|cudaStreamSynchronize'):
        capture(device, lambda stream: device.call('cudaStreamSynchronize', stream))
    device.free(device.alloc(16, Space.DEVICE))
    device.sync()


def test_arena_gives_buffers_of_both_spaces(device):
    layout = Layout([BufferSpec('x', (3,), 'F32', Role.STATE),
                     BufferSpec('h', (5,), 'I64', Role.STATE, Space.HOST)])
    arena = Arena(device, layout)
    assert arena.buffers['x'].array is None
    assert arena.buffers['h'].array is not None
    for name, data in (('x', np.arange(3, dtype=np.float32)), ('h', np.arange(5))):
        arena.write(name, data.view(np.uint8))
        assert arena.read(name).tobytes() == data.tobytes()
    arena.close()


def test_identity_names_card_and_versions(device):
    fields = device.identity()
    assert fields['cuda.arch'].startswith('sm_')
    assert {'cuda.device', 'cuda.driver', 'cuda.runtime', 'cuda.alignment'} <= set(fields)


def test_without_the_bindings_the_refusal_says_how_to_get_them(monkeypatch):
    import builtins
    real = builtins.__import__

    def missing(name, *args, **kw):
        if name.startswith('cuda'):
            raise ImportError('none here')
        return real(name, *args, **kw)
    monkeypatch.setattr(builtins, '__import__', missing)
    with pytest.raises(Refusal, match=r"pip install 'flashrt_ros\[cuda\]'") as refused:
        CudaDevice()
    assert refused.value.code is Code.UNSUPPORTED


# -- on a card only -----------------------------------------------------------------------


def sleep_graph(torch, device, cycles: int) -> CudaGraph:
    """Return a graph that only keeps the card busy."""
    def work(stream):
        with torch.cuda.stream(torch.cuda.ExternalStream(int(stream))):
            torch.cuda._sleep(cycles)
    torch.cuda._sleep(10)
    torch.cuda.synchronize()
    return capture(device, work)


@pytest.mark.gpu
def test_side_copy_passes_a_running_program_and_the_next_order_waits_for_it(card, request):
    torch = cuda_torch(request)
    graph = sleep_graph(torch, card, 200_000_000)       # about 0.1 s
    a, b = card.alloc(1 << 20, Space.DEVICE), card.alloc(1 << 20, Space.DEVICE)
    put(card, a, np.full(1 << 20, 3, np.uint8))
    graph.launch()
    running = card.mark()
    thread = threading.Thread(target=card.side_copy2d,
                              args=(b, 0, 1 << 19, a, 0, 1 << 19, 1 << 18, 2))
    thread.start()
    thread.join()
    card.call('cudaStreamSynchronize', card.side)
    assert not card.done(running), 'the side copy waited for the program'
    put(card, a, np.full(1 << 20, 4, np.uint8))
    assert (get(card, b).reshape(2, -1)[:, :1 << 18] == 3).all()
    assert card.done(running)
    graph.close()
    for block in (a, b):
        card.free(block)


@pytest.mark.gpu
def test_capture_is_not_disturbed_by_other_threads(card, request):
    torch = cuda_torch(request)
    started, allocated = threading.Event(), threading.Event()

    def other():
        started.wait(10)
        card.free(card.alloc(1 << 20, Space.DEVICE))
        torch.zeros(1 << 20, device='cuda')
        allocated.set()

    def work(stream):
        started.set()
        assert allocated.wait(10)
    thread = threading.Thread(target=other)
    thread.start()
    capture(card, work).close()
    thread.join()


@pytest.mark.gpu
@pytest.mark.parametrize('wait', ['spin', 'block'])
def test_waiting_returns_after_the_work(request, wait):
    torch = cuda_torch(request)
    device = cuda_device(request, wait=wait)
    graph = sleep_graph(torch, device, 20_000_000)
    graph.launch()
    event = device.mark()
    assert not device.done(event)
    device.sync(event)
    assert device.done(event)
    graph.close()
