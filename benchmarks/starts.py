"""Start two processes by torchrun again and again, on loaded cores, and check how each start ends.

    python benchmarks/starts.py --starts 200 --at-once 3

Starts come in pairs that share a folder: the first is interrupted by SIGTERM to torchrun, the
second finishes the run with `--resume auto`. Half of the interruptions come at a random moment of
the start, half at a random moment after training has begun. Several pairs at once load the cores.

Prints a table of the exit codes of torchrun and of its processes. The script's own exit code is 1
if one of these is wrong, or if a start hangs. A process may end with

    0     finished
    75    interrupted, and everything saved
    143   interrupted while Python was starting; there was nothing to save

An interrupted torchrun ends with 1, or with -6 if it aborts after its processes have ended.
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

TRAINING = ("train", "digits_ce", "--device", "cpu", "--epochs", "2", "--warmup-epochs", "0.5")
HANG = 600  # seconds; a start on loaded cores takes less than a tenth of them
FINISHED, SAVED, NOT_BEGUN = 0, 75, 128 + signal.SIGTERM
# notes the exit code of a process; SIGTERM, which torchrun sends to the shell too, does not end it
NOTED = 'trap : TERM; "$@"; echo $? > "$CODES/$RANK"'


class Ended(NamedTuple):
    """How one start ended."""

    kind: str  # interrupted or finished
    torchrun: int | None  # its exit code; None for a hang
    processes: tuple[int, ...]  # exit codes by rank; of a process that was never started, none
    said: str

    def is_right(self) -> bool:
        """Whether all exit codes are as they should be."""
        if self.torchrun is None:
            return False
        if self.kind == "finished":
            return self.torchrun == 0 and self.processes == (FINISHED, FINISHED)
        if set(self.processes) == {FINISHED} and len(self.processes) == 2:
            return True  # the signal came after the end
        return self.torchrun != 0 and set(self.processes) <= {FINISHED, SAVED, NOT_BEGUN}


def start(folder: Path, kind: str, wait_for: Path | None, seconds: float) -> Ended:
    """Start torchrun in `folder`; interrupt it `seconds` after it began or `wait_for` appeared."""
    codes = folder / f"codes of {kind}"
    codes.mkdir(parents=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--standalone", "--no-python", "sh", "-c", NOTED, "sh"]
    command += [sys.executable, "-m", "cenet", *TRAINING, "--out", str(folder / "run")]
    command += ["--resume", "auto"]
    with (folder / f"{kind}.txt").open("w+") as said:
        process = subprocess.Popen(
            command, stdout=said, stderr=said, env={**os.environ, "CODES": str(codes)}
        )
        begin = time.monotonic()
        if kind == "interrupted":
            while wait_for is not None and not wait_for.exists() and process.poll() is None:
                if time.monotonic() - begin > HANG:
                    break
                time.sleep(0.02)
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                process.terminate()
        try:
            code: int | None = process.wait(HANG)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        said.seek(0)
        text = said.read()
    noted = [codes / str(rank) for rank in range(2)]
    found = tuple(int(note.read_text()) for note in noted if note.exists())
    return Ended(kind, code, found, text)


def pair(folder: Path, number: int, usual: list[float]) -> list[Ended]:
    """An interrupted start, and one that finishes the same run."""
    chance = random.Random(number)
    trained, span = None, sorted(usual)[len(usual) // 2]
    if number % 2:
        trained, span = folder / "run" / "run.json", span / 10
    first = start(folder, "interrupted", trained, chance.uniform(0, span))
    begin = time.monotonic()
    second = start(folder, "finished", None, 0)
    usual.append(time.monotonic() - begin)
    return [first, second]


def main() -> int:
    """Run the starts and print how they ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=3, help="number of pairs that run at once")
    parser.add_argument(
        "--minutes", type=float, default=60, help="minutes after which no new pair begins"
    )
    arguments = parser.parse_args()
    begin, usual = time.monotonic(), [20.0]
    counted: Counter[tuple[object, ...]] = Counter()
    wrong = 0

    def run(number: int) -> list[Ended]:
        if time.monotonic() - begin > 60 * arguments.minutes:
            return []
        with TemporaryDirectory() as folder:
            return pair(Path(folder), number, usual)

    with ThreadPoolExecutor(arguments.at_once) as threads:
        for ends in threads.map(run, range(arguments.starts // 2)):
            for end in ends:
                counted[end.kind, end.torchrun, end.processes, end.is_right()] += 1
                if not end.is_right():
                    wrong += 1
                    print(
                        f"wrong: {end.kind} {end.torchrun} {end.processes}\n{end.said}", flush=True
                    )
    for (kind, torchrun, processes, right), times in sorted(counted.items(), key=str):
        code = "hang" if torchrun is None else torchrun
        print(f"{times:5d}  {kind:11s}  torchrun {code}, processes {processes}, right: {right}")
    seconds = time.monotonic() - begin
    print(f"{sum(counted.values())} starts in {seconds:.0f} s, {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
