"""What an engine is told of the service that it follows: `DRAFTALIGN_*` of its environment, or arguments."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from rl_hooks.format.release import PLAIN_NAME
from rl_hooks.sending.exchange import Origin

log = logging.getLogger("draftalign.tap")

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The service that an engine follows, and how much it sends there. Raises ValueError for values out of range."""

    url: str
    run: str = "default"
    token: str | None = field(default=None, repr=False)
    #: Share of the requests whose rows are sent. 0: none, where a trainer's hook sends them.
    sample_fraction: float = 0.05
    tokens_per_minute: int = 60_000

    def __post_init__(self) -> None:
        Origin.parse(self.url)
        if not PLAIN_NAME.fullmatch(self.run):
            raise ValueError(f"run: {self.run!r} is not a plain name of letters, digits, '.', '_' and '-'")
        if not 0.0 <= self.sample_fraction <= 1.0 or self.tokens_per_minute < 1:
            raise ValueError(
                "expected a sample fraction from 0 to 1 and at least 1 token per minute, got "
                f"{self.sample_fraction} and {self.tokens_per_minute}"
            )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> ServiceSettings | None:
        """From DRAFTALIGN_* variables; None where DRAFTALIGN_URL is unset.

        Nothing is sampled by default where the trainer is verl with our hook in it (VERL_ENGINE_VENDOR).
        """
        url = environment.get("DRAFTALIGN_URL")
        if not url:
            return None
        fraction = environment.get("DRAFTALIGN_SAMPLE_FRACTION")
        if not fraction and environment.get("VERL_ENGINE_VENDOR") == "draftalign":
            log.info("draftalign: verl's own hook sends rollouts, so this engine sends none")
            fraction = "0"
        return cls(
            url,
            environment.get("DRAFTALIGN_RUN") or "default",
            environment.get("DRAFTALIGN_TOKEN") or None,
            _number(float, "DRAFTALIGN_SAMPLE_FRACTION", fraction or "0.05"),
            _number(int, "DRAFTALIGN_TOKENS_PER_MINUTE", environment.get("DRAFTALIGN_TOKENS_PER_MINUTE") or "60000"),
        )


def _number(kind: type[_Number], variable: str, text: str) -> _Number:
    try:
        return kind(text)
    except ValueError as error:
        raise ValueError(f"{variable}: expected {kind.__name__}, got {text!r}") from error
