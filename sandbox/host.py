"""Host's ends of the two sockets: `ZygoteClient`, the fork server's process, and `SlotClient`, one environment.

Both belong to one asyncio event loop. They only speak the protocol; the pool decides which exist.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sandbox.limits import Limits, LockPlan
from sandbox.outcomes import CallResult, SandboxError, SlotReply, decode
from sandbox.protocol import HELLO_ID, REPLY, REQUEST, CallVerdict, FrameReader, Operation, Report, frame

_ZYGOTE = Path(__file__).resolve().with_name("zygote.py")
_GRACE_SECONDS = 5.0  # a slot enforces wall limits itself; the host gives up on the slot this much later
_DIED = SlotReply(CallVerdict.SLOT_DIED, 0, 0.0, 0.0, 0, b"")


class SlotError(Exception):
    """Error: a slot could not be opened, or its layers could not be put in place."""


async def _reply_within(reply: asyncio.Future[SlotReply | None], seconds: float) -> SlotReply | None:
    """Return the reply, or None if it is late. A reply that has arrived counts, even if the event loop was blocked."""
    # Not `asyncio.wait`, which costs more than all other work of the host for a call. The loop reads its sockets before
    # it checks its timers.
    timer = asyncio.get_running_loop().call_later(seconds, _give_up, reply)
    try:
        return await reply
    finally:
        timer.cancel()


def _give_up(reply: asyncio.Future[SlotReply | None]) -> None:
    if not reply.done():
        reply.set_result(None)


class ZygoteClient:
    """Fork server: a child process of the host, started by exec and never forked from it.

    Args:
        python: interpreter that runs the tools.

    Raises:
        SandboxError: the interpreter cannot be run.
    """

    def __init__(self, python: str = sys.executable) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {"PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1", "LC_ALL": "C.UTF-8", "TZ": "UTC"}
        environment["LD_BIND_NOW"] = "1"  # else each call's process binds libc's functions again
        # Some interpreters need these to start; the zygote then clears its environment.
        environment |= {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PYTHONHOME") if name in os.environ}
        # Not -I: it implies -E, which ignores PYTHONHASHSEED. -S: no site-packages and none of their start-up hooks.
        command = [python, "-s", "-S", "-P", str(_ZYGOTE), str(theirs.fileno())]
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    pass_fds=[theirs.fileno()],
                    env=environment,
                    cwd="/",
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError as error:
                ours.close()
                raise SandboxError(f"SandboxConfig.python={python!r} cannot be run: {error}") from error
        ours.setblocking(False)
        self._control = ours
        self._tokens = itertools.count(1)
        self._broken = False
        self._orders: deque[tuple[memoryview, socket.socket | None]] = deque()

    @property
    def pid(self) -> int:
        """Process id of the zygote."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the zygote can open slots. Its socket shows its end earlier than its process id."""
        if self._broken or self._process.poll() is not None:
            return False
        try:
            self._broken = not self._control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            self._broken = True
        return not self._broken

    async def open_slot(
        self, plan: LockPlan, limits: Limits, uid: int | None, seconds: float, fair_bytes: float = math.inf
    ) -> SlotClient:
        """Fork a slot and wait for its greeting.

        Args:
            plan: layers that the slot puts in place.
            limits: default limits of the slot's calls.
            uid: user id that the slot takes, or None.
            seconds: how long to wait for the slot.
            fair_bytes: memory that each of its calls may hold when memory runs out.

        Raises:
            SlotError: the slot ended, was late, or could not put a layer in place.
        """
        token = next(self._tokens)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        order = {
            "open": token,
            "plan": dataclasses.asdict(plan),
            "limits": dataclasses.asdict(limits),
            "uid": uid if plan.drop_uid else None,
        }
        self._order(order, theirs)
        if self._broken:
            ours.close()
            raise SlotError("the zygote does not answer: its socket is closed")
        ours.setblocking(False)
        slot = SlotClient(self, token, limits, fair_bytes)
        await asyncio.get_running_loop().create_unix_connection(lambda: slot, sock=ours)
        try:
            hello = await _reply_within(slot.greeting, seconds)
            if hello is None:
                raise SlotError(f"the slot did not greet within {seconds:g} s")
            if hello.verdict is not CallVerdict.REPORTED:
                raise SlotError(hello.payload.decode(errors="replace") or "the slot ended before it greeted")
            slot.layers = json.loads(hello.payload)
        except BaseException:
            slot.close()
            raise
        return slot

    def kill_slot(self, token: int) -> None:
        """Kill a slot by its token. The zygote does it: it keeps the process id until it has reaped the process."""
        self._order({"kill": token})

    def _order(self, order: Mapping[str, Any], passed: socket.socket | None = None) -> None:
        """Send the zygote an order, now or as soon as its socket has room.

        Args:
            passed: socket end to send with the order; it is closed here once it is sent.
        """
        if self._broken:
            if passed is not None:
                passed.close()
            return
        self._orders.append((memoryview(frame(json.dumps(order).encode())), passed))
        if len(self._orders) == 1:
            self._send_orders()

    def _send_orders(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._orders:
                data, passed = self._orders[0]
                if passed is None:
                    sent = self._control.send(data)
                else:
                    sent = socket.send_fds(self._control, [data], [passed.fileno()])
                    passed.close()  # it was sent with the first byte
                if sent == len(data):
                    self._orders.popleft()
                else:
                    self._orders[0] = (data[sent:], None)
        except BlockingIOError:
            loop.add_writer(self._control, self._send_orders)
            return
        except OSError:
            self._broken = True
            self._drop_orders()
        loop.remove_writer(self._control)

    def _drop_orders(self) -> None:
        """Drop all orders; callers that wait for a slot see their socket close."""
        for _, passed in self._orders:
            if passed is not None:
                passed.close()
        self._orders.clear()

    async def close(self) -> None:
        """End the zygote and everything below it, and return when all processes are reaped."""
        asyncio.get_running_loop().remove_writer(self._control)
        self._broken = True
        self._drop_orders()
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, _GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)


class SlotClient(asyncio.Protocol):
    """Client of one environment's slot zygote."""

    def __init__(self, zygote: ZygoteClient, token: int, limits: Limits, fair_bytes: float) -> None:
        self._zygote = zygote
        self._token = token
        self._limits = limits
        self._fair_bytes = fair_bytes
        self._frames = FrameReader()
        self._numbers = itertools.count(HELLO_ID + 1)
        self._waiting: dict[int, asyncio.Future[SlotReply | None]] = {}
        self._parts: dict[int, bytearray] = {}  # bodies that are still incomplete
        self._transport: asyncio.Transport | None = None
        self.greeting = self._expect(HELLO_ID)
        self.layers: dict[str, str] = {}
        self.load_error: CallResult | None = None

    @property
    def alive(self) -> bool:
        """True if the slot can take calls."""
        return self._transport is not None

    async def load(self, source: str) -> None:
        """Compile the module in the slot. If it does not compile, its result is in `load_error`.

        Raises:
            SlotError: loading failed for a reason that tells nothing about the source.
        """
        reply = await self._request(Operation.LOAD, source.encode(), self._limits)
        if reply.verdict is CallVerdict.REPORTED and reply.detail == Report.RETURNED:
            return
        result = decode(reply, self._limits)
        if result.is_infrastructure:
            raise SlotError(result.error)
        self.load_error = result
        self.close()

    async def call(self, request: bytes, limits: Limits | None = None, more_cpu_seconds: int = 0) -> CallResult:
        """Run one call.

        Args:
            request: from `encode_request`.
            limits: limits of this call; None for the slot's.
            more_cpu_seconds: addition to the limit of CPU time; the limit of wall time grows in proportion.
        """
        if self.load_error is not None:
            return self.load_error
        limits = limits or self._limits
        return decode(await self._request(Operation.CALL, request, limits, more_cpu_seconds), limits, self._fair_bytes)

    def close(self) -> None:
        """End the slot by closing its socket. The zygote also kills it, in case it cannot read."""
        if self._transport is not None:
            self._transport.abort()
            self._zygote.kill_slot(self._token)
            self._end()

    async def _request(
        self, operation: Operation, payload: bytes, limits: Limits, more_cpu_seconds: int = 0
    ) -> SlotReply:
        if self._transport is None:
            return _DIED
        number = next(self._numbers)
        reply = self._expect(number)
        cpu_seconds = limits.cpu_seconds + more_cpu_seconds
        wall_seconds = limits.wall_seconds_with(more_cpu_seconds)
        head = REQUEST.pack(number, operation, cpu_seconds, wall_seconds, limits.memory_bytes, limits.result_bytes)
        self._transport.write(frame(head + payload))
        try:
            answer = await _reply_within(reply, wall_seconds + _GRACE_SECONDS)
        except asyncio.CancelledError:
            if self._transport is not None:
                self._transport.write(frame(REQUEST.pack(number, Operation.CANCEL, 0, 0.0, 0, 0)))
            raise
        finally:
            self._waiting.pop(number, None)
            self._parts.pop(number, None)
        if answer is None:
            self.close()
            return _DIED
        return answer

    def _expect(self, number: int) -> asyncio.Future[SlotReply | None]:
        future: asyncio.Future[SlotReply | None] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        return future

    def _end(self) -> None:
        self._transport = None
        for future in self._waiting.values():
            if not future.done():
                future.set_result(_DIED)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by asyncio."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Called by asyncio."""
        for message in self._frames.feed(data):
            number, verdict, detail, cpu, wall, memory_kib = REPLY.unpack_from(message)
            if number not in self._waiting:
                continue  # the call was cancelled
            payload = message[REPLY.size :]
            if verdict == CallVerdict.PART:
                self._parts.setdefault(number, bytearray()).extend(payload)
                continue
            if number in self._parts:
                payload = bytes(self._parts.pop(number)) + payload
            if not (future := self._waiting[number]).done():
                future.set_result(SlotReply(CallVerdict(verdict), detail, cpu, wall, memory_kib, payload))

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by asyncio: the slot has ended."""
        self._end()
