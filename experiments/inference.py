"""Inference cost of networks compared with the paper, from `benchmarks/bench_inference.py`."""

from functools import partial
from typing import NamedTuple

from experiments.result import Built, Result, Rows
from experiments.tables import read

TABLE = "inference"
DEVICES = {"cpu": "CPU", "cuda": "GPU"}


class Line(NamedTuple):
    """A network, and what the paper says of it.

    Attributes:
        network: its title.
        name: as in `cenet.models`.
        block: plain, se or ce.
        billions: multiply-adds.
        cpu, cuda: seconds for 32 images; None where the paper gives none.
    """

    network: str
    name: str
    block: str
    billions: float
    cpu: float | None = None
    cuda: float | None = None


def inference_table(name: str, title: str, claim: str, lines: tuple[Line, ...]) -> Result:
    """Multiply-adds, and times as ratios to the plain network."""
    return Result(name, title, claim, (), partial(_build, lines))


def _build(lines: tuple[Line, ...], rows: Rows) -> Built:
    measured = {
        (row["network"], row["block"], row["device"]): row for row in read(TABLE, rows.folder)
    }
    table = []
    first: dict[str, Line] = {}
    for line in lines:
        plain = first.setdefault(line.name, line)
        own = {device: measured.get((line.name, line.block, device)) for device in DEVICES}
        some = next((row for row in own.values() if row is not None), None)
        cells = {
            "network": line.network,
            "": {"plain": "plain"}.get(line.block, line.block.upper()),
        }
        cells["multiply-adds (10⁹)"] = (
            "not run" if some is None else f"{float(some['multiply_adds']) / 1e9:.3f}"
        )
        cells["paper's"] = f"{line.billions}"
        for device, text in DEVICES.items():
            row = own[device]
            ours = "not run" if row is None else f"{float(row['ratio_to_plain']):.2f}"
            theirs, base = getattr(line, device), getattr(plain, device)
            cells[f"{text} time / plain"] = ours
            cells[f"paper's {text} time / plain"] = f"{theirs / base:.2f}" if theirs else ""
        table.append(cells)
    return Built(table)
