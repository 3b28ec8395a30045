"""The definition of every operator of this package, in plain PyTorch: what a CPU runs and the oracle of the tests.

Products and sums are formed in float64, and so are the elementwise formulas; what becomes a result is rounded to fp32
and then to bf16, where the functions say bf(). So no setting of PyTorch (TF32, autocast) enters, and a row's results
depend on its batch only where the last bit of a float64 sum changes a rounding to fp32 and that one to bf16. Operands
in float64 give every result in float64, without any rounding: the oracle.

Expert e owns the rows s_e <= r < s_e + n_e, with s_e the sum of the n before. Rows past the last group are not read.
With G, U the products of a row with the gate and the up weights, l the limit and sigma the logistic function,
    Gc = min(G, l),  Uc = min(max(U, -l), l),  silu(z) = z sigma(z),  h = silu(Gc) Uc
min and max propagate NaN. Temporaries in float64: an expert's weights, and its rows of the operands.
"""

import torch
from torch import Tensor

from moe_experts import arguments


def forward(
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    swiglu_limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The experts' MLPs.

    x (M, H); gate_proj (E, I, H), or both weights (E, 2I, H) with up_proj None; up_proj (E, I, H); down_proj (E, H, I).
        G = bf(X Wg^T),  U = bf(X Wu^T),  h = bf(silu(Gc) Uc),  out = bf(h Wd^T)
    Returns out (M, H), gate = G (M, I) and up = U (M, I); rows past the last group are zeros.
    """
    gate_weights, up_weights = _halves(gate_proj, up_proj)
    inner = down_proj.shape[2]
    out = x.new_zeros(x.shape)
    gate, up = (x.new_zeros((x.shape[0], inner)) for _ in range(2))
    for expert, rows in arguments.groups(num_tokens_per_expert, x.shape[0]):
        tokens = x[rows].double()
        gate[rows] = rounded(tokens @ gate_weights[expert].double().t(), x.dtype)
        up[rows] = rounded(tokens @ up_weights[expert].double().t(), x.dtype)
        h = swiglu(gate[rows], up[rows], swiglu_limit, x.dtype)
        out[rows] = rounded(h.double() @ down_proj[expert].double().t(), x.dtype)
    return out, gate, up


def backward_data(
    dout: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    gate: Tensor,
    up: Tensor,
    swiglu_limit: float,
    need_x: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient of x, and what `weight_grad` multiplies, from the results of `forward` and the gradient of out.

    With D = dout, G = gate, U = up, s = sigma(Gc):
        dH = bf(D Wd)
        dG = bf(dH Uc s (1 + Gc (1 - s))) where G <= l, else 0
        dU = bf(dH silu(Gc)) where -l <= U <= l, else 0
        dX = bf(dG Wg + dU Wu)
    A bound itself has a gradient, as with torch.clamp before 2.14; NaN is within no bounds.
    Returns dx (M, H), (0,) if it is not needed, dgate_dup (M, 2I), which is dG and then dU, and h (M, I), as in
    `forward`. Rows past the last group are zeros.
    """
    gate_weights, up_weights = _halves(gate_proj, up_proj)
    rows_count, inner = gate.shape
    dx = dout.new_zeros(dout.shape if need_x else (0,))
    dgate_dup, h = dout.new_zeros((rows_count, 2 * inner)), dout.new_zeros((rows_count, inner))
    dgate, dup = dgate_dup[:, :inner], dgate_dup[:, inner:]
    for expert, rows in arguments.groups(num_tokens_per_expert, rows_count):
        dh = rounded(dout[rows].double() @ down_proj[expert].double(), dout.dtype)
        h[rows] = swiglu(gate[rows], up[rows], swiglu_limit, dout.dtype)
        dgate[rows], dup[rows] = swiglu_backward(dh, gate[rows], up[rows], swiglu_limit, dout.dtype)
        if need_x:
            total = dgate[rows].double() @ gate_weights[expert].double()
            total += dup[rows].double() @ up_weights[expert].double()
            dx[rows] = rounded(total, dout.dtype)
    return dx, dgate_dup, h


def weight_grad(
    dout: Tensor,
    x: Tensor,
    num_tokens_per_expert: Tensor,
    dgate_dup: Tensor,
    h: Tensor,
    packed: bool,
    need_gate: bool = True,
    need_up: bool = True,
    need_down: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the weights, from the results of `backward_data`.

        dWg = bf(dG^T X),  dWu = bf(dU^T X),  dWd = bf(D^T h)
    Returns dw1 (E, I, H), dw3 (E, I, H) and dw2 (E, H, I), or dw1 (E, 2I, H) of both and dw3 (0,) if packed. What is
    not needed is (0,); for a packed weight need_gate alone decides. An expert without rows has zeros.
    """
    experts, hidden, inner = num_tokens_per_expert.shape[0], x.shape[1], h.shape[1]
    columns = {"gate": slice(0, 2 * inner if packed else inner), "up": slice(inner, 2 * inner)}
    needed = {"gate": need_gate, "up": need_up and not packed}
    found = {}
    for name, part in columns.items():
        shape = (experts, part.stop - part.start, hidden)
        found[name] = x.new_zeros(shape if needed[name] else (0,))
    dw2 = x.new_zeros((experts, hidden, inner) if need_down else (0,))
    for expert, rows in arguments.groups(num_tokens_per_expert, x.shape[0]):
        tokens = x[rows].double()
        for name, part in columns.items():
            if needed[name]:
                found[name][expert] = rounded(dgate_dup[rows, part].double().t() @ tokens, x.dtype)
        if need_down:
            dw2[expert] = rounded(dout[rows].double().t() @ h[rows].double(), x.dtype)
    return found["gate"], found["up"], dw2


def backward(
    dout: Tensor,
    x: Tensor,
    gate_proj: Tensor,
    up_proj: Tensor | None,
    down_proj: Tensor,
    num_tokens_per_expert: Tensor,
    gate: Tensor,
    up: Tensor,
    swiglu_limit: float,
    need_x: bool = True,
    need_gate: bool = True,
    need_up: bool = True,
    need_down: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`backward_data`, then `weight_grad`: dx, dw1, dw3, dw2, each (0,) where it is not needed."""
    weights = gate_proj, up_proj, down_proj
    dx, dgate_dup, h = backward_data(dout, *weights, num_tokens_per_expert, gate, up, swiglu_limit, need_x)
    needs = need_gate, need_up, need_down
    return dx, *weight_grad(dout, x, num_tokens_per_expert, dgate_dup, h, up_proj is None, *needs)


def rounded(t: Tensor, dtype: torch.dtype) -> Tensor:
    """t in float64 rounded to fp32 and then to `dtype`, so that bf() is the one to bf16; as it is for float64."""
    return t if dtype == torch.float64 else t.float().to(dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """silu(Gc) Uc of G = gate and U = up, of any one shape, rounded to `dtype` once."""
    g, u = gate.double().clamp(max=limit), up.double().clamp(-limit, limit)
    return rounded(g * torch.sigmoid(g) * u, dtype)


def swiglu_backward(dh: Tensor, gate: Tensor, up: Tensor, limit: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """dG and dU, by the formulas of `backward_data` from dH = dh, each rounded to `dtype` once."""
    dh, gate, up = dh.double(), gate.double(), up.double()
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    s = torch.sigmoid(g)
    silu = g * s
    # Selected, not multiplied by 0: what is beyond a bound may be infinite.
    dgate = torch.where(gate <= limit, dh * (u * (silu * (1 - s) + s)), 0.0)
    dup = torch.where((up >= -limit) & (up <= limit), dh * silu, 0.0)
    return rounded(dgate, dtype), rounded(dup, dtype)


def _halves(gate_proj: Tensor, up_proj: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gate and the up weights (E, I, H) as views, packed or not."""
    if up_proj is not None:
        return gate_proj, up_proj
    inner = gate_proj.shape[1] // 2
    return gate_proj[:, :inner], gate_proj[:, inner:]
