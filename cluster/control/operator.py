"""Carries out orders where the groups are held: in the process that started them."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import ray
import ray.exceptions

from actors.config import GroupConfig
from cluster.control.command import Command
from cluster.launch.group import GroupHandle
from cluster.launch.waiting import Progress
from kernels_integration.errors import ConfigError, LatentrayError, UnavailableError

logger = logging.getLogger(__name__)

_LOOK_S = 0.05
_IDLE_LOOK_S = 0.2
_STOP_TIMEOUT_S = 2.0
"""For an order that goes on to notice."""
_ASK_TIMEOUT_S = 30.0
Reload = Callable[[str], GroupConfig]
"""The settings of a group that serves another checkpoint. Errors: ConfigError, CheckpointError where the
front ends cannot go on with it."""


class Operator:
    """Drains and restarts groups; every front end is told.

    Orders that a gateway is given (`joined`) are fetched by a thread; the same may be called directly. One
    order is carried out at a time.
    """

    def __init__(self, groups: Sequence[GroupHandle], *, reload: Reload) -> None:
        self._groups = tuple(groups)
        self._gateways: list[Any] = []
        """Handles of GatewayActor, those that have died too until it is noticed."""
        self._joining = threading.Lock()
        self._closed: dict[int, tuple[str, bool]] = {}
        """Groups that gateways were told to send nothing, and what they were told."""
        self._reload = reload
        self._drained: set[int] = set()
        """By an operator's order: a restart leaves them so."""
        self._weights = [0] * len(groups)
        """By group: who has the same number has the same weights."""
        self._threads: list[threading.Thread] = []
        self._is_stopping = threading.Event()
        self._busy = threading.Lock()

    def joined(self, gateway: Any) -> None:
        """A gateway that serves from now on: it learns what the others were told. Errors: RayError."""
        with self._joining:
            told = [gateway.drain_group.remote(number, *how) for number, how in self._closed.items()]
            told += [gateway.set_weights.remote(*weights) for weights in enumerate(self._weights)]
            ray.get(told, timeout=_ASK_TIMEOUT_S)
            self._gateways.append(gateway)
        thread = threading.Thread(target=self._attend, args=(gateway,), name="operator", daemon=True)
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Begin nothing new; what goes on ends with the groups."""
        self._is_stopping.set()
        for thread in self._threads:
            thread.join(_STOP_TIMEOUT_S)

    def _attend(self, gateway: Any) -> None:
        """Until its end, `stop`, or the end of Ray, without which no call returns."""
        while (asked := self._next_of(gateway)) is not None:
            try:
                command = ray.get(asked)
            except ray.exceptions.RayError:
                return  # it has ended
            code, text = None, ""
            try:
                self.carry_out(command, partial(_say_at, gateway))
            except LatentrayError as error:
                code, text = error.code, str(error)
            except Exception as error:
                logger.exception("an order could not be carried out: %s", command)
                code, text = LatentrayError.code, f"{command.do} failed: {type(error).__name__}: {error}"
            gateway.command_ended.remote(code, text)

    def _next_of(self, gateway: Any) -> Any:
        """The call that has its next order; None: there will be none."""
        asked = gateway.next_command.remote()
        while not self._is_stopping.is_set() and self._groups[0].session_failure is None:
            if ray.wait([asked], timeout=_IDLE_LOOK_S)[0]:
                return asked
        return None

    def carry_out(self, command: Command, say: Progress) -> None:
        """Errors: ConfigError for a group or node that is none, and as `restart`."""
        if not self._busy.acquire(blocking=False):
            raise UnavailableError("another order is carried out; ask again when it has ended")
        try:
            numbers = self._groups_at(command.where)
            logger.info("order: %s", command)
            if command.do == "drain":
                self._drain(numbers, command.drain_s, say)
            elif command.do == "undrain":
                self._undrain(numbers, say)
            else:
                self._restart(numbers, command.model, command.drain_s, say)
        finally:
            self._busy.release()

    def _groups_at(self, where: str | None) -> list[int]:
        """Errors: ConfigError."""
        if where is None:
            return list(range(len(self._groups)))
        if where.isascii() and where.isdigit():
            if int(where) < len(self._groups):
                return [int(where)]
            known = f"groups have the numbers 0 to {len(self._groups) - 1}"
            raise ConfigError(f"there is no group {where}; the server's {known}")
        nodes = [set(group.placement.values()) for group in self._groups]
        found = [n for n, its in enumerate(nodes) if any(where in (node.ip, node.node_id) for node in its)]
        if not found:
            ips = sorted({node.ip for its in nodes for node in its})
            raise ConfigError(
                f"no group has a process at {where!r}; give a group's number (0 to {len(nodes) - 1}) or the "
                f"address of one of the groups' nodes: {', '.join(ips)}"
            )
        return found

    def _drain(self, numbers: Sequence[int], drain_s: float | None, say: Progress) -> None:
        for number in numbers:
            self._close(number)
            self._drained.add(number)
        for number in numbers:
            self._empty(number, drain_s, say, may_move=bool(self._twins(number)))
            say(f"group {number}: drained: nothing runs there, and no new request comes")

    def _close(self, number: int) -> None:
        """Until an operator opens it."""
        reason = f"it is drained; `latentray undrain {number}` lets it serve again"
        self._tell("drain_group", number, reason, False)

    def _undrain(self, numbers: Iterable[int], say: Progress) -> None:
        for number in numbers:
            was_drained = number in self._drained
            self._drained.discard(number)
            self._tell("undrain_group", number)
            say(f"group {number}: {'serves again' if was_drained else 'was not drained'}")

    def _twins(self, number: int) -> list[int]:
        """Groups that a stream of this one can go on at, token by token the same."""
        return [
            other
            for other, group in enumerate(self._groups)
            if other != number
            and other not in self._drained
            and self._weights[other] == self._weights[number]
            and group.failure is None
        ]

    def _empty(self, number: int, drain_s: float | None, say: Progress, *, may_move: bool) -> None:
        """Until nothing of any front end runs on a drained group.

        may_move: at once; otherwise what still runs after drain_s ends, with an error where no other group
        can go on with it.
        """
        start_s = said_s = time.monotonic()
        reason = f"group {number} is drained"
        if may_move:
            self._tell("let_go", number, reason)
        while left := sum(self._tell("num_sequences", number)):
            now_s = time.monotonic()
            if self._is_stopping.is_set():
                raise UnavailableError("the server stops")
            if drain_s is not None and now_s - start_s >= drain_s:
                self._tell("let_go", number, f"{reason}, and its {drain_s:g} s for that are over; ask again")
            elif now_s - said_s >= 1.0:
                say(f"group {number}: waiting for {left} sequences to end ({now_s - start_s:.0f} s)")
                said_s = now_s
            time.sleep(_LOOK_S)

    def _restart(
        self, numbers: Sequence[int], model: str | None, drain_s: float | None, say: Progress
    ) -> None:
        """One group after the other: nothing but the one that restarts is missing at any time.

        With the same weights its streams go on at another group, or, where there is none, wait for its
        return. With others they go on at a group that has the old ones; the last such group's end first.
        Errors: of the checkpoint, before anything is touched; of a group that does not start: it goes back
        to what it served, and those after it are left as they are.
        """
        config = None if model is None else self._reload(model)
        weights = max(self._weights) + 1 if config is not None else None
        for number in numbers:
            self._tell("drain_group", number, "it is being restarted", True)
            try:
                may_move = config is None or bool(self._twins(number))
                self._empty(number, drain_s, say, may_move=may_move)
                self._start_again(number, config, weights, say)
                self._await_heard(number)
            finally:
                if number in self._drained:
                    self._close(number)
                else:
                    self._tell("undrain_group", number)
            say(f"group {number}: {'ready, and drained as before' if number in self._drained else 'serving'}")

    def _start_again(
        self, number: int, config: GroupConfig | None, weights: int | None, say: Progress
    ) -> None:
        group, before = self._groups[number], self._groups[number].config

        def tell(message: str) -> None:
            say(f"group {number}: {message}")

        if config is None or weights is None:
            group.restart(tell)
            return
        self._tell("set_weights", number, weights)
        try:
            group.restart(tell, config)
        except (LatentrayError, ray.exceptions.RayError) as error:
            tell(f"it did not start ({error}); it goes back to what it served")
            self._tell("set_weights", number, self._weights[number])
            group.restart(tell, before)
            raise
        self._weights[number] = weights

    def _await_heard(self, number: int) -> None:
        """Until every front end knows that a group can answer: it would refuse what comes before."""
        deadline_s = time.monotonic() + _ASK_TIMEOUT_S
        while not all(self._tell("is_healthy", number)) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)

    def _tell(self, method: str, *arguments: object) -> list[Any]:
        """What every front end that lives answers. Errors: UnavailableError."""
        with self._joining:
            if method == "drain_group":
                number, reason, returns = arguments
                self._closed[cast(int, number)] = (str(reason), bool(returns))
            elif method == "undrain_group":
                self._closed.pop(cast(int, arguments[0]), None)
            asked = {gateway: getattr(gateway, method).remote(*arguments) for gateway in self._gateways}
        answers = []
        for gateway, call in asked.items():
            try:
                answers.append(ray.get(call, timeout=_ASK_TIMEOUT_S))
            except ray.exceptions.RayActorError:  # nothing of it runs any more
                with self._joining:
                    self._gateways.remove(gateway)
            except ray.exceptions.RayError as error:
                raise UnavailableError(f"a gateway does not answer: {error}") from error
        return answers


def _say_at(gateway: Any, text: str) -> None:
    """Wait until it is said: an actor that waits in coroutines may take two calls in either order."""
    with contextlib.suppress(ray.exceptions.RayError):
        ray.get(gateway.command_said.remote(text), timeout=_ASK_TIMEOUT_S)
