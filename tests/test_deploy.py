"""What is deployed agrees with the code: commands, settings, metrics, files. promtool runs the rules if it exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.cog.runtime import panelcfg_config
from grafana_foundation_sdk.models import units
from grafana_foundation_sdk.models.dashboard import Dashboard
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
from prometheus_client import generate_latest

from rl_hooks.agent.metrics import AgentMetrics
from service.settings import Settings

amtool = pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool (Alertmanager) is not installed")


def _rules() -> list[dict[str, Any]]:
    return [rule for group in read_yaml(PROMETHEUS / "rules.yml")["groups"] for rule in group["rules"]]


@promtool
def test_rules_are_valid() -> None:
    result = run("promtool", "check", "rules", "--lint=all", "--lint-fatal", "rules.yml")
    assert result.returncode == 0, result.stdout + result.stderr


@promtool
def test_alerts_fire_when_they_should_and_not_before() -> None:
    result = run("promtool", "test", "rules", "rules_test.yml")
    assert result.returncode == 0, result.stdout + result.stderr


def _check_rule_tests(folder: Path, tests: list[dict[str, Any]]) -> None:
    document = {"rule_files": [str(PROMETHEUS / "rules.yml")], "evaluation_interval": "15s", "tests": tests}
    (folder / "test.yml").write_text(yaml.safe_dump(document))
    result = run("promtool", "test", "rules", "test.yml", cwd=folder)
    assert result.returncode == 0, result.stdout + result.stderr


def _of_each_api(series: str) -> list[str]:
    """The names under which three APIs report it, which report alike; its own where one process does."""
    name, _, labels = series.removesuffix("}").partition("{")
    if not name.startswith("draftalign_") or name.startswith(("draftalign_agent_", "draftalign_token_file_")):
        return [series]
    own = [label for label in labels.split(",") if label and not label.startswith("instance=")]
    apis = [",".join([*own, f'instance="api-{api}"']) for api in range(3)]
    return [f"{name}{{{labels}}}" for labels in apis]


@promtool
def test_three_apis_give_the_alerts_and_the_figures_of_one(tmp_path: Path) -> None:
    tests = read_yaml(PROMETHEUS / "rules_test.yml")["tests"]
    for test in tests:
        given = {name: one["values"] for one in test["input_series"] for name in _of_each_api(one["series"])}
        test["input_series"] = [{"series": name, "values": values} for name, values in given.items()]
    _check_rule_tests(tmp_path, tests)


@promtool
def test_an_api_that_is_added_reports_old_dead_letters_without_an_alert(tmp_path: Path) -> None:
    series = [
        {"series": f'draftalign_batches_dead_total{{run="a",instance="{name}"}}', "values": values}
        for name, values in (("old", "5x200"), ("new", "_x80 5x120"))
    ]
    quiet = [{"eval_time": at, "alertname": "DraftalignDeadLetters"} for at in ("20m15s", "21m", "30m")]
    _check_rule_tests(tmp_path, [{"interval": "15s", "input_series": series, "alert_rule_test": quiet}])


@promtool
def test_the_dashboard_draws_once_what_several_apis_report(tmp_path: Path) -> None:
    """Run `one` is reported by one API, `three` by three: as many lines, and as high."""
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [entry["expr"] for entry in dashboard["annotations"]["list"]]
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    series = []
    for name, labels in re.findall(r"^\| `(draftalign_\w+)\{run,? ?([\w, ]*)\}`", text, re.MULTILINE):
        for value in ("best", "served", "served_compared"):
            own = [f'{label.strip()}="{value}"' for label in labels.split(",") if label]
            for run_name, instance in (("one", 0), ("three", 0), ("three", 1), ("three", 2)):
                named = ",".join([f'run="{run_name}"', f'instance="api-{instance}"', *own])
                series.append({"series": f"{name}{{{named}}}", "values": "1+3x120"})
            if not own:
                break
    same = [{"labels": "{}", "value": 0}]
    cases = [
        {"expr": f"{fold}({one}) - {fold}({three})", "eval_time": "25m", "exp_samples": same}
        for expression in expressions
        if "$run" in expression and "draftalign_agent_" not in expression  # those are of one process each
        for one, three in [(expression.replace("$run", "one"), expression.replace("$run", "three"))]
        for fold in ("count", "sum")
    ]
    assert len(cases) > 30
    _check_rule_tests(tmp_path, [{"interval": "15s", "input_series": series, "promql_expr_test": cases}])


@promtool
def test_the_rule_tests_would_notice_a_wrong_rule(tmp_path: Path) -> None:
    """A mutation per alert: with a condition that never holds, the tests of that alert fail."""
    text = (PROMETHEUS / "rules.yml").read_text()
    shutil.copy(PROMETHEUS / "rules_test.yml", tmp_path)
    mutated = (
        text.replace("> 0.8", "> 80")
        .replace("<= 1.05", "< 0")
        .replace("for: 10m", "for: 10h")
        .replace('"dead"}) == 1', '"dead"}) == 2')
    )
    assert mutated != text
    (tmp_path / "rules.yml").write_text(mutated)
    result = run("promtool", "test", "rules", "rules_test.yml", cwd=tmp_path)
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
    result = run("promtool", "check", "config", str(tmp_path / "prometheus.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


@amtool
def test_the_example_alertmanager_configuration_is_valid() -> None:
    result = run("amtool", "check-config", str(DEPLOY / "alertmanager" / "alertmanager.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_tested_documented_and_has_a_severity() -> None:
    tested = {
        case["alertname"]
        for test in read_yaml(PROMETHEUS / "rules_test.yml")["tests"]
        for case in test.get("alert_rule_test", [])
        if case.get("exp_alerts")
    }
    alerts = {rule["alert"]: rule for rule in _rules() if "alert" in rule}
    assert alerts.keys() == tested
    documented = re.findall(r"^\| (Draftalign\w+) \| (\w+)", (DEPLOY / "README.md").read_text(), re.MULTILINE)
    assert dict(documented) == {name: rule["labels"]["severity"] for name, rule in alerts.items()}
    assert all({"summary", "description", "runbook"} == rule["annotations"].keys() for rule in alerts.values())


def test_alertmanager_routes_know_the_alerts_and_severities() -> None:
    configuration = read_yaml(DEPLOY / "alertmanager" / "alertmanager.yml")
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


def _agent_metric_names() -> set[str]:
    metrics = AgentMetrics()
    metrics.loaded("e", "v")
    metrics.alpha("e", "v", 2.0)
    metrics.swaps.labels("e", "swapped").inc()
    metrics.last_contact.labels("e").set_to_current_time()
    metrics.errors.labels("e", "x").inc()
    metrics.unattributed.labels("e").set(0)
    return set(re.findall(r"^(draftalign_\w+)\{", generate_latest(metrics.registry).decode(), re.MULTILINE))


def test_rules_and_dashboard_use_only_metrics_that_exist() -> None:
    recorded = {rule["record"] for rule in _rules() if "record" in rule}
    known = documented_metrics() | recorded | _agent_metric_names()
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    expressions = [rule["expr"] for rule in _rules()]
    expressions += [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [entry["expr"] for entry in dashboard["annotations"]["list"]]
    used = set().union(*map(metric_names, expressions))
    assert used - known == set()


@promtool
def test_the_agents_own_metrics_pass_the_linter() -> None:
    metrics = AgentMetrics()
    metrics.swaps.labels("e", "swapped").inc()
    metrics.last_contact.labels("e").set_to_current_time()
    page = generate_latest(metrics.registry).decode()
    result = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_compose_names_commands_settings_and_files_that_exist() -> None:
    compose = read_yaml(ROOT / "docker-compose.yml")
    services = compose["services"]
    assert {"valkey", "api", "worker", "prometheus", "grafana"} <= services.keys()
    for service in services.values():
        assert "restart" in service
        check_environment(set(service.get("environment", {})))
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith("./") else source in compose["volumes"], source
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), "nothing is published beyond this machine by default"
        assert set(service.get("depends_on", {})) <= services.keys()
        assert set(service.get("secrets", [])) <= compose["secrets"].keys()
    for name in ("api", "worker"):
        check_command(services[name]["command"])
        assert (ROOT / services[name]["build"]["dockerfile"]).is_file()
        assert services[name]["environment"]["DRAFTALIGN_REDIS_URL"].startswith("redis://valkey:")
    assert "healthz" in str(services["api"]["healthcheck"])
    assert "DRAFTALIGN_TOKENS:?" in services["api"]["environment"]["DRAFTALIGN_TOKENS"], "no tokens, no service"


class _Override(yaml.SafeLoader):  # type: ignore[misc]
    """Reads compose's `!override`, which no plain YAML knows, as the list behind it."""


_Override.add_constructor("!override", lambda loader, node: loader.construct_sequence(node))


def test_what_make_containers_lays_over_compose_fits_it() -> None:
    compose = read_yaml(ROOT / "docker-compose.yml")["services"]
    override = yaml.load((DEPLOY / "debian" / "compose.yml").read_text(), _Override)["services"]  # noqa: S506 - a SafeLoader
    assert override.keys() == compose.keys(), "what is not named here would be pulled"
    for name, service in override.items():
        built = compose[name]["image"].startswith("draftalign")
        assert built or service.get("image") == "draftalign-debian" or service.get("profiles") == ["never"]
        check_environment(set(service.get("environment", {})))
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1::"), "several stand beside each other"
            assert port.rsplit(":", 1)[1] in {old.rsplit(":", 1)[1] for old in compose[name]["ports"]}
    text = (ROOT / "make" / "containers.mk").read_text()
    assert all(f"-t {image}" in text for image in ("draftalign", "draftalign-api", "draftalign-debian"))


def test_no_container_of_ours_can_write_to_its_image_or_has_a_capability() -> None:
    services = read_yaml(ROOT / "docker-compose.yml")["services"]
    ours = [service for service in services.values() if service["image"].startswith("draftalign")]
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
    services = read_yaml(ROOT / "docker-compose.yml")["services"]
    configuration = read_yaml(PROMETHEUS / "prometheus.yml")
    (job,) = [job for job in configuration["scrape_configs"] if job["job_name"] == "draftalign"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert services[host]["environment"]["DRAFTALIGN_PORT"] == port
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{services['prometheus']['secrets'][0]}"
    assert any('job="draftalign"' in rule["expr"] for rule in _rules())
    mounts = {volume.split(":")[1] for volume in services["prometheus"]["volumes"]}
    assert set(configuration["rule_files"]) <= mounts
    assert configuration["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"][0].split(":")[0] in services


def test_dashboard_is_where_grafana_looks() -> None:
    (provider,) = read_yaml(DEPLOY / "grafana" / "provisioning" / "dashboards" / "draftalign.yml")["providers"]
    (source,) = read_yaml(DEPLOY / "grafana" / "provisioning" / "datasources" / "prometheus.yml")["datasources"]
    grafana = read_yaml(ROOT / "docker-compose.yml")["services"]["grafana"]
    mounts = [volume.split(":")[1] for volume in grafana["volumes"]]
    assert any(mount.startswith(provider["options"]["path"] + "/") for mount in mounts)
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    assert {panel["datasource"]["uid"] for panel in dashboard["panels"]} == {source["uid"]}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def _kept(given: Any, taken: Any) -> Any:
    """What is left of JSON when it went through a model, without the defaults that the model adds."""
    if isinstance(given, dict) and isinstance(taken, dict):
        return {name: _kept(value, taken[name]) for name, value in given.items() if name in taken}
    if isinstance(given, list) and isinstance(taken, list) and len(given) == len(taken):
        return [_kept(*pair) for pair in zip(given, taken, strict=True)]
    return taken


def test_the_dashboard_is_of_fields_that_grafana_knows() -> None:
    """Its own models leave out what they do not know. They check no type of a value."""
    register_default_plugins()
    dashboard = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
    for panel in dashboard["panels"]:
        assert panelcfg_config(panel["type"]) is not None, panel["type"]
        assert panel["fieldConfig"]["defaults"]["unit"] in vars(units).values(), panel["title"]
    for annotation in dashboard["annotations"]["list"]:
        assert annotation.pop("titleFormat"), "Prometheus' own, of which the models know nothing"
    taken = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert _kept(dashboard, taken) == dashboard
    dashboard["panels"][0]["targets"][0]["legend"] = "x"
    taken = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert _kept(dashboard, taken) != dashboard


def test_dockerfile_copies_what_exists_and_all_packages() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (?!--)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert all((ROOT / name).exists() for name in copied), copied
    packages = {p.parent.name for p in ROOT.glob("*/__init__.py") if p.parent.name != "tests"}
    assert packages <= set(copied)
    assert re.search(r"^USER (?!root)", text, re.MULTILINE)
    for command in re.findall(r'^CMD \["(\w+)"\]', text, re.MULTILINE):
        check_command([command])
    *_, last_user = re.findall(r"^USER (\w+)", text, re.MULTILINE)
    assert last_user == "draftalign"
    assert not re.search(r"^# syntax=", text, re.MULTILINE), (
        "a front end would be pulled, also where no registry can be reached"
    )
    assert re.findall(r"^ARG (\w+)=", text, re.MULTILINE) == ["BASE", "PIP_EXTRA_INDEX_URL", "COMPILER"]
    froms, stages = (re.findall(p, text, re.MULTILINE) for p in (r"^FROM (\S+)", r"^FROM \S+ AS (\S+)"))
    assert set(froms) == {"${BASE}", "build", "runtime"}, "nothing else is pulled"
    assert "api" in stages
    assert read_yaml(ROOT / "docker-compose.yml")["services"]["api"]["build"]["target"] == "api"


def _cyclonedx() -> Path | None:
    """The tool that lists packages: of `make sbom`, else on PATH."""
    found = ROOT / ".venv-sbom" / "bin" / "cyclonedx-py"
    return found if found.exists() else next(map(Path, filter(None, [shutil.which("cyclonedx-py")])), None)


def test_the_image_lists_its_packages_in_what_it_copies_after_the_last_is_installed() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    build, without_torch, final = re.split(r"\nFROM (?:build AS build-api|\$\{BASE\} AS runtime)\n", text)
    (command,) = re.findall(r"/opt/sbom/bin/cyclonedx-py (.*)", build)
    assert re.findall(r"/opt/sbom/bin/cyclonedx-py (.*)", without_torch) == [command]
    assert without_torch.rindex("cyclonedx-py") > without_torch.rindex("pip uninstall")
    assert build.rindex("cyclonedx-py") > build.rindex("pip install -c"), "what comes later would be missing"
    (listed,) = re.findall(r"-o (\S+)", command)
    (copied,) = set(re.findall(r"^COPY --from=build(?:-api)? (\S+) ", final, re.MULTILINE))
    assert listed.startswith(f"{copied}/")
    assert command.endswith(f" {copied}")
    assert f"cat draftalign {listed}`" in (DEPLOY / "README.md").read_text()
    made = (ROOT / "make" / "containers.mk").read_text()
    assert re.findall(r"cyclonedx-bom==(\S+)", text) == re.findall(r"cyclonedx-bom==(\S+)", made)
    assert command.replace(listed, "sbom.cdx.json").replace(copied, "$(VENV)") in made


@pytest.mark.skipif(_cyclonedx() is None, reason="cyclonedx-bom is not installed: `make sbom` brings it")
def test_the_list_of_packages_has_every_package_with_its_version(tmp_path: Path) -> None:
    """The image's command, of the environment that runs the tests, without its validation of 20 s."""
    command = re.findall(r"/opt/sbom/bin/cyclonedx-py (.*)", (DEPLOY / "Dockerfile").read_text())[0]
    file = tmp_path / "sbom.json"
    command = command.replace("/opt/draftalign/sbom.cdx.json", str(file)).replace("/opt/draftalign", sys.prefix)
    result = run(str(_cyclonedx()), *command.split(), "--no-validate", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    bom = json.loads(file.read_text())
    assert bom["bomFormat"] == "CycloneDX"
    listed = {(re.sub(r"[-_.]+", "-", c["name"]).lower(), c["version"]) for c in bom["components"]}
    here = distributions(path=[sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    installed = {(re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), d.version) for d in here}
    assert {"torch", "fastapi", "redis", "uvicorn", "safetensors", "draftalign"} <= {name for name, _ in listed}
    assert listed == installed
    assert all(c["purl"].startswith("pkg:pypi/") for c in bom["components"] if c["name"] in ("torch", "redis"))


def test_all_that_is_deployed_speaks_of_settings_that_exist() -> None:
    """In comments and examples too: somebody copies them."""
    own = {"DRAFTALIGN_TOKEN", "DRAFTALIGN_URL", "DRAFTALIGN_RUN"}  # of agents and engines
    own |= {"DRAFTALIGN_SAMPLE_FRACTION", "DRAFTALIGN_READ_TOKEN"}  # of engines; of compose, for Prometheus
    known = own | {f"DRAFTALIGN_{name.upper()}" for name in Settings.model_fields}
    paths = [
        ROOT / "docker-compose.yml",
        *(p for p in DEPLOY.rglob("*") if p.suffix in (".py", ".yml", ".yaml", ".md", ".sbatch")),
    ]
    for path in [*paths, DEPLOY / "Dockerfile"]:
        assert set(re.findall(r"DRAFTALIGN_[A-Z_]*[A-Z]", path.read_text())) <= known, path


def test_the_redis_of_compose_may_not_lose_what_was_acknowledged() -> None:
    check_redis_server(read_yaml(ROOT / "docker-compose.yml")["services"]["valkey"]["command"])
