"""`draftalign up`: embedded Valkey (unless a Redis is given), API and worker under one parent."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Final

from service.access.signing import signing_key
from service.access.tokens import Tokens
from service.api.auth import check_binding
from service.api.port.connections import tls_context
from service.api.port.free import check_port
from service.cli.checks import check_redis, check_torch
from service.cli.supervisor import Child, Supervisor
from service.cli.valkey import EmbeddedValkey
from service.errors import ConfigurationError
from service.settings import Settings

log = logging.getLogger("draftalign.up")


#: A start of torchrun for the ranks of this machine; what it starts ends with it (`service.cli.child`).
_TORCHRUN: Final = [
    *("torch.distributed.run", "--max-restarts", "100", "--rdzv-backend", "c10d"),
    *("--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
_CHECK = """
import os, sys
from service.ranks import own_device
from service.worker.process.device import checked_device
name, ranks = sys.argv[1], int(sys.argv[2])
os.environ["LOCAL_RANK"] = str(ranks - 1)
checked_device(own_device(name) if ranks > 1 else name)
"""


def worker_argv(ranks: int) -> list[str]:
    """What `python -m` runs as a worker: one process, or a `torchrun` of as many ranks on this machine."""
    alone = ["service.cli", "worker"]
    if ranks == 1:
        return alone
    return [*_TORCHRUN, "--nproc-per-node", str(ranks), "-m", "service.cli.child", *alone]


def _check_device(name: str, ranks: int = 1) -> None:
    """Raise `ConfigurationError` if a rank has no device: else `up` would restart a failing worker again and again.

    Checked in a child process, because this process lives as long as the service and should not load torch.
    """
    argv = [sys.executable, "-c", _CHECK, name, str(ranks)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigurationError(done.stderr.strip().rpartition("ConfigurationError: ")[2])


def run_up(settings: Settings) -> None:
    """Run until a signal asks for the end, then stop every part in order."""
    # All of these are checked here, too: else `up` would restart a child that refuses to start again and again.
    check_torch()
    check_binding(settings)
    Tokens(settings)
    signing_key(settings.signing_key_file)
    check_port(settings.host, settings.port)
    try:
        settings.state_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"state directory {settings.state_dir} cannot be made: {error}") from error
    environment = {"DRAFTALIGN_STATE_DIR": str(settings.state_dir), "DRAFTALIGN_PORT": str(settings.port)}
    if settings.tls_cert is not None and settings.tls_key is not None:
        tls_context(settings.tls_cert, settings.tls_key)
        environment |= {"DRAFTALIGN_TLS_CERT": str(settings.tls_cert), "DRAFTALIGN_TLS_KEY": str(settings.tls_key)}
    if settings.device == "cpu":
        environment["OMP_NUM_THREADS"] = "1"
    else:
        _check_device(settings.device, settings.worker_ranks)
    children: list[Child] = []
    if settings.redis_url is None:
        valkey = EmbeddedValkey(settings.state_dir)
        with valkey.exclusive_directory():
            pass
        children.append(
            Child("valkey", ["service.cli.valkey", str(settings.state_dir)], log_file=valkey.directory / "valkey.log")
        )
        environment["DRAFTALIGN_REDIS_URL"] = valkey.url
    else:
        check_redis(settings.redis_url.get_secret_value())
        environment["DRAFTALIGN_REDIS_URL"] = settings.redis_url.get_secret_value()
    # The API gets longer than it waits for running uploads (`make_server`).
    children.append(Child("api", ["service.cli", "serve"], environment, patience_seconds=20.0))
    # On SIGTERM the worker finishes its optimizer step and writes a checkpoint.
    alone = environment | {"WORLD_SIZE": "1"}  # a trainer's rank that started `up` has another one
    children.append(Child("worker", worker_argv(settings.worker_ranks), alone, patience_seconds=45.0))
    if settings.port:  # else the API says which one it took
        log.info("page and API at %s", settings.url(settings.port))
    Supervisor(children).run()
