"""The HTTP contract as it is written down in `contract.txt`, beside the one of today's application."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rl_hooks import wire
from service.api.app import create_app
from service.settings import Settings

WRITTEN = Path(__file__).with_name("contract.txt")


def lines() -> list[str]:
    """Calls with their parameters, bodies and statuses; and each field of a body with its types.

    `!` is behind what must be there. Words for people are left out, and so are bounds.
    """
    document = create_app(Settings(redis_url=SecretStr("redis://127.0.0.1:1"))).openapi()
    found = {
        f"{name}.{field}{'!' * (field in schema.get('required', ()))} {kinds(one)}"
        for name, schema in document["components"]["schemas"].items()
        for field, one in schema.get("properties", {}).items()
    }
    for path, calls in document["paths"].items():
        for method, call in calls.items():
            found |= {f"{method.upper()} {path} {one}" for one in parts(call)}
    return [f"{wire.API_HEADER} {wire.API_VERSION}", *sorted(found)]


def parts(call: Mapping[str, Any]) -> Iterator[str]:
    for one in call.get("parameters", ()):
        yield f"{one['in']}:{one['name']}{'!' * one['required']} {kinds(one['schema'])}"
    for media, body in call.get("requestBody", {"content": {}})["content"].items():
        yield f"body {media} {kinds(body.get('schema', {}))}"
    for status, answer in call["responses"].items():
        bodies = (kinds(body.get("schema", {})) for body in answer.get("content", {}).values())
        yield " ".join((status, *bodies))


def kinds(schema: Mapping[str, Any]) -> str:
    """The types of a value, or the values that it may have."""
    if "$ref" in schema:
        return str(schema["$ref"].rpartition("/")[2])
    if choices := [one for key in ("anyOf", "oneOf", "allOf") for one in schema.get(key, ())]:
        return " | ".join(sorted(map(kinds, choices)))
    if values := schema.get("enum", [schema["const"]] if "const" in schema else []):
        return " | ".join(sorted(map(repr, values)))
    if schema.get("type") == "array":
        items = [*schema.get("prefixItems", ()), *([schema["items"]] if isinstance(schema.get("items"), dict) else [])]
        return f"[{', '.join(map(kinds, items))}]"
    if isinstance(others := schema.get("additionalProperties"), dict):
        return f"{{{kinds(others)}}}"
    return str(schema.get("type", "any"))


def test_the_contract_is_the_one_that_is_written_down(tmp_path: Path) -> None:
    """What changes it decides whether its number rises."""
    now, before = lines(), WRITTEN.read_text("utf-8").splitlines()
    made = tmp_path / "contract.txt"
    made.write_text("\n".join(now) + "\n", encoding="utf-8")
    gone, new = sorted({*before} - {*now}), sorted({*now} - {*before})
    assert (gone, new) == ([], []), (
        f"the HTTP contract has changed: {gone} gone, {new} new. docs/reference/api.md#how-it-changes says whether "
        f"API_VERSION in rl_hooks/wire.py rises; then: cp {made} {WRITTEN}"
    )
