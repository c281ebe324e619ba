"""Files of a run that a disk has damaged: every route names them, other runs do not notice, and no PUT replaces one."""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from helpers.service.service_fixtures import HEADERS, RunningService, head_file, publish, rollout_file, run_file

from rl_hooks.wire import MappedFile
from service.api import drafters as drafters_api

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
    ],
)
def test_a_damaged_file_is_named_and_only_its_run_notices(service: RunningService, name: str, damage: Damage) -> None:
    begin(service, "damaged")
    begin(service, "sound")
    damage(file_of(service, "damaged", name))
    answers = sweep(service, "damaged")
    assert {answer.status_code for answer in answers if answer.status_code >= 500} <= {500}
    told = [answer.json()["detail"] for answer in answers if answer.status_code == 500]
    assert told, "somebody is told"
    assert all(f"{name} of run 'damaged' is damaged" in detail for detail in told)
    assert all(answer.status_code < 500 for answer in sweep(service, "sound"))


@pytest.mark.parametrize("name", ["run.json", "latest.json", "manifest.json", "target.safetensors"])
def test_a_flipped_bit_is_no_bug_wherever_it_is(service: RunningService, name: str) -> None:
    begin(service, "damaged")
    path = file_of(service, "damaged", name)
    sound, dice = path.read_bytes(), random.Random(0)
    in_json = len(sound) if name != "target.safetensors" else 8 + int.from_bytes(sound[:8], "little")
    for place in sorted(dice.sample(range(in_json), min(40, in_json))):
        data = bytearray(sound)
        data[place] ^= 1 << dice.randrange(8)
        path.write_bytes(data)
        for answer in sweep(service, "damaged"):
            assert answer.status_code < 500 or answer.json()["type"].endswith("run-damaged"), (data, answer.text)
            if name == "target.safetensors":
                assert answer.status_code != 422, "no sender is blamed for it"


@pytest.mark.parametrize("damage", [emptied, halved, Path.unlink])
def test_a_copy_that_is_put_back_heals_a_target_and_a_put_does_not(service: RunningService, damage: Damage) -> None:
    """A file of the same configuration may be of another policy: nobody could tell."""
    begin(service, "damaged")
    target = file_of(service, "damaged", "target.safetensors")
    sound = target.read_bytes()
    damage(target)
    reply = put(service, "damaged")
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:draftalign:run-damaged")
    assert "put a copy of it back, or DELETE /runs/damaged" in reply.json()["detail"]
    target.write_bytes(sound)
    assert put(service, "damaged").status_code == 200
    assert service.post(rollout_file(run="damaged")).status_code == 202


def test_a_served_version_that_is_gone_is_damage_and_not_a_run_without_drafters(service: RunningService) -> None:
    begin(service, "damaged")
    file_of(service, "damaged", "manifest.json").unlink()
    for route in ("/drafter/latest?run=damaged", "/drafters?run=damaged", "/runs/damaged"):
        reply = service.client.get(route)
        assert (reply.status_code, reply.json()["type"]) == (500, "urn:draftalign:run-damaged"), route
        assert "manifest.json of run 'damaged' is damaged: it is gone" in reply.json()["detail"]


def test_a_file_of_a_version_that_is_gone_is_damage_unless_the_version_is_gone_with_it(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(service, "damaged")
    (version,) = service.registry.versions("damaged")
    directory, where = service.layout.drafter("damaged", version), f"/drafter/{version}/model.safetensors?run=damaged"
    (directory / "model.safetensors").unlink()
    reply = service.client.get(where)
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:draftalign:run-damaged")
    assert "model.safetensors of run 'damaged' is damaged" in reply.json()["detail"]
    found = drafters_api.matches

    def pruned(*asked: str | None) -> bool:  # while it is asked for
        shutil.rmtree(directory)
        return found(*asked)  # type: ignore[arg-type]

    monkeypatch.setattr(drafters_api, "matches", pruned)
    assert service.client.get(where).status_code == 404


@pytest.mark.parametrize("damage", [emptied, no_text, a_list])
def test_an_old_version_whose_manifest_is_damaged_is_named_beside_the_others(
    service: RunningService, damage: Damage
) -> None:
    begin(service, "damaged")
    old = service.registry.versions("damaged")[0]
    second = publish(service.registry, "damaged", b"second", instead_of=old)
    damage(file_of(service, "damaged", "manifest.json"))
    reply = service.client.get("/drafters?run=damaged")
    assert reply.status_code == 200, reply.text
    shown = reply.json()
    assert [one["version"] for one in shown["versions"]] == [shown["latest"]["version"]]
    assert list(shown["damaged"]) == [old]
    assert "manifest.json of run 'damaged' is damaged" in shown["damaged"][old]
    assert all(answer.status_code < 500 for answer in sweep(service, "damaged"))
    service.client.patch("/runs/damaged", json={"state": "archived", "reason": "over"}).raise_for_status()
    publish(service.registry, "damaged", b"third", instead_of=second.version)
    assert service.registry.prune("damaged", keep=1)[0] == old, "as any other"


@pytest.mark.parametrize("pointer", ['{"sequence": null, "version": 5, "reason": ""}', '{"sequence": 1}', '"v1"'])
def test_a_pointer_of_other_types_is_damaged(service: RunningService, pointer: str) -> None:
    begin(service, "damaged")
    file_of(service, "damaged", "latest.json").write_text(pointer)
    reply = service.client.get("/drafter/latest?run=damaged")
    assert (reply.status_code, reply.json()["type"]) == (500, "urn:draftalign:run-damaged")


def test_a_target_that_cannot_be_opened_for_a_moment_is_not_called_damaged(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(service, "sound")
    target = file_of(service, "sound", "target.safetensors")
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
            "the service cannot use its files: Too many open files. Where this comes again, raise the hard limit of the"
            " API's descriptors (`ulimit -Hn`)",
        )
    assert put(service, "sound").status_code == 200
