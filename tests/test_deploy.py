"""What is deployed agrees with the code: commands, settings, metrics, files. promtool runs the rules if it exists."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml
from prometheus_client import generate_latest

from rl_hooks.agent.metrics import AgentMetrics
from service.api.auth import PUBLIC
from service.cli.main import app
from service.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Prometheus) is not installed")
amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool (Alertmanager) is not installed")


def _yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def _manifests() -> list[dict[str, Any]]:
    return [
        doc for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for doc in yaml.safe_load_all(path.read_text())
    ]


def _containers() -> list[dict[str, Any]]:
    return [
        container
        for document in _manifests()
        if "template" in document["spec"]
        for container in document["spec"]["template"]["spec"]["containers"]
    ]


def _rules() -> list[dict[str, Any]]:
    return [rule for group in _yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


def _run(*command: str, cwd: Path = PROMETHEUS) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60)


@promtool
def test_rules_are_valid() -> None:
    result = _run("promtool", "check", "rules", "--lint=all", "--lint-fatal", "rules.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    result = _run("promtool", "test", "rules", "rules_test.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_the_rule_tests_would_notice_a_wrong_rule(tmp_path: Path) -> None:
    """A mutation per alert: with a condition that never holds, the tests of that alert fail."""
    text = (PROMETHEUS / "rules.yml").read_text()
    shutil.copy(PROMETHEUS / "rules_test.yml", tmp_path)
    mutated = text.replace("> 0.8", "> 80").replace("<= 1.05", "< 0").replace("for: 10m", "for: 10h")
    assert mutated != text
    (tmp_path / "rules.yml").write_text(mutated)
    result = _run("promtool", "test", "rules", "rules_test.yml", cwd=tmp_path)
    assert result.returncode == 1
    for alert in ("QueueNearlyFull", "DrafterDead", "NoDraftAccepted", "WorkerAbsent", "EngineBehind"):
        assert f"Draftalign{alert}" in result.stdout + result.stderr


@promtool
def test_the_example_prometheus_configuration_is_valid(tmp_path: Path) -> None:
    text = (PROMETHEUS / "prometheus.yml").read_text()
    text = text.replace("/etc/prometheus/", f"{PROMETHEUS}/")
    token = tmp_path / "token"
    token.write_text("x")
    text = text.replace("/run/secrets/draftalign_read_token", str(token))
    (tmp_path / "prometheus.yml").write_text(text)
    result = _run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@amtool
def test_the_example_alertmanager_configuration_is_valid() -> None:
    result = _run("amtool", "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_documented_and_has_a_severity() -> None:
    tested = {
        case["alertname"]
        for test in _yaml(PROMETHEUS / "rules_test.yml")["tests"]
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    alerts = {rule["alert"]: rule for rule in _rules() if "alert" in rule}
    assert alerts.keys() == tested
    documented = re.findall(r"^\| (Draftalign\w+) \| (\w+)", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    assert dict(documented) == {name: rule["labels"]["severity"] for name, rule in alerts.items()}
    assert all({"summary", "description"} == rule["annotations"].keys() for rule in alerts.values())


def test_alertmanager_routes_know_the_alerts_and_severities() -> None:
    configuration = _yaml(DEPLOY / "alertmanager" / "alertmanager.yml")
    alerts = {rule["alert"]: rule["labels"]["severity"] for rule in _rules() if "alert" in rule}
    receivers = {receiver["name"] for receiver in configuration["receivers"]}
    routes = [configuration["route"], *configuration["route"]["routes"]]
    assert {route["receiver"] for route in routes} == receivers
    assert set(alerts.values()) == {"page", "ticket", "info"}
    for inhibition in configuration["inhibit_rules"]:
        for matcher in (*inhibition["source_matchers"], *inhibition["target_matchers"]):
            name, pattern = re.fullmatch(r'(\w+)=~?"(.*)"', matcher).groups()  # type: ignore[union-attr]
            assert name == "alertname"
            assert any(re.fullmatch(pattern, alert) for alert in alerts), matcher


def _metric_names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:draftalign_\w+|\w+:draftalign_\w+:\w+)", re.sub(r'"[^"]*"', "", expression)))


def _agent_metric_names() -> set[str]:
    metrics = AgentMetrics()
    metrics.loaded("e", "v")
    metrics.alpha("e", "v", 2.0)
    metrics.swap("e", "swapped")
    metrics.contact("e")
    metrics.error("e", "x")
    metrics.unattributed("e", 0)
    return set(re.findall(r"^(draftalign_\w+)\{", generate_latest(metrics.registry).decode(), re.MULTILINE))


def test_rules_and_dashboard_use_only_metrics_that_exist() -> None:
    documented = set(
        re.findall(r"^\| `(draftalign_\w+)", (ROOT / "docs" / "reference" / "metrics.md").read_text(), re.MULTILINE)
    )
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    known = documented | recorded | _agent_metric_names()
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    expressions = [rule["expr"] for rule in _rules()]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [entry["expr"] for entry in dashboard["annotations"]["list"]]
    used = set().union(*map(_metric_names, expressions))
    assert used - known == set()


@promtool
def test_the_agents_own_metrics_pass_the_linter() -> None:
    metrics = AgentMetrics()
    metrics.swap("e", "swapped")
    metrics.contact("e")
    page = generate_latest(metrics.registry).decode()
    result = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=30)
    assert result.returncode == 0, result.stdout + result.stderr


def _options(command: str) -> set[str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {option for parameter in commands[command].params for option in parameter.opts}


def _check_command(arguments: list[str]) -> None:
    options = _options(arguments[0])
    for argument in arguments[1:]:
        assert argument.split("=")[0] in options, argument


def _check_environment(names: set[str]) -> None:
    fields = {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields} | {"DRAFTALIGN_TOKEN"}
    assert {name for name in names if name.startswith("DRAFTALIGN_")} <= fields


def test_compose_names_commands_settings_and_files_that_exist() -> None:
    compose = _yaml(ROOT / "docker-compose.yml")
    services = compose["services"]
    assert {"valkey", "api", "worker", "prometheus", "grafana"} <= services.keys()
    for service in services.values():
        assert "restart" in service
        _check_environment(set(service.get("environment", {})))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in compose["volumes"], source
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is published beyond this machine by default"
        assert set(service.get("depends_on", {})) <= services.keys()
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
    for name in ("api", "worker"):
        _check_command(services[name]["command"])
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()
        assert services[name]["environment"]["DRAFTALIGN_REDIS_URL"].startswith("redis://valkey:")
    assert "readyz" in str(services["api"]["healthcheck"])
    assert "DRAFTALIGN_TOKENS:?" in services["api"]["environment"]["DRAFTALIGN_TOKENS"], "no tokens, no service"


class _Override(yaml.SafeLoader):  # type: ignore[misc]
    """Reads compose's `!override`, which no plain YAML knows, as the list behind it."""


_Override.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def test_what_make_containers_lays_over_compose_fits_it() -> None:
    compose = _yaml(ROOT / "docker-compose.yml")["services"]
    override = yaml.load((DEPLOY / "debian" / "compose.yml").read_text(), _Override)["services"]  # noqa: S506 - a SafeLoader
    assert override.keys() == compose.keys(), "what is not named here would be pulled"
    for name, service in override.items():
        built = compose[name]["image"] == "draftalign"
        assert built or service.get("image") == "draftalign-debian" or service.get("profiles") == ["never"]
        _check_environment(set(service.get("environment", {})))
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1::"), "several stand beside each other"
            assert port.rsplit(":", 1)[1] in {old.rsplit(":", 1)[1] for old in compose[name]["ports"]}
    text = (ROOT / "make" / "containers.mk").read_text()
    assert all(f"-t {image}" in text for image in ("draftalign", "draftalign-debian"))


def test_no_container_of_ours_can_write_to_its_image_or_has_a_capability() -> None:
    services = _yaml(ROOT / "docker-compose.yml")["services"]
    ours = [service for service in services.values() if service["image"] == "draftalign"]
    assert len(ours) == 2
    for service in ours:
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert [place.partition(":")[2] for place in service["tmpfs"]] == ["exec"], (
            "Triton loads what it compiles from there"
        )
    assert "TRITON_CACHE_DIR=/tmp/" in (DEPLOY / "Dockerfile").read_text()


def test_compose_and_prometheus_agree() -> None:
    services = _yaml(ROOT / "docker-compose.yml")["services"]
    configuration = _yaml(PROMETHEUS / "prometheus.yml")
    (job,) = [job for job in configuration["scrape_configs"] if job["job_name"] == "draftalign"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert services[host]["environment"]["DRAFTALIGN_PORT"] == port
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert any('job="draftalign"' in rule["expr"] for rule in _rules())
    mounts = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    assert set(configuration["rule_files"]) <= mounts
    assert configuration["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"][0].split(":")[0] in services


def test_dashboard_is_where_grafana_looks() -> None:
    (provider,) = _yaml(DEPLOY / "grafana" / "provisioning" / "dashboards" / "draftalign.yml")["providers"]
    (source,) = _yaml(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    grafana = _yaml(ROOT / "docker-compose.yml")["services"]["grafana"]
    mounts = [volume.split(":")[1] for volume in grafana["volumes"]]
    assert any(mount.startswith(provider["options"]["path"] + "/") for mount in mounts)
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_kubernetes_manifests_name_commands_settings_and_each_other() -> None:
    documents = _manifests()
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    for document in documents:
        assert {"apiVersion", "kind", "metadata", "spec"} <= document.keys()
        if "template" not in document["spec"]:
            continue
        pod, labels = document["spec"]["template"]["spec"], document["spec"]["template"]["metadata"]["labels"]
        assert document["spec"]["selector"]["matchLabels"] == labels
        volumes = {v["name"] for v in pod.get("volumes", [])}
        volumes |= {c["metadata"]["name"] for c in document["spec"].get("volumeClaimTemplates", [])}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes
            assert "limits" in container["resources"]
    for container in _containers():
        environment = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
        if container["image"].startswith("draftalign:"):
            _check_command(container["args"])
            _check_environment(set(environment))
        if redis := environment.get("DRAFTALIGN_REDIS_URL"):
            assert redis.removeprefix("redis://").split(":")[0] in services
        for probe in ("livenessProbe", "readinessProbe"):
            if "httpGet" in container.get(probe, {}):
                assert container[probe]["httpGet"]["path"] in PUBLIC


def test_engine_and_agent_see_the_cache_under_one_path() -> None:
    engine, agent = (next(c for c in _containers() if c["name"] == name) for name in ("engine", "agent"))
    (seen,), (written, own) = engine["volumeMounts"], agent["volumeMounts"]
    assert own["name"] == "tmp"
    assert seen["mountPath"] == written["mountPath"]
    assert f"--cache-dir={written['mountPath']}" in agent["args"]
    assert seen["readOnly"]


def test_dockerfile_copies_what_exists_and_all_packages() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied), copied
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name != "tests"}
    assert packages <= set(copied)
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
    (command,) = re.findall(r'^CMD \["(\w+)"\]', text, re.MULTILINE)
    _check_command([command])
    assert not re.search(r"^# syntax=", text, re.MULTILINE), (
        "a front end would be pulled, also where no registry can be reached"
    )
    assert re.findall(r"^ARG (\w+)=", text, re.MULTILINE) == ["BASE", "PIP_EXTRA_INDEX_URL", "COMPILER"]
    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}


def test_kubernetes_manifests_agree_with_the_schemas() -> None:
    for document in _manifests():
        kubernetes_validate.validate(document, "1.32", strict=True)
    broken = _manifests()[0] | {"spec": {"prots": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.32", strict=True)


def test_only_api_and_worker_reach_valkey_and_no_container_of_ours_writes_to_its_image() -> None:
    policy, pods = _policies()["draftalign-valkey"], _pods()
    assert policy["podSelector"]["matchLabels"] == pods["draftalign-valkey"]["metadata"]["labels"]
    ((peer,),) = [rule["from"] for rule in policy["ingress"]]
    for name in ("draftalign", "draftalign-api", "draftalign-worker"):
        assert peer["podSelector"]["matchLabels"].items() <= pods[name]["metadata"]["labels"].items()
    ours = [c for pod in pods.values() for c in pod["spec"]["containers"] if c["name"] != "engine"]  # somebody else's
    assert len(ours) == len(pods) + 1
    for container in ours:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"], container["name"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}


def _policies() -> dict[str, dict[str, Any]]:
    return {d["metadata"]["name"]: d["spec"] for d in _manifests() if d["kind"] == "NetworkPolicy"}


def _pods() -> dict[str, dict[str, Any]]:
    found = [d for d in _manifests() if d["kind"] in ("StatefulSet", "Deployment")]
    return {d["metadata"]["name"]: d["spec"]["template"] for d in found}


def test_of_each_pod_of_the_service_only_the_ports_that_others_need_can_be_reached() -> None:
    pods, policies = _pods(), _policies()
    assert policies.keys() == pods.keys() - {"engine"}
    for name, policy in policies.items():
        assert policy["podSelector"]["matchLabels"] == pods[name]["metadata"]["labels"], "of these pods and no others"
        assert policy["policyTypes"] == ["Ingress"]
        (rule,) = policy["ingress"]
        if name == "draftalign-worker":
            (peer,) = rule["from"]
            assert peer == {"podSelector": policy["podSelector"]}, "ranks trust whoever reaches them"
        else:
            declared = [p["name"] for c in pods[name]["spec"]["containers"] for p in c.get("ports", [])]
            assert [port["port"] for port in rule["ports"]] == declared


def test_all_that_is_deployed_speaks_of_settings_that_exist() -> None:
    """In comments and examples too: somebody copies them."""
    own = {"DRAFTALIGN_TOKEN", "DRAFTALIGN_URL", "DRAFTALIGN_RUN"}  # of agents and engines
    own.add("DRAFTALIGN_READ_TOKEN")  # of compose, for Prometheus
    known = own | {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields}
    paths = [
        ROOT / "docker-compose.yml",
        *(p for p in DEPLOY.rglob("*") if p.suffix in (".py", ".yml", ".yaml", ".md")),
    ]
    for path in [*paths, DEPLOY / "Dockerfile"]:
        assert set(re.findall(r"DRAFTALIGN_[A-Z_]*[A-Z]", path.read_text())) <= known, path


def test_replicas_of_the_api_share_the_workers_volume_and_grow_with_their_load() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "replicas.yaml").read_text()))
    found = {(d["kind"], d["metadata"]["name"]): d["spec"] for d in documents}
    api, worker = found["Deployment", "draftalign-api"], found["StatefulSet", "draftalign-worker"]
    labels = api["template"]["metadata"]["labels"]
    assert found["Service", "draftalign"]["selector"] == labels, "rollouts are not sent to a worker"
    assert found["PodDisruptionBudget", "draftalign-api"]["selector"]["matchLabels"] == labels
    assert ("Service", worker["serviceName"]) in found
    scaler = found["HorizontalPodAutoscaler", "draftalign-api"]
    assert ("Deployment", scaler["scaleTargetRef"]["name"]) in found
    assert "replicas" not in api, "each apply would undo what the scaler has set"
    assert scaler["minReplicas"] > found["PodDisruptionBudget", "draftalign-api"]["minAvailable"]
    for spec in (api, worker):
        pod = spec["template"]["spec"]
        (claim,) = [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == "state"]
        assert found["PersistentVolumeClaim", claim]["accessModes"] == ["ReadWriteMany"]
        (container,) = pod["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == {"state", "tmp"}
        assert "cpu" in container["resources"]["requests"], "the scaler counts in shares of what is requested"


def test_no_redis_of_ours_may_lose_what_was_acknowledged() -> None:
    (container,) = [c for c in _containers() if c["name"] == "valkey"]
    compose = _yaml(ROOT / "docker-compose.yml")["services"]["valkey"]["command"]
    for command in (container["args"], compose):
        options = dict(itertools.pairwise(command))
        assert (options["--appendonly"], options["--appendfsync"]) == ("yes", "always")
        assert options["--maxmemory-policy"] == "noeviction"
        assert options["--protected-mode"] == "no", "Redis would answer its own container alone"
