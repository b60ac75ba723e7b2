"""Tables 1 and 2: accuracy, multiply-adds and inference time of networks plain, with SE and with
CE."""

from collections.abc import Sequence

import torch

from _experiment import Study
from cenet.models.cost import cost
from cenet.models.timing import time_inference

# as `time_inference` calls them
TIMED = {"plain": "plain", "se": "SE", "ce": "CE folded"}


def networks_table(found: Study, compared: Sequence[tuple[str, str, float, float]]) -> None:
    """Accuracies beside the paper's, multiply-adds, and inference time as ratios to plain.

    Args:
        found: the study.
        compared: network, block, and the paper's top-1 in percent and billions of multiply-adds.
    """
    rows = []
    device = "cuda" if torch.cuda.is_available() and found.device != "cpu" else "cpu"
    ratios: dict[str, dict[str, float]] = {}
    for network, block, paper_top1, paper_gflops in compared:
        run = found.run(f"{network}_{block}")
        if network not in ratios:
            # a smoke test is not about time
            batch, rounds = (1, 1) if found.smoke else (32, 5)
            timed = time_inference(
                network, device=device, batch=batch, rounds=rounds, size=None, compiled=False
            )
            ratios[network] = {row.name: row.ratio for row in timed}
            plain, _, folded = cost(network).multiply_adds
            counted = {"plain": plain / 1e9, "ce": folded / 1e9}
        rows.append(
            {
                "network": network, "row": block, "top1": run.top1, "top5": run.top5,
                "paper_top1": paper_top1 / 100, "gflops": counted.get(block, ""),
                "paper_gflops": paper_gflops, f"time_{device}": ratios[network][TIMED[block]],
            }
        )  # fmt: skip
    found.write(rows)
