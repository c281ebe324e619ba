"""What a demo's policy is asked, how it is rewarded, and how it was pre-trained: `examples.elicit`, `examples.recall`.

Text is a sequence of words separated by single spaces; a word is a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

PAD: Final = "<pad>"
EOS: Final = "<eos>"


@dataclass(frozen=True, slots=True)
class PretrainRecipe:
    """How a base policy is pre-trained: on the *teach* text first, then on the *real* one, with few worked answers."""

    teach_steps: int
    real_steps: int
    learning_rate: float
    warmup_steps: int
    decay_steps: int  # the learning rate falls linearly over the last so many
    sequences_per_step: int = 64
    weight_decay: float = 0.01
    muon: bool = False  # for the layers' matrices, in the place of AdamW
    grad_clip: float = 1.0

    @property
    def steps(self) -> int:
        """Of both stages."""
        return self.teach_steps + self.real_steps


@dataclass(frozen=True, slots=True)
class DrafterRecipe:
    """How the drafter is trained that RL begins with."""

    steps: int
    learning_rate: float
    optimizer: Literal["muon", "adamw"]


@dataclass(frozen=True, slots=True)
class Task:
    """One task. Prompts and answers are texts without the end of sequence."""

    name: str
    says: str  # one line for people: what RL makes of the policy
    base_policy: Path  # the shipped checkpoint
    vocabulary: tuple[str, ...]  # every word, in the order of its token id
    draft_vocabulary: int  # words that a drafter knows: fewer, so that the mapping (d2t, t2d) is exercised for real
    prompt_tokens: int
    max_answer_tokens: int  # end of sequence included
    pretraining: PretrainRecipe
    initial_drafter: DrafterRecipe
    #: (stage `teach` or `real`, seed of the text) -> one pair of prompt and answer
    sample_text: Callable[[str, Any], tuple[str, str]]
    #: (count, seed) -> prompts for the drafter that RL begins with, and for evaluation
    sample_prompts: Callable[[int, int], list[str]]
    #: (steps, prompts of a step, seed) -> TRL's data set, columns by name
    curriculum: Callable[[int, int, int], Mapping[str, Sequence[str]]]
    shuffled: bool  # whether TRL may draw that data set in any order
    changes: Callable[[int], Sequence[int]]  # of a run of so many steps, those at which prompts become others
    #: in the shape that TRL's `GRPOTrainer(reward_funcs=...)` calls
    reward: Callable[..., list[float]]
    #: (prompt, answer) -> whether the answer is what RL elicits
    is_worked: Callable[[str, str], bool]

    @property
    def eos_id(self) -> int:
        """Token id of the end of sequence."""
        return self.vocabulary.index(EOS)

    def build_tokenizer(self) -> Any:
        """The word-level tokenizer (a `PreTrainedTokenizerFast`, padding on the left as generation wants it)."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        # No unknown token: a word outside the vocabulary is an error, not a silent pad.
        inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(self.vocabulary)}))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        inner.decoder = decoders.WordPiece(prefix="##", cleanup=False)  # joins words by single spaces
        return PreTrainedTokenizerFast(
            tokenizer_object=inner,
            pad_token=PAD,
            eos_token=EOS,
            padding_side="left",
            clean_up_tokenization_spaces=False,
            model_max_length=256,
        )
