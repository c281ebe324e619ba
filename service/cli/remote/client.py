"""How the commands reach a running service: address, token, run, and what a refusal says."""

from __future__ import annotations

import functools
import getpass
import os
import threading
import time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from service.errors import ConfigurationError
from service.storage.layout import run_name

if TYPE_CHECKING:
    import httpx

Service = Annotated[str, typer.Option(help="URL of the draftalign service.", envvar="DRAFTALIGN_URL")]
Run = Annotated[
    str | None,
    typer.Option(help="Name of the RL run. Default: the only one there is, else `default`.", show_default=False),
]
Reason = Annotated[str, typer.Option(help="Why, for the page and the history.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print what the service answers, as JSON.")]
LOCAL = "http://127.0.0.1:8400"
_PAUSE_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 5.0
_QUIET_SECONDS: Final = 5.0
_READ_SECONDS: Final = 15.0
#: Longer than the service waits for locks and reads a drafter. A command that gave up earlier would report a failure,
#: and the service would make the change all the same.
_CHANGE_SECONDS: Final = 120.0
_ALL_THE_SAME: Final = "what was asked all the same: look before you ask again"

#: What helps, by a word in the error of a connection.
_HINTS = {
    "CERTIFICATE_VERIFY": "set DRAFTALIGN_CA_FILE to its authority's PEM file",
    "WRONG_VERSION_NUMBER": "it speaks http there, not https",
    "refused": "is `draftalign up` running?",
}


def name_of(service: str, run: str | None) -> str:
    """The run that is meant where none is named: `default`, or the only one that there is.

    Raises RunNotFound for what is no name: in an address it would lead elsewhere (`..`).
    """
    if run is not None:
        return run_name(run)
    names = [one["run"] for one in call("GET", service, "/runs").json()["runs"]]
    if not names:
        raise ConfigurationError(f"{service} has no run, or none that the token is for; a trainer's hook registers one")
    if "default" not in names and len(names) > 1:
        raise ConfigurationError(f"which run? Give --run: {', '.join(names)}")
    return "default" if "default" in names else names[0]


def whoami() -> str:
    """Who asks, for the page and the history."""
    try:
        return getpass.getuser()[:80]
    except (KeyError, OSError):  # a container's user may have no name
        return f"user {os.getuid()}"


def client_of(service: str, **more: Any) -> httpx.Client:
    """A client of the service, with the token and the authorities that the environment names."""
    import httpx

    from rl_hooks.sending.exchange import ReplyError, bearer, clean_token, trusted

    try:
        headers = bearer(clean_token(os.environ.get("DRAFTALIGN_TOKEN"), "DRAFTALIGN_TOKEN"))
    except (ValueError, ReplyError) as error:
        raise ConfigurationError(str(error)) from error
    tls = trusted(os.environ.get("DRAFTALIGN_CA_FILE"))
    try:
        return httpx.Client(base_url=service.rstrip("/"), headers=headers, verify=tls, **more)
    except httpx.InvalidURL as error:
        raise ConfigurationError(f"--service {service!r} is no URL: {error}") from error


def call(
    method: str, service: str, path: str, timeout: float | None = None, patience: float = 0.0, **more: Any
) -> httpx.Response:
    """Call the service; ConfigurationError if it refuses, or does not answer within `timeout` seconds.

    A change is asked for only where `GET /healthz` tells of no other contract.
    The default is 15 s for a GET and 120 s for a change; the connection may take 5 s. After 5 s the command says that
    it waits. While the service is away or has no room, or a proxy answers with a page of its own, the call is repeated
    for `patience` seconds.
    """
    import httpx

    from rl_hooks import wire

    deadline = time.monotonic() + patience
    seconds = timeout or (_READ_SECONDS if method == "GET" else _CHANGE_SECONDS)
    while True:
        waiting = threading.Timer(_QUIET_SECONDS, typer.echo, (f"waiting for {service} ...",), {"err": True})
        waiting.start()
        try:
            with client_of(service, timeout=httpx.Timeout(seconds, connect=_CONNECT_SECONDS)) as client:
                answer = client.get("/healthz") if method != "GET" else None
                if answer is None or not wire.other_api(answer.headers, ""):  # what another one does cannot be known
                    answer = client.request(method, path, **more)
        except httpx.UnsupportedProtocol as error:
            raise ConfigurationError(f"--service {service!r} is no URL; expected one like {LOCAL}") from error
        except httpx.ConnectTimeout:
            trouble, passing = (
                f"takes no connection within {_CONNECT_SECONDS:g} s: does it hang, or a firewall drop it?",
                True,
            )
        except httpx.HTTPError as error:
            hint = next((f"; {hint}" for sign, hint in _HINTS.items() if sign in str(error)), "")
            if isinstance(error, httpx.ReadTimeout) and error.request.method != "GET":
                hint = f"; it may do {_ALL_THE_SAME}"
            trouble, passing = f"does not answer: {error}{hint}", True
        else:
            if not (fault := _fault(service, answer)):
                return answer
            trouble = f"answered {answer.status_code}: {fault}"
            passing = _is_page(answer) or answer.status_code == 429
            passing |= answer.status_code >= 500 and _problem(answer)[0] != "run-damaged"
        finally:
            waiting.cancel()
        if not passing or time.monotonic() >= deadline:
            raise ConfigurationError(f"{service} {trouble}")
        time.sleep(_PAUSE_SECONDS)


def _fault(service: str, answer: httpx.Response) -> str:
    """Why an answer is not the success of a service of this contract; empty if it is, or may be."""
    from rl_hooks import wire

    if _is_page(answer):
        return _told(answer)
    faults = [] if answer.is_success else [_told(answer)]
    if other := wire.other_api(answer.headers, "the draftalign command"):
        faults.append(other)
        if answer.is_success and answer.request.method != "GET":
            faults.append(f"it may have done {_ALL_THE_SAME}")
    elif answer.is_success and wire.API_HEADER not in answer.headers:
        _warn(f"{service} answers without {wire.API_HEADER}: a proxy removes it, or this is no draftalign of today")
    return "; ".join(faults)


def _is_page(answer: httpx.Response) -> bool:
    """Whether a success is a proxy's: the service answers with JSON, with a file, or with nothing to a DELETE."""
    from rl_hooks import wire

    kind = answer.headers.get("Content-Type", "").partition(";")[0].strip()
    ours = kind in ("application/json", wire.CONTENT_TYPE)
    return answer.is_success and not (ours or (answer.status_code == 204 and answer.request.method == "DELETE"))


@functools.cache
def _warn(text: str) -> None:
    """Say it, once for each text."""
    typer.echo(f"warning: {text}", err=True)


def _problem(answer: httpx.Response) -> tuple[str, str]:
    """Type and detail of a refusal; the type is empty where something in front of the service has answered."""
    try:
        problem = answer.json()
        return str(problem["type"]).rpartition(":")[2], str(problem["detail"])
    except (ValueError, KeyError, TypeError):
        return "", answer.text[:300]


def _told(answer: httpx.Response) -> str:
    """What a refusal says, and the command that helps."""
    kind, detail = _problem(answer)
    helps = {
        "": "is it a draftalign service?",
        "no-token": "set DRAFTALIGN_TOKEN",
        "not-found": "is it a draftalign service?",
        "no-drafter-yet": "`draftalign state` says what the run waits for",
        "no-such-run": "`draftalign runs` lists those that are",
    }
    return detail + (f" ({helps[kind]})" if kind in helps else "")
