"""A hybrid decoder and a flow-matching head in plain torch: references for what capsules hold.

They were written for this project and have random weights. Between them they have every kind of
memory that a present policy has: recurrent and convolution state, a key-value cache, the memory of
a head that drafts tokens, random key and counter. All of it lies in the buffers that they are
given; nothing else outlives a tick. They run tiny on a CPU and with billions of parameters on a
GPU.

    policy: {backend: torch, factory: 'flashrt_ros.backends.hybrid:decoder', options: {size: tiny}}
"""
from __future__ import annotations

from typing import Any

from flashrt_ros.backends.hybrid.config import SIZES, DecoderConfig
from flashrt_ros.backends.hybrid.decoder import Decoder
from flashrt_ros.backends.hybrid.flow import FlowHead

__all__ = ['SIZES', 'Decoder', 'DecoderConfig', 'FlowHead', 'decoder', 'flow']


def decoder(size: str = 'tiny', **changes: Any) -> Decoder:
    """Factory of `Decoder`: a size by name, fields of `DecoderConfig` by keyword."""
    return Decoder(DecoderConfig.of(size, **changes))


def flow(**options: Any) -> FlowHead:
    """Factory of `FlowHead`."""
    return FlowHead(**options)
