"""Trained networks for other runtimes: ONNX, torch.export, safetensors with timm's config."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import Tensor, nn

from cenet.checkpoints import read_state
from cenet.folding import fold_ce
from cenet.nn import ce_layers


def load_weights_(model: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint file of this very network, in place.

    Raises:
        ValueError: the file cannot be read, or keys or shapes do not fit; the message lists them.
    """
    state = read_state(checkpoint)
    broken = [key for key, value in state.items() if not bool(value.isfinite().all())]
    if broken:
        raise ValueError(f"{checkpoint} has values that are not finite: {', '.join(broken)}")
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{checkpoint} does not fit {type(model).__name__}: {error}") from error


def export_onnx(model: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write an ONNX file of the folded network, with a free batch dimension."""
    torch.onnx.export(
        _deployed(model),
        (_two(example),),
        str(path),
        dynamo=True,
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}},
        input_names=["images"],
        output_names=["logits"],
        external_data=False,
        verbose=False,
    )


def export_folded(model: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write a program of the folded network that `torch.export.load` reads, batch free."""
    batch = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(_deployed(model), (_two(example),), dynamic_shapes=batch)
    torch.export.save(program, str(path))


def export_safetensors(model: nn.Module, path: str | Path) -> None:
    """Write a folder that `timm.create_model("local-dir:PATH", pretrained=True)` reads.

    Raises:
        ValueError: the network does not come from timm's registry.
    """
    from timm.models import save_for_hf

    if not hasattr(model, "pretrained_cfg"):
        raise ValueError(
            f"{type(model).__name__} was not built by timm.create_model, which is to read it "
            'again; use timm.create_model("ceresnet50", block=..., norm=...) after import '
            "cenet.models"
        )
    args = getattr(model, "model_args", None)
    save_for_hf(model, str(path), model_args=args, safe_serialization=True)


def _deployed(model: nn.Module) -> nn.Module:
    """A copy in its fastest form: folded, if there is CE to fold."""
    model = deepcopy(model).eval()
    return (fold_ce(model) if dict(ce_layers(model)) else model).requires_grad_(False)


def _two(example: Tensor) -> Tensor:
    """A batch of two: programs traced with one sample hold for one sample."""
    return example[:1].repeat(2, 1, 1, 1)
