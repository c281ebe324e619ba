"""Every reader of a drafter's files gives the same verdict on every one of a corpus of good and odd drafters."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest import mock

import pytest
import torch
from helpers.drafter.drafter_corpus import BASES, CORPUS, LAYERS, NO_LAYERS, Case
from safetensors.torch import save

from drafter.errors import DrafterError
from drafter.files.checkpoint import config_fingerprint
from drafter.files.kinds import read_kind
from drafter.policy import Policy, TargetHead
from drafter.vocabulary import DraftVocabulary
from rl_hooks import wire
from rl_hooks.agent.download import _make_safe
from rl_hooks.engines.candidate import check_config, read_candidate, running_sizes
from rl_hooks.engines.vllm.modules import float32_weights, running_module
from rl_hooks.errors import AgentError, HookError
from rl_hooks.format.drafter import Sizes, kind_of, parse_drafter
from rl_hooks.format.eagle3 import DrafterConfig
from rl_hooks.format.engines import EngineName, limits
from service.errors import WorkerError
from service.settings import Settings
from service.storage.layout import Layout
from service.storage.runs import commit_run, read_run_header
from service.storage.spool import Spool
from service.worker.lineage import Lineage
from service.worker.target import Target

#: What a reader raises for a drafter that it does not take. Anything else is a fault of the reader.
REFUSALS: Final = (DrafterError, AgentError, HookError, WorkerError, wire.WireError)


def run_body(case: Case) -> bytes:
    """PUT /runs with the drafter."""
    embedding = torch.zeros(case.target["vocab_size"], case.target["hidden_size"])
    tensors = {f"drafter.{name}": tensor for name, tensor in case.weights().items()}
    metadata = {
        "format": wire.RUN_FORMAT,
        "config": json.dumps(case.target),
        "aux_layers": json.dumps({"convention": "entering", "layers": list(LAYERS)}),
        "target_fingerprint": wire.target_fingerprint(case.target, list(LAYERS)),
        "policy_version": "0",
        "drafter_config": json.dumps(case.document),
    }
    body: bytes = save(tensors | {"embed_tokens": embedding, "lm_head": embedding.clone()}, metadata)
    return body


def put_runs(case: Case, directory: Path) -> None:
    del directory
    read_run_header("run", wire.parse_header(run_body(case)))


def worker(case: Case, directory: Path) -> None:
    layout, body = Layout(directory / "state"), run_body(case)
    with mock.patch("service.storage.runs._check_for_worker"):  # its verdict is asked by itself
        record = read_run_header("run", wire.parse_header(body))
    with Spool(layout).upload() as upload:
        upload.write(body)
        commit_run(layout, record, upload)
    settings = Settings(state_dir=layout.root)
    Lineage(settings, layout, "run", Target.open(layout, "run")).begin()


def files(case: Case, directory: Path) -> None:
    embedding = torch.zeros(case.target["vocab_size"], case.target["hidden_size"])
    read_kind(directory, Policy(0, embedding, TargetHead(embedding.clone())))


def agent(case: Case, directory: Path) -> None:
    kind = case.document.get("draftalign", {}).get("kind", "eagle3")
    _make_safe(directory, "mtp" if kind == "mtp" else "eagle3")


def vllm(case: Case, directory: Path) -> None:
    engine(case, directory, "vllm")


def sglang(case: Case, directory: Path) -> None:
    engine(case, directory, "sglang")


def engine(case: Case, directory: Path, name: EngineName) -> None:
    """As the vLLM plugin and the SGLang loader stage one, in an engine that was started with the same drafter."""
    running = running_sizes(BASES["eagle3"], LAYERS) if case.base == "eagle3" else running_module(BASES[case.base])
    try:
        check_config(directory, running, name)
    except HookError as error:
        if "restart the server to change" not in str(error):
            raise
        running = parse_drafter(json.loads((directory / "config.json").read_text()), LAYERS)
        check_config(directory, running, name)
    weights = case.weights()
    d2t = weights.get("d2t", torch.zeros(getattr(running, "draft_vocab_size", running.vocab_size), dtype=torch.int64))
    body = (directory / "model.safetensors").read_bytes()
    read_candidate(body, running, d2t, torch.float32, float32_weights(running))


Reader = Callable[[Case, Path], None]
#: These know which layers the run or the engine captures.
KNOWING: Final[dict[str, Reader]] = {"PUT /runs": put_runs, "worker": worker, "vllm": vllm, "sglang": sglang}
#: These see what was published, and nothing else.
READERS: Final[dict[str, Reader]] = KNOWING | {"drafter.files": files, "agent": agent}


def verdict(reader: Reader, case: Case, directory: Path) -> bool:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(case.document))
    (directory / "model.safetensors").write_bytes(save(case.weights()))
    try:
        reader(case, directory)
    except REFUSALS:
        return False
    return True


@pytest.mark.parametrize("name", CORPUS)
def test_every_reader_gives_the_verdict(name: str, tmp_path: Path) -> None:
    case = CORPUS[name]
    found = {who: verdict(reader, case, tmp_path / str(i)) for i, (who, reader) in enumerate(READERS.items())}
    assert found == {who: case.good and who not in case.beyond for who in READERS}


def test_layers_that_nobody_named_are_those_of_the_run_or_the_engine(tmp_path: Path) -> None:
    found = {who: verdict(reader, NO_LAYERS, tmp_path / str(i)) for i, (who, reader) in enumerate(READERS.items())}
    assert found == {who: who in KNOWING for who in READERS}


def test_the_corpus_is_worth_its_name() -> None:
    assert len(CORPUS) >= 40
    assert {case.base for case in CORPUS.values()} == BASES.keys()
    assert 20 <= sum(case.good for case in CORPUS.values()) <= len(CORPUS) - 40


@pytest.mark.parametrize("name", [name for name, case in CORPUS.items() if case.good])
def test_what_an_engine_cannot_take_is_said_in_one_place(name: str) -> None:
    case = CORPUS[name]
    engines: tuple[EngineName, ...] = ("vllm", "sglang")
    assert {engine for engine in engines if limits(engine, sizes(case))} == case.beyond


#: As they were before there was one definition: an agent compares them, so they must never change.
FINGERPRINTS: Final = {
    "as draftalign writes it": "487b3e7044f6d09778dd96dbeb140b46",
    "over the whole vocabulary": "a14693946b554f8a2b2eec8550c1834d",
    "of two layers": "9b90056b2ac89cad316df3ebda78d7cb",
    "norm_before_residual": "5ad099ca3ebfe827f9340c5e7bf70100",
    "norm_before_fc": "1b04d4fe03c53899774111535ef49a89",
    "norm_before_fc in eagle_config": "1b04d4fe03c53899774111535ef49a89",
    "norm_before_fc off by both names": "487b3e7044f6d09778dd96dbeb140b46",
    "rope scaling llama3": "fb7d86a9d3c1960c1399bc4157ccf896",
    "rope scaling llama3 by its old names": "fb7d86a9d3c1960c1399bc4157ccf896",
    "another limit of positions": "487b3e7044f6d09778dd96dbeb140b46",
    "another family of target": "ed03abcf231a26c824c5062e37ac99c8",
    "DeepSeek-V3's form": "1d3435f1c733c4674e673d0d5cf8dda2",
    "GLM-4.5's form": "a436172df24789754313ac3b067abb98",
    "DeepSeek's, dense": "049edd8f373cc9e4bc6611699471719b",
    "DeepSeek's, one q_proj": "ffccb0b4cecbe915d1f7310fa69229b2",
    "DeepSeek's, with YaRN": "d95ac11d6b519b0f3a302b23042544c4",
    "DeepSeek's, half-split pairs": "18c1044f466b6334047e856d8a73c299",
    "DeepSeek's, number of modules not said": "1d3435f1c733c4674e673d0d5cf8dda2",
    "GLM's, without biases and norms": "0c9f478142126f4064806355874fcaf5",
    "GLM's, other feedback": "81d50adfe6e033c1d6bbac220510ece6",
    "latent attention of another family": "5bb70325654ab7447168ffbc9030130d",
}


@pytest.mark.parametrize("name", FINGERPRINTS)
def test_fingerprints_are_what_they_always_were(name: str) -> None:
    found = sizes(CORPUS[name])
    drafted = found.draft_vocab_size if isinstance(found, DrafterConfig) else found.vocab_size
    step = found.vocab_size // drafted
    vocabulary = DraftVocabulary(torch.arange(0, found.vocab_size, step), found.vocab_size)
    assert config_fingerprint(found, vocabulary) == FINGERPRINTS[name]


def sizes(case: Case) -> Sizes:
    document: dict[str, Any] = json.loads(json.dumps(case.document))
    found = parse_drafter(document, LAYERS)
    assert isinstance(found, DrafterConfig) == (kind_of(document) == "eagle3")
    return found
