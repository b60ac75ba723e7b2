"""Networks as a chain of stages with timm's interface, for networks that timm does not have."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.layers.classifier import create_classifier
from timm.models import checkpoint
from timm.models._features import feature_take_indices
from torch import Tensor, nn

# activations that our kernels can apply
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ELU)


class Staged(nn.Module):
    """A network that is a chain of modules, a pooling and a classifier `fc`.

    Attributes:
        steps: names of the modules of the chain, in order, in groups that are recomputed together.
        feature_info: which of them end in a feature map that users ask for.
    """

    steps: tuple[tuple[str, ...], ...]
    feature_info: list[dict[str, Any]]
    num_features: int
    num_classes: int

    def set_chain(
        self, steps: Iterable[tuple[str, ...]], features: Iterable[tuple[str, int, int]]
    ) -> None:
        """Set the chain, and of each feature map its module, channels and reduction."""
        self.steps = tuple(steps)
        self.feature_info = [
            {"module": module, "num_chs": channels, "reduction": reduction}
            for module, channels, reduction in features
        ]
        self.grad_checkpointing = False

    def set_head(self, num_features: int, num_classes: int, global_pool: str, drop: float) -> None:
        """Set pooling and classifier."""
        self.num_features = self.head_hidden_size = num_features
        self.drop_rate = drop
        self.reset_classifier(num_classes, global_pool)

    def reset_classifier(self, num_classes: int, global_pool: str = "avg") -> None:
        """Replace the classifier; 0 classes leave the pooled features."""
        if num_classes > 0 and not global_pool:
            raise ValueError(f"global_pool={global_pool!r} leaves a map, which has no classes")
        self.num_classes = num_classes
        pool, fc = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        self.global_pool, self.fc = pool.train(self.training), fc.train(self.training)

    def get_classifier(self) -> nn.Module:
        """The classifier."""
        return self.get_submodule("fc")

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the chain in backward instead of keeping its activations."""
        self.grad_checkpointing = enable

    def forward_features(self, x: Tensor) -> Tensor:
        """Images to the last feature map."""
        for step in self.steps:
            run = self._run(step)
            x = checkpoint(run, x) if self.grad_checkpointing else run(x)
        return x

    def _run(self, step: tuple[str, ...]) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            for _, call in self._calls(step):
                x = call(x)
            return x

        return run

    def _calls(self, names: Iterable[str]) -> list[tuple[str, Callable[[Tensor], Tensor]]]:
        """Calls of modules one after the other, each with the name of what it ends in.

        A norm that can apply the activation behind it is called with that, in one.
        """
        calls: list[tuple[str, Callable[[Tensor], Tensor]]] = []
        for name in names:
            module = self.get_submodule(name)
            if calls and isinstance(module, ACTIVATIONS) and _takes_activation(calls[-1][1]):
                calls[-1] = name, _with_activation(calls[-1][1], module)
            else:
                calls.append((name, module))
        return calls

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Last feature map to logits, or to the features before the classifier."""
        x = self.global_pool(x)
        if self.drop_rate > 0:
            x = torch.nn.functional.dropout(x, self.drop_rate, self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Feature maps, as in timm: all, the last so many, or those of the indices."""
        if output_fmt != "NCHW":
            raise ValueError(f'output_fmt={output_fmt!r} must be "NCHW"')
        taken, last = feature_take_indices(len(self.feature_info), indices)
        wanted = {self.feature_info[index]["module"] for index in taken}
        end = self.feature_info[last]["module"]
        found = []
        for name, call in self._calls(name for step in self.steps for name in step):
            x = call(x)
            if name in wanted:
                found.append(x)
            if name == end and (stop_early or intermediates_only):
                break
        return found if intermediates_only else (x, found)


def _takes_activation(module: Any) -> bool:
    return getattr(module, "takes_residual", False) and getattr(module, "act", None) is None


def _with_activation(norm: Any, act: nn.Module) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        y: Tensor = norm(x, None, act)
        return y

    return call
