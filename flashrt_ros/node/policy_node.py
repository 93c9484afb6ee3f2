"""The policy node: a lifecycle node around one runner. Wiring only; every decision is elsewhere."""
from __future__ import annotations

from collections.abc import Callable
import sys
import traceback
from typing import Any

from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter

from flashrt_ros.core.errors import Code, Refusal
from flashrt_ros.core.session import Options
from flashrt_ros.node.goals import Goals
from flashrt_ros.node.handover import Handover
from flashrt_ros.node.inputs import Inputs
from flashrt_ros.node.intake import Intake
from flashrt_ros.node.params import Parameters, Settings
from flashrt_ros.node.poll import Poll
from flashrt_ros.node.ros_sink import RosSink
from flashrt_ros.node.ros_time import RosTime
from flashrt_ros.node.services import Services
from flashrt_ros.node.status import Status
from flashrt_ros.node.telling import Telling
from flashrt_ros.runtime.build import build
from flashrt_ros.runtime.runner import Runner
from flashrt_ros.runtime.sink import Clock

SUCCESS = TransitionCallbackReturn.SUCCESS
FAILURE = TransitionCallbackReturn.FAILURE
ERROR = TransitionCallbackReturn.ERROR


class PolicyNode(LifecycleNode):
    """Serves one policy file.

    Parameters: see `params.PARAMETERS`.
    Action: ~/execute (ExecutePolicy).
    Services: ~/save_capsule ~/restore_capsule ~/rollback ~/list_capsules ~/drop_capsule
    ~/keep_capsule; Triggers ~/checkpoint ~/rewind ~/reset ~/start ~/stop ~/pause ~/resume.
    Publishers: ~/status (latched), ~/chunk, ~/capsule_events, /diagnostics, the policy's outputs.
    Subscriptions: the policy's inputs, from configure to cleanup; /clock with use_sim_time.

    It runs on a single-threaded executor, and on no other. One reentrant group holds all but the
    policy's inputs and its step timer, or a restore that is awaited would keep all others waiting;
    those have a thread of their own (intake.py).
    """

    def __init__(self, name: str = 'policy_node', **kwargs: Any) -> None:
        """`kwargs` as rclpy's Node takes them. Raises ValueError for a wrong parameter."""
        super().__init__(name, **kwargs)
        self.runner: Runner | None = None
        self._group = ReentrantCallbackGroup()
        self._intake = Intake(self, self._on_deaf)
        self._inputs: Inputs | None = None
        self._handover: Handover | None = None
        self._step_timer: Any = None
        self._returned = True          # the device thread ended when it was asked to
        self._leaving = False          # it must not move again
        self._stepping = False         # the step timer is to run
        self._params = Parameters(self, configured=lambda: self.runner is not None,
                                      changed=self._on_settings)
        self._time = RosTime(self, self._on_jump)
        self._telling = Telling(self)
        self._status = Status(self, self._telling, self._time, self._get, self._group)
        self._goals = Goals(self, self._get, self._group)
        self._poll = Poll(self, self._get, lambda: self._intake.group.since, self._group)
        self._sink = RosSink(self, self._telling, self._time, self._status, self._goals,
                             self._group, self._poll.follow)
        self._verbs = Services(self, self._get, self._group)
        self.add_post_set_parameters_callback(self._on_parameters)
        self._guard_transitions()
        self._on_settings(self._params.settings)
        self._status.publish()

    def _get(self) -> Runner | None:
        return self.runner

    def _on_settings(self, settings: Settings) -> None:
        self._status.set_rate(settings.status_hz)
        self._verbs.introspect(settings.introspection)
        if self.runner is not None:
            self.runner.allow_force = settings.allow_force

    def _on_parameters(self, params: list[Parameter]) -> None:
        if any(p.name == 'use_sim_time' for p in params):
            self._intake.refresh()

    def _on_deaf(self, why: str) -> None:
        if self.runner is not None:
            self.runner.give_up(why)

    def _on_jump(self, delta_ns: int, switched: bool) -> None:
        if self.runner is not None:
            self.runner.clock_jumped(delta_ns, switched=switched)

    # -- lifecycle ------------------------------------------------------------------------

    def _guard_transitions(self) -> None:
        """rclpy raises out of its change_state service for a transition that is not possible now,
        which ends the executor; such a request is answered `success: false` instead."""
        original = self._service_change_state.callback

        def change_state(request: Any, response: Any) -> Any:
            try:
                return original(request, response)
            except Exception as error:
                state = self._state_machine.current_state[1]
                self.get_logger().warning(
                    f'transition {request.transition.label or request.transition.id} refused in '
                    f'state {state}: {str(error).splitlines()[0]}')
                response.success = False
                return response

        self._service_change_state.callback = change_state

    def _transition(self, what: str, work: Callable[[], None],
                    otherwise: TransitionCallbackReturn) -> TransitionCallbackReturn:
        """Run a transition's work; what it raises is logged here, for rclpy drops it."""
        try:
            work()
            return SUCCESS
        except Refusal as refusal:
            self.get_logger().error(f'{what}: {refusal}')
            self._status.failure = str(refusal)
        except Exception as error:
            self.get_logger().error(f'{what}: {traceback.format_exc()}')
            self._status.failure = f'INTERNAL: {type(error).__name__}: {error}'
        return otherwise

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Load the policy, allocate, warm up, subscribe. On failure nothing is left behind."""
        result = self._transition('configure', self._configure, FAILURE)
        if result is not SUCCESS:
            self._tear_down()
        self._status.publish()
        return result

    def _configure(self) -> None:
        self._status.clear()
        settings = self._params.settings
        self._check_leaving()
        if settings.policy_file is None:
            raise Refusal(Code.INVALID_POLICY_FILE, 'the parameter policy_file is empty; start the '
                          'node with -p policy_file:=/path/to/policy.yaml')
        options = Options(history=settings.history, device_slots=settings.device_slots,
                          host_bytes=settings.host_bytes, max_capsules=settings.max_capsules,
                          segment_bytes=settings.segment_bytes, verify=settings.verify,
                          directory=settings.capsule_dir, disk_bytes=settings.disk_bytes)
        runner = build(settings.policy_file, self._sink,
                       model_root=settings.model_root, modules=settings.python_modules,
                       options=options, allow_force=settings.allow_force,
                       clock=Clock(now_ns=self._time.now_ns))
        self._sink.open(runner.file.outputs)
        self.runner = runner
        self._handover = Handover(runner.session)
        self._check_leaving()          # `halt` may have found no runner
        self._inputs = Inputs(self, runner, runner.topics(), self._intake.group,
                              self._status.mismatch, self._handover, self._poll.supervise)
        if runner.step_period_s is not None:
            self._step_timer = self.create_timer(runner.step_period_s, self._on_step,
                                                 callback_group=self._intake.group,
                                                 autostart=False)
        self._intake.start()
        self.get_logger().info(f'serving {settings.policy_file.name}: {runner.describe()}')

    def _check_leaving(self) -> None:
        if self._leaving:
            raise Refusal(Code.WRONG_PHASE, 'the node is leaving')

    def _on_step(self) -> None:
        try:
            runner, handover = self.runner, self._handover
            if runner is not None and handover is not None:
                self._poll.supervise()
                runner.timer()
                handover.rest()
        except Exception:
            self.get_logger().error(traceback.format_exc(), throttle_duration_sec=1.0)

    def _follow_steps(self) -> None:
        """On the timer's own thread (see Intake.run)."""
        timer = self._step_timer
        if timer is not None:
            if self._stepping:
                timer.reset()
            else:
                timer.cancel()

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """To HOLD, or with autorun to RUNNING."""
        def work() -> None:
            assert self.runner is not None
            self.runner.activate()
            self._stepping = True
            self._intake.run(self._follow_steps)
        return self._transition('activate', work, FAILURE)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop; capsule verbs go on working."""
        def work() -> None:
            if self.runner is not None:
                self.runner.deactivate()
            self._stepping = False
            self._intake.run(self._follow_steps)
        return self._transition('deactivate', work, ERROR)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Give everything back that configure took."""
        result = self._transition('cleanup', self._tear_down, ERROR)
        self._status.publish()
        return result

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Stop and give everything back."""
        return self._transition('shutdown', self._tear_down, ERROR)

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """Back to unconfigured, so that a corrected file can be configured."""
        result = self._transition('error', self._tear_down, ERROR)
        self._status.publish()
        return result

    # -- the end --------------------------------------------------------------------------

    def halt(self, reason: str) -> None:
        """Stop at once and for good, from any thread: on_stop is published before this returns, and
        what is configured or activated from here on does not move."""
        self._leaving = True
        if self.runner is not None:
            self.runner.shutdown(reason)
            self._sink.flush(0.3)

    @property
    def busy(self) -> bool:
        """Whether a client still waits for a goal's result."""
        return self._goals.waiting

    def close(self, timeout_s: float) -> bool:
        """Give everything back; False where a program did not return in time."""
        self._tear_down(timeout_s)
        self._time.close()
        return self._returned

    def destroy_node(self) -> None:
        """Stop, give everything back, tell what is left to tell, and leave the graph."""
        if self.runner is not None:
            self._tear_down(1.0)
        self._telling.close()
        super().destroy_node()

    def _tear_down(self, timeout_s: float = 5.0) -> None:
        self._stepping = False
        runner, self.runner = self.runner, None
        self._handover = None
        self._poll.follow()
        try:
            if runner is not None:
                runner.shutdown('cleanup')
        finally:
            self._intake.stop(timeout_s)
            if self._step_timer is not None:
                self.destroy_timer(self._step_timer)
                self._step_timer = None
            if self._inputs is not None:
                self._inputs.close()
                self._inputs = None
            try:
                if runner is not None:
                    self._returned = runner.close(timeout_s)
            finally:
                self._sink.close()


def main(args: list[str] | None = None) -> None:
    """Run a node until SIGINT or SIGTERM; the exit code is 0 then."""
    from flashrt_ros.node.run import run
    sys.exit(run(sys.argv[1:] if args is None else args))


def overrides(values: dict[str, Any]) -> list[Parameter]:
    """Return parameter overrides from plain values."""
    return [Parameter(name, value=value) for name, value in values.items()]


if __name__ == '__main__':
    main()
