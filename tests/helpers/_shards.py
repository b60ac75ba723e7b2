"""What several processes run for the tests of analysis; imports little, as each pays for it."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import cenet
from _planted import Tangled, images
from cenet.analysis import Monitor, Recorder


def record(model, *batches):
    recorder = Recorder(model)
    with torch.no_grad():
        for batch in batches:
            with recorder:
                model(batch)
    return recorder


def sharded(rank):
    """Statistics of nine images, six and three in two processes, then none and nine."""
    torch.manual_seed(0)
    model, x = Tangled().eval().double(), images(9).double()
    found = []
    for shards in ((x[:6], x[6:]), (x[:0], x)):
        recorder = record(model, *shards[rank].split(4))
        recorder.sum_over_processes_()
        layers = {name: vars(layer) for name, layer in recorder.layers.items()}
        found.append((layers, recorder.reads, recorder.shared))
    return found


def train(model, steps=5, every=None, to=None, call=None):
    """Losses of a few steps; dropout makes them depend on the random numbers."""
    torch.manual_seed(0)
    call = model if call is None else call
    monitor = None if every is None else Monitor(call, every=every, to=to)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        x, y = images(6, 8, seed=step), torch.arange(6) % 4
        loss = cross_entropy(nn.functional.dropout(call(x), 0.2), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    if monitor is not None:
        monitor.close()
    return losses


def equilibrated(seed=0):
    torch.manual_seed(seed)
    model = Tangled()
    cenet.insert_ce_(model, lambda _, name: name == "bn2")
    model.gate.append(nn.Dropout(0.1))
    return model.train()


def under_ddp(rank):
    torch.manual_seed(0)
    results = []
    for every in (None, 2):
        looks: dict = {}
        losses = train(DistributedDataParallel(equilibrated()), every=every, to=looks.__setitem__)
        results.append((losses, looks))
    return results
