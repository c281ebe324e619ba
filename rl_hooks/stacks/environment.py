"""What an adapter reads from the environment, and what it says: that it is on, or that it is OFF and why."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any, Final, TypeVar

from rl_hooks.durable import at_home
from rl_hooks.errors import AuxLayersError

#: Share of its requests that a vLLM beside the trainer sends: none, as the trainer sends its rollouts.
ENGINES_SHARE = "DRAFTALIGN_SAMPLE_FRACTION"
#: Options of a hook that have a variable of their own.
_OWN_VARIABLE: Final = {
    "url": "DRAFTALIGN_URL",
    "run": "DRAFTALIGN_RUN",
    "token": "DRAFTALIGN_TOKEN",
    "initial_drafter": "DRAFTALIGN_INITIAL_DRAFTER",
    "aux_layers": "DRAFTALIGN_AUX_LAYERS",
}
#: What a trainer's processes read of it, and those of its engines.
VARIABLES = (
    *_OWN_VARIABLE.values(),
    *("DRAFTALIGN_HOOK_OPTIONS", "DRAFTALIGN_CA_FILE", ENGINES_SHARE),
    *("DRAFTALIGN_TOKENS_PER_MINUTE", "DRAFTALIGN_DRAFTER_DIR", "DRAFTALIGN_PUBLIC_KEYS"),
)
#: Those that the adapter gives, or that no JSON can.
_NOT_OURS: Final = {"rank", "world_size", "own_log_probs", "drafter_version", "logit_map"}
_log = logging.getLogger("rl_hooks")
_Made = TypeVar("_Made")


def attached(trainer: str, rank: int, attach: Callable[[dict[str, Any]], _Made], keywords: Any = None) -> _Made | None:
    """What `attach(options)` makes; None where it fails. The trainer goes on without us then.

    `trainer`, `rank`: for the log. `keywords`: names the hook's options; None: `DrafterKeywords`.
    """
    url = os.environ.get("DRAFTALIGN_URL", "")
    if not url:
        _log.error("draftalign is OFF: DRAFTALIGN_URL=http://host:port is not set")
        return None
    try:
        made = attach(_options(url, keywords))
    except Exception:  # noqa: BLE001 - the trainer goes on without us
        _log.exception("draftalign is OFF: this policy's rollouts are not sent")
        return None
    os.environ.setdefault(ENGINES_SHARE, "0")  # for an engine that starts here later
    _log.warning("draftalign is on: %s's rank %d sends rollouts to %s", trainer, rank, url)
    return made


def _options(url: str, keywords: Any) -> dict[str, Any]:
    """The hook's, as the environment has them."""
    options: dict[str, Any] = {"url": url, "run": os.environ.get("DRAFTALIGN_RUN", "default")}
    if drafter := os.environ.get("DRAFTALIGN_INITIAL_DRAFTER"):
        options["initial_drafter"] = str(at_home(drafter))
    if layers := os.environ.get("DRAFTALIGN_AUX_LAYERS"):
        try:
            options["aux_layers"] = tuple(int(layer) for layer in layers.split(","))
        except ValueError as error:
            raise AuxLayersError(f"DRAFTALIGN_AUX_LAYERS must be numbers like 2,14,25, got {layers[:80]!r}") from error
    if more := os.environ.get("DRAFTALIGN_HOOK_OPTIONS"):
        options |= _checked(more, keywords)
    return options


def _checked(more: str, keywords: Any) -> dict[str, Any]:
    """What DRAFTALIGN_HOOK_OPTIONS says: options of the hook, by names that it has."""
    if keywords is None:
        from rl_hooks.trainer.hook import DrafterKeywords  # now: it loads torch

        keywords = DrafterKeywords
    try:
        found = dict(json.loads(more).items())
    except (ValueError, AttributeError) as error:
        raise ValueError(
            f'DRAFTALIGN_HOOK_OPTIONS must be like {{"dtype": "float8_e4m3"}}, got {more[:80]!r}'
        ) from error
    takes = sorted(keywords.__optional_keys__ - _OWN_VARIABLE.keys() - _NOT_OURS)
    for name in found:
        if name in _OWN_VARIABLE:
            raise ValueError(f"DRAFTALIGN_HOOK_OPTIONS has {name!r}: set {_OWN_VARIABLE[name]} instead")
        if name not in takes:
            raise ValueError(f"DRAFTALIGN_HOOK_OPTIONS has {name[:80]!r}, which is none of {', '.join(takes)}")
    return found
