"""The agent's command: `draftalign agent`, and `draftalign-agent` where only this package is installed."""

from __future__ import annotations

import logging
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer


def agent(
    url: Annotated[list[str], typer.Option(help="URL of an inference engine; repeat for several.")],
    engine: Annotated[
        str,
        typer.Option(
            help="`sglang` for SGLang. `protocol` or `vllm` for vLLM with draftalign's plugin, and for any engine "
            "that answers /drafter/state and /drafter/swap."
        ),
    ] = "protocol",
    service: Annotated[
        str, typer.Option(help="URL of the draftalign service.", envvar="DRAFTALIGN_URL")
    ] = "http://127.0.0.1:8400",
    run: Annotated[str, typer.Option(help="Name of the RL run.", envvar="DRAFTALIGN_RUN")] = "default",
    cache_dir: Annotated[
        Path, typer.Option(help="Where drafters are downloaded to; engines must see it there.")
    ] = Path(".draftalign/agent"),
    report_seconds: Annotated[float, typer.Option(help="How often acceptance counters are read and reported.")] = 5.0,
    metrics_port: Annotated[int | None, typer.Option(help="Serve the agent's own /metrics here.")] = None,
    metrics_host: Annotated[str, typer.Option(help="Address of the agent's own /metrics.")] = "127.0.0.1",
    agent_id: Annotated[str | None, typer.Option(help="Name in reports; by default the host's.")] = None,
    canary_rounds: Annotated[
        int | None,
        typer.Option(
            min=0, help="Rounds on which a new version is compared with the last; 0: never swap back. Default: 2000."
        ),
    ] = None,
) -> None:
    """Keep inference engines on the newest drafter, and report their acceptance counts to the service.

    vLLM needs the plugin: `pip install ./rl_hooks` in its environment, VLLM_PLUGINS=draftalign, and
    DRAFTALIGN_DRAFTER_DIR, under which --cache-dir lies. To watch α for now, without further swaps:
    `draftalign hold VERSION`. Each engine gets that version, and no other until `draftalign release`. More:
    docs/guide/engines.md.

    DRAFTALIGN_TOKEN: token for the service, of scopes read and report. DRAFTALIGN_ENGINE_TOKEN: token for engines that
    ask for one. DRAFTALIGN_PUBLIC_KEYS: public keys of the service; what none of them signed is then refused.
    """
    from rl_hooks.agent.agent import AgentConfig, run_agent
    from rl_hooks.agent.canary import CanaryRule
    from rl_hooks.durable import at_home
    from rl_hooks.errors import AgentError
    from rl_hooks.format.release import PublicKeys

    try:
        cache_dir = at_home(cache_dir)
        config = AgentConfig(
            service_url=service,
            engine_urls=tuple(url),
            run=run,
            cache_dir=cache_dir,
            agent_id=agent_id or socket.gethostname(),
            report_seconds=report_seconds,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            engine_kind=engine,  # type: ignore[arg-type]
            canary=CanaryRule() if canary_rounds is None else CanaryRule(rounds=canary_rounds),
            token=os.environ.get("DRAFTALIGN_TOKEN"),
            engine_token=os.environ.get("DRAFTALIGN_ENGINE_TOKEN"),
            public_keys=PublicKeys.of_environment(os.environ),
        )
    except ValueError as error:
        typer.echo(f"draftalign agent: {error}", err=True)
        raise typer.Exit(1) from error
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        run_agent(config)
    except (OSError, AgentError) as error:
        typer.echo(f"draftalign agent: {error}", err=True)
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point of `draftalign-agent`."""
    start_logging("draftalign agent", "agent")
    typer.run(agent)


def start_logging(program: str, name: str) -> None:
    """Log to stderr under a name, as DRAFTALIGN_LOG_LEVEL says; ends `program` where it says no level."""
    level = os.environ.get("DRAFTALIGN_LOG_LEVEL", "INFO").upper()
    if level not in logging.getLevelNamesMapping():
        sys.exit(f"{program}: DRAFTALIGN_LOG_LEVEL must be DEBUG, INFO, WARNING or ERROR, got {level[:40]!r}")
    form = f"%(asctime)s {name} %(levelname)-7s %(message)s"
    logging.basicConfig(level=level, format=form, datefmt="%Y-%m-%d %H:%M:%S%z")  # a run's log has many days
    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("huggingface_hub").propagate = False  # it prints by itself
