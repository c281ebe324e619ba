"""The tap in SGLang, driven as SGLang's scheduler drives it; on a real one: tests/sglang_server."""

from __future__ import annotations

import dataclasses
import gc
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.engine.tap_fixtures import HEAD, HIDDEN, STOP, VOCAB, Script, states
from torch import nn

from rl_hooks import wire
from rl_hooks.engines.ranks import LayerRanks
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.sglang import tap as module
from rl_hooks.engines.sglang.split import SplitPolicy
from rl_hooks.engines.sglang.steps import is_answered, request_of, sampling_of, unlike_policy
from rl_hooks.engines.sglang.tap import SGLangTap
from rl_hooks.engines.sglang.updates import PolicyUpdates
from rl_hooks.engines.tap.collected import Collected, rollout_file
from rl_hooks.engines.tap.feature_tap import FeatureTap
from rl_hooks.engines.tap.served import Matrix, ServedPolicy

DEPTH = 3
SETTINGS = ServiceSettings("http://127.0.0.1:9", sample_fraction=1.0)


@dataclasses.dataclass
class Params:
    """SGLang's sampling parameters, of which some stand for all."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 1 << 30
    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    stop_token_ids: set[int] | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    logit_bias: dict[str, float] | None = None
    custom_params: dict[str, Any] | None = None
    of_a_later_release: int = 0

    @property
    def __struct_fields__(self) -> tuple[str, ...]:
        return tuple(field.name for field in dataclasses.fields(self))


class Req:
    """SGLang's request, as far as the tap reads it."""

    def __init__(self, rid: str, prompt: list[int], params: Params | None = None) -> None:
        self.rid, self.origin_input_ids, self.sampling_params = rid, prompt, params or Params()
        self.extra_key: str | None = None
        self.eos_token_ids = {STOP}
        self.extend_batch_idx, self.retracted_stain = 1, False
        self.multimodal_inputs = self.lora_id = self.session = None
        self.output_ids_through_stop: list[int] = []
        self.reason: str | None = None

    def finished(self) -> bool:
        return self.reason is not None


class Mode:
    def __init__(self, name: str) -> None:
        self.name = name

    def is_extend(self) -> bool:
        return self.name == "extend"

    def is_idle(self) -> bool:
        return self.name == "idle"


def served() -> ServedPolicy:
    config = SimpleNamespace(vocab_size=VOCAB)
    matrix = Matrix.of(HEAD.weight, VOCAB)
    return ServedPolicy.named(config, nn.Linear(1, 1))(config, matrix, matrix)


class Engine:
    """SGLang's scheduler around a tap: texts are fixed, drafts hold by chance."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, split: bool = False) -> None:
        self.delivered: list[Collected] = []
        self.model = nn.Linear(4, 4)
        self.version: str | None = "default"
        self.hooks = SGLangTap(SETTINGS)
        self.target = SimpleNamespace(model_runner=SimpleNamespace(model=self.model))
        self.hooks._worker, self.hooks._draws = SimpleNamespace(target_worker=self.target), True
        self.updates = self.hooks._updates = PolicyUpdates(self.model, lambda: self.version)
        self.tap = FeatureTap(
            HEAD,
            self.delivered.append,
            fraction=1.0,
            tokens_per_minute=10**6,
            weights=self.updates.weights,
            policy_version=self.updates.number(0),
            answers_only=split,
        )
        if split:
            self.hooks._split = SplitPolicy(served, LayerRanks(SimpleNamespace(world_size=1)))
        self.updates.changing, self.updates.leaving = self.tap.cut, self.tap.flush
        self.turned: list[tuple[int | None, bool]] = []
        facts: dict[str, Any] = {"settled": self.settled, "counts": dict, "close": lambda _: None}
        self.run = SimpleNamespace(tap=self.tap, refused=False, **facts)
        setattr(self.hooks, "run", self.run)  # noqa: B010 - a stand-in
        self.draw = random.Random(0)
        monkeypatch.setattr(module, "sampling_position", lambda *_: 0.0)

    def settled(self, version: int | None, *, tainted: bool, again: bool) -> None:
        assert again
        if version is None or version == self.tap.policy_version:
            return
        self.turned.append((version, tainted))
        if not tainted:
            self.tap.cut()
        self.tap.turn(version, HEAD, lambda: None)

    def prefill(self, *parts: tuple[Req, Script], chunk: int = 100, running: Sequence[Req] = ()) -> None:
        """One chunk of each of these prompts. `running`: those that decode beside the others."""
        begins = [script.computed for _, script in parts]
        rows = [script.rows(self.draw, chunk, DEPTH) for _, script in parts]
        tokens = [token for row, _, _ in rows for token in row]
        positions = [begin + i for begin, (row, _, _) in zip(begins, rows, strict=True) for i in range(len(row))]
        batch = SimpleNamespace(
            reqs=[request for request, _ in parts],
            forward_mode=Mode("extend"),
            decoding_reqs=running or None,
            prefix_lens=begins,
            extend_lens=[len(row) for row, _, _ in rows],
            input_ids=torch.tensor(tokens),
        )
        self.hooks.before_step(None, batch)
        result = self.output(tokens, positions)
        ends = torch.tensor(batch.extend_lens).cumsum(0) - 1
        result.logits_output.next_token_logits = logits = result.logits_output.next_token_logits[ends]
        self.hooks.samples(self.target.model_runner, result.logits_output)
        logits.copy_(logits.softmax(-1))  # as SGLang's sampler does, in place
        result.next_token_ids = torch.tensor([sampled for _, _, sampled in rows])
        self.hooks.forwarded(result, self.target, batch)
        self.hooks.processed(None, None, batch, result)
        for request, _ in parts:
            request.extend_batch_idx += 1

    def round(self, *parts: tuple[Req, Script]) -> Any:
        """A round of each; what SGLang's own call returned."""
        begins = [script.computed for _, script in parts]
        rows = [script.rows(self.draw, 1, DEPTH) for _, script in parts]
        tokens = [token for row, _, _ in rows for token in row]
        positions = [begin + i for begin in begins for i in range(DEPTH + 1)]
        predict = [row[1 : DEPTH + 1 - bad] + [sampled] + [0] * bad for row, bad, sampled in rows]
        chains = SimpleNamespace(
            draft_token_num=DEPTH + 1, draft_token=torch.tensor(tokens), positions=torch.tensor(positions)
        )
        batch = SimpleNamespace(
            reqs=[request for request, _ in parts], forward_mode=Mode("decode"), spec_info=chains, prefix_lens=None
        )
        self.hooks.before_step(None, batch)
        result = self.output(tokens, positions)
        result.accept_lens = torch.tensor([DEPTH + 1 - bad for _, bad, _ in rows], dtype=torch.int32)
        result.next_token_ids = torch.tensor(predict, dtype=torch.int32).flatten()
        return self.hooks.verified(lambda *_: result, None, batch)

    @staticmethod
    def output(tokens: list[int], positions: list[int]) -> Any:
        last = states(tokens, positions)
        output = SimpleNamespace(last_hidden_states=last, hidden_states=torch.cat([last, -last], dim=-1))
        output.next_token_logits = last @ HEAD.weight.T
        return SimpleNamespace(logits_output=output)

    def answer(self, request: Req, script: Script, emitted: int | None = None) -> None:
        """Decode until its end."""
        while not script.done:
            self.round((request, script))
        request.reason = "stop"
        text = script.tokens[len(request.origin_input_ids) :]  # of a preempted request, too
        request.output_ids_through_stop = text[:emitted]
        self.hooks.processed(None, None)

    def settle(self) -> list[Collected]:
        """What was delivered, once nothing runs."""
        self.hooks.idle()
        self.tap._sender.close(10)
        return self.delivered


def texts(delivered: list[Collected]) -> list[list[int]]:
    return [one.input_ids.tolist() for one in delivered]


def made(name: str = "a", prompt: int = 5, text: int = 12) -> tuple[Req, Script]:
    draw = random.Random(name)
    tokens = [draw.randrange(2, 30) for _ in range(prompt + text)]
    return Req(name, tokens[:prompt]), Script(name, tokens[:prompt], tokens[prompt:])


def test_prefills_in_chunks_and_rounds_come_out_as_the_text_with_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    (a, first), (b, second) = made("a", 7), made("b", 3)
    engine.prefill((a, first), chunk=4)
    engine.prefill((a, first), (b, second), chunk=4)
    while not (first.done or second.done):
        engine.round((a, first), (b, second))
    for request, script in ((a, first), (b, second)):
        engine.answer(request, script)
    found = engine.settle()
    assert sorted(texts(found)) == sorted([first.tokens, second.tokens])
    for one in found:
        expected = states(one.input_ids.tolist(), range(len(one.input_ids)))
        assert torch.equal(one.last[:-1], expected[:-1])
        assert torch.equal(one.aux[:-1], torch.cat([expected, -expected], dim=-1)[:-1])
        assert one.last.shape[1] == HIDDEN


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_with_a_split_head_scores_are_those_of_the_joined_logits(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    engine = Engine(monkeypatch, split=True)
    (a, first), (b, second) = made("a", 7), made("b", 3)
    a.sampling_params.temperature = temperature
    engine.prefill((a, first), chunk=4)
    engine.prefill((a, first), (b, second), chunk=4)
    while not (first.done or second.done):
        engine.round((a, first), (b, second))
    first.computed -= 3  # preempted: it computes them again, with no logits but of the last
    script = Script("a", first.tokens[: first.computed], first.tokens[first.computed :])
    a.retracted_stain, script.computed = True, 0
    engine.prefill((a, script))
    engine.answer(a, script)
    engine.answer(b, second)
    found = {len(one.request.prompt_ids): one for one in engine.settle()}
    assert {7: first.tokens, 3: second.tokens} == {n: one.input_ids.tolist() for n, one in found.items()}
    for prompt, one in found.items():
        T, divisor = len(one.input_ids), temperature if prompt == 7 else 1.0
        logits = states(one.input_ids.tolist(), range(T)) @ HEAD.weight.T / divisor
        expected = logits.log_softmax(-1)[:-1].gather(-1, torch.from_numpy(one.input_ids[1:]).long()[:, None])[:, 0]
        assert torch.allclose(torch.from_numpy(one.logprobs[prompt:]), expected[prompt - 1 :], atol=1e-5)
        assert torch.allclose(one.logsumexp[prompt - 1 : -1], logits.logsumexp(-1)[prompt - 1 : -1], atol=1e-5)
        assert bool(one.logsumexp[: prompt - 1].isnan().all()), "SGLang has no logits of these"
        kinds: tuple[tuple[wire.LastRows, bool], ...] = (("predicting", True), ("all", False))
        for rows, sent in kinds:
            parts, _ = rollout_file([one], run="r", target_fingerprint="f" * 32, aux_layers=(1, 2), last_rows=rows)
            assert (b"logsumexp" in b"".join(map(bytes, parts))) == sent, "the worker computes what was not sent"


def test_ranks_gather_a_head_that_has_moved_and_the_embedding_at_the_first_update_only() -> None:
    embedding, head = Matrix.of(torch.randn(VOCAB, 4), VOCAB), Matrix.of(torch.randn(VOCAB, 4), VOCAB)
    config = SimpleNamespace(vocab_size=VOCAB)
    own = ServedPolicy.named(config, nn.Linear(1, 1))(config, embedding, head)
    split = SplitPolicy(lambda: own, LayerRanks(SimpleNamespace(world_size=1)))
    gathered = [split.whole]
    for moves in (False, False, True):  # the first update gathers both, moved or not
        split.renew()
        assert split.whole is gathered[-1], "nothing was written"
        if moves:
            head.weight.mul_(1.1)
        split.announce()
        split.renew()
        gathered.append(split.whole)
    _, first, still, moved = gathered
    assert first is not None
    assert moved is not None
    assert first is not gathered[0]
    assert still is first, "no slice has moved"
    assert moved.embedding is first.embedding
    assert moved.head is not first.head
    assert torch.equal(moved.head.weight, head.weight)


class SaidRanks(LayerRanks):
    """What one rank of two says to the other, which agrees to all."""

    def __init__(self) -> None:
        self.size, self.group, self.said = 2, None, list[bool]()

    def all_agree(self, *, ok: bool) -> bool:
        self.said.append(ok)
        return ok


def test_a_rank_that_cannot_read_its_slice_says_so_to_those_that_wait_for_it() -> None:
    ranks, failing = SaidRanks(), False

    def own() -> ServedPolicy:
        if failing:
            raise RuntimeError("no memory")
        return served()

    split = SplitPolicy(own, ranks)
    ranks.said.clear()
    failing = True
    split.announce()
    with pytest.raises(RuntimeError, match="no memory"):
        split.renew()
    assert ranks.said == [False], "the others' first call"
    ranks.said.clear()
    with pytest.raises(RuntimeError, match="no memory"):
        SplitPolicy(own, ranks)
    assert ranks.said == [False]


def test_what_stands_behind_the_answers_end_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop string is found in text, and where schedules overlap one round more has run by then."""
    engine = Engine(monkeypatch)
    request, script = made()
    engine.prefill((request, script))
    engine.answer(request, script, emitted=6)
    del request  # nor does SGLang keep it until the next step
    gc.collect()
    assert texts(engine.settle()) == [script.tokens[:11]]


def test_a_token_that_was_drawn_behind_a_chunk_and_discarded_scores_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preempted request computes its answer again in chunks. SGLang draws a token behind each, and uses the last."""
    engine = Engine(monkeypatch)
    request, script = made()
    engine.prefill((request, script))
    while script.computed < script.prompt + 7:
        engine.round((request, script))
    again = Script("a", script.tokens[: script.computed + 1], script.tokens[script.computed + 1 :])
    request.retracted_stain = True
    while again.computed < again.prompt:
        engine.prefill((request, again), chunk=4)
    engine.answer(request, again)
    (one,) = engine.settle()
    assert one.input_ids.tolist() == script.tokens
    scores = (states(script.tokens, range(len(script.tokens))) @ HEAD.weight.T).log_softmax(-1)
    expected = scores[:-1].gather(-1, torch.tensor(script.tokens[1:])[:, None])[:, 0]
    assert torch.allclose(torch.from_numpy(one.logprobs[script.prompt :]), expected[script.prompt - 1 :], atol=1e-5)


def test_a_request_that_begins_behind_cached_tokens_or_goes_on_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    cached, on, fresh = made("cached"), made("preempted"), made("fresh")
    cached[1].computed = 2
    on[0].retracted_stain = True
    engine.prefill(cached, on, fresh)
    for part in (cached, on, fresh):
        engine.answer(*part)
    assert texts(engine.settle()) == [fresh[1].tokens]
    assert engine.tap.tally["skipped_cached"] == 1


def test_a_request_that_was_aborted_while_it_waited_frees_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang takes it off its queue, and does not say that it has finished."""
    engine = Engine(monkeypatch)
    gone, script = made("gone")
    engine.prefill((gone, script))
    assert engine.tap.tally["rows"] > 0
    del gone
    gc.collect()
    other = made("other")
    engine.prefill(other)
    engine.answer(*other)
    found = engine.settle()
    assert other[1].tokens in texts(found)
    assert engine.tap.tally["rows"] == 0
    assert not engine.hooks._requests


def test_an_update_cuts_and_a_session_is_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, updater = Engine(monkeypatch), SimpleNamespace(_session=None)
    request, script = made()
    engine.prefill((request, script))
    engine.round((request, script))
    drawn = script.computed + 1
    engine.hooks.update(updater, SimpleNamespace(selector="draft"))
    assert engine.tap.policy_version == 0, "a drafter's update is none of the policy's"
    updater._session = SimpleNamespace(selector="target")
    for _ in range(3):
        engine.hooks.update(updater, SimpleNamespace(selector="target"))
    engine.round((request, script))
    assert engine.turned == [], "a step between two calls of one session"
    updater._session = None
    engine.answer(request, script)
    assert engine.turned == [(1, False)]
    newer = made("newer")
    engine.prefill(newer)
    engine.answer(*newer)
    found = engine.settle()
    assert texts(found) == [script.tokens[:drawn], newer[1].tokens]
    assert [one.policy_version for one in found] == [0, 1]


def test_a_whole_number_is_the_version_and_unannounced_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.version = "12"
    engine.hooks.named()
    engine.prefill(made("a"))
    assert engine.turned == [(12, False)]
    with torch.no_grad():
        engine.model.weight.mul_(2.0)
    assert not engine.updates.weights.look()()
    engine.updates.notice()
    engine.prefill(made("b"))
    assert engine.turned[1:] == [(13, True)]


def starting(
    monkeypatch: pytest.MonkeyPatch, newest: int | None, load_format: str = "auto"
) -> tuple[Engine, list[int]]:
    """A server to which the service has answered, and the versions under which it begins to collect."""
    engine, begun = Engine(monkeypatch), list[int]()
    run, engine.hooks.run, engine.updates._versions = engine.hooks.run, None, None
    engine.hooks._worker.server_args = SimpleNamespace(load_format=load_format)
    engine.hooks.newest = (newest,)

    def served_run(version: int, **_: Any) -> Any:
        begun.append(version)
        return run

    monkeypatch.setattr(engine.hooks, "_served_run", served_run)
    return engine, begun


DONE, REJECTED = SimpleNamespace(success=True), SimpleNamespace(success=False)


def test_a_server_that_joins_a_run_takes_neither_a_swap_nor_a_refused_update_for_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, begun = starting(monkeypatch, 7)
    updater, drafters, policys = (
        SimpleNamespace(_session=None),
        *(SimpleNamespace(selector=selector) for selector in ("draft", "target")),
    )
    for request, result in ((drafters, DONE), (policys, REJECTED)):
        engine.hooks.update(updater, request)
        engine.hooks.named()  # SGLang's call comes after a swap, too, with no version
        engine.hooks.updated(result, updater, request)
        engine.prefill(made())
        assert begun == []
    engine.hooks.update(updater, policys)
    engine.hooks.updated(DONE, updater, policys)
    engine.prefill(made())
    assert begun == [8]


def test_no_collecting_begins_while_a_session_writes_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, begun = starting(monkeypatch, None)
    request, updater = SimpleNamespace(selector="all"), SimpleNamespace(_session=SimpleNamespace(selector="all"))
    engine.hooks.update(updater, request)
    engine.prefill(made())
    assert begun == []
    updater._session = None
    engine.prefill(made())
    assert begun == [0]


def test_released_weights_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, updater = Engine(monkeypatch), SimpleNamespace(offload_tags=set[str](), _session=None)
    request, script = made()
    engine.prefill((request, script))
    engine.answer(request, script)
    engine.hooks.release(updater, SimpleNamespace(tags=["weights"]))
    assert not engine.tap._unscored.parts, "rows wait to be scored by a head that is gone"
    monkeypatch.setattr(engine.updates.weights, "look", lambda: pytest.fail("weights were read"))
    engine.hooks.named()
    engine.hooks.idle()
    assert not engine.updates.due
    monkeypatch.undo()
    engine.hooks.resumed(None, updater)
    assert texts(engine.settle()) == [script.tokens]


@pytest.mark.parametrize("hook", ["before_step", "forwarded", "verified", "update", "idle"])
def test_a_fault_of_ours_ends_the_tap_and_no_call_of_sglangs(
    hook: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(monkeypatch)
    request, script = made()
    engine.prefill((request, script))
    nonsense: Any = SimpleNamespace(spec_info=None)  # no attribute that the tap reads
    calls: dict[str, Callable[[], Any]] = {
        "before_step": lambda: engine.hooks.before_step(None, nonsense),
        "forwarded": lambda: engine.hooks.forwarded(nonsense, engine.target, nonsense),
        "verified": lambda: engine.hooks.verified(lambda *_: "verified", None, nonsense),
        "update": lambda: engine.hooks.update(nonsense, SimpleNamespace(selector="all")),
        "idle": lambda: engine.hooks.idle(),  # noqa: PLW0108 - one of several
    }
    if hook in ("update", "idle"):
        monkeypatch.setattr(type(request), "finished", lambda _: 1 / 0)
    answer = calls[hook]()
    assert answer == ("verified" if hook == "verified" else None)
    assert engine.hooks.ended
    assert caplog.text.count("no features are captured any more") == 1
    assert engine.tap.tally["rows"] == 0
    for call in calls.values():
        call()
    assert caplog.text.count("no features are captured any more") == 1


def test_a_run_that_is_another_policys_ends_the_tap(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(monkeypatch)
    engine.prefill(made())
    engine.run.refused = True
    engine.prefill(made("b"))
    assert engine.hooks.ended
    assert engine.tap.tally["rows"] == 0
    assert "the service has refused this policy" in caplog.text


def test_no_step_waits_for_a_service_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch)
    engine.hooks.run = None
    engine.prefill(made())
    assert engine.hooks.run is None
    assert not engine.hooks.ended
    assert not engine.hooks.has_begun


def test_only_requests_of_the_policys_own_distribution_are_marked_and_collected() -> None:
    hooks = SGLangTap(SETTINGS)
    hooks._worker, hooks._draws = object(), True
    others: tuple[dict[str, Any], ...] = (
        *({"min_p": 0.1}, {"logit_bias": {"5": 1.0}}, {"custom_params": {"x": 1}}, {"of_a_later_release": 1}),
        *({"max_new_tokens": 0}, {"top_p": 0.9, "top_k": 5}, {"min_new_tokens": 2}, {"temperature": 101.0}),
    )
    fine: tuple[dict[str, Any], ...] = (
        *({}, {"custom_params": {}}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.3}, {"min_new_tokens": 1}),
    )
    for changes in (*fine, *others):
        request = Req("r", [1, 2], Params(**changes))
        hooks.admitted(None, request)
        assert (request.extra_key == "draftalign-r") == (changes not in others), changes
    for name in ("multimodal_inputs", "lora_id", "session"):
        request = Req("r", [1, 2])
        setattr(request, name, object())
        assert unlike_policy(request, draws=True) == name
    assert not is_answered(Req("HEALTH_CHECK_1", [1]))
    # A server that verifies greedily whatever was asked for draws nothing.
    assert "temperature" in unlike_policy(Req("r", [1]), draws=False)
    assert unlike_policy(Req("r", [1], Params(top_k=1)), draws=False) == ""
    assert sampling_of(Params(top_k=1)).temperature == 0.0
    assert (sampling_of(Params()).top_k, sampling_of(Params(top_k=5)).top_k) == (0, 5)
    assert request_of(Req("r", [1], Params(stop_token_ids={9}))).stop_ids == {STOP, 9}
    assert request_of(Req("r", [1], Params(stop_token_ids={9}, ignore_eos=True))).stop_ids == frozenset()


def test_what_is_left_out_is_counted_and_named_once_and_the_server_tells_the_counts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(monkeypatch)
    monkeypatch.setattr(engine.run, "counts", engine.tap.tally.counts)
    odd: tuple[dict[str, Any], ...] = ({"min_p": 0.1}, {"min_p": 0.2}, {"top_p": 0.9, "top_k": 5})
    for changes in (*odd, {"max_new_tokens": 0}):  # the last one has no answer: nothing is left out
        request, script = made(str(changes), prompt=7)
        request.sampling_params = Params(**changes)
        engine.prefill((request, script), chunk=4)
        engine.prefill((request, script), chunk=4)
        request.extend_batch_idx = 1  # as after a prompt of one chunk
        engine.prefill((request, script), running=[request])
    engine.prefill(made("long", prompt=8193), chunk=9000)
    answer = SimpleNamespace(internal_state={})
    engine.hooks.described(answer)
    counts = answer.internal_state["draftalign_tap"]
    assert (counts["skipped_distribution"], counts["skipped_budget"]) == (3, 1)
    assert caplog.text.count("requests with min_p are not sent") == 1
    assert caplog.text.count("requests with top_p together with top_k are not sent") == 1
    engine.hooks.ended = True
    again = SimpleNamespace(internal_state={})
    engine.hooks.described(again)
    assert again == answer


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"speculative_algorithm": "STANDALONE"}, "only by EAGLE3"),
        ({"pp_size": 2}, "pipeline"),
        ({"dp_size": 2}, "data parallelism"),
        ({"attn_dp_size": 2}, "data parallelism"),
        ({"attn_cp_size": 2}, "context parallelism"),
        ({"startup_weight_load_mode": "overlap"}, "come after the start"),
        ({"disaggregation_mode": "prefill"}, "two servers"),
        ({"topk": 4}, "trees"),
        ({"speculative_accept_threshold_acc": 0.9}, "thresholds"),
    ],
)
def test_a_server_whose_rows_cannot_be_read_says_so_and_goes_on(
    changes: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    facts: dict[str, Any] = {"pp_size": 1, "dp_size": 1, "disaggregation_mode": "null", "topk": 1}
    facts["speculative_algorithm"] = "EAGLE3"
    facts |= {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0} | changes
    worker = SimpleNamespace(topk=facts["topk"], server_args=SimpleNamespace(**facts))
    hooks = SGLangTap(SETTINGS)
    hooks.made(None, worker)
    assert hooks.ended
    assert "no features are captured: not with" in caplog.text
    assert said in caplog.text
    hooks.started()
    request = Req("r", [1])
    hooks.admitted(None, request)
    assert request.extra_key is None
    assert caplog.text.count("no features are captured") == 1


def test_a_server_that_does_not_follow_marks_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """A marked request has no other's prefix cache, and nobody would begin to send."""
    hooks = SGLangTap(SETTINGS, lambda: False)
    hooks._worker, hooks._draws = object(), True
    hooks._split = SplitPolicy(served, LayerRanks(SimpleNamespace(world_size=1)))
    hooks.started()
    request = Req("r", [1, 2])
    hooks.admitted(None, request)
    assert request.extra_key is None
    assert hooks.ended
    assert "this server does not follow the service" in caplog.text


def test_a_server_that_does_not_speculate_says_that_nothing_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    hooks = SGLangTap(SETTINGS)
    hooks.started()
    assert "this server does not speculate with EAGLE-3" in caplog.text
