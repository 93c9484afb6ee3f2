"""The story of `scenario.py` told by a behaviour tree: the tree decides, people and physics happen.

    sort the part (sequence)
      until the lamp is lit
      approach: the policy, until the hand is above the part
      twice (retry)
        before the grasp (CapsuleScope: save, restore where it fails)
          carry: the policy, until the part is in its bin; fails when the part is lost
          recover: wait for the word of a person, drive to the capsule's witness

When the gripper slips, *carry* fails. The scope stops the robot and asks whether it may return: no,
for the arm is elsewhere. A person steps in, leans against the arm, puts the part back and gives the
word; the tree drives the arm back, the scope restores the policy, and *carry* is tried again.
"""
from __future__ import annotations

from collections.abc import Callable
from math import hypot
import threading
from types import SimpleNamespace
from typing import Any

from py_trees.behaviour import Behaviour
from py_trees.blackboard import Blackboard
from py_trees.common import ParallelPolicy, Status
from py_trees.composites import Parallel, Sequence
from py_trees.decorators import Retry
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from flashrt_ros.clients.behaviours import ExecutePolicy
from flashrt_ros.clients.scope import CapsuleScope
from flashrt_ros.core.errors import Code
from flashrt_ros.demo.arm import JOINTS
from flashrt_ros.demo.scenario import Result, above, judge, open_story
from flashrt_ros.demo.watch import SPACE, TIMEOUT_S, Watch

PERIOD_S = 0.02
SCOPE = 'before the grasp'
Facts = dict[str, Any]


class Until(Behaviour):
    """SUCCESS once something holds for the facts of the cell, RUNNING before; `status` instead of
    SUCCESS where it is given."""

    def __init__(self, name: str, watch: Watch, holds: Callable[[Facts], bool],
                 status: Status = Status.SUCCESS) -> None:
        super().__init__(name)
        self._watch = watch
        self._holds = holds
        self._status = status

    def update(self) -> Status:
        """Look at the newest facts."""
        facts = self._watch.record.facts
        return self._status if facts and self._holds(facts[-1][1]) else Status.RUNNING


class Drive(Behaviour):
    """Moves the arm to the witness of the scope's capsule, as any controller's client would."""

    def __init__(self, name: str, watch: Watch, seconds: float = 2.0) -> None:
        super().__init__(name)
        self._watch = watch
        self._seconds = seconds
        node = watch.client.node
        self._arm = node.create_publisher(
            JointTrajectory, f'{SPACE}/arm_controller/joint_trajectory', 10)
        self._gripper = node.create_publisher(
            Float64MultiArray, f'{SPACE}/gripper_controller/commands', 10)
        self._goal: list[float] = []

    def initialise(self) -> None:
        """Send it once."""
        capsule = learnt('capsule')
        witness = dict(zip(capsule.witness_names, capsule.witness, strict=True))
        self._goal = [witness[f'joint_position.{j}'] for j in JOINTS]
        point = JointTrajectoryPoint(positions=self._goal)
        point.time_from_start.sec = int(self._seconds)
        self._watch.driving = True             # these commands are not the policy's
        self._gripper.publish(Float64MultiArray(data=[witness['joint_position.finger']]))
        self._arm.publish(JointTrajectory(joint_names=list(JOINTS), points=[point]))

    def update(self) -> Status:
        """Look whether the arm is there."""
        joints = self._watch.record.facts[-1][1]['joints']
        far = max(abs(a - b) for a, b in zip(joints, self._goal, strict=True))
        return Status.SUCCESS if far < 0.01 else Status.RUNNING

    def terminate(self, new_status: Status) -> None:
        """There, or halted."""
        self._watch.driving = False


def learnt(key: str) -> Any:
    """Return what the scope left on the blackboard."""
    return Blackboard.get(f'/capsules/{SCOPE.replace(" ", "_")}/{key}')


class Story:
    """The tree, ticked by a timer of the watch's node; `word` is what a person gives."""

    def __init__(self, watch: Watch) -> None:
        self.word = threading.Event()
        self.ended = threading.Event()
        self.said: list[str] = []              # by the scope, as it went
        self._watch = watch
        client = watch.client.client
        first = ParallelPolicy.SuccessOnOne()
        approach = Parallel('approach', first, children=[
            ExecutePolicy('reach', client),
            Until('the hand is above the part', watch, above)])
        carry = Parallel('carry', first, children=[
            ExecutePolicy('sort', client),
            Until('the part is lost', watch, _lost, Status.FAILURE),
            Until('the part is in a bin', watch, _placed)])
        recover = Sequence('recover', memory=True, children=[
            Until('a person gives the word', watch, lambda _: self.word.is_set()),
            Drive('drive to the witness', watch)])
        self.scope = CapsuleScope(SCOPE, carry, client, recover=recover)
        self.root = Sequence('sort the part', memory=True, children=[
            Until('the lamp is lit', watch, lambda facts: facts['lit']), approach,
            Retry('twice', self.scope, 2)])
        self._timer = watch.client.node.create_timer(PERIOD_S, self._tick)

    def _tick(self) -> None:
        if self.ended.is_set():
            return
        self.root.tick_once()
        text = self.scope.feedback_message
        if text and (not self.said or text != self.said[-1]):
            self.said.append(text)
            self._watch.mark(brief([text]))
        if self.root.status is not Status.RUNNING:
            self.ended.set()

    def close(self) -> None:
        """Tick no more."""
        self._watch.client.node.destroy_timer(self._timer)


def _lost(facts: Facts) -> bool:
    return not facts['held'] and facts['scanned'] and not facts['success'] and (
        facts['part'][2] < 0.06 and facts['finger'] < 0.02)


def _placed(facts: Facts) -> bool:
    return bool(facts['success'] and hypot(*facts['seen'][:2]) > 0.15)


def run(watch: Watch) -> Result:
    """Play the story: what people and physics do is here, what the robot does is in the tree."""
    result = Result()
    open_story(watch, 'tree')
    story = watch.client.inside(lambda: Story(watch))
    try:
        _play(watch, story, result)
    finally:
        watch.client.inside(story.close)
    return result


def _play(watch: Watch, story: Story, result: Result) -> None:
    watch.until('the hand above the part', lambda facts, _: above(facts))
    facts = watch.until('the cell', lambda *_: True)
    found = {'part': facts['part'][:2], 'yaw': facts['yaw']}
    watch.until('on the way to the bin', lambda facts, _: facts['held'] and facts['scanned']
                and facts['joints'][0] > 1.15)
    first = learnt('capsule')
    result.add('saved by the scope', f'tick {first.tick}, step {first.step}, {first.nbytes} bytes')
    watch.mark('slip')
    watch.cell('slip', seconds=0.4)
    watch.until('the part lost', lambda facts, _: _lost(facts))
    watch.phase('HOLD')                        # the tree has noticed

    watch.cell('enable', on=False)
    watch.mark('person steps in')
    watch.cell('push', newtons=[-10.0, -45.0, 0.0], seconds=0.4)
    watch.mark('push')
    moved = watch.silent(12)
    watch.cell('place', **found)
    watch.cell('enable', on=True)
    moved += watch.silent(10)
    refused = [text for text in story.said if 'has moved' in text]
    result.add('may the scope return?', f'{Code.ROBOT_MOVED.name}: {brief(refused)}', bool(refused))
    result.add('actions sent while the tree waits for a word', str(moved), moved == 0)
    story.word.set()

    if not story.ended.wait(3 * TIMEOUT_S):
        raise RuntimeError(f'the tree did not end; the scope said {story.said}')
    restored = [text for text in story.said if 'restored' in text]
    result.add('restored by the scope', brief(restored), bool(restored))
    result.add('the tree', story.root.status.name, story.root.status is Status.SUCCESS)
    facts = watch.until('the end', lambda *_: True)
    # The second try counts since its save, which came after the restore.
    judge(watch, result, SimpleNamespace(epoch=learnt('epoch')), facts)


def brief(said: list[str]) -> str:
    """Return the beginning of the first sentence, for a table or a picture."""
    return said[0].partition(',')[0].partition(';')[0] if said else ''
