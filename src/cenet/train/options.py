"""Options of a run that do not belong to its recipe: folders, checkpoints, worker processes."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

Service = Literal["wandb", "mlflow"]


@dataclass(frozen=True)
class RunOptions:
    """Options for running any recipe; they change results by rounding only.

    Attributes:
        out: folder of the run.
        resume: auto continues from the newest undamaged checkpoint in `out`, if there is one. never
            starts anew, and stops with an error if `out` already has a checkpoint.
        workers: processes that read and decode image files.
        channels_last: memory layout of images and weights.
        checkpoint_every: updates between checkpoints; 0 writes one after each epoch only.
        checkpoint_seconds: seconds between checkpoints. They are then written by time alone, also
            in the middle of an epoch, and not at the end of each epoch. 0 writes one after each
            epoch.
        log_every: on a GPU, updates between readings of the loss; a reading waits for the GPU. The
            loss that was read is shown on a terminal, and ends the run if it is not finite. On a
            CPU it is read at every update.
        threads: CPU threads; by default torch's own number, or 1 for images smaller than 32×32
            pixels, where threads would mostly wait for each other. On a machine that others use, 1
            may be many times faster.
        log_to: also send the metrics to Weights & Biases or MLflow. Files for TensorBoard are
            always written where it is installed.
    """

    out: Path
    resume: Literal["auto", "never"] = "never"
    workers: int = 2
    channels_last: bool = False
    checkpoint_every: int = 0
    checkpoint_seconds: float = 0.0
    log_every: int = 50
    threads: int | None = None
    log_to: Service | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        least_values = {
            "workers": 0,
            "checkpoint_every": 0,
            "checkpoint_seconds": 0,
            "log_every": 1,
        }
        for name, least in least_values.items():
            value = getattr(self, name)
            if not least <= value < float("inf"):
                option, finite = f"--{name.replace('_', '-')}", isinstance(value, float)
                end = ", and finite" if finite else ""
                raise ValueError(f"{option} {value} must be at least {least}{end}")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"--threads {self.threads} must be at least 1")
        if self.log_to is not None and find_spec(self.log_to) is None:
            raise ValueError(f"{self.log_to} is not installed; pip install {self.log_to}")


@dataclass(frozen=True)
class Options(RunOptions):
    """Options for training a classifier.

    Attributes:
        compile: torch.compile the network.
        decode: where image files are decoded. cpu: by Pillow in the worker processes. cuda: JPEG
            files by the GPU's own decoder, for which the workers only read files; its pixels
            differ by some levels of 255, and other files still go through Pillow. auto: cuda where
            that is possible and there are fewer than 12 workers.
        cuda_graphs: replay whole steps as CUDA graphs, so that the host does not slow them down.
        monitor_every: updates between measurements of the channels, which are written to
            channels.csv; 0 for none.
    """

    compile: bool = False
    decode: Literal["auto", "cpu", "cuda"] = "auto"
    cuda_graphs: bool = False
    monitor_every: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for numbers out of range."""
        super().__post_init__()
        if self.monitor_every < 0:
            raise ValueError(f"monitor_every={self.monitor_every} must be at least 0")
        if self.monitor_every and self.cuda_graphs:
            raise ValueError("--monitor-every does not work with --cuda-graphs; remove one of them")
