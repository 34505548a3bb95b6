"""The channel between a server and the environment that decides for it: both run on one host.

Packets of JSON over a Unix socket. The server asks, the environment answers, one answer to each question:

    {"round": 7, "signals": {...}, "missed": 0, "outcomes": [...], "times": [...],
     "prefill_s": 0.0, "prefill_tokens": 0}
    {"round": 7, "k": 3}

`outcomes`: of rounds whose results were read since the last question, each with the ids of its requests.
`times`: `[round, seconds, seconds waited]` of rounds that are over. `missed`: rounds that ran without an
answer since the last question that had one.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError

Message = dict[str, Any]

MAX_PATH = 107
"""Bytes of a Unix socket's path."""
_MAX_PACKET = 1 << 18
_WAITING = 64
"""Environments that came and went while the server had nothing to decode, which it has not seen yet."""
_CONNECT_S = 5.0


class ChannelClosed(Exception):
    """The other end is gone, or said what nobody understands."""


class Channel:
    """One end of a connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: nobody is there to take it.
        """
        self._socket.settimeout(1.0)
        try:
            self._socket.send(json.dumps(message).encode())
        except OSError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next message; None if none came within `timeout_s`, 0 to look only.

        Raises:
            ChannelClosed: none will come any more.
        """
        self._socket.settimeout(timeout_s)
        try:
            packet = self._socket.recv(_MAX_PACKET)
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise ChannelClosed(str(error)) from None
        if not packet:
            raise ChannelClosed("the other end has left")
        try:
            message = json.loads(packet)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise ChannelClosed("not a message")
        return message

    def is_open(self) -> bool:
        """Is the other end there, as far as can be seen without waiting?"""
        look = select.poll()
        look.register(self._socket, 0)  # that it hung up is always told
        return not look.poll(0)

    def close(self) -> None:
        self._socket.close()


class Listener:
    """Where environments find a server: a socket that only this user may open."""

    def __init__(self, path: Path) -> None:
        """Take `path`, also from a server that died: only then nobody listens at a socket that is there.

        Raises:
            UserError: another server has it, or it cannot be made.
        """
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        try:
            if path.is_socket():
                if _is_listened_to(path):
                    raise UserError(f"{path}: another server listens there")
                path.unlink(missing_ok=True)
            self._socket.bind(str(path))
        except OSError as error:
            raise UserError(f"{path}: cannot listen there: {error.strerror}") from None
        finally:
            os.umask(before)
        self._socket.listen(_WAITING)
        self._socket.setblocking(False)

    def accept(self) -> Channel | None:
        """An environment that has come and is still there; None if there is none."""
        while True:
            try:
                connected, _ = self._socket.accept()
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.ECONNABORTED):
                    raise ChannelClosed(str(error)) from None
                return None
            channel = Channel(connected)
            if channel.is_open():
                return channel
            channel.close()


def _is_listened_to(path: Path) -> bool:
    """Is there a process behind the socket? One too busy to answer, or another user's, counts."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:
            return True
    return True


def connect(path: Path) -> Channel:
    """The environment's end.

    Raises:
        UserError: no server listens at `path`.
    """
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connected.settimeout(_CONNECT_S)
    try:
        connected.connect(str(path))
    except OSError as error:
        connected.close()
        raise UserError(f"{path}: no server listens there: {error.strerror or error}") from None
    return Channel(connected)
