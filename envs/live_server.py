"""A real server that lets an environment decide: how it is claimed, asked and left."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from draftdial.controller.errors import UserError
from draftdial.controller.measured_server import flush_cache
from draftdial.engine_patch.client import Server
from draftdial.engine_patch.control_keys import NO_FORCED_K
from draftdial.engine_patch.live_channel import Channel, ChannelClosed, Message, connect
from draftdial.engine_patch.settings import LIVE

_ASK_EARLY = "start it with `{}=/absolute/path.sock draftdial serve ...`"


class LiveServer:
    """One server on this host, for one environment at a time.

    Raises:
        UserError: it cannot be reached, no environment may decide there, or another one does already. From
            every method: it is gone.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._server = Server(url)
        self.status = self._checked_status()
        self.tiers = tuple(int(k) for k in self.status["tiers"].split(","))
        self._lock: int | None = None
        self._channel: Channel | None = None

    @property
    def replays_acceptance(self) -> bool:
        """Does it accept what recorded arrays say?"""
        return bool(self.status["acceptance_replay"])

    def claim(self) -> None:
        """From now on the server asks this environment, and no other may come. Harmless a second time."""
        if self._channel is not None:
            return
        path = Path(self.status["live"])
        self._lock = self._locked(path)
        try:
            self._channel = connect(path)
        except UserError as error:
            self.close()
            raise UserError(f"{self.url}: {error}: an environment runs on the server's own host") from None

    def question(self, timeout_s: float) -> Message | None:
        """What the server asks before its coming round, see `live_channel`; None if no round is due."""
        assert self._channel is not None, "claim the server first"
        try:
            return self._channel.receive(timeout_s)
        except ChannelClosed as closed:
            raise self._gone(closed) from None

    def answer(self, round_id: int, k: int) -> None:
        """Let round `round_id` run at `k`."""
        assert self._channel is not None, "claim the server first"
        try:
            self._channel.send({"round": round_id, "k": k})
        except ChannelClosed as closed:
            raise self._gone(closed) from None

    def abort(self, rids: Iterable[str]) -> None:
        """End these requests."""
        for rid in rids:
            self._server.post("/abort_request", {"rid": rid})

    def flush(self) -> None:
        """Forget cached prefixes, when nothing runs."""
        flush_cache(self._server)

    def why_silent(self) -> str:
        """What keeps it from asking, as far as its status says."""
        status = self._server.replicas()[0]
        if status["forced_k"] != NO_FORCED_K:
            return f"k = {status['forced_k']} is forced"
        if status["measuring"]:
            return f"it is measured: {status['measuring']}"
        return f"mode {status['mode']}, {status['decisions']} decisions"

    def close(self) -> None:
        """Leave the server to its own policy. Harmless a second time."""
        if self._channel is not None:
            self._channel.close()
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._channel = None

    def _checked_status(self) -> dict[str, Any]:
        replicas = self._server.replicas()
        status = replicas[0]
        if status["mode"] == "inactive":
            raise UserError(f"{self.url}: it is not steered: {status.get('reason', '')}")
        if not status.get("live"):
            raise UserError(f"{self.url}: not a live server: {_ASK_EARLY.format(LIVE)}")
        if status["mode"] != "steer" or status["forced_k"] != NO_FORCED_K:
            found = f"mode {status['mode']}, forced k {status['forced_k']}"
            raise UserError(f"{self.url}: found {found}, allowed: mode steer and no forced k")
        return status

    def _locked(self, path: Path) -> int:
        """A lock that ends with this process, however it ends."""
        try:
            lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"{self.url}: {path}.lock: {error.strerror}") from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(lock)
            raise UserError(f"{self.url}: another environment decides there, allowed: one") from None
        return lock

    def _gone(self, closed: ChannelClosed) -> UserError:
        return UserError(f"{self.url}: the server is gone, or was restarted ({closed})")
