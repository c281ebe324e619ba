"""Every call of the API with the rule that tests hold it to, and token files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import httpx
from helpers.service.service_fixtures import HEADERS, RunningService, head_file, rollout_file, run_file

from service.access.tokens import TokenEntry, append_entry, hashed, new_secret

OWN, OTHER = "math-1", "chess"
#: Call -> scopes of which one is needed, and where it names its run. A new call needs a row.
RULES: Final[dict[tuple[str, str], tuple[str, str]]] = {
    ("PUT", "/runs/{run}"): ("write", "path"),
    ("PUT", "/runs/{run}/head"): ("write", "path"),
    ("GET", "/runs"): ("read write", "listed"),
    ("GET", "/runs/{run}"): ("read write", "path"),
    ("GET", "/runs/{run}/worth"): ("read write", "path"),
    ("POST", "/runs/{run}/drift/{action}"): ("", "path"),
    ("POST", "/rollouts"): ("write", "body"),
    ("POST", "/rollouts/direct"): ("write", "query"),
    ("GET", "/rollouts/{rollout_id}"): ("read write", "query"),
    ("GET", "/drafter/latest"): ("read", "query"),
    ("GET", "/drafter/{version}/{file}"): ("read", "query"),
    ("GET", "/drafters"): ("read", "query"),
    ("POST", "/drafter/{version}/rollback"): ("", "query"),
    ("PUT", "/drafter/{version}/hold"): ("", "query"),
    ("DELETE", "/drafter/{version}/hold"): ("", "query"),
    ("POST", "/drafters"): ("", "query"),
    ("GET", "/runs/{run}/dead"): ("read write", "path"),
    ("GET", "/runs/{run}/dead/{batch_id}/file"): ("", "path"),
    ("POST", "/runs/{run}/dead/{batch_id}/retry"): ("", "path"),
    ("DELETE", "/runs/{run}/dead/{batch_id}"): ("", "path"),
    ("PATCH", "/runs/{run}"): ("", "path"),
    ("POST", "/acceptance"): ("report write", "body"),
    ("GET", "/alpha"): ("read", "query"),
    ("GET", "/metrics"): ("read", "listed"),
    ("GET", "/"): ("read", "none"),
    ("GET", "/docs"): ("read", "none"),
    ("GET", "/openapi.json"): ("read", "none"),
    ("GET", "/healthz"): ("public", "none"),
    ("GET", "/readyz"): ("public", "none"),
    ("DELETE", "/runs/{run}"): ("", "path"),  # the last: nothing can be asked of the run afterwards
}


#: Of those, the ones that these requests do not satisfy: there is no dead batch and no object store, and a run's file
#: is no drafter.
UNSATISFIED: Final = {
    ("POST", "/rollouts/direct"),
    ("POST", "/drafters"),
    ("GET", "/runs/{run}/dead/{batch_id}/file"),
    ("POST", "/runs/{run}/dead/{batch_id}/retry"),
    ("DELETE", "/runs/{run}/dead/{batch_id}"),
}


class TokenFile:
    """A token file, and the secrets of its entries."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.secrets: dict[str, str] = {}
        path.touch()

    def add(self, name: str, scopes: str, runs: tuple[str, ...] = ("*",)) -> None:
        self.secrets[name] = new_secret()
        digest = hashed(self.secrets[name].encode())
        entry = {"name": name, "scopes": scopes.split(), "runs": runs, "sha256": digest}
        append_entry(self.path, TokenEntry.model_validate(entry))

    def remove(self, name: str) -> None:
        lines = [line for line in self.path.read_text().splitlines() if json.loads(line)["name"] != name]
        self.path.write_text("".join(f"{line}\n" for line in lines))

    def headers(self, name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[name]}"}


def request_of(service: RunningService, method: str, template: str, run: str) -> dict[str, Any]:
    """Arguments of a call that names `run` where its rule says."""
    versions = service.registry.versions(run)
    values = {"{run}": run, "{version}": versions[0] if versions else "v000001-00000000", "{file}": "config.json"}
    path = template
    for name, value in (values | {"{rollout_id}": "a", "{action}": "reset", "{batch_id}": "0" * 32}).items():
        path = path.replace(name, value)
    call: dict[str, Any] = {"method": method, "url": path}
    if RULES[method, template][1] == "query":
        call["params"] = {"run": run}
    match method, template:
        case "POST", "/rollouts":
            call |= {"content": rollout_file(run=run), "headers": HEADERS}
        case "POST", "/rollouts/direct":
            call["params"] |= {"bytes": "8", "sha256": "0" * 64}
            call |= {"content": b"x", "headers": HEADERS}
        case "PUT", "/runs/{run}":
            call |= {"content": run_file(), "headers": HEADERS}
        case "PUT", "/runs/{run}/head":
            call |= {"content": head_file(1), "headers": HEADERS}
        case "POST", "/acceptance":
            counts = {"rounds": 1, "accepted_tokens": 1, "drafted_tokens": 4}
            call["json"] = {"run": run, "reporter": "e", "drafter_version": values["{version}"]} | counts
        case ("POST", "/drafter/{version}/rollback") | ("PUT", "/drafter/{version}/hold"):
            call["json"] = {"reason": "try"}
        case "PATCH", "/runs/{run}":
            call["json"] = {"state": "active", "reason": "try"}
        case "POST", "/drafters":
            call |= {"content": run_file(), "headers": HEADERS}
    return call


def ask(service: RunningService, call: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
    return service.client.request(**(call | {"headers": call.get("headers", {}) | headers}))
