"""The simulated cell as a ROS node: sensors out, commands in, in real time.

Publishes `joint_states` (JointState), `part_in_hand` and `cue` (Float64MultiArray) at 50 Hz,
`enable` (Bool) at 20 Hz, `camera/image_raw` (Image, rgb8) at 2.5 Hz where EGL loads, `cell_state`
(String, JSON) at 20 Hz: what a person who looks at the cell would know.
Subscribes to `arm_controller/joint_trajectory` (JointTrajectory; the fake controller of
controller.py) and `gripper_controller/commands` (Float64MultiArray), whoever sends them, and to
`cell_command` (String, JSON): what happens to the cell. `{"id": 7, "do": …}` is one of
`reset` (part, yaw, target) · `slip` (seconds without pressure) · `push` (newtons, seconds) ·
`enable` (on) · `place` (part, yaw). `cell_state` carries the newest id that was carried out.
"""
from __future__ import annotations

from array import array
from collections.abc import Callable
import json
import threading
import time
from typing import Any

from flashrt_ros.demo import render

NO_PICTURES = render.choose()

import rclpy  # noqa: E402
from rclpy._rclpy_pybind11 import RCLError  # noqa: E402
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor  # noqa: E402
from rclpy.node import Node  # noqa: E402
from rclpy.qos import QoSProfile, qos_profile_sensor_data  # noqa: E402
from sensor_msgs.msg import Image, JointState  # noqa: E402
from std_msgs.msg import Bool, Float64MultiArray, String  # noqa: E402
from trajectory_msgs.msg import JointTrajectory  # noqa: E402

from flashrt_ros.demo.arm import JOINTS, PHYSICS_S, Cell, Task  # noqa: E402

SENSOR_S = 0.02
PICTURE_S = 0.4


class SimNode(Node):
    """The cell and its topics. One thread spins it; a second one takes pictures."""

    def __init__(self, **options: Any) -> None:
        """`options` are those of rclpy's Node."""
        super().__init__('cell', **options)
        self.cell = Cell()
        self.lit = False
        self.enabled = True
        self.no_pictures = NO_PICTURES
        self.id = 0
        self._undo: list[tuple[float, Callable[[], None]]] = []
        self._started = time.monotonic()
        self._passed = 0               # physics steps since then
        self._turn = 0
        self._moved = threading.Condition()
        self._frame: tuple[Any, int | None, bool] | None = None
        self._ended = False
        make = self.create_publisher
        self._joints = make(JointState, 'joint_states', qos_profile_sensor_data)
        self._part = make(Float64MultiArray, 'part_in_hand', qos_profile_sensor_data)
        self._cue = make(Float64MultiArray, 'cue', qos_profile_sensor_data)
        self._enable = make(Bool, 'enable', QoSProfile(depth=1))
        self._state = make(String, 'cell_state', QoSProfile(depth=10))
        self._image = make(Image, 'camera/image_raw', qos_profile_sensor_data)
        listen = self.create_subscription
        listen(JointTrajectory, 'arm_controller/joint_trajectory', self._on_trajectory, 10)
        listen(Float64MultiArray, 'gripper_controller/commands', self._on_gripper, 10)
        listen(String, 'cell_command', self._on_command, 10)
        self.create_timer(SENSOR_S, self._tick)
        self._thread = threading.Thread(target=self._take_pictures, daemon=True)
        self._thread.start()

    # -- in

    def _on_trajectory(self, message: JointTrajectory) -> None:
        try:
            order = [message.joint_names.index(name) for name in JOINTS]
            points = [[p.positions[i] for i in order] for p in message.points]
        except (ValueError, IndexError):
            self.get_logger().warning(f'a trajectory must name {", ".join(JOINTS)} and have a '
                                      'position for each; it was ignored')
            return
        self.lit = False
        self.cell.controller.command(self.cell.time, points, [
            p.time_from_start.sec + p.time_from_start.nanosec * 1e-9 for p in message.points])

    def _on_gripper(self, message: Float64MultiArray) -> None:
        if len(message.data) == 1:
            self.cell.grip = float(message.data[0])

    def _on_command(self, message: String) -> None:
        order = json.loads(message.data)
        what = order['do']
        if what == 'reset':
            self.cell.reset(Task(tuple(order['part']), order['yaw'], order['target']))
            self._started, self._passed = time.monotonic(), 0
            self._undo.clear()
            self.lit = True
        elif what == 'slip':
            self.cell.pressure = False
            self._later(order['seconds'], lambda: setattr(self.cell, 'pressure', True))
        elif what == 'push':
            self.cell.pull[:] = order['newtons']
            self._later(order['seconds'], lambda: self.cell.pull.fill(0.0))
        elif what == 'enable':
            self.enabled = bool(order['on'])
        elif what == 'place':
            self.cell.place(order['part'], order['yaw'])
        else:
            self.get_logger().warning(f'cell_command: do is {what!r}')
        self.id = order['id']

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        self._undo.append((self.cell.time + seconds, what))

    # -- out

    def _tick(self) -> None:
        due = round((time.monotonic() - self._started) / PHYSICS_S)
        if due - self._passed > 40:            # held up: time is lost, not caught up with
            self._started += (due - self._passed - 40) * PHYSICS_S
            due = self._passed + 40
        self.cell.step((due - self._passed) * PHYSICS_S)
        self._passed = due
        for entry in [e for e in self._undo if e[0] <= self.cell.time]:
            self._undo.remove(entry)
            entry[1]()
        self._turn += 1
        self._sensors()
        with self._moved:
            self._frame = (self.cell.data.qpos.copy(), self._shown, not self.enabled)
            self._moved.notify()

    @property
    def _shown(self) -> int | None:
        return self.cell.task.target if self.lit else None

    def _sensors(self) -> None:
        cell = self.cell
        joints = JointState(name=[*JOINTS, 'finger'])
        joints.header.stamp = self.get_clock().now().to_msg()
        joints.position = [*map(float, cell.joints), cell.finger]
        joints.velocity = [*map(float, cell.joint_velocities), 0.0]
        cue = [0.0, 0.0, 0.0]
        if self._shown is not None:
            cue[self._shown] = 1.0
        self._cue.publish(Float64MultiArray(data=cue))
        self._part.publish(Float64MultiArray(data=list(map(float, cell.seen))))
        self._joints.publish(joints)
        if self._turn % 3 == 0:
            self._enable.publish(Bool(data=self.enabled))
            self._state.publish(String(data=json.dumps(self._facts())))

    def _facts(self) -> dict[str, Any]:
        cell = self.cell
        return {'id': self.id, 'time': cell.time, 'part': cell.part.tolist(),
                'yaw': cell.part_yaw, 'seen': cell.seen.tolist(), 'held': cell.held,
                'scanned': cell.scanned, 'success': cell.success, 'finger': cell.finger,
                'joints': cell.joints.tolist(), 'setpoint':
                    cell.controller.sample(cell.time).tolist(),
                'target': cell.task.target, 'lit': self.lit, 'no_pictures': self.no_pictures,
                'listeners': [p.get_subscription_count() for p in (
                    self._joints, self._part, self._cue, self._enable)]}

    def _take_pictures(self) -> None:
        camera = self.no_pictures or render.open_camera(self.cell.model)
        if isinstance(camera, str):
            self.no_pictures = camera
            self.get_logger().info(f'no pictures: {camera}')
            return
        while True:
            with self._moved:
                self._moved.wait_for(lambda: self._frame is not None or self._ended)
                if self._ended or self._frame is None:
                    break
                frame = self._frame
                self._frame = None
            started = time.monotonic()
            try:
                self._publish(camera.picture(*frame))
            except RCLError:           # the context was shut down meanwhile
                break
            time.sleep(max(0.0, PICTURE_S - (time.monotonic() - started)))
        camera.close()

    def _publish(self, pixels: Any) -> None:
        image = Image(height=pixels.shape[0], width=pixels.shape[1], encoding='rgb8',
                      step=3 * pixels.shape[1])
        image.header.stamp = self.get_clock().now().to_msg()
        image.header.frame_id = 'camera'
        image.data = array('B', pixels.tobytes())
        self._image.publish(image)

    def close(self) -> None:
        """End the picture thread."""
        with self._moved:
            self._ended = True
            self._moved.notify()
        self._thread.join(2)


def main() -> None:
    """Run until SIGINT or SIGTERM."""
    rclpy.init()
    node = SimNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        executor.spin()
    except (KeyboardInterrupt, ExternalShutdownException):
        pass
    except Exception:
        if rclpy.ok():                 # else a signal ended the context while a timer published
            raise
    finally:
        node.close()
        node.destroy_node()
        rclpy.try_shutdown()


if __name__ == '__main__':
    main()
