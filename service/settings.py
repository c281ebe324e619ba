"""One frozen settings object per process, read once at start from the environment (`DRAFTALIGN_*`).

Settings()                                        from the environment, safe defaults
Settings(state_dir=tmp, port=0)                   in a test
DRAFTALIGN_TOKENS="s3cret:write,read;0ther:admin" two tokens with their scopes
"""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Scope = Literal["write", "read", "admin"]
SCOPES: Final[tuple[Scope, ...]] = ("write", "read", "admin")
REDIS_SCHEMES: Final = ("redis://", "rediss://", "unix://")
MIB: Final = 1 << 20


def redis_place(url: str) -> str:
    """Where a Redis URL leads, to be shown: without user, password and options. The ValueError shows nothing of it."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        # An @ after the host, or a port that is no number, is of a password that was not percent-encoded.
        sound = url.startswith(REDIS_SCHEMES) and "@" not in parts.path + parts.query + parts.fragment
    except ValueError:
        sound = False
    if not sound:
        schemes = ", ".join(REDIS_SCHEMES)
        raise ValueError(f"redis_url must begin with one of {schemes}, with / : @ # ? in its password percent-encoded")
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{'' if port is None else f':{port}'}{parts.path}"


class Settings(BaseSettings):
    """Settings of the API and the worker; a field `x` is the variable `DRAFTALIGN_X`."""

    model_config = SettingsConfigDict(
        env_prefix="DRAFTALIGN_",
        frozen=True,
        extra="forbid",
        populate_by_name=True,
        hide_input_in_errors=True,  # tokens and passwords are among it
    )

    state_dir: Path = Field(Path(".draftalign"), description="Spool, registry, worker checkpoints, embedded Valkey.")
    host: str = Field("127.0.0.1", description="Address to bind. Anything but loopback needs `tokens`.")
    port: int = Field(8400, ge=0, le=65535, description="TCP port of the API; 0 takes a free one.")
    redis_url: SecretStr | None = Field(
        None,
        validation_alias=AliasChoices("redis_url", "DRAFTALIGN_REDIS_URL", "REDIS_URL"),
        description="Redis or Valkey to use. Unset: an embedded Valkey is started.",
    )
    tokens: SecretStr = Field(
        SecretStr(""), description='Tokens with scopes, "secret:write,read;other:admin". Empty: loopback only.'
    )

    signing_key: SecretStr = Field(
        SecretStr(""), description="Signs every manifest (HMAC-SHA256); agents that hold it refuse others."
    )

    max_body_bytes: int = Field(512 * MIB, gt=0, description="Largest rollout file, and largest PUT body beside runs.")
    max_run_bytes: int = Field(16 * 1024 * MIB, gt=0, description="Largest body of PUT /runs/{run} and of its head.")
    queue_max_items: int = Field(10_000, gt=0, description="Batches in the queue before 429, per run.")
    queue_max_bytes: int = Field(16 * 1024 * MIB, gt=0, description="Spooled bytes in the queue before 429, per run.")
    spool_min_free_bytes: int = Field(256 * MIB, ge=0, description="Free disk below which uploads get 429.")
    spool_fsync: bool = Field(False, description="Force each rollout file to disk before its 202 (power loss).")
    overflow: Literal["reject", "drop_oldest"] = Field(
        "reject", description="What a full queue does: refuse the newest (429), or drop the oldest unread batch."
    )
    retry_after_seconds: int = Field(2, ge=1, description="`Retry-After` of a 429 or 503.")
    body_idle_seconds: float = Field(30.0, gt=0, description="An upload that sends nothing for so long is dropped.")
    orphan_age_seconds: float = Field(600.0, gt=0, description="Unreferenced spool files older than this are removed.")

    max_policy_lag: int | None = Field(
        None, ge=0, description="Batches so many policy versions behind the newest sent are skipped."
    )
    depth: int = Field(4, ge=1, le=16, description="Draft depth K that the engines use: tokens drafted per round.")
    drafting: Literal["probabilistic", "greedy"] = Field(
        "probabilistic", description="How the engines sample drafts; replay α must assume the same."
    )
    holdout_one_in: int = Field(8, ge=2, description="One prompt in so many is never trained on: the gate's evidence.")
    claim_idle_seconds: float = Field(60.0, gt=0, description="An entry not heartbeat for so long is taken over.")

    dead_min_rounds: int = Field(200, ge=1, description="Live rounds needed before a drafter may be called dead.")
    dead_live_alpha: float = Field(1.05, ge=1.0, description="Live α at or below which a drafter may be dead.")
    dead_replay_alpha: float = Field(
        1.3, ge=1.0, description="Replay α above which a dead live α is not the policy's doing."
    )
    push_again_seconds: float = Field(30.0, ge=0, description="Least time between two re-pushes of one run's drafter.")
    long_poll_max_seconds: float = Field(60.0, ge=0, description="Longest `wait` of GET /drafter/latest.")

    # --- the worker
    device: str = Field("cpu", description="Torch device that the worker trains on, for example `cuda:0`.")
    draft_vocab_size: int = Field(32_000, ge=1, description="Draft vocabulary of a drafter that starts from scratch.")
    vocab_min_tokens: int = Field(50_000, ge=1, description="Response tokens to see before that vocabulary is built.")
    claim_tokens: int = Field(65_536, gt=0, description="Token budget of one claim from the queue.")
    train_passes: float = Field(8.0, gt=0, description="Times that a new training token is trained on, on average.")
    train_step_tokens: int = Field(16_384, gt=0, description="Tokens of one optimizer step.")
    warmup_steps: int = Field(30, ge=0, description="Optimizer steps over which the learning rate rises to its value.")
    learning_rate: float = Field(3e-4, gt=0, description="Learning rate after that, constant.")
    optimizer: Literal["muon", "adamw"] = Field("muon", description="What moves matrices; AdamW moves all the rest.")
    loss: Literal["kl", "alpha"] = Field(
        "kl", description="What training minimises: distance per draft, or drafts lost by whole chains."
    )
    recent_tokens: int = Field(262_144, gt=0, description="Tokens of recent rollouts that are kept and mixed in.")
    gate_rollouts: int = Field(
        32,
        ge=2,
        description="Held-out rollouts, the newest first, that the gate compares on, at the least."
        " More are taken until they answer 16 prompts.",
    )
    gate_confidence: float = Field(
        0.95, gt=0.5, lt=1, description="Confidence of the bound that a candidate must pass."
    )
    gate_min_gain: float = Field(0.0, ge=0, description="Relative gain in α that the bound must exceed.")
    logprob_gap_nats: float = Field(
        0.25, gt=0, description="Mean |log p sent - log p recomputed from the features| above which a batch is dead."
    )
    checkpoint_seconds: float = Field(
        10.0,
        ge=0,
        description="Least time between checkpoints; long ones are spaced out. 0: after each batch.",
    )
    keep_versions: int = Field(20, ge=2, description="Published versions kept on disk beside the first and the served.")
    worker_cost: float = Field(0.1, ge=0, description="What a worker second is worth, in seconds of the rollout fleet.")
    seed: int = Field(0, ge=0, description="Seed of the worker's sampling and of a drafter that starts from scratch.")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_body_bytes > self.queue_max_bytes:
            raise ValueError(
                f"max_body_bytes is {self.max_body_bytes}, above queue_max_bytes {self.queue_max_bytes}: "
                "the largest file would never fit the queue; lower the one or raise the other"
            )
        self.token_scopes()
        return self

    def token_scopes(self) -> dict[str, frozenset[Scope]]:
        """Map each configured token to its scopes; `admin` includes the other two."""
        table: dict[str, frozenset[Scope]] = {}
        for number, part in enumerate(filter(None, self.tokens.get_secret_value().split(";")), 1):
            secret, _, names = part.strip().rpartition(":")
            scopes = frozenset(scope for scope in SCOPES if scope in names.split(","))
            if not secret or not secret.isascii() or len(scopes) != len(names.split(",")):
                raise ValueError(f"tokens: entry {number} must be ASCII 'secret:scope,...' with scopes of {SCOPES}")
            if secret in table:
                raise ValueError(f"tokens: entry {number} repeats the secret of an earlier one")
            table[secret] = frozenset(SCOPES) if "admin" in scopes else scopes
        return table

    @property
    def binds_loopback(self) -> bool:
        """Whether `host` can only be reached from this machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
