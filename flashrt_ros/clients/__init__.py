"""What calls a policy node: client.py (futures), blocking.py (for programs without a node),
behaviours.py and scope.py (py_trees), trees/ (BehaviorTree.CPP; in share/flashrt_ros/trees).

May import core, rclpy and message packages; never the node. Nothing but blocking.py waits or spins.
"""
