"""The final weights of a run, and the network they belong to."""

import json
from pathlib import Path

from safetensors.torch import save
from torch import Tensor, nn

import cenet.train.saving as saving
import cenet.train.snapshot as snapshot
from cenet.checkpoints import digest, load_state_, read_state
from cenet.data.input_spec import InputSpec
from cenet.run_folder import WEIGHTS, replace_file
from cenet.train.course import Course
from cenet.train.logbook import read_run
from cenet.train.recipes import Recipe
from cenet.train.setup import build_network


def write_weights(path: Path, network: nn.Module, recipe: Course, inputs: InputSpec) -> None:
    """Write a state dict, with recipe and inputs beside it."""
    state = {
        name: value.detach().cpu().contiguous().clone()
        for name, value in network.state_dict().items()
    }
    # one entry: several would come in any order, and equal runs write equal files
    about = {"recipe": recipe.as_dict(), "inputs": inputs.as_dict(), "digest": digest(state, "")}
    replace_file(path, save(state, {"cenet": json.dumps(about)}))


def read_weights(run: Path) -> tuple[dict[str, Tensor], str]:
    """The final weights of a run, or those of its newest checkpoint, and the name of their file."""
    final = run / WEIGHTS
    if final.is_file():
        return read_state(final), final.name
    found = saving.newest(run)
    if found is None:
        raise ValueError(f"{run} has neither {WEIGHTS} nor a checkpoint yet")
    tensors = found[1]
    return snapshot.under("ema", tensors) or snapshot.under("model", tensors), found[0].name


def load_run(run: Path | str) -> nn.Module:
    """The network of a run of `cenet train`, in evaluation mode on the CPU."""
    recipe, inputs = read_run(Path(run), Recipe)
    network = build_network(recipe, inputs)
    load_state_(network, read_weights(Path(run))[0])
    return network.eval()
