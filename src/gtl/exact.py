"""Exact answers: the oracle that the tests lean on.

Markov chains, by forward-backward with the corruption as emission, e_l(v) = p(z_l | x_l = v) (for masked noise the mask
is a missing observation, and no time is needed):

    a_l(v) = e_l(v) sum_u a_{l-1}(u) T(u, v),    b_l(v) = sum_w T(v, w) e_{l+1}(w) b_{l+1}(w),
    p(z) = sum_v a_L(v),    p(x_l = v | z) = a_l(v) b_l(v) / p(z),    r(z) = q(z) / p(z).

Tables: any distribution over V^L sequences for tiny V and L, by summing over all of them. `MarkovChain` and `Table` are
laws; `ExactDenoiser` and `ExactRatio` turn a law, or two, into a Denoiser and a Ratio that plug in anywhere.
`one_position_law` and `ancestral_law` push the whole reverse chain of a sampler through all K^L states: the
distribution of what it draws, without drawing. `joint_kernel` is the reverse kernel over whole sequences, which no
sampler can afford and Theorem 1 speaks of.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from gtl.denoiser import Denoiser, Prediction
from gtl.nn.dit import gather_positions
from gtl.process import Masked, Process
from gtl.ratio.base import SequenceRatio
from gtl.sample.ancestral import Ancestral
from gtl.sample.rates import Euler

__all__ = [
    "ExactDenoiser",
    "ExactRatio",
    "Law",
    "MarkovChain",
    "Table",
    "ancestral_law",
    "enumerate_states",
    "factorised",
    "forward_kernel",
    "joint_kernel",
    "marginal_law",
    "one_position_law",
    "rate_matrix",
]


class Law(nn.Module, ABC):
    """A distribution over clean sequences whose noisy marginals are known; everything is float64."""

    process: Process

    @abstractmethod
    def log_marginal(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """log p_t(z) of z (B, L) at times t (B,): (B,). Under masked noise that of the visible tokens alone."""

    @abstractmethod
    def log_conditional(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        """log p(x_l = v | z_t = z) at every position: (B, L, K)."""

    def _tokens(self) -> list[int]:
        return [v for v in range(self.process.num_ids) if v != self.process.mask_id]

    def _emission(self, z: Tensor, t: Tensor | None) -> Tensor:
        """p(z_l | x_l = v) for every clean token v: (B, L, V); under masked noise 1 where v may stand there."""
        tokens = torch.tensor(self._tokens(), device=z.device)
        if isinstance(self.process, Masked):
            return ((z.unsqueeze(-1) == tokens) | (z.unsqueeze(-1) == self.process.mask_id)).double()
        if t is None:
            raise ValueError(f"under {self.process.name} noise a law needs the time t")
        return self.process.likelihood(z, torch.zeros_like(t), t)[..., tokens]


class MarkovChain(Law):
    """A Markov chain with initial distribution (V,) and row-stochastic transition matrix (V, V)."""

    transition: Tensor
    initial: Tensor

    def __init__(self, transition: Tensor, process: Process, initial: Tensor | None = None) -> None:
        super().__init__()
        size = process.vocabulary
        if transition.shape != (size, size):
            raise ValueError(f"the transition matrix is {tuple(transition.shape)}; the process needs ({size}, {size})")
        self.process = process
        start = torch.full((size,), 1 / size) if initial is None else initial
        self.register_buffer("transition", transition.double())
        self.register_buffer("initial", start.double())

    def _forward(self, emission: Tensor) -> tuple[Tensor, Tensor]:
        """Normalised forward messages (L, B, V) and log p(z) (B,)."""
        messages, log_p = [], emission.new_zeros(len(emission))
        before = self.initial.expand(len(emission), -1)
        for at in emission.unbind(1):
            message = before * at
            total = message.sum(-1, keepdim=True)
            log_p = log_p + total.squeeze(-1).log()
            messages.append(message / total.clamp(min=1e-300))
            before = messages[-1] @ self.transition
        return torch.stack(messages), log_p

    def log_marginal(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self._forward(self._emission(z, t))[1]

    def log_conditional(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        emission = self._emission(z, t)
        forward, _ = self._forward(emission)
        message = torch.ones_like(forward[0])
        posterior = torch.empty_like(emission)
        for at in range(z.shape[1] - 1, -1, -1):
            joint = forward[at] * message
            posterior[:, at] = joint / joint.sum(-1, keepdim=True).clamp(min=1e-300)
            message = (message * emission[:, at]) @ self.transition.T
            message = message / message.sum(-1, keepdim=True).clamp(min=1e-300)
        log_probs = posterior.new_full((*z.shape, self.process.num_ids), -torch.inf)
        log_probs[..., self._tokens()] = posterior.log()
        return log_probs


class Table(Law):
    """Any distribution over all V^L sequences, given as a tensor with L dimensions of size V."""

    p: Tensor
    x: Tensor
    index: Tensor

    def __init__(self, table: Tensor, process: Process) -> None:
        super().__init__()
        if set(table.shape) != {process.vocabulary}:
            raise ValueError(f"the table is {tuple(table.shape)}; every dimension must be {process.vocabulary}")
        self.process = process
        tokens = torch.tensor(self._tokens())
        self.register_buffer("p", table.double().flatten() / table.double().sum())
        self.register_buffer("index", enumerate_states(process.vocabulary, table.dim()))
        self.register_buffer("x", tokens[self.index])

    def _joint(self, z: Tensor, t: Tensor | None) -> Tensor:
        """p(x) p(z | x) for all sequences x: (B, V^L)."""
        emission = self._emission(z, t)
        joint = self.p.expand(len(z), -1)
        for at in range(z.shape[1]):
            joint = joint * emission[:, at][:, self.index[:, at]]
        return joint

    def log_marginal(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        return self._joint(z, t).sum(-1).log()

    def log_conditional(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        joint = self._joint(z, t)
        one_hot = nn.functional.one_hot(self.x, self.process.num_ids).double()
        posterior = torch.einsum("bs,slv->blv", joint, one_hot) / joint.sum(-1).clamp(min=1e-300)[:, None, None]
        return posterior.log()


class ExactDenoiser(Denoiser):
    """A law's exact conditionals as a denoiser. States that the law cannot reach get a uniform prediction."""

    def __init__(self, law: Law) -> None:
        super().__init__()
        self.law, self.process = law, law.process
        if not isinstance(law.process, Masked):
            self.timeless = False

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        log_probs = self.law.log_conditional(z, t)
        impossible = log_probs.amax(-1, keepdim=True) == -torch.inf
        uniform = torch.zeros_like(log_probs)
        if self.process.mask_id is not None:
            uniform[..., self.process.mask_id] = -torch.inf
        log_probs = torch.where(impossible, uniform.log_softmax(-1), log_probs)
        log_probs = self.carry_over(z, log_probs)
        return Prediction(log_probs if positions is None else gather_positions(log_probs, positions))


class ExactRatio(SequenceRatio):
    """r_t(z) = q_t(z) / p_t(z) of two laws of one process."""

    def __init__(self, source: Law, target: Law) -> None:
        super().__init__()
        self.source, self.target, self.process = source, target, source.process
        if not isinstance(source.process, Masked):
            self.timeless = False

    def log_value(self, z: Tensor, t: Tensor | None = None) -> Tensor:
        log_q, log_p = self.target.log_marginal(z, t), self.source.log_marginal(z, t)
        return torch.where(log_q == -torch.inf, log_q, log_q - log_p)


def enumerate_states(num_ids: int, length: int) -> Tensor:
    """All num_ids^length sequences, (num_ids^length, length), the last position changing fastest."""
    return torch.cartesian_prod(*[torch.arange(num_ids)] * length).view(-1, length)


def _clean(law: Tensor, states: Tensor, mask_id: int | None) -> Tensor:
    """The probabilities of the states without a mask, in order: (V^L,)."""
    return law if mask_id is None else law[(states != mask_id).all(-1)]


@torch.no_grad()
def marginal_law(law: Law, length: int, t: float) -> Tensor:
    """p_t(z) of all K^L states, mask patterns included: (K^L,)."""
    process = law.process
    clean = torch.tensor(law._tokens())[enumerate_states(process.vocabulary, length)]
    return law.log_marginal(clean, torch.zeros(len(clean))).exp() @ forward_kernel(process, clean, length, 0.0, t)


@torch.no_grad()
def forward_kernel(process: Process, start: Tensor, length: int, s: float, t: float) -> Tensor:
    """p(z_t | z_s) from the states `start` (S, L) to all K^L: (S, K^L)."""
    states = enumerate_states(process.num_ids, length)
    times = (torch.full((len(states),), u, dtype=torch.float64) for u in (s, t))
    into = process.likelihood(states, *times)  # (K^L, L, K)
    joint = torch.ones(len(start), len(states), dtype=torch.float64)
    for at in range(length):
        joint *= into[:, at].T[start[:, at]]
    return joint


@torch.no_grad()
def joint_kernel(law: Law, length: int, t: float, s: float) -> Tensor:
    """log p(z_s | z_t) over whole sequences, rows z_t and columns z_s: (K^L, K^L). Impossible z_t keep -inf."""
    states = enumerate_states(law.process.num_ids, length)
    joint = marginal_law(law, length, s).unsqueeze(1) * forward_kernel(law.process, states, length, s, t)
    return (joint / joint.sum(0).clamp(min=1e-300)).T.log()


def rate_matrix(rates: Tensor, num_ids: int) -> Tensor:
    """The rates between all K^L sequences, rows from and columns to, of rates (K^L, L, K) at every position of each."""
    count, length, _ = rates.shape
    states = enumerate_states(num_ids, length)
    matrix = torch.zeros(count, count, dtype=torch.float64)
    for at in range(length):
        stride = num_ids ** (length - 1 - at)
        for v in range(num_ids):
            to = torch.arange(count) + (v - states[:, at]) * stride
            matrix[torch.arange(count), to] += rates[:, at, v]
    return matrix


@torch.no_grad()
def one_position_law(model: Denoiser, length: int) -> Tensor:
    """The exact law (V^L,) of what one-position sampling in random order draws from a (guided) denoiser."""
    process = model.process
    assert isinstance(process, Masked)
    states = enumerate_states(process.num_ids, length)
    masked = states == process.mask_id
    conditional = model(states).log_probs.double().exp()
    law = masked.all(-1).double()
    for left in range(length, 0, -1):
        after = torch.zeros_like(law)
        source = (masked.sum(-1) == left).nonzero().squeeze(-1)
        for at in range(length):
            rows = source[masked[source, at]]
            stride = process.num_ids ** (length - 1 - at)
            for v in range(process.num_ids):
                after.index_add_(0, rows + (v - process.mask_id) * stride, law[rows] * conditional[rows, at, v] / left)
        law = after
    return _clean(law, states, process.mask_id)


def factorised(log_kernel: Tensor) -> Tensor:
    """The transition matrix between all K^L sequences of a kernel (K^L, L, K) that draws every position by itself."""
    kernel = log_kernel.double().exp()
    count, length, num_ids = kernel.shape
    states = enumerate_states(num_ids, length)
    joint = torch.ones(count, count, dtype=torch.float64)
    for at in range(length):
        joint *= kernel[:, at][:, states[:, at]]
    return joint


@torch.no_grad()
def ancestral_law(sampler: Ancestral | Euler, length: int, start: Tensor | None = None) -> Tensor:
    """The exact law (V^L,) of what a sampler with a token-factorised kernel draws, from its prior or from a law (K^L,)
    at t = 1."""
    process = sampler.process
    states = enumerate_states(process.num_ids, length)
    law = process.prior_probability(states).prod(-1) if start is None else start
    sampler.begin()
    for t, s in sampler.times(states):
        law = law @ factorised(sampler.kernel(states, t, s))
    return _clean(law, states, process.mask_id)
