"""A server that listens no more is lost; one that closes idle connections, or comes back in time, is not."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.transport.network import free_port, host_and_port
from actors.transport.server_watch import ServerWatch


@contextmanager
def watched(port: int, patience_s: float) -> Iterator[list[bool]]:
    """What `wait_lost` returned, once it has."""
    is_over, told = threading.Event(), list[bool]()
    watch = ServerWatch(("127.0.0.1", port), patience_s=patience_s)
    thread = threading.Thread(target=lambda: told.append(watch.wait_lost(is_over.is_set)))
    thread.start()
    try:
        yield told
    finally:
        is_over.set()
        thread.join()


def until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_end_of_a_server_is_its_loss() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with watched(port, 0.0) as told:
            line, _ = server.accept()
            server.close()
            line.close()
            until(lambda: told)
            assert told == [True]


def test_a_server_that_closes_idle_connections_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, watched(server.getsockname()[1], 0.0) as told:
        for _ in range(20):
            server.accept()[0].close()
        line, _ = server.accept()
        assert told == []
        line.close()
    assert told == [False], "it was told to end"


def test_a_server_that_comes_back_in_time_is_not_lost() -> None:
    port = free_port("127.0.0.1")
    with watched(port, 60.0) as told:
        for _ in range(2):
            with socket.create_server(("127.0.0.1", port)) as server:
                line, _ = server.accept()  # it has found the server, again
                line.close()
        assert told == []


def test_addresses() -> None:
    assert host_and_port("10.0.0.1:6379") == ("10.0.0.1", 6379)
    assert host_and_port("[::1]:80") == ("::1", 80)
