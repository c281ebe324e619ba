"""What TRL's trainers have in common when the hook is on one: methods wrapped on the instance, its log, its clock.

Callbacks never see a batch, so methods of the trainer are wrapped. `log` is one of them: what the trainer logs gets the
hook's numbers (`draftalign/...`), and so does whatever `report_to` names.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, ClassVar

from rl_hooks.trainer.base import Closing, captured
from rl_hooks.trainer.hook import DrafterHook


class PromptKinds:
    """The kind of each prompt of the training data, for a trainer whose samples have the prompt and no other column."""

    def __init__(self, prompts: Iterable[Any], kinds: Iterable[Any]) -> None:
        known: dict[int, str] = {}
        several = set[int]()
        for prompt, kind in zip(prompts, kinds, strict=True):
            if known.setdefault(key := self._key(prompt), str(kind)) != str(kind):
                several.add(key)
        #: The same on every rank, as each has the training data.
        self.names: tuple[str, ...] = (*sorted({*known.values()}), "")
        numbers = {name: number for number, name in enumerate(self.names)}
        self._numbers = {key: numbers[kind] for key, kind in known.items() if key not in several}

    @staticmethod
    def _key(prompt: Any) -> int:
        """A hash, as prompts may be long. Of this process."""
        return hash(json.dumps(prompt, sort_keys=True, default=str))

    def number(self, prompt: Any) -> int:
        """The place of its kind in `names`; -1, which is "", for a prompt that the training data has not.

        So is one that it has of several kinds: a wrong kind would hide a fall, or make one up.
        """
        return self._numbers.get(self._key(prompt), -1)


class Attachment(Closing):
    """A trainer with the hook on it. `close` takes it off again, and so does the end of `with attach(...):`."""

    #: What a trainer must have: methods that are wrapped, and attributes that are read.
    METHODS: ClassVar[tuple[str, ...]] = ()
    ATTRIBUTES: ClassVar[tuple[str, ...]] = ("model", "state", "accelerator", "args")

    @staticmethod
    def policy_version(trainer: Any) -> int:
        """The policy version of the trainer's weights as they are now."""
        raise NotImplementedError

    def __init__(self, trainer: Any, hook: DrafterHook) -> None:
        self.hook = hook
        self._trainer = trainer
        self._active = True
        self._skipped_stale = 0
        #: Wall time of the RL steps so far: generation, forward, backward and optimizer.
        self.step_seconds = 0.0
        #: Owner, name, wrapper, and what the instance itself had under the name before.
        self._wrapped: list[tuple[Any, str, Any, Any]] = []
        self._wrap(trainer, "log", self._log)
        self._clock = _clock(self)
        trainer.add_callback(self._clock)

    @property
    def overhead_seconds(self) -> float:
        """Wall time that the hook took from the trainer."""
        return self.hook.overhead_seconds

    def stats(self) -> dict[str, Any]:
        """Counters of capture and sender, with the time of the RL steps they belong to."""
        return {**self.hook.stats(), "skipped_stale": self._skipped_stale, "step_seconds": self.step_seconds}

    def flush(self, timeout_seconds: float | None = None) -> bool:
        """As `DrafterHook.flush`."""
        return self.hook.flush(timeout_seconds)

    def close(self, timeout_seconds: float | None = None) -> bool:
        """Restore the trainer, then as `DrafterHook.close`: send what is queued. True if nothing had to be dropped."""
        active, self._active = self._active, False
        for owner, name, wrapper, before in reversed(self._wrapped):
            # If another tool has wrapped our wrapper since, ours stays in place, inactive.
            if vars(owner).get(name) is wrapper:
                delattr(owner, name)
                vars(owner).update({} if before is None else {name: before})
        self._wrapped.clear()
        if active:
            self._trainer.remove_callback(self._clock)
        return self.hook.close(timeout_seconds)

    # --- for the adapters -------------------------------------------------------------------------------------------

    def _wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Let `owner.name(...)` call `wrapper(what it was, ...)`."""
        wrapped = partial(wrapper, getattr(owner, name))
        self._wrapped.append((owner, name, wrapped, vars(owner).get(name)))
        setattr(owner, name, wrapped)

    def _request(self, model: Any, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """What `DrafterHook.capture` is to be told about this micro-batch; None: do not capture it."""
        raise NotImplementedError

    def _loss(self, original: Callable[..., Any], model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with captured(self.hook if self._active else None, self._request, model, inputs):
            return original(model, inputs, *args, **kwargs)

    def stepped(self) -> None:
        """The optimizer has changed the weights."""

    def _log(self, original: Callable[..., Any], logs: Any, *args: Any, **kwargs: Any) -> Any:
        # In place, as TRL adds its own: whatever `report_to` names is given them.
        if self._active:
            self.hook.guard(lambda: logs.update(self.hook.metrics()))
        return original(logs, *args, **kwargs)


def _clock(attachment: Attachment) -> Any:
    """A TrainerCallback that sums the wall time of whole RL steps, and says when the weights change."""
    # Imported here: where there is a TRL trainer, transformers is loaded already.
    callback_class: Any = importlib.import_module("transformers").TrainerCallback

    class Clock(callback_class):  # type: ignore[misc]
        started: float | None = None

        def on_step_begin(self, *_args: Any, **_kwargs: Any) -> None:
            self.started = time.perf_counter()

        def on_optimizer_step(self, *_args: Any, **_kwargs: Any) -> None:
            attachment.stepped()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            if self.started is not None:
                attachment.step_seconds += time.perf_counter() - self.started
                self.started = None

    return Clock()
