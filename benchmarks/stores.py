"""Object stores of others on loopback: a command is run with one, or a change and an upload are timed on it.

    make .stores/ceph/.ready .stores/seaweedfs/.ready        # their programs, unpacked and not installed
    python -m benchmarks.stores ceph python -m pytest tests/service/storage/test_mirror.py
    python -m benchmarks.stores moto ceph seaweedfs          # times

`ceph`: one monitor, one OSD that keeps objects in memory, and the gateway. `seaweedfs`: all its parts in one process.
The command finds the store by `DRAFTALIGN_TEST_S3` and the keys (tests/helpers/service/object_fixtures.py).
Nothing is left at its end.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import boto3
import httpx

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]  # in this order: tests/ has a folder of each package's name

from helpers.ports import free_port  # noqa: E402
from helpers.service.failover_fixtures import until  # noqa: E402 - the path must be set first
from helpers.service.object_fixtures import Store  # noqa: E402

from service.storage.layout import Layout  # noqa: E402
from service.storage.mirror import Mirror  # noqa: E402
from service.storage.queue.incoming import Incoming, new_name  # noqa: E402
from service.storage.spool import Spool  # noqa: E402

PROGRAMS = ROOT / ".stores"
KEYS = {"AWS_ACCESS_KEY_ID": "store-key", "AWS_SECRET_ACCESS_KEY": "store-secret"}

_CEPH = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon}
public addr = 127.0.0.1
ms bind msgr2 = false
keyring = {place}/keyring
run dir = {place}
log file = {place}/$name.log
plugin dir = {programs}/usr/lib/x86_64-linux-gnu/ceph
erasure code dir = {programs}/usr/lib/x86_64-linux-gnu/ceph/erasure-code
osd class dir = {programs}/usr/lib/x86_64-linux-gnu/rados-classes
mon data = {place}/mon
mon data avail crit = 1
mon allow pool size one = true
osd data = {place}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
osd pool default size = 1
osd pool default pg num = 8
osd crush chooseleaf type = 0
rgw data = {place}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw gc obj min wait = 1
rgw gc processor period = 5
"""


class _Parts:
    """The processes of one store, and where they keep things."""

    def __init__(self, programs: Path, place: Path, stack: contextlib.ExitStack) -> None:
        self.place, self._stack = place, stack
        self._started: list[subprocess.Popen[bytes]] = []
        libraries = [programs / "lib/x86_64-linux-gnu", programs / "usr/lib/x86_64-linux-gnu"]
        self._environment = os.environ | {
            "PATH": f"{programs}/usr/bin:{programs}/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": ":".join(map(str, [*libraries, libraries[1] / "ceph"])),
            "PYTHONPATH": str(programs / "usr/lib/python3/dist-packages"),
        }

    def run(self, *command: str) -> str:
        """Run a program to its end, and return what it printed."""
        done = subprocess.run(command, check=False, env=self._environment, capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def says(self, wanted: str, *command: str) -> bool:
        """Whether a program ends well by now, and prints this: the monitor knows no one at first."""
        self._alive()
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            return wanted in self.run(*command)
        return False

    def start(self, *command: str) -> None:
        """Start a program, which is killed at the end."""
        with (self.place / "out").open("ab") as out:
            process = subprocess.Popen(command, env=self._environment, stdout=out, stderr=out)
        self._started.append(process)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        print(f"{command[0]}: process {process.pid}", file=sys.stderr)

    def _alive(self) -> None:
        for process in self._started:
            said = (self.place / "out").read_text(errors="replace")[-2000:]
            assert process.poll() is None, f"{process.args!r} ended: {said}"

    def answer(self, url: str) -> bool:
        """Whether this store answers; AssertionError where a part of it has ended."""
        self._alive()
        with contextlib.suppress(httpx.TransportError):
            return bool(httpx.get(url).status_code)
        return False


def ceph(parts: _Parts) -> str:
    """Ceph's gateway on a cluster of one, and its URL."""
    place, fsid, mon, port, osd = parts.place, str(uuid.uuid4()), free_port(), free_port(), str(uuid.uuid4())
    (place / "mon").mkdir()
    (place / "osd").mkdir()
    settings = _CEPH.format(fsid=fsid, mon=mon, port=port, place=place, programs=PROGRAMS / "ceph")
    (place / "ceph.conf").write_text(settings)
    here = ("-c", str(place / "ceph.conf"))
    allowed = [word for part in ("mon", "osd", "mgr") for word in ("--cap", part, "allow *")]
    (place / "keyring").touch()
    for name in ("mon.", "client.admin", "osd.0"):
        parts.run("ceph-authtool", str(place / "keyring"), "--gen-key", "-n", name, *allowed)
    parts.run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", f"[v1:127.0.0.1:{mon}]", str(place / "map"))
    made_of = ("--monmap", str(place / "map"), "--keyring", str(place / "keyring"))
    parts.run("ceph-mon", *here, "--mkfs", "-i", "a", *made_of)
    parts.start("ceph-mon", *here, "-i", "a", "-f")
    until(lambda: parts.says("1 daemons, quorum a", "ceph", *here, "status"), "the monitor is in charge")
    parts.run("ceph", *here, "osd", "new", osd)
    parts.run("ceph-osd", *here, "-i", "0", "--mkfs", "--osd-uuid", osd)
    parts.start("ceph-osd", *here, "-i", "0", "-f")
    until(lambda: parts.says("1 up", "ceph", *here, "osd", "stat"), "the OSD is up")
    keys = ("--access-key", KEYS["AWS_ACCESS_KEY_ID"], "--secret-key", KEYS["AWS_SECRET_ACCESS_KEY"])
    parts.run("radosgw-admin", *here, "user", "create", "--uid", "tests", "--display-name", "tests", *keys)
    parts.start("radosgw", *here, "-n", "client.admin", "-f")
    return f"http://127.0.0.1:{port}"


def seaweedfs(parts: _Parts) -> str:
    """SeaweedFS' master, volume server, filer and S3 gateway, and the URL of the last."""
    key = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    who = {"name": "tests", "credentials": [key], "actions": ["Admin"]}
    (parts.place / "s3.json").write_text(json.dumps({"identities": [who]}))
    ports = {part: free_port() for part in ("master", "volume", "filer", "s3")}
    given = [f"-{part}.port={port}" for part, port in ports.items()]
    given += [f"-{part}.port.grpc={free_port()}" for part in ports]
    given += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-volume.max=200", "-master.volumeSizeLimitMB=64"]
    here = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={parts.place}"]
    parts.start("weed", "server", *here, "-s3", f"-s3.config={parts.place}/s3.json", *given)
    return f"http://127.0.0.1:{ports['s3']}"


STORES: dict[str, Callable[[_Parts], str]] = {"ceph": ceph, "seaweedfs": seaweedfs}


@contextlib.contextmanager
def running(name: str) -> Iterator[str]:
    """The URL of one store."""
    with contextlib.ExitStack() as stack:
        if name == "moto":
            store = Store()
            stack.callback(store.down)
            yield store.url
            return
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True)))
        parts = _Parts(PROGRAMS / name, place, stack)
        url = STORES[name](parts)
        until(lambda: parts.answer(url), f"{name} answers")
        yield url


def _median_ms(times: int, work: Callable[[int], object]) -> float:
    found = []
    for number in range(times):
        began = time.perf_counter()
        work(number)
        found.append(time.perf_counter() - began)
    return statistics.median(found) * 1000


def timed(url: str, place: Path, *, times: int) -> list[float]:
    """Milliseconds, medians: a change of 1 byte, one of 1 MiB, 64 MiB of rollouts put, and brought into a spool."""
    os.environ["AWS_ENDPOINT_URL"] = url
    boto3.client("s3").create_bucket(Bucket="timed")
    host, put = Mirror(place / "host", "s3://timed/state"), Incoming("s3://timed/in")
    host.change("default", lambda now: now.make_run("default"))

    def change(name: str, size: int) -> Callable[[int], object]:
        def write(now: Layout) -> None:
            (now.run("default") / name).write_bytes(random.randbytes(size))

        return lambda _: host.change("default", write)

    body = random.randbytes(64 << 20)
    digest = hashlib.sha256(body).hexdigest()
    blobs = [new_name(f"{number:032x}", digest, time.time_ns()) for number in range(times)]
    spool = Spool(Layout(place / "spool"))

    def send(number: int) -> None:
        where = put.place("default", blobs[number], len(body))
        httpx.put(where.url, content=body, headers=where.headers, timeout=60.0).raise_for_status()

    def bring(number: int) -> None:
        put.bring("default", blobs[number], len(body), spool, least_free_bytes=0, sync=False)

    works = [change("drafting.json", 1), change("target.safetensors", 1 << 20), send, bring]
    return [_median_ms(times, work) for work in works]


def main() -> int:
    """Run a command with a store, or print times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", choices=["moto", *STORES])
    parser.add_argument("command", nargs=argparse.REMAINDER, help="a command, or further stores to time")
    parser.add_argument("--times", type=int, default=9)
    given = parser.parse_args()
    os.environ.update(KEYS, AWS_REGION="us-east-1", AWS_DEFAULT_REGION="us-east-1")
    if not set(given.command) <= {"moto", *STORES}:
        with running(given.store) as url:
            environment = os.environ | {"DRAFTALIGN_TEST_S3": url}
            return subprocess.run(given.command, check=False, env=environment).returncode
    print("| store | change of 1 byte, ms | of 1 MiB, ms | 64 MiB put, ms | brought, ms |\n|---|---|---|---|---|")
    for name in (given.store, *given.command):
        with running(name) as url, tempfile.TemporaryDirectory() as place:
            print(f"| {name} | " + " | ".join(f"{ms:.0f}" for ms in timed(url, Path(place), times=given.times)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
