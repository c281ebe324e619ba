"""One headless Chromium for many pages, driven over the DevTools protocol: a start costs seconds, a page a tenth."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_SECONDS = 60.0


class Browser:
    """A running Chromium. Every page gets a browser context of its own, so no page sees another's storage or logins."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._calls = 0

    def dom(self, url: str, seconds: float = 2.5, then: str | None = None) -> str:
        """The document at `url` as HTML after these seconds of virtual time: timers run ahead, requests are awaited.

        The events that follow are those of this page only: no other page is open meanwhile. `then`: JavaScript that
        runs in it before it is read.
        """
        context = self._call("Target.createBrowserContext")["browserContextId"]
        try:
            page = {"url": "about:blank", "width": 1200, "height": 1400, "browserContextId": context}
            target = self._call("Target.createTarget", **page)["targetId"]
            session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            self._call("Emulation.setVirtualTimePolicy", session, policy="pause")
            self._call("Page.navigate", session, url=url)  # what cannot be had is shown as the browser's own page
            budget = {"policy": "pauseIfNetworkFetchesPending", "budget": 1000 * seconds}
            self._call("Emulation.setVirtualTimePolicy", session, **budget)
            self._until(lambda message: message.get("method") == "Emulation.virtualTimeBudgetExpired")
            if then is not None:
                self._call("Runtime.evaluate", session, expression=then)
            found = self._call("Runtime.evaluate", session, expression="document.documentElement.outerHTML")
            return str(found["result"]["value"])
        finally:
            self._call("Target.disposeBrowserContext", browserContextId=context)

    def _call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._calls += 1
        number = self._calls
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        self._connection.send(json.dumps(message))
        answer = self._until(lambda message: message.get("id") == number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while True:
            message: dict[str, Any] = json.loads(self._connection.recv(timeout=max(0.0, deadline - time.monotonic())))
            if wanted(message):
                return message


@contextlib.contextmanager
def running_browser(profile: Path) -> Iterator[Browser]:
    """Chromium with an empty profile; it and its helper processes end with the context."""
    log = profile.with_suffix(".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                str(CHROMIUM),
                *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
                *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
                *(f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank"),
            ],
            stdout=output,
            stderr=output,
            start_new_session=True,  # one group: its helper processes go when it is killed
        )
    try:
        with connect(_address(profile, process, log), max_size=None, proxy=None) as connection:
            yield Browser(connection)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _address(profile: Path, process: subprocess.Popen[bytes], log: Path) -> str:
    """Chromium writes the port and the path of its socket into a file of the profile once it listens."""
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(FileNotFoundError):
            port, _, path = (profile / "DevToolsActivePort").read_text().partition("\n")
            if path:
                return f"ws://127.0.0.1:{port}{path.strip()}"
        time.sleep(0.02)
    raise RuntimeError(f"Chromium did not start; its output:\n{log.read_text(errors='replace')[-3000:]}")
