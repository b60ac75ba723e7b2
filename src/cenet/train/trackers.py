"""Send runs to Weights & Biases or MLflow: settings once, numbers after each epoch.

The destination is set as these packages document it: by `wandb login` and WANDB_PROJECT, or by
MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME.
"""

from typing import Any, Protocol

from cenet.train.options import Service


class Tracker(Protocol):
    """A run as a service knows it.

    Attributes:
        id: name of the run at the service, with which it continues after an interruption.
    """

    id: str

    def add(self, numbers: dict[str, float], epoch: int) -> None:
        """Add the numbers of an epoch."""
        ...

    def end(self) -> None:
        """Tell the service that this start of the run has ended."""
        ...


class WandB:
    """A run of Weights & Biases."""

    def __init__(self, name: str, settings: dict[str, Any], known: str | None) -> None:
        """Begin a run, or go on with the one of id `known`."""
        import wandb

        self._run: Any = wandb.init(
            name=name, config=settings, id=known, resume=None if known is None else "allow"
        )
        self.id = str(self._run.id)

    def add(self, numbers: dict[str, float], epoch: int) -> None:
        """See `Tracker`."""
        self._run.log(numbers, step=epoch)

    def end(self) -> None:
        """See `Tracker`."""
        self._run.finish()


class MLflow:
    """A run of MLflow."""

    def __init__(self, name: str, settings: dict[str, Any], known: str | None) -> None:
        """Begin a run, or go on with the one of id `known`."""
        import mlflow

        self._mlflow: Any = mlflow
        if known is None:
            self.id = str(mlflow.start_run(run_name=name).info.run_id)
            mlflow.log_params(settings)
        else:
            self.id = str(mlflow.start_run(run_id=known).info.run_id)

    def add(self, numbers: dict[str, float], epoch: int) -> None:
        """See `Tracker`."""
        self._mlflow.log_metrics(numbers, step=epoch, run_id=self.id)

    def end(self) -> None:
        """See `Tracker`."""
        self._mlflow.end_run()


def begin(service: Service, name: str, settings: dict[str, Any], known: str | None) -> Tracker:
    """Begin a run at a service, or continue it.

    Args:
        service: name of the service.
        name: name of a new run.
        settings: its recipe.
        known: id of the run to continue, or None.

    Raises:
        ValueError: the service does not answer, or refuses.
    """
    kind: Any = {"wandb": WandB, "mlflow": MLflow}[service]
    try:
        tracker: Tracker = kind(name, settings, known)
    except Exception as error:  # each service has errors of its own
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"--log-to {service}: {reason}") from error
    return tracker
