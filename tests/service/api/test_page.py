"""The page, driven in headless Chromium against the real series and metrics."""

from __future__ import annotations

import asyncio
import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from helpers.service import page_fixtures
from helpers.service.browser_fixtures import CHROMIUM, Browser, running_browser
from helpers.service.page_fixtures import PAGE, sample_run, serving
from helpers.service.service_fixtures import HEADERS, RunningService, run_file
from helpers.service.storage_fixtures import Store
from helpers.worker.record_fixtures import compared, stored
from helpers.worker.worker_fixtures import Bench, nest
from redis import Redis

import service.monitor.headline
from service.api.app import page_html
from service.api.context.context import ServiceContext
from service.api.snapshot import RunView, read_followed, run_text
from service.monitor.events import RunEvent
from service.monitor.live.watch import EngineVerdict, Watch
from service.monitor.metrics import RunSnapshot
from service.monitor.records import DrafterSums, LaneGauges
from service.monitor.worth import AtBatch, Worth, step_speedup


class Document(HTMLParser):
    """Text by id, and the elements that the tests count."""

    VOID = frozenset({"br", "img", "input", "link", "meta"})

    def __init__(self, dom: str) -> None:
        super().__init__(convert_charrefs=True)
        self._open: list[tuple[str, str | None]] = []
        self.texts: dict[str, str] = {}
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {name: value or "" for name, value in attrs}
        self.elements.append((tag, attributes))
        if tag not in self.VOID:
            self._open.append((tag, attributes.get("id")))

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data: str) -> None:
        for _, name in self._open:
            if name is not None:
                self.texts[name] = self.texts.get(name, "") + data

    def having(self, attribute: str, value: str | None = None) -> list[dict[str, str]]:
        return [a for _, a in self.elements if attribute in a and value in (None, a[attribute])]

    def hidden(self, name: str) -> bool:
        return any(a.get("id") == name and "hidden" in a for _, a in self.elements)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all pages here."""
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian package chromium)")
    with running_browser(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


def browse(url: str, browser: Browser, seconds: float = 2.5) -> Document:
    return Document(browser.dom(url, seconds))


def show(snapshot: RunSnapshot, browser: Browser, **more: Any) -> Document:
    with serving({"default": snapshot}, **more) as url:
        return browse(url, browser)


def test_the_page_asks_nobody_but_its_own_origin() -> None:
    text = PAGE.read_text()
    outside = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert "default-src 'none'" in text
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text


def test_each_metric_that_the_page_reads_exists() -> None:
    named = re.findall(r'(?:gauge|sample)\("(\w+)"|m\.name === "(\w+)"', page_html())
    read = {f"draftalign_{first or second}" for first, second in named}
    known = set(re.findall(r"draftalign_\w+", (PAGE.parents[2] / "docs" / "reference" / "metrics.md").read_text()))
    assert len(read) > 8
    assert read <= known


def test_a_script_that_got_into_the_page_does_not_run(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = "<script>document.body.dataset.stolen = 'yes'</script><img src='data:,' onerror=\"document.title = 'no'\">"
    monkeypatch.setattr(page_fixtures, "page_html", lambda: page_html().replace("</body>", mine + "</body>"))
    with serving({"default": sample_run(60)}) as url:
        dom = browser.dom(url, 2.5)
    assert mine[:20] in dom
    assert "data-stolen" not in dom
    assert "<title>no</title>" not in dom
    assert "tokens per round" in Document(dom).texts["headline"], "its own script ran"


def test_a_run_is_drawn_with_its_series_marks_and_headline(browser: Browser) -> None:
    snapshot = sample_run(60)
    page = show(snapshot, browser)
    assert re.match(
        r"Serving: v0000\d\d gives 3\.\d\d tokens per round\. On the newest rollouts that tested both it was 3\.\d\d "
        r"against 1\.\d\d of the first drafter, frozen\.$",
        page.texts["headline"],
    )
    kinds = [event.event for event in snapshot.history]
    assert f"{kinds.count('published')} published, {kinds.count('refused')} refused" in page.texts["detail"]
    assert {a["data-series"] for a in page.having("data-series")} >= {
        "served",
        "frozen",
        "live",
        "best",
        "n-gram",
        "reward",
    }
    for kind in ("published", "refused", "rolled_back", "pushed_again"):
        assert len(page.having("data-event", kind)) == kinds.count(kind) > 0
    assert len(page.having("data-series", "live")) == 60
    tiles = page.texts["tiles"]
    for word in ("Rounds saved", "492 k", "each pass counted", "9.0 MiB of 16 GiB", "train", "fast lane at 22 %"):
        assert word in tiles
    assert page.texts["events"].count(" at policy ") == 9
    assert "does not always fall" in page.texts["full"]
    assert page.texts["connection"] == "live"


def test_drafters_are_compared_on_rollouts_that_all_were_scored_on(browser: Browser) -> None:
    """The worker passed over the newest policy versions, on which the served drafter is far better than before."""
    snapshot = sample_run(30)
    passed_over = [
        replace(
            record,
            frozen=None,
            best=None,
            best_version=None,
            served=replace(served, tokens=1.5 * served.tokens),
        )
        for record in snapshot.scores[-3:]
        if (served := record.served) is not None
    ]
    last = snapshot.scores[-4]
    assert last.frozen is not None
    assert last.served is not None
    before, beside = last.frozen.alpha, last.served.alpha
    page = show(replace(snapshot, scores=[*snapshot.scores[:-3], *passed_over]), browser)
    assert page.texts["headline"].endswith(
        f" On the newest rollouts that tested both it was {beside:.2f} against {before:.2f} of the first drafter, "
        "frozen."
    )
    assert "Rounds saved–too few prompts to tell" in page.texts["tiles"]


SPREAD = (0.85, 0.9, 0.95, 1.0, 1.0, 1.05, 1.1, 1.15)


def of_versions(ratio: float, served: str = "v2") -> RunSnapshot:
    """A run whose served drafter has this many times the first one's α, by prompts that differ."""
    batches = [compared(n, [ratio * one for one in SPREAD], served) for n in range(1, 13)]
    best = [
        replace(one, best=one.served if ratio > 1 else one.frozen, best_version=served if ratio > 1 else "v1")
        for one in batches
    ]
    latest = {"version": served, "sequence": 2, "created": time.time()}
    return replace(stored((), worker={"heartbeat": time.time()}, latest=latest), scores=best)


def test_rounds_saved_have_an_interval_and_none_are_said_where_that_holds_none(browser: Browser) -> None:
    better = of_versions(1.25)
    now = better.current
    assert now is not None
    assert now.compared is not None
    low, high = (round(100 * (1 - 1 / (end or math.nan))) for end in (now.compared.low, now.compared.high))
    ratio = now.compared.alpha_served / now.compared.alpha_frozen
    tiles = show(better, browser).texts["tiles"]
    assert f"Rounds saved{round(100 * (1 - 1 / ratio))} %{low} to {high} % against the frozen drafter" in tiles
    equal = show(of_versions(1.01), browser).texts["tiles"]
    assert re.search(r"Rounds saved–-\d to \d %: level with the frozen drafter", equal)
    later = replace(better.scores[-1], entry_id="99-0", drafter_version="v3", frozen=None, best=None)
    replaced = show(replace(better, scores=[*better.scores, later]), browser).texts["tiles"]
    assert "Rounds saved–v3 was not compared yet" in replaced
    assert "Publication lag–not compared yet" in replaced


@pytest.mark.parametrize(("ratio", "words"), [(0.8, " behind v1; chance alone makes up to"), (0.99, ", no more than")])
def test_a_publication_lag_stands_beside_what_chance_makes(ratio: float, words: str, browser: Browser) -> None:
    snapshot = of_versions(ratio)
    now = snapshot.current
    assert now is not None
    assert now.compared is not None
    chance = (now.compared.by_chance or math.nan) * now.compared.alpha_served
    tile = show(snapshot, browser).texts["tiles"].partition("Publication lag")[2]
    assert tile.startswith(f"{now.publication_lag:.2f}tokens per round{words}")
    assert f"{chance:.2f}" in tile.partition("Headroom")[0]


def test_a_published_version_says_what_was_promised_and_what_was_realised(browser: Browser) -> None:
    gate = {"gain": 0.14, "promised": 0.12, "low": 0.02}
    event = {"policy_version": 1, "version": "v000002-bb", "sequence": 2, "time": 10.0}
    published = event | {"event": "published", "reason": "published", "gate": gate}
    refused = {"event": "refused", "policy_version": 1, "time": 11.0, "reason": "not shown", "gate": {"gain": 0.004}}
    measured = event | {"event": "realised", "promised": 0.12, "realised": 0.071, "time": 20.0}
    snapshot = sample_run(5)

    def events(*written: dict[str, Any]) -> str:
        return show(replace(snapshot, history=[RunEvent.of(one) for one in written]), browser).texts["events"]

    before = events(published, refused)
    assert "gain +12.0 % promised" in before
    assert "realised" not in before
    assert "gain +0.4 % expected; not shown" in before
    assert "candidate not published yet" in before, "it goes on"
    assert "v000003 refused by the gate" in events(refused | {"version": "v000003-cc"}), "a sent drafter does not"
    after = events(published, measured).partition("v000002 published")
    for part in (after[0], after[2]):  # newest first: what was measured, and what was published
        assert "gain +12.0 % promised, +7.1 % realised" in part
    damaged = {name: value for name, value in measured.items() if name != "realised"}
    assert "gain +12.0 % promised" in (unknown := events(published, damaged))
    assert "realised" not in unknown


def test_charts_are_described_in_words_and_reachable_by_keyboard(browser: Browser) -> None:
    page = show(sample_run(12), browser)
    charts = [a for tag, a in page.elements if tag == "svg" and a.get("role") == "img"]
    assert len(charts) == 2
    assert all(a["tabindex"] == "0" and "Newest:" in a["aria-label"] for a in charts)
    assert "served" in charts[0]["aria-label"]
    assert page.having("aria-live")
    assert all(a.get("aria-pressed") == "true" for tag, a in page.elements if tag == "button" and "aria-pressed" in a)


@pytest.mark.parametrize("policies", [1, 3, 500])
def test_few_and_many_policy_versions_are_drawn_without_nonsense(policies: int, browser: Browser) -> None:
    page = show(sample_run(policies), browser)
    assert not page.hidden("full")
    drawn = " ".join(a.get("d", "") + a.get("cx", "") + a.get("cy", "") for _, a in page.elements)
    assert "NaN" not in drawn
    assert "Infinity" not in drawn
    assert "undefined" not in page.texts["full"]
    assert len(page.elements) < 3000


def test_before_the_first_rollout_it_says_how_to_begin(browser: Browser) -> None:
    page = show(sample_run(0), browser)
    assert page.texts["headline"] == "Waiting for the first rollouts."
    assert "with attach(trainer," in page.texts["snippet"]
    compile(page.texts["snippet"], "snippet", "exec")
    assert page.hidden("full")
    assert not page.hidden("empty")


def test_a_dead_drafter_is_the_headline(browser: Browser) -> None:
    sums = DrafterSums.of([38.0, 41.0], [10.0, 10.0])
    snapshot = stored(
        scores=[{"policy_version": 4, "drafter_version": "v1", "served": sums, "frozen": sums, "created": 1.0}],
        acceptances=[
            {
                "reporter": "e",
                "drafter_version": "v1",
                "policy_version": 4,
                "rounds": 500,
                "accepted_tokens": 0,
                "emitted_tokens": 500,
                "created": time.time(),
            }
        ],
    )
    page = show(snapshot, browser)
    assert page.texts["headline"].startswith("Dead in an engine: e")
    assert page.having("id", "headline")[0]["data-tone"] == "bad"


def test_a_drift_alarm_is_the_headline(browser: Browser) -> None:
    sums = DrafterSums.of([30.0, 31.0], [10.0, 10.0])
    scores = [{"policy_version": 4, "served": sums, "frozen": sums, "created": 1.0}]
    worker = {"drift": {"fast": {"statistic": 11.0, "limit": 9.5}}}
    page = show(stored(scores, (), (), {}, worker), browser)
    assert page.texts["headline"].startswith("Drifting: ")
    assert "fast lane at 116 %" in page.texts["tiles"]


def test_a_drift_alarm_says_what_fell_below_what(browser: Browser) -> None:
    """Also of a drafter far above the frozen one: not that it is below the level that the run began with."""
    sample = sample_run(20)
    drift = {"fast": LaneGauges(statistic=11.0, limit=9.5)}
    worker = sample.worker.model_copy(update={"drift": drift, "drift_alpha": 2.51, "drift_level": 3.4})
    page = show(RunSnapshot(now=time.time(), scores=sample.scores, worker=worker), browser)
    assert page.texts["headline"].startswith("Drifting: α 2.51 is below its level so far, 3.40; v0000")
    assert "began with" not in page.texts["main"]


def test_missing_numbers_are_dashes_and_never_zero(browser: Browser) -> None:
    served = DrafterSums.of([30.0, 31.0], [10.0, 10.0])
    page = show(stored(scores=[{"policy_version": 0, "served": served}]), browser)
    assert page.texts["headline"] == "Serving: the drafter gives 3.05 tokens per round."
    assert "Live in engines–" in page.texts["tiles"]
    assert "Queue–" in page.texts["tiles"]
    assert {a["data-series"] for a in page.having("data-series")} == {"served"}


def test_names_and_reasons_from_outside_stay_text(browser: Browser) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    snapshot = sample_run(3)
    event = {"time": 1.0, "event": "refused", "policy_version": 1, "reason": hostile}
    page = show(replace(snapshot, history=[RunEvent.of(event)]), browser)
    assert hostile in page.texts["events"]
    assert not [a for tag, a in page.elements if tag == "img"]


def test_a_service_that_wants_a_token_is_asked_for_politely(browser: Browser) -> None:
    page = show(sample_run(3), browser, status=401)
    assert not page.hidden("token")
    assert page.texts["headline"] == "The service does not show the series."
    assert "a token with the scope read is needed" in page.texts["connection"]


def test_another_run_is_chosen_by_the_address_and_offered_in_the_picker(browser: Browser) -> None:
    with serving({"default": sample_run(3), "second": sample_run(5, seed=4)}) as url:
        page = browse(f"{url}/?run=second", browser)
    assert [a["value"] for tag, a in page.elements if tag == "option" and a["value"]] == ["default", "second"]
    assert not page.hidden("picker")
    assert "policy 4" in page.texts["tiles"]


def test_the_picker_says_which_of_many_runs_is_in_trouble(browser: Browser) -> None:
    silent = sample_run(5)
    worker = silent.worker.model_copy(update={"heartbeat": time.time() - 7200})
    runs = {"default": sample_run(3), "second": sample_run(4), "third": replace(silent, worker=worker, api_began=None)}
    with serving(runs | {"fourth": runs["third"]}) as url:
        assert browse(url, browser).texts["troubled"] == "2 other runs in trouble"
    with serving(runs) as url:
        page, picked = browse(url, browser), browse(f"{url}/?run=third", browser)
    assert page.texts["run"] == "defaultsecondthird — Worker silent"
    assert (page.hidden("troubled"), page.texts["troubled"]) == (False, "third: Worker silent")
    assert picked.hidden("troubled"), "its own headline says it"
    assert picked.texts["headline"].startswith("Worker silent")


def test_without_a_default_run_it_shows_the_one_there_is_or_how_to_begin(browser: Browser) -> None:
    asked: list[str] = []
    with serving({"mine": sample_run(3)}, asked=asked) as url:
        assert browse(url, browser).texts["headline"].startswith("Serving: ")
    assert {path for path in asked if path.startswith("/alpha")} == {"/alpha?run=mine"}, "nothing that does not exist"
    with serving({}) as url:
        page = browse(url, browser)
        assert page.texts["headline"] == "Waiting for the first rollouts."
        assert url in page.texts["snippet"]
        gone = browse(f"{url}/?run=gone", browser)
        assert gone.texts["headline"] == "There is no run gone here."
        assert gone.texts["detail"] == "No run has been registered yet."


def test_who_asks_for_a_run_that_is_not_there_is_offered_those_that_are(browser: Browser) -> None:
    with serving({"mine": sample_run(3)}) as url:
        page = browse(f"{url}/?run=mnie", browser)
    assert page.texts["headline"] == "There is no run mnie here."
    assert page.texts["detail"] == "Choose one of those that there are, above."
    assert [a["value"] for tag, a in page.elements if tag == "option" and a["value"]] == ["mine"]
    assert not page.hidden("picker")


def test_engines_that_draft_by_other_methods_are_compared(browser: Browser) -> None:
    snapshot = sample_run(40, others={"ngram": 1.31, "mtp": 1.78})
    page = show(snapshot, browser)
    assert not page.hidden("servers-card")
    rows = re.findall(r"http://(\w+):8000(ngram|mtp)([\d.]+)", page.texts["servers"])
    assert [(name, method) for name, method, _ in rows] == [("mtp", "mtp"), ("ngram", "ngram")]
    for (_, method, alpha), level in zip(rows, (1.78, 1.31), strict=True):
        records = [r for r in snapshot.acceptances if r.method == method]
        pooled = sum(r.emitted or 0 for r in records) / sum(r.rounds for r in records)
        assert float(alpha) == pytest.approx(pooled, abs=0.006)
        assert float(alpha) == pytest.approx(level, abs=0.03)
    assert "drafter v0" in page.texts["servers"]
    # In the chart they stand beside the run's own live α, which they do not enter.
    for name in ("live", "live ngram", "live mtp"):
        assert page.having("data-series", name), name
    assert "live mtp" in page.texts["legend"]


def test_each_engine_says_how_it_compares_with_replay_and_what_speculation_brings(browser: Browser) -> None:
    found = sample_run(20)
    sick = EngineVerdict("engine-0", "stale weights", "live α 1.20 over 4,000 rounds: it began in the middle")
    worth = Worth(None, 3, (AtBatch(1, 3, 1.9, 1.9), AtBatch(64, 1, 1.1, 0.8)), 64, ((1, 8, 3), (9, 64, 1)))
    page = show(replace(found, watch=Watch((sick,)), worth=worth), browser)
    assert "beside replay" in page.texts["servers"]
    assert "stale weights" in page.texts["servers"]
    assert [cell["title"] for cell in page.having("title", sick.text)] == [sick.text]
    assert "Speed-up0.80×at 64 sequences a step; best depth 1" in page.texts["tiles"]
    unknown = show(replace(found, worth=Worth("no engine has said how long its steps take")), browser)
    assert "Speed-up–no engine has said" in unknown.texts["tiles"]
    assert unknown.hidden("worth-card")


def test_what_speculation_is_worth_is_shown_at_each_batch_size(browser: Browser) -> None:
    batches = (AtBatch(1, 3, 2.0, 1.9), AtBatch(8, 2, 1.5, 1.25), AtBatch(64, 0, 1.0, 0.8))
    worth = Worth(None, 3, batches, 64, ((1, 8, 3), (9, 64, 0)))
    snapshot = replace(sample_run(5), worth=worth)
    page = show(snapshot, browser)
    assert page.texts["worth-text"] == (
        "From 64 sequences a step on, depth 3 is slower than no drafts. "
        "vLLM: num_speculative_tokens_per_batch_size = [[1,8,3],[9,64,0]]"
    )
    assert "speed-up at depth 3" in page.texts["worth"]
    for row in ("11.90×32.00×", "81.25×21.50×", "640.80×0: none1.00×"):
        assert row in page.texts["worth"]
    assert "RL step" not in page.texts["worth"], "nobody has said what generation takes of it"
    typed = "$('share').value = '70'; $('share').dispatchEvent(new Event('input'))"
    with serving({"default": snapshot}) as url:
        told = Document(browser.dom(url, 2.5, typed))
    for speedup in (1.9, 1.25, 0.8):
        assert f"{step_speedup(0.7, speedup):.2f}×" in told.texts["worth"].partition("RL step")[2]
    partial = show(replace(snapshot, worth=replace(worth, costs_from=None, plan=None)), browser)
    assert partial.texts["worth-text"] == "No list for vLLM: a batch size in between is unknown."


def test_without_engines_nothing_is_compared(browser: Browser) -> None:
    assert show(sample_run(5, live=False), browser).hidden("servers-card")


# --- what is true now


def came(entry: int, policy_version: int, alpha: float, **more: Any) -> dict[str, Any]:
    sums = DrafterSums.of([10 * alpha, 12 * alpha], [10.0, 12.0])
    served = {"policy_version": policy_version, "served": sums, "frozen": DrafterSums.of([11.0, 13.0], [10.0, 12.0])}
    return {**served, "entry_id": f"{entry}-0", "created": entry / 1000, "rollouts": 2, **more}


def test_tiles_and_headline_follow_a_trainer_that_went_back(browser: Browser) -> None:
    scores = [came(1000 + v, v, 3.0) for v in range(8)] + [came(2003, 3, 1.5), came(2004, 4, 1.7)]
    page = show(stored(scores), browser)
    assert page.texts["headline"].startswith("Aligned: the drafter gives 1.70 tokens per round")
    assert "on policy 4" in page.texts["tiles"]
    assert "now: policy 4" in page.texts["alpha"]
    assert [a["data-now"] for a in page.having("data-now")] == ["4"]


def test_one_absurd_policy_version_leaves_room_for_the_others_in_the_chart(browser: Browser) -> None:
    scores = [came(1000 + v, v, 3.0 + v / 10) for v in range(8)]
    scores += [came(2000, 999_999_999_999_999, 2.0), came(2001, 8, 3.9)]
    page = show(stored(scores), browser)
    assert page.texts["headline"].startswith("Aligned: the drafter gives 3.90 tokens per round")
    assert page.having("data-break")
    [line] = [a["d"] for tag, a in page.elements if a.get("data-series") == "served" and tag == "path"]
    across = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
    steps = [b - a for a, b in pairwise(across[:9])]
    assert min(steps) > 50, across
    assert max(steps) - min(steps) < 1, "to scale where nothing is left out"
    assert across == sorted(across)


def test_live_alpha_is_not_shown_on_few_rounds(browser: Browser) -> None:
    few = {"reporter": "e", "policy_version": 4, "rounds": 9, "accepted_tokens": 11, "created": time.time()}
    page = show(stored([came(1000, 4, 3.0)], [few]), browser)
    assert "Live in engines–9 rounds: too few" in page.texts["tiles"]


def test_what_a_person_does_with_a_version_is_drawn_where_the_run_was_then(browser: Browser) -> None:
    event = {
        "event": "rolled_back",
        "time": 1.0065,
        "version": "v000005-aaaaaaaa",
        "previous": "v000007-bbbbbbbb",
        "policy_version": 1,
        "reason": "worse on long prompts",
    }
    kept = {"event": "held", "time": 1.0075, "version": "v000005-aaaaaaaa", "policy_version": 1, "by": "ann"}
    freed = {"event": "released", "time": 1.0075, "version": "v000005-aaaaaaaa", "policy_version": 1, "by": "ann"}
    moved = event | {"time": 1.0072, "version": "v000004-cccccccc", "reason": "odd", "to_hold": True}
    gates = event | {"time": 1.0074, "version": "v000003-dddddddd", "reason": "it fits again", "gate": {"gain": 0.1}}
    told = [event, moved, gates, kept, freed]
    page = show(stored([came(1000 + v, v, 3.0) for v in range(8)], (), told), browser)
    assert "1 rollback" in page.texts["detail"], "neither a hold nor the gate is one"
    assert "moved to v000004 at policy 7" in page.texts["events"]
    assert "v000003 promoted again at policy 7" in page.texts["events"]
    assert "rolled back to v000005 at policy 6" in page.texts["events"]
    assert "from v000007; worse on long prompts" in page.texts["events"]
    assert "v000005 held at policy 7" in page.texts["events"]
    assert "v000005 released at policy 7" in page.texts["events"]


def test_attempts_of_a_trainer_are_shown_one_at_a_time(browser: Browser) -> None:
    first, again = ([came(start + v, v, alpha) for v in range(40)] for start, alpha in ((1000, 3.0), (2000, 2.0)))
    events = [
        {
            "event": "held",
            "time": 1.01,
            "version": "v000005-aaaaaaaa",
            "policy_version": 3,
            "by": "ada",
            "reason": "odd",
        },
        {"event": "run_paused", "time": 2.01, "by": "<b>bob</b>", "reason": "the GPU is needed", "previous": "active"},
    ]
    with serving({"default": stored([*first, *again[:30]], (), events)}) as url:
        newest, older = browse(url, browser), browse(f"{url}?attempt=1", browser)
    assert not newest.hidden("attempts")
    assert "1: policy 0 to 39" in newest.texts["attempts"]
    assert "2: policy 0 to 29" in newest.texts["attempts"]
    assert "run paused" in newest.texts["events"]
    assert "by <b>bob</b>; the GPU is needed" in newest.texts["events"], "as text"
    assert "held" not in newest.texts["events"]
    assert "v000005 held at policy 10" in older.texts["events"], "where the run was then"
    assert "by ada; odd" in older.texts["events"]
    assert "run paused" not in older.texts["events"]
    assert show(stored(first), browser).hidden("attempts"), "one needs no choice"


def test_an_attempt_without_events_does_not_say_that_nothing_was_ever_published(browser: Browser) -> None:
    first, again = ([came(start + v, v, 3.0) for v in range(30)] for start in (1000, 2000))
    event = {"event": "published", "time": 1.01, "version": "v000001-aaaaaaaa", "sequence": 1, "policy_version": 3}
    page = show(replace(stored([*first, *again], (), [event]), published=1), browser)
    said = "The gate has decided nothing in this attempt; in all attempts: 1 published, 0 refused."
    assert said in page.texts["events"]
    assert "0 published, 0 refused in this attempt" in page.texts["tiles"]
    assert "The gate has decided nothing yet." in show(stored(first), browser).texts["events"]


def test_a_service_that_is_gone_is_the_headline_and_what_is_shown_is_marked_as_old(browser: Browser) -> None:
    with serving({"default": sample_run(30)}, answers=2) as url:
        page = browse(url, browser, seconds=20)
    assert re.match(r"The service has not answered for \d+ s\.$", page.texts["headline"])
    assert page.having("id", "headline")[0]["data-tone"] == "bad"
    assert page.having("id", "connection")[0]["data-state"] == "bad"
    assert page.having("class", "stale")
    assert page.texts["detail"].startswith("All below is old: as it was ")
    assert not page.hidden("full")


def test_a_service_that_was_never_there_is_not_waited_for_in_green(browser: Browser) -> None:
    with serving({"default": sample_run(3)}, answers=0) as url:
        page = browse(url, browser, seconds=20)
    assert page.texts["headline"] == "The service does not answer."
    assert page.having("id", "connection")[0]["data-state"] == "bad"


# --- end to end: API, Valkey and worker as they are


def tone(page: Document) -> tuple[str, str]:
    return page.having("id", "headline")[0]["data-tone"], page.having("id", "connection")[0]["data-state"]


def test_a_stopped_worker_is_the_headline_and_nothing_is_green(
    bench: Bench,
    serve: Callable[..., RunningService],
    browser: Browser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for limit in ("SILENT_SECONDS", "_START_SECONDS"):  # the second after the API began
        monkeypatch.setattr(service.monitor.headline, limit, 2.0)
    bench.begin()
    api = serve()
    with nest(tmp_path / "log") as workers:
        pid = workers.start(bench)
        batch = bench.post("first", policy_version=1)
        bench.wait(lambda: bench.state(batch) == "trained")
        assert tone(browse(api.url, browser)) == ("good", "good")
        workers.kill(pid, signal.SIGSTOP)
        bench.post("second", policy_version=2)
        told = f"{api.url}/runs/default"
        bench.wait(lambda: httpx.get(told).json()["headline"]["state"] == "worker_silent")
        page = browse(api.url, browser)
    assert re.match(r"Worker silent for \d+ s: nothing is scored or trained; 1 batch waits\.$", page.texts["headline"])
    assert tone(page) == ("bad", "bad")
    assert page.texts["connection"] == "no worker"
    assert "Workersilent" in page.texts["tiles"]


def test_why_the_worker_refuses_a_run_is_the_headline(
    bench: Bench, serve: Callable[..., RunningService], browser: Browser, tmp_path: Path
) -> None:
    bench.begin()
    api, target = serve(), bench.layout.target("default")
    target.write_bytes(target.read_bytes()[:-1] + b"\x7f")
    with nest(tmp_path / "log") as workers:
        workers.start(bench)
        bench.wait(lambda: httpx.get(f"{api.url}/runs/default").json()["headline"]["state"] == "refused")
        page = browse(api.url, browser)
    assert page.texts["headline"].startswith("Refused by the worker: target.safetensors of run 'default' is damaged")
    assert tone(page) == ("bad", "bad")


def test_a_run_whose_batches_all_died_says_why(
    bench: Bench, serve: Callable[..., RunningService], browser: Browser
) -> None:
    bench.begin()
    api, worker = serve(), bench.worker()

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["logprobs"][tensors["loss_mask"].bool()] -= 5.0

    for n in range(3):
        bench.post(f"bad{n}", change=spoil)
    bench.drain(worker)
    page = browse(api.url, browser)
    assert page.texts["headline"].startswith("3 of 3 batches dead: log-probabilities disagree with the features by 5")
    assert tone(page) == ("bad", "bad")
    assert page.hidden("empty")


def test_a_run_from_scratch_says_how_many_tokens_its_vocabulary_waits_for(
    bench: Bench, serve: Callable[..., RunningService], browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    bench.register()
    api, worker = serve(), bench.worker(vocab_min_tokens=400)
    assert browse(api.url, browser).texts["headline"] == "Waiting for the first rollouts."
    with caplog.at_level("INFO", logger="draftalign.worker"):
        bench.post("a", lengths=[13] * 12)
        bench.drain(worker)
    page = browse(api.url, browser)
    said = "120 of 400 response tokens gathered"
    assert page.texts["headline"] == f"Waiting for the draft vocabulary: {said} (vocab_min_tokens)."
    assert tone(page) == ("wait", "wait")
    assert page.hidden("empty")
    assert f"default: {said} for the draft vocabulary; batches waiting: 1" in caplog.text
    assert httpx.get(f"{api.url}/runs/default").json()["headline"]["text"] == page.texts["headline"]
    assert 'draftalign_vocabulary_tokens{run="default"} 120.0' in httpx.get(f"{api.url}/metrics").text
    bench.post("b", lengths=[13] * 30)
    bench.drain(worker)
    assert httpx.get(f"{api.url}/runs/default").json()["headline"]["state"] != "gathering"
    assert "draftalign_vocabulary" not in httpx.get(f"{api.url}/metrics").text


@pytest.mark.parametrize(("password", "drawn"), [("engine-secret", True), ("wrong", False)])
def test_behind_tokens_a_password_opens_the_page_and_alpha_is_drawn(
    serve: Callable[..., RunningService], redis_client: Redis, browser: Browser, password: str, drawn: bool
) -> None:
    """The real service: Chromium sends the name and password of a URL only where it is asked for Basic."""
    service = serve(tokens="engine-secret:read;trainer-secret:write")
    trainer = HEADERS | {"Authorization": "Bearer trainer-secret"}
    service.client.put("/runs/default", content=run_file(), headers=trainer).raise_for_status()
    store = Store(redis_client, "default")
    for number, record in enumerate(sample_run(12).scores):
        store.put_score(f"{number:032x}", record)
    page = browse(service.url.replace("http://", f"http://anyone:{password}@"), browser)
    assert bool(page.having("data-series", "served")) == drawn, page.texts.get("connection")
    if drawn:
        assert page.texts["connection"] == "live"
        assert not page.hidden("full")


def test_a_page_that_stays_open_reads_what_changed_and_shows_all(
    serve: Callable[..., RunningService], redis_client: Redis, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve()
    service.register()
    store, scores = Store(redis_client, "default"), list(sample_run(12).scores)
    for number, record in enumerate(scores[:-1]):
        store.put_score(f"{number:032x}", record)
    asked = list[tuple[str | None, int]]()

    async def read(context: ServiceContext, run: str, since: str | None) -> RunView:
        view = await read_followed(context, run, since)
        asked.append((since, len(json.loads(run_text(run, view, context.settings_of(run)))["points"])))
        if len(asked) == 1:  # the next answer has one point more
            await asyncio.to_thread(store.put_score, "f" * 32, scores[-1])
        return view

    monkeypatch.setattr("service.api.acceptance.read_followed", read)
    page = browse(service.url, browser, seconds=30)
    versions = {record.policy_version for record in scores}
    assert asked[0] == (None, len(versions) - 1)
    assert all(since is not None for since, _ in asked[1:])
    assert [points for _, points in asked[1:4]] == [1, 0, 0][: len(asked) - 1]
    fresh = browse(service.url, browser)
    drawn = [{a["data-series"]: a.get("d") for a in one.having("data-series")} for one in (page, fresh)]
    assert drawn[0] == drawn[1]
    assert page.texts["tiles"].split("Worker")[0] == fresh.texts["tiles"].split("Worker")[0]


def test_the_description_of_the_api_is_drawn_from_what_the_service_itself_serves(
    serve: Callable[..., RunningService], browser: Browser
) -> None:
    """A cluster's browser reaches no other host, and a page that holds a login runs no stranger's script."""
    drawn = browser.dom(f"{serve().url}/docs")
    assert "opblock-summary-path" in drawn, drawn[:2000]  # written by the script, and there for each call
    assert 'data-path="/drafter/latest"' in drawn
    assert not re.findall(r'(?:src|href)="(?:https?:)?//(?!127\.0\.0\.1)[^"]*\.(?:js|css|png)', drawn)
