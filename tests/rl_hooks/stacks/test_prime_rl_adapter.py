"""What the prime-rl adapter wraps, labels and leaves out. (tests/stacks runs prime-rl's own loop.)"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.trainer.hooks_fixtures import Receiver, as_float, mapped, receiver
from helpers.trainer.sent_fixtures import small_policy
from torch import Tensor

from rl_hooks import wire
from rl_hooks.errors import UnsupportedTrainerError
from rl_hooks.stacks import prime_rl as adapter
from rl_hooks.trainer.hook import DrafterHook

LENGTHS, PADDING = (5, 7, 4), 3


def micro_batch(seed: int = 0, **changes: Any) -> Any:
    """As prime-rl's DataLoader gives it: three rollouts in a row, which is padded within the last."""
    T = sum(LENGTHS) + PADDING
    generator = torch.Generator().manual_seed(seed)
    positions = [*(p for length in LENGTHS for p in range(length)), *range(PADDING)]
    position_ids = torch.tensor([positions])
    fields: dict[str, Any] = {
        "input_ids": torch.randint(3, 512, (1, T), generator=generator),
        "position_ids": position_ids,
        "loss_mask": (position_ids > 1) & (torch.arange(T) < T - PADDING),
        "inference_logprobs": -torch.rand(1, T, generator=generator),
        "temperatures": torch.where(torch.arange(T) < T - PADDING, 0.7, 1.0)[None],
        "sequence_lengths": [*LENGTHS[:-1], LENGTHS[-1] + PADDING],
        "env_names": [name for name, n in zip("aba", LENGTHS, strict=True) for _ in range(n)] + [""] * PADDING,
        "mm_kwargs": None,
        "rl_weights": None,
        "ce_weights": None,
        "ref_kl_weights": None,
    }
    return fields | changes


class Loop:
    """What the adapter reads of prime-rl's module; its functions have prime-rl's signatures."""

    def __init__(self, batches: list[list[Any]], start_step: int = 1, *, cp: bool = False, fake: bool = False) -> None:
        self.seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.logged: list[tuple[dict[str, float], int]] = []
        self.outcomes: list[Tensor] = []
        self._start_step, self._cp, self._fake = start_step, cp, fake

        class DataLoader:
            def __init__(self, _output_dir: str, start_step: int, dp_world_size: int, config: str) -> None:
                assert (start_step, dp_world_size, config) == (self_start, 1, "zmq")
                self._batches = iter(batches)

            def wait_for_batch(self) -> None: ...

            def get_batch(self) -> Any:
                return next(self._batches)

        self_start = start_step
        self.batches, self.DataLoader = batches, DataLoader
        self.monitors = SimpleNamespace(log=self._log)

    async def _log(self, data: dict[str, float], step: int) -> None:
        self.logged.append((data, step))

    def setup_model(self, _config: str, _parallel_dims: Any, _loading_later: bool = False) -> Any:
        return small_policy(512)

    def forward(self, model: Any, input_ids: Tensor, position_ids: Tensor, **more: Any) -> Any:
        self.seen.append(((input_ids, position_ids), more))
        return model(input_ids, position_ids=position_ids, use_cache=False).logits

    def main(self) -> None:
        model = self.setup_model("model", SimpleNamespace(cp_enabled=self._cp), False)
        loader = None if self._fake else self.DataLoader("out", self._start_step, 1, "zmq")
        for batch in self.batches:
            if loader is not None:
                loader.wait_for_batch()
                assert loader.get_batch() is batch
            for one in batch:
                ids, positions = (one[name].clone() for name in ("input_ids", "position_ids"))
                self.outcomes.append(self.forward(model, ids, positions, labels=ids, seq_lens=None))


@contextmanager
def extended(monkeypatch: pytest.MonkeyPatch, loop: Any, *, url: str | None = None) -> Iterator[Receiver]:
    """The service of a loop that has trained to its end, started as its users start it."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    monkeypatch.setitem(sys.modules, adapter.TRAINER, loop)
    hooks: list[Any] = []
    make = DrafterHook

    def kept(*args: Any, **more: Any) -> Any:
        hooks.append(make(*args, **more))
        return hooks[-1]

    monkeypatch.setattr(adapter, "DrafterHook", kept)
    with receiver() as service:
        monkeypatch.setenv("DRAFTALIGN_URL", service.url if url is None else url)
        adapter.main()
        loop.hook = hooks[0] if hooks else None
        if hooks:
            assert hooks[0].flush(20), hooks[0].stats()
        yield service
        if hooks:
            hooks[0].close()


def versions(service: Receiver, folder: Path) -> list[int]:
    return [int(mapped(one, folder).header.metadata["policy_version"]) for one in service.rollouts()]


@pytest.mark.parametrize("start_step", [1, 5])
def test_each_batch_has_the_version_of_the_weights_that_it_meets(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_step: int
) -> None:
    """prime-rl trains on batch k with what it broadcast as k - 1; from a checkpoint it begins at another."""
    loop = Loop([[micro_batch(1), micro_batch(2)], [micro_batch(3)]], start_step)
    with extended(monkeypatch, loop) as service:
        assert versions(service, tmp_path) == [start_step - 1, start_step - 1, start_step]
        assert [step for _, step in loop.logged] == [start_step, start_step + 1]
        assert all("draftalign/dropped" in data for data, _ in loop.logged)


def test_rollouts_are_sent_without_the_rows_padding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = micro_batch()
    with extended(monkeypatch, Loop([[one]])) as service:
        (request,) = service.rollouts()
        file = mapped(request, tmp_path)
        T = sum(LENGTHS)
        assert file.array("input_ids").tolist() == one["input_ids"][0, :T].tolist()
        assert file.array("cu_seqlens").tolist() == [0, 5, 12, 16]
        drawn = one["loss_mask"][0, :T]
        assert file.array("loss_mask").astype(bool).tolist() == drawn.tolist()
        assert torch.equal(as_float(file, "logprobs")[drawn], one["inference_logprobs"][0, :T][drawn])
        assert float(file.header.metadata["temperature"]) == pytest.approx(0.7)
        assert wire.check_rollout_header(file.header).strata == ("a", "b", "a"), "the environment of each"


def test_a_micro_batch_that_names_no_environment_is_sent_without_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = micro_batch()
    del one["env_names"]
    with extended(monkeypatch, Loop([[one]])) as service:
        (request,) = service.rollouts()
        assert wire.check_rollout_header(mapped(request, tmp_path).header).strata is None


def test_what_another_model_wrote_is_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The `ce` component trains on tokens of no sampler: prime-rl's rule for its mismatch KL is ours."""
    ones = torch.ones(1, sum(LENGTHS) + PADDING)
    by_ce, by_ref = ones.clone(), torch.zeros_like(ones)
    by_ce[0, :5], by_ref[0, :3] = 0.0, 1.0  # of the first rollout no token counts for rl, of which ref_kl has one
    batch = micro_batch(rl_weights=by_ce, ref_kl_weights=by_ref, ce_weights=1 - by_ce)
    with extended(monkeypatch, Loop([[batch]])) as service:
        file = mapped(service.rollouts()[0], tmp_path)
        assert file.array("loss_mask")[:5].tolist() == [0, 0, 1, 0, 0]
        assert file.array("loss_mask")[5:].sum() == 7


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"input_ids": torch.zeros(1, 3, dtype=torch.long)}, "not over the tokens"),
        ({"sequence_lengths": [5, 7]}, "must match the size"),
        ({"sequence_lengths": None}, "NoneType"),
        ({"position_ids": torch.arange(19)[None] + 4}, "tokens of no rollout"),
        ({"loss_mask": torch.ones(19)}, "indices"),
        ({"inference_logprobs": torch.zeros(1, 4)}, "logprobs must be"),
        ({"temperatures": torch.linspace(0.5, 1, 19)[None]}, "several temperatures"),
        ({"temperatures": None}, "NoneType"),
    ],
)
def test_a_micro_batch_that_cannot_be_told_costs_itself_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, changes: dict[str, Any], fault: str
) -> None:
    plain = Loop([[micro_batch(1), micro_batch(2)]])
    plain.main()
    first, second = micro_batch(1), micro_batch(2)
    loop = Loop([[first, second]])
    get = loop.DataLoader.get_batch

    def garbled(self: Any) -> Any:
        get(self)
        return [first | changes, second]

    loop.DataLoader.get_batch = garbled  # type: ignore[method-assign]
    monkeypatch.setattr(Loop, "main", _unchecked)
    with extended(monkeypatch, loop) as service:
        assert len(service.rollouts()) == 1
        assert mapped(service.rollouts()[0], tmp_path).array("input_ids")[0] == second["input_ids"][0, 0]
        assert loop.hook.stats()["failures"] == 1  # type: ignore[attr-defined]
        assert fault in loop.hook.stats()["last_failure"]  # type: ignore[attr-defined]
    assert all(torch.equal(a, b) for a, b in zip(loop.outcomes, plain.outcomes, strict=True))


def _unchecked(self: Loop) -> None:
    """The loop, with a data loader that gives the hook something else than it trains on."""
    model = self.setup_model("model", SimpleNamespace(cp_enabled=False))
    self.DataLoader("out", 1, 1, "zmq").get_batch()
    for one in self.batches[0]:
        self.outcomes.append(self.forward(model, one["input_ids"], one["position_ids"], labels=None))


def test_rollouts_with_images_are_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop([[micro_batch(1, mm_kwargs={"pixel_values": torch.zeros(2)}), micro_batch(2)]])
    with extended(monkeypatch, loop) as service:
        assert len(service.rollouts()) == 1
    assert sum("rollouts with images" in record.message for record in caplog.records) == 1


def test_fake_data_is_left_out_by_name(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    loop = Loop([[micro_batch(1)], [micro_batch(2)]], fake=True)
    with extended(monkeypatch, loop) as service:
        assert not service.rollouts()
    assert sum("fake data" in record.message for record in caplog.records) == 1
    assert len(loop.outcomes) == 2


def test_context_parallelism_is_refused_and_prime_rl_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = Loop([[micro_batch()]], cp=True)
    with extended(monkeypatch, loop) as service:
        assert not service.requests
        assert loop.hook is None  # type: ignore[attr-defined]
    assert len(loop.outcomes) == 1
    assert "draftalign is OFF" in caplog.text
    run = adapter._Run()
    with pytest.raises(UnsupportedTrainerError, match=r"set model\.cp to 1"):
        run.attach(None, SimpleNamespace(cp_enabled=True), {})


@pytest.mark.parametrize("missing", ["setup_model", "DataLoader", "forward"])
def test_another_prime_rl_trains_without_us(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    trained: list[str] = []
    names = {"setup_model", "DataLoader", "forward"} - {missing}
    loop = SimpleNamespace(main=lambda: trained.append("to the end"), **dict.fromkeys(names, Loop))
    with extended(monkeypatch, loop):
        assert trained == ["to the end"]
        assert all(getattr(loop, name) is Loop for name in names), "nothing is half extended"
    assert "this prime-rl cannot be extended" in caplog.text


@pytest.mark.parametrize("url", [None, ""])
def test_the_forward_gets_its_arguments_as_they_came(monkeypatch: pytest.MonkeyPatch, url: str | None) -> None:
    plain, loop = Loop([[micro_batch()]]), Loop([[micro_batch()]])
    plain.main()
    with extended(monkeypatch, loop, url=url):
        assert (loop.hook is None) is (url == "")  # type: ignore[attr-defined]
    ((mine, more),), ((theirs, others),) = loop.seen, plain.seen
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert more.keys() == others.keys() == {"labels", "seq_lens"}
    assert torch.equal(loop.outcomes[0], plain.outcomes[0])


def test_a_monitor_that_fails_and_other_ranks_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no disk")

    loop = Loop([[micro_batch(1)], [micro_batch(2)]])
    loop.monitors.log = fails
    with extended(monkeypatch, loop) as service:
        assert len(service.rollouts()) == 2
        assert loop.hook.stats()["failures"] == 2  # type: ignore[attr-defined]
    second = Loop([[micro_batch(1)]])
    with extended(monkeypatch, second):
        pass
    assert len(second.logged) == 1
    third = Loop([[micro_batch(1)]])
    setup = third.setup_model

    def on_rank_1(*args: Any) -> Any:
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        return setup(*args)

    monkeypatch.setattr(third, "setup_model", on_rank_1)
    with extended(monkeypatch, third):
        assert not third.logged


def test_an_error_of_prime_rls_own_reaches_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = Loop([[micro_batch()]])

    def breaks(*_: Any, **__: Any) -> Any:
        raise RuntimeError("out of memory")

    loop.forward = breaks  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"), extended(monkeypatch, loop):
        pass
