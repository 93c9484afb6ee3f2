"""The host device: what every other device must agree with."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flashrt_ros.backends.host import HostDevice, cpu_name
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.layout import ALIGNMENT, Space


@pytest.fixture
def device() -> HostDevice:
    return HostDevice()


@pytest.mark.parametrize('nbytes', [1, 255, 256, 257, 100_000])
def test_a_block_is_aligned_zeroed_and_as_long_as_asked(device, nbytes):
    block = device.alloc(nbytes, Space.DEVICE)
    assert block.ptr % ALIGNMENT == 0
    assert block.nbytes == nbytes
    assert block.space is Space.DEVICE
    view = device.view(block, 0, nbytes)
    assert view.ctypes.data == block.ptr
    assert len(view) == nbytes
    assert not view.any()


def test_a_view_is_the_memory_itself(device):
    block = device.alloc(64, Space.HOST)
    device.view(block, 8, 4)[:] = 7
    assert device.view(block, 0, 64)[8:12].tolist() == [7, 7, 7, 7]


def test_too_much_memory_is_refused_by_name(device):
    with pytest.raises(Refusal, match='bytes of host memory') as e:
        device.alloc(1 << 62, Space.HOST)
    assert e.value.code is Code.NO_MEMORY


def test_copy_moves_exactly_the_bytes_asked_for(device):
    a, b = device.alloc(16, Space.DEVICE), device.alloc(16, Space.HOST)
    device.view(a, 0, 16)[:] = np.arange(16)
    device.copy(b, 4, a, 1, 3)
    assert device.view(b, 0, 16).tolist() == [0] * 4 + [1, 2, 3] + [0] * 9


@pytest.mark.parametrize(('dst', 'src'), [(14, 0), (0, 14), (-1, 0)])
def test_copy_past_the_end_fails_instead_of_copying_less(device, dst, src):
    a, b = device.alloc(16, Space.DEVICE), device.alloc(16, Space.HOST)
    with pytest.raises(ValueError, match='of a block of 16'):
        device.copy(b, dst, a, src, 3)


def test_a_single_byte_is_not_spread_over_a_longer_range(device):
    a, b = device.alloc(1, Space.DEVICE), device.alloc(16, Space.HOST)
    with pytest.raises(ValueError, match='of a block of 1'):
        device.copy(b, 0, a, 0, 16)


def test_overlapping_ranges_copy_as_if_through_a_third(device):
    a = device.alloc(8, Space.DEVICE)
    device.view(a, 0, 8)[:] = np.arange(8)
    device.copy(a, 2, a, 0, 6)
    assert device.view(a, 0, 8).tolist() == [0, 1, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize('method', ['copy2d', 'side_copy2d'])
def test_copy2d_moves_rows_and_leaves_what_lies_between(device, method):
    a, b = device.alloc(32, Space.DEVICE), device.alloc(32, Space.DEVICE)
    device.view(a, 0, 32)[:] = np.arange(32)
    device.view(b, 0, 32)[:] = 99
    getattr(device, method)(b, 1, 5, a, 2, 8, 3, 4)
    out = device.view(b, 0, 32)
    rows = [out[1 + 5 * i:4 + 5 * i].tolist() for i in range(4)]
    assert rows == [[2, 3, 4], [10, 11, 12], [18, 19, 20], [26, 27, 28]]
    assert (out == 99).sum() == 32 - 12


def test_copy2d_of_no_rows_does_nothing(device):
    a = device.alloc(8, Space.DEVICE)
    device.copy2d(a, 0, 4, a, 4, 4, 4, 0)


def test_copy2d_past_the_end_fails(device):
    a = device.alloc(16, Space.DEVICE)
    with pytest.raises(ValueError, match='of a block of 16'):
        device.copy2d(a, 0, 8, a, 4, 8, 8, 2)


def test_events_have_fired_when_made(device):
    event = device.mark()
    assert device.done(event)
    device.sync(event)
    device.sync()


def test_the_cpu_names_what_kernels_are_chosen_by(tmp_path: Path):
    info = tmp_path / 'cpuinfo'
    info.write_text('processor\t: 0\nmodel name\t: A Chip\nflags\t\t: fpu avx2 fma sse4_2\n\n'
                    'processor\t: 1\nmodel name\t: Another\n')
    assert cpu_name(info) == 'A Chip: sse4_2 fma avx2'
    assert cpu_name(tmp_path / 'absent')
    assert set(HostDevice().identity()) == {'arch', 'cpu'}
