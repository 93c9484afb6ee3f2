"""The floor: a bare rclpy node with the messages and the service that the policy node is held to.

Answers each Float32MultiArray on `obs` with one on `policy/action`, and a Trigger on `trigger`.
With --camera QOS (reliable or best_effort) instead each Image on `cam/image_raw` with a JointState
on `action` that has its first value.
"""
from __future__ import annotations

import sys

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.node import Node
from rclpy.qos import qos_profile_sensor_data
from sensor_msgs.msg import Image, JointState
from std_msgs.msg import Float32MultiArray
from std_srvs.srv import Trigger


def arrays(node: Node) -> None:
    """Answer arrays and a service."""
    publisher = node.create_publisher(Float32MultiArray, 'policy/action', 10)
    node.create_subscription(
        Float32MultiArray, 'obs',
        lambda m: publisher.publish(Float32MultiArray(data=m.data[:4])), 10)

    def answer(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = True
        return response
    node.create_service(Trigger, 'trigger', answer)


def camera(node: Node) -> None:
    """Answer pictures."""
    publisher = node.create_publisher(JointState, 'action', 10)

    def answer(image: Image) -> None:
        message = JointState(name=['a', 'b', 'c', 'd'], effort=[image.data[0] / 255, 0., 0., 0.])
        message.header.stamp = node.get_clock().now().to_msg()
        publisher.publish(message)
    reliable = sys.argv[sys.argv.index('--camera') + 1] == 'reliable'
    node.create_subscription(Image, 'cam/image_raw', answer,
                             10 if reliable else qos_profile_sensor_data)


def main() -> None:
    """Echo until interrupted."""
    rclpy.init()
    node = rclpy.create_node('echo')
    (camera if '--camera' in sys.argv else arrays)(node)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        executor.spin()
    except (KeyboardInterrupt, ExternalShutdownException):
        pass


if __name__ == '__main__':
    main()
