"""The tables of docs/deployment.md, made from the files and the checks. UPDATE_DOCS=1 writes them."""

from __future__ import annotations

import os

from shipped.checks import CHECKS, EDGES
from shipped.lines import ADVICE, lines, mutants
from support.process import ROOT
from support.shipped import KINDS

PAGE = ROOT / "docs/deployment.md"
BEGIN, END = "<!-- made by tests/shipped: UPDATE_DOCS=1 make shipped -->\n", "<!-- end -->\n"


def made() -> str:
    out = ["\n| Check | What holds | nginx | HAProxy | Caddy |", "|---|---|---|---|---|"]
    for name, check in CHECKS.items():
        marks = " | ".join("yes" if kind in EDGES[name] else "–" for kind in KINDS)
        out.append(f"| {name} | {' '.join(check.__doc__.split())} | {marks} |")
    out += ["", "| File | Change | Fails |", "|---|---|---|"]
    out += [f"| {KINDS[m.kind].file} | {m.change} | {m.check} |" for m in mutants()]
    count = sum(len(lines(kind)) for kind in KINDS)
    out += [
        "",
        f"{count} lines, {len(mutants())} changes, {len(ADVICE)} of them additions that one finds recommended.\n",
    ]
    return "\n".join(out)


def hold() -> None:
    page = PAGE.read_text()
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    wanted = before + BEGIN + made() + END + after
    if os.environ.get("UPDATE_DOCS"):
        PAGE.write_text(wanted)
    else:
        assert page == wanted, (
            "docs/deployment.md is not what deploy/ and tests/shipped say: UPDATE_DOCS=1 make shipped"
        )
