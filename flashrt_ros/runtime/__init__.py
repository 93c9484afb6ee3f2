"""The orchestrator between messages and actions, without ROS: see runner.py.

May import core, ingest and (build.py) backends; never rclpy or a message package. Used alike by the
node, by offline replay and by studies.
"""
