"""The ports that servers of the tests are given."""

from __future__ import annotations

from pathlib import Path

from support.process import free_port


def test_a_port_is_given_once_and_not_by_the_kernel() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    ports = [free_port() for _ in range(200)]
    assert len(set(ports)) == len(ports)
    assert [port for port in ports if low <= port <= high] == []
