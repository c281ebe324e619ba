"""FeatureCapture against transformers' own output_hidden_states, on a real tiny Qwen3."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.forked import run_fork
from helpers.trainer.hooks_fixtures import HIDDEN, padded_batch, tiny_qwen3
from torch import nn

from rl_hooks.errors import AuxLayersError, CaptureMissedError, RolloutError, UnsupportedModelError
from rl_hooks.hook import DrafterHook
from rl_hooks.trainer.capture import FeatureCapture, eagle3_layers, find_decoder


def test_captured_states_are_exactly_those_of_output_hidden_states() -> None:
    model, batch = tiny_qwen3(), padded_batch([(3, 5), (4, 2)])
    capture = FeatureCapture(model, (1, 2, 3))
    with torch.no_grad(), capture.armed():
        out = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    states = capture.pop()
    for layer, state in zip((1, 2, 3), states.aux, strict=True):
        assert torch.equal(state, out.hidden_states[layer].reshape(-1, HIDDEN))
    assert torch.equal(states.last, out.hidden_states[-1].reshape(-1, HIDDEN))
    assert torch.equal(model.lm_head(states.last), out.logits.reshape(-1, out.logits.shape[-1]))


def test_only_the_selected_rows_are_copied() -> None:
    model, batch = tiny_qwen3(), padded_batch([(3, 5), (4, 2)])
    capture = FeatureCapture(model, (0, 2))
    rows = torch.tensor([1, 4, 11])
    with torch.no_grad(), capture.armed(rows=rows, shape=tuple(batch.input_ids.shape)):
        out = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    states = capture.pop()
    assert torch.equal(states.aux[1], out.hidden_states[2].reshape(-1, HIDDEN)[rows])
    assert states.last.shape == (3, HIDDEN)
    assert not states.last.requires_grad


def test_nothing_is_captured_when_it_is_not_armed() -> None:
    model, batch = tiny_qwen3(), padded_batch([(3, 5)])
    capture = FeatureCapture(model, (1, 2))
    model(batch.input_ids)
    assert not capture._forward.states
    with pytest.raises(CaptureMissedError, match=r"layer 1, layer 2, norm.*torch\.compile"):
        capture.pop()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_fires_every_hook_once(reentrant: bool) -> None:
    model, batch = tiny_qwen3().train(), padded_batch([(3, 5)])
    capture = FeatureCapture(model, (1, 2, 3))
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    take, taken = capture._take, []

    def noted(name: str, *rest: Any) -> None:
        taken.append(name)
        take(name, *rest)

    vars(capture)["_take"] = noted
    with capture.armed():
        loss = model(batch.input_ids, labels=batch.input_ids).loss
        loss.backward()  # recomputes the layers, still armed
    assert taken == ["layer 1", "layer 2", "layer 3", "norm"]
    assert capture.pop().aux[0].shape == (8, HIDDEN)


def test_of_two_forwards_in_one_armed_context_the_first_counts() -> None:
    model = tiny_qwen3()
    first, second = padded_batch([(3, 5)], seed=1), padded_batch([(3, 5)], seed=2)
    capture = FeatureCapture(model, (1, 2))
    with torch.no_grad(), capture.armed():
        expected = model(first.input_ids, output_hidden_states=True).hidden_states[1]
        model(second.input_ids)
    assert torch.equal(capture.pop().aux[0], expected[0])


@pytest.mark.parametrize("compiles", [False, True])
def test_a_forward_without_gradients_before_another_is_not_taken_for_the_policys(compiles: bool) -> None:
    batch = padded_batch([(3, 5)])
    torch._dynamo.reset()
    model: Any = tiny_qwen3()
    capture = FeatureCapture(model, (1, 2))
    forward = torch.compile(model, backend="eager", fullgraph=True) if compiles else model
    with capture.armed():
        with torch.no_grad():  # the reference: the policy with its adapter off
            forward(batch.input_ids, use_cache=False)
        forward(batch.input_ids, use_cache=False)
    with pytest.raises(RolloutError, match="several forwards ran inside `capture`, and the first had no gradients"):
        capture.pop()
    with capture.armed(), torch.no_grad():
        forward(batch.input_ids, use_cache=False)
    assert capture.pop().last.shape == (8, HIDDEN)


def compiled(model: nn.Module) -> nn.Module:
    # Which backend compiles the graph does not matter to hooks; this one needs no C compiler.
    found = torch.compile(model, backend="eager")
    assert isinstance(found, nn.Module)
    return found


def compiled_qwen3() -> tuple[nn.Module, nn.Module]:
    torch._dynamo.reset()
    model = tiny_qwen3()
    return model, compiled(model)


def test_a_hook_registered_before_compile_captures() -> None:
    batch = padded_batch([(3, 5)])
    model, forward = compiled_qwen3()
    capture = FeatureCapture(forward, (1, 2))
    with torch.no_grad():
        forward(batch.input_ids)
        with capture.armed():
            forward(batch.input_ids)
        expected = model(batch.input_ids, output_hidden_states=True).hidden_states
    states = capture.pop()
    assert torch.allclose(states.aux[0], expected[1][0], rtol=1e-5, atol=1e-6)
    assert torch.allclose(states.last, expected[-1][0], rtol=1e-5, atol=1e-6)


def test_a_hook_registered_after_compile_says_that_it_missed() -> None:
    batch = padded_batch([(3, 5)])
    _, forward = compiled_qwen3()
    with torch.no_grad():
        forward(batch.input_ids)
        capture = FeatureCapture(forward, (1, 2))
        with capture.armed():
            forward(batch.input_ids)
    with pytest.raises(CaptureMissedError, match=r"attach before torch\.compile"):
        capture.pop()


def test_a_compiled_forward_is_not_compiled_again_for_each_shape_that_is_captured() -> None:
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tiny_qwen3()
    capture = FeatureCapture(model, (1, 2))
    forward: Any = torch.compile(model, backend=backend)
    for length in range(9, 17):
        batch = padded_batch([(3, length), (7, length - 2)])
        rows = batch.attention_mask.flatten().nonzero()[:, 0]
        with torch.no_grad(), capture.armed(rows=rows, shape=tuple(batch.input_ids.shape)):
            forward(batch.input_ids, attention_mask=batch.attention_mask)
        assert capture.pop().last.shape == (len(rows), HIDDEN)
    # The first shape, and one graph for those that follow.
    assert len(graphs) <= 2, len(graphs)


def test_layers_that_are_compiled_by_themselves_give_the_same_states_and_no_graph_more_with_each_shape() -> None:
    """As torchtitan and prime-rl compile. The hooks of such a layer are outside of its graph, and small graphs too."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = tiny_qwen3(use_cache=False)
    capture = FeatureCapture(model, (1, 2))
    for layer in model.model.layers:
        layer.compile(backend=backend)
    counts = []
    for length in range(9, 17):
        batch = padded_batch([(3, length), (7, length - 2)])
        rows = batch.attention_mask.flatten().nonzero()[:, 0]
        with torch.no_grad(), capture.armed(rows=rows, shape=tuple(batch.input_ids.shape)):
            out = model(batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
        states = capture.pop()
        for found, expected in zip((*states.aux, states.last), (*out.hidden_states[1:3], out[1][-1]), strict=True):
            assert torch.equal(found, expected.flatten(0, 1)[rows])
        with torch.no_grad():
            model(batch.input_ids, attention_mask=batch.attention_mask)
        counts.append(len(graphs))
    assert len({*counts[2:]}) == 1, counts


def test_eagle3_layers_are_the_engines_triple_and_refuse_shallow_models() -> None:
    assert eagle3_layers(36) == (2, 18, 33)
    assert eagle3_layers(7) == (2, 3, 4)
    for shallow in range(1, 7):
        with pytest.raises(AuxLayersError, match=r"aux_layers="):
            eagle3_layers(shallow)
    with pytest.raises(AuxLayersError, match=r"aux_layers=\(0, 2, 3\), or --aux-layers 0,2,3 of `draftalign warmup`"):
        eagle3_layers(4)


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1, 2), (1, 4), "eagle2"])
def test_impossible_layers_are_refused(layers: object) -> None:
    with pytest.raises(AuxLayersError):
        FeatureCapture(tiny_qwen3(4), layers)  # type: ignore[arg-type]


def test_layers_are_found_through_wrappers() -> None:
    model = tiny_qwen3()
    expected = model.model.layers
    wrapper = nn.Module()
    wrapper.module = model  # as DDP wraps
    assert find_decoder(wrapper)[0] is expected
    assert find_decoder(compiled(model))[0] is expected
    assert find_decoder(model.model)[0] is expected
    vision = nn.Module()
    vision.model = nn.Module()
    vision.model.language_model = model.model
    assert find_decoder(vision)[0] is expected


def test_an_unknown_architecture_is_refused_by_name_and_paths_help() -> None:
    odd = nn.Module()
    odd.tower = nn.ModuleList([nn.Identity(), nn.Identity()])
    odd.final = nn.Identity()
    with pytest.raises(UnsupportedModelError, match=r"Module: looked for .*model\.layers.*layers_path="):
        FeatureCapture(odd, (0, 1))
    assert FeatureCapture(odd, (0, 1), layers_path="tower", norm_path="final").aux_layers == (0, 1)


def test_a_state_that_does_not_fit_the_batch_is_an_error_of_pop_and_not_of_the_forward() -> None:
    model, batch = tiny_qwen3(), padded_batch([(3, 5)])
    capture = FeatureCapture(model, (1, 2))
    with torch.no_grad(), capture.armed(shape=(2, 4)):
        model(batch.input_ids)
    with pytest.raises(RolloutError, match="Sequence and context parallelism"):
        capture.pop()


@pytest.mark.parametrize("odd", ["5", [[1], [2, 3]], object()], ids=["text", "ragged", "object"])
def test_an_argument_of_the_forward_that_cannot_be_read_is_an_error_of_pop_and_not_of_the_forward(odd: Any) -> None:
    class Layer(nn.Module):
        def forward(self, x: torch.Tensor, **_: Any) -> torch.Tensor:
            return x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.norm = nn.Identity()

        def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, **more)
            return torch.as_tensor(self.norm(x))

    model = Model()
    capture = FeatureCapture(model, (0, 1, 2))
    x = torch.randn(1, 4, HIDDEN)
    with capture.armed():
        assert torch.equal(model(x, max_length_q=odd), x)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        capture.pop()
    capture.close()


def test_closing_removes_every_hook() -> None:
    model = tiny_qwen3()
    capture = FeatureCapture(model, (1, 2))
    capture.close()
    capture.close()
    assert not model.model.norm._forward_hooks
    assert not any(layer._forward_pre_hooks for layer in model.model.layers)


@pytest.mark.parametrize("captured", [False, True])
def test_a_model_with_hooks_is_pickled_and_loads_where_rl_hooks_is_not(tmp_path: Path, captured: bool) -> None:
    batch = padded_batch([(3, 5), (2, 6)])
    model = tiny_qwen3()
    hook = DrafterHook(model, "http://127.0.0.1:9", aux_layers=(1, 2, 3))
    if captured:
        told: dict[str, Any] = {name: getattr(batch, name) for name in ("input_ids", "attention_mask", "loss_mask")}
        with torch.no_grad(), hook.capture(**told, policy_version=0):
            model(batch.input_ids)
    with torch.no_grad():
        expected = model(batch.input_ids).logits
    ForkingPickler.dumps(model)
    pickle.dumps(model)
    torch.save(model, tmp_path / "model.pt")
    torch.save((batch.input_ids, expected), tmp_path / "forward.pt")
    code = (
        "import sys\nsys.modules['rl_hooks'] = None\nimport torch\n"
        f"model = torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)\n"
        f"ids, expected = torch.load({str(tmp_path / 'forward.pt')!r})\n"
        "with torch.no_grad(): found = model(ids).logits\n"
        "torch.testing.assert_close(found, expected)\n"
        "assert not [name for name in sys.modules if name.startswith('rl_hooks.')]\n"
    )
    (tmp_path / "loads.py").write_text(code)
    done = run_fork("trainer", str(tmp_path / "loads.py"), directory=tmp_path, environment=os.environ, seconds=120)
    assert done.returncode == 0, done.stderr
    hook.close(0.0)


class Wrapped(nn.Module):
    """As DDP holds its model."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.parametrize("wrapped", [Wrapped, compiled])
def test_a_deep_copy_of_the_policy_captures_nothing_and_compiles_whole(wrapped: Any) -> None:
    torch._dynamo.reset()
    batch = padded_batch([(3, 5)])
    model = tiny_qwen3()
    hook = DrafterHook(wrapped(model), "http://127.0.0.1:9", aux_layers=(1, 2, 3))
    frozen = copy.deepcopy(model)
    whole: Any = torch.compile(frozen, backend="eager", fullgraph=True)
    with torch.no_grad(), hook._reader.features.armed():
        found = whole(batch.input_ids, use_cache=False).logits
        assert not hook._reader.features._forward.states
        torch.testing.assert_close(found, model(batch.input_ids).logits)
        assert len(hook._reader.features._forward.states) == 4
    hook.close(0.0)


def test_importing_rl_hooks_costs_numpy_only_and_the_adapter_no_transformers() -> None:
    code = (
        "import sys, rl_hooks, rl_hooks.wire, rl_hooks.sending.sender\n"
        "assert not {'torch', 'transformers', 'fastapi', 'redis'} & set(sys.modules), 'core'\n"
        "import rl_hooks.trl\n"
        "assert not {'transformers', 'trl', 'fastapi', 'redis', 'drafter', 'service'} & set(sys.modules), 'adapter'\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
