"""From a policy file to a configured runner: load, check, allocate, warm up.

Nothing is left behind where any of it is refused: the session frees what it took, and everything
before it owns no memory of a device.
"""
from __future__ import annotations

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import TypeVar

from flashrt_ros import backends
from flashrt_ros.backends.spec import PolicySpec
from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.session import Options, Session
from flashrt_ros.core.worker import Worker
from flashrt_ros.ingest import policy_file as files
from flashrt_ros.ingest.actions import ActionQueue
from flashrt_ros.ingest.observation import Observation
from flashrt_ros.ingest.output import make_outputs
from flashrt_ros.ingest.spec import PolicyFile
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import Clock, NullSink, Sink

RunnerT = TypeVar('RunnerT', bound=Runner)


def build(policy_file: str | Path | PolicyFile, sink: Sink | None = None, *,
          model_root: str | Path | None = None, modules: Sequence[str] = (),
          options: Options | None = None, clock: Clock | None = None,
          allow_force: bool = False, kind: type[RunnerT] = Runner,  # type: ignore[assignment]
          worker: Worker | None = None) -> RunnerT:
    """Return a configured runner (of class `kind`) in HOLD, not active yet.

    `modules` may supply code; `model_root` is by default the policy file's folder; `worker` runs
    the ticks in place of a thread. Raises Refusal.
    """
    sink = sink or NullSink()
    clock = clock or Clock()
    file = (policy_file if isinstance(policy_file, PolicyFile)
            else files.load(policy_file, model_root=model_root, modules=modules))
    options = dataclasses.replace(options or Options(), exact=file.policy.exact)
    _check(file, options)
    policy, device = backends.load(file.policy.backend, _spec(file, model_root, modules))
    try:
        ports = policy.layout()
        files.check_ports(file, ports)
        observation = Observation(file, ports, (*files.OWN_MODULES, *modules))
        queue = ActionQueue(file, ports)
        outputs = make_outputs(file, ports)
    except BaseException:
        policy.close()
        raise
    session = Session(
        policy, device, host_state=[*observation.specs(), *queue.specs()],
        initial={**observation.initial(), **queue.initial()}, meaning=files.meaning(file),
        exactness=files.exactness(file), options=options, clock=clock.now_ns, steady=clock.steady,
        on_event=sink.event, worker=worker)
    observation.bind(session.host)
    queue.bind(session.host)
    for output in outputs.values():
        output.bind(session.host)
    return kind(file, session, observation, queue, outputs, sink, clock, ports,
                allow_force=allow_force)


def _spec(file: PolicyFile, model_root: str | Path | None, modules: Sequence[str]) -> PolicySpec:
    policy = file.policy
    root = Path(file.path).parent if model_root is None else Path(model_root)
    return PolicySpec(files.model_path(file, model_root), policy.factory, root,
                      (*files.OWN_MODULES, *modules), policy.state, policy.shapes, policy.options,
                      policy.exact)


def _check(file: PolicyFile, options: Options) -> None:
    """Refuse what the policy file and the options say together and cannot mean."""
    name = Path(file.path).name
    if file.run.persist_on and options.directory is None:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{name}: run.persist_on is '
                      f'{list(file.run.persist_on)}, but there is no folder for durable capsules; '
                      'set the parameter capsule_dir, or leave it out')
    if not file.run.lock_step and file.run.start_at and not file.run.latency_steps:
        raise Refusal(Code.INVALID_POLICY_FILE, f'{name}: run.start_at is {file.run.start_at} and '
                      'latency_steps 0: with a timer every chunk would come too late; write '
                      f'latency_steps between 1 and {file.run.start_at}')
