"""Where and how a recipe runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class RunOptions:
    """Where and how any recipe runs; none of it moves a number by more than rounding.

    Attributes:
        out: folder of the run.
        resume: auto goes on from the newest whole checkpoint in `out`, never refuses to touch a
            folder that has one.
        workers: processes that read and decode image files.
        channels_last: memory layout of images and weights.
        checkpoint_every: updates between checkpoints; 0 writes one after each epoch only.
        checkpoint_seconds: seconds between checkpoints: after an epoch none is written before that
            time has passed, and in the middle of an epoch one is as soon as it has; 0 writes one
            after each epoch.
        log_every: updates between looks at the loss.
        threads: of a CPU; by default torch's own number, or 1 for images of fewer than 32 pixels,
            where threads would spend their time waiting for each other.
    """

    out: Path
    resume: Literal["auto", "never"] = "never"
    workers: int = 2
    channels_last: bool = False
    checkpoint_every: int = 0
    checkpoint_seconds: float = 0.0
    log_every: int = 50
    threads: int | None = None

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        least_values = {
            "workers": 0,
            "checkpoint_every": 0,
            "checkpoint_seconds": 0,
            "log_every": 1,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            if not least <= value < float("inf"):
                raise ValueError(f"{name}={value} must be at least {least}, and finite")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads={self.threads} must be at least 1")


@dataclass(frozen=True)
class Options(RunOptions):
    """Where and how a classifier is trained.

    Attributes:
        compile: torch.compile the network.
        decode: what decodes image files. cpu is Pillow in the worker processes. cuda is the GPU's
            own decoder for JPEG, for which they read files; other files go through Pillow. Its
            pixels differ by some levels of 255. auto is cuda where that is possible and there are
            fewer than 12 workers.
        cuda_graphs: replay whole steps as CUDA graphs, which takes the host out of the way.
        monitor_every: updates between looks at the channels, which go to channels.csv; 0 for none.
    """

    compile: bool = False
    decode: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = False
    monitor_every: int = 0

    def __post_init__(self) -> None:
        """Refuse numbers that make no sense."""
        super().__post_init__()
        if self.monitor_every < 0:
            raise ValueError(f"monitor_every={self.monitor_every} must be at least 0")
        if self.monitor_every and self.cuda_graphs:
            raise ValueError("--monitor-every cannot look into --cuda-graphs; leave one away")
