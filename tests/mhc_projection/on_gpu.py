"""What the GPU tests of this package share: operands on the GPU, results and gradients by name, and their bounds.

Names are those of the results (mixes, collapsed, pre, post, comb, streams), and "grad_" with that of an operand.
Cotangents are dictionaries of the first; they decide what is differentiated, and "streams" among them asks for the
function that hands the streams on.
"""

from __future__ import annotations

import hashlib

import torch
from hopper_kernels import reference as use_definition
from mhc_projection import (
    hyper_connection,
    hyper_connection_streams,
    mhc_gates,
    mhc_projection,
    mhc_projection_streams,
    reference,
)
from torch import Tensor

from tests.mhc_projection import inputs, plain
from tests.mhc_projection.inputs import HC_EPS, ITERS, OPTIONS, RMS_EPS, Operands
from tests.support.compare import assert_close_to_float64, assert_same_bytes, error64

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16
Named = dict[str, Tensor]

GATES = ("pre", "post", "comb")
PROJECTION, CONNECTION = ("mixes", "collapsed"), (*GATES, "collapsed")
# What belongs to a token, and therefore must not depend on its batch.
OF_A_TOKEN = ("mixes", *CONNECTION, "grad_x", "grad_pre_mix", "grad_mixes")
# Relative to the size of the whole result. Storing a gradient in bf16 alone costs 1.7e-3.
BOUNDS = {
    "mixes": 1e-5,
    "grad_x": 3e-3,
    "grad_weight": 5e-4,
    "grad_pre_mix": 1e-5,
    "grad_mixes": 1e-4,
    "grad_scale": 1e-4,
    "grad_base": 1e-4,
}


def operands(tokens: int, hc: int = 4, d: int = 64, *, n: int | None = None) -> Operands:
    with DEVICE:
        return inputs.operands(tokens, hc, d, n=n)


def cotangents(t: Operands, *names: str) -> Named:
    """Random gradients of these results."""
    tokens, hc, d = t.x.shape
    shapes = {"mixes": (tokens, t.weight.shape[0]), "pre": (tokens, hc), "post": (tokens, hc)}
    shapes |= {"comb": (tokens, hc, hc), "collapsed": (tokens, d), "streams": (tokens, hc, d)}
    found = {name: torch.randn(shapes[name], device=t.x.device) for name in names}
    return {name: c.to(BF16) if name in ("collapsed", "streams") else c for name, c in found.items()}


def rows(t: Operands, c: Named, index) -> tuple[Operands, Named]:
    """Copies of these tokens alone."""
    part = t._replace(x=t.x[index].clone(), pre_mix=t.pre_mix[index].clone())
    return part, {name: g[index].clone() for name, g in c.items()}


def projection(t: Operands, c: Named, eps: float = RMS_EPS) -> Named:
    """Results of `mhc_projection` and the gradients of its operands."""
    function = mhc_projection_streams if "streams" in c else mhc_projection
    leaves = _leaves(x=t.x, weight=t.weight, pre_mix=t.pre_mix)
    results = function(leaves["x"], leaves["weight"], leaves.get("pre_mix"), eps)
    return _differentiated(dict(zip(("mixes", "collapsed", "streams"), results, strict=False)), leaves, c)


def connection(t: Operands, c: Named, **options) -> Named:
    """Results of `hyper_connection` and the gradients of its operands."""
    function = hyper_connection_streams if "streams" in c else hyper_connection
    leaves = _leaves(**t._asdict())
    results = function(*(leaves.get(name) for name in Operands._fields), **(OPTIONS | options))
    return _differentiated(dict(zip((*CONNECTION, "streams"), results, strict=False)), leaves, c)


def gates(mixes: Tensor, scale: Tensor, base: Tensor, c: Named, hc: int, iters: int = ITERS, eps=HC_EPS) -> Named:
    """Results of `mhc_gates` and the gradients of its operands."""
    leaves = _leaves(mixes=mixes, scale=scale, base=base)
    results = mhc_gates(*leaves.values(), hc, iters, eps)
    return _differentiated(dict(zip(GATES, results, strict=True)), leaves, c)


def _leaves(**tensors: Tensor | None) -> Named:
    return {name: t.detach().requires_grad_() for name, t in tensors.items() if t is not None}


def _differentiated(results: dict[str, Tensor | None], leaves: Named, c: Named) -> Named:
    """The results but for the streams, and the gradients that flow."""
    used = [name for name in c if results.get(name) is not None]
    grads = torch.autograd.grad(
        [results[name] for name in used], list(leaves.values()), [c[name] for name in used], allow_unused=True
    )
    found = {name: r.detach() for name, r in results.items() if r is not None and name != "streams"}
    return found | {f"grad_{name}": g for name, g in zip(leaves, grads, strict=True) if g is not None}


def exact(t: Operands, c: Named, *, rms_eps=RMS_EPS, hc_eps=HC_EPS, sinkhorn_iters=ITERS) -> Named:
    """In float64, what `projection` gives, or `connection` if gates are among the cotangents."""
    x, scale, base = t.x.double(), t.scale.double(), t.base.double()
    pre_mix = None if t.pre_mix is None else t.pre_mix.double()
    c = {name: g.double() for name, g in c.items()}
    mixes, rstd, collapsed = reference.projection_forward(x, t.weight, pre_mix, rms_eps)
    grad_mixes = c.get("mixes")
    found = {} if set(GATES) & c.keys() else {"mixes": mixes}
    if not found:
        options = (t.x.shape[1], sinkhorn_iters, hc_eps)
        found = dict(zip(GATES, reference.gates_forward(mixes, scale, base, *options), strict=True))
        incoming = [c.get(name, torch.zeros_like(gate)) for name, gate in found.items()]
        grad_mixes, *parameters = reference.gates_backward(mixes, scale, base, *incoming, *options)
        found |= dict(zip(("grad_scale", "grad_base"), parameters, strict=True))
    if pre_mix is not None:
        found["collapsed"] = collapsed
    grads = reference.projection_backward(
        x, t.weight, pre_mix, mixes, rstd, grad_mixes, c.get("collapsed"), c.get("streams")
    )
    found["grad_x"] = grads[0]
    if grad_mixes is not None:
        found["grad_weight"] = grads[1]
    if pre_mix is not None and "collapsed" in c:
        found["grad_pre_mix"] = grads[2]
    return found


def eager(t: Operands, c: Named) -> Named:
    """What a trainer's eager path in bf16 gives; all results, whatever the cotangents are for."""
    leaves = _leaves(**t._asdict())
    return _differentiated(plain.eager(Operands(**leaves), t.x.shape[1])._asdict(), leaves, c)


def assert_accurate(found: Named, wanted64: Named, t: Operands | None = None, what: str = "") -> None:
    """Each result within its bound of float64; those in bf16 also element by element. t: for `collapsed`."""
    assert found.keys() == wanted64.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted64)}"
    for name, got in found.items():
        label, want = f"{what} {name}", wanted64[name]
        if name == "collapsed":
            assert_one_ulp(got, want, t, label)
        elif name in GATES:
            assert got.dtype == torch.float32
            torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6, msg=lambda m, n=label: f"{n}: {m}")
        else:
            error = error64(got, want)
            assert error <= BOUNDS[name], f"{label}: error {error:.2e}, bound {BOUNDS[name]:.0e}"
        if name == "grad_x":
            assert_no_element_is_wrong(got, want, label)


def assert_one_ulp(collapsed: Tensor, wanted64: Tensor, t: Operands, what: str) -> None:
    """At most one bf16 ulp from float64 rounded once, and hardly ever that. Sums that cancel have fp32's error."""
    assert collapsed.dtype == BF16, what
    rounded = wanted64.bfloat16()
    largest = torch.maximum(collapsed.abs(), rounded.abs()).float()
    ulp = torch.ldexp(torch.ones_like(largest), (torch.frexp(largest)[1] - 8).clamp(min=-133))
    terms = torch.einsum("ti,tic->tc", t.pre_mix.abs().double(), t.x.abs().double())
    difference = (collapsed.double() - rounded.double()).abs()
    assert torch.all(difference <= ulp + 2**-21 * terms), f"{what}: more than one ulp"
    count = torch.count_nonzero(collapsed != rounded).item()
    assert count <= max(1, 0.005 * rounded.numel()), f"{what}: {count} of {rounded.numel()} differ"


def assert_no_element_is_wrong(grad_x: Tensor, wanted64: Tensor, what: str) -> None:
    """Rounded to bf16 twice at most, and errors far below the token's size: one element is lost in a norm."""
    size = wanted64.square().mean((-2, -1), keepdim=True).sqrt()
    difference = (grad_x.double() - wanted64).abs()
    wrong = torch.count_nonzero(~(difference <= 2**-7 * (wanted64.abs() + size))).item()
    assert wrong == 0, f"{what}: {wrong} elements of {grad_x.numel()} are wrong"


def assert_no_worse_than_eager(found: Named, wanted64: Named, eager_path: Named, what: str = "") -> None:
    """Result by result. Where the eager path is exact too, fp32's own errors remain."""
    for name, got in found.items():
        assert_close_to_float64(
            got, wanted64[name], eager_path[name], factor=1.01, floor=1e-6, name=f"{what} {name}".strip()
        )


def assert_same(found: Named, wanted: Named, what: str = "", names: tuple[str, ...] | None = None) -> None:
    """The same bytes in all results, or in those of `names` that there are."""
    assert found.keys() == wanted.keys(), f"{what}: {sorted(found)}, expected {sorted(wanted)}"
    for name in found if names is None else found.keys() & set(names):
        assert_same_bytes(found[name], wanted[name], f"{what} {name}".strip(), strides=False)


def of_a_token(found: Named, index) -> Named:
    """The results of these tokens, without what sums over all."""
    return {name: r[index] for name, r in found.items() if name in OF_A_TOKEN}


def everything(t: Operands, c: Named) -> Named:
    """Every result and gradient of every operator and variant; c has all cotangents."""
    without = t._replace(pre_mix=None)
    plain_c = {name: g for name, g in c.items() if name != "streams"}
    only_gates, only_mixes = {name: c[name] for name in GATES}, {"mixes": c["mixes"]}
    mixes = mhc_projection(t.x, t.weight)[0]
    parts = {
        "connection": connection(t, plain_c),
        "connection, streams": connection(t, c),
        "connection without pre_mix": connection(without, only_gates),
        "projection": projection(t, plain_c),
        "projection, streams": projection(t, c),
        "projection without pre_mix": projection(without, only_mixes),
        "gates": gates(mixes, t.scale, t.base, only_gates, t.x.shape[1]),
    }
    return {f"{part}: {name}": r for part, found in parts.items() for name, r in found.items()}


def all_cotangents(t: Operands) -> Named:
    return cotangents(t, "mixes", *CONNECTION, "streams")


def definition(function, *args, **options) -> Named:
    """What `function` of this module gives with the definition, on the device of the operands."""
    with use_definition():
        return function(*args, **options)


def digest() -> str:
    """SHA-256 over everything for operands of a fixed seed, made on the CPU: processes compare it."""
    found = hashlib.sha256()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for sizes in ((1100, 4, 200), (70, 2, 64), (130, 1, 72)):
            t = inputs.operands(*sizes)
            c = {name: g.to(DEVICE) for name, g in all_cotangents(t).items()}
            for result in everything(Operands(*(v.to(DEVICE) for v in t)), c).values():
                found.update(result.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return found.hexdigest()
