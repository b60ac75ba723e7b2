"""Which module feeds which, read off the autograd graph of one run.

A network says where its tensors go only by running. A copy of it on meta tensors costs no memory
and no arithmetic, runs any Python control flow, and autograd records the flow for free.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from cenet.internals import output_rank, sequence_number, tree_leaves

IMAGE_SIZES = (224, 32, 64, 28, 96, 128, 256, 299, 384, 512)

# autograd's names of the functions that follow a norm as its activation
ACTIVATIONS = frozenset(
    f"{name}Backward0"
    for name in (
        *("Relu", "LeakyRelu", "PreluKernel", "RreluWithNoise", "Threshold", "Clamp", "ClampMin"),
        *("Elu", "Selu", "Celu", "Silu", "Mish", "Gelu", "Softplus", "LogSigmoid"),
        *("Hardtanh", "Hardswish", "Hardsigmoid", "Sigmoid", "Tanh"),
    )
)


@dataclass
class Call:
    """One call of a watched module."""

    module: nn.Module
    source: Node | None  # operation that made the input
    entry: Node | None  # the input as the module alone sees it
    output: Node | None
    shape: tuple[int, ...]


@dataclass
class Dataflow:
    """Calls of the watched modules, and the operations between them."""

    calls: list[Call] = field(default_factory=list)
    consumers: dict[Node, list[Node]] = field(default_factory=dict)
    outputs: set[Node] = field(default_factory=set)

    def sole_source(self, call: Call) -> Call | None:
        """The watched call whose output goes into `call` and nowhere else, if there is one."""
        for source in self.calls:
            if source.output is not None and source.output is call.source:
                alone = self.consumers.get(source.output) == [call.entry]
                return source if alone and source.output not in self.outputs else None
        return None

    def feeds_activation(self, node: Node) -> bool:
        """Whether an activation function reads the output of `node`."""
        return any(consumer.name() in ACTIVATIONS for consumer in self.consumers[node])

    def residual_branches(self) -> Iterator[set[Node]]:
        """For every sum of two feature maps of one origin, the operations of its longer branch."""
        # autograd numbers operations in the order of the run: these are inside watched modules
        inside = [
            range(sequence_number(call.entry), sequence_number(call.output) + 1)
            for call in self.calls
            if call.entry is not None and call.output is not None
        ]
        for node in list(self.consumers):
            if any(sequence_number(node) in numbers for numbers in inside):
                continue
            parents = [parent for parent, _ in node.next_functions if parent is not None]
            if node.name() != "AddBackward0" or len(parents) != 2 or output_rank(node) != 4:
                continue
            left, right = (_ancestors(parent) for parent in parents)
            if left & right:
                yield max(left - right, right - left, key=_convolutions)


def trace(
    model: nn.Module, watch: Callable[[nn.Module], bool], example_input: Tensor | None = None
) -> Dataflow:
    """Run `model` once in evaluation mode and record the flow between watched modules.

    The run is on meta tensors, or if that fails (a tensor made in `forward`, say) on real ones.
    Without `example_input`, an image of the channels the first convolution expects is tried in
    several sizes.
    """
    if example_input is not None and not isinstance(example_input, Tensor):
        raise TypeError(f"example_input must be one tensor, got {type(example_input).__name__}")
    failure: Exception | None = None
    inputs = example_images(model) if example_input is None else [example_input]
    for run in (_run_on_meta, _run):
        for x in inputs:
            try:
                with torch.inference_mode(False), torch.enable_grad():
                    return run(model, watch, x)
            except Exception as error:  # whatever the model raises on an input it does not take
                failure = failure or error
    raise ValueError(
        f"could not run {type(model).__name__} to see where its norms lead ({failure}); pass "
        "example_input=a batch it accepts, or take the part of it that maps one image tensor "
        "(model.backbone, say); insert_ce_ also takes a filter_fn"
    ) from failure


def example_images(model: nn.Module, sizes: Iterable[int] = IMAGE_SIZES) -> list[Tensor]:
    """Blank images of several sizes, with the channels the first convolution of `model` expects."""
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    channels = next((module.in_channels for module in convolutions), 3)
    own = next(model.parameters(), torch.empty(0))
    dtype = own.dtype if own.is_floating_point() else torch.float32
    return [
        torch.zeros((), device=own.device, dtype=dtype).expand(2, channels, size, size)
        for size in sizes
    ]


def _run_on_meta(model: nn.Module, watch: Callable[[nn.Module], bool], x: Tensor) -> Dataflow:
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.is_floating_point()
        )
        for parameter in model.parameters()
    }
    memo |= {id(buffer): torch.empty_like(buffer, device="meta") for buffer in model.buffers()}
    return _run(model, watch, x.to("meta"), memo)


def _run(
    model: nn.Module,
    watch: Callable[[nn.Module], bool],
    x: Tensor,
    memo: dict[int, Any] | None = None,
) -> Dataflow:
    # a twin runs, so that whatever a forward pass leaves behind is not left in the model
    memo = {} if memo is None else memo
    twin = copy.deepcopy(model, memo)
    original = {memo[id(module)]: module for module in model.modules()}
    flow = Dataflow()
    watched = [module for module in original if watch(original[module])]
    with _watching(watched, flow):
        # an alias, because a leaf is no operation and two branches may fork at the input itself
        x = x.detach().clone().requires_grad_()
        outputs = twin.eval()(x.view_as(x))
    for call in flow.calls:
        call.module = original[call.module]
    _record_consumers(flow, outputs)
    return flow


@contextmanager
def _watching(modules: Iterable[nn.Module], flow: Dataflow) -> Iterator[None]:
    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        # an alias of its own, so that other readers of the same tensor can be told apart
        alias = args[0].view_as(args[0])
        flow.calls.append(Call(module, args[0].grad_fn, alias.grad_fn, None, ()))
        open_calls.append(flow.calls[-1])
        return (alias, *args[1:])

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if open_calls and open_calls[-1].module is module:
            call = open_calls.pop()
            if isinstance(output, Tensor):
                call.output, call.shape = output.grad_fn, tuple(output.shape)

    open_calls: list[Call] = []
    handles = [
        handle
        for module in modules
        for handle in (
            module.register_forward_pre_hook(enter),
            module.register_forward_hook(leave),
        )
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _record_consumers(flow: Dataflow, outputs: Any) -> None:
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    flow.outputs = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
    flow.consumers = {node: [] for node in flow.outputs}
    todo = list(flow.outputs)
    while todo:
        node = todo.pop()
        for parent, _ in node.next_functions:
            if parent is None:
                continue
            if parent not in flow.consumers:
                flow.consumers[parent] = []
                todo.append(parent)
            flow.consumers[parent].append(node)


def _ancestors(node: Node) -> set[Node]:
    found, todo = {node}, [node]
    while todo:
        for parent, _ in todo.pop().next_functions:
            # a leaf (parameter) is no step on the way of a feature map
            if parent is not None and parent not in found and parent.next_functions:
                found.add(parent)
                todo.append(parent)
    return found


def _convolutions(nodes: Iterable[Node]) -> int:
    return sum(node.name() == "ConvolutionBackward0" for node in nodes)
