"""The story of `make demo`: one episode with everything that can happen to it, over real ROS.

A recurrent policy sorts a part. The lamp shows the bin once, at the start; then it is dark, and
only the policy's memory knows. Before the risky move the policy's execution state is saved. The
gripper slips, a person steps in, leans against the arm and puts the part back. The robot stays
still until it is told otherwise; a restore away from the saved pose is refused; driven back, the
policy is restored, and with a new goal it finishes what it had begun.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from math import hypot
import time
from typing import Any

from flashrt_ros.core.errors import Code
from flashrt_ros.demo import rollout
from flashrt_ros.demo.arm import JOINTS
from flashrt_ros.demo.shadow import Verdict
from flashrt_ros.demo.watch import Watch

PART, YAW, TARGET = (0.352, -0.128), -0.3, 2
COLOURS = ('red', 'green', 'blue')
NAME = 'before-the-grasp'
SAVE_XY, SAVE_Z = 0.03, 0.16       # m: the part from the open hand when the state is saved


@dataclass
class Result:
    """What the table shows."""

    rows: list[tuple[str, str]] = field(default_factory=list)
    good: bool = True

    def add(self, what: str, value: str, good: bool = True) -> None:
        """Add a line; a false one fails the demo."""
        self.rows.append((what, value if good else f'{value}   ← NOT AS PROMISED'))
        self.good = self.good and good


def open_story(watch: Watch, who: str) -> None:
    """Bring node and cell to where the story begins: all have heard of each other, and the lamp,
    which is seen once, was seen. `who` acts next."""
    watch.client.wait_ready()
    watch.phase('HOLD')
    # The node hears all four; this process hears all but the last.
    watch.until('discovery', lambda facts, _: facts['listeners'] == [2, 2, 2, 1])
    watch.cell('reset', part=PART, yaw=YAW, target=TARGET)
    watch.until('the lamp', lambda facts, _: facts['lit'])
    watch.look()
    watch.silent(10)
    watch.begin()
    watch.mark(f'lamp shows {COLOURS[TARGET]}, {who}')


def run(watch: Watch) -> Result:
    """Play the story; every wait is for something that was caused and is heard of."""
    result = Result()
    client = watch.client
    open_story(watch, 'goal')
    watch.execute()

    # Up to the risky move, and the save.
    watch.until('the hand above the part', lambda facts, _: above(facts))
    sent = time.monotonic()
    saved = client.call(lambda c: c.save(NAME, note='hand above the part'))
    save_s = time.monotonic() - sent
    watch.mark('save')
    facts = watch.until('the cell', lambda *_: True)
    found = {'part': facts['part'][:2], 'yaw': facts['yaw']}
    capsule = saved.capsule
    result.add('saved', f'{NAME!r}: tick {capsule.tick}, step {capsule.step}, '
               f'{capsule.nbytes} bytes of state (GRU, queue, counters)', saved.success)
    result.add('save, round trip', f'{1e3 * save_s:.1f} ms')

    # The risk does not pay.
    watch.until('on the way to the bin', lambda facts, _: facts['held'] and facts['scanned']
                and facts['joints'][0] > 1.15)
    watch.mark('slip')
    watch.cell('slip', seconds=0.4)
    watch.until('the part lost', lambda facts, _: not facts['held'] and facts['part'][2] < 0.06)
    sent = time.monotonic()
    watch.cell('enable', on=False)
    watch.mark('person steps in')
    watch.phase('PAUSED')
    result.add('enable lost → paused', f'{1e3 * (time.monotonic() - sent):.0f} ms')
    watch.cell('push', newtons=[-10.0, -45.0, 0.0], seconds=0.4)
    watch.mark('push')
    moved = watch.silent(12)
    watch.mark('stop')
    end = watch.end()
    watch.phase('HOLD')
    result.add('first goal ended', f'{Code(end.code).name} after {end.ticks} inferences',
               end.code == Code.STOPPED)

    # Back to where it was: the person, the part, the arm, the policy. Nothing starts by itself.
    watch.cell('place', **found)
    watch.cell('enable', on=True)
    refused = client.call(lambda c: c.restore(NAME))
    worst = max(zip(refused.distance, refused.limit, refused.moved, strict=True), default=None)
    result.add('restore, arm elsewhere', f'{Code(refused.code).name}' + (
        f': {worst[2]} is {worst[0]:.2f} from the witness, limit {worst[1]:g}' if worst else ''),
        refused.code == Code.ROBOT_MOVED)
    witness = dict(zip(capsule.witness_names, capsule.witness, strict=True))
    watch.mark('drive back')
    watch.drive([witness[f'joint_position.{j}'] for j in JOINTS],
                witness['joint_position.finger'], 2.0)
    sent = time.monotonic()
    restored = client.call(lambda c: c.restore(NAME))
    restore_s = time.monotonic() - sent
    watch.mark('restore')
    result.add('restore at the witness', f'{restored.message} ({1e3 * restore_s:.1f} ms)',
               restored.success)
    silent = watch.silent(10)
    result.add('actions sent between stop and new goal', str(moved + silent), moved + silent == 0)

    # On.
    watch.mark('new goal')
    watch.execute()
    # In whichever bin: the demo must be able to fail.
    watch.until('the part in a bin', lambda facts, _: facts['success'] or (
        facts['scanned'] and facts['finger'] > 0.02 and facts['part'][2] < 0.05))
    watch.mark('placed')
    watch.until('the hand away', lambda facts, _: hypot(*facts['seen'][:2]) > 0.15)
    watch.end()
    facts = watch.until('the end', lambda *_: True)
    judge(watch, result, restored, facts)
    return result


def above(facts: dict[str, Any]) -> bool:
    ahead, left, up = facts['seen']
    return hypot(ahead, left) < SAVE_XY and up > -SAVE_Z and facts['finger'] > 0.025


def judge(watch: Watch, result: Result, restored: Any, facts: dict[str, Any]) -> None:
    model = rollout.load()
    before = watch.shadow.verdict(model)
    after = watch.shadow.verdict(model, since_epoch=restored.epoch)
    result.add('chunks equal to an independent ONNX Runtime, whole story', str(before),
               _proves(before))
    result.add('the same, after the restore', str(after), _proves(after))
    result.add('part scanned, in the bin that was shown once', f'{facts["success"]} '
               f'({COLOURS[TARGET]})', facts['success'])
    result.add('time of the story', f'{watch.now:.1f} s')


def _proves(verdict: Verdict) -> bool:
    return verdict.equal > 0 and not verdict.different
