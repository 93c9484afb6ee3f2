"""Pictures from cameras: raw and compressed, as drivers send them."""
from __future__ import annotations

import array
import io
from types import SimpleNamespace
from typing import Any
import zlib

import numpy as np
from PIL import Image
import pytest

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import images
from test.ingest.messages import T0, Bound, S, header, observe, term

RGB = np.arange(4 * 6 * 3, dtype=np.uint8).reshape(4, 6, 3) * 3       # (4, 6), all different
RED, BLUE = np.array([250, 20, 10]), np.array([10, 20, 250])


def image(pixels: np.ndarray, encoding: str, *, pad: int = 0, big: bool = False,
          stamp: int = T0) -> SimpleNamespace:
    """An Image; `pad` bytes follow each row."""
    height, width = pixels.shape[:2]
    rows = pixels.astype(pixels.dtype.newbyteorder('>' if big else '<')).tobytes()
    step = len(rows) // height
    data = b''.join(rows[i * step:(i + 1) * step] + b'\xee' * pad for i in range(height))
    return SimpleNamespace(header=header(stamp), height=height, width=width, encoding=encoding,
                           is_bigendian=int(big), step=step + pad, data=data)


def compressed(data: bytes, text: str) -> SimpleNamespace:
    return SimpleNamespace(header=header(T0), format=text, data=data)


def packed(pixels: np.ndarray, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **options)
    return file.getvalue()


def camera(size: tuple[int, int] = (4, 6), *, dtype: str = 'U8', channels: int = 3,
           topic: str = 'camera', **keys: Any) -> Bound:
    layout = keys.get('layout', 'HWC')
    shape = (1, channels, *size) if layout == 'CHW' else (1, *size, channels)
    return observe(term('image', topic, size=size, **keys), shape=shape, dtype=dtype)


def see(b: Bound, msg: Any, topic: str = 'camera') -> np.ndarray:
    b.get(topic, msg)
    assert b.missing() == []
    b.step()
    return b.inputs['obs'][0]


# --- raw

def test_blue_stays_blue_whatever_the_camera_sends_and_the_policy_takes() -> None:
    blue = np.tile(BLUE.astype(np.uint8), (4, 6, 1))
    opaque = np.full((4, 6, 1), 77, np.uint8)
    sent = {'rgb8': blue, 'bgr8': blue[:, :, ::-1],
            'rgba8': np.concatenate([blue, opaque], 2),
            'bgra8': np.concatenate([blue[:, :, ::-1], opaque], 2)}
    for encoding, pixels in sent.items():
        for wanted, expected in (('rgb8', BLUE), ('bgr8', BLUE[::-1])):
            got = see(camera(encoding=wanted), image(pixels, encoding))
            assert (got == expected).all(), (encoding, wanted)
    for encoding in ('rgba8', 'bgra8'):
        got = see(camera(channels=4, encoding='bgra8'), image(sent[encoding], encoding))
        assert (got == [*BLUE[::-1], 77]).all()
    with pytest.raises(Refusal, match='the policy takes rgba8'):
        camera(channels=4, encoding='rgba8').get('camera', image(blue, 'rgb8'))


@pytest.mark.parametrize('pad', [0, 2, 13])
@pytest.mark.parametrize('layout', ['HWC', 'CHW'])
def test_rows_with_padding_and_both_layouts(pad: int, layout: str) -> None:
    got = see(camera(layout=layout), image(RGB, 'rgb8', pad=pad))
    expected = RGB if layout == 'HWC' else RGB.transpose(2, 0, 1)
    assert (got == expected).all()


@pytest.mark.parametrize('container', [bytes, bytearray, lambda d: array.array('B', d),
                                       lambda d: np.frombuffer(d, np.uint8), list])
def test_every_container_that_the_bytes_come_in(container: Any) -> None:
    msg = image(RGB, 'bgr8', pad=1)
    msg.data = container(msg.data)
    assert (see(camera(encoding='bgr8'), msg) == RGB).all()


@pytest.mark.parametrize(('encoding', 'code', 'wanted'), [
    ('mono16', 'u2', 'mono16'), ('16UC1', 'u2', '16UC1'), ('mono16', 'u2', '16UC1'),
    ('32FC1', 'f4', '32FC1'), ('mono8', 'u1', 'mono8'), ('8UC1', 'u1', 'mono8')])
@pytest.mark.parametrize('big', [False, True])
def test_one_channel_in_both_byte_orders(encoding: str, code: str, wanted: str, big: bool) -> None:
    pixels = (np.arange(24).reshape(4, 6) * 11 + (500 if code != 'u1' else 0)).astype(code)
    b = camera(channels=1, encoding=wanted, dtype='F32', scale=0.5)
    got = see(b, image(pixels, encoding, big=big, pad=4))
    assert (got[:, :, 0] == pixels * np.float32(0.5)).all()


def test_scale_and_offset_are_float32_per_channel_or_for_all() -> None:
    mean, std = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)
    b = camera(dtype='F32', layout='CHW', offset=tuple(-m for m in mean),
               scale=tuple(1 / s for s in std))
    got = see(b, image(RGB, 'rgb8'))
    expected = (RGB.astype(np.float32) - np.float32(mean)) * np.float32([1 / s for s in std])
    assert got.tobytes() == np.ascontiguousarray(expected.transpose(2, 0, 1)).tobytes()
    got = see(camera(dtype='F32', scale=1 / 255), image(RGB, 'rgb8'))
    assert got.tobytes() == (RGB.astype(np.float32) * np.float32(1 / 255)).tobytes()
    got = see(camera(dtype='F16', scale=1 / 255), image(RGB, 'rgb8'))
    assert np.allclose(got, RGB / 255, atol=1e-3)
    got = see(camera(dtype='U8', offset=-100.0), image(RGB, 'rgb8'))
    assert (got == np.clip(RGB.astype(int) - 100, 0, 255)).all()


def test_grey_from_colours_and_colours_from_grey() -> None:
    got = see(camera(channels=1, encoding='mono8'), image(RGB[:, :, ::-1], 'bgr8'))
    assert (got[:, :, 0] == np.asarray(Image.fromarray(RGB).convert('L'))).all()
    grey = RGB[:, :, 0]
    assert (see(camera(), image(grey, 'mono8')) == grey[:, :, None]).all()


def test_crop_then_resize() -> None:
    got = see(camera((2, 3), crop=(1, 2, 2, 3)), image(RGB, 'rgb8', pad=5))
    assert (got == RGB[1:3, 2:5]).all()
    big = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    for how, pillow in (('bilinear', Image.Resampling.BILINEAR), ('area', Image.Resampling.BOX)):
        got = see(camera((16, 20), crop=(8, 4, 32, 40), resize=how), image(big, 'rgb8'))
        expected = Image.fromarray(big[8:40, 4:44]).resize((20, 16), pillow)
        assert (got == np.asarray(expected)).all()
    got = see(camera((24, 32), resize='nearest'), image(big, 'rgb8'))
    assert (got == big[1::2, 1::2]).all()
    with pytest.raises(Refusal, match='too small for crop'):
        camera((2, 3), crop=(3, 0, 2, 3)).get('camera', image(RGB, 'rgb8'))


def test_depth_is_resized_without_mixing_neighbours() -> None:
    depth = np.array([[0.5, 0.5, 9.0, 9.0]] * 4, np.float32)
    got = see(camera((2, 3), channels=1, encoding='32FC1', dtype='F32'), image(depth, '32FC1'))
    assert set(got.ravel().tolist()) == {0.5, 9.0}
    millimetres = (depth * 1000).astype(np.uint16)
    got = see(camera((2, 2), channels=1, encoding='16UC1', dtype='F32', resize='area'),
              image(millimetres, '16UC1'))
    assert got[:, :, 0].tolist() == [[500, 9000], [500, 9000]]


def test_alpha_does_not_darken_colours_when_resized() -> None:
    pixels = np.dstack([RGB, np.zeros((4, 6), np.uint8)])
    got = see(camera((2, 3), channels=4, encoding='rgba8', resize='area'), image(pixels, 'rgba8'))
    assert got[:, :, 3].max() == 0
    assert got[:, :, 0].max() > 0


def test_p29_nan_in_a_depth_picture_stops_unless_a_fill_is_written() -> None:
    depth = np.full((4, 6), 2.0, np.float32)
    depth[0, 0], depth[3, 5] = np.nan, np.inf
    b = camera(channels=1, encoding='32FC1', dtype='F32')
    b.get('camera', image(depth, '32FC1'))
    assert 'NaN or infinity; write fill' in b.missing()[0]
    with pytest.raises(Refusal) as refusal:
        b.step()
    assert refusal.value.code is Code.INPUT_STALE
    b = camera((2, 2), channels=1, encoding='32FC1', dtype='F32', crop=(1, 1, 2, 2))
    assert (see(b, image(depth, '32FC1')) == 2.0).all()      # the rest is not used
    b = camera(channels=1, encoding='32FC1', dtype='F32', fill=0.0)
    got = see(b, image(depth, '32FC1'))
    assert got[0, 0] == got[3, 5] == 0.0
    assert got.sum() == 44.0


@pytest.mark.parametrize(('encoding', 'says'), [
    ('yuv422_yuy2', "'yuv422_yuy2' is not known"), ('bayer_rggb8', 'bayer_rggb8'),
    ('', "'' is not known"), ('RGB8', 'RGB8'), ('8UC3', 'the policy takes rgb8'),
    ('mono16', 'the policy takes rgb8'), ('32FC1', 'the policy takes rgb8')])
def test_an_encoding_is_refused_by_name_and_never_guessed(encoding: str, says: str) -> None:
    b = camera()
    b.get('camera', image(RGB, 'rgb8'))
    pixels = RGB if encoding not in ('mono16', '32FC1') else np.zeros(
        (4, 6), np.uint16 if encoding == 'mono16' else np.float32)
    with pytest.raises(Refusal, match=says) as refusal:
        b.get('camera', image(pixels, encoding))
    assert refusal.value.code is Code.INPUT_REJECTED
    assert (see(b, image(RGB, 'rgb8')) == RGB).all()


def test_pictures_that_are_cut_off_or_lie_about_their_size_are_refused() -> None:
    b = camera()
    for change, says in (({'data': image(RGB, 'rgb8').data[:-1]}, 'cut off: 71 bytes of 72'),
                         ({'step': 17}, 'a row of 6 rgb8 takes 18'), ({'height': 0}, 'nothing'),
                         ({'height': 5}, 'cut off'), ({'width': 1 << 31, 'step': 1 << 33}, 'much'),
                         ({'data': b''}, 'cut off')):
        msg = image(RGB, 'rgb8')
        vars(msg).update(change)
        with pytest.raises(Refusal, match=says) as refusal:
            b.get('camera', msg)
        assert refusal.value.code is Code.INPUT_REJECTED
    msg = image(RGB, 'rgb8', pad=6)
    msg.data = msg.data[:-6]                             # the last row needs no padding
    assert (see(b, msg) == RGB).all()


# --- compressed

def halves() -> np.ndarray:
    """A picture with a red left and a blue right half, which survives JPEG."""
    pixels = np.empty((32, 48, 3), np.uint8)
    pixels[:, :24], pixels[:, 24:] = RED, BLUE
    return pixels


def zipped(size: tuple[int, int] = (32, 48), **keys: Any) -> Bound:
    return camera(size, topic='camera/compressed', **keys)


@pytest.mark.parametrize(('text', 'kind', 'swapped'), [
    ('jpeg', 'JPEG', False), ('jpg', 'JPEG', False), ('png', 'PNG', False), ('JPEG', 'JPEG', False),
    ('rgb8; jpeg compressed bgr8', 'JPEG', False), ('bgr8; jpeg compressed bgr8', 'JPEG', False),
    ('bgr8; png compressed bgr8', 'PNG', False), ('rgb8; png compressed bgr8', 'PNG', False),
    ('rgba8; jpeg compressed bgr8', 'JPEG', False), ('rgb8;jpeg compressed bgr8', 'JPEG', False),
    # The encoder, which takes blue first, was handed red first: the file's colours are swapped.
    ('rgb8; jpeg compressed rgb8', 'JPEG', True), ('bgr8; png compressed rgb8', 'PNG', True),
    ('rgb8; jpeg compressed ', 'JPEG', True)])
def test_blue_stays_blue_for_every_format_that_drivers_write(text: str, kind: str, swapped: bool
                                                             ) -> None:
    pixels = halves()
    data = packed(pixels[:, :, ::-1] if swapped else pixels, kind)
    got = see(zipped(), compressed(data, text), 'camera/compressed').astype(int)
    assert np.abs(got[:, 4:20] - RED).max() < 12
    assert np.abs(got[:, 28:44] - BLUE).max() < 12


def test_png_with_alpha_grey_and_sixteen_bits() -> None:
    alpha = np.dstack([RGB, np.full((4, 6), 5, np.uint8)])
    got = see(zipped((4, 6)), compressed(packed(alpha, 'PNG'), 'bgra8; png compressed bgra8'),
              'camera/compressed')
    assert (got == RGB).all()
    grey = RGB[:, :, 1]
    for text in ('mono8; png compressed ', 'mono8; png compressed', 'png'):
        got = see(zipped((4, 6), channels=1, encoding='mono8'),
                  compressed(packed(grey, 'PNG'), text), 'camera/compressed')
        assert (got[:, :, 0] == grey).all()
    deep = grey.astype(np.uint16) * 250
    for text in ('16UC1; png compressed ', 'mono16; png compressed '):
        got = see(zipped((4, 6), channels=1, encoding='16UC1', dtype='F32'),
                  compressed(packed(deep, 'PNG'), text), 'camera/compressed')
        assert (got[:, :, 0] == deep).all()


@pytest.mark.parametrize(('text', 'says'), [
    ('16UC1; compressedDepth png', 'uncompressed depth'), ('32FC1; compressedDepth', 'depth'),
    ('h264', "'h264' is not known"), ('', "'' is not known"), ('webp', 'webp'),
    ('rgb16; png compressed bgr16', "'rgb16'"), ('yuv422; jpeg compressed bgr8', "'yuv422'"),
    ('mono8; jpeg compressed ', 'holds colours'), ('rgb8; tiff compressed bgr8', 'tiff'),
    ('png', 'no whole PNG')])
def test_formats_are_refused_by_name_and_never_guessed(text: str, says: str) -> None:
    with pytest.raises(Refusal, match=says) as refusal:
        zipped().get('camera/compressed', compressed(packed(halves(), 'JPEG'), text))
    assert refusal.value.code is Code.INPUT_REJECTED


@pytest.mark.parametrize('kind', ['JPEG', 'PNG'])
def test_a_cut_off_picture_is_refused_wherever_it_ends(kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (32, 48, 3), np.uint8)
    data = packed(noise, kind)
    b = zipped()
    b.get('camera/compressed', compressed(data, kind.lower()))
    for end in (0, 1, 10, 30, len(data) // 2, len(data) - 40):
        with pytest.raises(Refusal, match=f'no whole {kind}') as refusal:
            b.get('camera/compressed', compressed(data[:end], kind.lower()))
        assert refusal.value.code is Code.INPUT_REJECTED
    assert b.missing() == []                              # the whole one is still there


def test_broken_bytes_never_do_more_than_refuse() -> None:
    rng = np.random.default_rng(2)
    b = zipped()
    codes = []
    for kind in ('JPEG', 'PNG'):
        data = packed(halves(), kind)
        for _ in range(150):
            broken = bytearray(data)
            for at in rng.integers(0, len(data), 3):
                broken[at] = rng.integers(0, 256)
            try:
                b.get('camera/compressed', compressed(bytes(broken), kind.lower()))
            except Refusal as refusal:
                codes.append(refusal.code)
    assert len(codes) > 50
    assert set(codes) == {Code.INPUT_REJECTED}


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    def png(width: int, height: int) -> bytes:
        def chunk(kind: bytes, body: bytes) -> bytes:
            return (len(body).to_bytes(4, 'big') + kind + body
                    + zlib.crc32(kind + body).to_bytes(4, 'big'))
        head = width.to_bytes(4, 'big') + height.to_bytes(4, 'big') + bytes([8, 2, 0, 0, 0])
        return (b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', zlib.compress(b'x'))
                + chunk(b'IEND', b''))
    for width, height, says in ((8000, 8000, 'more than 33554432 pixels'),
                                (60_000, 60_000, 'bomb'), ((1 << 31) - 1, 1 << 30, 'bomb')):
        with pytest.raises(Refusal, match=says) as refusal:
            zipped().get('camera/compressed', compressed(png(width, height), 'png'))
        assert refusal.value.code is Code.INPUT_REJECTED


def test_without_pillow_raw_pictures_work_and_compressed_ones_say_what_to_install(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__('sys').modules, 'PIL', None)
    assert (see(camera(), image(RGB, 'rgb8')) == RGB).all()
    with pytest.raises(Refusal, match=r'flashrt_ros\[image\]') as refusal:
        zipped().get('camera/compressed', compressed(b'', 'jpeg'))
    assert refusal.value.code is Code.UNSUPPORTED


# --- in an observation

def test_a_picture_is_that_of_the_last_latch() -> None:
    b = camera()
    first = see(b, image(RGB, 'rgb8'))
    b.get('camera', image(RGB[::-1], 'rgb8', stamp=T0 + 1))
    b.obs.write(b.inputs)
    assert (b.inputs['obs'][0] == first).all()
    b.step()
    assert (b.inputs['obs'][0] == RGB[::-1]).all()
    assert [(e.name, e.stamp_ns) for e in b.entries] == [('camera', T0 + 1)]


def test_history_of_pictures_and_a_port_shared_with_numbers() -> None:
    b = observe(term('history', of=(term('image', 'camera', size=(4, 6)),), length=2),
                shape=(2, 4, 6, 3), dtype='U8')
    for pixels in (RGB, RGB[::-1]):
        b.get('camera', image(pixels, 'rgb8'))
        b.step()
    assert (b.inputs['obs'] == [RGB[::-1], RGB]).all()
    assert b.host['obs.obs.history'].dtype == np.uint8
    b = observe(term('counter'), term('image', 'camera', size=(4, 6)), term('counter'), size=74)
    b.get('camera', image(RGB, 'rgb8'))
    assert b.step().tolist() == [1, *RGB.ravel().tolist(), 1]


def test_a_missing_late_or_skewed_camera_is_named() -> None:
    b = observe(term('image', 'left', size=(4, 6), max_age_s=0.2),
                term('image', 'right', size=(4, 6), max_age_s=0.2), size=144, max_skew_s=0.03)
    assert b.missing() == ['image (left): never received', 'image (right): never received']
    b.get('left', image(RGB, 'rgb8', stamp=T0))
    b.get('right', image(RGB, 'rgb8', stamp=T0 + S // 25))
    assert b.missing() == ['image (left): stamped 0.040 s before image (right), the limit is '
                           '0.030 s']
    b.get('left', image(RGB, 'rgb8', stamp=T0 + S // 25))
    assert b.missing() == []
    b.now += S
    assert [m.split(':')[0] for m in b.missing()] == ['image (left)', 'image (right)']


@pytest.mark.parametrize(('keys', 'says'), [
    ({'shape': (1, 3, 4, 6)}, r'HWC \[4, 6, 3\]'), ({'shape': (1, 6, 4, 3)}, 'port takes'),
    ({'shape': (1, 4, 6, 3), 'type': 'sensor_msgs/msg/PointCloud2'}, 'cannot read'),
    ({'shape': (1, 4, 6, 3), 'scale': (1.0, 2.0)}, '2 numbers for the 3 values')])
def test_a_picture_that_does_not_fit_the_port_is_refused(keys: dict[str, Any], says: str) -> None:
    shape = keys.pop('shape')
    with pytest.raises(Refusal, match=says) as refusal:
        observe(term('image', 'camera', size=(4, 6), **keys), shape=shape, dtype='U8')
    assert refusal.value.code is Code.INVALID_POLICY_FILE


def test_importing_images_needs_no_pillow() -> None:
    assert not hasattr(images, 'Image')
