"""How people refit a policy in vLLM, on a real server under load: labels, heads and α before and after each refit."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any

import torch
from helpers.drafter.decode_fixtures import policy_of
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import base_policy, elicit_prompts
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from safetensors.torch import load_file
from vllm_server.vllm_process import DEPTH, VllmServer

from drafter.batch import RolloutBatch, load_batch, prompt_hashes
from drafter.model.eagle3 import Eagle3Drafter
from drafter.replay.replay import replay
from rl_hooks import wire

RUN = "live"
_QUESTIONS = [token for prompt in elicit_prompts(64, seed=5) for token in prompt]
#: Groups of equal prompts, as in GRPO. Of each long one vLLM's prefix cache holds 96 tokens once it was asked: four
#: blocks but the last, which vLLM computes again for an EAGLE drafter (with `--block-size 32`).
GROUPS = elicit_prompts(4, seed=77) + [_QUESTIONS[6 * k : 6 * k + 132] for k in range(4)]
#: Of one token's log-probability, float32 beside a plain forward.
_TOLERANCE = 1e-4


def by_parts(server: VllmServer, how: str) -> Callable[[Path], None]:
    """One call of the engine for each tensor, between which it steps (OpenRLHF)."""

    def refit(policy: Path) -> None:
        part, count = 0, 1
        while part < count:
            count = server.rpc("refit", how, str(policy), part)
            part += 1

    return refit


def by_session(server: VllmServer) -> Callable[[Path], None]:
    """Start, update and finish of vLLM's own, of an engine that is paused with its requests."""

    def refit(policy: Path) -> None:
        def call(method: str, *args: Any) -> None:
            server.client.post("/test/rpc", json={"method": method, "args": args}).raise_for_status()

        server.client.post("/test/hold").raise_for_status()
        call("start_weight_update")
        for part in range(2):
            call("update_weights", {"path": str(policy), "part": part, "parts": 2})
        call("finish_weight_update")
        server.client.post("/test/resume").raise_for_status()

    return refit


def ways(server: VllmServer) -> dict[str, tuple[Callable[[Path], None], bool]]:
    """Refits by name; whether they bring all weights, or those that a CPU does not pack."""

    def at_once(how: str) -> Callable[[Path], None]:
        return lambda policy: server.rpc("refit", how, str(policy))

    return {
        "load_weights in buckets": (at_once("buckets"), True),
        "per tensor": (by_parts(server, "per tensor"), False),
        "reload_weights": (at_once("reload_weights"), True),
        "start, update, finish": (by_session(server), True),
        "per-parameter copies": (at_once("copies"), False),
    }


def next_policy(before: Any, seed: int, *, whole: bool) -> Any:
    """The policy after a step of RL; `whole`: all of its weights have moved, else norms and embedding."""
    model = copy.deepcopy(before)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if whole or "norm" in name or "embed" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.05)
    return model


@dataclass
class Clients:
    """Two clients that ask for sampled answers again and again.

    Without seeds: on a CPU, vLLM dies of a request with one whose prompt is computed in parts.
    """

    server: VllmServer
    served: int = 0
    faults: list[BaseException] = field(default_factory=list)
    _stop: Event = field(default_factory=Event)

    def _ask(self, client: int) -> None:
        for prompt in itertools.cycle(GROUPS[client:] + GROUPS[:client]):
            if self._stop.is_set():
                return
            try:
                self.server.generate(prompt, temperature=1.0)
            except BaseException as error:  # noqa: BLE001 - told to the test
                self.faults.append(error)
                return
            self.served += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """They ask while the block runs."""
        with ThreadPoolExecutor(2) as pool:
            for client in (0, 3):
                pool.submit(self._ask, client)
            try:
                yield
            finally:
                self._stop.set()
        assert not self.faults, f"{self.faults}\n{self.server.log_end()}"

    def wait_for(self, more: int) -> None:
        """Until this number of further answers was given."""
        goal = self.served + more
        eventually(lambda: self.served >= goal or self.faults, 240)
        assert not self.faults, f"{self.faults}\n{self.server.log_end()}"


def check_refits(
    service: RunningService,
    server: VllmServer,
    redis_url: str,
    drafter: tuple[Path, Eagle3Drafter],
    scratch: Path,
    answers: int,
) -> None:
    """Each way brings weights that have changed while two clients are served; what was sent is recomputed.

    `answers` are given between two refits.
    """
    model, _ = base_policy()
    policies: dict[int, tuple[str, Any]] = {0: ("start", model)}
    version = publish(service, *drafter, run=RUN)
    eventually(lambda: server.generate([5], max_tokens=1) and server.state()["version"] == version, 60)
    began = server.counters().rounds

    def counted() -> dict[int, tuple[int, int]]:
        """(tokens, rounds) by policy version, as the engine has reported them of this drafter."""
        with Redis.from_url(redis_url) as redis:
            found = Store(redis, RUN).acceptances()
        records = [r for r in found if r.drafter_version == version and r.reporter]
        return {r.policy_version or 0: (r.emitted_tokens or 0, r.rounds) for r in records}

    def replayed(number: int) -> dict[str, float]:
        policy = policy_of(policies[number][1])
        parts = [
            replay(drafter[1], batch, policy, depth=DEPTH, drafting="greedy") for batch in _batches(service)[number]
        ]
        return {what: sum(part.total()[what] for part in parts) for what in ("tokens", "rounds")}

    # --- nothing changes: of prompts that vLLM's cache holds, replay is what vLLM has counted
    asked = GROUPS * (3 if answers > 6 else 2)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, temperature=1.0), asked))
    server.generate([5], max_tokens=1)  # a step, in which the last ends are told
    rounds = server.counters().rounds - began
    eventually(lambda: sum(b.rollouts for b in _batches(service).get(0, ())) >= len(asked), 60)
    tokens, live_rounds = eventually(lambda: (found := counted().get(0)) and found[1] >= rounds and found, 60)
    sums = replayed(0)
    print(f"shared prompts: {tokens} tokens in {live_rounds} rounds counted, in {sums['rounds']:.0f} replayed")
    assert (live_rounds, sums["tokens"]) == (rounds, tokens)
    assert math.isclose(sums["rounds"], rounds, rel_tol=0.005)

    # --- and each refit is under way while requests are
    clients = Clients(server)
    with clients.running():
        for seed, (how, (refit, whole)) in enumerate(ways(server).items()):
            clients.wait_for(answers)
            model = next_policy(model, seed, whole=whole)
            model.save_pretrained(scratch / f"policy-{seed}")
            refit(scratch / f"policy-{seed}")
            clients.wait_for(2)  # a step came, and found it
            number = server.rpc("policy_version")
            assert number > max(policies), how
            policies[number] = (how, model)
        clients.wait_for(answers)
    server.generate([5], max_tokens=1)  # a step, in which the last ends are told
    rounds = server.counters().rounds - began
    eventually(lambda: sum(one for _, one in counted().values()) >= rounds, 60)
    by_policy = counted()
    assert sum(one for _, one in by_policy.values()) == rounds, "each round is some version's"
    eventually(lambda: max(policies) in _batches(service), 60)
    batches = _batches(service)
    numbers = list(policies)
    for place, (number, (how, model)) in enumerate(policies.items()):
        tokens, live_rounds = by_policy[number]
        sums = replayed(number)
        live, again = tokens / live_rounds, sums["tokens"] / sums["rounds"]
        others = [policies[at][1] for at in numbers[max(place - 1, 0) : place + 2] if at != number]
        own, nearest = furthest(batches[number], model), min(furthest(batches[number], other) for other in others)
        print(
            f"version {number} ({how}): {sum(b.rollouts for b in batches[number])} rollouts, α counted {live:.4f} in "
            f"{live_rounds} rounds, replayed {again:.4f} in {sums['rounds']:.0f}; log p off by {own:.1e} with its own "
            f"weights, by {nearest:.2f} with the version's before or after"
        )
        assert own < _TOLERANCE < 0.05 < nearest, how
        # Two samples of one α: what a request adds after it was cut is counted, and no rollout.
        assert math.isclose(again, live, rel_tol=3 * math.sqrt(0.45 / sums["rounds"])), how
        if number:
            assert torch.equal(_head(service, number), model.get_output_embeddings().weight), how
    assert "failures" not in server.state()["tap"]


def _batches(service: RunningService) -> dict[int, list[RolloutBatch]]:
    """What was sent of the groups, by policy version."""
    found: dict[int, list[RolloutBatch]] = {}
    wanted = {wire.prompt_hash(prompt) for prompt in GROUPS}
    for path in service.spooled():
        if RUN in path.parts and path.suffix == ".safetensors":
            batch = load_batch(path)
            ours = [i for i, prompt in enumerate(prompt_hashes(batch)) if prompt in wanted]
            if ours:
                found.setdefault(batch.policy_version, []).append(batch.select(ours))
    return found


@torch.no_grad()
def furthest(batches: list[RolloutBatch], model: Any) -> float:
    """Largest difference of a logged log-probability from this policy's own."""
    worst = 0.0
    for batch in batches:
        for begin, end in itertools.pairwise(batch.cu_seqlens.tolist()):
            ids, drawn = batch.input_ids[begin:end], batch.loss_mask[begin + 1 : end]
            logits = model(ids[None]).logits[0, :-1] / (batch.temperature or 1.0)
            own = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
            difference = (own - batch.logprobs[begin + 1 : end])[drawn].abs()
            worst = max(worst, float(difference.max()) if len(difference) else 0.0)
    return worst


def _head(service: RunningService, version: int) -> torch.Tensor:
    """The newest head up to this version: one that has not moved is not sent again."""
    paths = (service.layout.head(RUN, number) for number in range(version, -1, -1))
    head: torch.Tensor = load_file(next(path for path in paths if path.exists()))["lm_head"]
    return head.float()
