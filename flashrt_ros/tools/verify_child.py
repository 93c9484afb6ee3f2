"""The new process of verify: goes on from a saved capsule and prints the digest of its actions.

    python -m flashrt_ros.tools.verify_child CAPSULE < inputs.json
"""
from __future__ import annotations

from pathlib import Path
import sys

from flashrt_ros.core.errors import Refusal
from flashrt_ros.tools.proof import Actions
from flashrt_ros.tools.script import Player
from flashrt_ros.tools.verify_inputs import Inputs


def actions_of(inputs: Inputs, capsule: Path) -> Actions:
    """Return the actions after a capsule. Raises Refusal."""
    policy = inputs.open()
    try:
        player = Player(policy, inputs.steps(policy))
        info = policy.session.adopt(capsule).result()
        player.fill(inputs.save_at)
        policy.resume_at(info.name)
        player.play(inputs.save_at, inputs.save_at + inputs.future)
        return Actions.of(policy.sink.sent)
    finally:
        policy.close()


def main() -> int:
    """Print the digest, or the refusal on stderr."""
    try:
        actions = actions_of(Inputs.from_json(sys.stdin.read()), Path(sys.argv[1]))
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 1
    print(actions.digest())
    return 0


if __name__ == '__main__':
    sys.exit(main())
