"""A run's first drafter from the policy's own answers, before RL begins."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.forked import run_fork
from helpers.ports import free_port
from helpers.service.service_fixtures import RunningService
from helpers.trainer.hooks_fixtures import as_float, mapped, receiver, tiny_qwen3
from transformers import AutoTokenizer, GenerationConfig

from drafter.batch import load_batch
from drafter.files.checkpoint import read_drafter
from drafter.policy import Policy, TargetHead
from drafter.replay.replay import replay
from examples import recall
from examples.demo import SERVICE_SETTINGS, child
from examples.policy import load
from rl_hooks.errors import HookError
from rl_hooks.hook import DrafterHook
from rl_hooks.wire import prompt_hash
from service.cli import warmup
from service.cli.drafters.answers import Sampling, Sent, read_prompts, send_rollouts
from service.errors import ConfigurationError

POLICY = Path(recall.TASK.base_policy)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(POLICY)


def test_prompts_are_texts_objects_or_chats(tokenizer: Any, tmp_path: Path) -> None:
    text = recall.sample_prompts(1, 0)[0]
    plain, rows = tmp_path / "a.txt", tmp_path / "a.jsonl"
    plain.write_text(f"{text}\n\n{text}\n")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": text}]
    rows.write_text("\n".join(json.dumps(row) for row in ({"prompt": text}, {"prompt": chat}, {"messages": chat})))
    ids = tokenizer.encode(text)
    assert read_prompts(plain, tokenizer) == [ids, ids]
    assert read_prompts(rows, tokenizer) == [ids, ids, ids]


def test_a_chat_is_put_to_the_policy_as_the_rl_run_puts_it(tokenizer: Any, tmp_path: Path) -> None:
    """The answers of a file for SFT are not asked; tools and options for the template are passed on."""
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"
        "{{ thinks }}{{ tools[0].name if tools }}"
    )
    file = tmp_path / "a.jsonl"
    user, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    none = {"tools": None, "chat_template_kwargs": None}  # a table's empty cells
    rows = (
        {"messages": [user, answer, user, answer, answer], **none},
        {"prompt": [user], "chat_template_kwargs": {"thinks": "no"}, "tools": [{"name": "look"}]},
    )
    file.write_text("\n".join(map(json.dumps, rows)))

    class Spelled:
        """The real template; a letter is a token, as the small vocabulary has no such words."""

        @staticmethod
        def apply_chat_template(chat: Any, **options: Any) -> list[int]:
            return list(tokenizer.apply_chat_template(chat, **options | {"tokenize": False}).encode())

    def asked(**options: Any) -> list[str]:
        return [bytes(ids).decode() for ids in read_prompts(file, Spelled(), options)]

    first = "<user>q<assistant>a<user>q<assistant>"
    assert asked() == [first, "<user>q<assistant>nolook"]
    assert asked(thinks="yes") == [f"{first}yes", "<user>q<assistant>nolook"]
    assert asked(tools=[{"name": "find"}]) == [f"{first}find", "<user>q<assistant>nolook"]
    text = recall.sample_prompts(1, 0)[0]
    given = warmup._template_kwargs(json.dumps({"chat_template": "{{ said }}", "said": text}))
    assert warmup._load(str(POLICY), "cpu", file, given)[1] == [tokenizer.encode(text)] * 2


def test_what_a_chat_template_or_an_encoding_refuses_is_named_by_its_line(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') if messages[0].role == 'tool' else 'a' }}"
    file = tmp_path / "a.jsonl"
    good, bad = ({"prompt": [{"role": role, "content": "q"}]} for role in ("user", "tool"))
    file.write_text(f"{json.dumps(good)}\r\n{json.dumps(bad)}\r\n")
    with pytest.raises(HookError, match=re.escape("a.jsonl, line 2: roles must alternate")):
        read_prompts(file, tokenizer)
    text = recall.sample_prompts(1, 0)[0]
    plain = tmp_path / "a.txt"
    plain.write_bytes(f"{text}\r\n".encode() + b"\xff\n")
    with pytest.raises(HookError, match=re.escape("a.txt, line 2: 'utf-8' codec can't decode byte 0xff")):
        read_prompts(plain, tokenizer)
    plain.write_bytes(f"{text}\r\n{text}".encode())
    assert read_prompts(plain, tokenizer) == [tokenizer.encode(text)] * 2, "a carriage return is no part of a prompt"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[1, 2]", "line 2: expected an object with a prompt"),
        ('{"text": "a"}', "line 2: expected an object with a prompt"),
        ("{", "line 2: expected an object with a prompt"),
        ('{"prompt": ""}', "line 2: the prompt has no tokens"),
        ('{"prompt": [{"from": "human"}]}', "line 2: expected an object with a prompt"),
        ('{"prompt": [{"role": "assistant", "content": "a"}]}', "line 2: expected a chat that ends with a message to"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2: expected a chat that ends with a message"),
        ('{"prompt": [{"role": "user", "content": "a"}], "chat_template_kwargs": "a"}', "line 2: expected an object"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(line: str, says: str, tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'\n{line}\n{{"prompt": "a"}}')
    with pytest.raises(HookError, match=re.escape(says)):
        read_prompts(file, tokenizer)
    file.write_text("\n")
    with pytest.raises(HookError, match="holds no prompts"):
        read_prompts(file, tokenizer)


def test_what_is_sent_is_what_a_plain_forward_has_of_the_answers(tmp_path: Path) -> None:
    model = tiny_qwen3()
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [14]]
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(0, 1, 3), strict=True)
        sent = list(send_rollouts(model, hook, prompts, 7, Sampling(batch=3, max_new_tokens=5), seed=0))
        assert hook.close(30.0)
        files = [mapped(request, tmp_path) for request in service.rollouts()]
    assert [one.rollouts for one in sent] == [3, 3, 1]
    hashes = [json.loads(file.header.metadata.get("prompt_hashes", "[]")) for file in files]
    assert [len(of_one) for of_one in hashes] == [0, 3, 1], "by their tokens in the first pass"
    assert len({one for of_one in hashes for one in of_one} | {prompt_hash(prompt) for prompt in prompts}) == 3 + 3 + 1
    asked: Counter[tuple[int, ...]] = Counter()
    answered = 0
    for file in files:
        cu = file.array("cu_seqlens").tolist()
        for begin, end in pairwise(cu):
            ids = torch.from_numpy(file.array("input_ids")[begin:end].copy()).long()
            mask = torch.from_numpy(file.array("loss_mask")[begin:end].copy()).bool()
            asked[tuple(ids[~mask].tolist())] += 1
            answer = ids[mask].tolist()
            answered += len(answer)
            assert mask.tolist() == sorted(mask.tolist())
            assert 1 not in answer[:-1]
            assert len(answer) == 5 or answer[-1] == 1
            with torch.no_grad():
                out = model(ids[None], output_hidden_states=True)
            states = torch.cat([out.hidden_states[i][0] for i in (0, 1, 3, -1)], 1)
            got = torch.cat([as_float(file, n)[begin:end] for n in ("aux_hidden", "last_hidden")], 1)
            torch.testing.assert_close(got, states, rtol=1e-2, atol=1e-2)
            expected = out.logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            logprobs = torch.from_numpy(file.array("logprobs")[begin:end].copy())
            torch.testing.assert_close(logprobs[mask], expected[mask[1:]], rtol=1e-3, atol=1e-3)
    assert answered == sum(one.response_tokens for one in sent)
    assert sum(asked.values()) == 7
    assert set(asked) == {tuple(prompt) for prompt in prompts}
    assert max(asked.values()) - min(asked.values()) <= 1, "each prompt is asked before one is asked again"


def test_answers_follow_the_policys_own_law_whatever_its_generation_settings_say(tmp_path: Path) -> None:
    """A penalty or a top-k of the model would draw from another distribution than the one that replay supposes."""
    model = tiny_qwen3()
    model.generation_config = GenerationConfig(top_k=2, repetition_penalty=5.0, eos_token_id=1, pad_token_id=0)
    prompt, count, temperature = [5, 6, 7], 4000, 0.7
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(0, 1, 3), strict=True)
        list(send_rollouts(model, hook, [prompt], count, Sampling(2000, 2, temperature), seed=0))
        assert hook.close(30.0)
        files = [mapped(request, tmp_path) for request in service.rollouts()]
    firsts = torch.cat([torch.from_numpy(f.array("input_ids")[f.array("cu_seqlens")[:-1] + 3].copy()) for f in files])
    drawn = torch.bincount(firsts.long(), minlength=model.config.vocab_size)
    assert int(drawn.sum()) == count
    with torch.no_grad():
        law = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
    likely = law > 5 / count
    expected = law[likely] * count
    chi2 = float(((drawn[likely] - expected) ** 2 / expected).sum())
    freedom = int(likely.sum()) - 1
    assert chi2 < freedom + 5 * (2 * freedom) ** 0.5
    assert model.generation_config.top_k == 2, "the caller's model is left as it was"


def wait_for(condition: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)


def warm_up(*options: str, url: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    given = "warmup", *options, "--service", url
    return run_fork("trainer", "service.cli", *given, directory=cwd, environment=os.environ, seconds=500)


def test_what_cannot_work_ends_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("a")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    for policy, options, says in (
        ("nowhere", ("--out", "full"), "full holds something already"),
        ("nowhere", ("--chat-template-kwargs", "[1]"), "must be a JSON object"),
        ("nowhere", (), "does not answer"),
    ):
        done = warm_up(
            policy, "--prompts", "prompts.txt", *options, url=f"http://127.0.0.1:{free_port()}", cwd=tmp_path
        )
        assert done.returncode == 1
        assert done.stderr.strip().splitlines()[-1].startswith("draftalign: ")
        assert says in done.stderr
        assert "Traceback" not in done.stderr


def test_without_a_token_that_the_service_takes_it_ends_before_the_policy_is_loaded(
    serve: Callable[..., RunningService], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("a")
    done = warm_up("nowhere", "--prompts", "prompts.txt", url=serve(tokens="s3cret:write,read").url, cwd=tmp_path)
    assert done.returncode == 1
    assert "no token came" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
def test_a_run_begins_with_a_drafter_that_knows_the_policy(tmp_path: Path) -> None:
    """It asks for three times as many answers as there are prompts: what comes again judges drafters too."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": text}) for text in recall.sample_prompts(160, 5)))
    port, out = free_port(), tmp_path / "out"
    settings = {**SERVICE_SETTINGS, "DRAFTALIGN_VOCAB_MIN_TOKENS": "2000", "DRAFTALIGN_DRAFT_VOCAB_SIZE": "64"}
    up = ["service.cli", "up", "--port", str(port), "--state-dir", str(tmp_path / "state")]
    options = ("--rollouts", "480", "--batch", "16", "--max-new-tokens", "40", "--aux-layers", "0,2,3")
    with child("up", up, settings):
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{port}/readyz").is_success)
        done = warm_up(
            *(str(POLICY), "--prompts", str(prompts), *options, "--out", str(out)),
            url=f"http://127.0.0.1:{port}",
            cwd=tmp_path,
        )
    assert done.returncode == 0, done.stderr
    assert re.search(r"run default begins with v\d{6}-\w+, written to ", done.stdout), done.stdout
    policy, to_ids = load(POLICY)
    others = [to_ids.encode(text) for text in recall.sample_prompts(64, 99)]
    with receiver() as service:
        hook = DrafterHook(policy, service.url, aux_layers=(0, 2, 3), strict=True)
        list(send_rollouts(policy, hook, others, 64, Sampling(64, 40), seed=1))
        assert hook.close(30.0)
        (tmp_path / "batch").write_bytes(service.rollouts()[0].body)
    head = policy.lm_head.weight.detach().float()
    batch = load_batch(tmp_path / "batch")
    found = replay(read_drafter(out), batch, Policy(0, head, TargetHead(head)), depth=4, drafting="probabilistic")
    assert found.alpha > 1.4, found.alpha


def test_rollouts_that_are_left_out_on_the_way_end_the_warm_up_with_their_number() -> None:
    model = tiny_qwen3()
    with receiver() as service:
        hook = DrafterHook(model, service.url, aux_layers=(0, 1, 3), strict=True, max_tokens_per_step=10)
        list(send_rollouts(model, hook, [[5, 6, 7, 8]], 4, Sampling(2, 4), seed=0))
        with pytest.raises(ConfigurationError, match=r"do not reach the service .*skipped_budget"):
            warmup._check_sent(hook)
        hook.close(5.0)


def watch_of(monkeypatch: pytest.MonkeyPatch, states: list[str], headline: dict[str, Any], said: list[str]) -> Any:
    """Watches a service that says this of every rollout (the last state for ever) and of the run."""
    monkeypatch.setattr(warmup, "_TROUBLE_SECONDS", 0.3)
    monkeypatch.setattr(warmup, "_READ_SECONDS", 0.3)
    monkeypatch.setattr(warmup, "_POLL_SECONDS", 0.01)

    def answer(_method: str, _service: str, path: str, **_: Any) -> httpx.Response:
        if path.startswith("/rollouts/"):
            state = states.pop(0) if len(states) > 1 else states[0]
            return httpx.Response(200, json={"state": state, "reason": "because"})
        return httpx.Response(200, json={"headline": headline, "headroom": {"state": "converged"}})

    monkeypatch.setattr(warmup, "call", answer)
    return warmup._Watch("http://service", "default", 100, said.append)


def test_a_worker_that_does_not_get_on_ends_the_warm_up_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    silent = {"text": "Worker silent for 20 min.", "state": "worker_silent", "level": "bad", "also": []}
    watch = watch_of(monkeypatch, ["queued"], silent, said)
    assert not any(watch.add(Sent(f"r{number}", 10, 100)) for number in range(2))
    with pytest.raises(ConfigurationError, match=r"makes no progress: Worker silent for 20 min\."):
        watch.add(Sent("r2", 10, 100))
    assert said == ["     10 of 100 answers: Worker silent for 20 min."]


@pytest.mark.parametrize("hidden", [False, True])
def test_batches_that_wait_for_the_draft_vocabulary_are_not_waited_for(
    hidden: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers = "Waiting for the draft vocabulary: 10 of 20 response tokens gathered (vocab_min_tokens)."
    worse = {"text": "Queue 85 % full: ...", "state": "queue_full", "level": "warn", "also": [gathers]}
    headline = worse if hidden else {"text": gathers, "state": "gathering", "level": "wait", "also": []}
    watch = watch_of(monkeypatch, ["queued"], headline, [])
    for number in range(9):
        assert not watch.add(Sent(f"r{number}", 10, 100)), "what the headroom says is of an earlier run"
    watch.settle()
    if not hidden:
        assert watch.no_drafter() == f"no drafter yet: {gathers[:-1]}; raise --rollouts"


def test_it_ends_once_its_own_batches_were_trained_on_and_nothing_is_left_to_gain(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    level = {"text": "Level.", "state": "level", "level": "good", "also": []}
    watch = watch_of(monkeypatch, ["trained"], level, [])
    ended = [watch.add(Sent(f"r{number}", 10, 100)) for number in range(7)]
    assert ended == [False] * 4 + [True] * 3
    refused = watch_of(monkeypatch, ["dead"], level, [])
    with pytest.raises(ConfigurationError, match="the worker refused the rollouts: because"):
        list(map(refused.add, [Sent(f"r{number}", 10, 100) for number in range(4)]))
