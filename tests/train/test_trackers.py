"""--log-to: what Weights & Biases and MLflow are told, by packages that stand in for them."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from _training import PLAIN, few_digits, metrics, trainer
from cenet.run_folder import METRICS


class Service:
    """Remembers calls, and gives every new run another id."""

    def __init__(self):
        self.begun, self.numbers, self.ended, self.settings = [], [], 0, []

    def begin(self, name, known):
        self.begun.append((name, known))
        return known or f"id{len(self.begun)}"

    def end(self):
        self.ended += 1


def stand_in(name, service):
    """A package with those calls that trackers make."""
    module = ModuleType(name)
    module.__spec__ = SimpleNamespace(name=name)

    def init(*, name, config, id, resume):
        assert (resume is None) == (id is None)
        service.settings.append(config)
        found = service.begin(name, id)
        return SimpleNamespace(
            id=found,
            log=lambda row, *, step: service.numbers.append((step, row)),
            finish=service.end,
        )

    def start_run(*, run_name=None, run_id=None):
        return SimpleNamespace(info=SimpleNamespace(run_id=service.begin(run_name, run_id)))

    def log_metrics(row, *, step, run_id):
        assert run_id == "id1"
        service.numbers.append((step, row))

    module.init, module.start_run, module.log_metrics = init, start_run, log_metrics
    module.log_params, module.end_run = service.settings.append, service.end
    return module


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_service_gets_settings_once_and_numbers_after_each_epoch(name, tmp_path, monkeypatch):
    service = Service()
    monkeypatch.setitem(sys.modules, name, stand_in(name, service))
    out = tmp_path / "mine"
    first = trainer(PLAIN, out, few_digits(), log_to=name)
    first.run()
    assert service.begun == [("mine", None)]
    assert service.settings == [PLAIN.as_dict()]
    assert service.ended == 1
    assert [step for step, _ in service.numbers] == [1, 2]
    for (_, sent), row in zip(service.numbers, metrics(out), strict=True):
        assert "seconds" in sent
        for key, value in row.items():
            assert key in ("epoch", "updates") or sent[key] == value
    about = json.loads((out / "run.json").read_text())
    assert about["tracked"] == {name: "id1"}
    # a run that goes on is the same run there
    again = trainer(PLAIN, out, few_digits(), log_to=name, resume="auto")
    again.resume()
    again.run()
    assert service.begun[1][1] == "id1"
    assert len(service.numbers) == 2


def test_a_service_that_fails_does_not_end_the_run(tmp_path, monkeypatch, capsys):
    service = Service()
    module = stand_in("wandb", service)
    monkeypatch.setitem(sys.modules, "wandb", module)
    engine = trainer(PLAIN, tmp_path, few_digits(), log_to="wandb")

    def fails(*_, **__):
        raise ConnectionError("no route")

    begin = module.init
    module.init = lambda **given: SimpleNamespace(**{**vars(begin(**given)), "log": fails})
    engine.run()
    assert len(metrics(tmp_path)) == 2
    said = capsys.readouterr().out
    assert said.count("wandb failed and gets no numbers from epoch 1 on: ConnectionError") == 1
    assert str(tmp_path / METRICS) in said
    # one that cannot even begin is one line
    module.init = fails
    with pytest.raises(ValueError, match="--log-to wandb: no route"):
        trainer(PLAIN, tmp_path / "other", few_digits(), log_to="wandb").run()

    def fails_silently(*_, **__):
        raise TimeoutError

    module.init = fails_silently
    with pytest.raises(ValueError, match="--log-to wandb: TimeoutError"):
        trainer(PLAIN, tmp_path / "other", few_digits(), log_to="wandb").run()


def test_other_names_are_refused(monkeypatch, capsys):
    from _training import call

    with pytest.raises(SystemExit):
        call(monkeypatch, "train", "digits_ce", "--log-to", "comet")
    assert "wandb" in capsys.readouterr().err
