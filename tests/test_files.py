"""Files that commands write: the old content or the new, whatever happens in between."""

import errno
import os
import re
import shutil
import signal
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import SafetensorError
from torch import nn

from _detection import write_detection_run
from _disks import file_size_limit, files_in, fill, small_disk
from _pages import write_run
from _training import PLAIN, TINY, call, few_digits, trainer
from cenet.analysis.diagnosis import FILE, Diagnosis
from cenet.analysis.monitor import Monitor
from cenet.checkpoints import read_state
from cenet.data.datasets import find_part, input_spec_of
from cenet.data.decoding import decode
from cenet.data.sources import Folder
from cenet.detection.job import write_left_out
from cenet.export import export_folded, write_onnx
from cenet.files import (
    harmless,
    in_words,
    open_to_append,
    read_json,
    replace_file,
    replace_files,
    replacing,
)
from cenet.models import create_model
from cenet.report.elements import Column, Table
from cenet.report.pages import table_csv, write_diagnosis, write_page
from cenet.run_folder import (
    CHANNELS,
    LOCK,
    METRICS,
    METRICS_CSV,
    WEIGHTS,
    locked,
    read_metrics,
)
from cenet.train import RECIPES, checkpoint
from cenet.train.job import Job, train
from cenet.train.options import Options
from cenet.train.run_log import RunLog


def test_old_content_or_new(tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"old")
    assert path.read_bytes() == b"old"
    with replacing(path) as room:
        (room / "file").write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert files_in(tmp_path) == {path.relative_to(tmp_path): b"new"}


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "full", "other"), OSError, r"No space left on device: '.*/file'"),
        (OSError("no number"), OSError, "no number"),
        (SafetensorError("I/O error: full (os error 28)"), OSError, r"No space left.*/file'"),
        (RuntimeError("of another kind"), RuntimeError, "of another kind"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_after_an_error_everything_is_as_before(tmp_path, error, raised, message):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    before = files_in(tmp_path)

    def fail():
        with replacing(path) as room:
            (room / "file").write_bytes(b"ne")
            raise error

    with pytest.raises(raised, match=message):
        fail()
    assert files_in(tmp_path) == before


def test_several_files_change_together(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        replace_file(path, b"old")
    before = files_in(tmp_path)
    with pytest.raises(OSError, match="No such file"), replacing(*paths) as room:
        (room / "a").write_bytes(b"new")  # and b not
    assert files_in(tmp_path) == before


def test_files_in_several_folders_change_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for root in (Path(), tmp_path / "absolute"):
        root.mkdir(exist_ok=True)
        page, figure = root / "page.html", root / "page_files" / "figure.svg"
        replace_files({figure: b"1", page: b"1"})
        with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
            replace_files({figure: b"2", page: bytes(2000)})
        assert (figure.read_bytes(), page.read_bytes()) == (b"1", b"1")
        assert [path.name for path in root.glob(".*")] == []
        replace_files({figure: b"3", page: b"3"})
        assert (figure.read_bytes(), page.read_bytes()) == (b"3", b"3")


def test_the_file_that_did_not_fit_is_named(tmp_path):
    small, large = tmp_path / "page_files" / "figure.svg", tmp_path / "page.html"
    with file_size_limit(1000), pytest.raises(OSError, match=r"File too large: ") as error:
        replace_files({small: b"1", large: bytes(2000)})
    assert error.value.filename == str(large)  # not where it was written first
    with (
        pytest.raises(OSError, match=r"No such file or directory: '.*/second'"),
        replacing(tmp_path / "first", tmp_path / "second") as room,
    ):
        (room / "first").touch()
    assert files_in(tmp_path) == {}
    small.parent.touch()
    with pytest.raises(OSError, match=r"File exists: '.*/page_files'"):
        replace_files({small: b"1", large: b"1"})


def test_folders_made_for_a_file_that_did_not_fit_are_removed(tmp_path):
    path = tmp_path / "runs" / "new" / "file"
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        replace_file(path, bytes(2000))
    assert files_in(tmp_path) == {}
    replace_file(path, b"new")
    with file_size_limit(1000), pytest.raises(OSError, match="File too large"):
        replace_file(path.with_name("other"), bytes(2000))
    assert path.read_bytes() == b"new"


def test_a_folder_that_the_system_does_not_make_is_named(tmp_path, monkeypatch):
    out = tmp_path / ("long" * 100)
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, "train", "digits_ce", "--out", str(out))
    assert left.value.code == f"{out}: File name too long"
    with pytest.raises(ValueError, match="File name too long"):  # as all processes are told
        train(Job(PLAIN, Options(out), device="cpu"))


@pytest.mark.parametrize("out", ["file", "file/run", "broken", "broken/run"])
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(out, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    monkeypatch.setattr("cenet.train.job.load", lambda *_: pytest.fail("read the images"))
    monkeypatch.setattr("cenet.diagnosing.command.diagnose_named", lambda *_: pytest.fail("began"))
    place = f"{tmp_path / out.partition('/')[0]}"
    wanted = f"--out {tmp_path / out}: {place} is a file or a broken link; it must be a folder"
    for command in (("train", "digits_ce"), ("diagnose", "resnet18")):
        with pytest.raises(SystemExit, match=f"^{re.escape(wanted)}$"):
            call(monkeypatch, *command, "--out", str(tmp_path / out))


def test_text_that_does_not_fit_is_not_added(tmp_path):
    """Half a row would run into the next one that is added."""
    path = tmp_path / "table.csv"
    monitor = Monitor(
        few := nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), to=path
    )
    header = path.read_text()
    with file_size_limit(len(header) + 5), pytest.raises(OSError, match=r"large: '.*table\.csv'"):
        few(torch.rand(2, 3, 8, 8))
    assert path.read_text() == header
    monitor.close()


@pytest.mark.parametrize("size", [1000, 2650, 20000])
def test_a_page_that_cannot_be_written_leaves_the_old_one_whole(size, tmp_path):
    """And with it all figures and, of `cenet diagnose`, the diagnosis."""
    old, new = (write_run(tmp_path / name, seed) for seed, name in enumerate(("old", "new")))
    page, folder = tmp_path / "page.html", tmp_path / "out"
    write_page([old], page)
    write_diagnosis(Diagnosis.read(old / FILE), folder)
    before = files_in(tmp_path)
    with file_size_limit(size):
        with pytest.raises(OSError, match="File too large"):
            write_page([new], page)
        with pytest.raises(OSError, match="File too large"):
            write_diagnosis(Diagnosis.read(new / FILE), folder)
    assert files_in(tmp_path) == before
    write_page([new], page)
    changed = {path for path, content in files_in(tmp_path).items() if content != before.get(path)}
    assert {Path("page.html"), Path("page_files/activity.csv")} <= changed


def test_the_page_comes_last(tmp_path, monkeypatch):
    """So that one that is there is whole, also where the process was killed in between."""
    replaced = []
    monkeypatch.setattr(os, "replace", lambda _, target: replaced.append(target.name))
    monkeypatch.setattr("cenet.files._sync", lambda path: None)
    write_diagnosis(Diagnosis.read(write_run(tmp_path / "run", 0) / FILE), tmp_path / "out")
    assert "activity.csv" in replaced[:-2]
    assert replaced[-2:] == [FILE, "diagnosis.html"]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOTDIR, "there/x: Not a directory; a part of this path is a file"),
        (errno.EACCES, "there/x: Permission denied; change its permissions, or"),
        (errno.EEXIST, "there/x: File exists; this is a file or a broken link"),
        (errno.ENOSPC, "there/x: No space left on device; make room"),
        (errno.EDQUOT, "there/x: Disk quota exceeded; make room"),
        (errno.EROFS, "there/x: Read-only file system; nothing can be written here"),
        (errno.EIO, "there/x: Input/output error"),
    ],
)
def test_errors_of_the_system_in_words(number, words):
    said = in_words(OSError(number, os.strerror(number), "there/x"))
    assert said.startswith(words)
    assert "Errno" not in said
    assert in_words(OSError("odd")) == "odd"
    assert in_words(OSError(errno.EIO, "Input/output error")) == "Input/output error"


def test_new_files_are_on_the_disk_before_they_replace_the_old_ones(tmp_path, monkeypatch):
    done = []
    sync, move = os.fsync, os.replace

    def fsync(file):
        done.append(("sync", os.fstat(file).st_ino))
        sync(file)

    def replace_(source, target):
        done.append(("replace", os.stat(source).st_ino))
        move(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace_)
    paths = [tmp_path / "inner" / "a", tmp_path / "b"]
    with replacing(*paths) as room:
        for path in paths:
            (room / path.relative_to(tmp_path)).write_bytes(b"new")
    a, b, inner, folder = (path.stat().st_ino for path in (*paths, tmp_path / "inner", tmp_path))
    first, second = [("sync", a), ("sync", b)], [("replace", a), ("replace", b)]
    assert done == [*first, *second, ("sync", inner), ("sync", folder)]


def test_only_this_user_sees_a_file_that_is_being_written(tmp_path):
    with replacing(tmp_path / "file") as room:
        assert room.parent == tmp_path  # on another disk, it could not replace the file at once
        assert room.name.startswith(".file.")
        assert stat.S_IMODE(room.stat().st_mode) == 0o700
        (room / "file").touch()
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def test_a_device_or_a_pipe_is_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            replace_file(path, b"new")
        with pytest.raises(OSError, match="not a regular file"), replacing(tmp_path / "a", path):
            pytest.fail("the second path was not looked at")
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_planted_link_is_not_followed(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("of somebody else")
    folder.mkdir()
    for name in (LOCK, "file"):
        (folder / name).symlink_to(victim)
    with pytest.raises(OSError, match=r"a link, which may lead anywhere; remove it: '.*/.lock'"):
        locked(folder).__enter__()
    with pytest.raises(OSError, match="a link"):
        open_to_append(folder / "file")
    replace_file(folder / "file", b"new")  # the link itself is replaced
    assert (folder / "file").read_bytes() == b"new"
    assert victim.read_text() == "of somebody else"
    (folder / LOCK).unlink()
    with locked(folder), pytest.raises(ValueError, match="another process is writing"):
        in_another_process(lambda: locked(folder).__enter__())


def test_a_link_that_is_planted_at_the_last_moment_is_not_followed(tmp_path, monkeypatch):
    """After it was looked for: the system refuses to open it."""
    victim, planted = tmp_path / "victim", tmp_path / "file"
    victim.write_text("of somebody else")
    planted.symlink_to(victim)
    monkeypatch.setattr(Path, "is_symlink", lambda path: False)
    with pytest.raises(OSError, match="symbolic link"):
        open_to_append(planted)
    assert victim.read_text() == "of somebody else"


def test_a_folder_of_ours_that_is_a_link_is_not_filled(tmp_path):
    """Its name is not the user's choice, and the link may have been planted."""
    victim, out = tmp_path / "victim", tmp_path / "out"
    victim.mkdir()
    for name in ("run", "page_files"):
        (out / name).mkdir(parents=True)
    (out / "run" / "tensorboard").symlink_to(victim)
    (out / "page_files").rmdir()
    (out / "page_files").symlink_to(victim)
    engine = trainer(replace(PLAIN, epochs=1), out / "run", few_digits())
    with pytest.raises(OSError, match=r"a link, which may lead anywhere; remove it: .*tensorboard"):
        engine.run()
    with pytest.raises(OSError, match=r"a link, which may lead anywhere; remove it: .*page_files"):
        write_page([write_run(out / "other", 0, epochs=1)], out / "page.html")
    assert files_in(victim) == {}
    assert not (out / "page.html").exists()


def test_a_start_that_is_refused_leaves_nothing_behind(tmp_path, monkeypatch):
    new, empty, used = tmp_path / "runs" / "new", tmp_path / "empty", tmp_path / "used"
    empty.mkdir()
    used.mkdir()
    (used / "note").touch()
    before = files_in(tmp_path)
    for out in (new, empty):
        with pytest.raises(SystemExit, match=r"is more than the .* steps of an epoch"):
            call(monkeypatch, "train", "digits_ce", "--accumulate", "9999", "--out", str(out))
        assert files_in(tmp_path) == before
    with locked(new):
        (new / "row").touch()
    with locked(used):
        pass
    kept = {Path("runs"), Path("runs/new"), Path("runs/new/row"), Path("runs/new") / LOCK}
    assert files_in(tmp_path).keys() - before.keys() == kept | {Path("used") / LOCK}


def test_what_a_killed_run_left_half_written_is_removed_by_the_next(tmp_path):
    for name in (WEIGHTS, METRICS, "step-000000003.safetensors"):
        with replacing(tmp_path / name) as room:
            left = tmp_path / f"{room.name[:-8]}{room.name[-8:][::-1]}"  # as of another process
            shutil.copytree(room, left, dirs_exist_ok=True)
            (left / name).write_bytes(b"a part")
            (room / name).write_bytes(b"whole")
    own = (".hidden", ".git.folder", "weights.safetensors.old", ".weights.safetensors.old")
    own = (*own, ".run.json.backup", ".step-best.safetensors.abcdefgh", ".run.json.abcdefgh.txt")
    for name in own:
        (tmp_path / name).mkdir()
    with locked(tmp_path):
        pass
    left = {WEIGHTS, METRICS, "step-000000003.safetensors", LOCK, *own}
    assert {path.name for path in tmp_path.iterdir()} == left
    assert (tmp_path / WEIGHTS).read_bytes() == b"whole"


def test_a_lock_that_its_owner_removed_is_no_lock(tmp_path, monkeypatch):
    """Opened before and locked after that, it would not keep a third process out."""
    opened = open_to_append

    def late(path):
        file = opened(path)
        path.unlink()
        return file

    monkeypatch.setattr("cenet.run_folder.open_to_append", late)
    with pytest.raises(ValueError, match="another process is writing to"):
        locked(tmp_path).__enter__()
    assert files_in(tmp_path) == {}

    def replaced(path):
        file = late(path)
        path.touch()
        return file

    monkeypatch.setattr("cenet.run_folder.open_to_append", replaced)
    with pytest.raises(ValueError, match="another process is writing to"):
        locked(tmp_path).__enter__()
    assert (tmp_path / LOCK).exists()  # it is that of the other process


def test_text_is_added_at_the_end(tmp_path):
    for line in ("one\n", "two\n"):
        with open_to_append(tmp_path / "file") as file:
            file.write(line)
    assert (tmp_path / "file").read_bytes() == b"one\ntwo\n"
    os.umask(mask := os.umask(0))
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o666 & ~mask


def in_another_process(function):
    """Call a function in a fork, which does not have the locks of this process; raise its error."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
        except ValueError as error:
            os.write(sender, str(error).encode())
        os._exit(0)
    os.close(sender)
    os.waitpid(child, 0)
    with os.fdopen(receiver) as said:
        raise ValueError(said.read())


def test_a_pipe_is_not_waited_for(tmp_path, monkeypatch):
    """Whatever a command reads may be one; a pipe that nobody writes to would be read for ever."""
    signal.alarm(60)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reads = {
        "JSON": lambda: read_json(pipe),
        "rows": lambda: read_metrics(pipe),
        "a diagnosis": lambda: Diagnosis.read(pipe),
        "a checkpoint": lambda: checkpoint.read(pipe),
        "weights": lambda: read_state(pipe),
        "an image": lambda: decode(Folder([pipe]), 0),
    }
    for name, read in reads.items():
        with pytest.raises(ValueError, match=r"not a (regular )?file"):
            pytest.fail(f"{name}: {read()}")
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(pipe)
    shard = tmp_path / "data" / "train-0.tar"
    shard.parent.mkdir()
    os.mkfifo(shard)
    with pytest.raises(OSError, match="not a regular file"):
        find_part(shard.parent, ("train",))
    signal.alarm(0)


def test_json_nested_too_deeply_is_one_clear_error(tmp_path):
    path = tmp_path / "deep.json"
    path.write_text("[" * 10**5)
    for read in (read_json, Diagnosis.read):
        with pytest.raises(ValueError, match=r"deep.json cannot be read: it is nested too deeply"):
            read(path)
    path.write_text('{"epoch": ' + "[" * 10**5)
    with pytest.raises(ValueError, match=r"deep.json cannot be read: .*deep"):
        read_metrics(path)


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"), ("+a", "'+a"), ("-a", "'-a"), ("@a", "'@a"), ("\t=1", "'\t=1"),
        ("\r=1", "'\r=1"),
        ("-0.5", "-0.5"), ("-inf", "-inf"), (-0.5, -0.5), ("a=b", "a=b"), ("", ""), (None, None),
    ],
)  # fmt: skip
def test_text_that_is_a_formula_is_quoted(cell, written):
    assert harmless(cell) == written


def test_tables_of_a_run_hold_no_formulas(tmp_path):
    scenes = SimpleNamespace(faults={"=fault": ["=image", "b.png"]})
    write_left_out(tmp_path / "left_out.csv", {"train": scenes})
    assert "'=image" in (tmp_path / "left_out.csv").read_text()
    log = RunLog(tmp_path)
    log.add({"epoch": 1, "=name": "@value", "loss": -0.5})
    log.add_channels(3, {"=layer": {}})
    assert (tmp_path / METRICS_CSV).read_text() == "epoch,'=name,loss\n1,'@value,-0.5\n"
    assert "3,'=layer," in (tmp_path / CHANNELS).read_text()


def test_a_table_of_channels_that_does_not_fit_is_named(tmp_path):
    log = RunLog(tmp_path)
    log.add_channels(3, {"layer": {}})
    size = (tmp_path / CHANNELS).stat().st_size
    with (
        file_size_limit(size + 5),
        pytest.raises(OSError, match=r"File too large: '.*channels\.csv"),
    ):
        log.add_channels(6, {f"layer{number}": {} for number in range(9)})
    recipe, inputs = RECIPES["digits_ce"], input_spec_of(few_digits().train)
    log.begin(
        recipe, inputs, {}, after=1, updates=20, tested_on="test"
    )  # a cut-off row is left out
    log.end()
    assert (tmp_path / CHANNELS).stat().st_size == size


def test_both_files_of_metrics_hold_the_same_rows(tmp_path):
    rows = [{"epoch": 1, "loss": 3.5}, {"epoch": 2, "loss": 2.5}, {"epoch": 3, "top1": 0.5}]
    rows += [{"epoch": 4, "loss": 1.5, "top1": 0.75}]
    log = RunLog(tmp_path)
    for row in rows:
        log.add(row)
    assert read_metrics(tmp_path / METRICS) == rows
    table = "epoch,loss,top1\n1,3.5,\n2,2.5,\n3,,0.5\n4,1.5,0.75\n"
    assert (tmp_path / METRICS_CSV).read_text() == table


def test_rows_that_do_not_fit_into_one_file_are_in_none(tmp_path):
    log = RunLog(tmp_path)
    for epoch in range(1, 60):  # with a column each, the table is larger than the rows
        log.add({"epoch": epoch, f"loss{epoch}": 1})
    before = files_in(tmp_path)
    size = (tmp_path / METRICS_CSV).stat().st_size
    assert (tmp_path / METRICS).stat().st_size < size - 100
    with file_size_limit(size), pytest.raises(OSError, match=r"large: '.*/metrics\.csv'"):
        log.add({"epoch": 60, "loss60": 1})
    assert files_in(tmp_path) == before


def test_tables_of_a_page_hold_no_formulas():
    table = Table((Column("=name"), Column("share")), (("@layer", -0.5),))
    assert table_csv(table) == "'=name,share\n'@layer,-0.5\n"


def test_of_two_rows_of_an_epoch_the_last_is_taken(tmp_path):
    rows = [(1, 3.5), (2, 2.5), (1, 3.0), (2, 2.0), (2, 1.0), (3, 0.5)]
    (tmp_path / METRICS).write_text(
        "".join(f'{{"epoch": {epoch}, "loss": {loss}}}\n' for epoch, loss in rows)
    )
    last = [{"epoch": 1, "loss": 3.0}, {"epoch": 2, "loss": 1.0}, {"epoch": 3, "loss": 0.5}]
    assert read_metrics(tmp_path / METRICS) == last
    log = RunLog(tmp_path)
    recipe, inputs = RECIPES["digits_ce"], input_spec_of(few_digits().train)
    log.begin(recipe, inputs, {}, after=2, updates=20, tested_on="test")
    log.add({"epoch": 3, "loss": 0.25})
    log.end()
    assert read_metrics(tmp_path / METRICS) == [*last[:2], {"epoch": 3, "loss": 0.25}]
    assert (tmp_path / METRICS_CSV).read_text() == "epoch,loss\n1,3.0\n2,1.0\n3,0.25\n"
    (tmp_path / METRICS).write_text('{"epoch": true}\n')
    with pytest.raises(ValueError, match="line 1 is not the row of an epoch"):
        read_metrics(tmp_path / METRICS)


def test_rows_that_a_resumed_run_writes_again_are_removed(tmp_path):
    log = RunLog(tmp_path)
    for epoch in (1, 2, 3):
        log.add({"epoch": epoch})
    recipe, inputs = RECIPES["digits_ce"], input_spec_of(few_digits().train)
    log = RunLog(tmp_path)
    log.begin(recipe, inputs, {}, after=2, updates=20, tested_on="test")
    log.end()
    assert [row["epoch"] for row in read_metrics(tmp_path / METRICS)] == [1, 2]


def test_channels_that_a_resumed_run_measures_again_are_removed(tmp_path):
    log = RunLog(tmp_path)
    for updates in (10, 20, 30):
        log.add_channels(updates, {"layer": {}})
    recipe, inputs = RECIPES["digits_ce"], input_spec_of(few_digits().train)
    log.begin(recipe, inputs, {}, after=1, updates=20, tested_on="test")
    log.end()
    rows = (tmp_path / CHANNELS).read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in rows] == ["10"]


def test_a_network_is_exported_whole_or_not_at_all(tmp_path):
    network, x = Convolution().eval(), torch.zeros(1, 3, 8, 8)
    ways = {
        "network.onnx": lambda path: write_onnx(network, path, x, ["y"]),
        "network.pt2": lambda path: export_folded(network, path, x),
    }
    for name, write in ways.items():
        write(tmp_path / name)
        before = files_in(tmp_path)
        with file_size_limit(1000), pytest.raises(OSError, match=f"File too large: '.*/{name}'"):
            write(tmp_path / name)
        assert files_in(tmp_path) == before


class Convolution(nn.Module):
    """A network whose argument has the name that exporting expects."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Conv2d(3, 64, 3)

    def forward(self, x):
        return self.inner(x)


# every command that writes, but for training, whose checkpoints have tests of their own


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of digits, one of a detector, and the weights of a small network."""
    folder = tmp_path_factory.mktemp("runs")
    trainer(replace(TINY, epochs=1), folder / "digits", few_digits()).run()
    write_detection_run(folder / "shapes", epochs=2)
    torch.save(
        create_model(NETWORK.removeprefix("ce"), num_classes=10).state_dict(),
        folder / "weights.pth",
    )
    return folder


NETWORK = "ceshufflenetv2_x0_5"
EXPORT = ("export", NETWORK, "{runs}/weights.pth", "--out")
COMMANDS = {
    "safetensors": (*EXPORT, "{disk}/network", "--format", "safetensors"),
    "onnx": (*EXPORT, "{disk}/network.onnx"),
    "folded": (*EXPORT, "{disk}/network.pt2", "--format", "folded"),
    "eval": ("eval", "{runs}/digits", "--recalibrate", "1", "--save", "{disk}/w.safetensors"),
    "report": ("report", "{runs}/digits", "--out", "{disk}/page.html"),
    "diagnose": (
        *("diagnose", "{runs}/digits", "--limit", "32", "--ablation-images", "0"),
        *("--out", "{disk}"),
    ),
    "detect show": ("detect", "show", "{disk}/shapes", "--images", "0"),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", ["limit on the size of files", "full disk"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_cannot_write_says_so_and_changes_nothing(
    command, kind, runs, tmp_path, monkeypatch
):
    disk = tmp_path / "disk"
    arguments = [text.format(runs=runs, disk=disk) for text in COMMANDS[command]]

    def once():
        if command == "detect show":
            shutil.copytree(runs / "shapes", disk / "shapes", dirs_exist_ok=True)
        call(monkeypatch, *arguments)

    def again():
        before = files_in(disk)
        with pytest.raises(SystemExit) as left:
            call(monkeypatch, *arguments)
        assert isinstance(left.value.code, str)  # a text is printed, and the exit code is 1
        assert len(left.value.code.splitlines()) == 1
        assert "Errno" not in left.value.code
        assert files_in(disk) == before
        return left.value.code

    if kind == "full disk":
        with small_disk(disk, 32 * 2**20):
            once()
            fill(disk)
            assert "No space left on device" in again()
        return
    disk.mkdir()
    once()
    largest = max(path.stat().st_size for path in disk.rglob("*"))
    with file_size_limit(largest // 2):
        assert "File too large" in again()
