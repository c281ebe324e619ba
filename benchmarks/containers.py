"""Is anything lost that was acknowledged, when containers are killed and cut off? docker-compose.yml, run for real.

    make containers                       makes the images from Debian's packages, then runs this
    python -m benchmarks.containers [--keep]

Brings the compose project up with deploy/debian/compose.yml over it: Redis, three APIs, a worker of two ranks,
Prometheus, Alertmanager. Three senders post rollouts to the APIs in turn, each file until one of them acknowledges it.
Then one fault after another; before each, all that was acknowledged has been trained, so that a fault is charged with
its own losses. A kill is SIGKILL of all processes from within the container, so that Docker's restart policy has to
bring it back. Exit status 1: a batch was acknowledged and neither trained nor skipped, or counted twice, or the alert
did not reach Alertmanager. `--keep` leaves the containers running.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import itertools
import json
import math
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

ROOT: Final = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from helpers.worker.worker_fixtures import World  # noqa: E402 - after the path is set

from rl_hooks.wire import CONTENT_TYPE  # noqa: E402

DOCKER: Final = os.environ.get("DOCKER", "docker")
PROJECT: Final = "draftalign-trial"
NETWORK: Final = f"{PROJECT}_default"
APIS: Final = 3
SENDERS: Final = 3
#: Ends of a batch that need no more work.
DONE: Final = ("trained", "skipped")
READ, WRITE, ADMIN = (secrets.token_hex(16) for _ in range(3))
ENVIRONMENT: Final = os.environ | {
    "DRAFTALIGN_READ_TOKEN": READ,
    "DRAFTALIGN_TOKENS": f"{READ}:read;{WRITE}:write;{ADMIN}:admin",
}


def docker(*arguments: str, seconds: float = 180.0) -> str:
    """Its standard output; RuntimeError with what it said otherwise."""
    command = [DOCKER, *arguments]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=seconds, env=ENVIRONMENT, cwd=ROOT
    )
    if done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.strip()


def compose(*arguments: str) -> str:
    """`docker compose` on the trial's project."""
    files = ("-f", "docker-compose.yml", "-f", "deploy/debian/compose.yml")
    return docker("compose", "-p", PROJECT, *files, *arguments)


def container(service: str, number: int = 1) -> str:
    """Compose's name of a container."""
    return f"{PROJECT}-{service}-{number}"


def address(name: str, port: int) -> str:
    """Where a container's port is published just now; httpx.ConnectError where it is not."""
    try:
        return f"http://{docker('port', name, str(port)).splitlines()[0]}"
    except (RuntimeError, IndexError):
        raise httpx.ConnectError(f"{name} publishes no port now") from None


def get(path: str, number: int = 1) -> httpx.Response:
    """An API's answer, not None: httpx.HTTPError unless it is 2xx."""
    headers = {"Authorization": f"Bearer {READ}"}
    answer = httpx.get(f"{address(container('api', number), 8400)}{path}", headers=headers, timeout=10.0)
    return answer.raise_for_status()


def wait(what: str, condition: Callable[[], object], seconds: float) -> float:
    """Seconds until it holds; RuntimeError where it does not in time."""
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return time.monotonic() - began
        time.sleep(0.5)
    raise RuntimeError(f"expected within {seconds:g} s: {what}")


@dataclass
class Senders:
    """Threads that post rollouts, and what came of them."""

    acknowledged: dict[str, str] = field(default_factory=dict)  # batch id -> state as last seen
    refusals: list[str] = field(default_factory=list)  # status codes and errors of attempts, each made again
    stopped: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def __enter__(self) -> Senders:
        self.threads = [threading.Thread(target=self._send, args=(n,)) for n in range(SENDERS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join()

    def post(self, body: bytes, number: int, chunk_seconds: float = 0.0) -> bool:
        """Whether API `number` acknowledged the file; in ten parts with pauses between if asked."""

        def parts() -> Iterator[bytes]:
            size = len(body) // 10 + 1
            for start in range(0, len(body), size):
                yield body[start : start + size]
                time.sleep(chunk_seconds)

        headers = {"Authorization": f"Bearer {WRITE}", "Content-Type": CONTENT_TYPE, "Content-Length": str(len(body))}
        try:
            url = f"{address(container('api', number), 8400)}/rollouts?run=default"
            answer = httpx.post(url, content=parts() if chunk_seconds else body, headers=headers, timeout=10.0)
        except httpx.HTTPError as error:
            self.refusals.append(type(error).__name__)
            return False
        if answer.status_code not in (200, 202):
            self.refusals.append(str(answer.status_code))
            return False
        self.acknowledged.setdefault(answer.json()["batch_id"], "queued")
        return True

    def _send(self, sender: int) -> None:
        world, numbers = World(), itertools.cycle(range(1, APIS + 1))
        for count in itertools.count():
            body = world.rollout_file(f"batch-{sender}-{count}", lengths=[40] * 4)
            while not self.stopped.is_set() and not self.post(body, next(numbers)):
                time.sleep(0.2)
            if self.stopped.wait(3.0):
                return

    def unfinished(self) -> list[str]:
        """Asks what became of every batch that had no end yet; those that still have none."""
        headers = {"Authorization": f"Bearer {READ}"}
        with httpx.Client(base_url=address(container("api"), 8400), headers=headers, timeout=10.0) as client:
            for batch in [b for b, state in list(self.acknowledged.items()) if state not in DONE]:
                answer = client.get(f"/rollouts/{batch}")
                known = answer.status_code != 404
                self.acknowledged[batch] = str(answer.raise_for_status().json()["state"]) if known else "unknown"
        return [b for b, state in list(self.acknowledged.items()) if state not in DONE]


# --- images

#: Run inside, with a file system that cannot be written to: uid, places that can be written to, whether torch is there.
_LOOK: Final = """
import importlib.util, json, os, sys
places = [place for place in ("/", sys.prefix, os.path.expanduser("~"), "/tmp", "/state") if os.access(place, os.W_OK)]
print(json.dumps([os.getuid(), places, importlib.util.find_spec("torch") is not None]))
"""


def look(image: str) -> str:
    """What an image of ours is; RuntimeError where it is not what compose and the manifests take it for."""
    bare = [*("run", "--rm", "--pull", "never", "--read-only", "--tmpfs", "/tmp:exec"), "--cap-drop", "ALL"]  # noqa: S108
    bare += ["--security-opt", "no-new-privileges:true", "--network", "none", "-e", "DRAFTALIGN_REDIS_URL=redis://x"]
    uid, places, has_torch = json.loads(docker(*bare, "--entrypoint", "python", image, "-c", _LOOK))
    size = int(docker("image", "inspect", "-f", "{{.Size}}", image)) / 1e6
    for_api = image == "draftalign-api"
    if uid == 0 or places != ["/tmp", "/state"] or has_torch == for_api:  # noqa: S108 - the container's
        raise RuntimeError(f"{image} runs as user {uid}, can write to {places}, has torch: {has_torch}")
    if "draftalign runs" not in docker(*bare, image, "--help"):
        raise RuntimeError(f"{image} does not say what it can do")
    for part in ("up", "worker") if for_api else ():
        try:
            docker(*bare, image, part, seconds=60.0)
        except RuntimeError as error:
            if "take the image draftalign" in str(error):
                continue
            raise
        raise RuntimeError(f"{image} {part} ended well, without torch")
    return f"{image}: {size:.0f} MB, user {uid}, writes to {' and '.join(places)}, torch: {has_torch}"


# --- faults


def kill(name: str) -> None:
    """SIGKILL of all processes in it but its init, which then ends too; waits until Docker has started it again."""
    count = ("inspect", "-f", "{{.RestartCount}}", name)
    before = docker(*count)
    with contextlib.suppress(RuntimeError):  # the shell may go down with the rest
        docker("exec", name, "sh", "-c", "kill -KILL -1")
    wait(f"Docker restarts {name}", lambda: docker(*count) != before, 30)


def kill_rank() -> None:
    """SIGKILL of rank 1 of the worker; RuntimeError where there is none."""
    ours = "tr '\\0' '\\n' < $p/environ 2>/dev/null | grep -qx RANK=1"
    docker(
        "exec",
        container("worker"),
        "sh",
        "-c",
        f"for p in /proc/[0-9]*; do if {ours}; then kill -KILL ${{p#/proc/}} && exit 0; fi; done; exit 1",
    )


def cut(service: str, number: int = 1, seconds: float = 10.0) -> None:
    """Takes a container from its network for a while; its connections get no answer, not even a reset."""
    docker("network", "disconnect", NETWORK, container(service, number))
    time.sleep(seconds)
    docker("network", "connect", "--alias", service, NETWORK, container(service, number))


def pause(service: str, seconds: float = 10.0) -> None:
    """Stops all processes of a container for a while."""
    docker("pause", container(service))
    time.sleep(seconds)
    docker("unpause", container(service))


def kill_api_in_an_upload(senders: Senders) -> None:
    """An API dies with half a file received, which is then sent to another one."""
    body = World().rollout_file("cut short", lengths=[40] * 16)
    upload: list[bool] = []
    thread = threading.Thread(target=lambda: upload.append(senders.post(body, 2, chunk_seconds=0.5)))
    thread.start()
    time.sleep(2.0)
    kill(container("api", 2))
    thread.join()
    if upload != [False]:
        raise RuntimeError("the API acknowledged a file that it had received half of")
    wait("another API takes the file", lambda: senders.post(body, 3), 30)


def kill_all() -> None:
    """Every container of the service at once."""
    names = [container("valkey"), container("worker"), *(container("api", n) for n in range(1, APIS + 1))]
    threads = [threading.Thread(target=kill, args=(name,)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ready() -> bool:
    """Whether all APIs can work."""
    return all(get("/readyz", number).status_code == 200 for number in range(1, APIS + 1))


def alert_fires(name: str) -> bool:
    """Whether Alertmanager holds it."""
    alerts: list[dict[str, Any]] = httpx.get(f"{address(container('alertmanager'), 9093)}/api/v2/alerts").json()
    return any(alert["labels"]["alertname"] == name for alert in alerts)


def stop_worker_until_the_alert() -> None:
    """The worker is away until Prometheus has told Alertmanager; RuntimeError after four minutes."""
    compose("stop", "worker")
    wait("the alert reaches Alertmanager", lambda: alert_fires("DraftalignWorkerSilent"), 240)
    compose("start", "worker")


def fetch_latest() -> tuple[str, int]:
    """The newest drafter's version and bytes; RuntimeError where a digest differs from its manifest."""
    manifest = get("/drafter/latest?run=default").json()
    size = 0
    for file in manifest["files"]:
        content = get(f"/drafter/{manifest['version']}/{file['name']}?run=default", 2).content
        if hashlib.sha256(content).hexdigest() != file["sha256"]:
            raise RuntimeError(f"{file['name']} is not what the manifest says")
        size += len(content)
    return str(manifest["version"]), size


def trial() -> int:
    """The faults one after another, under load; the exit status."""
    wait("all APIs ready", ready, 120)
    admin = {"Authorization": f"Bearer {ADMIN}", "Content-Type": CONTENT_TYPE}
    url = f"{address(container('api'), 8400)}/runs/default"
    httpx.put(url, content=World().run_file(), headers=admin, timeout=30.0).raise_for_status()
    senders = Senders()
    faults: dict[str, Callable[[], None]] = {
        "nothing (20 s)": lambda: time.sleep(20),
        "an API of three, in an upload": lambda: kill_api_in_an_upload(senders),
        "Redis": lambda: kill(container("valkey")),
        "the worker, both ranks": lambda: kill(container("worker")),
        "rank 1 of the worker": kill_rank,
        "network of an API, 10 s": lambda: cut("api", 3),
        "network of Redis, 10 s": lambda: cut("valkey"),
        "network of the worker, 10 s": lambda: cut("worker"),
        "Redis stopped, 10 s": lambda: pause("valkey"),
        "all five at once": kill_all,
        "the worker, until the alert": stop_worker_until_the_alert,
    }
    with senders:
        took = wait("a drafter is published", lambda: get("/drafter/latest?run=default"), 240)
        print(f"first drafter after {took:.0f} s and {len(senders.acknowledged)} batches\n")
        rows: list[tuple[str, int, int, float]] = []  # fault; batches and refusals before it; seconds until trained
        for name, fault in faults.items():
            before = len(senders.acknowledged), len(senders.refusals)
            fault()
            wait("all APIs ready", ready, 120)
            time.sleep(3.0)  # and what senders hold is taken in
            new = list(senders.acknowledged)
            seconds = math.nan  # what has not been trained then is counted in the end
            with contextlib.suppress(RuntimeError):
                seconds = wait("all trained", lambda new=new: not set(new) & set(senders.unfinished()), 400)  # type: ignore[misc]
            rows.append((name, *before, seconds))
            print(f"{name}: trained after {seconds:.0f} s", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        wait("all trained", lambda: not senders.unfinished(), 400)
    print("| killed or cut off | acknowledged | trained | lost | refused, then sent again | s until trained |")
    print("|---|---|---|---|---|---|")
    batches = list(senders.acknowledged.values())  # in the order of their acknowledgements
    for (name, first, refused, seconds), (_, last, refused_last, _) in itertools.pairwise(
        [*rows, ("", len(batches), len(senders.refusals), 0.0)]
    ):
        trained = sum(state in DONE for state in batches[first:last])
        kinds = collections.Counter(senders.refusals[refused:refused_last])
        said = ", ".join(f"{count} {kind}" for kind, count in kinds.items()) or "0"
        print(f"| {name} | {last - first} | {trained} | {last - first - trained} | {said} | {seconds:.0f} |")
    ends = collections.Counter(senders.acknowledged.values())
    counts = get("/runs/default").json()["rollouts"]
    version, size = fetch_latest()
    print(f"\n{len(senders.acknowledged)} batches acknowledged; they ended: {dict(ends)}")
    print(f"the run counts {json.dumps(counts)}")
    print(f"newest drafter {version}, {size} bytes fetched from another API, digests as in its manifest")
    for batch in senders.unfinished():
        print(f"{batch}: {senders.acknowledged[batch]}", file=sys.stderr)
    once = counts["accepted_total"] == counts["trained_total"] + counts["skipped_total"] == len(senders.acknowledged)
    return 0 if once and not senders.unfinished() else 1


def main() -> int:
    """Up, break, count, down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", action="store_true", help="leave the containers running")
    args = parser.parse_args()
    for image in ("draftalign", "draftalign-api"):
        print(look(image))
    try:
        began = time.monotonic()
        compose("up", "-d", "--no-build")
        print(f"up after {time.monotonic() - began:.0f} s")
        return trial()
    except BaseException:
        print(compose("logs", "--tail", "15"), file=sys.stderr)
        raise
    finally:
        if not args.keep:
            compose("down", "--volumes", "--remove-orphans")


if __name__ == "__main__":
    sys.exit(main())
