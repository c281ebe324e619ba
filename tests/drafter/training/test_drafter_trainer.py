"""The trainer: it learns, resumes bit for bit, divides once, survives bad numbers, and its files cannot half-exist."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from helpers.drafter.drafter_worlds import SHAPES, cast, mask_of, rollouts, world
from safetensors.torch import load_file, save_file

from drafter.batch import RolloutBatch
from drafter.errors import CheckpointError
from drafter.files.checkpoint import read_drafter
from drafter.files.kinds import write_kind
from drafter.model.eagle3 import DrafterConfig, Eagle3Drafter
from drafter.policy import Policy, TargetHead
from drafter.training.optimizer import Method
from drafter.training.trainer import DrafterTrainer, TrainConfig
from drafter.vocabulary import DraftVocabulary

CONFIG = TrainConfig(steps_ahead=3, learning_rate=1e-2, weight_decay=0.1, warmup_windows=2)


def trainer(config: TrainConfig = CONFIG, *, scrambled: bool = False) -> DrafterTrainer:
    """Equal trainers, unless scrambled: then all weights differ, so that what a file does not restore is seen."""
    drafter = world(SHAPES["packed, awkward"], dtype=torch.float32).drafter
    for parameter in drafter.parameters():
        parameter.data += scrambled
    return DrafterTrainer(drafter, config)


def batches(count: int) -> tuple[list[RolloutBatch], Policy]:
    w = world(SHAPES["packed, awkward"], dtype=torch.float32)
    head = world(SHAPES["packed, awkward"]).head
    made = [rollouts(SHAPES["packed, awkward"], head, 1.0, seed) for seed in range(count)]
    return [cast(b, torch.float32) for b in made], w.policy


def parameters(t: DrafterTrainer) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in t.drafter.named_parameters()}


def save(t: DrafterTrainer, directory: Path) -> None:
    """Drafter and trainer, as a checkpoint holds them."""
    write_kind(directory, t.drafter)
    t.save(directory)


def load(directory: Path, config: TrainConfig = CONFIG) -> DrafterTrainer:
    resumed = DrafterTrainer(read_drafter(directory), config)
    resumed.load(directory)
    return resumed


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("method", ["muon", "adamw"])
def test_six_windows_equal_three_saved_loaded_and_three_more(tmp_path: Path, method: Method) -> None:
    data, policy = batches(6)
    config = replace(CONFIG, optimizer=method)
    straight = trainer(config)
    for b in data:
        straight.step([(b, policy)])
    first = trainer(config)
    for b in data[:3]:
        first.step([(b, policy)])
    save(first, tmp_path)
    resumed = load(tmp_path, config)
    for b in data[3:]:
        resumed.step([(b, policy)])
    assert equal(parameters(straight), parameters(resumed))
    assert (resumed.windows, resumed.tokens_trained) == (straight.windows, straight.tokens_trained)
    assert resumed.tokens_trained == sum(b.response_tokens for b in data)


def test_how_rollouts_are_cut_into_batches_changes_nothing() -> None:
    (a, b), policy = batches(2)
    apart, together = trainer(), trainer()
    one, two = apart.step([(a, policy), (b, policy)]), together.step([(RolloutBatch.concat([a, b]), policy)])
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-5)
    assert one.entries_per_step == two.entries_per_step
    for name, p in parameters(apart).items():
        # Adam's first steps are the gradient's sign: compare where it is not rounding.
        torch.testing.assert_close(p, parameters(together)[name], rtol=1e-3, atol=1e-4)


def test_each_batch_is_compared_with_its_own_head() -> None:
    (a, b), policy = batches(2)
    later = Policy(1, policy.embed_tokens, TargetHead(policy.needed_head().lm_head * 1.5))
    one, other = trainer().step([(a, policy)]), trainer().step([(b, later)])
    both = trainer().step([(a, policy), (b, later)])
    assert both.loss == pytest.approx((one.loss + other.loss) / 2, rel=1e-5)  # equally many response tokens


def test_the_report_says_what_happened() -> None:
    (batch,), policy = batches(1)
    t = trainer()
    report = t.step([(batch, policy)])
    assert report.skipped is None
    assert (report.response_tokens, report.tokens) == (batch.response_tokens, batch.tokens)
    assert report.learning_rate == pytest.approx(0.005)  # first of two warm-up windows
    weighted = sum(
        0.8**j * kl * n for j, (kl, n) in enumerate(zip(report.loss_per_step, report.entries_per_step, strict=True))
    )
    assert report.loss == pytest.approx(weighted / report.response_tokens, rel=1e-6)
    assert all(0 < a < 1 for a in report.acceptance_per_step)
    assert report.seconds > 0
    assert t.step([(batch, policy)]).learning_rate == pytest.approx(0.01)


def test_gradients_are_clipped_to_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,), policy = batches(1)
    t = trainer(replace(CONFIG, grad_clip=0.01))
    norms = []
    step = t._optimizer.step

    def spy(learning_rate: float) -> None:
        grads = [p.grad for p in t.drafter.parameters() if p.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(grads)))
        step(learning_rate)

    monkeypatch.setattr(t._optimizer, "step", spy)
    report = t.step([(batch, policy)])
    assert report.grad_norm > 0.1
    assert norms == [pytest.approx(0.01, rel=1e-3)]


def test_weight_decay_touches_matrices_only() -> None:
    """Two windows that differ in nothing but the decay: gains end equal to the bit, matrices shrink by lr * decay."""
    (batch,), policy = batches(1)
    plain, decayed = (trainer(replace(CONFIG, warmup_windows=0, weight_decay=decay)) for decay in (0.0, 0.5))
    before = parameters(plain)
    for t in (plain, decayed):
        t.step([(batch, policy)])
    moved, shrunk = parameters(plain), parameters(decayed)
    assert {p.ndim for p in before.values()} == {1, 2}
    for name, start in before.items():
        assert not torch.equal(moved[name], start), name
        if start.ndim == 1:
            assert torch.equal(shrunk[name], moved[name]), name
        else:
            torch.testing.assert_close(
                moved[name] - shrunk[name], CONFIG.learning_rate * 0.5 * start, rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("field", ["aux_hidden", "last_hidden", "logsumexp"])
def test_numbers_that_are_not_finite_change_nothing_and_are_reported(field: str) -> None:
    (good, bad), policy = batches(2)
    tensor = getattr(bad, field).clone()
    tensor[20:24] = float("nan")
    t, untouched = trainer(), trainer()
    t.step([(good, policy)])
    before = parameters(t)
    report = t.step([(good, policy), (replace(bad, **{field: tensor}), policy)])
    assert report.skipped is not None
    assert "nan" in report.skipped
    assert equal(parameters(t), before)
    assert (t.windows, t.skipped_windows) == (1, 1)
    untouched.step([(good, policy)])
    t.step([(good, policy)])
    untouched.step([(good, policy)])
    assert equal(parameters(t), parameters(untouched))  # the moments were left alone too


def test_a_window_with_nothing_to_learn_is_skipped() -> None:
    (batch,), policy = batches(1)
    t = trainer()
    report = t.step([(batch.select([2]), policy)])  # two tokens: no row predicts a second one
    assert report.skipped is not None
    assert math.isnan(report.loss)


def test_a_frozen_lm_head_stays_and_needs_no_moments(tmp_path: Path) -> None:
    (batch,), policy = batches(1)
    t = trainer(replace(CONFIG, train_lm_head=False))
    before = parameters(t)
    t.step([(batch, policy)])
    moved = {n for n, p in parameters(t).items() if not torch.equal(p, before[n])}
    assert moved == set(before) - {"lm_head.weight"}
    save(t, tmp_path)
    thawed = load(tmp_path)
    assert equal(parameters(thawed), parameters(t))
    assert thawed.step([(batch, policy)]).skipped is None


def test_bfloat16_parameters_get_float32_masters_that_keep_small_updates() -> None:
    (batch,), policy = batches(1)
    drafter = world(SHAPES["packed, awkward"]).drafter.to(torch.bfloat16)
    t = DrafterTrainer(drafter, replace(CONFIG, learning_rate=1e-6, weight_decay=0.0))
    before = parameters(t)
    assert {p.dtype for p in before.values()} == {torch.float32}
    t.step([(batch, policy)])
    assert not torch.equal(parameters(t)["fc.weight"], before["fc.weight"])


def test_bfloat16_computing_agrees_roughly_with_float32() -> None:
    (batch,), policy = batches(1)
    full, half = trainer(), trainer(replace(CONFIG, compute_dtype="bfloat16"))
    a, b = full.step([(batch, policy)]), half.step([(batch, policy)])
    assert b.loss == pytest.approx(a.loss, rel=0.05)
    assert b.grad_norm == pytest.approx(a.grad_norm, rel=0.1)


# --- files ----------------------------------------------------------------------------------------------------------


def test_gradients_of_a_bfloat16_window_come_near_those_of_float64() -> None:
    """Over two batches. Found: 0.018; float32: 5e-7."""
    found = {}
    for dtype in ("float64", "bfloat16"):
        data, policy = batches(2)
        t = trainer(replace(CONFIG, compute_dtype=dtype))
        for b in data:
            t._accumulate(t.prepare(b), policy, 20)
        grads = [p.grad for p in t.drafter.parameters() if p.grad is not None]
        assert {g.dtype for g in grads} == {torch.float64 if dtype == "float64" else torch.float32}
        found[dtype] = torch.cat([g.flatten().double() for g in grads])
    error = (found["bfloat16"] - found["float64"]).norm() / found["float64"].norm()
    assert 1e-4 < error < 0.03


@pytest.mark.parametrize("fused", [True, False])
def test_adamw_finds_its_step_count_where_its_kernel_looks_for_it(tmp_path: Path, fused: bool) -> None:
    (batch,), policy = batches(1)
    saved = trainer()
    saved.step([(batch, policy)])
    saved.save(tmp_path)
    t = DrafterTrainer(trainer().drafter.to("meta"), CONFIG)  # a GPU's fused kernel takes no count from the host
    t._optimizer._fused = fused
    t.load(tmp_path)
    where = {name: moment.device.type for name, moment in t._optimizer.moments().items()}
    assert {device for name, device in where.items() if name.startswith("step.")} == {"meta" if fused else "cpu"}
    assert {device for name, device in where.items() if not name.startswith("step.")} == {"meta"}


def test_states_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    t = trainer()
    with pytest.raises(CheckpointError, match="cannot be read"):
        t.load(tmp_path)
    t.save(tmp_path)
    document = json.loads((tmp_path / "trainer.json").read_text())
    other = DrafterTrainer(world(SHAPES["packed, awkward"], draft=8, dtype=torch.float32).drafter, CONFIG)
    with pytest.raises(CheckpointError, match="another drafter"):
        other.load(tmp_path)
    (tmp_path / "trainer.json").write_text(json.dumps(document | {"format": "draftalign.trainer.v1"}))
    with pytest.raises(CheckpointError, match=r"is not a draftalign.trainer.v2 state .* another version wrote it"):
        t.load(tmp_path)
    (tmp_path / "trainer.json").write_text(json.dumps(document))
    state = tmp_path / "moments.safetensors"
    state.write_bytes(state.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="cannot be read"):
        t.load(tmp_path)


def test_another_optimizer_goes_on_with_a_learning_rate_that_rises_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, policy = batches(5)
    before = trainer(replace(CONFIG, optimizer="adamw"))
    for b in data[:4]:
        before.step([(b, policy)])
    before.save(tmp_path)
    same, other = trainer(replace(CONFIG, optimizer="adamw")), trainer(replace(CONFIG, optimizer="muon"))
    same.load(tmp_path)
    assert not caplog.records
    assert not same.warming_up
    other.load(tmp_path)
    assert "moments of another optimizer" in caplog.text
    assert other.warming_up
    assert (other.windows, other.warm_windows) == (4, 0)
    report = other.step([(data[4], policy)])
    assert report.learning_rate == CONFIG.learning_rate / CONFIG.warmup_windows


def beside_a_saved_one(directory: Path) -> DrafterTrainer:
    """A trainer that has moved, beside the state of another that has."""
    (batch,), policy = batches(1)
    saved, t = trainer(), trainer(scrambled=True)
    for each in (saved, t):
        each.step([(batch, policy)])
    saved.save(directory)
    return t


def untouched(t: DrafterTrainer) -> tuple[object, ...]:
    """All that loading may change, to compare."""
    held = [*parameters(t).values(), *t._optimizer.state().values()]
    return [tensor.tolist() for tensor in held], t.windows, t.skipped_windows, t.tokens_trained


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": "x"}, "windows must be a count, got 'x'"),
        ({"windows": True}, "windows must be a count"),
        ({"skipped_windows": -1}, "skipped_windows must be a count, got -1"),
        ({"tokens_trained": 1.5}, "tokens_trained must be a count"),
        ({"drafter": 5}, "drafter must be an object, got 5"),
        ({"drafter": None}, "drafter must be an object, got None"),
    ],
)
def test_a_damaged_pointer_is_refused_and_nothing_changes(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    t = beside_a_saved_one(tmp_path)
    path, before = tmp_path / "trainer.json", untouched(t)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        t.load(tmp_path)
    assert untouched(t) == before
    path.write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="cannot be read"):
        t.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("exp_avg.norm.weight", math.nan, "exp_avg.norm.weight holds NaN"),
        ("exp_avg_sq.norm.weight", math.inf, "exp_avg_sq.norm.weight holds NaN"),
        ("exp_avg_sq.norm.weight", -1.0, "exp_avg_sq.norm.weight is negative"),
        ("exp_avg.norm.weight", 1e300, "exp_avg.norm.weight holds NaN or infinity"),
        ("step.norm.weight", math.nan, "step.norm.weight holds NaN"),
        ("step.norm.weight", -1.0, "step.norm.weight is negative"),
        ("step.norm.weight", None, "1 tensors are missing or misshapen, first 'step.norm.weight'"),
    ],
)
def test_a_state_with_wrong_numbers_is_refused_and_nothing_changes(
    tmp_path: Path, name: str, value: float | None, message: str
) -> None:
    t = beside_a_saved_one(tmp_path)
    path, before = tmp_path / "moments.safetensors", untouched(t)
    tensors = load_file(path)
    tensor = tensors.pop(name)
    if value is not None:
        tensors[name] = torch.full(tensor.shape, value, dtype=torch.float64)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        t.load(tmp_path)
    assert untouched(t) == before


@pytest.mark.parametrize("stored", [True, False], ids=["a field of theirs", "a field of ours"])
def test_a_state_of_another_drafter_is_refused_by_the_fields_of_either_side(tmp_path: Path, stored: bool) -> None:
    """A switch that is off is no field at all."""
    switched, plain = trainer(), trainer()
    assert isinstance(switched.drafter.config, DrafterConfig)
    switched.drafter.config = replace(switched.drafter.config, norm_before_residual=True)
    (switched if stored else plain).save(tmp_path)
    pair = (True, "absent") if stored else ("absent", True)
    with pytest.raises(CheckpointError, match=re.escape(f"{{'norm_before_residual': {pair}}}")):
        (plain if stored else switched).load(tmp_path)


# --- learning -------------------------------------------------------------------------------------------------------

V, H = 40, 32


@cache
def markov_rollouts(count: int, seed: int) -> tuple[RolloutBatch, Policy]:
    """A target that a drafter can learn: the next token's distribution depends on the last token alone."""
    fixed = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, H, generator=fixed)
    head = torch.randn(V, H, generator=fixed) * 0.8
    state = torch.tanh(embedding @ torch.randn(H, H, generator=fixed) / H**0.5)
    lift = torch.randn(H, 3 * H, generator=fixed) / H**0.5
    g = torch.Generator().manual_seed(seed)
    length = 24
    ids = torch.randint(V, (count, length), generator=g)
    probabilities = torch.softmax(state @ head.T, -1)
    for t in range(1, length):
        ids[:, t] = torch.multinomial(probabilities[ids[:, t - 1]], 1, generator=g)[:, 0]
    flat = ids.reshape(-1)
    last = state[flat]
    logits = last @ head.T
    logprobs = torch.zeros(flat.shape)
    logprobs[1:] = torch.log_softmax(logits[:-1], -1).gather(1, flat[1:, None])[:, 0]
    batch = RolloutBatch(
        input_ids=flat,
        cu_seqlens=torch.arange(0, count * length + 1, length),
        loss_mask=mask_of(length, 6).repeat(count),
        aux_hidden=last @ lift,
        logprobs=logprobs,
        last_hidden=last,
        logsumexp=logits.logsumexp(-1),
    )
    return batch, Policy(0, embedding, TargetHead(head))


def learner(vocabulary: DraftVocabulary, learning_rate: float = 1e-2) -> DrafterTrainer:
    torch.manual_seed(0)
    config = DrafterConfig(H, H, 2 * H, 4, 2, 8, V, len(vocabulary), (1, 2, 3))
    drafter = Eagle3Drafter(config, vocabulary)
    return DrafterTrainer(drafter, TrainConfig(steps_ahead=3, learning_rate=learning_rate, grad_clip=1.0))


def acceptance(t: DrafterTrainer, batch: RolloutBatch, policy: Policy) -> list[float]:
    with torch.no_grad():
        result = t._loss(t.prepare(batch), policy, 1)
    assert result is not None
    return [s / n for s, n in zip(result.acceptance_sums.tolist(), result.entries, strict=True)]


@dataclass
class Learnt:
    """What a learner over the whole vocabulary makes of 100 windows."""

    losses: list[float]
    before: list[float]
    after_40: list[float]
    after: list[float]


@pytest.fixture(scope="module")
def learnt() -> Learnt:
    held_out, policy = markov_rollouts(32, seed=999)
    t = learner(DraftVocabulary.full(V))
    losses, accepted = [], [acceptance(t, held_out, policy)]
    for number in range(100):
        losses.append(t.step([(markov_rollouts(32, number % 16)[0], policy)]).loss)
        if number in (39, 99):
            accepted.append(acceptance(t, held_out, policy))
    return Learnt(losses, *accepted)


def test_a_tiny_drafter_learns_its_target_and_acceptance_rises_on_unseen_rollouts(learnt: Learnt) -> None:
    assert learnt.losses[-1] < learnt.losses[0] / 5
    assert all(b < 0.35 for b in learnt.before)
    assert all(a > 0.8 for a in learnt.after)


def test_with_a_reduced_vocabulary_acceptance_approaches_the_covered_mass() -> None:
    batch, policy = markov_rollouts(32, seed=999)
    counts = torch.bincount(batch.input_ids, minlength=V)
    vocabulary = DraftVocabulary.build(counts, 24)
    t = learner(vocabulary)
    for number in range(80):
        t.step([(markov_rollouts(32, number % 16)[0], policy)])
    covered = vocabulary.coverage(counts)
    for a in acceptance(t, batch, policy):
        assert covered - 0.15 < a < covered + 0.03


def test_a_drafter_trained_on_tokens_in_random_order_learns_less(learnt: Learnt) -> None:
    """In this world the target depends on the last token alone: against the wrong token nothing can be learnt."""
    held_out, policy = markov_rollouts(32, seed=999)
    wrong = learner(DraftVocabulary.full(V))
    for number in range(40):
        batch = markov_rollouts(32, number % 16)[0]
        shuffled = batch.input_ids[torch.randperm(batch.tokens, generator=torch.Generator().manual_seed(number))]
        wrong.step([(replace(batch, input_ids=shuffled), policy)])
    for bad, good in zip(acceptance(wrong, held_out, policy), learnt.after_40, strict=True):
        assert bad < good - 0.1
