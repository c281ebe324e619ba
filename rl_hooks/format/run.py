"""Whether the worker can open a run: what PUT /runs asks of its body, and the worker of the file that was kept.

One verdict for both. It reads headers and JSON, no values: what only those show (NaN, a draft vocabulary that
contradicts itself) the worker refuses when it opens the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rl_hooks.format.drafter import check_drafter, parse_drafter
from rl_hooks.format.eagle3 import CheckpointError, DrafterConfig, Found, check_streams

_ADVICE: Final = (
    "`draftalign convert DRAFTER NEW --to sglang` rewrites a drafter of another project's layout (`--to mtp` takes the "
    "MTP module out of a policy's checkpoint). Leave the drafter out, and the run begins from scratch"
)


def check_run(
    config: Mapping[str, Any],
    aux_layers: Sequence[int],
    drafter_config: Mapping[str, Any] | None,
    drafter_tensors: Found,
) -> None:
    """Raise `DrafterError` unless the worker can begin this run.

    config: the target's; aux_layers: what the run captures; the other two: of the drafter that came along, if one did.
    """
    check_streams(config)
    if drafter_config is None:
        DrafterConfig.from_target(config, aux_layers, 1)  # a drafter from scratch takes its sizes from the target
        return
    try:
        sizes = parse_drafter(drafter_config, aux_layers)
        check_drafter(drafter_tensors, sizes)
    except CheckpointError as error:
        raise CheckpointError(f"the drafter cannot be served: {str(error)[:300]}. {_ADVICE}") from error
    for name in ("vocab_size", "hidden_size"):
        if getattr(sizes, name) != config[name]:
            raise CheckpointError(
                f"the drafter is of another target: its {name} is {getattr(sizes, name)}, the run's {config[name]}"
            )
    if isinstance(sizes, DrafterConfig) and sizes.aux_layers != tuple(aux_layers):
        raise CheckpointError(
            f"the drafter reads layers {list(sizes.aux_layers)!s:.80} (entering), the run captures {list(aux_layers)}; "
            "register the run with the drafter's layers"
        )
