"""The commit that results record: of cenet itself, or none."""

import subprocess
import sys

import pytest

import cenet.environment as environment


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A repository with one commit of `files`; cenet is imported from `place` in it."""

    def make(place, files):
        for path in {place, *files}:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).touch()
        git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=b"]
        subprocess.run([*git, "init", "-q"], check=True)
        subprocess.run([*git, "add", *files], check=True)
        subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
        monkeypatch.setattr(environment, "__file__", str(tmp_path / place))
        short = [*git, "rev-parse", "--short", "HEAD"]
        return subprocess.run(short, check=True, capture_output=True, text=True).stdout.strip()

    return make


OWN = "src/cenet/environment.py"


def test_a_checkout_has_a_commit(checkout, monkeypatch):
    commit = checkout(OWN, [OWN])
    assert environment.commit() == commit
    monkeypatch.setenv("GIT_DIR", "/nowhere")  # as in a hook of git
    assert environment.commit() == commit


@pytest.mark.parametrize(
    ("place", "files"),
    [
        (".venv/lib/python3/site-packages/cenet/environment.py", ["main.py"]),
        ("third_party/src/cenet/environment.py", ["third_party/src/cenet/environment.py"]),
        (OWN, ["main.py"]),
    ],
    ids=["installed", "in another project", "not committed"],
)
def test_the_commit_of_another_project_is_not_recorded(place, files, checkout):
    checkout(place, files)
    assert environment.commit() is None


def test_git_is_not_waited_for(checkout, tmp_path, monkeypatch):
    checkout(OWN, [OWN])
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    wait = f"import pathlib, time; time.sleep(30); pathlib.Path('{tmp_path}/waited').touch()"
    slow.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{wait}"\n')
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(environment, "SECONDS", 0.1)
    assert environment.commit() is None
    assert not (tmp_path / "waited").exists()
