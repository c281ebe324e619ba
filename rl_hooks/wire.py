"""The rollout file: one safetensors file holds one batch of ragged rollouts, packed along the token axis, no padding.

The request body *is* the file on disk *is* what the worker maps; it is never re-encoded. Every other part shares this
module. It needs NumPy and `rl_hooks.format.container`, whose names it passes on, and never touches the features.

Legend: T tokens, R rollouts, H target hidden size, A aux layers, V vocabulary.

Row `t` holds features *after consuming* `input_ids[t]`; `logprobs[t]` is of `input_ids[t]` itself; `logsumexp[t]`
describes the distribution of `input_ids[t+1]`. Log-probabilities and `logsumexp` are of the logits
*divided by the temperature* (for temperature 0, by 1). `logsumexp` is absent where the sender never holds the policy's
whole lm_head; the worker then computes it with the head that it has.

Format v1 has `last_hidden` and `logsumexp` of every token. v2 has them only in `predicting_rows`: nothing else of them
is read for an EAGLE-3 drafter. An MTP module reads `last_hidden` of prompts too, so its runs take v1. The service says
which rows a run wants, as `last_rows` of its answers; a sender that has not heard it sends all.

A file may hold the states of a prompt that several of its rollouts share once: then `aux_rows` says which row of
`aux_hidden` (and of its scales) each token has. That is an optional tensor: one may change how the others are read, so
a reader refuses those that it does not know. A service says which it takes, as `optional_tensors` of its answers
(`OPTIONAL_TENSORS`); a sender uses none that it has not heard of.

In asynchronous RL older weights may have drawn tokens. `versions_behind` says of each response token how many policy
versions, at most, its sampler's weights were behind the features' (`policy_version_max`): 0 where these drew it, for
sure. It may rise and fall within a rollout, whose turns several engines may have served. Absent: not known.

A trainer may say which of its starts sends: `session`, the same in the registration, in heads and in the rollouts of
all ranks, and in rollouts `session_began`, the first policy version that the start had rollouts of. Then the service
does not guess where a restarted trainer's attempt begins.

Errors: all are `WireError`; the message says the expected value, the value found and the remedy.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt

from rl_hooks.format.container import DTYPE_BYTES, is_int_list
from rl_hooks.format.container import MAX_HEADER_BYTES as MAX_HEADER_BYTES
from rl_hooks.format.container import NUMPY_DTYPE as NUMPY_DTYPE
from rl_hooks.format.container import Header as Header
from rl_hooks.format.container import MappedFile as MappedFile
from rl_hooks.format.container import Tensor as Tensor
from rl_hooks.format.container import TensorInfo as TensorInfo
from rl_hooks.format.container import WireError as WireError
from rl_hooks.format.container import encode as encode
from rl_hooks.format.container import header_size as header_size
from rl_hooks.format.container import parse_header as parse_header
from rl_hooks.format.container import parts_bytes as parts_bytes

#: Rows that `last_hidden` and `logsumexp` have: of all tokens, or of `predicting_rows`.
LastRows = Literal["all", "predicting"]
FORMATS: Final[Mapping[LastRows, str]] = {"all": "draftalign.rollouts.v1", "predicting": "draftalign.rollouts.v2"}
#: Tensors that a rollout file of any format may hold or not, and that older readers do not know.
OPTIONAL_TENSORS: Final = ("aux_rows", "versions_behind")
#: Names of runs: no braces (they mark Redis hash tags), no slashes, no leading dot, at most 64 characters.
RUN_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
#: Identity of one start of a trainer, the same on all of its ranks: a random one.
SESSION: Final = re.compile(r"[0-9a-f]{32}")
RUN_FORMAT: Final = "draftalign.run.v1"
HEAD_FORMAT: Final = "draftalign.head.v1"
DRAFTER_FORMAT: Final = "draftalign.drafter.v1"
CONTENT_TYPE: Final = "application/x-safetensors"
#: Number of the HTTP contract, in `API_HEADER` of every answer of the service. It is raised with each change that
#: a client of before may not understand (docs/reference/api.md).
API_VERSION: Final = 1
API_HEADER: Final = "Draftalign-Api"
#: Of an integer in a file's metadata, such as a policy version: a float64 holds each such number exactly.
INTEGER_DIGITS: Final = 15
#: Of a rollout file. vLLM takes up to 2, SGLang any.
HIGHEST_TEMPERATURE: Final = 100
#: A feature layer is named by the layer whose *input* it is: the residual stream entering it, before its norm.
AUX_CONVENTION: Final = "entering"

# --- rollouts -------------------------------------------------------------------------------------------------------

_FEATURES = ("F8_E4M3", "BF16")


@dataclass(frozen=True, slots=True)
class RolloutHeader:
    """The fields of a verified rollout header; the tensors' bytes were not read for it."""

    header: Header
    run: str
    policy_version: int
    policy_version_max: int
    drafter_version: str
    rollout_ids: tuple[str, ...]
    target_fingerprint: str
    aux_layers: tuple[int, ...]
    temperature: float
    top_p: float
    top_k: int
    rewards: tuple[float, ...] | None
    prompt_hashes: tuple[str, ...] | None  # one per rollout, of its full prompt; None where the sender does not say
    strata: tuple[str, ...] | None  # the kind of each rollout's prompt; None where the sender does not say
    offered: tuple[int, int] | None  # rollouts and response tokens it was drawn from; None where nobody says
    tokens: int  # T
    rollouts: int  # R
    hidden_size: int  # H
    last_rows: LastRows
    session: str  # of the trainer that sends; empty where it does not say
    session_began: int  # the first policy version that the session had rollouts of

    @property
    def states_bytes(self) -> int:
        """Of the auxiliary states of all tokens, those that share a row counted once each: what a reader may hold."""
        aux = self.header.tensors["aux_hidden"]
        return self.tokens * aux.shape[1] * DTYPE_BYTES[aux.dtype]

    @property
    def batch_id(self) -> str:
        """Identity of the batch: the same rollouts of the same policy sent twice are one batch."""
        return batch_id(self.run, self.policy_version, self.rollout_ids)


def predicting_rows(loss_mask: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Rows of the tokens just before those that the policy generated, ascending: what `last_rows` "predicting" has."""
    return np.flatnonzero(loss_mask) - 1


def batch_id(run: str, policy_version: int, rollout_ids: Iterable[str]) -> str:
    """Hash of run, policy version and the sorted rollout ids: 32 hexadecimal digits."""
    text = json.dumps([run, policy_version, sorted(rollout_ids)], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def prompt_hash(prompt_ids: npt.ArrayLike) -> str:
    """Identity of a prompt: 16 hexadecimal digits of the SHA-256 of its token ids (little-endian int32).

    The prompt is all that precedes the first response token. Whoever sends rollouts whose first rows are missing (an
    engine that read them from its prefix cache) sends this hash of the full prompt as `prompt_hashes`.
    """
    return hashlib.sha256(np.asarray(prompt_ids, dtype="<i4").tobytes()).hexdigest()[:16]


#: Digits of its `prompt_hash` by which an engine counts a prompt's rounds, and prompts of one drafter and policy
#: version beyond which it counts none: so many rounds tell by their sum alone.
COUNTED_DIGITS: Final = 8
COUNTED_PROMPTS: Final = 64


def target_fingerprint(config: Mapping[str, Any], aux_layers: Sequence[int]) -> str:
    """Hash of the facts that trainer, drafter and engine must agree on: architecture sizes and captured layers."""
    keys = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    text = json.dumps([{k: config.get(k) for k in keys}, list(aux_layers), AUX_CONVENTION], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def rollout_metadata(
    *,
    run: str,
    policy_version: int,
    rollout_ids: Sequence[str],
    target_fingerprint: str,
    aux_layers: Sequence[int],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    policy_version_max: int | None = None,
    drafter_version: str = "",
    rewards: Sequence[float] | None = None,
    prompt_hashes: Sequence[str] | None = None,
    strata: Sequence[str] | None = None,
    offered: tuple[int, int] | None = None,
    last_rows: LastRows = "all",
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The `__metadata__` of a rollout file. Unknown keys in `extra` pass through to the worker untouched.

    `prompt_hashes`: `prompt_hash` of each rollout's full prompt; needed only where the file does not hold all of it.
    `strata`: the kind of each rollout's prompt (its source, say), so that another mix of kinds is no drift.
    `offered`: how many rollouts, and response tokens of them, the sender was shown since its last file; those that it
    sends are drawn from them whatever they say. So a reader can tell whether somebody left others out before. Rollouts
    and no tokens: the version may not be drawn evenly, so engines are not compared with it.
    `last_rows`: those that the file's `last_hidden` and `logsumexp` have.
    """
    metadata = dict(extra or {})
    metadata |= {
        "format": FORMATS[last_rows],
        "run": run,
        "policy_version": str(policy_version),
        "policy_version_max": str(policy_version if policy_version_max is None else policy_version_max),
        "drafter_version": drafter_version,
        "rollout_ids": json.dumps(list(rollout_ids)),
        "target_fingerprint": target_fingerprint,
        "aux_layers": json.dumps({"convention": AUX_CONVENTION, "layers": list(aux_layers)}),
        "temperature": repr(float(temperature)),
        "top_p": repr(float(top_p)),
        "top_k": str(top_k),
    }
    if rewards is not None:
        metadata["rewards"] = json.dumps([float(r) for r in rewards])
    if prompt_hashes is not None:
        metadata["prompt_hashes"] = json.dumps(list(prompt_hashes))
    if strata is not None:
        metadata["strata"] = json.dumps(list(strata))
    if offered is not None:
        metadata["offered"] = json.dumps(list(offered))
    return metadata


def check_rollout_header(header: Header) -> RolloutHeader:
    """Verify that a parsed header describes a rollout file: metadata complete, names, dtypes and shapes right."""
    meta = header.metadata
    last_rows = next((rows for rows, name in FORMATS.items() if name == meta.get("format")), None)
    if last_rows is None:
        raise WireError("format", f"expected {' or '.join(FORMATS.values())}, got {str(meta.get('format'))[:80]!r}")
    rollout_ids = json_field(meta, "rollout_ids", list)
    if not rollout_ids or not all(isinstance(i, str) and 0 < len(i) <= 128 and i.isprintable() for i in rollout_ids):
        raise WireError("rollout_ids", "must be a non-empty JSON list of strings of 1 to 128 printable characters")
    if len(set(rollout_ids)) != len(rollout_ids):
        raise WireError("rollout_ids", "an id appears twice")
    layers = layers_field(meta)
    tokens, rollouts, hidden_size = _check_rollout_tensors(header, last_rows, len(layers), len(rollout_ids))
    low, high = int_field(meta, "policy_version"), int_field(meta, "policy_version_max")
    if high < low:
        raise WireError("policy_version_max", f"is {high}, below policy_version {low}")
    rewards = _each(meta, "rewards", rollouts, is_finite_number, "finite number")
    prompts = _each(meta, "prompt_hashes", rollouts, is_prompt_hash, "`prompt_hash` of 16 hexadecimal digits")
    strata = _each(meta, "strata", rollouts, _is_stratum, "text of at most 64 printable characters")
    offered = json_field(meta, "offered", list) if "offered" in meta else None
    if offered is not None and not (is_int_list(offered) and len(offered) == 2):
        raise WireError("offered", f"must be two integers from 0 on, got {str(offered)[:80]}")
    session = session_field(meta)
    return RolloutHeader(
        header=header,
        run=_text_field(meta, "run"),
        policy_version=low,
        policy_version_max=high,
        drafter_version=meta.get("drafter_version", ""),
        rollout_ids=tuple(rollout_ids),
        target_fingerprint=_text_field(meta, "target_fingerprint"),
        aux_layers=tuple(layers),
        temperature=_float_field(meta, "temperature", 0.0, HIGHEST_TEMPERATURE),
        top_p=_float_field(meta, "top_p", 0.0, 1.0),
        top_k=int_field(meta, "top_k"),
        rewards=None if rewards is None else tuple(float(r) for r in rewards),
        prompt_hashes=prompts,
        strata=strata,
        offered=None if offered is None else (offered[0], offered[1]),
        tokens=tokens,
        rollouts=rollouts,
        hidden_size=hidden_size,
        last_rows=last_rows,
        session=session,
        session_began=int_field(meta, "session_began") if session else 0,
    )


def _check_rollout_tensors(header: Header, last_rows: LastRows, aux_count: int, ids: int) -> tuple[int, int, int]:
    """Return T, R, H after checking every tensor's dtype and shape."""
    tensors = dict(header.tensors)

    def take(name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> TensorInfo:
        info = tensors.pop(name, None)
        if info is None:
            raise WireError(name, "is missing; it is required")
        if info.dtype not in dtypes:
            raise WireError(name, f"dtype must be {' or '.join(dtypes)}, got {info.dtype}")
        if len(info.shape) != len(shape) or any(w not in (None, g) for w, g in zip(shape, info.shape, strict=True)):
            raise WireError(name, f"shape must be {['any' if s is None else s for s in shape]}, got {list(info.shape)}")
        return info

    T = take("input_ids", ("I32",), (None,)).shape[0]
    shared = "aux_rows" in tensors and take("aux_rows", ("I32",), (T,)) is not None
    if "versions_behind" in tensors:
        take("versions_behind", ("I32",), (T,))
    take("cu_seqlens", ("I32",), (ids + 1,))
    take("loss_mask", ("U8",), (T,))
    take("logprobs", ("F32",), (T,))
    aux = take("aux_hidden", _FEATURES, (None if shared else T, None))
    if aux.shape[1] == 0 or aux.shape[1] % aux_count:
        raise WireError("aux_hidden", f"width {aux.shape[1]} is not a positive multiple of {aux_count} aux layers")
    H = aux.shape[1] // aux_count
    if aux.dtype == "F8_E4M3":
        take("aux_hidden_scale", ("F32",), (aux.shape[0], aux_count))
    last = take("last_hidden", _FEATURES, (T if last_rows == "all" else None, H))
    rows = last.shape[0]  # where they are fewer, only the mask says whether they are right: `check_index`
    if last.dtype == "F8_E4M3":
        take("last_hidden_scale", ("F32",), (rows, 1))
    if "logsumexp" in tensors:
        take("logsumexp", ("F32",), (rows,))
    if tensors:
        raise WireError(min(tensors), "is not a tensor of this format, or contradicts the others; leave it out")
    return T, ids, H


def check_index(
    header: RolloutHeader,
    input_ids: npt.NDArray[np.int32],
    cu_seqlens: npt.NDArray[np.int32],
    loss_mask: npt.NDArray[np.uint8],
    vocab_size: int,
    aux_rows: npt.NDArray[np.int32] | None = None,
    versions_behind: npt.NDArray[np.int32] | None = None,
) -> None:
    """Verify the integer tensors: boundaries, token ids inside the vocabulary, mask of zeros and ones.

    And that `last_hidden` has the rows that the mask asks for, `aux_hidden` those that `aux_rows` names; and that
    `versions_behind` names policy versions from 0 on, of response tokens only.
    """
    T = header.tokens
    if T == 0:
        raise WireError("input_ids", "holds no tokens")
    steps = np.diff(cu_seqlens.astype(np.int64))  # in 32 bits a difference may wrap around
    if cu_seqlens[0] != 0 or cu_seqlens[-1] != T or bool((steps < 2).any()):
        raise WireError("cu_seqlens", f"must ascend from 0 to {T} in steps of at least 2 tokens")
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab_size:
        bad = input_ids[(input_ids < 0) | (input_ids >= vocab_size)][0]
        raise WireError("input_ids", f"token {int(bad)} is outside the vocabulary of {vocab_size}")
    if int(loss_mask.max()) > 1:
        raise WireError("loss_mask", f"must hold 0 and 1 only, got {int(loss_mask.max())}")
    if bool((np.add.reduceat(loss_mask.astype(np.int64), cu_seqlens[:-1]) == 0).any()):
        raise WireError("loss_mask", "a rollout has no token that the policy generated; leave such rollouts out")
    if bool(loss_mask[cu_seqlens[:-1]].any()):
        raise WireError("loss_mask", "the first token of a rollout has no features before it; it must be 0")
    if aux_rows is not None:
        held = header.header.tensors["aux_hidden"].shape[0]
        named = np.unique(aux_rows)
        if len(named) != held or named[0] != 0 or named[-1] != held - 1:
            raise WireError("aux_rows", f"must name each of the {held} rows of aux_hidden at least once, and no other")
    if versions_behind is not None:
        if int(versions_behind.min()) < 0 or int(versions_behind.max()) > header.policy_version_max:
            raise WireError(
                "versions_behind",
                f"must be from 0 to policy_version_max ({header.policy_version_max}), got {versions_behind.min()} to "
                f"{versions_behind.max()}: how many versions older the weights were that drew the token",
            )
        if bool(versions_behind[loss_mask == 0].any()):
            raise WireError("versions_behind", "must be 0 at tokens that the policy did not generate")
    rows = header.header.tensors["last_hidden"].shape[0]
    generated = len(predicting_rows(loss_mask))
    if header.last_rows == "predicting" and rows != generated:
        raise WireError(
            "last_hidden",
            f"has {rows} rows, and loss_mask {generated} tokens that the policy generated: {FORMATS['predicting']} has "
            "one row for each, of the token before it",
        )


# --- the target's head -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LogitMap:
    """What a target does to its logits after the product with lm_head: softcap * tanh(scale * x / softcap).

    Kept in a run's `__metadata__` as `logit_scale` and `logit_softcap`; what is absent is 1 and no cap.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        for key, value in (("logit_scale", self.scale), ("logit_softcap", self.softcap)):
            if value is not None and not 1e-6 <= value <= 1e6:
                raise WireError(key, f"must be a positive number from 1e-6 to 1e6, got {value!r}")

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str]) -> LogitMap:
        """Read a run's metadata. Raises `WireError` for what is not a positive number."""
        given = {
            name: _float_field(metadata, f"logit_{name}", 1e-6, 1e6)
            for name in ("scale", "softcap")
            if f"logit_{name}" in metadata
        }
        return cls(**given)

    def metadata(self) -> dict[str, str]:
        """The metadata entries of this map; none for a plain head."""
        scale = {} if self.scale == 1.0 else {"logit_scale": repr(float(self.scale))}
        return scale if self.softcap is None else scale | {"logit_softcap": repr(float(self.softcap))}

    def apply(self, logits: Any) -> Any:
        """The model's logits from lm_head's product: a torch tensor, which is overwritten, of at least float32."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def other_api(headers: Mapping[str, str], client: str) -> str:
    """What to say where the headers of the service's answer (names in lower case) tell of another contract; or "".

    An answer without a number may be of this contract: a proxy may remove headers that it does not know.
    """
    if (theirs := headers.get(API_HEADER.lower(), str(API_VERSION))) == str(API_VERSION):
        return ""
    return f"expected {API_HEADER}: {API_VERSION}, got {theirs[:20]!r}; use {client} of the service's version"


def is_finite_number(value: object) -> bool:
    """Whether it is a number, and below 1e300."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def is_prompt_hash(value: object) -> bool:
    """Whether it looks like one of `prompt_hash`."""
    return isinstance(value, str) and len(value) == 16 and set(value) <= set("0123456789abcdef")


def _is_stratum(value: object) -> bool:
    return isinstance(value, str) and len(value) <= 64 and value.isprintable()


def session_field(meta: Mapping[str, str]) -> str:
    """The `session` of a file's metadata, empty where it names none; raises WireError for what is none."""
    session = meta.get("session", "")
    if session and not SESSION.fullmatch(session):
        raise WireError("session", f"must be 32 hexadecimal digits (0-9 a-f), got {session[:40]!r}; or leave it out")
    return session


def _text_field(meta: Mapping[str, str], key: str) -> str:
    value = meta.get(key)
    if not value:
        raise WireError(key, "is missing from __metadata__; it is required")
    return value


def int_field(meta: Mapping[str, str], key: str) -> int:
    """A count of a file's metadata; raises WireError that names `key`."""
    text = _text_field(meta, key)
    if not (text.isascii() and text.isdigit() and len(text) <= INTEGER_DIGITS):
        raise WireError(key, f"must be an integer from 0 on, of at most {INTEGER_DIGITS} digits, got {text[:40]!r}")
    return int(text)


def _float_field(meta: Mapping[str, str], key: str, low: float, high: float) -> float:
    text = _text_field(meta, key)
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise WireError(key, f"must be a number from {low} to {high}, got {text[:40]!r}")
    return value


def json_field(meta: Mapping[str, str], key: str, kind: type) -> Any:
    """A JSON list or object (`kind`) of a file's metadata; raises WireError that names `key`."""
    text = _text_field(meta, key)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(key, f"is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise WireError(key, f"must be a JSON {'list' if kind is list else 'object'}, got {type(value).__name__}")
    return value


def layers_field(meta: Mapping[str, str]) -> list[int]:
    """The layers that were captured: ascending and distinct, by our convention."""
    aux = json_field(meta, "aux_layers", dict)
    layers, convention = aux.get("layers"), aux.get("convention")
    if convention != AUX_CONVENTION:
        raise WireError("aux_layers", f"convention must be {AUX_CONVENTION!r}, got {str(convention)[:40]!r}")
    if not is_int_list(layers) or not layers or sorted(set(layers)) != layers:
        raise WireError("aux_layers", f"layers must be ascending and distinct, got {str(layers)[:80]}")
    return cast("list[int]", layers)


def _each(
    meta: Mapping[str, str], key: str, rollouts: int, fits: Callable[[object], bool], what: str
) -> tuple[Any, ...] | None:
    """A list that has one value for every rollout; None where it is absent."""
    if key not in meta:
        return None
    values = json_field(meta, key, list)
    if len(values) != rollouts or not all(map(fits, values)):
        raise WireError(key, f"must be one {what} per rollout ({rollouts})")
    return tuple(values)
