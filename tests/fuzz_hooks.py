"""What schemathesis does not know of the API: names that exist, and files that are almost right.

Loaded by it (SCHEMATHESIS_HOOKS) in its process. `FUZZ_NAMES` holds the runs, versions and files that exist, as JSON.
"""

from __future__ import annotations

import json
import os
import zlib
from typing import Any

import schemathesis
from hypothesis import strategies as st
from service_fixtures import head_file, rollout_file, run_file

from rl_hooks.wire import CONTENT_TYPE

NAMES: dict[str, list[str]] = json.loads(os.environ["FUZZ_NAMES"])
LENGTHS = st.lists(st.integers(2, 6), min_size=1, max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of one of the three kinds; as it should be, cut off, with a byte changed, or with bytes that follow."""
    kind = draw(st.sampled_from(("rollouts", "rollouts", "head", "run")))
    if kind == "rollouts":
        lengths = draw(LENGTHS)
        ids = tuple(draw(st.text(min_size=1, max_size=6)) for _ in lengths)
        version = draw(st.integers(-1, 3) | st.just(2**53))
        body = rollout_file(ids, lengths=tuple(lengths), policy_version=version)
    elif kind == "head":
        body = head_file(draw(st.integers(0, 5)))
    else:
        body = run_file()
    match draw(st.sampled_from(("whole", "whole", "cut", "changed", "longer"))):
        case "cut":
            return body[: draw(st.integers(0, len(body) - 1))]
        case "changed":
            place = draw(st.integers(0, min(len(body) - 1, 2000)))
            return body[:place] + bytes([draw(st.integers(0, 255))]) + body[place + 1 :]
        case "longer":
            return body + draw(st.binary(min_size=1, max_size=9))
    return body


schemathesis.openapi.media_type(CONTENT_TYPE, files())


def known(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """In three of four cases, names that exist."""
    if not given:
        return given
    said = {name: str(value) for name, value in given.items()}
    dice = zlib.crc32(json.dumps(said, sort_keys=True).encode())
    for name in set(given) & set(NAMES):
        if dice % 4:
            given[name] = NAMES[name][dice // 4 % len(NAMES[name])]
    return given


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Hook of schemathesis."""
    return known(path_parameters)


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_query(context: Any, query: dict[str, Any] | None) -> dict[str, Any] | None:
    """Hook of schemathesis."""
    return known(query)


@schemathesis.hook  # type: ignore[untyped-decorator]
def map_body(context: Any, body: Any) -> Any:
    """Hook of schemathesis: a report names its run, engine and drafter in its body."""
    if isinstance(body, dict) and "drafter_version" in body and zlib.crc32(repr(body).encode()) % 4:
        body |= {"run": "default", "drafter_version": NAMES["version"][0]}
    return body


@schemathesis.hook  # type: ignore[untyped-decorator]
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Hook of schemathesis: the runs that the names belong to stay."""
    if case.method.upper() == "DELETE" and case.path_parameters and case.path_parameters.get("run") in NAMES["run"]:
        case.path_parameters["run"] = "spare"
