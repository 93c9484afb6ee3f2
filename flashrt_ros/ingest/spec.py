"""The policy file as plain, frozen data: what policy_file.py returns and everything else reads.

Defaults stand here and nowhere else. Units: seconds, radians, metres, unless a name says otherwise.
"""
from __future__ import annotations

from collections.abc import Mapping
import dataclasses
from dataclasses import dataclass, field
from typing import Any

Numbers = float | tuple[float, ...]
DEFAULT_MAX_AGE_S = 0.5                # of a sensor input that writes no max_age_s


@dataclass(frozen=True)
class ModelSpec:
    """Section `policy`: what runs and how often."""

    backend: str                       # host, onnx, torch, tensorrt
    period_s: float                    # time of one step
    model: str | None = None           # path below model_root
    factory: str | None = None         # module:function
    state: Mapping[str, str] = field(default_factory=dict)   # input -> output that feeds it back
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # for dynamic dimensions
    options: Mapping[str, Any] = field(default_factory=dict)  # passed to the backend
    exact: bool = True                 # False: results may differ in the last bits, reported so


@dataclass(frozen=True)
class RunSpec:
    """Section `run`: when a step happens and when an inference starts."""

    trigger: str | tuple[str, ...] = 'timer'   # or the topics of lock step
    autorun: bool = False
    on_restore: str = 'hold'           # hold | continue (lock step only)
    on_clock_jump: str = 'reset'       # reset | keep
    start_at: int = 0                  # start an inference when this many steps are left
    latency_steps: int = 0             # splice when this many steps were executed since its start
    execute: int | None = None         # rows executed of each chunk; None: all
    blend: str = 'latest'              # latest | ensemble
    ensemble_weight: float = 0.01      # the i-th oldest prediction of a step weighs exp(-w * i)
    publish_hz: float | None = None    # linear interpolation between rows; None: once per step
    blend_s: float = 0.0               # soft start
    persist_on: tuple[str, ...] = ()   # save, refusal, goal_end
    max_tick_s: float | None = None    # an inference that runs longer stops; None: see tick_limit_s
    min_rate: float = 0.5              # of the steps that period_s asks for; fewer: on_slow
    on_slow: str = 'stop'              # stop | catch_up | warn
    exclusive: bool = True             # no other node of this name, no other publisher on outputs
    joint_sources: str = 'one'         # one | any: publishers that may speak for one joint

    @property
    def lock_step(self) -> bool:
        """Whether steps follow messages instead of a timer."""
        return self.trigger != 'timer'


@dataclass(frozen=True)
class TermSpec:
    """One piece of an observation port. The value is (raw + offset) * scale."""

    term: str
    path: str                          # where in the file, for messages: inputs.obs[3]
    topic: str | None = None
    type: str | None = None            # message type; None: the term's usual one
    fields: tuple[str, ...] = ()
    field: str | None = None
    joints: tuple[str, ...] = ()
    offset: Numbers = 0.0
    scale: Numbers = 1.0
    max_age_s: float | None = None     # older than this stops inference; None: DEFAULT_MAX_AGE_S
    latched: bool = False              # keeps its last value, however old
    timeout_s: float | None = None     # latched inputs: after this silence do on_timeout
    on_timeout: str = 'stop'           # stop | zero
    period_s: float | None = None      # phase
    length: int | None = None          # history, prompt
    order: str = 'newest_first'        # history: newest_first | oldest_first
    of: tuple[TermSpec, ...] = ()      # history
    value: tuple[float, ...] = ()      # constant
    encode: str | None = None          # prompt: bytes | module:function
    output: str | None = None          # last_action, prefix: which output; None: the only one
    size: tuple[int, int] | None = None      # image: height, width after resize
    crop: tuple[int, int, int, int] | None = None  # image: top, left, height, width before resize
    layout: str = 'HWC'                # image: HWC | CHW
    encoding: str | None = None        # image: wanted encoding (rgb8, bgr8, mono8, 16UC1, …)
    resize: str | None = None          # image: bilinear | area | nearest; None: nearest for depth
    fill: float | None = None          # image 32FC1: written for NaN and infinity; None: they stop
    function: str | None = None        # a term that is not built in: module:function
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # `field` is taken here


@dataclass(frozen=True)
class OnStop:
    """What an output sends when motion ends."""

    do: str                            # hold | zero | none
    time_s: float = 0.2                # JointTrajectory: time_from_start of the holding point
    repeat: bool = False               # send again every step until the next goal


@dataclass(frozen=True)
class OutputSpec:
    """One output and its contract. A published value is raw * scale + offset, then clipped."""

    name: str
    path: str
    topic: str
    type: str                          # std_msgs/msg/Float32MultiArray, …
    kind: str                          # raw | position | velocity | effort | twist
    joints: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()       # Twist: which components, e.g. linear.x
    scale: Numbers = 1.0
    offset: Numbers = 0.0
    clip: tuple[Numbers, Numbers] | None = None    # low, high; of published values
    max_rate: Numbers | None = None    # units per second
    start_tolerance: float | None = None           # None: off (must be written for position)
    relative: bool = False             # rows are relative to the joints measured at the latch
    on_stop: OnStop = OnStop('none')
    time_s: float | None = None        # JointTrajectory: time_from_start; None: one step
    chunk_as_trajectory: bool = False  # JointTrajectory: all remaining rows as points
    columns: tuple[int, int] | None = None         # part of the port's action dimension
    port: str | None = None            # OUTPUT buffer; None: same as name
    frame_id: str = ''
    shared: bool = False               # others may publish on its topic too


@dataclass(frozen=True)
class EnableSpec:
    """Section `enable`: a Bool without which nothing moves."""

    topic: str
    max_age_s: float = 0.5


@dataclass(frozen=True)
class WitnessLimit:
    """How far a witness term may have moved before a restore is refused."""

    max: float
    forceable: bool = False


@dataclass(frozen=True)
class GuardSpec:
    """Section `guard`: live only; never for origin."""

    witness: Mapping[str, WitnessLimit] = field(default_factory=dict)
    max_age_s: float | None = None     # of a capsule
    on_moved: str = 'refuse'           # refuse | warn


@dataclass(frozen=True)
class QosSpec:
    """One entry of `qos`: what a topic wants instead of the usual; None leaves the usual."""

    reliable: bool | None = None
    depth: int | None = None


@dataclass(frozen=True)
class PolicyFile:
    """A whole, validated policy file."""

    path: str
    policy: ModelSpec
    run: RunSpec
    inputs: Mapping[str, tuple[TermSpec, ...]]     # by INPUT port
    outputs: Mapping[str, OutputSpec]
    max_skew_s: float | None = None
    enable: EnableSpec | None = None
    guard: GuardSpec = GuardSpec()
    qos: Mapping[str, QosSpec] = field(default_factory=dict)       # by topic as the file writes it
    note: str = ''                     # for people; means nothing
    joint_states: str | None = None    # JointState topic of measured joints that no term reads
