"""The cables between the machines of a test, for kernels that have no `netem`.

    wire.py SEED CABLE [CABLE…]

A cable `c` is four network interfaces, two pairs: `c-a` and `c-b` are the machines' ends, `c-a-in` and `c-b-in` their
other ends, which are here. Each frame that comes in at one of these is put out at the other, unless the cable loses it.
What a cable does is said on standard input, a line each, and answered with `ok` and the number of frames that the cable
has lost so far:

    CABLE loss SHARE     frames lost, of one: 0.05, in either direction, by a generator that begins with SEED
    CABLE delay SECONDS  how much later each frame comes out
    CABLE cut            nothing comes through, and nobody is told; what is on the way is lost
    CABLE mend           it does again
    CABLE forget         the TCP connections that it has carried are lost from now on, without a word; new ones are not
    CABLE lost           nothing new

Says `ready` when all cables lie. Ends with its standard input. Needs CAP_NET_RAW and CAP_NET_ADMIN in its network
namespace, nothing but Python's own library, and is meant for some thousand frames a second.
"""

from __future__ import annotations

import array
import fcntl
import heapq
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 0x0003
SIOCETHTOOL = 0x8946
# ETHTOOL_STXCSUM, _SSG, _STSO, _SGSO: checksums and segments are left to the interface, here to none. Frames would
# come without checksums, and larger than any that a network carries.
OFFLOADS = (0x17, 0x19, 0x1F, 0x24)
FRAME_MAX = 65_536
# Frames read of one interface before the others have their turn.
TURN = 64


def without_offloads(name: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for command in OFFLOADS:
            value = array.array("B", struct.pack("II", command, 0))
            request = struct.pack("16sP", name.encode(), value.buffer_info()[0]).ljust(40, b"\0")
            fcntl.ioctl(control, SIOCETHTOOL, request)


def opened(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)  # or as much of it as the machine allows
    end.bind((name, ETH_P_ALL))
    end.setblocking(False)
    return end


def connection_of(frame: bytes, side: int) -> bytes | None:
    """The addresses and ports of a TCP connection, `a`'s first, if the frame is of one (RFC 791, RFC 9293)."""
    ip = frame[14:]
    if frame[12:14] != b"\x08\x00" or len(ip) < 40 or ip[9] != socket.IPPROTO_TCP:
        return None
    tcp = ip[(ip[0] & 15) * 4 :]
    near, far = ip[12:16] + tcp[:2], ip[16:20] + tcp[2:4]
    return near + far if side == 0 else far + near


class Cable:
    def __init__(self, name: str, chance: random.Random):
        for side in "ab":
            without_offloads(f"{name}-{side}")
        self.ends = [opened(f"{name}-{side}-in") for side in "ab"]
        self.chance = chance
        self.loss = self.delay = 0.0
        self.is_cut = False
        self.carried: set[bytes] = set()
        self.forgotten: set[bytes] = set()
        self.on_the_way: list[tuple[float, int, int, bytes]] = []
        self.frames = self.lost = 0

    def told(self, what: str, value: str = "0") -> None:
        if what == "loss":
            self.loss = float(value)
        elif what == "delay":
            self.delay = float(value)
        elif what == "cut":
            self.is_cut = True
            self.lost += len(self.on_the_way)
            self.on_the_way.clear()
        elif what == "mend":
            self.is_cut = False
        elif what == "forget":
            self.forgotten |= self.carried
            self.carried.clear()
        elif what != "lost":
            raise ValueError(what)

    def is_forgotten(self, frame: bytes, side: int) -> bool:
        connection = connection_of(frame, side)
        if connection is None:
            return False
        self.carried.add(connection)
        return connection in self.forgotten

    def take(self, side: int) -> None:
        for _ in range(TURN):
            try:
                frame, (_, _, kind, *_) = self.ends[side].recvfrom(FRAME_MAX)
            except BlockingIOError:
                return
            # What this program puts out comes in again at the same interface.
            if kind == socket.PACKET_OUTGOING:
                continue
            if self.is_cut or self.chance.random() < self.loss or self.is_forgotten(frame, side):
                self.lost += 1
                continue
            self.frames += 1
            heapq.heappush(self.on_the_way, (time.monotonic() + self.delay, self.frames, 1 - side, frame))

    def deliver(self) -> None:
        now = time.monotonic()
        while self.on_the_way and self.on_the_way[0][0] <= now:
            _, _, side, frame = heapq.heappop(self.on_the_way)
            try:
                self.ends[side].send(frame)
            except OSError:
                self.lost += 1  # The interface is down, or its queue is full.

    def next(self) -> float | None:
        return self.on_the_way[0][0] if self.on_the_way else None


def main(seed: str, names: list[str]) -> None:
    chance = random.Random(int(seed))
    cables = {name: Cable(name, chance) for name in names}
    ends = {end: (cable, side) for cable in cables.values() for side, end in enumerate(cable.ends)}
    print("ready", flush=True)
    while True:
        due = [at for cable in cables.values() if (at := cable.next()) is not None]
        wait = max(0.0, min(due) - time.monotonic()) if due else None
        readable, _, _ = select.select([sys.stdin, *ends], [], [], wait)
        for end in readable:
            if end is sys.stdin:
                line = sys.stdin.readline()
                if not line:
                    return
                name, *words = line.split()
                cables[name].told(*words)
                print("ok", cables[name].lost, flush=True)
            else:
                cable, side = ends[end]
                cable.take(side)
        for cable in cables.values():
            cable.deliver()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
