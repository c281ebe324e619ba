"""A trainer's own `vllm.LLM` with nothing but environment variables: it follows the service by itself."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.engine.agent_fixtures import eventually
from helpers.engine.engine_fixtures import EOS_ID, base_policy, elicit_prompts
from helpers.engine.engine_forks import Fork, written_to
from helpers.engine.server_load import publish
from helpers.service.service_fixtures import RunningService
from helpers.service.storage_fixtures import Store
from redis import Redis
from safetensors.torch import load_file
from vllm_server.vllm_process import AHEAD, DEPTH, FORKED, PYTHON, cpu_environment, forks_for, plugins

from drafter.model.eagle3 import Eagle3Drafter
from examples.policy import BASE_POLICY
from rl_hooks import wire
from service.monitor.records import AcceptanceRecord

#: The last four share four blocks of vLLM's prefix cache (32 tokens each), of which vLLM reads three: the drafter needs
#: the states of the last one.
_PROMPTS = elicit_prompts(20, seed=3) + [[2 + i % 90 for i in range(140)] + [n] for n in (5, 6, 7, 8)]


class LlmProcess:
    """`llm_script.py` in vLLM's environment; its commands are this object's methods.

    `forked`: it starts in a third of the time (`engine_forks.py`), in a session of its own. It may then be so much
    faster than the service here that a swap which is to come while it answers comes too late.
    """

    def __init__(
        self, scratch: Path, drafter: Path, *, ranks: int = 1, forked: bool = False, **environment: str
    ) -> None:
        self.answers, self.log, self.number = scratch / "answers", scratch / "llm.log", 0
        self.answers.mkdir(parents=True)
        script = str(Path(__file__).parent / "llm_script.py")
        arguments = [str(self.answers), str(BASE_POLICY), str(drafter), str(DEPTH), str(ranks)]
        environment |= FORKED if forked else {}
        variables = cpu_environment(plugins(scratch / "plugin")) | environment
        self._stdin = written_to(scratch / "stdin")
        self.process: subprocess.Popen[bytes] | Fork
        if forked:
            self.process = forks_for(environment).fork(script, arguments, variables, self.log, scratch / "stdin")
        else:
            with self.log.open("wb") as log, (scratch / "stdin").open("rb") as stdin:
                argv = [str(PYTHON), script, *arguments]
                self.process = subprocess.Popen(argv, env=variables, stdin=stdin, stdout=log, stderr=subprocess.STDOUT)
        self._answer(0)

    def ask(self, command: str, *arguments: Any) -> Any:
        """Run one command to its end."""
        self.number += 1
        self._stdin.write(json.dumps([command, *arguments]) + "\n")
        self._stdin.flush()
        return self._answer(self.number)

    def generate(self, prompts: list[list[int]] = _PROMPTS) -> list[list[int]]:
        """Greedy answers."""
        answers: list[list[int]] = self.ask("generate", prompts, 0.0, 40, EOS_ID)
        return answers

    def state(self) -> dict[str, Any]:
        """Of the drafter in the worker."""
        state: dict[str, Any] = self.ask("rpc", "draftalign_state")
        return state

    def rounds(self) -> tuple[int, int, list[int]]:
        """Rounds, accepted drafts, accepted drafts by position, as vLLM has counted them since its start."""
        metrics = self.ask("metrics")
        names = ("num_drafts", "num_accepted_tokens", "num_accepted_tokens_per_pos")
        rounds, accepted, by_position = (metrics[f"vllm:spec_decode_{name}"] for name in names)
        return int(rounds), int(accepted), [int(n) for n in by_position]

    def text(self) -> str:
        """What it printed."""
        return self.log.read_text(errors="replace")

    def _answer(self, number: int) -> Any:
        path, deadline = self.answers / str(number), time.monotonic() + 420
        while not path.exists():
            assert self.process.poll() is None, self.text()[-6000:]
            assert time.monotonic() < deadline, self.text()[-6000:]
            time.sleep(0.02)
        return json.loads(path.read_text())

    def stop(self) -> None:
        """Let it end by itself, as a script does."""
        self._stdin.close()
        try:
            self.process.wait(300)
        finally:
            self.process.kill()
            self.process.wait()


@dataclass
class Books:
    """The service's, of an engine whose policy never moves. `unnamed`: its counts before the first swap."""

    store: Store
    unnamed: tuple[int, int, list[int]]

    def complete(self, llm: LlmProcess) -> dict[str, tuple[int, int]]:
        """(rounds, accepted drafts) by drafter, once every round that vLLM has counted is some drafter's."""
        now = llm.rounds()
        wanted = [now[0] - self.unnamed[0], now[1] - self.unnamed[1]]

        def found() -> dict[str, tuple[int, int]] | None:
            records = [one for one in self.store.acceptances() if one.reporter]
            books = {one.drafter_version or "": (one.rounds, one.accepted_tokens or 0) for one in records}
            return books if [sum(counts) for counts in zip(*books.values(), strict=True)] == wanted else None

        books: dict[str, tuple[int, int]] = eventually(found, 30)
        return books


@pytest.fixture
def service(serve: Callable[..., RunningService]) -> RunningService:
    return serve()


@pytest.fixture
def llm(service: RunningService, drafters: Path, tmp_path: Path) -> Iterator[LlmProcess]:
    made = LlmProcess(
        tmp_path / "llm",
        drafters / "random",
        forked=True,
        DRAFTALIGN_URL=service.url,
        DRAFTALIGN_SAMPLE_FRACTION="1.0",
        DRAFTALIGN_TOKENS_PER_MINUTE="10000000",
        DRAFTALIGN_DRAFTER_DIR=str(tmp_path / "cache"),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    try:
        yield made
    finally:
        made.stop()


def moved(path: Path, seed: int, *, head: bool) -> Path:
    """The shipped policy after a step of RL, as files; `head`: its head has moved, too."""
    model = copy.deepcopy(base_policy()[0])
    own = model.get_output_embeddings().weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if head or parameter is not own:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * parameter.std() * 0.03)
    model.save_pretrained(path)
    return path


def swap_under_way(
    service: RunningService, llm: LlmProcess, texts: list[list[int]], publish_one: Callable[[], str], books: Books
) -> tuple[str, float, float]:
    """Publish a drafter while answers run, which must stay `texts`: its version, and α of these answers before it and
    from it on.
    """
    before, sent, start = llm.state()["version"], _rollouts(service).total(), books.complete(llm)
    passes = 8
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(llm.generate, _PROMPTS * passes)
        # More than one round of them was answered: one round of answers of before may come as well.
        eventually(lambda: _rollouts(service).total() > sent + 2 * len(_PROMPTS) or asked.done(), 120)
        version = publish_one()
        assert not asked.done(), "all have ended before it was published"
        assert asked.result() == texts * passes
    assert llm.state()["version"] == version
    end = books.complete(llm)
    parts = [(end[one][0] - had[0], end[one][1] - had[1]) for one, had in ((before, start[before]), (version, (0, 0)))]
    print("(rounds, accepted drafts) before and after a swap under way", parts)
    assert min(rounds for rounds, _ in parts) > 0
    older, newer = (1 + accepted / rounds for rounds, accepted in parts)
    return version, older, newer


def test_an_llm_with_variables_alone_follows_the_service(
    service: RunningService, llm: LlmProcess, redis_url: str, drafters: Path, trained: Eagle3Drafter, tmp_path: Path
) -> None:
    texts = llm.generate()
    before = llm.rounds()
    record = eventually(lambda: _ok(service, "/runs/default"), 30)
    assert (record["policy_version"], record["latest_head"]) == (0, None)

    # --- a drafter that is published between two calls serves the second from its first step
    version = publish(service, drafters / "trained", trained)
    eventually(lambda: llm.ask("rpc", "draftalign_staged").get("version") == version, 30)
    eventually(lambda: llm.ask("rpc", "draftalign_staged")["done"], 30)
    assert llm.state()["version"] is None
    assert llm.generate() == texts
    assert llm.state()["version"] == version
    after = llm.rounds()
    alphas = [1 + (b - a) / (d - c) for (c, a, _), (d, b, _) in (((0, 0, []), before), (before, after))]
    print("α", alphas)
    assert alphas[0] < 1.5 < 2.0 < alphas[1]

    # --- a policy that vLLM was told the number of; its head has moved, and goes out before its rollouts
    number = 5 if llm.ask("reload", str(moved(tmp_path / "p5", 5, head=True)), "5") else 1  # told, or counted
    llm.generate()
    named = llm.rounds()
    eventually(lambda: _ok(service, "/runs/default")["latest_head"] == number, 30)
    head = load_file(service.layout.head("default", number))["lm_head"].float()
    own = load_file(tmp_path / "p5" / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(head, own)

    # --- one that nobody named, whose head is the same: counted, no head
    llm.ask("reload", str(moved(tmp_path / "p6", 5, head=True)), None)
    llm.generate()
    counted = llm.rounds()
    assert _ok(service, "/runs/default")["latest_head"] == number

    # --- all that a deep sleep takes is put back before the next step
    assert llm.ask("rpc", "tests_wipe_drafter")
    assert not llm.state()["loaded"]
    llm.generate()
    healed = llm.rounds()
    assert llm.state()["loaded"]
    restored = re.findall(rf"restored drafter {version} in ([0-9.]+) s", llm.text())
    size = sum(tensor.numel() for tensor in load_file(drafters / "trained" / "model.safetensors").values())
    print(f"a drafter of {size} parameters was put back in {restored} s")
    assert len(restored) == 1
    rounds, accepted = healed[0] - counted[0], healed[1] - counted[1]
    assert 1 + accepted / rounds == pytest.approx(1 + (counted[1] - named[1]) / (counted[0] - named[0]), rel=0.01)

    # --- every request was tapped whole, and every round is in the service's books
    expected = {0: 2 * len(_PROMPTS), number: len(_PROMPTS), number + 1: 2 * len(_PROMPTS)}
    eventually(lambda: _rollouts(service) == Counter(expected), 60)
    assert _first_positions(service) == {0}
    with Redis.from_url(redis_url) as client:
        store = Store(client, "default")
        spans = {0: (before, after), number: (after, named), number + 1: (named, healed)}
        for policy, (start, end) in spans.items():
            wanted = (end[0] - start[0], end[1] - start[1], tuple(b - a for a, b in zip(start[2], end[2], strict=True)))
            eventually(lambda p=policy, w=wanted: _booked(store, version, p) == w, 30)  # type: ignore[misc]
        known = {wire.prompt_hash(prompt)[: wire.COUNTED_DIGITS] for prompt in _PROMPTS}
        for record in store.acceptances():
            by_prompt = record.by_prompt or {}
            assert {*by_prompt} <= known
            sums = [sum(counts) for counts in zip(*by_prompt.values(), strict=True)] or [0, 0]
            assert sums == [record.emitted_tokens, record.rounds], "each round is its prompt's"

    # --- and the service supposes what vLLM drafts, which nobody has told it
    found = _ok(service, "/runs/default")
    assert (found["depth"], found["drafting"]) == (DEPTH, "greedy")

    # --- the service goes away: the trainer's run goes on, and its log gets a line
    service.stop()
    assert len(llm.generate()) == len(_PROMPTS)
    away = "does not answer (All connection attempts failed); the engine goes on"
    lines = [f"draftalign: service {service.url}{what} {away}" for what in ("", ", reports")]
    eventually(lambda: all(line in llm.text() for line in lines), 30)  # counts are reported every five seconds
    assert len(llm.generate()) == len(_PROMPTS)
    llm.stop()
    assert llm.process.returncode == 0, llm.text()[-3000:]
    assert [llm.text().count(line) for line in lines] == [1, 1]


def test_an_llm_whose_engine_core_is_a_process_of_its_own_is_attached_in_code(
    service: RunningService, redis_url: str, drafters: Path, trained: Eagle3Drafter, tmp_path: Path
) -> None:
    """Its steps are scheduled ahead, as on GPUs: a swap then comes while one is scheduled, and its drafts are not."""
    llm = LlmProcess(tmp_path / "llm", drafters / "trained", XDG_CACHE_HOME=str(tmp_path / "cache"), **AHEAD)
    try:
        assert llm.ask("rpc", "tests_schedules_ahead")
        assert llm.ask("attach", "no address") != ""
        assert llm.ask("attach", service.url) == ""
        assert "follows a service already" in llm.ask("attach", service.url)
        texts = llm.generate()
        first = llm.rounds()
        assert 1 + first[1] / first[0] > 2.0
        eventually(lambda: _ok(service, "/runs/attached"), 30)
        version = publish(service, drafters / "random", trained, "attached")
        eventually(lambda: llm.ask("rpc", "draftalign_staged").get("version") == version, 30)
        eventually(lambda: llm.ask("rpc", "draftalign_staged")["done"], 30)
        assert llm.state()["version"] is None, "an engine that is idle swaps nothing"
        assert llm.generate() == texts
        after = llm.rounds()
        assert llm.state()["version"] == version
        with Redis.from_url(redis_url) as client:
            store = Store(client, "attached")
            counted = (after[0] - first[0], after[1] - first[1])
            booked = eventually(lambda: (b := _booked(store, version, 0)) and b[:2] == counted and b, 30)
            random = 1 + booked[1] / booked[0]
            assert random < 1.5
            eventually(lambda: _rollouts(service) == Counter({0: 2 * len(_PROMPTS)}), 60)

            # --- one that is published while requests run: each round is its drafter's, and no text changes
            books = Books(store, first)
            good = drafters / "trained"
            _, older, newer = swap_under_way(
                service, llm, texts, lambda: publish(service, good, trained, "attached"), books
            )
            assert older == pytest.approx(random, abs=0.002)
            assert newer > 2.0
    finally:
        llm.stop()
    assert llm.process.returncode == 0, llm.text()[-3000:]


def _ok(service: RunningService, path: str) -> Any:
    answer = service.client.get(path)
    return answer.json() if answer.status_code == 200 else None


def _headers(service: RunningService) -> list[wire.RolloutHeader]:
    files = [path for path in service.spooled() if path.suffix == ".safetensors"]
    return [wire.check_rollout_header(wire.parse_header(path.read_bytes())) for path in files]


def _rollouts(service: RunningService) -> Counter[int]:
    counts: Counter[int] = Counter()
    for header in _headers(service):
        counts[header.policy_version] += header.rollouts
    return counts


def _first_positions(service: RunningService) -> set[int]:
    return {n for header in _headers(service) for n in json.loads(header.header.metadata["first_positions"])}


def _booked(store: Store, drafter: str, policy: int) -> tuple[int, int, tuple[int, ...]] | None:
    found: list[AcceptanceRecord] = [
        r for r in store.acceptances() if (r.drafter_version, r.policy_version) == (drafter, policy) and r.reporter
    ]
    if len(found) != 1:
        return None
    one = found[0]
    depth = one.accepted_per_position + (0,) * (DEPTH - len(one.accepted_per_position))
    return one.rounds, one.accepted_tokens or 0, depth
