"""The command line: list, train, build, merge; see `python -m experiments --help`."""

import argparse
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from zlib import crc32

from rich.console import Console
from rich.table import Column, Table

import experiments
from experiments.building import PAGES, ROOT, built, page_built, write
from experiments.catalogue import RESULTS
from experiments.costs import in_words, seconds
from experiments.result import Result, Rows
from experiments.runs import Run
from experiments.scheduling import LARGE_IMAGES, SMALL, Schedule, Settings, state
from experiments.tables import RESULTS as FOLDER
from experiments.tables import merge, names, read

NARROW = 76  # columns of a terminal that the list takes without titles
TITLES = 44  # columns that are worth showing of a title


def main() -> None:
    """What the command line asks for."""
    arguments = parse()
    chosen = {name: RESULTS[name] for name in arguments.names or RESULTS}
    if arguments.command == "build":
        build(chosen, arguments)
    elif arguments.command == "merge":
        for source in arguments.folders:
            for name in merge(source, arguments.results):
                print(f"added {name}")
    elif arguments.command == "train":
        train(chosen, arguments)
    else:
        show(chosen, arguments)


def parse() -> argparse.Namespace:
    """The command line; errors end the program."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments", description=experiments.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    commands = parser.add_subparsers(dest="command", required=True)
    listing = commands.add_parser("list", help="list finished and missing runs, and their cost")
    listing.add_argument("--every-run", action="store_true", help="list each run by name")
    training = commands.add_parser("train", help="train and measure the missing runs")
    building = commands.add_parser("build", help="write tables and figures from the rows")
    building.add_argument("--out", type=Path, default=ROOT, help="folder above docs/")
    for command in (listing, training, building):
        command.add_argument(
            "names", nargs="*", metavar="NAME", help="figures and tables; default: all"
        )
        command.add_argument("--smoke", action="store_true", help="run on digits, for one epoch")
    for command in (listing, training):
        command.add_argument("--runs", type=Path, default=ROOT / "experiments/out/runs")
        command.add_argument("--seeds", type=int, help="largest number of seeds of each row")
    merging = commands.add_parser("merge", help="add rows of another machine")
    merging.add_argument("folders", nargs="+", type=Path, help="folders with runs.csv")
    for command in (listing, training, building, merging):
        command.add_argument("--results", type=Path, default=FOLDER, help="folder of the rows")
    training.add_argument("--data", nargs="*", default=[], metavar="SET=FOLDER",
                          help="dataset folders: imagenet=… cifar10=… tinyimagenet=…")  # fmt: skip
    training.add_argument("--jobs", type=int, default=1, help="number of runs at the same time")
    training.add_argument(
        "--processes", type=int, default=1, help="processes of each run, started by torchrun"
    )
    training.add_argument(
        "--task",
        metavar="I/N",
        help="run the I-th of N parts of the runs (I from 0), for job arrays",
    )
    training.add_argument(
        "--minutes", type=float, default=float("inf"), metavar="M",
        help="after M minutes trainings save and stop, and measurements finish",
    )  # fmt: skip
    training.add_argument(
        "--whole-runs", action="store_true",
        help="begin only runs that are expected to end within --minutes, for machines whose files "
        "are not kept",
    )  # fmt: skip
    training.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    training.add_argument(
        "--ablation-images", type=_images, metavar="N|all",
        help="test images of the ablation curve, which runs the network on each about 60 times and "
        f"once for each channel of the layer; default: all images of up to {SMALL}×{SMALL} pixels "
        "(10,000 of CIFAR-10: 1.9 million passes of VGG-16, an estimated half minute of an H200), "
        f"and {LARGE_IMAGES} of larger images (ResNet-50: 0.6 million passes, an estimated two "
        "minutes; all 50,000 of ImageNet take ten times as long and 30 GB of the GPU)",
    )  # fmt: skip
    training.add_argument(
        "--commit", default="", help="commit of this code, if git is not available"
    )
    training.add_argument("--options", nargs=argparse.REMAINDER, default=[],
                          help="options of `cenet train`: everything that follows")  # fmt: skip
    found = parser.parse_args()
    found.names = getattr(found, "names", [])
    unknown = sorted(set(found.names) - set(RESULTS))
    if unknown:
        parser.error(f"{', '.join(unknown)} is none of {', '.join(RESULTS)}")
    if found.command == "train":
        check(parser, found)
    return found


def _images(text: str) -> int | str:
    """A number of images, or all."""
    if text != "all" and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} must be a whole number or all")
    return text if text == "all" else int(text)


def check(parser: argparse.ArgumentParser, found: argparse.Namespace) -> None:
    """Refuse what cannot be."""
    wrong = [
        pair for pair in found.data if "=" not in pair or not Path(pair.split("=", 1)[1]).is_dir()
    ]
    if wrong:
        parser.error(f"--data {wrong[0]} must be SET=FOLDER with a folder that exists")
    found.data = {
        name: Path(folder) for name, folder in (pair.split("=", 1) for pair in found.data)
    }
    if found.whole_runs and found.minutes == float("inf"):
        parser.error("--whole-runs needs --minutes M, in which they have to end")
    for name in ("jobs", "processes"):
        if getattr(found, name) < 1:
            parser.error(f"--{name} {getattr(found, name)} must be at least 1")
    if found.task is not None:
        index, _, count = found.task.partition("/")
        if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
            parser.error(f"--task {found.task} must be I/N with I from 0 to N - 1")
        found.task = int(index), int(count)


def needed(chosen: dict[str, Result], arguments: argparse.Namespace) -> list[Run]:
    """The runs of these results that are known by now, each once.

    Runs that others have chosen come first: they complete rows of a table.
    """
    rows = Rows(arguments.results, smoke=arguments.smoke)
    found = [run for result in chosen.values() for run in (*result.then(rows), *result.needs)]
    if arguments.smoke:
        found = [run.smoke() for run in found]
    if arguments.seeds is not None:
        found = [run for run in found if run.seed < arguments.seeds]
    return list(dict.fromkeys(found))


def show(chosen: dict[str, Result], arguments: argparse.Namespace) -> None:
    """The dry run."""
    rows, known = read("runs", arguments.results), names(arguments.results)
    settings = Settings(runs=arguments.runs, results=arguments.results)
    console = Console()
    if arguments.every_run:
        table = Table(Column("run", overflow="fold"), "state", "one H200, about")
        for run in needed(chosen, arguments):
            found = state(run, settings, known)
            cost = "" if found == "finished" else in_words(seconds(run, rows))
            table.add_row(run.name, found, cost)
        console.print(table)
        return
    room = console.width - NARROW
    shows = [Column("shows", no_wrap=True, max_width=room)] if room >= TITLES else []
    numbers = [Column(text, no_wrap=True) for text in ("runs", "finished", "missing, on one H200")]
    table = Table(Column("name", no_wrap=True), *shows, *numbers)
    for name, result in chosen.items():
        own = needed({name: result}, arguments)
        missing = [run for run in own if run.name not in known]
        cost = in_words(sum(seconds(run, rows) for run in missing)) if missing else ""
        count = str(len(own))
        chosen_now = len(result.then(Rows(arguments.results, arguments.smoke)))
        if (later := result.later - chosen_now) > 0:
            count += f" + {later}"
        title = [result.title] if shows else []
        table.add_row(name, *title, count, str(len(own) - len(missing)), cost)
    every = needed(chosen, arguments)
    left = [run for run in every if run.name not in known]
    table.caption = (
        f"{len(every)} runs, of which {len(left)} are missing: about "
        f"{in_words(sum(seconds(run, rows) for run in left))}. Figures and tables share runs; "
        "numbers after a + are runs that the runs before them choose; their cost is not counted."
        + ("" if shows else f" From {NARROW + TITLES} columns on, titles are shown too.")
    )
    console.print(table)


def train(chosen: dict[str, Result], arguments: argparse.Namespace) -> None:
    """Train and measure what is missing."""
    settings = Settings(
        data=arguments.data, runs=arguments.runs, results=arguments.results,
        options=tuple(arguments.options), jobs=arguments.jobs,
        processes=arguments.processes, minutes=arguments.minutes,
        whole_runs=arguments.whole_runs,
        ablation_images=arguments.ablation_images, device=arguments.device,
        commit=arguments.commit,
    )  # fmt: skip
    schedule = Schedule(settings, lambda line: print(f"{time.strftime('%X')} {line}", flush=True))
    said: set[str] = set()

    def todo() -> list[Run]:
        found = needed(chosen, arguments)
        if arguments.task is not None:
            index, count = arguments.task
            found = [run for run in found if crc32(run.name.encode()) % count == index]
        known = names(settings.results)
        coming = [run for run in found if run.name not in known]
        firsts = [run.begins_with for run in coming if run.begins_with is not None]
        # their rows are here, and their weights on a machine that is gone: train them again
        lost = [
            run
            for run in dict.fromkeys(firsts)
            if run.name in known and not settings.has_weights(run) and settings.lacks(run) is None
        ]
        expected = {*coming, *lost}
        lacking = Counter(settings.lacks(run) for run in coming if run.begins_with not in expected)
        for what, count in lacking.items():
            if what is not None and what not in said:
                said.add(what)
                print(f"{count} runs are left out: there is no {what}")
        return [*lost, *(run for run in coming if settings.lacks(run) is None)]

    # as Ctrl-C does: runs save and stop before this process ends
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    left = schedule.finish(todo)
    if left:
        first = f"{left[0].name} (alone on an H200 about {in_words(_cost(left[0], settings))})"
        print(f"{len(left)} runs are not finished, from {first} on; the same command goes on")
    if schedule.failed:
        sys.exit(
            f"{len(schedule.failed)} runs failed: {', '.join(run.name for run in schedule.failed)}"
        )


def _cost(run: Run, settings: Settings) -> float:
    return seconds(run, read("runs", settings.results))


def build(chosen: dict[str, Result], arguments: argparse.Namespace) -> None:
    """Figures, and the blocks of the pages."""
    made = built(chosen, Rows(arguments.results, smoke=arguments.smoke))
    for path in write(made, arguments.out, smoke=arguments.smoke):
        print(f"wrote {path}")
    if arguments.smoke:
        return
    for page in PAGES:
        own = arguments.out / page.relative_to(ROOT)
        text = own.read_text()
        if (new := page_built(page, text, made)) != text:
            own.write_text(new)
            print(f"wrote {own}")


if __name__ == "__main__":
    main()
