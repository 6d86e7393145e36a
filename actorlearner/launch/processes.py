"""Processes of this machine: how they start, and what they find then."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext

logger = logging.getLogger(__name__)

_ONE_THREAD = [  # read when a library is loaded, so too late for the child to set
    f"{library}_NUM_THREADS" for library in ("OMP", "OPENBLAS", "MKL", "VECLIB_MAXIMUM", "NUMEXPR")
]


def bound_receiving(connection: Connection, seconds: float) -> None:
    """Make it an error that the rest of a message does not come (where pipes are sockets)."""
    if os.name == "posix":
        with socket.socket(fileno=os.dup(connection.fileno())) as twin:
            whole, part = divmod(seconds, 1)
            limit = struct.pack("ll", int(whole), int(part * 1e6))
            twin.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


@contextmanager
def surroundings() -> Iterator[None]:
    """What a new process finds: one thread for each library that asks, and no ``__main__``.

    It would import the user's script again, which may lack a ``__main__`` guard; all that it needs
    from there travels by value. SIGINT and SIGTERM are held back until it has learned to ignore
    them.
    """
    resource_tracker.ensure_running()  # it lets signals through again when it starts
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main, environment = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = types.ModuleType("__main__")
    os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        for name in _ONE_THREAD:
            del os.environ[name]
            if name in environment:
                os.environ[name] = environment[name]
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # last: one that waited is raised here


def start_processes(start_method: str = "auto") -> BaseContext:
    """Make ready to start children, and return the context that does.

    On Linux this starts the fork server, which loads torch and Gymnasium while the caller goes on;
    so the earlier, the better. It dies with the thread that started it: use the main one.
    """
    if start_method == "auto":
        start_method = "forkserver" if sys.platform == "linux" else "spawn"
    context = multiprocessing.get_context(start_method)
    if start_method == "forkserver":
        if threading.current_thread() is not threading.main_thread():
            logger.debug("the fork server starts from a thread and will end with it")
        context.set_forkserver_preload(["actorlearner.launch._zygote"])
        with surroundings():
            forkserver.ensure_running()
    return context
