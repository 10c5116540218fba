"""deploy/kubernetes: valid for the API servers in use, one with another, and with the gateway that it starts."""

from __future__ import annotations

import copy
import re
import signal
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from support.fake import Fake
from support.gateway import Gateway, binary
from support.process import ROOT, until

FOLDER = ROOT / "deploy/kubernetes"
VERSIONS = ("1.30", "1.34", kubernetes_validate.latest_version())
"""The oldest has a `sleep` in preStop."""
SECRETS = "/run/secrets/tidegate"


def manifests() -> dict[str, dict[str, Any]]:
    files = sorted(FOLDER.glob("*.yaml"))
    return {item["kind"]: item for file in files for item in yaml.safe_load_all(file.read_text())}


@pytest.fixture
def pod() -> dict[str, Any]:
    return manifests()["Deployment"]["spec"]["template"]


@pytest.fixture
def container(pod: dict[str, Any]) -> dict[str, Any]:
    return pod["spec"]["containers"][0]


@pytest.fixture(scope="module")
def fake() -> Iterator[Fake]:
    with Fake() as server:
        yield server


@pytest.fixture
def config(tmp_path: Path) -> str:
    """The ConfigMap's file, with the Secret's folder where this machine has one."""
    key = tmp_path / "client-key"
    key.write_text("k" * 48)
    key.chmod(0o400)
    text = manifests()["ConfigMap"]["data"]["tidegate.toml"]
    assert SECRETS in text
    return text.replace(SECRETS, str(tmp_path))


@pytest.mark.parametrize("version", VERSIONS)
def test_each_manifest_fits_the_schema(version: str):
    for manifest in manifests().values():
        kubernetes_validate.validate(manifest, version, strict=True)


def test_the_schema_would_see_a_misspelt_field():
    manifest = copy.deepcopy(manifests()["Deployment"])
    manifest["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, VERSIONS[-1], strict=True)


def test_they_mean_the_same_pods_and_ports(pod: dict[str, Any], container: dict[str, Any]):
    every, labels = manifests(), pod["metadata"]["labels"]
    selectors = [
        every["Deployment"]["spec"]["selector"]["matchLabels"],
        every["Service"]["spec"]["selector"],
        every["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        every["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
        pod["spec"]["topologySpreadConstraints"][0]["labelSelector"]["matchLabels"],
    ]
    assert all(selector == labels for selector in selectors)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    server = tomllib.loads(every["ConfigMap"]["data"]["tidegate.toml"])
    assert server["server"]["listen"] == f"0.0.0.0:{ports['http']}"
    assert server["admin"]["listen"] == f"0.0.0.0:{ports['admin']}"
    assert [port["targetPort"] for port in every["Service"]["spec"]["ports"]] == ["http"]
    open_to_all, guarded = every["NetworkPolicy"]["spec"]["ingress"]
    assert open_to_all == {"ports": [{"port": "http"}]}
    assert guarded["ports"] == [{"port": "admin"}] and guarded["from"]
    mounted = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert mounted["config"]["configMap"]["name"] == every["ConfigMap"]["metadata"]["name"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert (mounts["config"], mounts["secrets"]) == ("/etc/tidegate", SECRETS)


def seconds(text: str) -> int:
    return int(re.fullmatch(r"(\d+)s", text).group(1))


def test_a_pod_has_time_to_drain(pod: dict[str, Any], container: dict[str, Any], config: str, tmp_path: Path):
    file = tmp_path / "tidegate.toml"
    file.write_text(config)
    done = subprocess.run(
        [str(binary()), "check", "--config", str(file)], capture_output=True, text=True, check=True
    ).stdout
    server = tomllib.loads(done)["server"]
    leaving = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = leaving + seconds(server["drain_lag"]) + seconds(server["drain"]) + 2
    assert pod["spec"]["terminationGracePeriodSeconds"] > needed
    noticed = container["readinessProbe"]["periodSeconds"] * container["readinessProbe"]["failureThreshold"]
    assert leaving + seconds(server["drain_lag"]) > noticed, "balancers hear of it before it stops accepting"


def test_the_pod_may_do_nothing_that_it_does_not_need(pod: dict[str, Any], container: dict[str, Any]):
    """The `restricted` standard, and a read-only root."""
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert pod["spec"]["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    context = container["securityContext"]
    assert context["allowPrivilegeEscalation"] is False and context["readOnlyRootFilesystem"] is True
    assert context["capabilities"] == {"drop": ["ALL"]}
    user = re.search(r"^USER (\d+):(\d+)$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    pair = pod["spec"]["securityContext"]["runAsUser"], pod["spec"]["securityContext"]["runAsGroup"]
    assert pair == tuple(map(int, user.groups()))


def test_the_gateway_runs_as_the_pod_would_run_it(fake: Fake, container: dict[str, Any], config: str):
    assert container["args"] == ["serve", "--config", "/etc/tidegate/tidegate.toml"]
    assert 'url = "http://vllm:8000"' in config
    config = config.replace("http://vllm:8000", fake.url)
    with Gateway(config=config) as gateway:
        chat, body = f"{gateway.url}/v1/chat/completions", {"model": "m", "messages": []}
        assert httpx.post(chat, json=body).status_code == 401
        known = {"authorization": f"Bearer {'k' * 48}"}
        assert httpx.post(chat, headers=known, json=body | fake.script(tokens=1).body).status_code == 200

        def probe(name: str) -> int:
            return httpx.get(gateway.admin + container[name]["httpGet"]["path"]).status_code

        assert (probe("readinessProbe"), probe("livenessProbe")) == (200, 200)
        script = fake.script(tokens=100, pace_ms=50)
        with httpx.stream("POST", chat, headers=known, json=body | {"stream": True} | script.body) as answer:
            events = answer.iter_text()
            next(events)
            gateway.child.send_signal(signal.SIGTERM)
            until(lambda: probe("readinessProbe") == 503, 5, "it is not ready any more")
            assert probe("livenessProbe") == 200, "a pod that drains must not be killed"
