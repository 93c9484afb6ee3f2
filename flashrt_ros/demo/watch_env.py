"""Where the demo's processes talk: on this machine only, in a ROS domain of their own."""
from __future__ import annotations

import os


def isolate() -> None:
    """Set the environment of this process and its children. Before rclpy starts a context."""
    os.environ['ROS_AUTOMATIC_DISCOVERY_RANGE'] = 'LOCALHOST'
    os.environ['ROS_DOMAIN_ID'] = str(1 + os.getpid() % 100)
