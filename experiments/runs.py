"""What is trained: a recipe with some fields changed, and a seed."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from cenet.detection.recipes import RECIPES as DETECTORS
from cenet.train import RECIPES
from cenet.train.course import Course
from cenet.train.recipes import NETWORK_NAMES

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
    """

    command: ClassVar[tuple[str, ...]] = ("train",)
    recipes: ClassVar[Mapping[str, Course]] = RECIPES
    prefix: ClassVar[str] = ""

    recipe: str
    seed: int = 0
    changes: tuple[tuple[str, Any], ...] = ()
    watched: bool = False

    @property
    def name(self) -> str:
        """Of its folder and of its rows."""
        changed = [f"{field}={value}" for field, value in self.changes]
        watched = ["watched"] if self.watched else []
        return "-".join([self.prefix + self.recipe, *changed, *watched, f"seed{self.seed}"])

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
    def arguments(self) -> list[str]:
        """Of cenet: the command, the recipe, and what differs from it."""
        base, own = self.recipes[self.recipe], self.made
        found = [*self.command, self.recipe]
        for field in fields(own):
            value = getattr(own, field.name)
            if value != getattr(base, field.name):
                values = value if isinstance(value, tuple) else (value,)
                found += [f"--{field.name.replace('_', '-')}", *map(str, values)]
        return found

    def smoke(self) -> "Run":
        """The same row on digits, for one epoch: it shows nothing but that everything works."""
        row = self.recipe.removeprefix(_network_of(self.recipe)).lstrip("_")
        kept = [change for change in self.changes if change[0] not in dict(SMOKE)]
        return replace(self, recipe=f"digits_{row}", changes=(*kept, *SMOKE))


@dataclass(frozen=True)
class DetectorRun(Run):
    """One run of `cenet detect train`.

    Attributes:
        classifier: the run whose weights the backbone starts from.
    """

    command: ClassVar[tuple[str, ...]] = ("detect", "train")
    recipes: ClassVar[Mapping[str, Course]] = DETECTORS
    prefix: ClassVar[str] = "detect_"

    classifier: Run | None = None

    def smoke(self) -> "DetectorRun":
        """The same on drawn shapes, from scratch."""
        recipe = "shapes_plain" if self.recipe.endswith("plain") else "shapes"
        return DetectorRun(recipe, self.seed, SMOKE)


def runs(recipe: str, seeds: int = 1, *, watched: bool = False, **changes: Any) -> list[Run]:
    """One run for each seed; a change that changes nothing is none, so that runs are shared."""
    base = RECIPES[recipe]
    changes = {name: value for name, value in changes.items() if value != getattr(base, name)}
    return [Run(recipe, seed, tuple(changes.items()), watched) for seed in range(seeds)]


def _network_of(recipe: str) -> str:
    """The first part of a recipe's name: tiny_resnet50_gn_ce -> tiny_resnet50."""
    prefixes = [f"{kind}{network}" for kind in ("", "tiny_") for network in NETWORK_NAMES]
    return max((name for name in prefixes if recipe.startswith(f"{name}_")), key=len)
