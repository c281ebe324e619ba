"""Feature capture in a vLLM that speculates with EAGLE-3: its own requests train the drafter, without a trainer's hook.

At every step the target passes its auxiliary and final states to the drafter. The tap reads the drafter's arguments,
takes the rows of the requests that it samples, and reads their tokens from the same step (`steps`). It registers the
run with the policy's embedding and head (`policy`) and with the server's first drafter. When the policy's weights
change, it sends the head again before the first rollout that needs it, if the head has moved.

The tap sends your users' text, as token ids and hidden states: sample with their consent.

V1 and V2 are tested on a CPU (tests/vllm_server/test_vllm_server_tap.py). Asynchronous scheduling on GPUs is written
from vLLM's source (0.32, 0.33) and was not run.

With tensor parallelism all ranks score the rows of the same requests, each over its slice of the head (`_SplitScores`);
only the first rank keeps and sends. Pipeline parallelism is refused.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from rl_hooks.engines.policy_watch import PolicyWatch
from rl_hooks.engines.ranks import Joiner, LayerRanks, Shard
from rl_hooks.engines.settings import ServiceSettings
from rl_hooks.engines.tap.collected import Request
from rl_hooks.engines.tap.feature_tap import TapUnsupportedError
from rl_hooks.engines.tap.rows import Step, labelled_rows, rows_of
from rl_hooks.engines.tap.served import ServedPolicy, ServedRun
from rl_hooks.engines.vllm.draft import started_with
from rl_hooks.engines.vllm.steps import (
    Named,
    Read,
    drafter_call,
    is_resumed,
    leaves_out_truncated,
    named_arguments,
    request_of,
    unlike_policy,
)
from rl_hooks.sending.registration import head_weight
from rl_hooks.sending.sampling import sampling_position

log = logging.getLogger("vllm.draftalign")

#: An engine's end waits for what was collected, and a second more where a request hangs (`RolloutSender.close`). The
#: engine core waits half a second longer for the answer.
_CLOSE_SECONDS: Final = 2.0


class _SplitScores:
    """Where the head is split over ranks: this rank's part of the scores of each step's sampled requests.

    Which these are follows from vLLM's schedule and the settings only, so no rank waits for one that has no rows.
    `whole_only`: leave out requests with top_p or top_k (`leaves_out_truncated`).
    """

    def __init__(
        self, joiner: Joiner, fraction: float, policy_version: Callable[[], int | None], *, whole_only: bool
    ) -> None:
        self.joiner, self._fraction, self._version, self._whole_only = joiner, fraction, policy_version, whole_only
        self._temperatures: dict[str, float] = {}  # of the sampled requests under way
        self._steps = self._rows = 0

    def leaves_out(self, request: Request) -> bool:
        """Whether log p of this request would be that of another distribution than it was drawn from."""
        return self._whole_only and request.sampling.truncated

    def schedule(self, scheduler_output: Any) -> None:
        """A step's schedule, which all ranks read alike."""
        self._steps += 1
        for name in scheduler_output.finished_req_ids:
            self._temperatures.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            if sampling_position(new.req_id, "tap") >= self._fraction or (request := request_of(new)) is None:
                continue
            if not self.leaves_out(request):
                self._temperatures[new.req_id] = request.sampling.scored_at
        counts = scheduler_output.num_scheduled_tokens
        self._rows = sum(n for name, n in counts.items() if name in self._temperatures)

    @torch.inference_mode()
    def scored(self, read: Callable[[Collection[str]], Step | None], head: Callable[[], Shard]) -> Step | None:
        """The step with its scores; None where none of its requests is sampled.

        A rank that cannot read or score it contributes NaN, and then raises.
        """
        if not self._rows:
            return None
        step, own_2N, problem = None, None, None
        rows: npt.NDArray[np.int64] | None = None
        try:
            step = read(self._temperatures)
            if step is not None:
                places = np.arange(len(step.request_ids))
                rows, (rows_N, labels_N) = rows_of(step, places), labelled_rows(step, places)
                each = torch.tensor([self._temperatures[name] for name in step.request_ids])
                temperature_N = each.repeat_interleave(torch.from_numpy(step.row_counts)).to(step.last.device)
                own_2N = head().partial(step.last[rows_N], labels_N.clamp(min=0), temperature_N)
        except Exception as error:  # noqa: BLE001 - raised once this rank has contributed
            problem = error
        joined = self.joiner.add(self._steps, self._rows, self._version() or 0, own_2N)
        if problem is not None:
            raise problem
        if step is None or rows is None:
            return step
        return step.scored(rows, joined.result)


class VllmTap:
    """The tap of one engine, in one of its workers: wraps the model runner, and sends what is collected if it is first.

    `joined`: the run is registered already, perhaps with the head of other weights than this worker holds. All ranks
    make theirs in the same call; where one cannot, none has a tap.
    """

    def __init__(
        self,
        worker: Any,
        settings: ServiceSettings,
        aux_layers: Sequence[int],
        watch: PolicyWatch,
        ranks: LayerRanks,
        *,
        joined: bool,
    ) -> None:
        self._weights = watch
        with ranks.together():
            self._check(worker)
            drafter_call(worker.model_runner)
        config, runner = worker.vllm_config.model_config.hf_text_config, worker.model_runner
        self.run = ServedRun(
            settings,
            lambda: ServedPolicy.on(ranks, config, runner.get_model()),
            ranks,
            aux_layers,
            functools.partial(started_with, worker),
            watch.weights,
            watch.version or 0,
            lambda: watch.noticed(),  # noqa: PLW0108 - it is set later
            joined=joined,
        )
        self.tap = self.run.tap
        self._shares: _SplitScores | None = None
        if ranks.size > 1:
            joiner = Joiner.of(ranks, self.tap.tally)
            whole_only = leaves_out_truncated(worker.vllm_config)
            self._shares = _SplitScores(joiner, settings.sample_fraction, lambda: watch.version, whole_only=whole_only)
        self._wrap(runner)
        watch.changing, watch.leaving = self.tap.cut, self.tap.flush
        self.run.send_head()

    def settled(self, *, tainted: bool) -> None:
        """The weights are those of the watch's version now. `tainted`: they changed under requests, unannounced."""
        self.run.settled(self._weights.version or 0, tainted=tainted)

    def _shard(self) -> Shard:
        policy = self.run.policy()
        return Shard(head_weight(policy), policy.head.begin, self.run.logit_map)

    @staticmethod
    def _check(worker: Any) -> None:
        if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise TapUnsupportedError("the tap needs embedding, states and head in one stage: no pipeline parallelism")
        speculative = worker.vllm_config.speculative_config
        if speculative is None or speculative.method != "eagle3":
            raise TapUnsupportedError("this server does not speculate with EAGLE-3, so no states reach a drafter")
        if getattr(speculative, "enable_adaptive_verification", False):
            raise TapUnsupportedError("with adaptive verification only the device knows which rows are whose")
        if getattr(speculative, "rejection_sample_method", None) == "synthetic":
            raise TapUnsupportedError("this server accepts drafts at made-up rates, so its tokens are not the policy's")
        if getattr(worker.vllm_config, "watermark_config", None) is not None:
            # vLLM 0.30 and 0.31 do not say which requests are: `watermarking` is True in an engine that never does.
            raise TapUnsupportedError("this engine watermarks, so tokens are not drawn from the policy's distribution")

    def _wrap(self, runner: Any) -> None:
        # Find every name before wrapping anything: a failure leaves no tap behind.
        scheduled = named_arguments(runner.execute_model, ("scheduler_output",))
        owner, method, read, wanted = drafter_call(runner)
        propose = getattr(owner, method)
        setattr(owner, method, self._tapped(runner, propose, read, named_arguments(propose, wanted)))
        execute = runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self._watch(scheduled, args, kwargs)
            return execute(*args, **kwargs)

        runner.execute_model = execute_model

    def _watch(self, named: Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            scheduler_output = named(*args, **kwargs)["scheduler_output"]
            if self._shares is not None:
                if self._shares.joiner.gone:
                    self.tap.cut()  # for good
                    return
                self._shares.schedule(scheduler_output)
            # These ended in the step before. They are ended first: a new request of this step may have the same name.
            self.tap.end(scheduler_output.finished_req_ids)
            for new in scheduler_output.scheduled_new_reqs:
                if not self.tap.samples(new.req_id):  # first: to read a request takes ten times as long
                    continue
                if (request := request_of(new)) is None:
                    self._leave_out(new)
                    continue
                if self._shares is not None and self._shares.leaves_out(request):
                    self.tap.tally.add("skipped_truncated")
                    continue
                self.tap.begin(request)
            if scheduler_output.num_scheduled_tokens:  # an empty step may come while the engine sleeps
                self.tap.release()
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.tap.note("reading the schedule", error)

    def _leave_out(self, new: Any) -> None:
        if not is_resumed(new) and (why := unlike_policy(new)):
            self.tap.tally.add("skipped_distribution")
            self.tap.tally.warn(
                why, f"requests with {why} are not sent: only the policy's own distribution, of text, is"
            )

    def _tapped(self, runner: Any, propose: Callable[..., Any], read: Read, named: Named) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            try:
                given = named(*args, **kwargs)
                # V2 rehearses with empty batches while it warms up.
                step = None if given.get("dummy_run") else self._step(functools.partial(read, runner, given))
                if step is not None:
                    self.tap.step(step)
            except Exception as error:  # noqa: BLE001 - the engine must not feel this
                self.tap.note("reading a step", error)
            return propose(*args, **kwargs)

        return tapped

    def _step(self, read: Callable[[Collection[str]], Step | None]) -> Step | None:
        if self._shares is None:
            return read(self.tap.collected) if self.tap.collected else None
        return None if self._shares.joiner.gone else self._shares.scored(read, self._shard)

    def rest(self, ended: Sequence[str]) -> None:
        """No request is under way any more, these have ended: they are sent within some second."""
        self.tap.rest(ended, self.run.batcher.soon)

    def close(self) -> None:
        """Send what was collected, for `_CLOSE_SECONDS` and a second at most."""
        self.run.close(_CLOSE_SECONDS, None if self._shares is None else self._shares.joiner)
