"""One follower, one engine without HTTP, tick by tick: what is asked for, remembered, told and credited."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.engine.agent_fixtures import manifest

from rl_hooks.agent import follower
from rl_hooks.agent.canary import CanaryRule
from rl_hooks.agent.download import prune_cache
from rl_hooks.agent.follower import EngineFollower
from rl_hooks.agent.metrics import AgentMetrics
from rl_hooks.durable import replace_file
from rl_hooks.engines.counting.counters import ANOTHERS_DRAFTER, Counts, Snapshot
from rl_hooks.engines.protocol import EngineState
from rl_hooks.errors import DownloadError, EngineError, MetricsError, OtherBytesError, SwapRefusedError
from rl_hooks.format.release import RECEIPT, Release, VerifiedManifest, parse_manifest

RULE = CanaryRule(rounds=100, patience=1.0)


class PlainEngine:
    """Serves what it is asked to load, and counts what a test tells it."""

    url = "in-process:plain"

    def __init__(self) -> None:
        self.now = EngineState(None, False, 0)
        self.counts: Counts | None = Counts()
        self.exact: dict[str, Counts] | None = None  # by version, of an engine that counts so
        self.policy: int | None = None
        self.times: tuple[float, float, float, float] | None = None
        self.asked: list[str] = []
        self.faults: list[EngineError] = []  # of the next swaps
        self.reads: list[str | None] = []  # SHA-256 that the next swaps read; then none is told
        self.loads = True
        self.before_load: Callable[[], None] = lambda: None  # what happens while it is asked for the next swaps
        self.memory: dict[str, Any] = {}  # the follower's, as it was when the engine was asked
        self.memory_file: Path | None = None

    async def state(self) -> EngineState:
        return self.now

    async def snapshot(self) -> Snapshot:
        if self.exact is not None:
            exact = tuple((version, self.policy, counts) for version, counts in self.exact.items())
            return Snapshot.of_exact(exact, Counts(), self.policy)
        if self.counts is None:
            raise MetricsError("no counters")
        return Snapshot(self.counts, self.policy, self.times)

    async def swap(self, release: Release) -> str | None:
        self.asked.append(release.version)
        if self.memory_file is not None and self.memory_file.is_file():
            self.memory = json.loads(self.memory_file.read_text())
        if self.faults:
            raise self.faults.pop(0)
        read = self.reads.pop(0) if self.reads else None
        self.before_load()
        if self.loads:
            self.now = dataclasses.replace(
                self.now, version=release.version, loaded=True, swaps=self.now.swaps + 1, sha256=read
            )
        return read

    def serves(self, rounds: int, accepted: int) -> None:
        """Count so many more rounds, with so many accepted tokens in each."""
        more = Counts(rounds, 3 * rounds, rounds * accepted, (), None, 1.0)
        if self.exact is not None:
            version = str(self.now.version)
            self.exact[version] = self.exact.get(version, Counts()) + more
        else:
            assert self.counts is not None
            self.counts += more

    def loaded_by_another(self, version: str | None) -> None:
        self.now = dataclasses.replace(self.now, version=version, loaded=True, swaps=self.now.swaps + 1)

    def restarts(self, version: str | None = None) -> None:
        self.now, self.counts = EngineState(version, True, 0), Counts()


class Bench:
    """A follower over a cache, and the releases in it."""

    def __init__(self, root: Path) -> None:
        self.cache, self.engine, self.metrics = root / "default", PlainEngine(), AgentMetrics()
        self.fetched: list[tuple[str, bool]] = []
        self.unreachable: list[DownloadError] = []  # what the next downloads end with
        self.follower = self.make()
        self.engine.memory_file = self.follower._memory

    def make(self, rule: CanaryRule = RULE) -> EngineFollower:
        """As an agent that starts has it."""
        self.follower = EngineFollower(self.engine, rule, self.metrics, self.cache, self.fetch)
        return self.follower

    def fetch(self, manifest: VerifiedManifest, again: bool) -> Release:
        self.fetched.append((manifest.version, again))
        if self.unreachable:
            raise self.unreachable.pop(0)
        return self.put(manifest)

    def put(self, manifest: VerifiedManifest) -> Release:
        path = self.cache / manifest.version
        path.mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            (path / file.name).write_bytes(bytes_of(manifest.version, file.name))
        digests = {file.name: file.sha256 for file in manifest.files}
        (path / RECEIPT).write_text(json.dumps({"digest": manifest.digest, "sha256": digests}))
        return Release(manifest, path, digests)

    def release(self, number: int, sequence: int | None = None, **changes: Any) -> Release:
        files = {name: bytes_of(str(number), name) for name in ("model.safetensors", "config.json")}
        document = manifest(number, files, number if sequence is None else sequence, "published", **changes)
        return self.put(parse_manifest(document, "default"))

    def tick(self, offer: Release | None) -> bool:
        return asyncio.run(self.follower.tick(offer))

    def swaps(self, outcome: str) -> float:
        labels = {"engine": self.engine.url, "outcome": outcome}
        return self.metrics.registry.get_sample_value("draftalign_agent_swaps_total", labels) or 0.0

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"draftalign_agent_{name}", labels)


def bytes_of(version: str, name: str) -> bytes:
    """Of one file: those of version `v000007-...` are the number's."""
    number = int(version.removeprefix("v").partition("-")[0])
    return f"{number} {name}".encode()


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_each_offer_is_loaded_once_and_again_only_where_it_is_pushed_again(bench: Bench) -> None:
    first, second = bench.release(1, sequence=0), bench.release(2)
    assert bench.follower.sequence == -1
    assert bench.tick(first)
    first = bench.release(1)
    assert [bench.tick(first), bench.tick(first)] == [True, False]
    assert (bench.follower.sequence, bench.follower.loaded_version) == (1, first.version)
    assert bench.tick(second)
    again = bench.release(2, sequence=5)
    assert [bench.tick(again), bench.tick(again)] == [True, False]
    assert bench.engine.asked == [first.version, first.version, second.version, second.version]
    assert bench.follower.sequence == 5
    bench.make()  # the next agent knows what was loaded, and asks for nothing
    assert bench.follower.sequence == 5
    assert not bench.tick(again)
    assert not bench.tick(bench.release(2, sequence=4)), "an older push is not one more"
    assert bench.swaps("swapped") == 4
    assert bench.fetched == []
    assert bench.value("last_contact_timestamp_seconds", peer=bench.engine.url)
    assert bench.value("drafter_info", run="default", engine=bench.engine.url, version=second.version) == 1.0
    bench.follower.forget()
    assert not bench.follower._memory.exists()
    bench.follower.forget()


def test_an_engine_that_had_the_offer_before_its_first_agent_keeps_it(bench: Bench) -> None:
    offered = bench.release(1)
    bench.engine.now = EngineState(offered.version, True, 0)
    assert not bench.tick(offered)
    assert (bench.follower.sequence, bench.follower.books.canary.good) == (1, offered.version)
    assert bench.follower.versions_in_use() == {offered.version}
    assert bench.engine.asked == []


@pytest.mark.parametrize("done", [True, False])
def test_a_swap_is_written_down_before_the_engine_is_asked_for_it(bench: Bench, done: bool) -> None:
    first, second = bench.release(1), bench.release(2)
    bench.tick(first)
    bench.engine.faults = [EngineError("no answer came")]
    with pytest.raises(EngineError, match="no answer"):
        bench.tick(second)
    assert bench.engine.memory["pending"]["manifest"]["version"] == second.version
    assert bench.follower.withheld == "no answer came"
    assert bench.swaps("failed") == 1
    assert bench.follower.versions_in_use() == {first.version, second.version}
    bench.make()
    if done:
        bench.engine.now = dataclasses.replace(bench.engine.now, version=second.version, swaps=2)
    assert bench.tick(second) == (not done)
    assert (bench.swaps("swapped"), bench.follower.sequence, bench.follower.withheld) == (2, 2, "")
    assert json.loads(bench.follower._memory.read_text())["pending"] is None


def test_a_swap_that_cannot_be_written_down_takes_place(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[bool]()

    def full(path: Path, data: bytes, *, durable: bool) -> None:
        written.append(durable)
        if durable:
            raise OSError(28, "No space left on device")
        replace_file(path, data, durable=False)

    monkeypatch.setattr(follower, "replace_file", full)
    assert bench.tick(bench.release(1))
    assert written == [True, False], "only what is asked for must survive a power cut"


def test_what_the_engine_refuses_is_not_asked_for_again_by_this_number(bench: Bench) -> None:
    first, second = bench.release(1), bench.release(2)
    bench.tick(first)
    bench.engine.faults = [SwapRefusedError("it does not fit")]
    with pytest.raises(SwapRefusedError):
        bench.tick(second)
    assert bench.follower.withheld == "it does not fit"
    assert bench.follower.versions_in_use() == {first.version}
    assert [bench.tick(second), bench.tick(second)] == [False, False]
    assert (bench.swaps("refused"), bench.engine.asked) == (1, [first.version, second.version])
    assert bench.tick(bench.release(2, sequence=9))
    unlike = bench.release(3, sequence=10, config_fingerprint="other")
    with pytest.raises(SwapRefusedError, match="cannot be swapped into in-process:plain: it has other sizes"):
        bench.tick(unlike)
    assert not bench.tick(unlike)
    assert (bench.swaps("refused"), bench.engine.asked[3:]) == (2, [])


def test_a_trial_goes_on_where_its_successor_was_refused(bench: Bench) -> None:
    _, trial = on_trial(bench)
    bench.engine.faults = [SwapRefusedError("it does not fit")]
    with pytest.raises(SwapRefusedError):
        bench.tick(bench.release(3))
    assert not bench.tick(bench.release(3))
    assert bench.engine.now.version == bench.follower.books.canary.trial == trial.version


def test_a_drafter_that_dies_after_its_successor_was_refused_is_loaded_again(bench: Bench) -> None:
    first, second = bench.release(1), bench.release(2)
    bench.tick(first)
    bench.engine.faults = [SwapRefusedError("it does not fit")]
    with pytest.raises(SwapRefusedError):
        bench.tick(second)
    bench.engine.now = dataclasses.replace(bench.engine.now, loaded=False)
    assert bench.tick(second)
    assert (bench.engine.asked[2:], bench.engine.now.loaded) == ([first.version], True)


@pytest.mark.parametrize("takes", [None, "mtp"])
def test_an_engine_that_drafts_by_a_method_of_its_own_is_only_counted(bench: Bench, takes: str | None) -> None:
    bench.engine.now = EngineState(None, False, 0, takes=None)  # it does not draft yet
    assert not bench.tick(bench.release(1))
    bench.engine.now = EngineState(None, True, 0, takes=takes, method="ngram")
    assert not bench.tick(bench.release(1))
    bench.engine.serves(100, 1)
    assert not bench.tick(bench.release(1))
    assert bench.engine.asked == []
    (bucket,) = bench.follower.ledger.buckets()
    assert (bucket.drafter_version, bucket.counts.rounds) == ("ngram", 100)
    assert bench.follower.is_loaded(bucket)


def test_an_engine_of_another_kind_is_told_and_one_with_its_own_module_takes_a_version_of_that(bench: Bench) -> None:
    bench.engine.now = EngineState(None, True, 0, takes="mtp")
    with pytest.raises(SwapRefusedError, match="its kind is eagle3, the engine was started for mtp"):
        bench.tick(bench.release(1))
    bench.engine.now = EngineState(None, True, 0, takes="mtp", method="mtp")
    assert bench.tick(bench.release(2, kind="mtp"))


def test_an_answer_that_another_version_is_loaded_is_a_failure(bench: Bench) -> None:
    bench.engine.loads = False
    with pytest.raises(EngineError, match="but says that None is loaded"):
        bench.tick(bench.release(1))
    assert (bench.swaps("failed"), bench.swaps("swapped"), bench.follower.sequence) == (1, 0, -1)


# --- bytes


def test_an_engine_that_read_other_bytes_gets_them_downloaded_again_once_and_then_at_each_tick(bench: Bench) -> None:
    offer = bench.release(1)
    good, bad = str(offer.sha256), "0" * 64
    bench.engine.reads = [bad, good]
    assert bench.tick(offer)
    assert (bench.engine.asked, bench.fetched) == ([offer.version] * 2, [(offer.version, True)])
    assert bench.value("errors_total", peer=bench.engine.url, kind="digest") == 1.0
    assert not bench.tick(offer)
    bench.engine.now = dataclasses.replace(bench.engine.now, sha256=bad)  # it was loaded otherwise meanwhile
    bench.engine.reads = [bad, bad]
    with pytest.raises(EngineError, match="does it read the same disk as this agent"):
        bench.tick(offer)
    assert bench.follower._process.mistrusted == bench.make()._process.mistrusted == offer.version
    bench.engine.serves(50, 1)
    bench.engine.now = dataclasses.replace(bench.engine.now, sha256=None)
    bench.engine.reads = [bad]
    with pytest.raises(EngineError, match="the same disk"):
        bench.tick(offer)
    assert len(bench.fetched) == 2, "the files are not the cause"
    assert bench.follower.ledger.unattributed_rounds == 50, "it is not the version that it names"
    bench.engine.reads = [good]
    assert bench.tick(offer)
    assert bench.follower._process.mistrusted is None
    assert bench.value("errors_total", peer=bench.engine.url, kind="digest") == 5.0


def test_an_engine_that_verifies_says_so_once_before_the_files_are_downloaded_again(bench: Bench) -> None:
    offer = bench.release(1)
    bench.engine.faults = [OtherBytesError("other bytes"), OtherBytesError("other bytes still")]
    with pytest.raises(OtherBytesError, match="still"):
        bench.tick(offer)
    assert (bench.engine.asked, bench.fetched) == ([offer.version] * 2, [(offer.version, True)])
    assert bench.value("errors_total", peer=bench.engine.url, kind="digest") == 2.0
    assert bench.follower.versions_in_use() == set()
    bench.engine.faults = [OtherBytesError("other bytes")]
    with pytest.raises(OtherBytesError):
        bench.tick(offer)
    assert len(bench.fetched) == 1, "they were downloaded again already"
    assert bench.tick(offer)
    assert bench.follower._process.fetched_again is None


@pytest.mark.parametrize("damage", ["bytes", "absent"])
def test_no_file_that_differs_from_its_download_is_offered_to_the_engine(
    bench: Bench, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    offer = bench.release(1)
    if damage == "bytes":
        (offer.path / "model.safetensors").write_bytes(b"rotten")
    else:
        for path in list(offer.path.iterdir()):
            path.unlink()
        offer.path.rmdir()
    bench.unreachable = [DownloadError("the service is away")]
    with pytest.raises(DownloadError):
        bench.tick(offer)
    assert (bench.follower.withheld, bench.engine.asked) == ("the service is away", [])
    assert bench.tick(offer)
    assert (bench.follower.withheld, bench.fetched) == ("", [(offer.version, False)] * 2)
    assert ("is not what was downloaded" in caplog.text) == (damage == "bytes")


# --- what is credited, and what the canary finds


def test_rounds_are_credited_to_what_was_loaded_throughout(bench: Bench) -> None:
    first, second = bench.release(1), bench.release(2)
    bench.engine.serves(7, 1)
    bench.tick(first)
    bench.engine.serves(40, 2)
    bench.tick(first)
    bench.engine.serves(5, 2)
    bench.engine.before_load = lambda: bench.engine.serves(3, 1)
    bench.tick(second)  # what came before the swap is credited
    bench.engine.serves(30, 1)
    bench.tick(second)
    found = {one.drafter_version: one.counts.rounds for one in bench.follower.ledger.buckets()}
    assert found == {first.version: 45, second.version: 30}
    assert bench.value("alpha", engine=bench.engine.url, drafter_version=second.version) == 2.0
    current = [bench.follower.is_loaded(bucket) for bucket in bench.follower.ledger.buckets()]
    assert current == [False, True]
    assert bench.value("unattributed_rounds", engine=bench.engine.url) == 3.0
    bench.engine.policy = 1
    bench.engine.serves(20, 1)
    bench.tick(second)
    current = [bench.follower.is_loaded(bucket) for bucket in bench.follower.ledger.buckets()]
    assert current == [False, False, True], "of an older policy is over"


def test_rounds_of_an_engine_that_knows_whose_they_are_are_credited_also_around_a_swap(bench: Bench) -> None:
    good, better, newest = (bench.release(number) for number in (1, 2, 3))
    bench.engine.exact = {}
    bench.tick(good)
    bench.engine.serves(100, 2)
    bench.tick(good)
    bench.tick(better)
    bench.engine.serves(60, 3)
    bench.tick(better)
    bench.engine.before_load = lambda: bench.engine.serves(40, 3)
    assert bench.tick(newest)
    found = {one.drafter_version: one.counts.rounds for one in bench.follower.ledger.buckets()}
    assert found == {good.version: 100, better.version: 100}
    ((verdict, sequence),) = bench.follower.books.verdicts
    assert (verdict.version, verdict.passed, sequence) == (better.version, True, 2)
    assert bench.follower.versions_in_use() == {better.version, newest.version}
    bench.engine.serves(20, 1)
    bench.tick(newest)
    life = bench.follower.ledger.life
    bench.engine.exact, bench.engine.before_load = {newest.version: Counts(5, 15, 5)}, lambda: None
    bench.engine.now = EngineState(newest.version, True, 0)  # another process
    bench.tick(newest)
    again = [one.counts.rounds for one in bench.follower.ledger.buckets() if one.life != life]
    assert again == [5]
    bench.engine.serves(10, 1)
    bench.engine.loaded_by_another("theirs")
    bench.tick(newest)
    again = [one.counts.rounds for one in bench.follower.ledger.buckets() if one.life != life]
    assert again == [15], "the engine says whose they were, whoever swapped since"


def test_what_was_served_while_the_counters_could_not_be_read_is_nobodys(bench: Bench) -> None:
    offer = bench.release(1)
    bench.tick(offer)
    counts, bench.engine.counts = bench.engine.counts, None
    bench.tick(offer)
    bench.engine.counts = counts
    bench.engine.serves(30, 1)
    assert not bench.tick(offer)
    assert bench.follower.ledger.version_counts(offer.version).rounds == 0


@pytest.mark.parametrize("method", [None, "ngram"])
def test_step_times_are_those_of_a_published_drafter(bench: Bench, method: str | None) -> None:
    offer = bench.release(1)
    if method:
        bench.engine.now = EngineState(None, True, 0, takes=None, method=method)
    bench.engine.times = (0.0, 0.0, 0.0, 1.0)
    bench.tick(offer)
    bench.engine.serves(100, 1)
    bench.engine.times = (100.0, 100.0, 2.0, 1.0)
    bench.tick(offer)
    steps = [] if method else [{"batch": 1.0, "depth": 3, "steps": 100, "seconds": 2.0}]
    assert bench.follower.books.step_times.document() == steps


def test_an_engine_without_counters_gets_its_drafters(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.engine.counts = None
    assert bench.tick(bench.release(1))
    assert not bench.tick(bench.release(1))
    assert bench.tick(bench.release(2))
    assert (bench.value("errors_total", peer=bench.engine.url, kind="metrics") or 0.0) >= 3.0
    assert caplog.text.count("no counters") == 1


def on_trial(bench: Bench) -> tuple[Release, Release]:
    """Two releases: a good one that has been counted, and one that has just come after it."""
    good, bad = bench.release(1), bench.release(2, gate={"alpha_served": 3.5})
    bench.tick(good)
    bench.engine.serves(100, 2)
    bench.tick(good)
    bench.tick(bad)
    assert (bench.follower.books.canary.good, bench.follower.books.canary.trial) == (good.version, bad.version)
    return good, bad


@pytest.mark.parametrize("agent_restarts", [False, True])
def test_a_worse_version_is_swapped_back_and_stays_out_until_a_person_insists(
    bench: Bench, agent_restarts: bool
) -> None:
    good, bad = on_trial(bench)
    if agent_restarts:
        bench.make()
        assert not bench.tick(bad)
    bench.engine.serves(100, 0)
    assert bench.tick(bad)
    assert bench.engine.asked == [good.version, bad.version, good.version]
    assert bench.swaps("rolled_back") == 1
    assert (
        bench.follower.withheld
        == f"its canary swapped {bad.version} back: α 1.00 over 100 rounds, 3.00 with {good.version}"
    )
    ((verdict, sequence),) = bench.follower.books.verdicts
    assert (verdict.version, verdict.passed, sequence) == (bad.version, False, 2)
    if agent_restarts:
        bench.make()
    assert [bench.tick(bad), bench.tick(None)] == [False, False]
    assert not bench.tick(bench.release(2, sequence=3))
    assert bench.tick(bench.release(2, sequence=4, override_canary=True))
    assert bench.follower.books.canary.trial is None, "a person wants it: no trial"
    assert bench.follower.books.canary.good == bad.version


def test_a_version_that_passes_is_what_the_next_one_falls_back_to(bench: Bench) -> None:
    good, better = on_trial(bench)
    assert bench.follower.versions_in_use() == {good.version, better.version}
    bench.engine.serves(100, 3)
    assert not bench.tick(better)
    assert bench.follower._choice.fallback == better
    assert bench.follower.withheld == ""


@pytest.mark.parametrize("known", [False, True])
def test_a_trial_that_ended_before_a_restarted_agent_had_an_offer_leaves_a_version_to_go_back_to(
    bench: Bench, known: bool
) -> None:
    """The version that passed; an older one by a memory that does not name what was loaded."""
    good, better = on_trial(bench)
    if not known:
        memory = json.loads(bench.follower._memory.read_text())
        del memory["loaded"]
        bench.follower._memory.write_text(json.dumps(memory))
    bench.make()
    in_use = bench.follower.versions_in_use()
    assert in_use == ({good.version, better.version} if known else {good.version})
    bench.engine.serves(100, 3)
    assert not bench.tick(None)
    assert (bench.follower.books.canary.good, bench.follower.withheld) == (better.version, "")
    worse = bench.release(3)
    bench.tick(worse)
    bench.engine.serves(100, 0)
    assert bench.tick(worse)
    assert bench.engine.now.version == (better if known else good).version


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("agent_restarts", [False, True])
def test_an_engine_that_was_started_again_before_there_is_an_offer_gets_the_good_version(
    bench: Bench, agent_restarts: bool, named: bool
) -> None:
    """What was on trial is tried again once it is offered."""
    good, tried = on_trial(bench)
    if agent_restarts:
        bench.make()
    bench.engine.restarts("by-hand" if named else None)
    assert [bench.tick(None), bench.tick(None)] == [True, False]
    assert (bench.engine.now.version, bench.swaps("restored")) == (good.version, 1)
    assert bench.follower.sequence == tried.sequence, "an older offer is still refused"
    assert bench.tick(tried)
    assert (bench.engine.now.version, bench.follower.books.canary.trial) == (tried.version, tried.version)
    assert bench.fetched == []


def test_an_engine_of_which_nothing_is_remembered_is_left_as_it_is_until_there_is_an_offer(bench: Bench) -> None:
    bench.tick(None)
    bench.engine.restarts()
    assert not bench.tick(None)
    assert bench.engine.asked == []


def test_a_version_that_has_nothing_to_be_compared_with_is_what_the_next_one_falls_back_to(bench: Bench) -> None:
    bench.make(dataclasses.replace(RULE, baseline_max_age_seconds=-1.0))
    _, unjudged = on_trial(bench)
    bench.engine.serves(10, 0)
    assert not bench.tick(unjudged)
    assert bench.follower.books.canary.good == unjudged.version
    assert bench.follower._choice.fallback == unjudged


def test_what_it_would_go_back_to_is_asked_for_once_where_the_engine_refuses_that_too(bench: Bench) -> None:
    good, bad = on_trial(bench)
    bench.engine.serves(100, 0)
    bench.engine.faults = [SwapRefusedError("not that")]
    with pytest.raises(SwapRefusedError):
        bench.tick(bad)
    assert not bench.tick(bad)
    assert bench.engine.asked == [good.version, bad.version, good.version]


@pytest.mark.parametrize("how", ["swap", "swap of the same", "restart"])
def test_a_trial_that_is_interrupted_begins_again(bench: Bench, how: str) -> None:
    _, worse = on_trial(bench)
    for _ in range(2):
        bench.engine.serves(60, 1)
        bench.tick(worse)
        assert bench.follower.books.verdicts == []
        if how == "restart":
            bench.engine.restarts()
        else:
            bench.engine.loaded_by_another("theirs" if how == "swap" else worse.version)
        bench.tick(worse)
    if how == "swap of the same":
        assert bench.follower.books.canary.trial is None, "nobody knows its bytes"
        return
    assert bench.follower.books.canary.trial == worse.version
    assert bench.swaps("restored") == 0, "it is on trial"
    bench.engine.serves(100, 1)
    assert bench.tick(worse) == (how == "swap")
    judged = [(verdict.version, verdict.passed) for verdict, _ in bench.follower.books.verdicts]
    assert judged == [(worse.version, how == "restart")], "what was counted before a restart is of other prompts"


def test_what_replay_said_of_the_version_before_counts_in_the_trial(bench: Bench) -> None:
    good = bench.release(1)
    harder = bench.release(2, gate={"alpha_served": 1.5})  # the policy has become harder to draft for
    bench.tick(good)
    bench.engine.serves(100, 2)
    bench.tick(good)
    bench.tick(harder)
    bench.engine.serves(100, 1)
    assert not bench.tick(harder)
    assert bench.follower.books.canary.good == harder.version


@pytest.mark.parametrize("named", [False, True])
def test_an_engine_that_was_started_again_gets_its_drafter_back(bench: Bench, named: bool) -> None:
    """Also one that was started with a drafter of this name: nobody knows its bytes."""
    offer = bench.release(1)
    bench.tick(offer)
    bench.engine.serves(40, 2)
    bench.tick(offer)
    life = bench.follower.ledger.life
    bench.engine.now, bench.engine.counts = EngineState(offer.version if named else None, True, 0), Counts(5, 15, 5)
    assert bench.tick(offer)
    assert bench.swaps("restored") == (not named)
    assert bench.follower.ledger.life != life
    assert not bench.tick(offer)
    found = [(one.life == life, one.counts.rounds) for one in bench.follower.ledger.buckets()]
    assert found == [(True, 40), (False, 5)][: 1 + named]
    assert bench.follower.ledger.unattributed_rounds == (0 if named else 5)


def test_an_engine_that_starts_again_before_it_does_a_swap_begins_another_life(bench: Bench) -> None:
    first, second = bench.release(1), bench.release(2)
    bench.tick(first)
    bench.tick(second)
    life, bench.engine.before_load = bench.follower.ledger.life, bench.engine.restarts
    assert bench.tick(bench.release(3))
    assert bench.follower.ledger.life != life


def test_a_drafter_that_died_in_its_engine_is_loaded_again_as_a_restored_one(bench: Bench) -> None:
    offer = bench.release(1)
    bench.tick(offer)
    bench.engine.now = dataclasses.replace(bench.engine.now, loaded=False)
    assert bench.tick(offer)
    assert bench.swaps("restored") == 1


def test_another_clients_drafter_is_replaced_and_no_round_around_it_is_credited(bench: Bench) -> None:
    good, _ = on_trial(bench)
    offer = bench.release(2)
    bench.engine.serves(30, 2)
    bench.engine.loaded_by_another("theirs")
    assert bench.tick(offer)
    assert bench.follower.ledger.unattributed_rounds == 30
    assert bench.value("contested", engine=bench.engine.url) is None
    assert bench.follower.books.canary.good == good.version
    assert (bench.engine.now.version, bench.swaps("rolled_back")) == (offer.version, 0)


def contested(bench: Bench, offer: Release, names: Sequence[str | None]) -> None:
    """Another client undoes each swap, until the agent gives up."""
    for name in names:
        bench.tick(offer)
        bench.engine.loaded_by_another(name)


@pytest.mark.parametrize("comes_back", ["restart", "swap"])
def test_an_engine_that_another_client_keeps_is_given_up_only_counted_and_taken_back_when_that_one_has_gone(
    bench: Bench, comes_back: str
) -> None:
    offer = bench.release(1)
    (bench.cache.parent / "other" / "theirs").mkdir(parents=True)
    contested(bench, offer, ["theirs"] * 5)
    life = bench.follower.ledger.life
    assert not bench.tick(offer)
    assert "5 times another client undid a swap of run 'default'" in bench.follower.withheld
    assert "is of run 'other'" in bench.follower.withheld
    assert bench.value("contested", engine=bench.engine.url) == 1.0
    assert (bench.swaps("swapped"), bench.swaps("rolled_back")) == (5, 0)
    assert bench.follower.ledger.life != life
    bench.engine.serves(30, 2)
    assert not bench.tick(offer)
    (bucket,) = [one for one in bench.follower.ledger.buckets() if one.drafter_version == "theirs"]
    assert (bucket.counts.rounds, bucket.method) == (30, ANOTHERS_DRAFTER)
    life = bench.follower.ledger.life
    bench.engine.loaded_by_another("theirs")
    bench.tick(offer)
    assert bench.follower.ledger.life == life, "it is given up once"
    if comes_back == "restart":
        bench.engine.restarts()
    else:
        bench.engine.loaded_by_another(offer.version)
    bench.tick(offer)
    assert bench.value("contested", engine=bench.engine.url) == 0.0
    assert bench.follower.ledger.life != life
    assert not bench.follower._process.contest.lost


@pytest.mark.parametrize("named", [False, True])
def test_a_client_that_loads_ours_or_one_without_a_name_is_no_rival(bench: Bench, named: bool) -> None:
    offer = bench.release(1)
    contested(bench, offer, [offer.version if named else None] * 7)
    bench.tick(offer)
    assert bench.value("contested", engine=bench.engine.url) is None


@pytest.mark.parametrize("name", ["theirs", ".."])
def test_an_agent_that_found_anothers_drafter_there_gives_up_sooner(bench: Bench, name: str) -> None:
    bench.engine.now = EngineState(name, True, 3)
    contested(bench, bench.release(1), ["theirs"] * 3)
    assert not bench.tick(bench.release(1))
    assert bench.follower._process.contest.lost
    ours = Bench(bench.cache.parent / "b")
    ours.engine.now = EngineState(ours.release(7).version, True, 3)  # an older one of this run
    contested(ours, ours.release(1), ["theirs"] * 3)
    ours.tick(ours.release(1))
    assert not ours.follower._process.contest.lost
    assert ours.follower.withheld == ""


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"rejected": {"v000002": 2}}', "without a key"])
def test_a_memory_that_cannot_be_read_costs_all_but_what_was_rejected(bench: Bench, text: str | None) -> None:
    bench.tick(bench.release(1))
    if text is None:
        bench.follower._memory.unlink()
        bench.follower._memory.mkdir()
    elif text == "without a key":  # as an older agent wrote it
        known = json.loads(bench.follower._memory.read_text())
        bench.follower._memory.write_text(json.dumps({key: known[key] for key in known if key != "withheld"}))
    else:
        bench.follower._memory.write_text(text)
    made = bench.make()
    assert (made.sequence, made.loaded_version) == (-1, None)
    assert made._choice.rejected == ({"v000002": 2} if text and "rejected" in text else {})


def test_an_engine_is_remembered_before_anything_was_downloaded_and_keeps_its_files(bench: Bench) -> None:
    assert not bench.tick(None)
    assert bench.follower._memory.exists()
    assert bench.value("alpha", engine=bench.engine.url, drafter_version="None") is None
    good, bad = on_trial(bench)
    assert prune_cache(bench.cache.parent, "default", set()) == []
    os.utime(bench.follower._memory, (0, 0))
    assert prune_cache(bench.cache.parent, "default", set()) == [good.version, bad.version]


@pytest.mark.parametrize("ago", [3600, -3600], ids=["it was away for an hour", "its clock was set back"])
def test_the_time_without_an_agent_counts(bench: Bench, ago: int) -> None:
    on_trial(bench)
    written = bench.follower._memory.stat().st_mtime - ago
    os.utime(bench.follower._memory, (written, written))
    age = bench.make().books.canary.dump(time.monotonic())["baseline_age_seconds"]
    assert age >= max(ago, 0)
