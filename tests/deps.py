"""Checks the dependencies against deny.toml, offline: licences, banned crates, duplicate versions, origins.

Reads the part of cargo-deny's configuration that is used here, so that `cargo deny check` says the same.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# The workspace, and the extension module of the Python package beside it.
MANIFESTS = ("Cargo.toml", "python/Cargo.toml")


def metadata(policy: dict, manifest: str) -> dict:
    command = ["cargo", "metadata", "--format-version", "1", "--locked", "--manifest-path", manifest]
    for target in policy["graph"]["targets"]:
        command += ["--filter-platform", target]
    if policy["graph"].get("all-features"):
        command.append("--all-features")
    found = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if found.returncode:
        sys.exit(found.returncode)  # cargo said why
    return json.loads(found.stdout)


def allowed(expression: str, licences: set[str]) -> bool:
    """Whether an SPDX expression can be met with `licences` alone. `/` is an old way to write OR, and an exception
    (WITH) only ever permits more.

    >>> [allowed(text, {"MIT"}) for text in ("MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "MIT AND ISC", "none")]
    [True, True, True, False, False]
    >>> [allowed(text, {"MIT", "ISC"}) for text in ("(MIT OR GPL-3.0) AND ISC", "(MIT AND GPL-3.0) OR GPL-2.0")]
    [True, False]
    >>> allowed("Apache-2.0 WITH LLVM-exception", {"Apache-2.0"})
    True
    """
    words = re.findall(r"[()]|[^\s()]+", re.sub(r"\s+WITH\s+\S+", "", expression.replace("/", " OR ")))

    def alternatives() -> bool:
        result = parts()
        while words and words[0] == "OR":
            words.pop(0)
            result = parts() or result
        return result

    def parts() -> bool:
        result = one()
        while words and words[0] == "AND":
            words.pop(0)
            result = one() and result
        return result

    def one() -> bool:
        word = words.pop(0)
        if word != "(":
            return word in licences
        result = alternatives()
        words.pop(0)
        return result

    return alternatives()


def covers(skip: tuple[str, ...], name: str, version: str) -> bool:
    """Whether an entry of `skip` means this version.

    >>> [covers(("syn", "2"), "syn", version) for version in ("2.0.1", "20.0.0")], covers(("syn",), "syn", "3.0.0")
    ([True, False], True)
    """
    return name == skip[0] and (len(skip) == 1 or f"{version}.".startswith(f"{skip[1]}."))


def faults(policy: dict, graph: dict, manifest: str) -> list[str]:
    resolved = {node["id"] for node in graph["resolve"]["nodes"]}
    packages = [package for package in graph["packages"] if package["id"] in resolved]
    ours = {package["id"] for package in packages if Path(package["manifest_path"]).is_relative_to(ROOT / "crates")}
    ours |= set(graph["workspace_members"])
    found = []

    licences = set(policy["licenses"]["allow"])
    for package in packages:
        if not allowed(package["license"] or "none", licences):
            found.append(f"{package['name']} {package['version']}: licence {package['license']}")

    banned = {entry["crate"]: entry["reason"] for entry in policy["bans"]["deny"]}
    for package in packages:
        if package["name"] in banned:
            found.append(f"{package['name']} {package['version']}: banned, {banned[package['name']]}")

    registries = {f"registry+{url}" for url in policy["sources"]["allow-registry"]}
    for package in packages:
        if package["id"] not in ours and package["source"] not in registries:
            found.append(f"{package['name']} {package['version']}: comes from {package['source'] or 'a path'}")

    for package in packages:
        if package["id"] in ours:
            wild = [each["name"] for each in package["dependencies"] if each["req"] == "*" and "path" not in each]
            found += [f'{package["name"]}: `{name} = "*"`' for name in wild]

    versions = defaultdict(set)
    for package in packages:
        versions[package["name"]].add(package["version"])
    skips = [tuple(entry["crate"].split("@")) for entry in policy["bans"]["skip"]]
    for name, several in sorted(versions.items()):
        left = {version for version in several if not any(covers(skip, name, version) for skip in skips)}
        if len(several) > 1 and len(left) > 1:
            found.append(f"{name}: versions {', '.join(sorted(several))}")
    for skip in skips if manifest == MANIFESTS[0] else ():
        several = versions[skip[0]]
        if len(several) < 2 or not any(covers(skip, skip[0], version) for version in several):
            found.append(f"deny.toml skips {'@'.join(skip)} without need")
    print(f"{manifest}: {len(packages) - len(ours)} crates from others")
    return found


def main() -> int:
    policy = tomllib.loads((ROOT / "deny.toml").read_text())
    found = [fault for manifest in MANIFESTS for fault in faults(policy, metadata(policy, manifest), manifest)]
    print("\n".join(found) or "dependencies are as deny.toml says")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
