"""The way out: rows become commands, and on_stop when motion ends.

Everything here is called under the runner's lock and hands commands to the sink at once, so that
nothing can be sent after a stop. In SHADOW the same commands are computed and only reported.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import functools
import logging
from typing import Any

from numpy.typing import NDArray

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.ingest.observation import Observation
from flashrt_ros.ingest.output import Command, Joints
from flashrt_ros.runtime.hub import Hub
from flashrt_ros.runtime.phases import Phase

log = logging.getLogger('flashrt_ros.runtime')
Row = Mapping[str, NDArray[Any]]


class Measured(Mapping[str, tuple[float, int]]):
    """The newest measured joints, looked up only if somebody asks: most commands do not."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    @functools.cached_property
    def _joints(self) -> Mapping[str, tuple[float, int]]:
        return self._observation.joints()

    def __getitem__(self, name: str) -> tuple[float, int]:
        return self._joints[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._joints)

    def __len__(self) -> int:
        return len(self._joints)


class Motion:
    """Publishes rows, what lies between them, and on_stop."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        period, hz = hub.file.policy.period_s, hub.file.run.publish_hz
        self.parts = max(1, round(hz * period)) if hz and not hub.lock_step else 1
        self._part_s = period / self.parts
        self._whole = [n for n, o in hub.file.outputs.items() if o.chunk_as_trajectory]
        self._single = [n for n in hub.file.outputs if n not in self._whole]
        self._repeats = {n for n, o in hub.file.outputs.items() if o.on_stop.repeat}
        self._repeated: dict[str, Command] = {}

    def act(self) -> Row:
        """Take the next row from the queue and publish it; return the raw row.

        Raises Refusal: START_DEVIATION where publishing would begin too far from the measured
        joints, BACKEND for a value that is not finite; nothing was published then.
        """
        hub = self._hub
        queue, joints = hub.queue, Measured(hub.observation)
        begins = not hub.publishing
        whole = begins or queue.fresh
        row = queue.pop()
        if begins:
            for output in hub.outputs.values():
                output.begin()
            if hub.phase is Phase.RUNNING:
                self._check_start(row, joints)
        commands = []
        for name, output in hub.outputs.items():
            rest = queue.rest(name) if whole and name in self._whole else None
            command = output.command(row[name], joints, self._part_s, anchor=queue.anchor(name),
                                     rest=rest)
            if command is not None:
                commands.append((name, command))
        self._send(commands)
        hub.publishing = True
        if hub.goal is not None:
            hub.goal.acted = True
        return row

    def between(self, part: int) -> None:
        """Publish what lies `part` of `parts` of a step after the last row."""
        hub = self._hub
        if not hub.publishing:
            return
        rows = hub.queue.between(part, self.parts)
        joints = Measured(hub.observation)
        commands = []
        for name in self._single if rows else ():
            command = hub.outputs[name].command(rows[name], joints, self._part_s,
                                                anchor=hub.queue.anchor(name))
            if command is not None:
                commands.append((name, command))
        self._send(commands)

    def _check_start(self, row: Row, joints: Joints) -> None:
        """The first action rule."""
        hub = self._hub
        for name, output in hub.outputs.items():
            far = output.start_deviation(row[name], joints, anchor=hub.queue.anchor(name))
            if far is not None:
                joint, distance, limit = far
                raise Refusal(
                    Code.START_DEVIATION, f'output {name}: the first action is {distance:.4g} '
                    f'from the measured position of {joint}, start_tolerance is {limit:g}; move '
                    'the robot there, or reset the policy', output=name, moved=(joint,),
                    distance=(distance,), limit=(limit,))

    def _send(self, commands: list[tuple[str, Command]]) -> None:
        hub = self._hub
        send = hub.sink.publish if hub.phase is Phase.RUNNING else hub.sink.shadow
        for name, command in commands:
            hub.count.clipped += command.clipped
            send(name, command)

    # -- the end --------------------------------------------------------------------------

    def halt(self) -> str:
        """Send each output's on_stop; return why some could not be sent, '' where all is well."""
        hub = self._hub
        joints = self._newest_joints()
        trouble = []
        for name, output in hub.outputs.items():
            command = output.on_stop(joints)
            if isinstance(command, str):
                trouble.append(command)
            elif command is not None:
                if name in self._repeats:
                    self._repeated[name] = command
                try:
                    hub.sink.stop(name, command)
                except Exception as error:     # the other outputs must still be stopped
                    log.exception('on_stop of output %s could not be sent', name)
                    trouble.append(f'output {name}: on_stop could not be sent ({error})')
        return '; '.join(trouble)

    def _newest_joints(self) -> Joints:
        """Return the newest measured joints; of one that is NaN by now, as latched last."""
        observation = self._hub.observation
        joints = dict(observation.joints())
        if self._hub.publishing:               # so a step was latched since motion was permitted
            values, stamps = observation.witness()
            for name, value in values.items():
                term, _, joint = name.partition('.')
                if term == 'joint_position':
                    joints.setdefault(joint, (value, stamps[name]))
        return joints

    def repeat(self) -> None:
        """Send again what is to be repeated every step until the next goal."""
        for name, command in self._repeated.items():
            self._hub.sink.stop(name, command)

    def end_repeat(self) -> None:
        """A goal begins, or the node leaves: repeat no longer."""
        self._repeated.clear()
