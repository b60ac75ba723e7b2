"""Trained networks for other runtimes: ONNX, torch.export, safetensors with timm's config."""

from pathlib import Path

import torch
from torch import Tensor, nn

from cenet.checkpoints import read_state
from cenet.folding import fold_ce


def load_weights_(model: nn.Module, checkpoint: str | Path) -> None:
    """Load a checkpoint file of this very network, in place.

    Raises:
        ValueError: the file cannot be read, or keys or shapes do not fit; the message lists them.
    """
    state = {k.removeprefix("module."): v for k, v in read_state(checkpoint).items()}
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
        verbose=False,
    )


def export_folded(model: nn.Module, path: str | Path, example: Tensor) -> None:
    """Write a program of the folded network that `torch.export.load` reads, batch free."""
    batch = {"x": {0: torch.export.Dim("batch")}}
    program = torch.export.export(_deployed(model), (_two(example),), dynamic_shapes=batch)
    torch.export.save(program, str(path))


def export_safetensors(model: nn.Module, path: str | Path) -> None:
    """Write a folder that `timm.create_model("local-dir:PATH", pretrained=True)` reads."""
    from timm.models import save_for_hf

    save_for_hf(model, str(path))


def _deployed(model: nn.Module) -> nn.Module:
    return fold_ce(model.eval()).requires_grad_(False)


def _two(example: Tensor) -> Tensor:
    """A batch of two: programs traced with one sample hold for one sample."""
    return example[:1].repeat(2, 1, 1, 1)
