"""The floor: a bare rclpy node with the messages and the service that the policy node is held to.

Answers each Float32MultiArray on `obs` with one on `policy/action`, and a Trigger on `trigger`.
"""
from __future__ import annotations

import rclpy
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from std_msgs.msg import Float32MultiArray
from std_srvs.srv import Trigger


def main() -> None:
    """Echo until interrupted."""
    rclpy.init()
    node = rclpy.create_node('echo')
    publisher = node.create_publisher(Float32MultiArray, 'policy/action', 10)
    node.create_subscription(
        Float32MultiArray, 'obs',
        lambda m: publisher.publish(Float32MultiArray(data=m.data[:4])), 10)

    def answer(_: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success = True
        return response
    node.create_service(Trigger, 'trigger', answer)
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    try:
        executor.spin()
    except (KeyboardInterrupt, ExternalShutdownException):
        pass


if __name__ == '__main__':
    main()
