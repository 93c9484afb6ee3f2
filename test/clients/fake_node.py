"""A stand-in for the policy node that answers when a test says so, late or never, or goes away."""
from __future__ import annotations

from collections.abc import Callable
import threading
from typing import Any

from rclpy.action import ActionServer, CancelResponse, GoalResponse
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.task import Future

from flashrt_ros.action import ExecutePolicy
from flashrt_ros.clients.client import SERVICES, STATUS_QOS, TRIGGERS
from flashrt_ros.core.errors import Code
from flashrt_ros.msg import PolicyStatus
from test.node.harness import WAIT_S, Probe, namespace

SESSION = 7


class FakeNode:
    """Serves everything. What is in `held` is received and not answered until `release`; what is
    in `refuses` says no with a code. A restore raises the epoch, as the node's does."""

    def __init__(self) -> None:
        self.name = f'{namespace()}/policy_node'
        self.held: set[str] = set()
        self.refuses: dict[str, Code] = {}
        self.log: list[tuple[str, Any]] = []
        self.epoch = 1
        self.saved = 0
        self._gone = False
        self.probe = Probe('fake')
        self._waiting: list[tuple[str, Future]] = []
        self._news = threading.Condition()
        self._group = ReentrantCallbackGroup()
        ns, _, name = self.name.rpartition('/')
        self.node = Node(name, namespace=ns, context=self.probe.context,
                         use_global_arguments=False)
        self.probe.inside(self._serve)

    def _serve(self) -> None:
        self.services = [
            self.node.create_service(SERVICES[s], f'~/{s}', self._handler(s),
                                     callback_group=self._group) for s in SERVICES]
        self.status = self.node.create_publisher(PolicyStatus, '~/status', STATUS_QOS)
        self.server = ActionServer(
            self.node, ExecutePolicy, '~/execute', self._execute, callback_group=self._group,
            goal_callback=self._accept, cancel_callback=self._cancel)
        self.probe._executor.add_node(self.node)

    async def _accept(self, goal: Any) -> GoalResponse:
        await self._hold('goal', goal)
        return GoalResponse.ACCEPT

    async def _execute(self, handle: Any) -> ExecutePolicy.Result:
        await self._hold('result')
        if handle.is_cancel_requested:
            handle.canceled()
            return ExecutePolicy.Result(code=int(Code.CANCELLED), epoch=self.epoch)
        handle.succeed()
        return ExecutePolicy.Result(code=int(Code.OK), epoch=self.epoch)

    def _cancel(self, _: Any) -> CancelResponse:
        self._note('cancel', None)
        return CancelResponse.ACCEPT

    def _note(self, what: str, request: Any) -> None:
        with self._news:
            self.log.append((what, request))
            self._news.notify_all()

    async def _hold(self, what: str, request: Any = None) -> None:
        """Take a request in; come back when it may be answered."""
        waiting = Future()
        held = what in self.held
        if held:
            self._waiting.append((what, waiting))
        self._note(what, request)
        if held:
            await waiting

    def _handler(self, service: str) -> Callable[[Any, Any], Any]:
        async def handle(request: Any, response: Any) -> Any:
            await self._hold(service, request)
            self._answer(service, request, response)
            return response
        return handle

    def _answer(self, service: str, request: Any, response: Any) -> None:
        code = self.refuses.get(service, Code.OK)
        response.success = code is Code.OK
        response.message = f'{service}: {code.name}'
        if response.success and service == 'save_capsule':
            self.saved += 1
            response.capsule.id = f'id{self.saved}'
        if response.success and service == 'restore_capsule':
            if not request.check:
                self.epoch += 1
            response.capsule.id = request.if_id
        if service not in TRIGGERS:
            response.code = int(code)
        if hasattr(response, 'capsule'):
            response.capsule.name = getattr(request, 'name', '')
            response.capsule.session = SESSION
        if hasattr(response, 'epoch'):
            response.epoch = self.epoch

    def say_status(self, session: int) -> None:
        """Publish a status."""
        self.status.publish(PolicyStatus(session=session, epoch=self.epoch))

    def wait(self, what: str, n: int = 1) -> Any:
        """Wait for the n-th request of a kind and return it."""
        def got() -> list[Any]:
            return [r for w, r in self.log if w == what]
        with self._news:
            assert self._news.wait_for(lambda: len(got()) >= n, WAIT_S), f'{what}: {self.log}'
            return got()[n - 1]

    def count(self, what: str) -> int:
        """Return how many requests of a kind came so far."""
        return sum(w == what for w, _ in self.log)

    def release(self, what: str) -> None:
        """Answer what was held."""
        self.held.discard(what)

        def go() -> None:
            for waiting in [f for w, f in self._waiting if w == what]:
                waiting.set_result(None)
            self._waiting = [(w, f) for w, f in self._waiting if w != what]
        self.probe.inside(go)
        self.probe.inside(lambda: None)

    def vanish(self) -> None:
        """Leave the graph; what is held is never answered."""
        def go() -> None:
            self.probe._executor.remove_node(self.node)
            self.server.destroy()
            self.node.destroy_node()
        if not self._gone:
            self._gone = True
            self.probe.inside(go)

    def close(self) -> None:
        """End. A node that stays would keep its place among the participants of this machine."""
        self.vanish()
        self.probe.close()
