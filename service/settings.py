"""One frozen settings object per process, read once at start from the environment (`DRAFTALIGN_*`).

Settings()                                        from the environment, safe defaults
Settings(state_dir=tmp, port=0)                   in a test
DRAFTALIGN_TOKENS="s3cret:write,read;0ther:admin" two tokens with their scopes
DRAFTALIGN_TOKENS="$(cat tokens.jsonl)"           those of a token file, of which the environment has hashes only
"""

from __future__ import annotations

import ipaddress
import os
import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from rl_hooks.durable import at_home

Scope = Literal["write", "report", "read", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("write", "report", "read", "admin")
_SEVERAL: Final = ("redis+cluster://", "rediss+cluster://", "redis+sentinel://", "rediss+sentinel://")
REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://", *_SEVERAL)
#: Where `drafters_url` may lead.
OBJECT_SCHEMES: Final = ("s3://", "gs://", "az://", "file://")
MIB: Final = 1 << 20


def _not_empty(path: object) -> object:
    if path == "":  # it would be the current directory
        raise ValueError("is empty; give a path, or leave it out")
    return path


def regular_file(path: Path) -> Path:
    """The path. ValueError where a pipe, device or directory is there: to open a pipe waits until somebody writes."""
    if os.path.exists(path) and not os.path.isfile(path):  # noqa: PTH110, PTH113 - `Path.exists` raises where it may not look
        raise ValueError(f"{path} is no regular file; name one, it is read more than once")
    return path


#: A path that may begin with `~`.
HomePath = Annotated[Path, BeforeValidator(_not_empty), AfterValidator(at_home)]
_GivenFile = Annotated[HomePath, AfterValidator(regular_file)]


def redis_place(url: str) -> str:
    """A Redis URL without user, password and options, safe to show. Its ValueError repeats no part of the URL."""
    try:
        parts = urlsplit(url)
        if url.startswith(_SEVERAL):
            members = ",".join(f"{host}:{port}" for host, port in redis_members(url))
            host, port = members, None
        else:
            host, port = parts.hostname or "", parts.port
        # After an @ behind the host, or a port that is no number, the password was not percent-encoded.
        sound = url.startswith(REDIS_SCHEMES) and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        sound = False
    if not sound:
        schemes = ", ".join(REDIS_SCHEMES)
        raise ValueError(f"redis_url must begin with one of {schemes}, with / : @ # ? in its password percent-encoded")
    host = f"[{host}]" if ":" in host and not url.startswith(_SEVERAL) else host
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path}"


def redis_members(url: str) -> list[tuple[str, int]]:
    """Hosts and ports that a cluster's or Sentinel's URL names; ValueError where one is no host with a port."""
    parts = urlsplit(url)
    default = 26379 if parts.scheme.endswith("sentinel") else 6379
    found = [urlsplit(f"//{member}") for member in parts.netloc.rpartition("@")[2].split(",")]
    if any(not member.hostname for member in found):
        raise ValueError("redis_url names a host that is empty")
    return [(str(member.hostname), member.port or default) for member in found]


class Settings(BaseSettings):
    """Settings of the API and the worker; a field `x` is the variable `DRAFTALIGN_X`."""

    model_config = SettingsConfigDict(
        env_prefix="DRAFTALIGN_",
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,  # the input holds tokens and passwords
    )

    state_dir: HomePath = Field(
        Path(".draftalign"), description="Spool, registry, worker checkpoints, embedded Valkey."
    )
    host: str = Field("127.0.0.1", description="Address to bind. Anything but loopback needs `tokens`.")
    port: int = Field(8400, ge=0, le=65535, description="TCP port of the API; 0 takes a free one.")
    redis_url: SecretStr | None = Field(
        None, description="Redis or Valkey to use. Unset: an embedded Valkey is started."
    )
    tokens: SecretStr = Field(
        SecretStr(""),
        description='Tokens: "secret:write,read;other:admin", or a token file\'s lines; empty: loopback only.',
    )
    token_file: _GivenFile | None = Field(
        None, description="More tokens, hashed and limited to runs; `draftalign token` adds one. Read again on change."
    )
    tls_cert: _GivenFile | None = Field(
        None, description="PEM file with the API's certificate chain: it then speaks https."
    )
    tls_key: _GivenFile | None = Field(None, description="PEM file with that certificate's private key.")

    signing_key_file: _GivenFile | None = Field(
        None, description="Private Ed25519 key (PEM) that signs manifests; `draftalign keygen` makes one."
    )

    state_url: str | None = Field(
        None,
        description="Object store that API replicas and workers share, `s3://bucket/prefix`; each host's `state_dir` is"
        " its own then. Unset: they share the directory.",
    )

    drafters_url: str | None = Field(
        None, description="Object store that engines fetch drafters from, `s3://bucket/prefix`. Unset: from the API."
    )

    rollouts_url: str | None = Field(
        None,
        description="Object store that trainers put rollout files into, `s3://bucket/prefix`. Unset: through the API.",
    )

    max_body_bytes: int = Field(512 * MIB, gt=0, description="Largest rollout file.")
    max_run_bytes: int = Field(16 * 1024 * MIB, gt=0, description="Largest body of PUT /runs/{run} or of its head.")
    max_batch_rollouts: int = Field(4096, gt=0, description="Most rollouts in one file; above it 422.")
    max_batch_tokens: int = Field(
        131_072, ge=2, description="Most tokens in one file; above it 422. A worker does not leave a batch half way."
    )
    max_rollout_tokens: int = Field(
        65_536, ge=2, description="Most tokens in one rollout; above it 422. Work grows with the square of its length."
    )
    max_runs: int = Field(256, gt=0, description="Most runs; the next one to be registered gets 403.")
    max_heads: int = Field(
        128,
        ge=2,
        description="Heads that a run keeps; the next one takes an unneeded one's place, or gets 429.",
    )
    max_reporters: int = Field(
        1024,
        ge=1,
        description="Engines of a run whose counts are kept. A new one takes the place of one that was silent for an"
        " hour, or of one that never had a round, else it gets 429.",
    )
    remembered_bytes: int = Field(
        128 * MIB,
        gt=0,
        description="Redis' memory for the fates of a run's ended batches and their rollouts; the oldest go first."
        " All runs together: twice that, and less where Redis is nearly full.",
    )
    queue_max_items: int = Field(10_000, gt=0, description="Most batches in a run's queue; above it 429.")
    queue_max_rollouts: int = Field(
        131_072, gt=0, description="Most rollouts in a run's queue; above it 429. Redis has a key for each."
    )
    queue_max_bytes: int | None = Field(
        None,
        gt=0,
        description="Most bytes in a run's queue; above it 429. In any case a run gets at most 3/4 of what it has and"
        " what is free on the spool's disk.",
    )
    spool_min_free_bytes: int = Field(256 * MIB, ge=0, description="Free disk below which uploads get 429.")
    spool_fsync: bool = Field(False, description="Force each rollout file to disk before its 202.")
    body_idle_seconds: float = Field(30.0, gt=0, description="Idle time after which an upload is dropped.")
    orphan_age_seconds: float = Field(600.0, gt=0, description="Age at which spool files without an entry are removed.")
    dead_letter_bytes: int = Field(
        1024 * MIB, ge=0, description="Most bytes of files of dead batches that a run keeps; the oldest go first."
    )
    dead_letter_seconds: float = Field(
        7 * 86_400.0, ge=0, le=7 * 86_400, description="How long the file of a dead batch is kept, to be put back."
    )

    max_policy_lag: int | None = Field(
        None,
        ge=0,
        description="Skip batches whose forward is more than this many policy versions before the newest one's.",
    )
    depth: int = Field(4, ge=1, le=16, description="Draft depth K of the engines: tokens drafted per round.")
    drafting: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="How the engines choose drafts. Replay α assumes the same."
    )
    claim_idle_seconds: float = Field(60.0, gt=0, description="Idle time after which another worker claims an entry.")

    long_poll_max_seconds: float = Field(60.0, ge=0, description="Longest `wait` of GET /drafter/latest.")

    # --- the worker
    device: str = Field("cpu", description="Torch device that the worker trains on, for example `cuda:0`.")
    gpu_memory_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="Share of a GPU's memory that the worker may take, where something else runs on it.",
    )
    worker_ranks: int = Field(
        1,
        ge=1,
        le=64,
        description="Worker processes that `draftalign up` starts to train one drafter: one for each GPU.",
    )
    draft_vocab_size: int = Field(32_000, ge=1, description="Draft vocabulary of a drafter that starts from scratch.")
    vocab_min_tokens: int = Field(50_000, ge=1, description="Response tokens needed to build that vocabulary.")
    claim_tokens: int = Field(65_536, gt=0, description="Token budget of one claim from the queue.")
    train_passes: float = Field(
        8.0, gt=0, description="How often each new token is trained on, on average, until newer rollouts come."
    )
    train_step_tokens: int = Field(16_384, gt=0, description="Tokens of one optimizer step.")
    warmup_steps: int = Field(30, ge=0, description="Optimizer steps over which the learning rate rises linearly.")
    learning_rate: float = Field(3e-4, gt=0, allow_inf_nan=False, description="Learning rate after the warm-up.")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="Optimizer of matrices; AdamW for the rest.")
    recent_tokens: int = Field(262_144, gt=0, description="Tokens of recent rollouts that are kept for training.")
    gate_rollouts: int = Field(
        256,
        ge=0,
        description="Where a worker is behind: how many of the rollouts that it passes over judge the candidate after"
        " each training. Those of the newest policy always do.",
    )
    gate_confidence: float = Field(
        0.95,
        gt=0.5,
        lt=1,
        description="1 - the chance, over all looks together, that a served drafter is replaced by an equal one."
        " It holds where a pair's gain varies by less than 1.5 % from claim to claim.",
    )
    gate_min_gain: float = Field(0.005, ge=0, description="Relative gain in α that a swap is worth.")
    logprob_gap_nats: float = Field(
        0.25, gt=0, description="Mean |log p sent - log p recomputed from the features| above which a batch is dead."
    )
    drift_days_between_alarms: float = Field(
        30.0, gt=0, le=36_500, description="Days between false alarms of a fall of α, on average."
    )
    drift_dead_band: float = Field(
        0.0, ge=0, lt=1, description="Fraction of α that may be lost before the drift alarm counts it."
    )
    drift_strata: int = Field(
        16, ge=0, le=64, description="Most kinds of prompts (`strata`) that the drift alarm tells apart; 0: none."
    )
    checkpoint_seconds: float = Field(
        10.0,
        ge=0,
        description="Least time between checkpoints; slow ones wait longer. 0: one after each batch.",
    )
    keep_versions: int = Field(20, ge=2, description="Versions kept on disk besides the first and the served one.")
    worker_cost: float = Field(0.1, ge=0, description="Price of a worker second, in seconds of generating engines.")
    seed: int = Field(0, ge=0, description="Seed of the worker's sampling and of a drafter that starts from scratch.")

    @classmethod
    def with_options(cls, **given: Any) -> Self:
        """The environment's settings, with a command's options. None is an option that was not given."""
        return cls(**{name: value for name, value in given.items() if value is not None})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_batch_rollouts > self.queue_max_rollouts:
            raise ValueError(
                f"max_batch_rollouts is {self.max_batch_rollouts}, above queue_max_rollouts {self.queue_max_rollouts}: "
                "such a batch could never be queued"
            )
        if self.queue_max_bytes is not None and self.max_body_bytes > self.queue_max_bytes:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, above queue_max_bytes {self.queue_max_bytes}: "
                "the largest file would never fit the queue; lower the one or raise the other"
            )
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both, or neither for plain HTTP")
        if self.drafters_url is not None and not self.drafters_url.startswith(OBJECT_SCHEMES):
            raise ValueError(f"drafters_url must begin with one of {', '.join(OBJECT_SCHEMES)}")
        if self.state_url is not None and not self.state_url.startswith("s3://"):
            raise ValueError("state_url must begin with s3://: a change is a put on condition of an entity tag")
        if self.rollouts_url is not None and not self.rollouts_url.startswith("s3://"):
            raise ValueError(
                "rollouts_url must begin with s3://: an upload URL of another kind of store binds neither the length "
                "nor the digest of what is put there"
            )
        self.token_scopes()
        return self

    def token_entries(self) -> list[str]:
        """The entries of `tokens`: plain ones, and lines of a token file, which begin with `{`."""
        return [entry for part in re.split("[;\n]", self.tokens.get_secret_value()) if (entry := part.strip())]

    def token_scopes(self) -> dict[str, frozenset[Scope]]:
        """Map each token that `tokens` has in plain text to its scopes; `admin` includes the others."""
        table: dict[str, frozenset[Scope]] = {}
        for number, part in enumerate(self.token_entries(), 1):
            if part.startswith("{"):
                continue  # service.access.tokens reads it
            secret, _, names = part.rpartition(":")
            named = names.split(",")
            scopes = frozenset(scope for scope in SCOPES if scope in named)
            if not secret or secret[0] == "@" or not secret.isascii() or len(scopes) != len(named):
                raise ValueError(  # a client takes @FILE for a file's name, and would print it where there is none
                    f"tokens: entry {number} must be ASCII 'secret:scope,...', not '@...', with scopes of "
                    f"{', '.join(SCOPES)}, or a line that `draftalign token` adds to a token file"
                )
            if secret in table:
                raise ValueError(f"tokens: entry {number} repeats the secret of an earlier one")
            table[secret] = frozenset(SCOPES) if "admin" in scopes else scopes
        return table

    def url(self, port: int) -> str:
        """The API's address, at the port that it has."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.tls_cert is None else 'https'}://{host}:{port}/"

    @property
    def binds_loopback(self) -> bool:
        """Whether `host` can only be reached from this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
