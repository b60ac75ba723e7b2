"""The command line as a user meets it."""

import errno
import io
import os
import subprocess
import sys
from contextlib import contextmanager, nullcontext, redirect_stdout

import pytest
import torch

import cenet
from _training import call
from cenet.analysis import inhibited_ratio
from cenet.arguments import run_command, without_frame

pytestmark = pytest.mark.usefixtures("quick_weights")


@pytest.fixture
def printed(monkeypatch, capsys):
    """What a command prints; help ends the process, without an error."""

    def run(*arguments):
        ends = pytest.raises(SystemExit, match=r"^0$") if "--help" in arguments else nullcontext()
        with ends:
            call(monkeypatch, *arguments)
        return capsys.readouterr().out

    return run


def test_help_lists_the_commands(printed):
    text = printed("--help")
    assert "demo" in text
    assert "sites" in text
    assert "torchvision/NAME" in printed("sites", "--help")
    assert printed("--version").strip() == f"cenet {cenet.__version__}"


def test_sites_of_a_network(printed):
    text = printed("sites", "resnet18")
    assert "resnet18: insert_ce_ puts CE after 8 of 20 norms" in text
    assert "layer4.1.bn2" in text
    assert text.count("puts CE here") == 8
    assert "CE goes after the last norm of each of the 8 residual blocks." in text
    assert (
        "16 of 20 norms of feature maps then have CE or are in a block with CE; there is CE at "
        "4 of 5 sizes of feature maps (none at 112×112)."
    ) in text
    assert 'To choose yourself: insert_ce_(model, lambda norm, name: name == "bn1").' in text
    assert "after 8 of 8 norms" in " ".join(printed("sites", "torchvision/vgg11_bn").split())


def test_sites_at_a_size_of_images(printed):
    text = printed("sites", "resnet18", "--size", "32")
    assert "after 6 of 20 norms" in text
    assert "maps of one pixel" in text


def test_networks_are_listed_without_counting_them(printed, monkeypatch):
    monkeypatch.setattr("cenet.models.cost.cost", lambda name: pytest.fail("counts, for seconds"))
    lines = {
        line.split()[0]: line.split()[1:] for line in printed("models").splitlines() if line.strip()
    }
    # Table 1 of the paper, and what torchvision publishes for the plain network
    assert lines["ceresnet50"][-1] == "4.16"
    assert lines["ceresnet50"][1] == "25.6"
    assert lines["ceresnet50"][4] == "4.089"
    assert len([name for name in lines if name.startswith("ce")]) == 7


def test_commands_that_need_no_torch_do_not_import_it():
    """It takes seconds, in which a command would not say a word."""
    code = "import sys; sys.argv[0] = 'cenet'; from cenet.__main__ import main; main()"
    ended = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules)); "
    for arguments in (["--version"], ["models"]):
        command = [sys.executable, "-c", ended + code, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_terminal_is_told_what_takes_seconds(rank, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then writes as to a terminal
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("cenet.report.write_page", lambda runs, out: out)
    call(monkeypatch, "report", "run")
    assert ("writing the page" in capsys.readouterr().err) == (rank == "0")


@contextmanager
def closed_pipe(buffered):
    """stdout is a pipe whose reader has gone. No fixture: pytest would put back its own stdout."""
    reader, writer = os.pipe()
    os.close(reader)
    raw = io.FileIO(writer, "w")
    stream = io.TextIOWrapper(io.BufferedWriter(raw) if buffered else raw, write_through=True)
    with stream, redirect_stdout(stream):  # in the end writes what is left, as Python does
        yield


def exit_status(monkeypatch, *arguments):
    """The status, or the line that Python prints."""
    try:
        call(monkeypatch, *arguments)
    except SystemExit as left:
        return left.code or 0
    return 0


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", ["--version", "--help", "train vgg16_plain --help", "recipes", "report run"]
)
def test_a_closed_pipe_ends_a_command_quietly(arguments, buffered, monkeypatch, capfd):
    monkeypatch.setattr("cenet.report.write_page", lambda runs, out: out)
    with closed_pipe(buffered):
        assert exit_status(monkeypatch, *arguments.split()) in (0, 1)
    assert capfd.readouterr().err == ""


def test_an_error_is_told_without_a_reader_of_the_output(monkeypatch):
    with closed_pipe(buffered=True):
        assert "is not a timm model" in exit_status(monkeypatch, "sites", "resnet5000")


def test_another_pipe_that_breaks_is_an_error(monkeypatch):
    def fail(runs, out):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("cenet.report.write_page", fail)
    with open(os.devnull, "w") as stream, redirect_stdout(stream):
        assert "Broken pipe" in exit_status(monkeypatch, "report", "run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sites", "resnet5000"), "resnet5000 is not a timm model"),
        (("sites", "resnt50"), "resnt50 is not a timm model (did you mean resnet50 or "),
        (("sites", "torchvision/resnt18"), "of torchvision (did you mean torchvision/resnet18 or "),
        (("sites", "levit_128s", "--size", "64"), "levit_128s does not run on images of 64×64 ("),
        (("sites", "resnet18", "--size", "0"), "--size 0 must be at least 1"),
        (("sites", "vit_tiny_patch16_224"), "has no norm that CE could follow"),
        (("sites", "torchvision/resnet5000"), "torchvision (did you mean torchvision/resnet50 or"),
        (("sites", "torchvision/fcn_resnet50"), "is not a classification network of torchvision"),
        (("sites", "nfnet_f0"), "no norm that CE could follow"),
        (("demo", "--epochs", "0"), "epochs=0 must be at least 1"),
        (("demo", "--seeds", "-1"), "seeds=-1 must be at least 1"),
        (("demo", "--out", ""), "the value of --out is empty; give one, or leave --out out"),
        (
            ("train", "digits_ce", "--lr", "fast"),
            "Error parsing --lr: could not convert string to float: 'fast'; see `cenet train "
            "digits_ce --help`",
        ),
        (
            ("train", "digits_ce", "--schedule", "weird"),
            "invalid choice 'weird' for argument '--schedule'. Expected one of ('step', 'cosine', "
            "'poly', 'tanh', 'wsd', 'rsqrt', 'constant'); see `cenet train digits_ce --help`",
        ),
        (
            ("train", "digits_ce", "--epochz", "5"),
            "Unrecognized options: --epochz, 5; Perhaps you meant: --epochs",
        ),
        (
            ("detect", "show", "run", "--images", "few"),
            "Error parsing --images: invalid literal for int() with base 10: 'few'; see `cenet "
            "detect --help`",
        ),
        (
            ("nothing",),
            "Unrecognized options: nothing; Available subcommands: demo, detect, diagnose, eval, "
            "export, models, recipes, report, sites, train; see `cenet --help`",
        ),
        (("train", "digits_ce", "--out="), "the value of --out is empty"),
        (("detect", "train", "shapes", "--out", ""), "the value of --out is empty"),
        (("diagnose", "resnet18", "--out", ""), "the value of --out is empty"),
        (("eval", "run", "--save", ""), "the value of --save is empty"),
        (("export", "run", "--out="), "the value of --out is empty"),
        (("report", "run", "--out", ""), "the value of --out is empty"),
    ],
)
def test_bad_input_gets_one_line_and_a_non_zero_exit(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit) as left:
        call(monkeypatch, *arguments)
    assert left.value.code not in (None, 0)  # a text is printed, and the exit code is 1
    said = f"{left.value.code} {capsys.readouterr().err}"
    assert message in said
    assert len(said.splitlines()) == 1


def test_the_frame_of_an_explanation_is_taken_off():
    framed = ("╭─ Value error ─╮", "│ Error: \x1b[1m3\x1b[0m │", "│ ──── │", "│ --lr FLOAT │",
              "│ ──── │", "│ For full helptext, see cenet x --help │", "╰────╯")  # fmt: skip
    plain = ("Value error", " ---- ", " Error: 3", " ---- ", " --lr FLOAT", " ----", " For full "
             "helptext, run cenet x --help ")  # fmt: skip
    for lines in (framed, plain):
        assert without_frame("\n".join(lines)) == "Error: 3; see `cenet x --help`"
    assert without_frame("something else\n") == "something else"


def test_a_command_speaks_while_it_runs(monkeypatch, capsys):
    """Only what is said about its arguments is put into one line."""
    said = []

    def warn():
        print("│ a warning of the command │", file=sys.stderr)
        said.append(capsys.readouterr().err)

    monkeypatch.setattr(sys, "argv", ["cenet", "warn"])
    run_command({"warn": warn, "other": print})
    assert said == ["│ a warning of the command │\n"]


def test_all_that_is_missing_is_explained(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "export")
    said = capsys.readouterr().err
    assert "RUN|MODEL" in said
    assert "--out PATH" in said


def test_one_process_of_several_says_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit, match="2"):
        call(monkeypatch, "train", "digits_ce", "--lr", "fast")
    assert capsys.readouterr().err == ""


def test_inhibited_ratio():
    assert inhibited_ratio(torch.tensor([0.0, 0.009, 0.011, 5.0])) == 0.5
    assert inhibited_ratio(torch.tensor([0.0, 0.2]), threshold=1.0) == 1.0
    with pytest.raises(ValueError, match=r"one value per channel, got \(2, 3\)"):
        inhibited_ratio(torch.zeros(2, 3))
