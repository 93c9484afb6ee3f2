"""Opens what verify runs on: the policy and its inputs, alike in this process and in a new one."""
from __future__ import annotations

from dataclasses import asdict, dataclass, replace
import json
from pathlib import Path
from typing import Any

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest import policy_file as files
from flashrt_ros.ingest.spec import PolicyFile
from flashrt_ros.tools import script
from flashrt_ros.tools.offline import Offline, open_policy
from flashrt_ros.tools.script import Step

INVENTED = 400             # steps; a horizon of 100 rows needs that many


@dataclass(frozen=True)
class Inputs:
    """What verify was asked for; travels to the new process as JSON."""

    policy: str
    model_root: str | None = None
    modules: tuple[str, ...] = ()
    bag: str | None = None
    remaps: tuple[tuple[str, str], ...] = ()
    namespace: str = ''
    msg_paths: tuple[str, ...] = ()
    trigger: tuple[str, ...] = ()
    seed: int = 1
    first: int = 0                     # step of the bag that is step 0 here
    save_at: int = 0
    future: int = 0

    def to_json(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Inputs:
        """Read it."""
        data: dict[str, Any] = {k: tuple(tuple(i) if isinstance(i, list) else i for i in v)
                                if isinstance(v, list) else v for k, v in json.loads(text).items()}
        return Inputs(**data)

    def open(self, directory: Path | None = None) -> Offline:
        """Load and configure the policy; its first action may be far from the robot."""
        root = None if self.model_root is None else Path(self.model_root)
        file: PolicyFile = files.load(self.policy, model_root=root, modules=self.modules)
        outputs = {n: replace(o, start_tolerance=None) for n, o in file.outputs.items()}
        return open_policy(replace(file, outputs=outputs), model_root=root, modules=self.modules,
                           directory=directory, trigger=self.trigger)

    def steps(self, policy: Offline) -> list[Step]:
        """Return the inputs. Raises Refusal."""
        if self.bag is None:
            return script.invented(policy, INVENTED, self.seed)
        with script.of_bag(policy, Path(self.bag), dict(self.remaps), self.namespace,
                           [Path(p) for p in self.msg_paths]) as (bag, matches):
            steps = script.recorded(policy, bag, matches, INVENTED, self.first)
        if not steps:
            trigger = policy.file.run.trigger
            raise Refusal(Code.INPUT_STALE, 'the bag holds no step: its messages never make a set '
                          f'of {", ".join(trigger)}' if policy.file.run.lock_step else
                          'the bag is shorter than one period')
        return steps

    def others(self, policy: Offline, steps: list[Step]) -> list[Step]:
        """Return different inputs for the disturbance."""
        if self.bag is None:
            return script.invented(policy, INVENTED, self.seed + 1)
        return steps[len(steps) // 2:]
