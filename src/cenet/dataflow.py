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

# autograd's names of functions that are linear in the feature map, as batch norm is in evaluation
LINEAR = frozenset(
    f"{name}Backward0"
    for name in (
        *("Convolution", "NativeBatchNorm", "CudnnBatchNorm", "Add", "Sub", "Mul"),
        *("View", "UnsafeView", "Alias", "Reshape", "Expand", "Unsqueeze", "ConstantPadNd"),
    )
)
# autograd's names of functions that return a part of the feature map
PARTS = frozenset(f"{name}Backward0" for name in ("Slice", "Split", "SplitWithSizes", "Narrow"))
# autograd's names of functions that make the gate of a feature map, and of those that resize it
SIGMOIDS = frozenset({"SigmoidBackward0", "HardsigmoidBackward0"})
RESIZED = frozenset(
    f"{name}Backward0"
    for name in ("UpsampleNearest2D", "UpsampleBilinear2D", "Expand", "View", "Alias")
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
    image: Node | None = None  # the input of the network

    def sole_source(self, call: Call) -> Call | None:
        """The watched call whose output goes into `call` and nowhere else, if there is one."""
        for source in self.calls:
            if source.output is not None and source.output is call.source:
                alone = self.consumers.get(source.output) == [call.entry]
                return source if alone and source.output not in self.outputs else None
        return None

    def feeds_activation(self, node: Node) -> bool:
        """Whether an activation function reads the output of `node`, and it is not a gate's."""
        readers = self.consumers[node]
        return any(r.name() in ACTIVATIONS for r in readers) and not self._feeds_gate(readers)

    def _feeds_gate(self, readers: list[Node]) -> bool:
        """Whether all readers of a tensor are sigmoids that are multiplied by feature maps."""
        if not readers or any(reader.name() not in SIGMOIDS for reader in readers):
            return False
        after = [n for reader in readers for n in self.consumers[reader]]
        while any(n.name() in RESIZED for n in after):
            after = [m for n in after for m in (self.consumers[n] if n.name() in RESIZED else [n])]
        return all(n.name() == "MulBackward0" for n in after)

    def branches(self) -> tuple[list[set[Node]], set[Node]]:
        """Look at every sum of two feature maps of one origin.

        Returns:
            The operations of the longer branch of each residual block, up to the output of the
            watched module if that adds the shortcut; and all operations in parallel linear
            branches, which re-parameterization merges into one convolution.
        """
        # autograd numbers operations in the order of the run: these are inside watched modules
        inside = [
            (call.output, range(sequence_number(call.entry), sequence_number(call.output) + 1))
            for call in self.calls
            if call.entry is not None and call.output is not None
        ]
        maps = self._descendants(self.image)
        longer: list[set[Node]] = []
        linear: set[Node] = set()
        for node in list(self.consumers):
            edges = [(parent, output) for parent, output in node.next_functions if parent]
            if node.name() != "AddBackward0" or len(edges) != 2 or output_rank(node) != 4:
                continue
            around = [(end, numbers) for end, numbers in inside if sequence_number(node) in numbers]
            terms = [sequence_number(parent) for parent, _ in edges]
            if any(all(term in numbers for term in terms) for _, numbers in around):
                continue  # no sum of the network, but one in the module
            left, right = (_ancestors(parent) for parent, _ in edges)
            if not left & right or _are_parts(edges, left - right, right - left):
                continue
            # a linear branch beside a bare shortcut is a residual block if an activation follows
            parallel = bool(left - right and right - left) or not self.feeds_activation(node)
            if parallel and all(_is_linear(step, maps) for step in left ^ right):
                linear |= left ^ right
            else:
                branch = max(left - right, right - left, key=_convolutions)
                longer.append(branch.union(end for end, _ in around))
        return longer, linear

    def _descendants(self, node: Node | None) -> set[Node]:
        """The operations whose result depends on that of `node`."""
        found: set[Node] = set()
        todo = [] if node is None else [node]
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += self.consumers.get(node, [])
        return found


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
        f"could not run {type(model).__name__} to trace its norms ({failure}); pass "
        "example_input=a batch it accepts, or pass the submodule that takes one image tensor, such "
        "as model.backbone; insert_ce_ with a filter_fn does not run the model"
    ) from failure


def example_images(model: nn.Module, sizes: Iterable[int] = IMAGE_SIZES) -> list[Tensor]:
    """Blank images of several sizes.

    They have the channels that the first convolution of `model` expects, or else three, because a
    network may rearrange its images before that.
    """
    convolutions = (module for module in model.modules() if isinstance(module, nn.Conv2d))
    expected = next((module.in_channels for module in convolutions), 3)
    own = next(model.parameters(), torch.empty(0))
    dtype = own.dtype if own.is_floating_point() else torch.float32
    return [
        torch.zeros((), device=own.device, dtype=dtype).expand(2, channels, size, size)
        for size in sizes
        for channels in dict.fromkeys((expected, 3))
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
    # a copy runs, so that side effects of a forward pass do not reach the model
    memo = {} if memo is None else memo
    twin = copy.deepcopy(model, memo)
    original = {memo[id(module)]: module for module in model.modules()}
    flow = Dataflow()
    watched = [module for module in original if watch(original[module])]
    with _watching(watched, flow):
        # an alias, because a leaf is no operation and two branches may fork at the input itself
        x = x.detach().clone().requires_grad_()
        image = x.view_as(x)
        flow.image = image.grad_fn
        outputs = twin.eval()(image)
    for call in flow.calls:
        call.module = original[call.module]
    _record_consumers(flow, outputs)
    return flow


@contextmanager
def _watching(modules: Iterable[nn.Module], flow: Dataflow) -> Iterator[None]:
    def enter(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or not isinstance(args[0], Tensor):
            return None
        # one alias for each reader, so that readers of the same tensor can be distinguished
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


def _is_linear(node: Node, maps: set[Node]) -> bool:
    """Whether `node` is linear in the feature maps it reads: products of two are not."""
    if node.name() not in LINEAR:
        return False
    factors = [parent for parent, _ in node.next_functions if parent in maps]
    return node.name() != "MulBackward0" or len(factors) < 2


def _are_parts(edges: list[Any], *own: set[Node]) -> bool:
    """Whether a sum adds up different parts of the channels of one feature map.

    Args:
        edges: the two terms of the sum, each an operation and the number of its output.
        own: for each term, the operations that the other does not depend on.
    """
    for (parent, output), steps, others in zip(edges, own, reversed(own), strict=True):
        if not steps:  # the term itself is where the branches fork
            read = {edge for step in others for edge in step.next_functions}
            return (parent, output) not in read
        if all(step.name() in PARTS for step in steps):
            return all(step.name() in PARTS for step in others if _reads_past(step, others))
    return False


def _reads_past(step: Node, branch: set[Node]) -> bool:
    """Whether an operation of a branch reads a tensor from where the branches fork."""
    parents = (parent for parent, _ in step.next_functions if parent is not None)
    return any(parent not in branch and parent.next_functions for parent in parents)
