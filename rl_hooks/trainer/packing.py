"""Where the rollouts of one forward lie: one in each padded row, or several in a packed row. Compared with the forward.

The caller tells the rollouts of a packed row apart by `cu_seqlens`, by `position_ids` that begin again, or by nested
tensors. After the forward its own arguments are compared with that. A boundary inside one rollout is refused, and so is
a missing one between two. Across such a boundary a drafter would learn to predict the first tokens of one rollout from
another, and replay α would count rounds. If a packed forward attends from one rollout to the one before, its states are
of neither.

The forward's arguments that are compared: positions, boundaries of sequences (`cu_seq_lens_q` and the like), sequence
numbers (`seq_idx`, or an `attention_mask` that numbers documents), and the mask of the attention.

A forward over a prefix tree has the common beginning of several rollouts once; each rollout is a path of the tree. The
caller's row then has the rollouts one after the other. `PackedRollouts.tree` maps its tokens to the forward's, and the
forward's own arguments must describe the same tree.

Legend: B rows, S tokens of a row, padding included; T = B * S; N tokens of a forward over a prefix tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from rl_hooks.errors import RolloutError
from rl_hooks.sending.registration import text_config, unwrap

UNPACK: Final = (
    "Say where the rollouts of a packed row begin: cu_seqlens= or position_ids= of `capture`, or nested tensors. Or "
    "send one rollout a row, padded to [B, S] with an attention_mask, and do not pack the forward that is captured."
)
#: Arguments that number the sequence of each token.
_NUMBERS: Final = ("seq_idx", "attention_mask")
#: transformers' flash attention uses boundaries only if it has all of these; else it uses positions.
_VARLEN: Final = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
#: Names in a config for layers that carry a state from token to token.
_RECURRENT: Final = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid", "hybrid_sliding"}
#: Arguments of attention over a prefix tree: the tokens that each segment reads, where these begin, where segments do.
_TREE: Final = ("tree_kv_index", "tree_cu_seqlens_k", "tree_cu_seqlens_q")
#: An additive mask hides a position whose value is below this.
_HIDDEN: Final = -1e4

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PackedRollouts:
    """The rollouts of one forward over [B, S] tokens, and where on the flattened axis each has its tokens."""

    shape: tuple[int, int]
    rollouts: tuple[Ints, ...]
    packed: bool
    #: Tokens of each sequence, if lengths told the rollouts apart: other nested tensors must have the same.
    lengths: tuple[int, ...] | None = None
    #: The place of each token in a forward over a prefix tree, [T]; None: the forward has them as the caller has.
    tree: Ints | None = None

    @property
    def forward_shape(self) -> tuple[int, int]:
        """[B, S] of the forward's tokens."""
        return self.shape if self.tree is None else (1, int(self.tree.max()) + 1)

    def in_forward(self, tokens: Ints) -> Ints:
        """The places, in the flattened forward, of these tokens of the flattened axis."""
        return tokens if self.tree is None else self.tree[tokens]

    def owners(self) -> Ints:
        """The number of the rollout that each token belongs to, [B, S]; -1: padding."""
        owner = np.full(self.shape[0] * self.shape[1], -1, np.int64)
        for number, places in enumerate(self.rollouts):
            owner[places] = number
        return owner.reshape(self.shape)

    def flat(self, name: str, tensor: Tensor | None, dtype: type) -> npt.NDArray[Any]:
        """A tensor of one value a token, on the host, along the flattened axis.

        Raises RolloutError if it is not of these tokens.
        """
        if not isinstance(tensor, Tensor):
            raise RolloutError(
                f"{name} must be a tensor {list(self.shape)} like input_ids, got {type(tensor).__name__}"
            )
        values = tensor
        if tensor.is_nested:
            lengths = tuple(len(one) for one in tensor.unbind())
            if lengths != self.lengths:
                raise RolloutError(
                    f"{name} is nested with {list(lengths)} tokens, but the rollouts have {list(self.lengths or ())}: "
                    "each tensor must have as many tokens for a rollout as input_ids or cu_seqlens say"
                )
            values = torch.cat(list(tensor.unbind()))
        if self.packed and self.shape[0] == 1 and values.ndim == 1:
            values = values[None]
        if tuple(values.shape) != self.shape:
            shifted = values.ndim == len(self.shape) and values.shape[-1] == self.shape[-1] - 1
            why = "; column s is of token s, so put a column in front of what belongs to input_ids[:, 1:]"
            got = f"{list(values.shape)}{why if shifted else ''}"
            raise RolloutError(f"{name} must be {list(self.shape)} like input_ids, got {got}")
        return host(values, dtype).reshape(-1)

    def generated(self, loss_mask: Tensor | None) -> npt.NDArray[np.bool_]:
        """Whether the policy generated each token, [T]. Raises if such a token of a packed row is in no rollout."""
        generated_T = self.flat("loss_mask", loss_mask, np.bool_)
        lost = np.flatnonzero(generated_T & (self.owners().reshape(-1) < 0)) if self.packed else np.array([])
        if lost.size:
            raise RolloutError(
                f"loss_mask is 1 at {lost.size} tokens of no rollout, the first at token {lost[0] % self.shape[1]} of "
                f"row {lost[0] // self.shape[1]}: cu_seqlens must hold the end of the last rollout too, and an "
                "attention_mask must not hide what was generated"
            )
        return generated_T


def lay_out(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    position_ids: Tensor | None,
    tree_places: Tensor | None = None,
) -> PackedRollouts:
    """Find the rollouts by what the caller says of them. Raises RolloutError for what cannot be told apart."""
    if tree_places is not None:
        return _lay_out_paths(lay_out(input_ids, attention_mask, cu_seqlens, position_ids), tree_places)
    packed = input_ids.is_nested or cu_seqlens is not None or position_ids is not None
    if input_ids.is_nested:
        nested = [len(one) for one in input_ids.unbind()]
        bounds, shape = np.cumsum([0, *nested]), (1, sum(nested))
    elif input_ids.ndim == 1 and packed:
        shape = (1, len(input_ids))
    elif input_ids.ndim != 2:
        raise RolloutError(f"input_ids must be [B, S], got {list(input_ids.shape)}. {UNPACK}")
    else:
        shape = (int(input_ids.shape[0]), int(input_ids.shape[1]))
    if attention_mask is None and not packed:
        raise RolloutError(f"attention_mask is None; where nothing is padded it is all ones. {UNPACK}")
    if cu_seqlens is not None:
        told = _checked_bounds(cu_seqlens, shape)
        if input_ids.is_nested and told.tolist() != bounds.tolist():
            raise RolloutError(
                f"cu_seqlens are {told.tolist()[:8]}, but nested input_ids begin at {bounds.tolist()[:8]}"
            )
        bounds = told
    by_length = input_ids.is_nested or cu_seqlens is not None
    lengths = tuple(np.diff(bounds).tolist()) if by_length else None
    everything = PackedRollouts(shape, (), packed, lengths)
    real_BS = np.ones(shape, np.bool_)
    if attention_mask is not None:
        numbers_BS = everything.flat("attention_mask", attention_mask, np.int64).reshape(shape)
        real_BS = numbers_BS != 0
    if not packed:
        rollouts = tuple(b * shape[1] + np.flatnonzero(real_BS[b]) for b in range(shape[0]))
        layout = PackedRollouts(shape, rollouts, packed=False)
        _sequence_starts({"attention_mask": numbers_BS}, layout.owners())
        return layout
    marks: dict[str, Ints] = {}
    if attention_mask is not None:
        marks["attention_mask"] = numbers_BS
    if position_ids is not None:
        positions_BS = everything.flat("position_ids", position_ids, np.int64).reshape(shape)
        marks["position_ids"] = positions_BS
    if by_length:
        whole = [np.arange(a, b) for a, b in pairwise(bounds.tolist())]
        found = [places[real_BS.reshape(-1)[places]] for places in whole]
    else:
        found = _by_position(positions_BS, real_BS)
    layout = PackedRollouts(shape, tuple(found), packed, lengths)
    _sequence_starts(marks, layout.owners())
    return layout


def _lay_out_paths(layout: PackedRollouts, tree_places: Tensor) -> PackedRollouts:
    if not layout.packed or layout.shape[0] != 1:
        raise RolloutError("tree_places are of one packed row: say where its rollouts begin, by cu_seqlens=")
    places = layout.flat("tree_places", tree_places, np.int64)
    if places.min(initial=0) < 0 or any((np.diff(places[path]) <= 0).any() for path in layout.rollouts):
        raise RolloutError("tree_places must ascend in each rollout: a token comes after those that it continues")
    return replace(layout, tree=places)


def _checked_bounds(cu_seqlens: Tensor, shape: tuple[int, int]) -> Ints:
    bounds: Ints = host(cu_seqlens, np.int64)
    if shape[0] != 1:
        raise RolloutError(f"cu_seqlens are of one packed row, [1, T] or [T]; input_ids are {list(shape)}")
    if bounds.ndim != 1 or len(bounds) < 2 or bounds[0] != 0 or (np.diff(bounds) <= 0).any() or bounds[-1] > shape[1]:
        raise RolloutError(
            f"cu_seqlens must ascend from 0 to at most the {shape[1]} tokens of the row, got {bounds.tolist()[:8]}"
        )
    return bounds


def _by_position(positions_BS: Ints, real_BS: npt.NDArray[np.bool_]) -> list[Ints]:
    """Split each row where its positions begin again at 0."""
    S = positions_BS.shape[1]
    found: list[Ints] = []
    for row in range(len(positions_BS)):
        at = np.flatnonzero(real_BS[row])
        positions = positions_BS[row, at]
        begins = np.append(True, np.diff(positions) != 1)[: len(at)]
        if (wrong := np.flatnonzero(begins & (positions != 0))).size:
            before = "the row begins with" if wrong[0] == 0 else f"after {positions[wrong[0] - 1]} comes"
            raise RolloutError(
                f"position_ids count up from 0 in each rollout, but {before} {positions[wrong[0]]} at token "
                f"{at[wrong[0]]} of row {row}: a part of a row (sequence parallel), or a rollout whose first token "
                "cannot be told. Pass cu_seqlens= of the whole row, and attention_mask= where it begins with padding"
            )
        found += [row * S + part for part in np.split(at, np.flatnonzero(begins)[1:])] if len(at) else []
    return found


# --- what the forward says -------------------------------------------------------------------------------------------


def boundaries_among(kwargs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The arguments of a decoder layer that tell where rollouts begin. Their values are not read here.

    `mask` is what attention is computed with; None: every token before.
    """
    said: dict[str, Tensor | None] = {
        name: value
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and (name in ("position_ids", "seq_idx", *_TREE) or name.startswith("cu_seq"))
    }
    longest = {name: kwargs[name] for name in _VARLEN[2:] if kwargs.get(name) is not None}
    said |= {name: torch.as_tensor(value) for name, value in longest.items()}
    mask = kwargs.get("attention_mask", "absent")
    return said | {"mask": mask} if mask is None or isinstance(mask, Tensor) else said


def how_it_reads(model: nn.Module) -> tuple[str, bool]:
    """The model's attention as it is now ("" where unknown), and whether layers carry a state from token to token."""
    inner, text = unwrap(model), text_config(model)
    kinds = {str(kind) for name in ("layer_types", "layers_block_type") for kind in getattr(text, name, None) or ()}
    recurrent = bool(kinds & _RECURRENT) or bool(getattr(inner, "_is_stateful", False))
    return str(getattr(text, "_attn_implementation", "")), recurrent


def check_forward(
    said: Mapping[str, Tensor | None], layout: PackedRollouts, attention: str = "", *, recurrent: bool = False
) -> None:
    """Raise RolloutError where the forward and the layout disagree. Padding may have any position.

    `attention`, `recurrent`: see `how_it_reads`. Flash attention goes by boundaries and positions where it has no mask,
    and others attend to every token before.
    """
    if layout.tree is not None:
        paths = [layout.tree[rollout] for rollout in layout.rollouts]
        _refuse_another_tree(said, paths, attention, recurrent=recurrent)
        return
    if any(name in said for name in _TREE):
        raise RolloutError(
            "the forward is over a prefix tree, in which rollouts share tokens. Say where it has the tokens of each: "
            "tree_places= of `capture`"
        )
    no_marks = ("mask", *_VARLEN[2:])
    marks = {name: host(one, np.int64) for name, one in said.items() if one is not None and name not in no_marks}
    told = _sequence_starts(marks, layout.owners())
    if layout.packed:
        _refuse_cut(marks, layout)
        _refuse_leak(said, marks, told, layout, attention, recurrent=recurrent)


def _refuse_another_tree(
    said: Mapping[str, Tensor | None], paths: list[Ints], attention: str, *, recurrent: bool
) -> None:
    """Raise where one of `paths` is none of the forward's tree, whose tokens read all before them, and no others."""
    told = {name: value for name in ("position_ids", *_TREE) if (value := said.get(name)) is not None}
    if len(told) <= len(_TREE) or "tree" not in attention or recurrent:
        missing = ", ".join({"position_ids", *_TREE} - {*told}) or "attention or layers"
        raise RolloutError(
            f"tree_places were given, but the forward is over no prefix tree that can be read: {missing}"
        )
    positions, reads, begins, starts = (host(value, np.int64).reshape(-1) for value in told.values())
    for number, path in enumerate(paths):
        segments = np.searchsorted(starts, path, side="right") - 1
        found = bool((positions[path] == np.arange(len(path))).all())
        for segment in np.unique(segments):  # the last tokens that a segment reads are its own
            upto = int(np.searchsorted(segments, segment, side="right"))
            found &= np.array_equal(reads[begins[segment] : begins[segment + 1]], path[:upto])
        if not found:
            raise RolloutError(
                f"rollout {number} is no path of the forward's prefix tree: where tree_places say that its tokens are, "
                "positions do not count up from 0, or attention read other tokens"
            )


def _sequence_starts(marks: Mapping[str, Ints], owner_BS: Ints) -> dict[str, npt.NDArray[np.bool_]]:
    """Where each argument says that a sequence begins, [B, S]. Raises where that is inside a rollout."""
    before_BS = _owner_before(owner_BS)
    told: dict[str, npt.NDArray[np.bool_]] = {}
    for name, values in marks.items():
        begins_BS = _begins(name, values, owner_BS)
        if begins_BS is None:
            continue
        told[name] = begins_BS
        inside = np.argwhere(begins_BS & (owner_BS == before_BS) & (owner_BS >= 0))
        if inside.size:
            happens = (
                "restart" if name == "position_ids" else "changes" if name in _NUMBERS else "begins another sequence"
            )
            raise RolloutError(f"{name} {happens} at token {inside[0][1]} of row {inside[0][0]}. {UNPACK}")
    return told


def _refuse_cut(marks: Mapping[str, Ints], layout: PackedRollouts) -> None:
    """Raise if a forward is longer than the row without a boundary at the row's end: its tokens are others."""
    S = layout.shape[1]
    if layout.owners()[-1, -1] < 0:
        return  # the row ends in padding: no rollout is cut
    boundaries: list[bool] = []
    for name, values in marks.items():
        if name.startswith("cu_seq"):
            boundaries += [S in values] if values.max(initial=0) >= S else []
        elif values.shape[-1] > S:
            last, following = values.reshape(-1, values.shape[-1])[0, S - 1 : S + 1]
            boundaries.append(bool(following != last + (name == "position_ids")))
    if boundaries and not any(boundaries):
        raise RolloutError(
            f"the forward is longer than the {S} tokens that it was told to hold, and goes on after them without a "
            "boundary: it is of other tokens. Where it is padding, let its position_ids begin again at 0"
        )


def _owner_before(owner_BS: Ints) -> Ints:
    """For each token, the rollout of the last token before it in its row that is no padding; -1: there is none."""
    column = np.where(owner_BS >= 0, np.arange(owner_BS.shape[1]), -1)
    last = np.maximum.accumulate(column, axis=1)[:, :-1]
    before = np.full_like(owner_BS, -1)
    before[:, 1:] = np.where(last >= 0, np.take_along_axis(owner_BS, last.clip(min=0), axis=1), -1)
    return before


def _begins(name: str, values: Ints, owner_BS: Ints) -> npt.NDArray[np.bool_] | None:
    """The places where a sequence begins, by one argument of the forward, [B, S]; None: it is not of these rows."""
    B, S = owner_BS.shape
    begins = np.zeros((B, S), np.bool_)
    if name.startswith("cu_seq"):
        inside = values.reshape(-1)
        inside = inside[(inside > 0) & (inside < B * S)]
        begins.reshape(-1)[inside] = True
        return begins
    if values.ndim == 3:
        values = values[0]  # multimodal positions: the first axis of them counts text, or time
    if values.ndim == 1:
        values = values[None]
    # A packed forward may be longer than the caller's row: padded to the size of a bucket.
    if values.ndim != 2 or values.shape[1] < S or (B > 1 and values.shape[1] != S) or values.shape[0] not in (1, B):
        return None
    values_BS = np.broadcast_to(values[:, :S], (B, S))
    for row in range(B):
        at = np.flatnonzero(owner_BS[row] >= 0)
        step = np.diff(values_BS[row, at])
        # Positions 0, 0: a rollout of one token, and the next.
        again = (step < 0) | ((step == 0) & (values_BS[row, at[1:]] == 0)) if name == "position_ids" else step != 0
        begins[row, at[1:]] = again
    return begins


def _refuse_leak(
    said: Mapping[str, Tensor | None],
    marks: Mapping[str, Ints],
    told: Mapping[str, npt.NDArray[np.bool_]],
    layout: PackedRollouts,
    attention: str,
    *,
    recurrent: bool,
) -> None:
    """Raise where the first token of a rollout saw the rollout before it in its row."""
    owner_BS = layout.owners()
    before_BS = _owner_before(owner_BS)
    starts = np.argwhere((before_BS >= 0) & (owner_BS >= 0) & (before_BS != owner_BS))
    if not len(starts):
        return
    apart = _kept_apart(said, marks, told, layout, attention, starts)
    if not apart.all():
        row, token = starts[np.flatnonzero(~apart)[0]]
        raise RolloutError(
            f"the rollout that begins at token {token} of row {row} attended to the one before it: this forward was "
            "not told of the packing. Pass it one row with position_ids that begin again, use_cache=False and no "
            "attention_mask, or send one rollout a row"
        )
    apart = _begins_at(told, "seq_idx", starts) & _begins_at(told, "cu_seq_lens_q", starts)
    if recurrent and not apart.all():
        row, token = starts[np.flatnonzero(~apart)[0]]
        raise RolloutError(
            f"the recurrent layers carry their state into the rollout that begins at token {token} of row {row}: they "
            "do not look at positions. Pass the forward seq_idx and cu_seq_lens_q, or send one rollout a row"
        )


def _kept_apart(
    said: Mapping[str, Tensor | None],
    marks: Mapping[str, Ints],
    told: Mapping[str, npt.NDArray[np.bool_]],
    layout: PackedRollouts,
    attention: str,
    starts: Ints,
) -> npt.NDArray[np.bool_]:
    """Whether attention keeps each rollout that begins at (row, token) of `starts` from the one before it, [n].

    What decides depends on the kind of attention: its mask, its boundaries, or its positions.
    """
    rows, tokens = starts[:, 0], starts[:, 1]
    mask = said.get("mask")
    if isinstance(mask, Tensor) and mask.ndim == 4:
        before_BS = _owner_before(layout.owners())
        ends = np.array([layout.rollouts[before_BS[row, token]][-1] % layout.shape[1] for row, token in starts])
        at = mask[
            torch.from_numpy(rows if len(mask) > 1 else 0 * rows), 0, torch.from_numpy(tokens), torch.from_numpy(ends)
        ]
        return ~host(at if at.dtype == torch.bool else at > _HIDDEN, np.bool_)
    if mask is not None or ("mask" in said and "flash" not in attention):
        return np.zeros(len(starts), np.bool_)  # each row is one sequence to this attention
    if {*said} == {"cu_seqlens"}:  # layers of a trainer's own, with flash attention by these (prime-rl)
        return _begins_at(told, "cu_seqlens", starts)
    if "flash" in attention:
        # All that the kernel may use must agree. It uses positions in a single row, if not all boundaries are given.
        apart = np.ones(len(starts), np.bool_)
        for name in _VARLEN[:2]:
            apart &= _begins_at(told, name, starts) if name in told else True
        if not all(said.get(name) is not None for name in _VARLEN):
            apart &= _lowest(marks.get("position_ids"), rows, tokens, layout)
        return apart
    # A mask that cannot be read.
    bounds = [_begins_at(told, name, starts) for name in told if name.startswith("cu_seq")]
    return np.logical_and.reduce(bounds) if bounds else _begins_at(told, "position_ids", starts)


def _begins_at(told: Mapping[str, npt.NDArray[np.bool_]], name: str, starts: Ints) -> npt.NDArray[np.bool_]:
    """Whether this argument of the forward says that a sequence begins at each (row, token), [n]."""
    return told[name][starts[:, 0], starts[:, 1]] if name in told else np.zeros(len(starts), np.bool_)


def _lowest(positions: Ints | None, rows: Ints, tokens: Ints, layout: PackedRollouts) -> npt.NDArray[np.bool_]:
    """Whether these tokens have the lowest position of the forward: flash attention splits there, in a row alone."""
    if positions is None or layout.shape[0] != 1:
        return np.zeros(len(tokens), np.bool_)
    values = (positions[0] if positions.ndim == 3 else positions).reshape(-1, positions.shape[-1])
    lowest: npt.NDArray[np.bool_] = values[rows, tokens] == values.min()
    return lowest


def host(tensor: Tensor, dtype: type) -> npt.NDArray[Any]:
    """A tensor's values as a NumPy array."""
    values = tensor.detach().cpu()
    return (values.float() if values.is_floating_point() else values).numpy().astype(dtype)  # NumPy has no bfloat16
