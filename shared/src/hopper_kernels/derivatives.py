"""Derivatives of a package's operators, registered so that a call costs the host little and drops no tangent."""

from collections.abc import Callable

import torch

Formula = tuple[Callable, Callable]
"""setup_context and backward of `torch.library.register_autograd`: (ctx, inputs, output) and (ctx, *grads)."""


def register(
    library: torch.library.Library,
    namespace: str,
    implementations: dict[str, Callable],
    formulas: dict[str, Formula],
) -> None:
    """Give the operators of `library` their derivatives. Those without a formula raise RuntimeError in a backward.

    implementations: name of an operator: the function that `library` has for it on a CPU and on CUDA. All operators of
    the namespace are in it, but for those that have no derivative to be asked for.
    """
    without = refusing(f"{namespace} has no second-order gradients")
    for name, implementation in implementations.items():
        kernel = _autograd_kernel(namespace, name, implementation, *formulas.get(name, without))
        library.impl(name, kernel, "Autograd", with_keyset=True)


def refusing(message: str) -> Formula:
    """The formula of an operator without a derivative: a backward raises RuntimeError with this message."""

    def save(ctx, inputs, output) -> None:
        pass

    def refuse(ctx, *_):
        raise RuntimeError(message)

    return save, refuse


def _autograd_kernel(
    namespace: str, name: str, implementation: Callable, save: Callable, differentiate: Callable
) -> Callable:
    """What `torch.library.register_autograd` makes, with less work on the host in each call.

    Where the dispatcher would go to the implementation next, it is called directly.
    """
    operator = getattr(getattr(torch.ops, namespace), name).default
    label = f"{namespace}_{name}"
    derivative = _derivative(label, operator, save, differentiate)
    # `Function.apply` first looks for functorch's transforms and wrappers, which have dispatch keys of their own.
    apply = super(torch.autograd.Function, _derivative(label, implementation, save, differentiate)).apply

    def kernel(keys, *arguments):
        plain = bool(_PLAIN) and keys.raw_repr() in _PLAIN
        # In forward mode, too: a tangent would be dropped without a word.
        if _requires_grad(arguments) or torch.autograd.forward_ad._current_level >= 0:
            return apply(*arguments) if plain else derivative.apply(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return implementation(*arguments) if plain else operator(*arguments)

    return kernel


def _derivative(
    label: str, function: Callable, save: Callable, differentiate: Callable
) -> type[torch.autograd.Function]:
    class Derivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *arguments):
            with torch._C._AutoDispatchBelowAutograd():
                results = function(*arguments)
            save(ctx, arguments, results)
            return results

        backward = staticmethod(differentiate)

    Derivative.__name__ = label
    return Derivative


def _requires_grad(arguments: tuple) -> bool:
    if torch.is_grad_enabled():
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.requires_grad:
                return True
    return False


def _plain_keys() -> frozenset[int]:
    """The dispatch keys of calls for which nothing but autograd comes before the implementation.

    A mode, a transform, a subclass, functionalization, a tensor with a negation pending add keys of their own. Empty
    where PyTorch's internals have changed: then every call is dispatched again.
    """
    try:
        key, keys = torch._C.DispatchKey, torch._C.DispatchKeySet
        cpu = keys(key.CPU) | keys(key.AutogradCPU)
        cuda = keys(key.CUDA) | keys(key.AutogradCUDA)
        return frozenset(found.raw_repr() for found in (cpu, cuda, cpu | cuda))
    except (AttributeError, TypeError):
        return frozenset()


_PLAIN = _plain_keys()
