"""Where and how a recipe runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """Where and how a recipe runs; none of it moves a number by more than rounding.

    Attributes:
        out: folder of the run.
        resume: auto goes on from the newest whole checkpoint in `out`, never refuses to touch a
            folder that has one.
        workers: processes that decode image files.
        channels_last: memory layout of images and weights.
        compile: torch.compile the network.
        cuda_graphs: replay whole steps as CUDA graphs, which takes the host out of the way; for one
            GPU.
        checkpoint_every: updates between checkpoints; 0 writes one after each epoch only.
        log_every: updates between looks at the loss.
        monitor_every: updates between looks at the channels, which go to channels.csv; 0 for none.
        threads: of a CPU; by default torch's own number, or 1 for images of fewer than 32 pixels,
            where threads would spend their time waiting for each other.
    """

    out: Path
    resume: Literal["auto", "never"] = "never"
    workers: int = 2
    channels_last: bool = False
    compile: bool = False
    cuda_graphs: bool = False
    checkpoint_every: int = 0
    log_every: int = 50
    monitor_every: int = 0
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        least_values = {"workers": 0, "checkpoint_every": 0, "log_every": 1, "monitor_every": 0}
        for name, least in least_values.items():
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        if self.monitor_every and self.cuda_graphs:
            raise ValueError("--monitor-every cannot look into --cuda-graphs; leave one away")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")
