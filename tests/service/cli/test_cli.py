"""The command line as a person meets it: help, one line per error, and `up` as a whole."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
import types
import typing
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import httpx
import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.forked import run_fork
from helpers.ports import free_port
from helpers.worker.worker_fixtures import World, alive
from pydantic import SecretStr, ValidationError
from typer.models import OptionInfo
from typer.testing import CliRunner

import service.ranks
import service.worker.process.worker
from service.api.app import make_server
from service.cli import main
from service.cli.main import app
from service.cli.supervisor import Child
from service.cli.up import _check_device, run_up
from service.errors import ConfigurationError
from service.ranks import run_on_ranks
from service.settings import Settings, redis_place
from service.worker.process.device import checked_device, use_device
from service.worker.process.worker import run_worker

ROOT = Path(__file__).parents[3]
HEADERS = {"Content-Type": "application/x-safetensors"}


def clean_environment(**changes: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("DRAFTALIGN_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **changes}


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = clean_environment(**environment)
    return run_fork("command", "service.cli", *arguments, directory=cwd, environment=variables)


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


def test_help_lists_the_commands_quickly(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert done.returncode == 0
    for command in ("up", "serve", "worker", "agent", "demo"):
        assert re.search(rf"\b{command}\b", done.stdout), done.stdout
    assert not list(tmp_path.iterdir()), "asking for help makes no state directory"


@pytest.mark.parametrize("command", ["up", "serve", "worker", "agent", "demo"])
def test_every_command_explains_its_options(command: str, tmp_path: Path) -> None:
    done = run(command, "--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--" in done.stdout


def test_what_the_hub_warns_of_is_printed_once() -> None:
    code = (
        "from rl_hooks.agent.cli import start_logging; start_logging('draftalign', 'draftalign')\n"
        "from huggingface_hub.utils import logging; logging.get_logger('huggingface_hub.x').warning('a rate limit')"
    )
    variables = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True)
    assert done.stderr.count("a rate limit") == 1, done.stderr


ERRORS = [
    (("worker",), {}, "a worker needs a Redis: set DRAFTALIGN_REDIS_URL, or use `draftalign up`"),
    (("serve",), {}, "the API needs a Redis"),
    (("serve",), {"DRAFTALIGN_PORT": "70000"}, "(DRAFTALIGN_PORT): must be less than or equal to 65535, got '70000'"),
    (("up",), {"DRAFTALIGN_HOST": "0.0.0.0"}, "refusing to listen on 0.0.0.0 without tokens"),  # noqa: S104
    (
        ("up",),
        {"DRAFTALIGN_LOG_LEVEL": "loud"},
        "DRAFTALIGN_LOG_LEVEL must be DEBUG, INFO, WARNING or",
    ),
    (("up",), {"DRAFTALIGN_TOKENS": "nonsense"}, "tokens: entry 1 must be"),
    (("worker", "--redis-url", "nonsense://x"), {}, "redis_url"),
    (("serve", "--redis-url", "nonsense://x"), {}, "redis_url"),
    (("up", "--state-dir", "/proc/nowhere"), {"DRAFTALIGN_PORT": "0"}, "/proc/nowhere"),
    (("up",), {"DRAFTALIGN_SIGNING_KEY_FILE": __file__}, f"signing_key_file: {__file__}: expected an Ed25519"),
    (("keygen", __file__), {}, f"{__file__} exists; name a new file"),
    (("keygen", "/nowhere/key.pem"), {}, "/nowhere/key.pem cannot be written: No such file or directory; name a file"),
    (
        ("token", "x", "--scope", "read", "--file", "/nowhere/tokens.jsonl"),
        {},
        "the directory /nowhere of the token file does not exist; make it first",
    ),
    (("runs",), {"DRAFTALIGN_TOKEN": "s\N{LATIN SMALL LETTER E WITH ACUTE}cret"}, "DRAFTALIGN_TOKEN has a character"),
    (("runs",), {"DRAFTALIGN_URL": "http://127.0.0.1:1"}, "http://127.0.0.1:1 does not answer"),
]


REDIS_URLS = [  # no Redis answers there, or the URL is broken
    "redis://someone:hunter2@127.0.0.1:1/0",
    "rediss://:hunter2@127.0.0.1:1",
    "redis://127.0.0.1:1/0?password=hunter2",
    "unix://:hunter2@/nowhere/redis.sock",
    "redis://:hunter2/x@127.0.0.1:1",
]


@pytest.mark.parametrize("url", REDIS_URLS)
def test_a_redis_that_does_not_answer_is_named_without_its_password(url: str, tmp_path: Path) -> None:
    done = run("up", "--port", str(free_port()), "--state-dir", "state", "--redis-url", url, cwd=tmp_path)
    assert done.returncode == 1
    assert "hunter" not in done.stderr + done.stdout, done.stderr
    assert "Traceback" not in done.stderr
    assert "redis" in last_line(done.stderr)


@pytest.mark.parametrize("command", ["up", "serve", "worker"])
def test_a_part_that_cannot_read_its_redis_url_does_not_print_it(command: str, tmp_path: Path) -> None:
    done = run(command, cwd=tmp_path, DRAFTALIGN_REDIS_URL="redis://:hunter2/x@127.0.0.1:1")
    assert done.returncode == 1
    assert "hunter" not in done.stderr + done.stdout, done.stderr
    assert "redis_url must begin with one of redis://, rediss://, unix://" in last_line(done.stderr)


@pytest.mark.parametrize(
    ("start", "loaded"),
    [(main.up, "service.cli.up"), (main.serve, "service.api.app"), (main.worker, "service.ranks")],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_a_setting_that_is_wrong_is_told_before_the_part_is_loaded(
    start: Callable[..., None], loaded: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, loaded, None)  # to import it raises ImportError
    with pytest.raises(ConfigurationError, match=r"redis_url .* cannot be used"):
        start(state_dir=tmp_path, redis_url="redis://127.0.0.1:1/0?db=x")


@pytest.mark.parametrize(
    ("start", "loaded", "runs"),
    [(main.serve, "service.api.app", "run_api"), (main.worker, "service.ranks", "run_on_ranks")],
    ids=lambda value: str(getattr(value, "__name__", value)),
)
def test_a_part_looks_for_garbage_when_it_runs_and_not_while_it_is_loaded(
    start: Callable[..., None], loaded: str, runs: str, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[bool, bool]] = []
    frozen = gc.get_freeze_count()

    class Part(types.ModuleType):
        def __getattr__(self, name: str) -> Callable[[Settings], None]:
            if name != runs:
                raise AttributeError(name)
            loading = gc.isenabled()
            return lambda _: found.append((loading, gc.isenabled()))

    monkeypatch.setitem(sys.modules, loaded, Part(loaded))
    start(state_dir=tmp_path, redis_url=redis_url)
    assert found == [(False, True)]
    assert gc.get_freeze_count() > frozen


def test_up_lets_the_api_end_the_uploads_that_it_waits_for(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = list[Child]()
    monkeypatch.setattr("service.cli.up.Supervisor", lambda children: Mock(run=lambda: found.extend(children)))
    monkeypatch.setattr("service.cli.up._check_device", Mock())
    port = free_port()
    settings = Settings(state_dir=tmp_path, redis_url=SecretStr(redis_url), port=port)
    run_up(settings)
    patience = {child.name: child.patience_seconds for child in found}
    waited = make_server(settings).config.timeout_graceful_shutdown
    assert waited is not None
    assert patience["api"] > waited + 2


@pytest.mark.parametrize(
    ("command", "options", "named"),
    [
        ("serve", "db=x", "Invalid value for 'db'"),
        ("serve", "protocol=9", "an option"),
        *((part, "password=a&hunter3=b", "an option") for part in ("up", "serve", "worker")),  # its & was not encoded
    ],
)
def test_a_redis_url_with_a_bad_option_ends_every_part_in_one_line(
    command: str, options: str, named: str, tmp_path: Path
) -> None:
    done = run(command, cwd=tmp_path, DRAFTALIGN_REDIS_URL=f"redis://:hunter2@127.0.0.1:1/0?{options}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "hunter" not in done.stderr + done.stdout, done.stderr
    assert last_line(done.stderr).startswith("draftalign: redis_url redis://127.0.0.1:1/0 cannot be used: ")
    assert named in last_line(done.stderr)


@pytest.mark.parametrize(
    "url",
    [
        *("redis://:hunter2/x@host", "redis://:12/hunter2@host", "redis://:hunter2#x@host", "redis://:12#hunter2@host"),
        *("redis://:hunter2?x@host", "redis://:12?hunter2@host", "redis://:x@host:hunter2", "redis://[hunter2"),
        *("redis://:hunter2@[host", "http://:hunter2@host", "hunter2", ":hunter2@host:6379", ""),
    ],
)
def test_a_broken_redis_url_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(ValueError, match="redis_url must begin with one of") as caught:
        redis_place(url)
    assert "hunter" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://:p@host:6380/3?password=x", "redis://host:6380/3"),
        ("rediss://u:p@[::1]:6379", "rediss://[::1]:6379"),
        ("redis://host", "redis://host"),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock"),
    ],
)
def test_what_is_shown_of_a_redis_url_is_where_it_leads(url: str, shown: str) -> None:
    assert redis_place(url) == shown


@pytest.mark.parametrize(("command", "starts"), [("up", True), ("demo", True), ("serve", False), ("worker", False)])
def test_help_promises_an_embedded_valkey_only_where_one_is_started(command: str, starts: bool, tmp_path: Path) -> None:
    text = " ".join(run(command, "--help", cwd=tmp_path).stdout.replace("│", " ").split())
    assert ("unset starts an embedded Valkey" in text) == starts
    assert ("Redis or Valkey to use; required" in text) == (not starts)
    assert "DRAFTALIGN_REDIS_URL" in text


@pytest.mark.parametrize(("arguments", "environment", "words"), ERRORS, ids=lambda x: str(x)[:40])
def test_an_error_is_one_line_that_says_what_to_do(
    arguments: tuple[str, ...], environment: dict[str, str], words: str, tmp_path: Path
) -> None:
    done = run(*arguments, cwd=tmp_path, **{"DRAFTALIGN_LOG_LEVEL": "CRITICAL", **environment})
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert last_line(done.stderr).startswith("draftalign: "), done.stderr
    assert words in last_line(done.stderr), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


def test_up_on_a_taken_port_says_so_and_starts_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("up", "--port", str(port), "--state-dir", str(tmp_path / "state"), cwd=tmp_path)
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        f"draftalign: port {port} on 127.0.0.1 is taken; stop what listens there or choose another with --port"
    )
    assert not (tmp_path / "state").exists()


def test_the_api_on_a_taken_port_says_so_and_not_that_it_serves(redis_url: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = run("serve", "--port", str(port), "--redis-url", redis_url, cwd=tmp_path)
    assert done.returncode == 1
    assert last_line(done.stderr) == (
        f"draftalign: port {port} on 127.0.0.1 is taken; stop what listens there or choose another with --port"
    )
    assert "serves" not in done.stderr


def test_an_address_of_another_machine_is_not_called_taken(tmp_path: Path) -> None:
    where = {"DRAFTALIGN_HOST": "203.0.113.1", "DRAFTALIGN_TOKENS": "a-secret-of-a-test:admin"}
    done = run("up", "--port", "8400", "--state-dir", str(tmp_path / "state"), cwd=tmp_path, **where)
    assert done.returncode == 1
    assert last_line(done.stderr).startswith("draftalign: port 8400 on 203.0.113.1 cannot be had: ")
    assert not (tmp_path / "state").exists()


class Up:
    """`draftalign up` on a free port."""

    def __init__(self, directory: Path, **variables: str) -> None:
        self.port = free_port()
        self.log = directory / "up.log"
        self.state_dir = directory / "state"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "service.cli", "up", "--port", str(self.port), "--state-dir", self.state_dir],
                env=clean_environment(PYTHONPATH=str(ROOT), DRAFTALIGN_CHECKPOINT_SECONDS="0", **variables),
                stdout=output,
                stderr=output,
                start_new_session=True,  # a Ctrl-C of this test must not reach pytest
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=10)

    def children(self) -> dict[str, int]:
        """Process ids by name, the newest of each."""
        return {n: int(p) for n, p in re.findall(r"(\w+) runs as process (\d+)", self.log.read_text())}

    def wait_ready(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.client.get("/readyz").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.05)

    def wait_state(self, batch_id: str, state: str, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self.client.get(f"/rollouts/{batch_id}").json().get("state") == state:
                    return
            except httpx.HTTPError:
                pass
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.1)

    def close(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.children().values():
            if alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    made = Up(tmp_path)
    yield made
    made.close()


@pytest.mark.chaos
def test_up_serves_survives_the_death_of_each_part_and_ends_on_ctrl_c(up: Up, tmp_path: Path) -> None:
    up.wait_ready()
    world = World()
    body = world.run_file(drafter=world.drafter())
    assert up.client.put("/runs/default", content=body, headers=HEADERS).status_code == 201
    first = up.client.post("/rollouts", content=world.rollout_file("a"), headers=HEADERS).json()["batch_id"]
    up.wait_state(first, "trained")

    second_up = run("up", "--port", str(free_port()), "--state-dir", str(up.state_dir), cwd=tmp_path)
    assert second_up.returncode == 1, "two services on one state directory would fight over it"
    assert "a server already runs on" in last_line(second_up.stderr)

    for name in ("valkey", "api", "worker"):
        os.kill(up.children()[name], signal.SIGKILL)
    up.wait_ready()
    up.wait_state(first, "trained")
    assert up.client.get("/drafter/latest").json()["version"].startswith("v000001-")
    second = up.client.post("/rollouts", content=world.rollout_file("b"), headers=HEADERS).json()["batch_id"]
    up.wait_state(second, "trained")

    children = up.children()
    os.killpg(up.process.pid, signal.SIGINT)  # as a terminal does: to the whole foreground group
    assert up.process.wait(60) == 0
    assert sorted(children) == ["api", "valkey", "worker"]
    assert not any(alive(pid) for pid in children.values())
    log = up.log.read_text()
    assert "Traceback" not in log, log
    assert "ignored SIGTERM" not in log, log
    assert "not closed in order" not in log, "the worker's Redis was there until it had ended"


@pytest.mark.slow
def test_up_with_two_ranks_loses_nothing_when_a_rank_or_their_torchrun_is_killed(tmp_path: Path) -> None:
    """And none of them outlives it."""
    up = Up(tmp_path, DRAFTALIGN_WORKER_RANKS="2", DRAFTALIGN_TRAIN_STEP_TOKENS="64")
    seen = set[int]()

    def ranks() -> dict[int, int]:
        found, state_dir = {}, f"DRAFTALIGN_STATE_DIR={up.state_dir}".encode()
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                lines = path.read_bytes().split(b"\0")
                if state_dir in lines and (rank := [line for line in lines if line.startswith(b"RANK=")]):
                    found[int(rank[0][5:])] = int(path.parent.name)
        seen.update(found.values())
        return found

    try:
        up.wait_ready()
        world = World()
        body = world.run_file(drafter=world.drafter())
        assert up.client.put("/runs/default", content=body, headers=HEADERS).status_code == 201

        def begun_since(before: dict[int, int]) -> bool:
            now = ranks()
            return sorted(now) == [0, 1] and not {*now.values()} & {*before.values()}

        for number, victim in enumerate([0, None]):  # test_worker_ranks.py kills rank 1 too
            posted = []
            for part in "ab":
                file = world.rollout_file(f"{part}{number}", policy_version=number)
                posted.append(up.client.post("/rollouts", content=file, headers=HEADERS).json()["batch_id"])
            if number == 0:
                up.wait_state(posted[0], "trained", 200)
            eventually(lambda: sorted(ranks()) == [0, 1], seconds=200)  # the start before may not have ended
            found = ranks()
            os.kill(up.children()["worker"] if victim is None else found[victim], signal.SIGKILL)
            for batch_id in posted:
                up.wait_state(batch_id, "trained", 200)
            # What was posted may have been trained before the kill: the next start is waited for by itself.
            eventually(partial(begun_since, found), seconds=200)
        os.killpg(up.process.pid, signal.SIGINT)
        assert up.process.wait(60) == 0
        assert len(seen) >= 6
        assert not any(alive(pid) for pid in seen)
    finally:
        up.close()
        for pid in ranks().values():
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu", "names no device"), ("cuda", "torch sees 0 CUDA devices"), ("cuda:3", "is not here")],
)
def test_a_device_that_is_not_there_is_named_before_anything_starts(
    device: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigurationError, match=message):
        checked_device(device)


@pytest.mark.parametrize(
    ("share", "capped"), [(0.3, [(0.3, 1)]), (1.0, [])], ids=["shared", "all of it: torch's own way"]
)
def test_the_worker_takes_its_share_of_the_gpus_memory(
    share: float, capped: list[tuple[float, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    caps: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, index: caps.append((share, index)))
    assert use_device("cuda:1", share) == torch.device("cuda:1")
    assert (taken, caps) == ([1], capped)


@pytest.mark.parametrize(
    ("device", "cores", "ranks", "threads"),
    [("cpu", 16, 1, 1), ("cuda", 16, 1, 8), ("cuda", 16, 4, 4), ("cuda", 2, 8, 1)],
)
def test_a_gpu_is_fed_by_several_threads_whatever_started_the_worker(
    device: str, cores: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1000")  # on all hosts
    monkeypatch.setenv("LOCAL_WORLD_SIZE" if ranks > 1 else "WORLD_SIZE", str(ranks))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    use_device(device)
    assert found == [threads]


@pytest.mark.parametrize("start", [run_worker, run_on_ranks])
def test_every_start_of_a_worker_heeds_its_share(
    start: Callable[[Settings], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, float]] = []

    def use(name: str, share: float) -> None:
        asked.append((name, share))
        raise KeyboardInterrupt

    for module in (service.worker.process.worker, service.ranks):
        monkeypatch.setattr(module, "use_device", use)
    with pytest.raises(KeyboardInterrupt):
        start(
            Settings(
                state_dir=tmp_path, redis_url=SecretStr("redis://127.0.0.1:1"), device="cuda", gpu_memory_share=0.4
            )
        )
    assert asked == [("cuda", 0.4)]


def test_up_says_so_too_and_starts_nothing() -> None:
    with pytest.raises(ConfigurationError, match="DRAFTALIGN_DEVICE='gpu' names no device"):
        _check_device("gpu")


def test_drift_asks_the_service_and_says_what_it_answered(tmp_path: Path) -> None:
    silent = run("drift", "reset", "--service", f"http://127.0.0.1:{free_port()}", cwd=tmp_path)
    assert silent.returncode == 1
    assert "does not answer" in last_line(silent.stderr)
    assert run("drift", "silence", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("given", ["worker", "up", "inspect drafter", "eval one two", "demo"])
def test_without_torch_what_needs_it_ends_and_says_which_image_to_take(given: str, tmp_path: Path) -> None:
    """As in the image of the API alone; `up` would restart such a worker for ever."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "DRAFTALIGN_REDIS_URL": "redis://127.0.0.1:1"}
    environment |= {"DRAFTALIGN_STATE_DIR": str(tmp_path / "state")}
    command = [sys.executable, "-m", "service.cli", *given.split()]
    done = subprocess.run(
        command, env=clean_environment(**environment), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "needs torch, which is not installed here (nor in the image draftalign-api)" in last_line(done.stderr)
    assert not (tmp_path / "state").exists()


def test_a_tilde_is_the_home_directory_wherever_a_path_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shell leaves it as it is after `=`, and so does a file of variables."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DRAFTALIGN_STATE_DIR", "~/state")
    monkeypatch.setenv("DRAFTALIGN_TOKEN_FILE", "~/tokens.jsonl")
    assert (Settings().state_dir, Settings().token_file) == (tmp_path / "state", tmp_path / "tokens.jsonl")
    monkeypatch.setenv("DRAFTALIGN_STATE_DIR", "~nobody-of-this-name/state")
    assert Settings().state_dir == Path("~nobody-of-this-name/state")
    made = CliRunner().invoke(app, ["token", "t", "--scope=read", "--file=~/more.jsonl"])
    assert made.exit_code == 0, made.output
    assert (tmp_path / "more.jsonl").is_file()
    said = CliRunner().invoke(app, ["audit", "--state-dir=~/elsewhere"])
    assert str(tmp_path / "elsewhere") in str(said.exception)


def test_an_empty_path_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the current directory."""
    monkeypatch.setenv("DRAFTALIGN_STATE_DIR", "")
    with pytest.raises(ValidationError, match="is empty; give a path"):
        Settings()
    monkeypatch.delenv("DRAFTALIGN_STATE_DIR")
    for command in (["serve"], ["worker"], ["up"], ["audit"], ["copy-state", "s3://b/p"], ["eval", "x", "y"]):
        said = CliRunner().invoke(app, [*command, "--state-dir="])
        assert isinstance(said.exception, ValidationError), (command, said.output)
        assert "is empty; give a path" in str(said.exception)


def test_every_option_that_takes_a_path_knows_the_home_directory() -> None:
    """Those of the settings do by themselves, and the agent's."""
    found = {
        f"{command.callback.__name__} {name}": option.callback
        for command in app.registered_commands
        if command.callback is not None
        for name, hint in typing.get_type_hints(command.callback, include_extras=True).items()
        for option in getattr(hint, "__metadata__", ())
        if isinstance(option, OptionInfo) and hint.__origin__ in (Path, Path | None)
    }
    assert len(found) > 8
    by_themselves = ("state_dir", "tls_cert", "tls_key", "cache_dir")
    assert [name for name, given in found.items() if given is None and not name.endswith(by_themselves)] == []
