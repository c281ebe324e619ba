"""Takes an agent's drafter between two steps, so that nobody has to pause SGLang for it.

`/update_weights_from_tensor` waits until every running request has ended, unless generation is paused. The agent must
not pause: a trainer writes its policy by several calls between its own pause and continue, the pause is one switch
without a count, our continue would let generation go on with half a policy, and an agent that dies leaves the pause. So
a plugin of SGLang's framework lets a call that names our loader pass at once, and SGLang's schedulers do it between two
steps, whether they are paused or not.

From 0.5.21 on weights are written in sessions, of which one may be open. The plugin opens one for the drafter, and ends
it, within that call in each scheduler. While a trainer's is open the call is refused, and the agent asks again.

Before 0.5.21 one call is for policy and drafter. `rl_hooks.engines.sglang.loader` leaves the policy as it is. The other
way round, a trainer's call would write the policy into the drafter as well, which ends the server where shapes differ.
The stacks' trainers do not say `disable_draft_model`, so the plugin says it beside EAGLE-3, in a server that was
started with our loader.

The plugin also names the process in `/server_info`. By that the agent knows that the plugin is loaded.

Written against 0.5.12, 0.5.16, 0.5.18, 0.5.20 and 0.5.23.
"""

from __future__ import annotations

import functools
import logging
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Final

from rl_hooks.engines.sglang.facts import internal
from rl_hooks.engines.sglang.memory import UPDATER, hindered

log = logging.getLogger("draftalign.sglang")

#: `--custom-weight-loader` of the server, and `load_format` of an update that is ours.
LOADER: Final = "rl_hooks.engines.sglang.loader.load_drafter"
#: The entry of `/server_info`'s first `internal_states`, a text: the mark of this process.
MARK: Final = "draftalign"
SCHEDULER: Final = "sglang.srt.managers.scheduler.Scheduler"
_MANAGER: Final = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_BATCH: Final = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_LIFE: Final = uuid.uuid4().hex


class _Paused:
    """SGLang's tokenizer manager as it is while generation is paused: then an update waits for no request."""

    is_pause = True

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


def updated(original: Callable[..., Any], manager: Any, request: Any, *rest: Any, **named: Any) -> Any:
    """Let SGLang hand an update to its schedulers by `original`, one of ours at once. Returns what it returns."""
    if request.load_format == LOADER:
        manager = _Paused(manager)
        if hasattr(request, "selector"):  # since 0.5.21
            request.selector = "draft"
    elif getattr(request, "disable_draft_model", False) is None and _swaps(manager.server_args):
        _say_once(
            logging.INFO,
            "draftalign: updates of weights that do not say disable_draft_model are taken for the policy's alone: "
            "the drafter stays as it is. A trainer that trains the drafter must say false",
        )
        request.disable_draft_model = True  # a policy's weights
    return original(manager, request, *rest, **named)


def in_session(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """Have SGLang's manager do an update of ours by `original` in a session of its own, or refuse it, on all ranks."""
    if request.load_format != LOADER:
        return original(manager, request)
    from sglang.srt.managers.io_struct import (
        BeginWeightUpdateReqInput,
        EndWeightUpdateReqInput,
        UpdateWeightsFromTensorReqOutput,
    )

    # In a fork of another shape an exception would end the scheduler.
    why = hindered(manager) if hasattr(manager, "_session") else "this SGLang's sessions are of another shape"
    if why is not None:
        return UpdateWeightsFromTensorReqOutput(success=False, message=why)
    manager.begin_weight_update(BeginWeightUpdateReqInput(selector="draft"))
    try:
        return original(manager, request)
    finally:
        manager.end_weight_update(EndWeightUpdateReqInput())


def _swaps(args: Any) -> bool:
    """Whether a server was started to have its drafter swapped by us."""
    loaders = getattr(args, "custom_weight_loader", None) or ()
    return LOADER in loaders and str(args.speculative_algorithm).upper() == "EAGLE3"


@functools.cache
def _say_once(level: int, line: str) -> None:
    log.log(level, line)


def _guarded(hook: Callable[..., None]) -> Callable[..., None]:
    """The hook, whose exception would end SGLang's scheduler: in a release of another shape it is logged, once."""

    @functools.wraps(hook)
    def guarded(*arguments: Any, **named: Any) -> None:
        try:
            hook(*arguments, **named)
        except Exception as error:  # noqa: BLE001 - SGLang must go on
            line = f"draftalign: this SGLang is of another shape than was expected ({hook.__name__}: {error!r})"
            _say_once(logging.ERROR, f"{line}: its drafter may not be swapped, or its rounds not counted")

    return guarded


@_guarded
def described(answer: Any, *_: Any, **__: Any) -> None:
    """SGLang's scheduler has said how it stands: add this process's mark."""
    answer.internal_state[MARK] = _LIFE


def mark_of(info: Mapping[str, Any]) -> str | None:
    """The mark in what `/server_info` answered; None where this plugin is not loaded."""
    return internal(info, MARK)


@_guarded
def launched(_: Any, batch: Any, *__: Any, **___: Any) -> None:
    """Before a scheduler launches a step: note when, as later releases do by themselves."""
    batch.launch_ts = time.monotonic()


def sends_nothing(*_: Any, **__: Any) -> None:
    """A scheduler has started that is to follow the service: it says that it does not. Other processes say nothing."""
    log.warning(
        "draftalign: this server sends no features, and swaps nothing by itself: expected SGLang 0.5.23 or newer; use "
        "the trainer's hook, and an agent beside it"
    )


@_guarded
def copied(copy: Any, batch: Any, *_: Any, **__: Any) -> None:
    """A batch was copied until its results come: its copy was launched when it was."""
    copy.launch_ts = getattr(batch, "launch_ts", None)


def register() -> bool:
    """Register what a swap by an agent needs. Returns whether this is a release without sessions."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_MANAGER}.update_weights_from_tensor", updated, HookType.AROUND)
    HookRegistry.register(f"{SCHEDULER}.get_internal_state", described, HookType.AFTER)
    if hasattr(TokenizerManager, "begin_weight_update"):
        HookRegistry.register(f"{UPDATER}.update_weights_from_tensor", in_session, HookType.AROUND)
        return False
    if "launch_ts" not in ScheduleBatch.__dataclass_fields__:  # before 0.5.17
        HookRegistry.register(f"{SCHEDULER}.run_batch", launched, HookType.BEFORE)
        HookRegistry.register(f"{_BATCH}.copy", copied, HookType.AFTER)
    return True
