"""Shared by the benchmarks: clock, alternating rounds, peak memory, CSV rows."""

import copy
import csv
import gc
import importlib.util
import os
import platform
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cenet
import cenet.environment

Run = Callable[[], object]

RESULTS = Path(__file__).parent / "results"
FIELDS = (
    *("op", "provider", "mode", "shape", "dtype", "layout"),
    *("ms_p20", "ms_p50", "ms_p80", "peak_mb"),
    *("gpu", "torch", "triton", "version", "commit"),
)
SAMPLE_MS = 5.0
MB = 2**20


class Timing(NamedTuple):
    p20: float
    p50: float
    p80: float

    def scaled(self, factor: float) -> "Timing":
        return Timing(*(factor * value for value in self))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def seconds(run: Run, device: torch.device) -> float:
    """Wall time of one call, the work that it queues on the device included."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def folded_plain(model: nn.Module) -> nn.Module:
    """A network without CE, with its batch norms folded by torch's own tool; checked on noise."""
    from timm.layers import BatchNormAct2d
    from torch.fx.experimental.optimization import fuse

    model = copy.deepcopy(model).eval()
    separate = copy.deepcopy(model)
    for name, norm in list(separate.named_modules()):
        if isinstance(norm, BatchNormAct2d):  # torch's tool only knows norm and activation apart
            own = nn.BatchNorm2d(norm.num_features, norm.eps)
            own.load_state_dict(norm.state_dict())
            separate.set_submodule(name, nn.Sequential(own, norm.act).eval())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folded: nn.Module = fuse(separate)
    first = next(model.parameters())
    x = torch.randn(2, 3, 64, 64, device=first.device, dtype=first.dtype)
    with torch.no_grad():
        expected = model(x)
        error = ((folded(x) - expected).norm() / expected.norm()).item()
    # a GPU may compute in tf32
    limit = 1e-4 if first.device.type == "cpu" and first.dtype is torch.float32 else 3e-2
    assert error < limit, f"the folded network is off by {error:.1e}"
    assert not any("Norm" in type(module).__name__ for module in folded.modules())
    return folded


def _mark(device: torch.device) -> "torch.cuda.Event | float":
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _milliseconds(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
    return 1e3 * (end - start) if isinstance(start, float) else start.elapsed_time(end)


def _timed(run: Run, repeats: int, device: torch.device) -> tuple:
    start = _mark(device)
    for _ in range(repeats):
        run()
    return start, _mark(device)


def _repeats(run: Run, device: torch.device) -> int:
    """Warm up, and count the runs that fill a sample."""
    for _ in range(3):
        run()
    synchronize(device)
    marks = _timed(run, 3, device)
    synchronize(device)
    return max(1, round(3 * SAMPLE_MS / _milliseconds(*marks) + 0.5))


def interleave(runs: dict[str, Run], rounds: int, device: torch.device) -> dict[str, Timing]:
    """Time of one call of each, the runs taking turns so that drift of the machine hits all alike.

    Percentiles over `rounds` samples, each the mean over at least SAMPLE_MS of calls.
    """
    repeats = {name: _repeats(run, device) for name, run in runs.items()}
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        marks = {}
        for name, run in runs.items():
            # one call before the clock starts: the queue of the device is then not empty, and the
            # launch of the first kernel is not counted
            run()
            marks[name] = _timed(run, repeats[name], device)
        synchronize(device)
        for name, (start, end) in marks.items():
            samples[name].append(_milliseconds(start, end) / repeats[name])
    return {name: percentiles(values) for name, values in samples.items()}


def percentiles(values: list[float]) -> Timing:
    if len(values) == 1:
        return Timing(values[0], values[0], values[0])
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return Timing(fifths[0], statistics.median(values), fifths[-1])


def peak_mb(run: Run, device: torch.device) -> float | None:
    """Most memory allocated during one call over what was allocated before; None on a CPU."""
    if device.type != "cuda":
        return None
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del kept
    return peak / MB


def first_run(name: str, run: Callable[[], Any], device: torch.device, *, compiled: bool) -> Any:
    """Result of the first call; if that compiles, say how long it took."""
    graphs = torch._dynamo.utils.counters["stats"]
    before, started = graphs["unique_graphs"], time.perf_counter()
    result = run()
    synchronize(device)
    if compiled:
        print(f"  {name}: compiled in {time.perf_counter() - started:.0f} s", flush=True)
        if graphs["unique_graphs"] == before:
            raise AssertionError("nothing was compiled: it runs the code of another provider")
    return result


def static_compile(module: nn.Module, mode: str | None = None) -> Callable[..., Any]:
    """Compile for static shapes and in one graph: what is timed is then never partly eager."""
    # without a limit to reach, nothing falls back to eager silently
    torch._dynamo.config.recompile_limit = 64
    return torch.compile(module, fullgraph=True, dynamic=False, mode=mode)


class Failures(list[str]):
    """Where something failed."""

    @contextmanager
    def caught(self, where: str, device: torch.device) -> Iterator[None]:
        """Report an error and go on with the rest."""
        try:
            yield
        except Exception as error:
            self.append(where)
            known = isinstance(error, AssertionError)
            reason = str(error) if known else "".join(traceback.format_exception(error)[-4:])
            print(f"  FAILED {where}: {reason.strip()[-1500:]}", flush=True)
        free_memory(device)

    def exit_code(self) -> int:
        for where in self:
            print(f"FAILED {where}")
        return 1 if self else 0


def free_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    expected = expected.double()
    difference = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-12)
    return difference.item()


def require(name: str, error: float, tolerance: float) -> None:
    # written so that a NaN fails
    if not error <= tolerance:
        raise AssertionError(f"{name} is off by {error:.1e}, more than {tolerance:.1e}")


def commit() -> str:
    return os.environ.get("CENET_COMMIT") or cenet.environment.commit() or "unknown"


def cpu_name() -> str:
    """The processor as Linux calls it, elsewhere its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def environment(device: torch.device) -> dict[str, str]:
    triton = "none"
    if importlib.util.find_spec("triton"):
        import triton as module

        triton = module.__version__
    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name() if on_gpu else f"cpu {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton,
        "version": cenet.__version__,
        "commit": commit(),
    }


def row(timing: Timing, peak: float | None, columns: dict[str, str]) -> dict[str, str]:
    times = {f"ms_{name}": f"{value:.4f}" for name, value in timing._asdict().items()}
    return {**columns, **times, "peak_mb": "" if peak is None else f"{peak:.1f}"}


def append_rows(path: Path, rows: list[dict[str, str]], fields: tuple[str, ...] = FIELDS) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or path.stat().st_size == 0
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, fields)
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def dimensions(text: str) -> tuple[int, ...]:
    """`256x64x112x112` -> (256, 64, 112, 112), for argparse."""
    return tuple(int(part) for part in text.split("x"))


def shape_text(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
