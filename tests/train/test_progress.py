"""What a run says while it goes on, on a terminal and in a log."""

import contextlib
import os
import sys
import time

import cenet.train.progress as progress
from cenet.train.progress import TrainingProgress


def everything_shown(terminal):
    """All that was written to a terminal whose other end is closed; one read may give a part."""
    parts = []
    with contextlib.suppress(OSError), open(terminal, "rb", buffering=0) as stream:
        while part := stream.read(4096):  # Linux ends with an error, others with nothing
            parts.append(part)
    return b"".join(parts).decode()


def test_a_terminal_has_a_bar_and_lines_above_it(monkeypatch, capsys):
    own, theirs = os.openpty()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with TrainingProgress(shown=True, epochs=2, steps=3) as told:
            told.step(0, 1, "loss 0.5000")
            told.note("testing")
            told.say("epoch 1 of 2: loss 0.4000, [box] AP 0.123")
            told.step(1, 3, "loss 0.2500")
        monkeypatch.undo()
    shown = everything_shown(own)
    assert "epoch 1 of 2: loss 0.4000, [box] AP 0.123" in shown
    assert "loss 0.2500" in shown
    assert "nan" not in shown
    assert capsys.readouterr().out == ""


def test_a_log_is_never_silent_for_long(monkeypatch, capsys):
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with TrainingProgress(shown=True, epochs=2, steps=100) as told:
        for step in range(1, 101):
            clock[0] += 4
            told.step(0, step, f"loss {step}")
        told.note("testing")
        told.say("epoch 1 of 2: done")
    lines = capsys.readouterr().out.splitlines()
    # every 64 seconds; 4 a step
    assert len(lines) == 100 * 4 // 64 + 1
    assert lines[0] == "epoch 1 of 2, step 16 of 100: loss 16, 0:12:16 left"
    assert lines[-1] == "epoch 1 of 2: done"
    assert progress.SILENCE < 64


def test_other_processes_and_loops_of_ones_own_say_nothing(capsys):
    with TrainingProgress(shown=False, epochs=1, steps=1) as told:
        told.say("nothing")
        told.step(0, 1, "nothing")
    TrainingProgress(shown=True, epochs=1, steps=1).say("nothing")
    assert capsys.readouterr() == ("", "")
