"""The life of a drafter in a real SGLang, on a GPU: the scenario of tests/rl_hooks/engines/test_sglang_swap.py.

    python -m benchmarks.sglang_scenario --policy Qwen/Qwen3-8B --good DRAFTER --worse DRAFTER [--depth 3]

It starts `sglang.launch_server` with the draft model `--good` and this repository's weight loader, keeps greedy
requests running, and swaps: worse, good, a poisoned file, a changed d2t. It asks for: no request failed or aborted,
every greedy text the same before, during and after, and α falling and rising with the drafter. `--good` and `--worse`
are canonical checkpoints of one configuration (same d2t). Exit status 0 when all of it holds; the figures are printed
as JSON.

Not run by CI: SGLang needs a GPU. Needs sglang==0.5.23 and this package in the same environment.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from rl_hooks import wire
from rl_hooks.agent.download import strip_shared
from rl_hooks.engines.sglang.adapter import LOADER, SGLangEngine
from rl_hooks.errors import EngineError, SwapRefusedError
from rl_hooks.release import Release, VerifiedManifest

#: That ask at once; and answers over which α is taken.
CLIENTS, REQUESTS = 8, 64
PROMPTS = [f"Count from {n} to {n + 30}, with commas:" for n in range(8)] + [
    f"Write a Python function that adds {n} to every element of a list, and explain it." for n in range(8)
]


@dataclass
class Load:
    """Clients that ask for the same greedy texts again and again."""

    url: str
    texts: dict[str, set[str]] = field(default_factory=dict)
    served: int = 0
    failures: list[str] = field(default_factory=list)
    verify_steps: int = 0
    tokens: int = 0

    async def client(self, number: int, stop: asyncio.Event) -> None:
        """One client, until told to stop."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300) as http:
            while not stop.is_set():
                prompt = PROMPTS[(number + self.served) % len(PROMPTS)]
                body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 192}}
                try:
                    answer = (await http.post("/generate", json=body)).raise_for_status().json()
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                meta = answer["meta_info"]
                if meta["finish_reason"]["type"] == "abort":
                    self.failures.append(str(meta["finish_reason"]))
                self.texts.setdefault(prompt, set()).add(answer["text"])
                self.served += 1
                self.verify_steps += int(meta.get("spec_verify_ct", 0))
                self.tokens += int(meta["completion_tokens"]) - 1

    async def alpha(self, requests: int) -> float:
        """Tokens per verification over the next requests that finish, the first few left out."""
        await self.until(self.served + 16)
        steps, tokens = self.verify_steps, self.tokens
        await self.until(self.served + requests)
        return (self.tokens - tokens) / max(self.verify_steps - steps, 1)

    async def until(self, served: int) -> None:
        """Wait until so many requests were served, or too many have failed."""
        while self.served < served and len(self.failures) < 10:  # noqa: ASYNC110 - counted by many clients
            await asyncio.sleep(0.05)


@contextlib.contextmanager
def sglang(arguments: argparse.Namespace, home: Path, port: int) -> Iterator[str]:
    """`sglang.launch_server`, until the block ends."""
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", arguments.policy, "--port", str(port)]
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(arguments.good)]
    command += ["--speculative-num-steps", str(arguments.depth), "--speculative-eagle-topk", "1"]
    command += ["--speculative-num-draft-tokens", str(arguments.depth + 1)]
    command += ["--custom-weight-loader", LOADER, "--enable-metrics", "--enable-deterministic-inference"]
    environment = {**os.environ, "DRAFTALIGN_DRAFTER_DIR": str(home)}
    process = subprocess.Popen([*command, *arguments.server_arguments], env=environment, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 1200
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + "/health_generate", timeout=20).status_code == 200:
                    break
            time.sleep(2)
        else:
            raise SystemExit("SGLang did not start; see its output above")
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def release(home: Path, name: str, source: Path) -> Release:
    """A copy of a checkpoint where the server may read, as the agent would have left it."""
    path = home / "scenario" / name
    shutil.copytree(source, path)
    (path.parent / "engines").mkdir(exist_ok=True)
    strip_shared(path / "model.safetensors")
    return Release(VerifiedManifest("scenario", name, 1, "", "", (), "", ""), path)


def poison(release_: Release) -> None:
    """A tensor that is not finite, as diverged training leaves it."""
    rewrite(release_, "norm.weight", lambda raw: np.full_like(raw, 0x7FC0 if raw.dtype == np.uint16 else np.nan))


def other_words(release_: Release) -> None:
    """Another draft vocabulary of the same size."""
    rewrite(release_, "d2t", lambda raw: raw + 1)


def rewrite(release_: Release, name: str, change: Any) -> None:
    """Change one tensor of a checkpoint."""
    path = release_.path / "model.safetensors"
    source = wire.MappedFile(path)
    tensors = {n: wire.Tensor.of(source.array(n).copy(), i.dtype) for n, i in source.header.tensors.items()}
    tensors[name] = wire.Tensor.of(change(source.array(name)), source.header.tensors[name].dtype)
    path.write_bytes(b"".join(bytes(part) for part in wire.encode(tensors, source.header.metadata)))


async def scenario(url: str, arguments: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Swap under load; returns the figures."""
    load, stop = Load(url), asyncio.Event()
    clients = [asyncio.create_task(load.client(n, stop)) for n in range(CLIENTS)]
    figures: dict[str, Any] = {"alpha": [], "swap_seconds": [], "refused": []}
    async with httpx.AsyncClient(timeout=60) as http:
        engine = SGLangEngine(url, http, home / "scenario")
        figures["alpha"].append(("start", await load.alpha(REQUESTS)))
        for name, source in (("worse", arguments.worse), ("good", arguments.good), ("worse-again", arguments.worse)):
            began = time.perf_counter()
            await engine.swap(release(home, name, source))
            figures["swap_seconds"].append(time.perf_counter() - began)
            figures["alpha"].append((name, await load.alpha(REQUESTS)))
        for name, change in (("poisoned", poison), ("other-words", other_words)):
            bad = release(home, name, arguments.good)
            change(bad)
            try:
                await engine.swap(bad)
            except (SwapRefusedError, EngineError) as error:
                figures["refused"].append((name, str(error)[:200]))
        figures["alpha"].append(("after refusals", await load.alpha(REQUESTS)))
        figures["counters"] = str(await engine.snapshot())
        figures["state"] = str(await engine.state())
    stop.set()
    await asyncio.gather(*clients)
    figures |= {"served": load.served, "failures": load.failures}
    figures["texts_changed"] = sum(len(texts) > 1 for texts in load.texts.values())
    return figures


def main() -> None:
    """Run the scenario and judge it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sglang_scenario", description=main.__doc__)
    parser.add_argument("--policy", required=True)
    parser.add_argument("--good", type=Path, required=True)
    parser.add_argument("--worse", type=Path, required=True)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--port", type=int, default=30_000)
    parser.add_argument("server_arguments", nargs="*", help="more arguments for sglang.launch_server, after --")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, sglang(arguments, Path(name), arguments.port) as url:
        figures = asyncio.run(scenario(url, arguments, Path(name)))
    print(json.dumps(figures, indent=1))
    alphas = dict(figures["alpha"])
    well = (
        not figures["failures"]
        and not figures["texts_changed"]
        and len(figures["refused"]) == 2
        and alphas["worse"] < alphas["start"]
        and abs(alphas["good"] / alphas["start"] - 1) < 0.1
        and abs(alphas["after refusals"] / alphas["worse-again"] - 1) < 0.1
    )
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
