"""Pictures from cameras into ports: colour order, padding, byte order, crop, resize, layout.

A picture is checked whole when it arrives: encoding, size, length; a compressed one is decoded
then, because only decoding finds a cut-off file. It is converted when an inference reads it. An
encoding that is not listed is refused by name, never guessed, and no conversion changes a unit.
"""
from __future__ import annotations

from collections.abc import Mapping
import io
import re
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.spec import TermSpec
from flashrt_ros.ingest.terms import bad_term, rejected

IMAGE = 'sensor_msgs/msg/Image'
COMPRESSED = 'sensor_msgs/msg/CompressedImage'
MAX_PIXELS = 1 << 25                  # 33 megapixels; a larger picture is refused undecoded

# encoding -> numpy type, channels, what they hold
ENCODINGS: Mapping[str, tuple[str, int, str]] = {
    'rgb8': ('u1', 3, 'rgb'), 'bgr8': ('u1', 3, 'bgr'),
    'rgba8': ('u1', 4, 'rgba'), 'bgra8': ('u1', 4, 'bgra'),
    'mono8': ('u1', 1, 'mono'), '8UC1': ('u1', 1, 'mono'), '8UC3': ('u1', 3, '8UC3'),
    'mono16': ('u2', 1, '16 bit'), '16UC1': ('u2', 1, '16 bit'),
    '32FC1': ('f4', 1, 'float'),
}
_COLOURS = ('rgb', 'bgr', 'rgba', 'bgra')
_DEPTH = ('16 bit', 'float')          # neighbours must not be mixed: no default interpolation
_TRANSPORT = re.compile(r'(?P<encoding>[^;]*);\s*(?P<codec>\w+)\s+compressed\s*(?P<target>\w*)\s*')
_CODECS = {'jpeg': 'JPEG', 'jpg': 'JPEG', 'png': 'PNG'}


class Picture(NamedTuple):
    """A checked picture: `pixels` is `(height, width, channels)`, maybe a strided view."""

    pixels: NDArray[Any]
    holds: str                        # third column of ENCODINGS
    finite: bool


class ImageTerm:
    """Turns messages of one topic into `(C, H, W)` or `(H, W, C)` values of a port."""

    def __init__(self, spec: TermSpec, port_shape: tuple[int, ...] | None) -> None:
        self.topic = spec.topic or ''
        if not self.topic:
            raise bad_term(spec, 'has no topic; write topic: …')
        compressed = self.topic.endswith('/compressed')
        self.type = spec.type or (COMPRESSED if compressed else IMAGE)
        if self.type not in (IMAGE, COMPRESSED):
            raise bad_term(spec, f'cannot read {self.type}; it reads {IMAGE}, {COMPRESSED}')
        self.encoding = spec.encoding or 'rgb8'
        if self.encoding not in ENCODINGS:
            raise bad_term(spec, f'has the encoding {self.encoding!r}; write one of '
                           f'{", ".join(ENCODINGS)}')
        code, self.channels, self._wants = ENCODINGS[self.encoding]
        self._wide = code != 'u1'
        self._chw = spec.layout == 'CHW'
        self._crop = spec.crop
        self._fill = spec.fill
        self._resize = spec.resize or ('nearest' if self._wants in _DEPTH else 'bilinear')
        self.height, self.width = self._size(spec, port_shape)
        self.size = self.channels * self.height * self.width
        self._plain = bool(np.all(np.asarray(spec.offset) == 0) and np.all(np.asarray(spec.scale)
                                                                         == 1))
        try:
            self._offset = np.broadcast_to(np.asarray(spec.offset, np.float32), self.channels)
            self._scale = np.broadcast_to(np.asarray(spec.scale, np.float32), self.channels)
        except ValueError:
            raise bad_term(spec, f'has offsets or scales that are neither one number nor '
                           f'{self.channels}, one for each channel') from None

    def _size(self, spec: TermSpec, shape: tuple[int, ...] | None) -> tuple[int, int]:
        if spec.size is None:
            raise bad_term(spec, 'has no size; write size: [height, width]')
        height, width = spec.size
        mine = (self.channels, height, width) if self._chw else (height, width, self.channels)
        while shape is not None and len(shape) > 3 and shape[0] == 1:
            shape = shape[1:]
        flat = len(shape or ()) < 2 or (self.channels == 1 and shape == spec.size)
        if shape is not None and not flat and shape != mine:
            raise bad_term(spec, f'gives {spec.layout} {list(mine)} ({self.encoding}), the port '
                           f'takes {list(shape)}; write size, layout and encoding as the model was '
                           'trained')
        return height, width

    # --- a message arrives

    def parse(self, msg: Any) -> Picture:
        """Check a message and return its picture. Raises Refusal(INPUT_REJECTED)."""
        pixels, holds = (self._compressed(msg) if self.type == COMPRESSED else self._raw(msg))
        self._convertible(holds)
        height, width = pixels.shape[:2]
        if self._crop is not None:
            top, left, h, w = self._crop
            if top + h > height or left + w > width:
                raise rejected(self.topic, f'the picture is {height} x {width} (height x width), '
                               f'too small for crop {list(self._crop)}')
            pixels = pixels[top:top + h, left:left + w]
        finite = holds != 'float' or self._fill is not None or bool(np.isfinite(pixels).all())
        return Picture(pixels, holds, finite)

    def _raw(self, msg: Any) -> tuple[NDArray[Any], str]:
        known = ENCODINGS.get(msg.encoding)
        if known is None:
            raise rejected(self.topic, f'the encoding {msg.encoding!r} is not known; known are '
                           f'{", ".join(ENCODINGS)}')
        code, channels, holds = known
        dtype = np.dtype(('>' if msg.is_bigendian else '<') + code)
        height, width, step = int(msg.height), int(msg.width), int(msg.step)
        row = width * channels * dtype.itemsize
        if not 0 < height * width <= MAX_PIXELS:
            raise rejected(self.topic, f'the picture is {height} x {width}; nothing or too much')
        if step < row:
            raise rejected(self.topic, f'step is {step} bytes, a row of {width} {msg.encoding} '
                           f'takes {row}')
        data = msg.data if isinstance(msg.data, bytes) else np.asarray(msg.data, np.uint8)
        have, need = len(data), (height - 1) * step + row
        if have < need:
            raise rejected(self.topic, f'the picture is cut off: {have} bytes of {need}')
        pixels = np.ndarray((height, width, channels), dtype, buffer=data,
                            strides=(step, channels * dtype.itemsize, dtype.itemsize))
        return pixels, holds

    def _compressed(self, msg: Any) -> tuple[NDArray[Any], str]:
        encoding, codec, swapped = self._format(str(msg.format))
        data = msg.data if isinstance(msg.data, bytes) else np.asarray(msg.data, np.uint8).tobytes()
        image = _pillow()
        try:
            with image.open(io.BytesIO(data), formats=(codec,)) as picture:
                width, height = picture.size
                if not 0 < width * height <= MAX_PIXELS:
                    raise rejected(self.topic, f'the picture is {height} x {width}, more than '
                                   f'{MAX_PIXELS} pixels')
                mode = picture.mode
                if mode not in ('RGB', 'RGBA', 'L', 'I;16', 'I'):
                    raise rejected(self.topic, f'the {codec} holds {mode} pixels; known are RGB, '
                                   'RGBA, L and 16-bit grey')
                pixels = np.array(picture)      # decodes; finds what is cut off
        except Refusal:
            raise
        except Exception as error:       # whatever a decoder says of hostile bytes
            raise rejected(self.topic, f'the picture (format {msg.format!r}, {len(data)} bytes) is '
                           f'no whole {codec}: {error}') from None
        if mode in ('L', 'I;16', 'I'):          # I: 16 bits as older Pillows give them
            grey = 'mono' if mode == 'L' else '16 bit'
            pixels = pixels if mode == 'L' else pixels.astype(np.uint16)
            if encoding and ENCODINGS[encoding][2] != grey:
                raise rejected(self.topic, f'the format says {encoding}, the {codec} holds {grey}')
            return pixels[:, :, None], grey
        if encoding and ENCODINGS[encoding][2] not in _COLOURS:
            raise rejected(self.topic, f'the format says {encoding}, the {codec} holds colours')
        holds = 'rgb' if mode == 'RGB' else 'rgba'
        if swapped:
            holds = holds.replace('rgb', 'bgr')
        return pixels, holds

    def _format(self, text: str) -> tuple[str, str, bool]:
        """Return `(encoding before compression or '', codec, whether red and blue are swapped)`.

        image_transport writes `rgb8; jpeg compressed bgr8`: the picture was rgb8 and went to the
        encoder, which takes blue first, as bgr8, so the file has true colours. Where the target is
        not bgr, the encoder was handed red first, and its subscribers swap the file's colours.
        Drivers that write `jpeg` or `png` alone put true colours into the file.
        """
        alone = _CODECS.get(text.strip().lower())
        if alone is not None:
            return '', alone, False
        match = _TRANSPORT.fullmatch(text)
        codec = None if match is None else _CODECS.get(match['codec'].lower())
        if match is None or codec is None:
            hint = ('; subscribe to the uncompressed depth topic' if 'compressedDepth' in text
                    else '')
            raise rejected(self.topic, f'the format {text!r} is not known; known are jpeg, png and '
                           f'those of image_transport with one of them{hint}')
        encoding = match['encoding'].strip()
        if encoding not in ENCODINGS:
            raise rejected(self.topic, f'the encoding {encoding!r} of the format {text!r} is not '
                           f'known; known are {", ".join(ENCODINGS)}')
        colours = ENCODINGS[encoding][1] > 1
        return encoding, codec, colours and not match['target'].startswith('bgr')

    def _convertible(self, holds: str) -> None:
        wants = self._wants
        if holds == wants or (holds == 'mono' and wants in ('rgb', 'bgr')):
            return
        if holds in _COLOURS and (wants in ('rgb', 'bgr', 'mono')
                                  or (wants in _COLOURS and len(holds) == 4)):
            return
        raise rejected(self.topic, f'the picture holds {holds}, the policy takes {self.encoding}; '
                       'that would be a guess or another unit: write the encoding that the camera '
                       'sends, or use another topic')

    # --- an inference reads it

    def write(self, picture: Picture, out: NDArray[Any]) -> None:
        """Write `(raw + offset) * scale`, in float32, into the flat `out` of `size` elements."""
        pixels, holds, _ = picture
        if self._wants == 'mono' and holds != 'mono':
            pixels, holds = _grey(pixels, holds), 'mono'
        elif holds in ('rgba', 'bgra') and self._wants in ('rgb', 'bgr'):    # alpha goes
            pixels, holds = pixels[:, :, :3], holds[:3]
        if pixels.shape[:2] != (self.height, self.width):
            pixels = self._resized(pixels)
        if holds != self._wants:                             # on the small picture: cheaper
            pixels = (np.broadcast_to(pixels, (*pixels.shape[:2], 3)) if holds == 'mono'
                      else pixels[:, :, [holds.index(c) for c in self._wants]])
        if self._fill is not None and pixels.dtype.kind == 'f':
            pixels = np.where(np.isfinite(pixels), pixels, np.float32(self._fill))
        shape = (self.height, self.width, self.channels)
        target = (out.reshape((shape[2], *shape[:2])).transpose(1, 2, 0) if self._chw
                  else out.reshape(shape))
        if out.dtype.kind == 'f' and out.dtype.itemsize >= 4:
            np.copyto(target, pixels, casting='unsafe')
            if not self._plain:
                target += self._offset
                target *= self._scale
        elif self._plain and pixels.dtype.kind == 'u' and pixels.dtype.itemsize <= out.itemsize:
            np.copyto(target, pixels, casting='unsafe')
        else:
            values = (pixels.astype(np.float32) + self._offset) * self._scale
            limits = np.iinfo(out.dtype)
            np.copyto(target, np.clip(np.rint(values), limits.min, limits.max), casting='unsafe')

    def _resized(self, pixels: NDArray[Any]) -> NDArray[Any]:
        height, width = pixels.shape[:2]
        if self._resize == 'nearest':
            rows = ((np.arange(self.height) + 0.5) * height / self.height).astype(np.intp)
            columns = ((np.arange(self.width) + 0.5) * width / self.width).astype(np.intp)
            near: NDArray[Any] = pixels[rows[:, None], columns]
            return near
        image = _pillow()
        how = {'bilinear': image.Resampling.BILINEAR, 'area': image.Resampling.BOX}[self._resize]
        size = (self.width, self.height)
        if pixels.shape[2] == 3 and not self._wide:
            picture = image.fromarray(np.ascontiguousarray(pixels))
            whole: NDArray[Any] = np.asarray(picture.resize(size, how))
            return whole
        # Bands one by one: Pillow would multiply colours by alpha.
        kind = np.float32 if self._wide else np.uint8
        bands = [image.fromarray(np.ascontiguousarray(pixels[:, :, c], kind)).resize(size, how)
                 for c in range(pixels.shape[2])]
        stacked: NDArray[Any] = np.stack([np.asarray(band) for band in bands], axis=2)
        return stacked


def _grey(pixels: NDArray[Any], holds: str) -> NDArray[Any]:
    """Return ITU-R 601 luma `(height, width, 1)`, in integers, as Pillow and OpenCV do."""
    r, g, b = (pixels[:, :, holds.index(c)].astype(np.uint32) for c in 'rgb')
    luma: NDArray[Any] = ((r * 19595 + g * 38470 + b * 7471 + 0x8000) >> 16).astype(np.uint8)
    return luma[:, :, None]


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise Refusal(Code.UNSUPPORTED, 'compressed pictures and smooth resizing need Pillow; '
                      "install it with pip install 'flashrt_ros[image]'") from error
    return Image
