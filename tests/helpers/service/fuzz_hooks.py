"""What schemathesis does not know of the API: names that exist, and files that are almost right.

Loaded by it (SCHEMATHESIS_HOOKS) in its process. `FUZZ_NAMES` holds the runs, versions, batches and files that exist,
as JSON. `FUZZ_GOOD` is a directory with the bodies `drafter`, of POST /drafters, and `run`, of a PUT /runs/{run} that
brings a drafter. `FUZZ_TOKENS` holds an admin's token and one for other runs than those; empty: none is asked for.
`FUZZ_LOG` is where each call is noted with who made it and the answer's status.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import schemathesis
from helpers.service.service_fixtures import head_file, rollout_file, run_file
from hypothesis import strategies as st

from rl_hooks.wire import CONTENT_TYPE

NAMES: dict[str, list[str]] = json.loads(os.environ["FUZZ_NAMES"])
GOOD: dict[str, bytes] = {path.name: path.read_bytes() for path in Path(os.environ["FUZZ_GOOD"]).iterdir()}
TOKENS: dict[str, str] = json.loads(os.environ["FUZZ_TOKENS"])
LOG = Path(os.environ["FUZZ_LOG"])
#: Header by which a call says whose token it bears. The calls of each operation are these callers' in turn.
WHO = "X-Fuzz-Who"
CALLERS = ("admin", "foreign", "admin", "stranger", "admin", "foreign", "admin", "nobody")
CALLS: Counter[str] = Counter()
#: What is a foreign token's to see: these tell of no run that it is not for.
LISTS = ("/runs", "/metrics")
LENGTHS = st.lists(st.integers(2, 6), min_size=1, max_size=3)


@st.composite
def files(draw: st.DrawFn) -> bytes:
    """A file of one of the four kinds; as it should be, cut off, with a byte changed, or with bytes that follow."""
    kind = draw(st.sampled_from(("rollouts", "rollouts", "head", "run", *GOOD)))
    if kind == "rollouts":
        lengths = draw(LENGTHS)
        ids = tuple(draw(st.text(min_size=1, max_size=6)) for _ in lengths)
        version = draw(st.integers(-1, 3) | st.just(2**53))
        body = rollout_file(ids, lengths=tuple(lengths), policy_version=version)
    elif kind == "head":
        body = head_file(draw(st.integers(0, 5)))
    elif draw(st.booleans()) or kind == "drafter":
        body = GOOD[kind]
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
    """Hook of schemathesis: the runs that the names belong to stay, a good drafter comes often, each call has a caller.

    Only `other` is paused, drained and archived: most calls of the others would be refused from then on.
    """
    method, parameters = case.method.upper(), case.path_parameters or {}
    if case.path == "/runs/{run}" and parameters.get("run") in NAMES["run"]:
        if method == "DELETE":
            parameters["run"] = "spare"
        elif method == "PATCH":
            parameters["run"] = "other"
    dice = zlib.crc32(f"{case.path} {parameters} {case.query} {case.body!r}".encode())
    if (method, case.path) == ("POST", "/drafters") and dice % 3 == 0:
        case.body = GOOD["drafter"].replace(struct.pack("<f", 0.5), struct.pack("<f", dice % 11))  # another version
    if TOKENS:
        operation = f"{method} {case.path}"
        who = CALLERS[CALLS[operation] % len(CALLERS)]
        CALLS[operation] += 1
        token = TOKENS.get(who, "da_" + "x" * 43)
        given = {WHO: who} if who == "nobody" else {WHO: who, "Authorization": f"Bearer {token}"}
        case.headers = {**(case.headers or {}), **given}


@schemathesis.hook  # type: ignore[untyped-decorator]
def after_call(context: Any, case: Any, response: Any) -> None:
    """Hook of schemathesis: note the call."""
    said = {"who": _caller(response), "call": f"{case.method.upper()} {case.path}", "status": response.status_code}
    with LOG.open("a") as log:
        log.write(json.dumps(said) + "\n")


@schemathesis.check  # type: ignore[untyped-decorator]
def who_may_not_learns_nothing(context: Any, response: Any, case: Any) -> None:
    """Without a good token: 401. With one for other runs: nothing of these, not even whether they exist."""
    who, path = _caller(response), unquote(urlsplit(response.request.url).path)
    if who in (None, "admin") or path in ("/healthz", "/readyz"):
        return
    if who != "foreign":
        assert response.status_code in (400, 401, 403), f"{who} is answered {response.status_code}"
        return
    if response.status_code < 400:
        assert path in LISTS, f"a token for other runs is answered {response.status_code}"
        told = [name for name in (*NAMES["version"], "default", "other") if name.encode() in response.content]
        assert not told, f"a token for other runs is told of {told}"
    assert response.status_code not in (404, 409, 410), "a token for other runs learns what exists"


def _caller(response: Any) -> str | None:
    """Who made the call that was answered; None where no tokens are asked for."""
    found = {name.lower(): value for name, value in response.request.headers.items()}.get(WHO.lower())
    return found[0] if isinstance(found, list) else found
