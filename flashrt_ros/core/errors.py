"""Every refusal of the package: one exception class, one stable numeric code.

msg/Code.msg is the only other place where the numbers stand; a test compares the two. Code that
refuses raises `Refusal` with a sentence that names the thing, its value and what to do; the node
turns it into the `code` and `message` of an answer.
"""
from __future__ import annotations

from enum import IntEnum
from typing import Any


class Code(IntEnum):
    """Why a verb or a goal ended as it did; the meanings stand in msg/Code.msg."""

    OK = 0
    NOT_FOUND = 1
    EXISTS = 2
    FINGERPRINT_MISMATCH = 3
    CORRUPT = 4
    NOT_CONFIGURED = 5
    BUSY = 6
    NO_MEMORY = 7
    BUDGET_EXCEEDED = 8
    IO = 9
    BACKEND = 10
    INVALID_NAME = 11
    NOTHING_TO_ROLL_BACK = 12
    ROBOT_MOVED = 13
    TOO_OLD = 14
    STALE_EPOCH = 15
    START_DEVIATION = 16
    INPUT_STALE = 17
    UNSUPPORTED = 18
    FAULT = 19
    CANCELLED = 20
    PREEMPTED = 21
    RESTORED = 22
    PAUSED = 23
    EVICTED = 24
    INVALID_ARGUMENT = 25
    LIMIT_REACHED = 26
    UNDECLARED_STATE = 27
    WRONG_PHASE = 28
    STOPPED = 29
    INVALID_POLICY_FILE = 30
    INPUT_REJECTED = 31
    INTERNAL = 32
    CLOCK_JUMP = 33
    TICK_OVERDUE = 34
    TOO_SLOW = 35
    NOT_EXCLUSIVE = 36
    INPUT_CONFLICT = 37
    NOT_SENT = 38
    CLIENT_GONE = 39


class Refusal(Exception):  # noqa: N818 - the field says refusal, and it is no error of ours
    """A request that was not carried out, and why. Nothing was changed.

    `details` carries what a program may want beside the sentence, for example
    `moved`, `distance` and `limit` of ROBOT_MOVED.
    """

    def __init__(self, code: Code, message: str, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.details = details

    def __str__(self) -> str:
        return f'{self.code.name}: {self.message}'


def told(error: Exception) -> tuple[Code, str]:
    """Return code and sentence of any failure; what is no refusal is INTERNAL."""
    if isinstance(error, Refusal):
        return error.code, error.message
    return Code.INTERNAL, f'{type(error).__name__}: {error}'
