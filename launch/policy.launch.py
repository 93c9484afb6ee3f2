"""Start a policy node and, with autostart, configure and activate it.

ros2 launch flashrt_ros policy.launch.py policy_file:=walk.yaml namespace:=g1
"""
from launch import LaunchContext, LaunchDescription
from launch.actions import DeclareLaunchArgument, EmitEvent, OpaqueFunction, RegisterEventHandler
from launch.conditions import IfCondition
from launch.events import matches_action
from launch.substitutions import LaunchConfiguration, PathJoinSubstitution
from launch_ros.actions import LifecycleNode
from launch_ros.event_handlers import OnStateTransition
from launch_ros.events.lifecycle import ChangeState
from launch_ros.substitutions import FindPackageShare
from lifecycle_msgs.msg import Transition

DEFAULTS = PathJoinSubstitution([FindPackageShare('flashrt_ros'), 'config', 'policy.yaml'])
ARGUMENTS = [
    DeclareLaunchArgument('policy_file', default_value='',
                          description='Policy file to serve; empty: as params_file says.'),
    DeclareLaunchArgument('model_root', default_value='',
                          description='Folder that models are relative to; empty: the folder of '
                                      'the policy file.'),
    DeclareLaunchArgument('params_file', default_value=DEFAULTS,
                          description='Parameters of the node (YAML).'),
    DeclareLaunchArgument('namespace', default_value='', description='Namespace of the node.'),
    DeclareLaunchArgument('name', default_value='policy_node', description='Name of the node.'),
    DeclareLaunchArgument('autostart', default_value='true',
                          description='Configure and activate the node; false leaves it '
                                      'unconfigured.'),
]


def start(context: LaunchContext) -> list:
    """Return the node and its transitions; an empty argument leaves params_file its say."""
    given = {name: LaunchConfiguration(name).perform(context)
             for name in ('policy_file', 'model_root')}
    node = LifecycleNode(
        package='flashrt_ros', executable='policy_node', name=LaunchConfiguration('name'),
        namespace=LaunchConfiguration('namespace'), output='screen',
        parameters=[LaunchConfiguration('params_file'), {k: v for k, v in given.items() if v}])
    wanted = IfCondition(LaunchConfiguration('autostart'))

    def change(transition: int) -> EmitEvent:
        return EmitEvent(condition=wanted, event=ChangeState(
            lifecycle_node_matcher=matches_action(node), transition_id=transition))

    activate = RegisterEventHandler(OnStateTransition(
        target_lifecycle_node=node, start_state='configuring', goal_state='inactive',
        entities=[change(Transition.TRANSITION_ACTIVATE)]))
    return [activate, node, change(Transition.TRANSITION_CONFIGURE)]


def generate_launch_description() -> LaunchDescription:
    """Return what `ros2 launch` runs."""
    return LaunchDescription([*ARGUMENTS, OpaqueFunction(function=start)])
