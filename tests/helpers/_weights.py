"""Random weights of large networks in a tenth of the time."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

# prime, so that no two channels of a convolution begin at the same value
PERIOD = 16381


@contextmanager
def repeated_draws() -> Iterator[None]:
    """Draw at most PERIOD values for a tensor, and repeat them until it is full.

    Drawing takes most of the time in which large networks are built.
    A seed gives the same weights each time, other ones than without this.
    """

    def repeating(draw: Any) -> Any:
        def fill(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            whole = type(self) in (torch.Tensor, torch.nn.Parameter) and self.is_contiguous()
            if not whole or self.device.type != "cpu" or self.numel() <= PERIOD:
                return draw(self, *args, **kwargs)
            with torch.no_grad():
                values = draw(self.new_empty(PERIOD), *args, **kwargs)
                rows, rest = divmod(self.numel(), PERIOD)
                flat = self.view(-1)
                flat[: rows * PERIOD].view(rows, PERIOD).copy_(values)
                flat[rows * PERIOD :].copy_(values[:rest])
            return self

        return fill

    with pytest.MonkeyPatch.context() as patch:
        for name in ("uniform_", "normal_"):
            patch.setattr(torch.Tensor, name, repeating(getattr(torch.Tensor, name)))
        yield
