"""The lines of the files in deploy/: what each is for, which checks it names, and what is left when it is altered."""

from __future__ import annotations

import re
from dataclasses import dataclass

from support.shipped import KINDS, shipped

LINE = re.compile(r"^(?P<before>\s*)(?P<words>[^#\n]*?)\s*# (?P<why>.*?) \[(?P<checks>[a-z0-9, ]+)\]$")
STRUCTURE = re.compile(r"^(\w+ )*(\S+ )?\{$|^\}$|^(defaults|frontend \w+|backend \w+)$")


@dataclass(frozen=True)
class Line:
    """A directive. `checks` fail without it."""

    kind: str
    number: int
    words: str
    why: str
    checks: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    """The file with one change, and a check that must fail for it."""

    kind: str
    change: str
    text: str
    check: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.change} [{self.check}]"


INSTEAD: dict[tuple[str, str], list[tuple[str, str, str]]] = {
    ("nginx", "listen 443 ssl http2"): [(" http2", "", "h2"), (" ssl", "", "start")],
    ("nginx", "so_keepalive=15s:5s:3;"): [(" so_keepalive=15s:5s:3;", ";", "vanish")],
    ("nginx", "keepalive_timeout 60s;"): [("60s", "90s", "idle")],
    ("HAProxy", "timeout connect 5s"): [("5s", "60s", "connect")],
    ("HAProxy", "timeout server 660s"): [("660s", "60s", "silence")],
    ("HAProxy", "bind :443 ssl crt /etc/haproxy/tidegate.pem alpn h2,http/1.1"): [
        (" alpn h2,http/1.1", "", "h2"),
        (" ssl crt /etc/haproxy/tidegate.pem", "", "start"),
    ],
    ("HAProxy", "server one 127.0.0.1:8080 check port 9090 inter 1s fall 2"): [
        (" check port 9090 inter 1s fall 2", "", "ready"),
        (" port 9090", "", "ready"),
        (" inter 1s fall 2", " inter 6s", "ready"),
    ],
    ("Caddy", "reverse_proxy 127.0.0.1:8080 {"): [(" 127.0.0.1:8080", "", "pace")],
    ("Caddy", "keepalive 60s"): [("60s", "120s", "idle")],
}
"""Lines that are changed, not taken away: (what stands there, what instead, which check fails). Where a default is the
same as what is written, or two words stand for two things."""

ADVICE: list[tuple[str, str, str, str]] = [
    ("nginx", "proxy_http_version 1.1;", "proxy_ignore_client_abort on;", "abort"),
    ("HAProxy", "option http-no-delay", "retry-on all-retryable-errors", "once"),
    ("Caddy", "reverse_proxy 127.0.0.1:8080 {", "flush_interval -1", "abort"),
]
"""What people add: after which line, and which check fails with it."""


def lines(kind: str) -> list[Line]:
    """Every directive; an AssertionError where one says neither why nor what fails without it."""
    found = []
    for number, text in enumerate(shipped(kind).splitlines(), 1):
        bare = text.strip()
        if match := LINE.match(text):
            if match["words"]:
                checks = tuple(match["checks"].split(", "))
                found.append(Line(kind, number, match["words"], match["why"], checks))
        else:
            told = not bare or bare.startswith("#") or STRUCTURE.match(bare)
            assert told, (
                f"deploy/{KINDS[kind].file}:{number}: says neither why it is there nor which check needs it: {text}"
            )
    return found


def without(line: Line) -> str:
    """The file without this line, or, if it opens a block, without the block."""
    rows = shipped(line.kind).splitlines()
    end = line.number
    if line.words.endswith("{"):
        depth = 1
        while depth:
            words = rows[end].partition("#")[0]
            depth += words.count("{") - words.count("}")
            end += 1
    return "\n".join(rows[: line.number - 1] + rows[end:]) + "\n"


def mutants() -> list[Mutant]:
    """One for each line and check, and one for each piece of bad advice."""
    found = []
    for kind in KINDS:
        for line in lines(kind):
            if instead := INSTEAD.get((kind, line.words)):
                for old, new, check in instead:
                    whole = line.words.rstrip(";")
                    change = f"`{whole}` with `{new.strip()}`" if new.strip(" ;") else f"no `{old.strip(' ;')}`"
                    found.append(Mutant(kind, change, replaced(line, old, new), check))
                    assert check in line.checks or check == "start", line
            else:
                found += [Mutant(kind, f"no `{line.words.rstrip(';')}`", without(line), check) for check in line.checks]
        for which, after, more, check in ADVICE:
            if which == kind:
                begin, end = shipped(kind).split(after, 1)
                comment, rest = end.split("\n", 1)
                found.append(
                    Mutant(kind, f"and `{more.rstrip(';')}`", f"{begin}{after}{comment}\n{more}\n{rest}", check)
                )
    return found


def replaced(line: Line, old: str, new: str) -> str:
    rows = shipped(line.kind).splitlines()
    row = rows[line.number - 1]
    assert old in row or old.strip() in row, (old, row)
    rows[line.number - 1] = row.replace(old if old in row else old.strip(), new, 1)
    return "\n".join(rows) + "\n"
