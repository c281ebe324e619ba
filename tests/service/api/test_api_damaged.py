"""Files of a run that a disk has damaged: every route names it, other runs do not notice, a PUT heals a target."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from service_fixtures import HEADERS, RunningService, head_file, publish, rollout_file, run_file

from rl_hooks.wire import MappedFile

Damage = Callable[[Path], None]
ROUTES = [
    "/runs/{run}",
    "/runs/{run}/worth",
    "/runs/{run}/dead",
    "/alpha?run={run}",
    "/drafters?run={run}",
    "/drafter/latest?run={run}",
    "/runs",
    "/metrics",
    "/readyz",
    "/",
]


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def a_list(path: Path) -> None:
    path.write_bytes(b"[1e999, null]")


def no_text(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(300))


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def file_of(service: RunningService, run: str, name: str) -> Path:
    layout = service.layout
    if name == "manifest.json":
        return layout.drafter(run, service.registry.versions(run)[0]) / name
    return {"run.json": layout.run_json, "latest.json": layout.latest, "target.safetensors": layout.target}[name](run)


def put(service: RunningService, run: str) -> httpx.Response:
    return service.client.put(f"/runs/{run}", content=run_file(), headers=HEADERS)


def begin(service: RunningService, run: str) -> None:
    assert put(service, run).status_code == 201
    publish(service.registry, run)


def sweep(service: RunningService, run: str) -> list[httpx.Response]:
    """The answers of every route that reads a run, and of those that write to it."""
    got = [service.client.get(route.format(run=run), headers={"Accept": "*/*"}) for route in ROUTES]
    head = service.client.put(f"/runs/{run}/head", content=head_file(7), headers=HEADERS)
    return [*got, put(service, run), head, service.post(rollout_file(run=run))]


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        (name, damage)
        for name in ("run.json", "latest.json", "manifest.json", "target.safetensors")
        for damage in (emptied, halved, a_list, no_text, a_folder)
        if (name, damage) != ("target.safetensors", a_folder)
    ],
)
def test_a_damaged_file_is_named_and_only_its_run_notices(service: RunningService, name: str, damage: Damage) -> None:
    begin(service, "damaged")
    begin(service, "sound")
    damage(file_of(service, "damaged", name))
    answers = sweep(service, "damaged")
    assert {answer.status_code for answer in answers if answer.status_code >= 500} <= {503}
    told = [answer.json()["detail"] for answer in answers if answer.status_code == 503]
    assert told, "somebody is told"
    assert all(f"{name} of run 'damaged' is damaged" in detail for detail in told)
    assert all(answer.status_code < 500 for answer in sweep(service, "sound"))


@pytest.mark.parametrize("name", ["run.json", "latest.json", "manifest.json"])
def test_a_flipped_bit_is_no_bug_wherever_it_is(service: RunningService, name: str) -> None:
    begin(service, "damaged")
    path = file_of(service, "damaged", name)
    sound, dice = path.read_bytes(), random.Random(0)
    for place in sorted(dice.sample(range(len(sound)), min(25, len(sound)))):
        data = bytearray(sound)
        data[place] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        for answer in sweep(service, "damaged"):
            assert answer.status_code < 500 or answer.json()["type"].endswith("run-damaged"), (data, answer.text)


@pytest.mark.parametrize("damage", [emptied, halved, Path.unlink])
def test_a_target_that_nobody_can_read_is_replaced_by_the_next_put(service: RunningService, damage: Damage) -> None:
    begin(service, "damaged")
    sound = file_of(service, "damaged", "target.safetensors")
    expected = sound.read_bytes()
    damage(sound)
    assert put(service, "damaged").status_code == 201
    assert sound.read_bytes() == expected
    assert put(service, "damaged").status_code == 200
    assert service.post(rollout_file(run="damaged")).status_code == 202


def test_a_sound_target_is_not_replaced_where_files_cannot_be_opened_for_a_moment(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next policy of that name would take the place of the registered one."""
    begin(service, "sound")
    target = file_of(service, "sound", "target.safetensors")
    before = target.stat().st_ino
    opened = MappedFile.__init__

    def refusing(self: MappedFile, path: Path) -> None:
        if path == target:
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        opened(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "__init__", refusing)
        reply = put(service, "sound")
        assert (reply.status_code, reply.json()["detail"]) == (
            503,
            "the service cannot use its files: Too many open files",
        )
    assert target.stat().st_ino == before
    assert put(service, "sound").status_code == 200
