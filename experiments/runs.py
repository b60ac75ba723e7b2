"""A training run: a recipe with some fields changed, and a seed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

from typing_extensions import override

from cenet.detection.recipes import RECIPES as DETECTORS
from cenet.run_folder import WEIGHTS
from cenet.train import RECIPES
from cenet.train.recipes import TrainingRecipe
from experiments.lasting import ABOUT
from experiments.lasting import Course as Tasks

# of `cenet train` on a GPU; the first moves numbers, and each row says it
ON_GPU = ("--precision", "bfloat16", "--channels-last")
LOOK_EVERY = 400  # updates between looks at the channels of a watched run
# what is compared over many tasks
LASTING: dict[str, dict[str, Any]] = {
    "bn": {"block": "plain"},
    "ln": {"block": "plain", "norm": "ln"},
    "bd": {"block": "bd"},
    "ir": {"block": "ir"},
    "ce": {"block": "ce"},
}
# of a recipe that is trained on small images instead, to see that everything works
SMOKE = (("epochs", 1), ("warmup_epochs", 0))


@dataclass(frozen=True)
class Run:
    """One run of `cenet train`.

    Attributes:
        recipe: its name.
        seed: of the run.
        changes: fields of the recipe and their values.
        watched: look at the channels while it trains, which CUDA graphs do not allow.
        begins_with: the run whose weights it begins with; None for random ones.
    """

    module: ClassVar[str] = "cenet"
    command: ClassVar[tuple[str, ...]] = ("train",)
    recipes: ClassVar[Mapping[str, TrainingRecipe]] = RECIPES
    prefix: ClassVar[str] = ""
    finished_by: ClassVar[str] = WEIGHTS  # the file that is written last
    weights_option: ClassVar[str] = "--weights"
    begun: ClassVar[str] = "finetuned"  # in the names of runs that begin with weights

    recipe: str
    seed: int = 0
    changes: tuple[tuple[str, Any], ...] = ()
    watched: bool = False
    begins_with: "Run | None" = None

    @property
    def name(self) -> str:
        """Of its folder and of its rows."""
        changed = [f"{field}={value}" for field, value in self.changes]
        watched = "watched" if self.watched else ""
        begun = "" if self.begins_with is None else self.begun
        parts = [self.prefix + self.recipe, *changed, watched, begun, f"seed{self.seed}"]
        return "-".join(filter(None, parts))

    @property
    def is_diagnosed(self) -> bool:
        """Whether its channels are measured in the end."""
        return not self.is_trial

    @property
    def is_trial(self) -> bool:
        """Whether it only helps to choose settings, on training images that are held out."""
        return bool(getattr(self.made, "holdout", 0))

    @property
    def made(self) -> Any:
        """The recipe with its changes; of fewer epochs, what happens in between happens earlier."""
        recipe: Any = replace(self.recipes[self.recipe], seed=self.seed)
        changes = dict(self.changes)
        epochs = changes.get("epochs", recipe.epochs)
        if epochs != recipe.epochs:
            share = epochs / recipe.epochs
            early = sorted({max(1, round(share * epoch)) for epoch in recipe.milestones})
            changes.setdefault("milestones", tuple(early))
            changes.setdefault("warmup_epochs", min(recipe.warmup_epochs, epochs / 4))
        return replace(recipe, **changes)

    @property
    def dataset(self) -> str:
        """What it is trained on."""
        found: str = self.made.dataset
        return found

    @property
    def epochs(self) -> int:
        """Until it is finished."""
        found: int = self.made.epochs
        return found

    def options(self, *, on_gpu: bool) -> list[str]:
        """Of the command, that move no number by more than rounding, but for the precision."""
        found = ["--resume", "auto", *(ON_GPU if on_gpu else ())]
        if self.watched:
            return [*found, "--monitor-every", str(LOOK_EVERY)]
        return [*found, "--cuda-graphs"] if on_gpu else found

    @property
    def arguments(self) -> list[str]:
        """Of cenet: the command, the recipe, and what differs from it."""
        base, own = self.recipes[self.recipe], self.made
        found = [*self.command, self.recipe]
        for field in fields(own):
            value = getattr(own, field.name)
            name = field.name.replace("_", "-")
            if value == getattr(base, field.name):
                continue
            if isinstance(value, bool):
                found.append(f"--{name}" if value else f"--no-{name}")
            else:
                values = value if isinstance(value, tuple) else (value,)
                found += [f"--{name}", *map(str, values)]
        return found

    def smoke(self) -> "Run":
        """The same row on digits, for one epoch: it shows nothing but that everything works."""
        wanted = RECIPES[self.recipe]
        recipe = next(
            name
            for name, other in RECIPES.items()
            if other.dataset == "digits"
            and (other.block, other.norm, other.act) == (wanted.block, wanted.norm, wanted.act)
        )
        kept = [change for change in self.changes if change[0] not in {"dataset", *dict(SMOKE)}]
        begins_with = None if self.begins_with is None else self.begins_with.smoke()
        return replace(self, recipe=recipe, changes=(*kept, *SMOKE), begins_with=begins_with)


@dataclass(frozen=True)
class DetectorRun(Run):
    """One run of `cenet detect train`; what it begins with are the weights of its backbone."""

    command: ClassVar[tuple[str, ...]] = ("detect", "train")
    recipes: ClassVar[Mapping[str, TrainingRecipe]] = DETECTORS
    prefix: ClassVar[str] = "detect_"
    begun: ClassVar[str] = ""
    weights_option: ClassVar[str] = "--checkpoint"

    @property
    @override
    def is_diagnosed(self) -> bool:
        return False

    @property
    @override
    def is_trial(self) -> bool:
        return False

    @override
    def options(self, *, on_gpu: bool) -> list[str]:
        # rows have the AP of the last epoch only
        found = ["--resume", "auto", "--evaluate-every", str(self.epochs)]
        return [*found, *(ON_GPU if on_gpu else ())]

    def smoke(self) -> "DetectorRun":
        """The same on drawn shapes, from scratch."""
        recipe = "shapes_plain" if self.recipe.endswith("plain") else "shapes"
        return DetectorRun(recipe, self.seed, SMOKE)


@dataclass(frozen=True)
class LastingRun(Run):
    """One run of `python -m experiments.lasting`: task after task, each with other labels.

    Attributes:
        recipe: a row of `LASTING`.
    """

    module: ClassVar[str] = "experiments.lasting"
    prefix: ClassVar[str] = "lasting_"
    finished_by: ClassVar[str] = ABOUT

    @property
    @override
    def is_diagnosed(self) -> bool:
        return False

    @property
    def made(self) -> Tasks:
        """The course with its changes."""
        return replace(Tasks(**LASTING[self.recipe], seed=self.seed), **dict(self.changes))

    @property
    @override
    def dataset(self) -> str:
        return "digits" if self.made.network == "vgg6" else "cifar10"

    @property
    def epochs(self) -> int:
        """Of all tasks."""
        return self.made.tasks * self.made.epochs

    def options(self, *, on_gpu: bool) -> list[str]:
        """See `Run`: none."""
        return []

    @property
    @override
    def arguments(self) -> list[str]:
        base, own = asdict(Tasks()), asdict(self.made)
        return [
            part
            for name, value in own.items()
            if value != base[name]
            for part in (f"--{name.replace('_', '-')}", str(value))
        ]

    def smoke(self) -> "LastingRun":
        """Two short tasks on digits."""
        small = {"network": "vgg6", "tasks": 2, "epochs": 1, "images": 256}
        return replace(self, changes=(*self.changes, *small.items()))


def runs(recipe: str, seeds: int = 1, *, watched: bool = False, **changes: Any) -> list[Run]:
    """One run for each seed, named by its changes: those that change nothing are left out."""
    base = RECIPES[recipe]
    changes = {name: value for name, value in changes.items() if value != getattr(base, name)}
    return [Run(recipe, seed, tuple(sorted(changes.items())), watched) for seed in range(seeds)]
