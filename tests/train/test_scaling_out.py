"""Training in several processes, through torchrun, and what FSDP2 does with a CE network."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from _distributed import run, torchrun
from _training import assert_same_run, metrics
from cenet.models import create_model
from cenet.nn import ce_layers
from cenet.train import checkpoint
from cenet.train.job import evaluate_run

pytestmark = pytest.mark.slow
STARTS = Path(__file__).parents[2] / "benchmarks" / "starts.py"
SMALL = ("--epochs", "2", "--batch-size", "64", "--device", "cpu", "--checkpoint-every", "2")


def test_two_processes_stop_resume_and_become_one(tmp_path):
    """SIGTERM reaches both, which save together; the resumed run equals the whole one. With another
    number of processes a run goes on at the same image."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    arguments = ("train", "digits_ce", *SMALL)
    assert torchrun(*arguments, "--out", str(whole)).wait(120) == 0
    process = torchrun(*arguments, "--out", str(cut))
    while process.poll() is None and not checkpoint.checkpoints(cut):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) != 0
    updates = checkpoint.newest(cut)[2]["position"]["updates"]
    assert 0 < updates < 20
    resumed = (*arguments, "--out", str(cut), "--resume", "auto")
    assert torchrun(*resumed).wait(120) == 0
    assert_same_run(whole, cut)
    # statistics of each process, and yet what was reported is the accuracy of what was saved
    assert evaluate_run(whole, device="cpu")["test_loss"] == pytest.approx(
        metrics(whole)[-1]["test_loss"], rel=1e-6
    )
    assert [row["updates"] for row in metrics(cut)] == [10, 20]
    tensors, facts = checkpoint.newest(cut)[1:3]
    assert len(facts["chance"]) == 2
    assert not torch.equal(tensors["chance.0.torch"], tensors["chance.1.torch"])


def test_starts_on_loaded_cores_end_as_they_should():
    """Two pairs at a time, each an interrupted start and one that finishes its run."""
    command = [sys.executable, str(STARTS), "--starts", "8", "--at-once", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 starts in " in done.stdout


@pytest.mark.gpu
def test_one_process_of_torchrun_on_a_gpu(tmp_path):
    """NCCL starts and ends; more processes need more GPUs."""
    arguments = ("train", "digits_ce", "--epochs", "2", "--device", "cuda", "--sync-ce")
    alone, among = tmp_path / "alone", tmp_path / "among"
    subprocess.run([sys.executable, "-m", "cenet", *arguments, "--out", str(alone)], check=True)
    assert torchrun(*arguments, "--out", str(among), processes=1).wait(200) == 0
    # SyncCE has no kernels: rounding differs from the first step on, and grows
    for one, other, allowed in zip(metrics(alone), metrics(among), (1e-3, 2e-2), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=allowed)


@pytest.mark.gpu
def test_cuda_graphs_hold_the_exchange_of_gradients(tmp_path):
    """One process, whose gradients go through NCCL; more processes need more GPUs."""
    arguments = ("train", "digits_ce", "--epochs", "3", "--device", "cuda")
    arguments += ("--precision", "bfloat16", "--channels-last", "--cuda-graphs")
    alone, among = tmp_path / "alone", tmp_path / "among"
    subprocess.run([sys.executable, "-m", "cenet", *arguments, "--out", str(alone)], check=True)
    assert torchrun(*arguments, "--out", str(among), processes=1).wait(200) == 0
    for one, other in zip(metrics(alone), metrics(among), strict=True):
        assert one["train_loss"] == pytest.approx(other["train_loss"], rel=2e-2)


def test_a_folder_that_holds_a_run_stops_all_processes(tmp_path, capfd):
    arguments = ("train", "digits_ce", *SMALL, "--out", str(tmp_path))
    assert torchrun(*arguments).wait(120) == 0
    capfd.readouterr()
    assert torchrun(*arguments).wait(120) != 0
    said = capfd.readouterr().err
    assert "holds a run already" in said
    assert "gloo" not in said


def test_another_number_of_processes_goes_on_at_the_same_image(tmp_path):
    arguments = ("train", "digits_ce", *SMALL, "--out", str(tmp_path))
    process = torchrun(*arguments)
    while process.poll() is None and not checkpoint.checkpoints(tmp_path):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait(120)
    facts = checkpoint.newest(tmp_path)[2]
    assert torchrun(*arguments, "--resume", "auto", processes=1).wait(120) == 0
    first = metrics(tmp_path)[0]
    seen = facts["position"]["step"] * 2 * 64  # by two processes in the epoch that was stopped
    assert facts["images"] == seen
    # 21 steps of 64 images in one process, those seen by two taken off
    assert first["updates"] == facts["position"]["updates"] + 21 - seen // 64
    # the schedule is that of one process
    whole = tmp_path.with_name("whole")
    assert torchrun(*arguments[:-1], str(whole), processes=1).wait(120) == 0
    assert [row["lr"] for row in metrics(tmp_path)] == [row["lr"] for row in metrics(whole)]


def test_synchronized_processes_train_as_one(tmp_path):
    """Two processes with half of the images each, against one with all."""
    arguments = ("train", "digits_ce", "--epochs", "1", "--device", "cpu", "--sync-ce")
    two = torchrun(*arguments, "--batch-size", "32", "--out", str(tmp_path / "two"))
    assert two.wait(120) == 0
    one = torchrun(*arguments, "--out", str(tmp_path / "one"), processes=1)
    assert one.wait(120) == 0
    (together,), (alone,) = metrics(tmp_path / "two"), metrics(tmp_path / "one")
    assert together["updates"] == alone["updates"]
    assert together["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)
    assert together["test_loss"] == pytest.approx(alone["test_loss"], rel=2e-2)
    # and not so without
    apart = torchrun(
        *arguments[:-1], "--batch-size", "32", "--out", str(tmp_path / "apart"), processes=2
    )
    assert apart.wait(120) == 0
    (different,) = metrics(tmp_path / "apart")
    assert different["train_loss"] != pytest.approx(alone["train_loss"], rel=1e-3)


def train_sharded(rank):
    """Losses and weights after three steps, sharded by FSDP2 and replicated by DDP."""
    torch.manual_seed(0)
    sharded = create_model("vgg6", in_chans=1, start="identity")
    replicated = create_model("vgg6", in_chans=1, start="identity")
    replicated.load_state_dict(sharded.state_dict())
    mesh = init_device_mesh("cpu", (2,))
    for layer in sharded.features:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    models = {"fsdp": sharded, "ddp": DistributedDataParallel(replicated)}
    optimizers = {k: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for k, m in models.items()}
    generator = torch.Generator().manual_seed(rank)
    losses = {"fsdp": [], "ddp": []}
    for _ in range(3):
        x = torch.randn(8, 1, 8, 8, generator=generator)
        labels = torch.randint(10, (8,), generator=generator)
        for name, model in models.items():
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizers[name].zero_grad()
            loss.backward()
            optimizers[name].step()
            losses[name].append(loss.item())
    state = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in sharded.state_dict().items()
    }
    return losses, state, dict(replicated.state_dict())


def test_fsdp2_shards_a_ce_network():
    losses, sharded, replicated = run(train_sharded, 2)[0]
    assert losses["fsdp"] == pytest.approx(losses["ddp"], rel=1e-6)
    assert losses["ddp"][2] < losses["ddp"][0]
    assert sharded.keys() == replicated.keys()
    for name, value in replicated.items():
        torch.testing.assert_close(sharded[name], value, rtol=1e-5, atol=1e-7, msg=name)


def test_lightning_synchronizes_ce_and_takes_it_back(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from cenet.lightning import SyncCE

    class Digits(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.network = create_model("vgg6", in_chans=1)
            self.seen = []

        def training_step(self, batch, index):
            self.seen.append([layer.sync is not None for _, layer in ce_layers(self.network)])
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.01)

    model = Digits()
    data = torch.utils.data.TensorDataset(torch.randn(32, 1, 8, 8), torch.arange(32) % 10)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, strategy="ddp", plugins=[SyncCE()], max_epochs=1,
        logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=tmp_path,
    )  # fmt: skip
    try:
        trainer.fit(model, torch.utils.data.DataLoader(data, 16))
    finally:
        dist.destroy_process_group()  # Lightning keeps it, and other tests would see it
    assert model.seen == [[True] * 6] * 2
    assert all(layer.sync is None for _, layer in ce_layers(model.network))
