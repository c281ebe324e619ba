"""The page, driven in headless Chromium against the real series and metrics."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from page_fixtures import PAGE, sample_run, serving
from redis import Redis
from service_fixtures import HEADERS, RunningService, run_file

from service.alpha import drafter_sums
from service.metrics import RunSnapshot
from service.store import Store

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (Debian package chromium)")


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


def browse(url: str, tmp_path: Path, *more: str) -> Document:
    done = subprocess.run(
        [
            str(CHROMIUM),
            *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
            *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
            *(f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=2500", "--window-size=1200,1400"),
            *more,
            "--dump-dom",
            url,
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return Document(done.stdout)


def show(snapshot: RunSnapshot, tmp_path: Path, **more: Any) -> Document:
    with serving({"default": snapshot}, **more) as url:
        return browse(url, tmp_path)


def test_the_page_asks_nobody_but_its_own_origin() -> None:
    text = PAGE.read_text()
    outside = set(re.findall(r"https?://[^\s\"'`<>)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert outside == set()
    assert "default-src 'none'" in text
    assert "innerHTML" not in text
    assert "insertAdjacentHTML" not in text


@needs_browser
def test_a_run_is_drawn_with_its_series_marks_and_headline(tmp_path: Path) -> None:
    snapshot = sample_run(60)
    page = show(snapshot, tmp_path)
    assert re.match(
        r"Aligned: 3\.\d\d tokens per round; the frozen drafter would give 1\.\d\d\.$", page.texts["headline"]
    )
    kinds = [event["event"] for event in snapshot.history]
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
    for word in ("Rounds saved", "492 k", "9.0 MiB of 16 GiB", "train", "fast lane at 22 %"):
        assert word in tiles
    assert page.texts["events"].count(" at policy ") == 9
    assert "does not always fall" in page.texts["full"]
    assert page.texts["connection"] == "live"


@needs_browser
def test_drafters_are_compared_on_rollouts_that_all_were_scored_on(tmp_path: Path) -> None:
    """The worker passed over the newest policy versions, on which the served drafter is far better than before."""
    snapshot = sample_run(30)
    for record in snapshot.scores[-3:]:
        for name in ("frozen", "best", "best_version"):
            del record[name]
        record["served"]["tokens"] *= 1.5
    last = snapshot.scores[-4]
    frozen, served = (last[name]["tokens"] / last[name]["rounds"] for name in ("frozen", "served"))
    page = show(snapshot, tmp_path)
    assert page.texts["headline"].endswith(
        f"; on rollouts of policy 26 the frozen drafter would give {frozen:.2f} for its {served:.2f}."
    )
    assert f"Rounds saved{round(100 * (1 - frozen / served))} %" in page.texts["tiles"].replace("\n", "")


@needs_browser
def test_charts_are_described_in_words_and_reachable_by_keyboard(tmp_path: Path) -> None:
    page = show(sample_run(12), tmp_path)
    charts = [a for tag, a in page.elements if tag == "svg" and a.get("role") == "img"]
    assert len(charts) == 2
    assert all(a["tabindex"] == "0" and "Newest:" in a["aria-label"] for a in charts)
    assert "served" in charts[0]["aria-label"]
    assert page.having("aria-live")
    assert all(a.get("aria-pressed") == "true" for tag, a in page.elements if tag == "button" and "aria-pressed" in a)


@needs_browser
@pytest.mark.parametrize("policies", [1, 3, 500])
def test_few_and_many_policy_versions_are_drawn_without_nonsense(policies: int, tmp_path: Path) -> None:
    page = show(sample_run(policies), tmp_path)
    assert not page.hidden("full")
    drawn = " ".join(a.get("d", "") + a.get("cx", "") + a.get("cy", "") for _, a in page.elements)
    assert "NaN" not in drawn
    assert "Infinity" not in drawn
    assert "undefined" not in page.texts["full"]
    assert len(page.elements) < 3000


@needs_browser
def test_before_the_first_rollout_it_says_how_to_begin(tmp_path: Path) -> None:
    page = show(sample_run(0), tmp_path)
    assert page.texts["headline"] == "Waiting for the first rollouts."
    assert "attach(trainer," in page.texts["snippet"]
    assert page.hidden("full")
    assert not page.hidden("empty")


@needs_browser
def test_a_dead_drafter_is_the_headline(tmp_path: Path) -> None:
    sums = drafter_sums([38.0, 41.0], [10.0, 10.0])
    snapshot = RunSnapshot(
        scores=[{"policy_version": 4, "served": sums, "frozen": sums, "created": 1.0}],
        acceptances=[
            {"reporter": "e", "policy_version": 4, "rounds": 500, "accepted_tokens": 0, "emitted_tokens": 500}
        ],
    )
    page = show(snapshot, tmp_path)
    assert page.texts["headline"].startswith("Dead in the engines: they emit 1.00 tokens per round")


@needs_browser
def test_a_drift_alarm_is_the_headline(tmp_path: Path) -> None:
    sums = drafter_sums([30.0, 31.0], [10.0, 10.0])
    scores = [{"policy_version": 4, "served": sums, "frozen": sums, "created": 1.0}]
    worker = {"drift": {"fast": {"statistic": 11.0, "limit": 9.5}}}
    page = show(RunSnapshot(scores, (), (), {}, worker), tmp_path)
    assert page.texts["headline"].startswith("Drifting: ")
    assert "fast lane at 116 %" in page.texts["tiles"]


@needs_browser
def test_a_drafter_far_above_the_frozen_one_is_aligned_even_below_its_first_level(tmp_path: Path) -> None:
    sample = sample_run(20)
    worker = {**sample.worker, "drift": {"fast": {"statistic": 11.0, "limit": 9.5}}}
    page = show(RunSnapshot(sample.scores, (), (), {}, worker), tmp_path)
    assert page.texts["headline"].startswith("Aligned: ")
    assert "Still below the level that the run began with" in page.texts["detail"]


@needs_browser
def test_missing_numbers_are_dashes_and_never_zero(tmp_path: Path) -> None:
    served = drafter_sums([30.0, 31.0], [10.0, 10.0])
    page = show(RunSnapshot(scores=[{"policy_version": 0, "served": served}]), tmp_path)
    assert page.texts["headline"] == "Serving: 3.05 tokens per round."
    assert "Live in engines–" in page.texts["tiles"]
    assert "Queue–" in page.texts["tiles"]
    assert {a["data-series"] for a in page.having("data-series")} == {"served"}


@needs_browser
def test_names_and_reasons_from_outside_stay_text(tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    snapshot = sample_run(3)
    event = {"time": 1.0, "event": "refused", "policy_version": 1, "reason": hostile}
    page = show(RunSnapshot(snapshot.scores, (), [event]), tmp_path)
    assert hostile in page.texts["events"]
    assert not [a for tag, a in page.elements if tag == "img"]


@needs_browser
def test_a_service_that_wants_a_token_is_asked_for_politely(tmp_path: Path) -> None:
    page = show(sample_run(3), tmp_path, status=401)
    assert not page.hidden("token")
    assert page.texts["headline"] == "The service does not show the series."
    assert "a token with the scope read is needed" in page.texts["connection"]


@needs_browser
def test_another_run_is_chosen_by_the_address_and_offered_in_the_picker(tmp_path: Path) -> None:
    with serving({"default": sample_run(3), "second": sample_run(5, seed=4)}) as url:
        page = browse(f"{url}/?run=second", tmp_path)
    assert [a["value"] for tag, a in page.elements if tag == "option"] == ["default", "second"]
    assert not page.hidden("picker")
    assert "policy 4" in page.texts["tiles"]


@needs_browser
def test_without_a_default_run_it_shows_the_one_there_is_or_how_to_begin(tmp_path: Path) -> None:
    with serving({"mine": sample_run(3)}) as url:
        assert browse(url, tmp_path).texts["headline"].startswith("Aligned: ")
    with serving({}) as url:
        page = browse(url, tmp_path)
        assert page.texts["headline"] == "Waiting for the first rollouts."
        assert url in page.texts["snippet"]
        assert browse(f"{url}/?run=gone", tmp_path).texts["headline"] == "There is no such run here."


@needs_browser
def test_engines_that_draft_by_other_methods_are_compared(tmp_path: Path) -> None:
    snapshot = sample_run(40, others={"ngram": 1.31, "mtp": 1.78})
    page = show(snapshot, tmp_path)
    assert not page.hidden("servers-card")
    rows = re.findall(r"http://(\w+):8000(ngram|mtp)([\d.]+)", page.texts["servers"])
    assert [(name, method) for name, method, _ in rows] == [("mtp", "mtp"), ("ngram", "ngram")]
    for (_, method, alpha), level in zip(rows, (1.78, 1.31), strict=True):
        records = [r for r in snapshot.acceptances if r.get("method") == method]
        pooled = sum(r["emitted_tokens"] for r in records) / sum(r["rounds"] for r in records)
        assert float(alpha) == pytest.approx(pooled, abs=0.006)
        assert float(alpha) == pytest.approx(level, abs=0.03)
    assert "drafter v0" in page.texts["servers"]
    # In the chart they stand beside the run's own live α, which they do not enter.
    for name in ("live", "live ngram", "live mtp"):
        assert page.having("data-series", name), name
    assert "live mtp" in page.texts["legend"]


@needs_browser
def test_without_engines_nothing_is_compared(tmp_path: Path) -> None:
    assert show(sample_run(5, live=False), tmp_path).hidden("servers-card")


@needs_browser
@pytest.mark.parametrize(("password", "drawn"), [("engine-secret", True), ("wrong", False)])
def test_behind_tokens_a_password_opens_the_page_and_alpha_is_drawn(
    serve: Callable[..., RunningService], redis_client: Redis, tmp_path: Path, password: str, drawn: bool
) -> None:
    """The real service: Chromium sends the name and password of a URL only where it is asked for Basic."""
    service = serve(tokens="engine-secret:read;trainer-secret:write")
    trainer = HEADERS | {"Authorization": "Bearer trainer-secret"}
    service.client.put("/runs/default", content=run_file(), headers=trainer).raise_for_status()
    store = Store(redis_client, "default")
    for number, record in enumerate(sample_run(12).scores):
        store.put_score(f"{number:032x}", record)
    page = browse(service.url.replace("http://", f"http://anyone:{password}@"), tmp_path)
    assert bool(page.having("data-series", "served")) == drawn, page.texts.get("connection")
    if drawn:
        assert page.texts["connection"] == "live"
        assert not page.hidden("full")
