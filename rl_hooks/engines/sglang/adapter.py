"""SGLang: swap the drafter of a running server by one of its weight-update calls, and read its counters.

The call is `/update_weights_from_tensor`, which `rl_hooks.engines.sglang.direct` lets pass at once and does between two
steps. Without that plugin it would wait until every running request has ended: then nothing is swapped.

The request holds no weights: `rl_hooks.engines.sglang.loader`, named by `--custom-weight-loader`, reads them from the
disk that agent and server share, and writes its outcome to a file. `/update_weights_from_disk` is not used: it has no
selector and would load the drafter into the policy.

`weight_version` is only read. The server has one, and the trainer keeps its policy version there; a whole number in it
is taken as the policy version. So the adapter remembers which drafter is loaded, as long as the server's process lives.

Written against 0.5.23; tests/helpers/engine/sglang_contract.py checks every call as that version does, or as 0.5.20
does.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import shutil
import struct
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import httpx
import numpy as np

from rl_hooks import wire
from rl_hooks.durable import replace_file
from rl_hooks.engines.counting.counters import Counts, Snapshot, per_position, read_samples, told, whole
from rl_hooks.engines.protocol import EngineHttp, EngineState, counting_only
from rl_hooks.engines.sglang import rounds
from rl_hooks.engines.sglang.direct import LOADER, mark_of
from rl_hooks.engines.sglang.facts import FOLLOWS, drafting_of, internal, version_number
from rl_hooks.engines.sglang.memory import RELEASED
from rl_hooks.errors import EngineError, MetricsError, OtherBytesError, SwapRefusedError, cut
from rl_hooks.format.drafter import CONFIG_FILE, MODEL_FILE, parse_drafter, parse_object
from rl_hooks.format.eagle3 import DrafterError
from rl_hooks.format.engines import limits
from rl_hooks.format.release import Release

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

log = logging.getLogger("draftalign.agent")

_REQUEST: Final = "draftalign.request"
ROUNDS: Final = "sglang:spec_verify_calls_total"
GENERATED: Final = "sglang:generation_tokens_total"
REQUESTS: Final = "sglang:num_requests_total"
RUNNING: Final = "sglang:num_running_reqs"
_MAX_RANKS: Final = 1024


class SGLangEngine(EngineHttp):
    """One SGLang server. `token` is its `--admin-api-key` (or `--api-key` where there is no other).

    `cache`: the run's directory. SGLang does not know the name of its drafter: that is remembered here.
    """

    def __init__(
        self,
        url: str,
        client: httpx.AsyncClient,
        cache: Path,
        *,
        token: str | None = None,
        swap_timeout_seconds: float = 120.0,
    ) -> None:
        super().__init__(url, client, token=token, swap_timeout_seconds=swap_timeout_seconds)
        self._directory = cache / "engines"
        self._memory = self._directory / f"sglang-{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
        self._loaded: tuple[str, str, int] | None = None  # identity of the process, version, swaps
        self._depth: int | None = None  # until `state` was asked
        self._is_swapped = False  # this process of the server has taken a drafter
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            # Of an earlier agent; else the newest is loaded once more.
            started, version, swaps = json.loads(self._memory.read_text())["loaded"]
            self._loaded = (str(started), str(version), int(swaps))
            self._is_swapped = True  # until `state` says that it is another process

    # --- called by the follower
    async def state(self) -> EngineState:
        """The drafter that this agent has swapped in since the server started; SGLang does not tell."""
        info = await self._object("GET", "/server_info")
        self._check_alone(info)
        model = await self._object("GET", "/model_info")
        self._depth = max(int(info.get("speculative_num_draft_tokens") or 1) - 1, 0)
        version = version_number(model.get("weight_version"))
        algorithm = info.get("speculative_algorithm")
        self._is_swapped = False
        if str(algorithm).upper() != "EAGLE3":
            life = process_identity(info) if "startup_time" in info else None
            return counting_only(None if algorithm is None else cut(str(algorithm)).lower(), version, life)
        started, loaded = process_identity(info), self._loaded
        steps = info.get("speculative_num_steps")
        depth = steps if type(steps) is int else None
        served, swaps = (loaded[1], loaded[2]) if loaded is not None and loaded[0] == started else (None, 0)
        self._is_swapped = served is not None
        return EngineState(
            served,
            served is not None,
            swaps,
            policy_version=version,
            depth=depth,
            drafting=drafting_of(info.get("speculative_use_rejection_sampling"), info.get("speculative_eagle_topk")),
            life=started,
        )

    async def snapshot(self) -> Snapshot:
        """Counters of rounds, by step where our plugin (`rl_hooks.engines.sglang.rounds`) is loaded.

        SGLang itself counts a request when it has finished, and not by position. That is enough for an engine whose
        drafter is never swapped. After a swap it would credit the newer drafter with rounds of the older one, so
        MetricsError is raised. Accepted tokens are counted after trimming, unlike vLLM's.
        """
        ours = (rounds.ROUNDS, rounds.ACCEPTED, rounds.FAULTS)
        samples = read_samples(await self._page(), (*ours, ROUNDS, GENERATED, REQUESTS, RUNNING))
        requests = told(samples, REQUESTS), told(samples, RUNNING)
        if rounds.ROUNDS in samples:
            if rounds.FAULTS in samples:
                raise MetricsError(
                    "the plugin that counts rounds in SGLang has ended by a fault, and the server's log says which: "
                    "nothing is counted any more. Restart the server"
                )
            counted = _total(samples, rounds.ROUNDS)
            positions = per_position(samples, rounds.ACCEPTED) if rounds.ACCEPTED in samples else ()
            accepted = sum(positions)
            return await self._snapshot(counted, counted + accepted, positions, requests)
        if GENERATED not in samples:
            raise MetricsError(f"the engine's /metrics has no {GENERATED}; start SGLang with --enable-metrics")
        # The other two appear with the first request.
        counted, generated, finished = (_total(samples, name) for name in (ROUNDS, GENERATED, REQUESTS))
        if counted and self._is_swapped:
            raise MetricsError(
                f"the engine's /metrics has {ROUNDS}, but no {rounds.ROUNDS}: without it nobody can tell which drafter "
                "did the rounds of a request that ran over a swap. Install rl_hooks into SGLang's environment with "
                "pip; SGLANG_PLUGINS, where it is set, must name draftalign; then restart the server. "
                "If it is installed, the server's log says why it does not count"
            )
        return await self._snapshot(counted, generated - finished, (), requests)

    async def _snapshot(
        self, counted: int, emitted: int, positions: tuple[int, ...], requests: tuple[int | None, ...]
    ) -> Snapshot:
        if self._depth is None:  # else what was drafted would be fewer than an earlier agent has counted
            await self.state()
        accepted = max(emitted - counted, 0)
        drafted = max(counted * (self._depth or 0), accepted)
        finished, running = requests
        return Snapshot(
            Counts(
                *(counted, drafted, accepted, positions, emitted), finished_requests=finished, running_requests=running
            )
        )

    async def swap(self, release: Release) -> str | None:
        """Swap, or raise SwapRefusedError (never) or EngineError (not now) with the old drafter still in place.

        Returns the SHA-256 that the loader of every rank says it read.
        """
        info = await self._object("GET", "/server_info")
        self._check_alone(info)
        check_server(info)
        check_release(release, info)
        ranks, started = _ranks(info), process_identity(info)
        if await self._is_released():
            raise EngineError(f"{self.url} has released the memory of its weights; it is asked again")
        outcome = self._directory / f"swap-{uuid.uuid4().hex}"
        outcome.mkdir(parents=True)
        try:
            await self._load(release, outcome, ranks)
            said = [json.loads(path.read_text()) for path in sorted(outcome.glob("*.json"))]
            sha256 = judged(self.url, release, said, ranks)
        finally:
            shutil.rmtree(outcome, ignore_errors=True)  # a rank may write its part still, and the error counts
        before = self._loaded
        swaps = before[2] + 1 if before is not None and before[0] == started else 1
        self._loaded, self._is_swapped = (started, release.version, swaps), True
        self._try_to_remember()
        return sha256

    def _check_alone(self, info: Mapping[str, Any]) -> None:
        if (says := internal(info, FOLLOWS)) is not None:
            raise EngineError(f"{self.url} is left alone, and is not counted here: {cut(says)}")

    async def _is_released(self) -> bool:
        """Whether our plugin says that the weights are not in the server's memory. Without it nobody knows."""
        try:
            return bool(_total(read_samples(await self._page(), (RELEASED,)), RELEASED))
        except EngineError:  # no metrics page
            return False

    async def _load(self, release: Release, outcome: Path, ranks: int) -> None:
        """Have our loader called in every rank."""
        request: dict[str, Any] = {"path": str(release.path), "version": release.version}
        request |= {"outcome": str(outcome), "sha256": dict(release.sha256s)}
        body = {
            "serialized_named_tensors": [request_payload(request)] * ranks,
            "load_format": LOADER,
            # True would be refused while requests run, and the answer would look like a failure.
            "flush_cache": False,
        }
        await self._post("/update_weights_from_tensor", body, timeout_seconds=self._swap_timeout_seconds)

    def _try_to_remember(self) -> None:
        """For what has been done already: a full disk must not keep it from its end."""
        try:
            self._remember()
        except OSError as error:
            log.warning("%s: the agent's memory of it could not be written: %s", self.url, error)

    def _remember(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        document = {"engine": self.url, "loaded": self._loaded}
        replace_file(self._memory, json.dumps(document).encode(), durable=False)

    async def _post(self, path: str, body: Mapping[str, Any], **options: Any) -> None:
        answer = await self._call("POST", path, json=dict(body), **options)
        try:
            document = answer.json()
        except ValueError as error:
            raise EngineError(f"{self.url}{path} did not answer JSON: {answer.text[:200]!r}") from error
        if isinstance(document, dict) and document.get("success") is False:
            raise EngineError(f"{self.url}{path}: {str(document.get('message'))[:300]}")


def judged(url: str, release: Release, said: Sequence[Mapping[str, Any]], ranks: int) -> str:
    """What became of a swap, by what the loader of each rank `said`: the digest that all of them read, or an error."""
    other = [one["other_bytes"] for one in said if one.get("other_bytes")]
    if other:
        raise OtherBytesError(f"{url} did not load {release.version}: {other[0]}")
    refused = [one["refused"] for one in said if one.get("refused")]
    if refused:
        raise SwapRefusedError(f"{url} refused {release.version}: {refused[0]}")
    failed = [one["failed"] for one in said if one.get("failed")]
    if failed or len(said) < ranks or not all(one.get("ok") for one in said):
        silent = (
            f"{len(said)} of {ranks} ranks wrote an outcome; see the server's log, and whether its "
            f"DRAFTALIGN_DRAFTER_DIR holds {release.path} and has room"
        )
        reason = failed[0] if failed else silent
        raise EngineError(f"{url} did not load {release.version}: {reason}")
    if len({one["sha256"] for one in said}) != 1:
        raise EngineError(f"{url}: its ranks read different files for {release.version}")
    return str(said[0]["sha256"])


def check_server(info: Mapping[str, Any]) -> None:
    """Refuse servers whose drafter cannot be swapped this way; the message says how to start one that can."""
    faults = []
    if mark_of(info) is None:
        faults.append(
            f"our plugin is not loaded in this SGLang {cut(str(info.get('version')))} (0.5.12 and newer load it), or "
            "is older than this agent: without it a swap waits for every running request. Install rl_hooks into its "
            "environment with pip; SGLANG_PLUGINS, where it is set, must name draftalign; then restart the server"
        )
    if str(info.get("speculative_algorithm")).upper() != "EAGLE3":
        faults.append(f"it runs speculative algorithm {info.get('speculative_algorithm')!r:.200}, not EAGLE3")
    if int(info.get("dp_size") or 1) != 1:
        faults.append("SGLang takes weights only with --dp-size 1; run one server per replica")
    for name in ("attn_dp_size", "attn_cp_size"):  # `--dp-size N --enable-dp-attention` is shown as the first
        if int(info.get(name) or 1) != 1:
            faults.append(f"it splits attention (--{name.replace('_', '-')}), with which no swap was tried")
    if LOADER not in (info.get("custom_weight_loader") or []):
        faults.append(f"start it with --custom-weight-loader {LOADER}")
    if faults:
        raise SwapRefusedError("this SGLang server cannot take drafters: " + "; ".join(faults))


def check_release(release: Release, info: Mapping[str, Any]) -> None:
    """Refuse drafters that SGLang cannot serve, before anything is asked of the server."""
    path, expected = release.path / CONFIG_FILE, release.sha256s.get(CONFIG_FILE)
    try:
        body = path.read_bytes()
        if expected is not None and hashlib.sha256(body).hexdigest() != expected:
            raise OtherBytesError(f"{path} is not what was downloaded, so {release.version} is not loaded")
        beyond = limits("sglang", parse_drafter(parse_object(body, path)))
    except (OSError, DrafterError) as error:
        raise SwapRefusedError(f"{release.version}: {error}") from error
    if beyond:
        raise SwapRefusedError(f"{release.version}: {'; '.join(beyond)}")
    # SGLang keeps the draft vocabulary that it started with, whatever is loaded later.
    first = Path(str(info.get("speculative_draft_model_path") or "")) / MODEL_FILE
    if not first.is_file():
        return  # it is not on this disk; the loader compares with the loaded vocabulary
    try:
        started, offered = (wire.MappedFile(path) for path in (first, release.path / MODEL_FILE))
    except wire.WireError:
        return  # it may have unknown dtypes; the loader compares in any case
    if "d2t" in started and "d2t" in offered and not np.array_equal(started.array("d2t"), offered.array("d2t")):
        with (release.path / MODEL_FILE).open("rb") as model:
            found = hashlib.file_digest(model, "sha256").hexdigest()
        if release.sha256s.get(MODEL_FILE, found) != found:  # the file is damaged, the published one may be right
            raise OtherBytesError(f"{model.name} is not what was downloaded, so {release.version} is not loaded")
        raise SwapRefusedError(
            f"{release.version}: d2t differs from the one in {cut(str(first.parent))}, with which the server was "
            "started; SGLang reads the draft vocabulary once, at its start. Restart it with this drafter"
        )


def request_payload(request: Mapping[str, Any]) -> str:
    """`[(name, torch.ByteTensor([...]))]` as SGLang's serializer would write it, in base64; made without torch.

    SGLang unpickles with an allow-list of classes, which has `torch.ByteTensor`. The tensor's bytes are JSON.
    """
    data = json.dumps(dict(request)).encode()
    name = _REQUEST.encode()
    numbers = b"".join(b"K" + bytes([value]) for value in data)  # BININT1
    opcodes = [
        b"\x80\x02]",  # protocol 2, the outer list
        b"X" + struct.pack("<I", len(name)) + name,
        b"ctorch\nByteTensor\n",
        b"](" + numbers + b"e",  # a list of its bytes
        b"\x85R",  # as the only argument
        b"\x86a.",  # the pair, appended; stop
    ]
    return base64.b64encode(b"".join(opcodes)).decode()


def _total(samples: Mapping[str, list[Sample]], name: str) -> int:
    """A counter, summed over its labels; 0 before its first request."""
    return sum(whole(name, sample.value) for sample in samples.get(name, ()))


def _ranks(info: Mapping[str, Any]) -> int:
    """The number of ranks. Each gets a copy of the request, so it is bounded: a server must not exhaust our memory."""
    size = info.get("tp_size") or 1
    if type(size) is not int or not 0 < size <= _MAX_RANKS:
        raise EngineError(f"/server_info: expected tp_size of 1 to {_MAX_RANKS}, got {size!r:.80}")
    return size


def process_identity(info: Mapping[str, Any]) -> str:
    """A mark that differs at each start of a server: SGLang reports how long the start took, and the seed it drew.

    Where our plugin gives a mark, that. Raises EngineError where the server says neither.
    """
    if (mark := mark_of(info)) is not None:
        return cut(mark)
    if not isinstance(info.get("startup_time"), dict):
        raise EngineError(
            f"/server_info has no startup_time (got {info.get('startup_time')!r:.200}) and no mark of our plugin. "
            "SGLang 0.5.17 and newer has the one; for older ones install rl_hooks into SGLang's environment with pip"
        )
    facts = [info.get(name) for name in ("startup_time", "random_seed", "launch_command")]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
