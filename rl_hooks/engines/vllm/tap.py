"""Feature capture in a vLLM that speculates with EAGLE-3: its own requests train the drafter, without a trainer's hook.

At every step the target passes its auxiliary and final states to the drafter. The tap reads the drafter's arguments
(`propose_draft_token_ids` in the V1 model runner, `speculator.propose` in V2), takes the rows of the requests that it
samples, and reads their tokens from the same step. It registers the run with the policy's embedding and head and with
the server's first drafter. When the policy's weights change, it sends the head again before the first rollout that
needs it, if the head has moved.

The tap sends your users' text, as token ids and hidden states: sample with their consent.

V1 and V2 are tested on a CPU (tests/vllm_server/test_vllm_server_tap.py). Asynchronous scheduling on GPUs is written
from vLLM's source (0.32, 0.33) and was not run.

With tensor parallelism each rank holds a slice of the head, and all of the states. At each step all ranks score the
rows of the same requests, each over its slice (`ranks.Ranks.score`); the first rank alone chooses, keeps and sends.
Which requests these are follows from vLLM's schedule and the settings only, so no rank waits for one that has no rows.
Pipeline parallelism is refused.
"""

from __future__ import annotations

import functools
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Final, Self
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor, nn

from rl_hooks.engines.policy_watch import PolicyWatch
from rl_hooks.engines.tap import (
    Batcher,
    Collected,
    FeatureTap,
    Head,
    Request,
    Sampling,
    Step,
    labelled_rows,
    rollout_file,
)
from rl_hooks.engines.vllm.draft import started_with
from rl_hooks.engines.vllm.ranks import Joiner, Ranks, Shard, slice_of
from rl_hooks.release import PLAIN_NAME
from rl_hooks.sending.copies import HostCopies
from rl_hooks.sending.exchange import Origin
from rl_hooks.sending.jobs import Job
from rl_hooks.sending.registration import (
    HeadWatch,
    RunRegistration,
    head_body,
    head_weight,
    known_logit_map,
    target_config,
)
from rl_hooks.sending.sampling import sampling_position
from rl_hooks.sending.sender import RolloutSender

log = logging.getLogger("vllm.draftalign")

#: Sampling parameters that change the distribution, and the neutral value of each.
_PLAIN: Final[Mapping[str, Any]] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_p": 0.0,
    "min_tokens": 0,
}
_ABSENT: Final = ("logit_bias", "allowed_token_ids", "structured_outputs", "bad_words", "logits_processors")


#: The head is sent again when it has moved by more than this, relative to its norm, as a trainer's hook does.
HEAD_TOLERANCE: Final = 0.005
_CLOSE_SECONDS: Final = 2.0
#: The parameters that the tap reads, by name, so that vLLM may add and reorder others.
V1_ARGUMENTS: Final = ("scheduler_output", "sampled_token_ids", "hidden_states", "aux_hidden_states")
V2_ARGUMENTS: Final = ("input_batch", "last_hidden_states", "aux_hidden_states", "num_rejected", "last_sampled")


class TapUnsupportedError(Exception):
    """Features cannot be captured in this server; the message says why."""


def named_arguments(function: Callable[..., Any], wanted: Sequence[str]) -> Callable[..., dict[str, Any]]:
    """A function that maps a call's arguments to parameter names; raises TapUnsupportedError if a name is missing."""
    signature = inspect.signature(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    if missing := [one for one in wanted if one not in signature.parameters]:
        raise TapUnsupportedError(
            f"{name} has no parameter {', '.join(missing)} in this vLLM; it takes {', '.join(signature.parameters)}. "
            "The tap knows vLLM 0.31 to 0.33"
        )
    return lambda *args, **kwargs: signature.bind(*args, **kwargs).arguments


_Named = Callable[..., dict[str, Any]]
_Read = Callable[[Any, Mapping[str, Any]], Step | None]


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
            float(fraction or 0.05),
            int(environment.get("DRAFTALIGN_TOKENS_PER_MINUTE") or 60_000),
        )


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of embedding or head that one rank holds, from the token `begin` on. Views of the policy's own memory."""

    weight: Tensor
    padded: Tensor  # with the rows that vLLM adds
    begin: int

    @classmethod
    def of(cls, padded: Tensor, rows: int, begin: int = 0) -> Self:
        """The first `rows` rows are tokens."""
        padded = padded.detach()
        return cls(padded[:rows], padded, begin)


class Policy(nn.Module):
    """The served model as the registration sees a trainer's: its transformers config, embedding and head."""

    def __init__(self, config: Any, embedding: Matrix, head: Matrix) -> None:
        super().__init__()
        self.config, self.embedding, self.head = config, embedding, head

    @classmethod
    def on(cls, ranks: Ranks, config: Any, model: nn.Module) -> Self:
        """With what this rank holds of both matrices."""
        rows = int(config.vocab_size)
        embedding = _weight(_module(model, "model.embed_tokens"), rows, ranks)
        head = embedding if config.tie_word_embeddings else _weight(_module(model, "lm_head"), rows, ranks)
        return cls._named(config, model)(config, embedding, head)

    def whole(self, ranks: Ranks) -> Self | None:
        """With all of both matrices, gathered to the first rank's host; None on other ranks. All ranks call it."""
        rows = int(self.config.vocab_size)
        embedding = ranks.whole(self.embedding.padded, rows)
        head = embedding if self.head is self.embedding else ranks.whole(self.head.padded, rows)
        if embedding is None or head is None:
            return None
        first = Matrix.of(embedding, rows)
        return type(self)(self.config, first, first if head is embedding else Matrix.of(head, rows))

    @property
    def begin(self) -> int:
        """The first token of the head's rows here."""
        return self.head.begin

    @classmethod
    def _named(cls, config: Any, model: nn.Module) -> type[Self]:
        # The architecture's name, by which the registration finds the map of its logits.
        architectures = getattr(config, "architectures", None) or [type(model).__name__]
        return type(str(architectures[0]), (cls,), {})

    def get_input_embeddings(self) -> Matrix:
        """What holds the weight [V, H]."""
        return self.embedding

    def get_output_embeddings(self) -> Matrix:
        """What holds the weight [V, H]."""
        return self.head


class _Shares:
    """What this rank scores of each step for all ranks, where the head is split: the rows of the sampled requests."""

    def __init__(self, joiner: Joiner, fraction: float, policy_version: Callable[[], int | None]) -> None:
        self.joiner, self._fraction, self._version = joiner, fraction, policy_version
        self._temperatures: dict[str, float] = {}  # of the sampled requests under way
        self._steps = self._rows = 0

    def schedule(self, scheduler_output: Any) -> None:
        """A step's schedule, which all ranks read alike."""
        self._steps += 1
        for name in scheduler_output.finished_req_ids:
            self._temperatures.pop(name, None)
        for new in scheduler_output.scheduled_new_reqs:
            if sampling_position(new.req_id, "tap") < self._fraction and (request := request_of(new)) is not None:
                self._temperatures[new.req_id] = request.sampling.scored_at
        counts = scheduler_output.num_scheduled_tokens
        self._rows = sum(n for name, n in counts.items() if name in self._temperatures)

    @torch.inference_mode()
    def scored(self, read: Callable[[], Step | None], head: Callable[[], Shard]) -> Step | None:
        """The step with its scores. Where this rank cannot read it or score it, it takes part with NaN, then raises."""
        step, rows_N, own_2N, problem = None, None, None, None
        try:
            step = read()
            if step is not None and self._rows:
                chosen = [i for i, name in enumerate(step.request_ids) if name in self._temperatures]
                rows_N, labels_N = labelled_rows(step, chosen)
                each = torch.tensor([self._temperatures[step.request_ids[i]] for i in chosen])
                temperature_N = each.repeat_interleave(torch.from_numpy(step.row_counts[chosen])).to(step.last.device)
                own_2N = head().partial(step.last[rows_N], labels_N.clamp(min=0), temperature_N)
        except Exception as error:  # noqa: BLE001 - raised when the others have got this rank's answer
            problem = error
        joined = self.joiner.add(self._steps, self._rows, self._version() or 0, own_2N) if self._rows else None
        if problem is not None:
            raise problem
        if step is None or rows_N is None or joined is None:
            return step
        return replace(step, scores=functools.partial(_placed, HostCopies({"rows": rows_N}), joined, len(step.last)))


def _placed(rows: HostCopies, joined: Future[Tensor], count: int) -> Tensor:
    """Scores float32 [2, rows of the step], NaN where there are none. In the tap's thread, which may wait for them."""
    placed = torch.full((2, count), torch.nan)
    placed[:, rows.wait()["rows"]] = joined.result()
    return placed


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
        ranks: Ranks,
        *,
        joined: bool,
    ) -> None:
        self._worker, self._weights, self._ranks = worker, watch, ranks
        version = self._turned_to = watch.version or 0
        with ranks.together():
            self._check(worker)
            self._place(worker.model_runner)
            self._logit_map = known_logit_map(self._policy(), target_config(self._policy()))
            self._heads = HeadWatch(head_weight(self._policy()), HEAD_TOLERANCE, -1 if joined else version)
        whole = self._policy().whole(ranks)
        self._path = f"/runs/{quote(settings.run, safe='')}"
        self.sender: RolloutSender | None = None
        with ranks.together():
            if whole is not None:
                registration = RunRegistration(
                    whole, aux_layers=aux_layers, policy_version=version, initial_drafter=started_with(worker)
                )
                self._file = functools.partial(
                    rollout_file,
                    run=settings.run,
                    target_fingerprint=registration.fingerprint,
                    aux_layers=tuple(aux_layers),
                    source=uuid.uuid4().hex,
                )
                self.sender = RolloutSender(settings.url, run=settings.run, token=settings.token)
                size = sum(tensor.data.nbytes for tensor in registration.tensors.values())
                self.sender.submit_job(Job("PUT", self._path, registration.encode, size, keep=True))
        self.batcher = Batcher(self._send)
        self.tap = FeatureTap(
            self._score_head(),
            self.batcher.add,
            fraction=settings.sample_fraction if self.sender else 0.0,
            tokens_per_minute=settings.tokens_per_minute,
            weights=watch.weights,
            policy_version=version,
            moved=watch.found_moved,
        )
        self._shares: _Shares | None = None
        if ranks.size > 1:
            joiner = Joiner.of(ranks, self.tap.tally)
            self._shares = _Shares(joiner, settings.sample_fraction, lambda: watch.version)
        self._wrap(worker.model_runner)
        watch.changing = self.tap.cut
        if (job := self._head_job(version)) is not None and self.sender is not None:
            self.sender.submit_job(job)

    @property
    def refused(self) -> bool:
        """Whether the service has said that the run is another policy's."""
        return self.sender is not None and self.sender.refused

    def settled(self, *, tainted: bool) -> None:
        """The weights are those of the watch's version now. `tainted`: they changed under requests, unannounced.

        Ranks gather a head that has moved here: all of them call this, whatever the service has said to the first.
        """
        if self.refused:
            self.tap.cut()  # for good
            if self._ranks.size == 1:
                return
        version = self._weights.version or 0
        if version == self._turned_to:
            return
        self._turned_to = version
        if not tainted:
            self.tap.cut()
        job = self._head_job(version)
        if not self.refused:
            self.tap.turn(version, self._score_head(), lambda: self._turned(job))

    def _turned(self, head: Job | None) -> None:
        # In the tap's thread: what older policies drew is queued before the head, which no rollout needs before that.
        self.batcher.flush()
        if head is not None and self.sender is not None:
            self.sender.submit_job(head)

    def _head_job(self, version: int) -> Job | None:
        with self._ranks.together():
            weight = head_weight(self._policy())
            due = self._heads.is_due(weight, version)
        if self._ranks.all_agree(ok=not due):
            return None
        self._heads.mark(weight)
        policy = self._policy().whole(self._ranks)
        if policy is None:
            return None
        whole = head_weight(policy)
        size = whole.numel() * whole.element_size()
        return Job("PUT", f"{self._path}/head", head_body(whole, version), size, keep=True)

    def _score_head(self) -> Head:
        if self._ranks.size == 1:
            return Head(head_weight(self._policy()), self._logit_map)
        return Head(torch.empty(0), self._logit_map)  # never read: the steps bring scores

    def _policy(self) -> Policy:
        """The policy with what this rank holds of its matrices."""
        config = self._worker.vllm_config.model_config.hf_text_config
        return Policy.on(self._ranks, config, self._worker.model_runner.get_model())

    def _shard(self) -> Shard:
        return Shard(head_weight(self._policy()), self._policy().begin, self._logit_map)

    @staticmethod
    def _check(worker: Any) -> None:
        if worker.vllm_config.parallel_config.pipeline_parallel_size > 1:
            raise TapUnsupportedError("the tap needs embedding, states and head in one stage: no pipeline parallelism")
        speculative = worker.vllm_config.speculative_config
        if speculative is None or speculative.method != "eagle3":
            raise TapUnsupportedError("this server does not speculate with EAGLE-3, so no states reach a drafter")

    def _wrap(self, runner: Any) -> None:
        # Find every name before wrapping anything: a failure leaves no tap behind.
        scheduled = named_arguments(runner.execute_model, ("scheduler_output",))
        owner, method, read, wanted = self._place(runner)
        propose = getattr(owner, method)
        setattr(owner, method, self._tapped(runner, propose, read, named_arguments(propose, wanted)))
        execute = runner.execute_model

        def execute_model(*args: Any, **kwargs: Any) -> Any:
            self._watch(scheduled, args, kwargs)
            return execute(*args, **kwargs)

        runner.execute_model = execute_model

    @staticmethod
    def _place(runner: Any) -> tuple[Any, str, _Read, tuple[str, ...]]:
        """Where the drafter gets the target's states: the object, its method, and how to read the arguments."""
        if hasattr(runner, "propose_draft_token_ids"):
            return runner, "propose_draft_token_ids", step_v1, V1_ARGUMENTS
        if hasattr(getattr(runner, "speculator", None), "propose"):
            return runner.speculator, "propose", step_v2, V2_ARGUMENTS
        raise TapUnsupportedError(f"{type(runner).__name__} calls its drafter in a way that the tap does not know")

    def _watch(self, named: _Named, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            scheduler_output = named(*args, **kwargs)["scheduler_output"]
            if self._shares is not None:
                if self._shares.joiner.gone:
                    self.tap.cut()  # for good
                    return
                self._shares.schedule(scheduler_output)
            # These ended in the step before. A new request of this step may have the same name: end them first.
            self.tap.end(scheduler_output.finished_req_ids)
            for new in scheduler_output.scheduled_new_reqs:
                if (request := request_of(new)) is not None:
                    self.tap.begin(request)
            if scheduler_output.num_scheduled_tokens:  # an empty step may come while the engine sleeps
                self.tap.release()
        except Exception as error:  # noqa: BLE001 - the engine must not feel this
            self.tap.note("reading the schedule", error)

    def _tapped(self, runner: Any, propose: Callable[..., Any], read: _Read, named: _Named) -> Callable[..., Any]:
        def tapped(*args: Any, **kwargs: Any) -> Any:
            try:
                given = named(*args, **kwargs)
                # V2 rehearses with empty batches while it warms up.
                if not given.get("dummy_run") and (step := self._step(lambda: read(runner, given))) is not None:
                    self.tap.step(step)
            except Exception as error:  # noqa: BLE001 - the engine must not feel this
                self.tap.note("reading a step", error)
            return propose(*args, **kwargs)

        return tapped

    def _step(self, read: Callable[[], Step | None]) -> Step | None:
        if self._shares is None:
            return read()
        return None if self._shares.joiner.gone else self._shares.scored(read, self._shard)

    def _send(self, batch: Sequence[Collected]) -> None:
        assert self.sender is not None  # noqa: S101 - other ranks collect nothing
        parts, batch_id = self._file(batch, last_rows=self.sender.last_rows)
        self.sender.submit(parts, batch_id=batch_id, policy_version=batch[0].policy_version)

    def close(self) -> None:
        """Send what was collected, for some seconds at most."""
        self.tap.close(_CLOSE_SECONDS)
        if self._shares is not None:
            self._shares.joiner.close(_CLOSE_SECONDS)
        self.batcher.close(_CLOSE_SECONDS)
        if self.sender is not None:
            self.sender.close(_CLOSE_SECONDS)

    def stats(self) -> dict[str, Any]:
        """Counters of the tap and of its sender."""
        stats = {} if self.sender is None else self.sender.stats()
        sender = {f"sender_{name}": value for name, value in stats.items()}
        return {**self.tap.tally.counts(), **sender}


def is_plain(request: Any) -> bool:
    """Whether a request, vLLM's own or the scheduler's, is drawn from the policy's plain distribution."""
    params = request.sampling_params
    if params is None or not request.prompt_token_ids or request.mm_features or request.lora_request is not None:
        return False
    if getattr(request, "prompt_embeds", None) is not None or any(getattr(params, name, None) for name in _ABSENT):
        return False
    return all(getattr(params, name, value) == value for name, value in _PLAIN.items())


def request_of(new: Any) -> Request | None:
    """A request of the scheduler's, if it can be collected from its beginning."""
    params = new.sampling_params
    if not is_plain(new):
        return None
    # V2 resumes a preempted request as a new one, with what it has generated: older weights may have drawn that.
    if len(getattr(new, "prefill_token_ids", None) or ()) > len(new.prompt_token_ids):
        return None
    stop = frozenset(params.stop_token_ids or ()) if params.ignore_eos else frozenset(params.all_stop_token_ids)
    if not params.ignore_eos and params.eos_token_id is not None:
        stop |= {params.eos_token_id}
    sampling = Sampling(float(params.temperature), float(params.top_p), max(0, int(params.top_k)))
    return Request(new.req_id, new.prompt_token_ids, sampling, stop, params.max_tokens)


def step_v1(runner: Any, given: Mapping[str, Any]) -> Step | None:
    """Read a step from V1_ARGUMENTS of `propose_draft_token_ids`.

    sampled_token_ids is a tensor [requests, drafts + 1] padded with -1, or a list of lists.
    """
    scheduled, sampled, hidden, aux = (given[name] for name in V1_ARGUMENTS)
    if aux is None:
        return None
    names = list(runner.input_batch.req_ids)
    counts = np.array([scheduled.num_scheduled_tokens[name] for name in names], dtype=np.int64)
    device = hidden.device
    if not isinstance(sampled, Tensor):
        width = max((len(tokens) for tokens in sampled), default=0) or 1
        sampled = torch.tensor([[*tokens, *[-1] * (width - len(tokens))] for tokens in sampled], device=device)
    sampled = sampled[: len(names)].long()
    drafts = [len(scheduled.scheduled_spec_decode_tokens.get(name, ())) for name in names]
    drafted = torch.tensor(drafts, device=device)
    accepted = (sampled != -1).sum(dim=1)
    return Step(
        request_ids=names,
        first_rows=np.cumsum([0, *counts[:-1]], dtype=np.int64),
        row_counts=counts,
        input_ids=getattr(runner.input_ids, "gpu", runner.input_ids),
        positions=getattr(runner.positions, "gpu", runner.positions),
        aux=aux,
        last=hidden,
        # Without drafts (a prefill) nothing was rejected, whatever stands in the sampled tokens.
        rejected=torch.where(drafted > 0, drafted + 1 - accepted, torch.zeros_like(drafted)),
        # -1: of a part of a prompt, whose last row is not rejected.
        last_sampled=sampled.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0].clamp(min=0),
    )


def step_v2(_: Any, given: Mapping[str, Any]) -> Step | None:
    """Read a step from V2_ARGUMENTS of `speculator.propose`; last_sampled is by request state."""
    batch, hidden, aux, rejected, last_sampled = (given[name] for name in V2_ARGUMENTS)
    if aux is None:
        return None
    counts = np.diff(batch.query_start_loc_np[: batch.num_reqs + 1]).astype(np.int64)
    return Step(
        request_ids=batch.req_ids[: batch.num_reqs],
        first_rows=batch.query_start_loc_np[: batch.num_reqs].astype(np.int64),
        row_counts=counts,
        input_ids=batch.input_ids,
        positions=batch.positions,
        aux=aux,
        last=hidden,
        rejected=rejected[: batch.num_reqs].long(),
        last_sampled=last_sampled[batch.idx_mapping[: batch.num_reqs]].reshape(batch.num_reqs).long(),
    )


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise TapUnsupportedError(f"{type(model).__name__} has no {path}") from error


def _weight(module: nn.Module, rows: int, ranks: Ranks) -> Matrix:
    weight: Any = getattr(module, "weight", None)
    begin, count = (0, rows) if ranks.size == 1 else slice_of(module)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or weight.shape[0] < count or not weight.is_floating_point():
        raise TapUnsupportedError("the policy's embedding or head is quantised or packed, and cannot be read")
    return Matrix.of(weight, count, begin)
