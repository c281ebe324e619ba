"""What kustomize renders of deploy/kubernetes agrees with schemas, itself and the code. No cluster runs it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helpers.ports import free_port
from helpers.service.deploy_fixtures import (
    DEPLOY,
    PROMETHEUS,
    ROOT,
    check_command,
    check_environment,
    check_redis_server,
    documented_metrics,
    metric_names,
    promtool,
    read_yaml,
    run,
)
from helpers.service.service_fixtures import RunningService
from helpers.service.valkey_fixtures import OwnValkey
from helpers.worker.worker_fixtures import Bench, states

from service.api.auth import PUBLIC
from service.settings import Settings

ADAMW: dict[str, Any] = {"optimizer": "adamw", "train_passes": 3.0, "claim_tokens": 200}
KUBERNETES = DEPLOY / "kubernetes"
#: What a user applies; the other folders are parts of these.
OVERLAYS = ("one-pod", "replicas", "hosts", "ranks", "keda", "hosts-keda", "engine")
#: Those whose pods share no directory; those whose worker KEDA scales.
APART, SCALED = ("hosts", "hosts-keda"), ("keda", "hosts-keda")
#: Of API and agent, without torch; of the worker.
IMAGES = ("draftalign-api", "draftalign")
SERVICE = tuple(name for name in OVERLAYS if name != "engine")

#: Of the machine, or as `make machine` brings it.
KUBECTL = shutil.which("kubectl", path=f"{os.environ['PATH']}{os.pathsep}{ROOT / '.venv-kubectl' / 'bin'}")
pytestmark = pytest.mark.skipif(
    KUBECTL is None and not os.environ.get("CI"), reason="kubectl, which renders them, is not installed"
)


def rendered(folder: Path) -> list[dict[str, Any]]:
    assert KUBECTL is not None, "CI renders them: `make machine` brings kubectl"
    result = run(KUBECTL, "kustomize", str(folder), cwd=ROOT)
    assert result.returncode == 0, result.stderr
    return list(yaml.safe_load_all(result.stdout))


@functools.cache
def _text(overlay: str) -> str:
    return json.dumps(rendered(KUBERNETES / overlay))


def manifests(overlay: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(_text(overlay))
    return found


def specs(overlay: str, kind: str) -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d["spec"] for d in manifests(overlay) if d["kind"] == kind}


def workloads(overlay: str) -> dict[str, dict[str, Any]]:
    return specs(overlay, "StatefulSet") | specs(overlay, "Deployment")


def containers(overlay: str) -> Iterator[dict[str, Any]]:
    for spec in workloads(overlay).values():
        yield from spec["template"]["spec"]["containers"]


def environment(overlay: str, container: dict[str, Any]) -> dict[str, str | None]:
    """Variables of a container, those of its ConfigMap too; None: from a secret or from the pod."""
    maps = {d["metadata"]["name"]: d["data"] for d in manifests(overlay) if d["kind"] == "ConfigMap"}
    found: dict[str, str | None] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]] if "configMapRef" in source else {}
    return found | {entry["name"]: entry.get("value") for entry in container.get("env", [])}


def command_of(container: dict[str, Any]) -> list[str]:
    """The arguments of draftalign."""
    if "command" not in container:
        return list(container["args"])
    assert container["command"] == ["torchrun"]
    _, _, arguments = " ".join(container["args"]).partition("--no-python draftalign ")
    return arguments.split()


def test_every_folder_is_an_overlay_or_a_part_of_one() -> None:
    folders = {path.parent.name for path in KUBERNETES.glob("*/kustomization.yaml")}
    assert folders == {*OVERLAYS, "base", "parts", "scaled", "settings"}
    assert not list(KUBERNETES.glob("*.yaml"))
    used = [
        {*documents.get("resources", []), *(patch["path"] for patch in documents.get("patches", []) if "path" in patch)}
        for documents in (read_yaml(KUBERNETES / folder / "kustomization.yaml") for folder in sorted(folders))
    ]
    for folder, names in zip(sorted(folders), used, strict=True):
        files = {path.name for path in (KUBERNETES / folder).iterdir()} - {"kustomization.yaml"}
        assert files == {name for name in names if not name.startswith("..")}, folder


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_is_rendered_agrees_with_the_schemas(overlay: str) -> None:
    for document in manifests(overlay):
        if document["apiVersion"] != "keda.sh/v1alpha1":
            kubernetes_validate.validate(document, "1.32", strict=True)
    broken = manifests(overlay)[0] | {"spce": {}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.32", strict=True)


@pytest.mark.parametrize("overlay", [name for name in SERVICE if name not in APART])
def test_an_object_store_reaches_api_and_worker_once_its_lines_are_no_comments(overlay: str, tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    found = 0
    for path in (tmp_path / "kubernetes").rglob("*.yaml"):
        text, count = re.subn(r"# (- DRAFTALIGN_\w+=s3:|- secretRef: )", r"\1", path.read_text())
        path.write_text(text)
        found += count
    assert found == 4
    documents = rendered(tmp_path / "kubernetes" / overlay)
    (settings,) = [d["data"] for d in documents if d["kind"] == "ConfigMap" and "DRAFTALIGN_STATE_DIR" in d["data"]]
    urls = {name: value for name, value in settings.items() if value.startswith("s3:")}
    assert Settings.model_validate({n.removeprefix("DRAFTALIGN_").lower(): url for n, url in urls.items()})
    assert urls.keys() == {"DRAFTALIGN_DRAFTERS_URL", "DRAFTALIGN_ROLLOUTS_URL"}
    parts = set[str]()
    for document in documents:
        if document["apiVersion"] != "keda.sh/v1alpha1":
            kubernetes_validate.validate(document, "1.32", strict=True)
        if document["kind"] in ("Deployment", "StatefulSet"):
            for container in document["spec"]["template"]["spec"]["containers"]:
                sources = [source for source in container.get("envFrom", []) if "secretRef" in source]
                if sources:
                    assert sources == [{"secretRef": {"name": "draftalign-store"}}]
                    parts.add(container["name"])
    assert parts == {"api", "worker"}


def kept_by_keda(document: dict[str, Any]) -> Any:
    """What KEDA's model takes of it; raises ValueError for what has a wrong type or lacks a required field."""
    from cloudcoil.models.keda.v1alpha1 import ScaledObject  # a second, which each process that collects would pay

    return ScaledObject.model_validate(document).model_dump(mode="json", by_alias=True, exclude_unset=True)


@pytest.mark.parametrize("overlay", SCALED)
def test_the_scaled_object_agrees_with_keda_and_names_what_exists(overlay: str) -> None:
    (scaled,) = [d for d in manifests(overlay) if d["kind"] == "ScaledObject"]
    assert kept_by_keda(scaled) == scaled, "a field that KEDA does not know is left out by its model"
    assert kept_by_keda(scaled | {"spec": scaled["spec"] | {"minReplicas": 1}}) == scaled
    with pytest.raises(ValueError, match="maxReplicaCount"):
        kept_by_keda(scaled | {"spec": scaled["spec"] | {"maxReplicaCount": "many"}})
    target = scaled["spec"]["scaleTargetRef"]
    spec = specs(overlay, target["kind"])[target["name"]]
    assert "replicas" not in spec, "each apply would undo what KEDA has set"
    (trigger,) = scaled["spec"]["triggers"]
    assert metric_names(trigger["metadata"]["query"]) <= documented_metrics()
    assert trigger["metadata"].keys() == {"serverAddress", "threshold", "ignoreNullValues", "query"}
    assert float(trigger["metadata"]["threshold"]) == 1, "one worker for each run with work"


ABSENT = "_"
#: Name: what APIs report at minute 60 (run: (entries, Unix seconds of the last arrival, state)), workers wanted.
CASES: dict[str, tuple[dict[str, tuple[str, str, str]], float | None]] = {
    "a batch waits": ({"a": ("3", "0", "")}, 1),
    "an empty queue, and a batch came ten minutes ago": ({"a": ("0", "3000", "")}, 1),
    "nothing came for an hour": ({"a": ("0", "0", "")}, 0),
    "two runs with work and one without": ({"a": ("3", "3500", ""), "b": ("0", "3500", ""), "c": ("0", "9", "")}, 2),
    "what waits belongs to a paused run": ({"a": ("3", "3500", "paused")}, 0),
    "one is archived, one is draining": ({"a": ("3", "3500", "archived"), "b": ("3", "9", "draining")}, 1),
    "a run that never got a batch": ({"a": ("0", ABSENT, "")}, 0),
    "no run": ({}, 0),
}


def test_nothing_but_the_scaler_differs_where_keda_scales_the_worker() -> None:
    for scaled, without in (("keda", "replicas"), ("hosts-keda", "hosts")):
        found = [d for d in manifests(scaled) if d["kind"] != "ScaledObject"]
        expected = json.loads(_text(without))
        (worker,) = [d for d in expected if d["metadata"]["name"] == "draftalign-worker" and d["kind"] == "StatefulSet"]
        del worker["spec"]["replicas"]
        assert found == expected


@promtool
def test_the_query_wants_a_worker_for_each_run_that_has_work(tmp_path: Path) -> None:
    """Whatever the number of APIs that report it; and where none answers there is no number, so that KEDA leaves it."""
    query = specs("keda", "ScaledObject")["draftalign-worker"]["triggers"][0]["metadata"]["query"]
    rules = {"groups": [{"name": "keda", "rules": [{"record": "workers", "expr": query}]}]}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules))

    def case(name: str, runs: dict[str, tuple[str, str, str]], apis: int, wanted: float | None) -> dict[str, Any]:
        series = {}
        for api in range(apis):
            labels = f'instance="api-{api}"'
            series[f"draftalign_runs{{{labels}}}"] = str(len(runs))
            for run_name, (entries, arrival, state) in runs.items():
                own = f'{labels},run="{run_name}"'
                series[f"draftalign_queue_entries{{{own}}}"] = entries
                series[f"draftalign_batches_last_arrival_timestamp_seconds{{{own}}}"] = arrival
                if state:
                    series[f'draftalign_run_state{{{own},state="{state}"}}'] = "1"
        samples = [] if wanted is None else [{"labels": "workers", "value": wanted}]
        return {
            "name": name,
            "interval": "1m",
            "input_series": [
                {"series": key, "values": f"{value}x70"} for key, value in series.items() if value != ABSENT
            ],
            "promql_expr_test": [{"expr": "workers", "eval_time": "60m", "exp_samples": samples}],
        }

    tests = [
        case(f"{name}, {apis} APIs", runs, apis, wanted) for name, (runs, wanted) in CASES.items() for apis in (1, 3)
    ]
    tests.append(case("no API answers", {}, 0, None))
    for waiting, workers in (("0", None), ("3", 1)):
        unreadable = case(f"of two runs one cannot be read, {waiting} wait", {"a": (waiting, "0", "")}, 1, workers)
        series = {"series": 'draftalign_run_unreadable{instance="api-0",run="b"}', "values": "1x70"}
        unreadable["input_series"].append(series)
        tests.append(unreadable)
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": tests}))
    result = run("promtool", "test", "rules", "test.yml", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_a_worker_that_keda_has_ended_is_missed_only_where_batches_wait(tmp_path: Path) -> None:
    rules = [rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]
    (silent,) = [rule["expr"] for rule in rules if rule.get("alert") == "DraftalignWorkerSilent"]
    record = {"record": "silent", "expr": silent}
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "keda", "rules": [record]}]}))
    series = [
        {"series": f'{name}{{run="{run_name}",instance="api-{api}"}}', "values": f"{value}x9"}
        for api in range(2)
        for run_name, waiting in (("idle", 0), ("busy", 3))
        for name, value in (
            ("draftalign_worker_heartbeat_timestamp_seconds", 9),
            ("draftalign_queue_entries", waiting),
        )
    ]
    expected = {"expr": "silent", "eval_time": "5m", "exp_samples": [{"labels": 'silent{run="busy"}', "value": 291}]}
    test = {"interval": "1m", "input_series": series, "promql_expr_test": [expected]}
    (tmp_path / "test.yml").write_text(yaml.safe_dump({"rule_files": ["rules.yml"], "tests": [test]}))
    result = run("promtool", "test", "rules", "test.yml", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_manifests_name_commands_settings_and_each_other(overlay: str) -> None:
    services = specs(overlay, "Service")
    for spec in workloads(overlay).values():
        pod, labels = spec["template"]["spec"], spec["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"] == labels
        assert spec.get("serviceName", "draftalign") in services or overlay == "engine"
        volumes = {v["name"] for v in pod.get("volumes", [])}
        volumes |= {c["metadata"]["name"] for c in spec.get("volumeClaimTemplates", [])}
        mounted = [m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])]
        assert set(mounted) == volumes
        assert all("limits" in container["resources"] for container in pod["containers"])
    ours = [c for c in containers(overlay) if c["image"].partition(":")[0] in IMAGES]
    assert {command_of(c)[0] for c in ours} == ({"agent"} if overlay == "engine" else {"serve", "worker"})
    for container in ours:
        check_command(command_of(container))
        assert container["image"].partition(":")[0] == IMAGES[command_of(container)[0] == "worker"]
        variables = environment(overlay, container)
        check_environment(set(variables))
        Settings.model_validate(
            {
                k.removeprefix("DRAFTALIGN_").lower(): v
                for k, v in variables.items()
                if v and k.startswith("DRAFTALIGN_")
            }
        )
        if overlay != "engine":
            redis = variables["DRAFTALIGN_REDIS_URL"]
            assert redis is not None
            host, port = redis.removeprefix("redis://").removesuffix("/0").split(":")
            assert [str(p["port"]) for p in services[host]["ports"]] == [port]
            (state,) = [m["mountPath"] for m in container["volumeMounts"] if m["name"] == "state"]
            assert variables["DRAFTALIGN_STATE_DIR"] == state
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["path"] in PUBLIC


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_and_namespace_are_set_at_one_place(overlay: str, tmp_path: Path) -> None:
    """By the commands of the guide, which build and push what is named then."""
    place = tmp_path / "deploy" / "kubernetes"
    shutil.copytree(KUBERNETES, place)
    settings = place / "settings" / "kustomization.yaml"
    settings.write_text(settings.read_text().replace("namespace: draftalign", "namespace: elsewhere"))
    block = re.search(r"^R=.*?(?=^```)", (DEPLOY / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "docker").write_text('#!/bin/sh\necho "$@" >>docker.log\n')
    (tmp_path / "docker").chmod(0o755)
    for _ in range(2):  # again with the next tag
        shell = run("sh", "-ec", f'PATH="$PWD:$PATH"\n{block[0]}', cwd=tmp_path)
        assert shell.returncode == 0, shell.stderr
    said = (tmp_path / "docker.log").read_text().splitlines()
    built = {re.findall(r"-t (\S+)", line)[0]: "--target api" in line for line in said if line.startswith("build ")}
    assert built == {f"registry.example/rl/{image}:v1": image == "draftalign-api" for image in IMAGES}
    assert {line.removeprefix("push ") for line in said if line.startswith("push ")} == built.keys()
    before, after = manifests(overlay), rendered(place / overlay)
    assert {d["metadata"]["namespace"] for d in before} == {"draftalign"}
    assert {d["metadata"]["namespace"] for d in after} == {"elsewhere"}
    # Not `latest`, for which a node would ask a registry each time, also where the image was loaded into the cluster.
    expected = re.sub(r'"(draftalign(?:-api)?):v1"', r'"registry.example/rl/\1:v1"', json.dumps(before))
    assert json.dumps(after) == expected.replace('"namespace": "draftalign"', '"namespace": "elsewhere"')
    named = {
        c["image"]
        for d in after
        if "template" in d.get("spec", {})
        for c in d["spec"]["template"]["spec"]["containers"]
        if c["image"].startswith("registry.example/")
    }
    assert named == {image for image, of_api in built.items() if of_api or overlay != "engine"}


def test_engine_and_agent_see_the_cache_under_one_path() -> None:
    engine, agent = (next(c for c in containers("engine") if c["name"] == name) for name in ("engine", "agent"))
    (seen,), (written, own) = engine["volumeMounts"], agent["volumeMounts"]
    assert own["name"] == "tmp"
    assert seen["mountPath"] == written["mountPath"]
    assert f"--cache-dir={written['mountPath']}" in agent["args"]
    assert seen["readOnly"]
    (url,) = [a.removeprefix("--service=http://") for a in agent["args"] if a.startswith("--service=")]
    host, port = url.split(":")
    assert [str(p["port"]) for p in specs("replicas", "Service")[host]["ports"]] == [port]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_container_of_ours_can_write_to_its_image(overlay: str) -> None:
    ours = [c for c in containers(overlay) if c["name"] != "engine"]  # somebody else's
    assert len(ours) == (1 if overlay == "engine" else 3)
    for container in ours:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"], container["name"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
    for spec in workloads(overlay).values():
        assert spec["template"]["spec"]["securityContext"]["runAsNonRoot"]
        assert not spec["template"]["spec"]["automountServiceAccountToken"]


@pytest.mark.parametrize("overlay", SERVICE)
def test_of_each_pod_of_the_service_only_the_ports_that_others_need_can_be_reached(overlay: str) -> None:
    pods = {name: spec["template"] for name, spec in workloads(overlay).items()}
    policies = specs(overlay, "NetworkPolicy")
    of_pod = {json.dumps(pod["metadata"]["labels"]): name for name, pod in pods.items()}
    assert len(policies) == len(pods)
    for policy in policies.values():
        name = of_pod.pop(json.dumps(policy["podSelector"]["matchLabels"]))  # of these pods and no others
        assert policy["policyTypes"] == ["Ingress"]
        (rule,) = policy["ingress"]
        if name == "draftalign-worker":
            assert rule == {"from": [{"podSelector": policy["podSelector"]}]}, "ranks trust whoever reaches them"
            continue
        declared = [p["name"] for c in pods[name]["spec"]["containers"] for p in c.get("ports", [])]
        assert [port["port"] for port in rule["ports"]] == declared
        if name == "draftalign-valkey":
            (peer,) = rule["from"]
            reached = peer["podSelector"]["matchLabels"].items()
            for other in pods.keys() - {name}:
                assert reached <= pods[other]["metadata"]["labels"].items()


@pytest.mark.parametrize("overlay", [name for name in SERVICE if name != "one-pod"])
def test_replicas_of_the_api_share_the_workers_state_and_grow_with_their_load(overlay: str) -> None:
    api, worker = workloads(overlay)["draftalign-api"], workloads(overlay)["draftalign-worker"]
    labels = api["template"]["metadata"]["labels"]
    assert specs(overlay, "Service")["draftalign"]["selector"] == labels, "rollouts are not sent to a worker"
    budget = specs(overlay, "PodDisruptionBudget")["draftalign-api"]
    assert budget["selector"]["matchLabels"] == labels
    scaler = specs(overlay, "HorizontalPodAutoscaler")["draftalign-api"]
    assert scaler["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": "draftalign-api"}
    assert "replicas" not in api, "each apply would undo what the scaler has set"
    assert scaler["minReplicas"] > budget["minAvailable"]
    starting = api["template"]["spec"]["containers"][0]["startupProbe"]
    assert starting["periodSeconds"] * starting["failureThreshold"] >= 3600, "the state is copied first"
    for spec in (api, worker):
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        (volume,) = [v for v in pod["volumes"] if v["name"] == "state"]
        if overlay in APART:
            assert volume == {"name": "state", "emptyDir": {}}
            assert specs(overlay, "PersistentVolumeClaim") == {}
            assert environment(overlay, container)["DRAFTALIGN_STATE_URL"] == "s3://bucket/state"
            assert container["envFrom"][1:] == [{"secretRef": {"name": "draftalign-store"}}], "the store's credentials"
        else:
            claim = volume["persistentVolumeClaim"]["claimName"]
            assert specs(overlay, "PersistentVolumeClaim")[claim]["accessModes"] == ["ReadWriteMany"]
            assert "DRAFTALIGN_STATE_URL" not in environment(overlay, container)
        assert "cpu" in container["resources"]["requests"], "the scaler counts in shares of what is requested"


def test_the_api_gets_its_calls_while_no_rollouts_can_be_taken(tmp_path: Path, own_valkey: OwnValkey) -> None:
    """A pod that is not ready gets none, drafters and metrics among them."""
    apis = [c for overlay in SERVICE for c in containers(overlay) if command_of(c)[0] == "serve"]
    (probe,) = {c["readinessProbe"]["httpGet"]["path"] for c in apis}
    before = RunningService(state_dir=tmp_path / "state", redis_url=own_valkey.url)
    assert before.register().is_success
    before.publish()
    before.stop()
    service = RunningService(state_dir=tmp_path / "state", redis_url=own_valkey.url, spool_min_free_bytes=1 << 60)
    try:
        for trouble in ("spool-low", "redis-away"):
            assert service.client.get("/readyz").json()["type"] == f"urn:draftalign:{trouble}"
            assert service.client.get("/drafter/latest", params={"run": "default"}).status_code == 200
            assert service.client.get(probe).status_code == 200
            own_valkey.stop()
            time.sleep(1.0)  # what Redis last said stands for a second
    finally:
        service.stop()


@pytest.mark.parametrize("overlay", SERVICE)
def test_an_api_is_reached_while_the_worker_in_its_pod_is_started_again(overlay: str) -> None:
    """A pod is ready when all its containers are. An API alone in its pod gets calls once it answers."""
    service = specs(overlay, "Service")["draftalign"]
    (pod,) = [s["template"] for s in workloads(overlay).values() if s["selector"]["matchLabels"] == service["selector"]]
    shared = len(pod["spec"]["containers"]) > 1
    assert service.get("publishNotReadyAddresses", False) == shared == (overlay == "one-pod")


@pytest.mark.parametrize("overlay", SERVICE)
def test_an_update_ends_the_pods_of_old_code_before_it_begins_new_ones(overlay: str) -> None:
    """What remains is between API and worker, for which the readme has steps."""
    for kind in ("Deployment", "StatefulSet"):
        for name, spec in specs(overlay, kind).items():
            if spec["template"]["metadata"]["labels"]["app"] != "draftalign":
                continue
            if kind == "Deployment":
                assert spec["strategy"] == {"type": "Recreate"}, name
            else:  # one after the other; more than one are together of old code, or new
                together = spec.get("updateStrategy") == {"type": "OnDelete"}
                assert together or spec.get("replicas", 1) == 1, name


def test_the_steps_to_another_image_name_what_there_is() -> None:
    """All pods but those of Redis are ended; the scaler's number is set again, as it leaves 0 alone."""
    _, _, section = (DEPLOY / "README.md").read_text().partition("### Another image")
    steps = section.split("```")[1]
    found = {f"{d['kind'].lower()}/{d['metadata']['name']}" for d in manifests("keda")}
    assert set(re.findall(r"\b(?:scaledobject|deployment|statefulset)/[\w-]+", steps)) <= found
    (label,), (scaled,) = re.findall(r"-l app=(\S+)", steps), re.findall(r"scale (.*) --replicas=0", steps)
    names = {one.partition("/")[2] for one in scaled.split()}
    for overlay in ("replicas", "hosts", "ranks", *SCALED):
        ended = {n for n, s in workloads(overlay).items() if s["template"]["metadata"]["labels"]["app"] == label}
        assert names == ended == workloads(overlay).keys() - {"draftalign-valkey"}
    least = specs("replicas", "HorizontalPodAutoscaler")["draftalign-api"]["minReplicas"]
    assert f"deployment/draftalign-api --replicas={least} " in steps


def test_ranks_find_each_other() -> None:
    """As many pods as torchrun takes, at the name of one of them, and as many processes as GPUs."""
    spec = workloads("ranks")["draftalign-worker"]
    (container,) = spec["template"]["spec"]["containers"]
    options = dict(re.findall(r"--([a-z-]+)=(\S+)", " ".join(container["args"])))
    least, most = map(int, options["nnodes"].split(":"))
    assert (least, most) == (1, spec["replicas"])
    assert most > 1
    assert int(options["nproc-per-node"]) == container["resources"]["limits"]["nvidia.com/gpu"] > 1
    host, _, port = options["rdzv-endpoint"].partition(":")
    assert (host, port.isdigit()) == (f"draftalign-worker-0.{spec['serviceName']}", True)
    service = specs("ranks", "Service")[spec["serviceName"]]
    assert (service["clusterIP"], service["publishNotReadyAddresses"]) == ("None", True)
    assert service["selector"] == spec["template"]["metadata"]["labels"]
    assert spec["podManagementPolicy"] == "Parallel", "the first would wait for the second, which is not started"
    assert spec["updateStrategy"] == {"type": "OnDelete"}, "pod by pod, old and new code would train together"
    (pod_ip,) = [e for e in container["env"] if e["name"] == "POD_IP"]
    assert options["local-addr"] == "$(POD_IP)"
    assert pod_ip["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert environment("ranks", container)["DRAFTALIGN_DEVICE"] == "cuda", "each rank takes the GPU of its number"


class _Node:
    """A pod of the worker: its torchrun, with the arguments of the manifest, on this machine."""

    def __init__(self, port: int, variables: dict[str, str], *, first: bool, address: str = "127.0.0.1") -> None:
        """`first`: it has the store. A pod knows that by its address; here all are of one machine, so it is told."""
        (container,) = workloads("ranks")["draftalign-worker"]["template"]["spec"]["containers"]
        here = {"nproc-per-node": "1", "rdzv-endpoint": f"127.0.0.1:{port}", "local-addr": address}
        self._argv: list[str] = [*container["command"], *container["args"]]
        for number, argument in enumerate(self._argv):
            name = argument[2:].partition("=")[0]
            self._argv[number] = f"--{name}={here.pop(name)}" if name in here else argument
        assert not here
        # A node that is lost is waited for: ten seconds, where torchrun's own are thirty.
        self._argv.insert(1, f"--rdzv-conf=is_host={first},last_call_timeout=10")
        beside = str(Path(sys.executable).parent)
        of_manifest = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
        of_manifest |= variables | {
            "DRAFTALIGN_DEVICE": "cpu",
            "PATH": f"{beside}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
        }
        self._environment = os.environ | of_manifest
        self.start()

    def start(self) -> None:
        """Begin, or begin again as another pod of its name."""
        self._process = subprocess.Popen(self._argv, env=self._environment, cwd=ROOT)

    def tend(self) -> None:
        """Start the container again when it has ended."""
        if self._process.poll() is not None:
            self.start()

    def kill(self) -> None:
        """All its processes."""
        self._process.send_signal(signal.SIGSTOP)  # it would start its rank again
        for child in self._children():
            os.kill(child, signal.SIGKILL)
        self._process.kill()
        self._process.wait(60)

    def ranks(self) -> int | None:
        """How many ranks there are, as its own was told; None where it has none."""
        return self._told("WORLD_SIZE")

    def rank(self) -> int | None:
        """Which of them its own is."""
        return self._told("RANK")

    def _told(self, name: str) -> int | None:
        for child in self._children():
            with contextlib.suppress(OSError):
                found = re.search(rf"(?<!_){name}=(\d+)".encode(), Path(f"/proc/{child}/environ").read_bytes())
                return int(found[1]) if found else None
        return None

    def _children(self) -> list[int]:
        place = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return [int(child) for child in place.read_text().split()] if place.exists() else []

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> None:
        self._process.wait(90)


class _Pair:
    """Two pods of the ranks, and the run that they train. The first has torchrun's store; the lower address, rank 0."""

    def __init__(self, bench: Bench, *addresses: str) -> None:
        self.bench = bench
        bench.begin()
        given = {k: v for k, v in bench.settings.model_dump(exclude_defaults=True).items() if k != "tokens"}
        variables = {f"DRAFTALIGN_{k.upper()}": str(v) for k, v in given.items()}
        variables["DRAFTALIGN_REDIS_URL"] = bench.redis_url
        port = free_port()
        self.nodes = [_Node(port, variables, first=not n, address=address) for n, address in enumerate(addresses)]
        self.there = list(self.nodes)
        self._began = time.monotonic()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 150) -> None:
        """And say how long it took since the last call."""
        self.bench.wait(condition, seconds)
        print(f"{time.monotonic() - self._began:.0f} s: {what}")
        self._began = time.monotonic()

    def all_trained(self) -> bool:
        for node in self.there:
            node.tend()
        return set(states(self.bench)) == {"trained"}

    def together(self) -> bool:
        return self.all_trained() and [node.ranks() for node in self.nodes] == [2, 2]

    def end(self) -> None:
        """As when the StatefulSet is deleted: all at once."""
        for node in self.nodes:
            node.terminate()
        for node in self.nodes:
            node.wait()


@pytest.mark.slow
@pytest.mark.timeout(960)  # longer than all waits together: theirs is the better message
def test_ranks_on_two_nodes_train_on_when_one_is_replaced(tmp_path: Path, redis_url: str) -> None:
    """Two pods as the manifest starts them: the first is replaced; the second is lost, and comes back later."""
    with Bench(tmp_path, redis_url, **ADAMW) as bench:
        pair = _Pair(bench, "127.0.0.1", "127.0.0.1")
        first, second = pair.nodes
        try:
            bench.post("a", policy_version=0, rollouts=3)
            pair.wait(pair.together, "two ranks from the first start")
            first.kill()
            first.start()
            bench.post("b", policy_version=0, rollouts=3)
            pair.wait(pair.all_trained, "trained on after the first node was replaced")
            pair.wait(pair.together, "two ranks again")
            second.kill()
            pair.there.remove(second)
            bench.post("c", policy_version=0, rollouts=3)
            pair.wait(pair.all_trained, "trained on after the second node was lost")
            assert first.ranks() == 1
            pair.there.append(second)
            second.start()
            bench.post("d", policy_version=0, rollouts=3)
            pair.wait(pair.together, "two ranks again, and trained on, after it came back")
        finally:
            pair.end()


@pytest.mark.slow
def test_ranks_train_on_when_the_pod_of_rank_0_is_drained(tmp_path: Path, redis_url: str) -> None:
    """It ends in order, and comes back later. The pod that is left must not take that for the end of the job."""
    with Bench(tmp_path, redis_url, **ADAMW) as bench:
        pair = _Pair(bench, "127.0.0.2", "127.0.0.1")
        left, drained = pair.nodes
        try:
            bench.post("a", policy_version=0, rollouts=3)
            pair.wait(pair.together, "two ranks from the first start")
            assert (drained.rank(), left.rank()) == (0, 1)
            pair.there.remove(drained)
            drained.terminate()
            bench.post("b", policy_version=0, rollouts=3)
            drained.wait()
            bench.post("c", policy_version=0, rollouts=3)
            pair.wait(lambda: pair.all_trained() and left.ranks() == 1, "trained on by the pod that is left")
            drained.start()
            pair.there.append(drained)
            bench.post("d", policy_version=0, rollouts=3)
            pair.wait(pair.together, "two ranks again, and trained on, after it came back")
        finally:
            pair.end()


@pytest.mark.parametrize("overlay", SERVICE)
def test_no_redis_of_ours_may_lose_what_was_acknowledged(overlay: str) -> None:
    (container,) = [c for c in containers(overlay) if c["name"] == "valkey"]
    check_redis_server(container["args"])
