"""Tells the service what the engines have counted, and what the canary found."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

import httpx

from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.engines.bounded import Answer, ask
from rl_hooks.engines.counting.counters import VersionCounts
from rl_hooks.errors import AgentError, ReportError, cut

log = logging.getLogger("draftalign.agent")

#: The service's name among the peers of an agent.
SERVICE: Final = "service"
#: Most characters of an error in the log, which may quote names and answers.
MAX_LOGGED: Final = 1000
#: Most characters of a report's reason why a swap did not happen.
MAX_WITHHELD: Final = 300
#: Answers to a report that will not change when it is sent again.
_UNACCEPTABLE: Final = frozenset({400, 404, 409, 413, 415, 422})


class Reports:
    """The reports of one agent about its engines."""

    def __init__(
        self,
        run: str,
        agent_id: str,
        followers: Mapping[str, EngineFollower],
        metrics: AgentMetrics,
    ) -> None:
        self._run, self._agent_id, self._followers = run, agent_id, followers
        self._metrics = metrics
        #: Set once an engine's counts were read.
        self.counted = asyncio.Event()
        self._said: dict[str, str] = {}  # engine, or the service -> what was logged of its last answer

    async def send_counted(self, client: httpx.AsyncClient) -> None:
        """Wait until something was counted, then `send`."""
        await self.counted.wait()
        self.counted.clear()
        try:
            await self.send(client)
        except (httpx.HTTPError, AgentError):
            self.counted.set()  # try again
            raise

    async def send(self, client: httpx.AsyncClient) -> None:
        """Send the canary's verdicts, and all counts that have changed."""
        for follower in list(self._followers.values()):
            # Counts of an earlier life first: the service refuses them once it has some of a later life.
            await self._send_changed(client, follower, ended=True)
            while follower.books.verdicts:
                verdict, sequence = follower.books.verdicts[0]
                judged = [b for b in follower.ledger.buckets() if b.drafter_version == verdict.version]
                if judged:
                    await self._post(
                        client, follower, judged[-1], {"canary": verdict.document() | {"sequence": sequence}}
                    )
                follower.books.verdicts.pop(0)
            await self._send_changed(client, follower)

    async def _send_changed(self, client: httpx.AsyncClient, follower: EngineFollower, *, ended: bool = False) -> None:
        for bucket in follower.ledger.buckets():
            changed = bucket.reported != (bucket.counts.rounds, follower.is_loaded(bucket))
            if changed and not (ended and bucket.life == follower.ledger.life):
                await self._post(client, follower, bucket, {})

    async def _post(
        self, client: httpx.AsyncClient, follower: EngineFollower, bucket: VersionCounts, more: dict[str, Any]
    ) -> None:
        """Send one bucket's cumulative counts. Idempotent: the newest report of a bucket replaces the one before."""
        mark = (bucket.counts.rounds, follower.is_loaded(bucket))
        document = {
            "run": self._run,
            "reporter": f"{self._agent_id} {follower.url}",
            "engine": follower.url,
            "method": bucket.method,
            "drafter_version": bucket.drafter_version,
            "policy_version": bucket.policy_version,
            "life": bucket.life,
            **asdict(bucket.counts),
            "depth": follower.seen.depth,
            "drafting": follower.seen.drafting,
            "final": not mark[1],
            **more,
        }
        if not bucket.counts.by_prompt:
            del document["by_prompt"]
        for name in ("finished_requests", "running_requests"):
            if document[name] is None:
                del document[name]
        if follower.withheld:
            document["withheld"] = cut(follower.withheld, MAX_WITHHELD)
        if times := follower.books.step_times.document():
            document["step_times"] = times
        response = await ask(client, "POST", "/acceptance", json=document)
        if 200 <= response.status_code < 300:
            self._warn(follower.url, response)
        else:
            kind, why = response.refusal()
            error = ReportError(f"POST /acceptance answered {response.status_code}: {why}")
            # A 404 that the service did not say is of a proxy in front of it, and passes.
            if response.status_code not in _UNACCEPTABLE or (response.status_code == 404 and not kind):
                raise error
            # The same report would be refused again. A later one has other counts and may be accepted.
            self._metrics.errors.labels("report", type(error).__name__).inc()
            self.say(follower.url, logging.WARNING, str(error))
        bucket.reported = mark
        self._metrics.last_contact.labels(SERVICE).set_to_current_time()

    def _warn(self, engine: str, response: Answer) -> None:
        """Log the service's warning about a report, once. Raises ReportError for an answer of something else."""
        try:
            answer = response.json()
            warning = answer["stored"] and answer.get("warning")
        except (ValueError, TypeError, KeyError):
            text = f"answered {response.status_code} with {response.content[:60]!r}; is it a draftalign service?"
            raise ReportError(f"POST /acceptance: expected the service's JSON, {text}") from None
        if isinstance(warning, str):
            self.say(engine, logging.WARNING, warning)

    def say(self, peer: str, level: int, text: str) -> None:
        """Log what the service says about a peer, unless it said just that before."""
        if self._said.get(peer) != (said := cut(text, MAX_LOGGED)):
            log.log(level, "%s: %s", peer, said)
            self._said[peer] = said
