"""Continuous time: concrete scores, reverse rates, score entropy, and Theorem 2.

A forward chain with rates sigma'(t) G[y, y'] from y to y' runs backwards with

    R(z -> y) = sigma'(t) G[y, z] s(z)_y,      s(z)_y = p_t(z with l <- y) / p_t(z),      y != z_l,

s being the concrete score. The target's reverse rates are the source's, reweighted (Theorem 2):

    R_q(z -> y) = R_p(z -> y) ( r_t(z with l <- y) / r_t(z) )^gamma

and a rate's diagonal is minus the sum of the others. Rates here are per unit of sigma (multiply by sigma'(t), or by the
difference of sigma over a step), so that they stay finite where the schedule does not.

A score model is learned by the score entropy, whose integrand s - a log s + K(a), K(a) = a log a - a, with the true
ratio a = p_t(y | x) / p_t(z | x) is minimal in expectation at s = E[a | z]. A denoiser implies a score and a score a
denoiser (`Process.score` and `Process.mean`), so `ScoreDenoiser` is one.
"""

import torch
from torch import Tensor

from gtl.denoiser import NetworkDenoiser, Prediction
from gtl.nn.dit import DiT
from gtl.process import Process
from gtl.process.mixing import entropy_integrand

__all__ = ["ScoreDenoiser", "guide_rates", "reverse_rates", "score_entropy"]


def reverse_rates(process: Process, z: Tensor, score: Tensor) -> Tensor:
    """R(z -> y) per unit of sigma for every y, the diagonal included: z (B, P), score (B, P, K) -> (B, P, K)."""
    return with_diagonal(process.rates_into(z).clamp(min=0) * score.double(), z)


def guide_rates(rates: Tensor, log_r: Tensor, z: Tensor, gamma: float | Tensor = 1.0) -> Tensor:
    """Theorem 2: rates (B, P, K) out of z (B, P), reweighted by log r (B, P, K) of every intervention, z itself too.

    log_r may be off by a constant for each (b, p). A token whose ratio is 0 is never reached.
    """
    own = log_r.gather(-1, z.unsqueeze(-1))
    gap = torch.where(rates > 0, log_r.double() - own.double(), 0.0)
    return with_diagonal(rates * torch.exp(gamma * gap), z)


def with_diagonal(rates: Tensor, z: Tensor) -> Tensor:
    """The rates with what z's own place says replaced by minus the sum of the others."""
    rates = rates.scatter(-1, z.unsqueeze(-1), 0.0)
    return rates.scatter(-1, z.unsqueeze(-1), -rates.sum(-1, keepdim=True))


def score_entropy(process: Process, x: Tensor, z: Tensor, t: Tensor, score: Tensor) -> Tensor:
    """The score-entropy integrand of each sequence per unit of sigma, K(a) included.

    Args:
        process: the forward process.
        x: (B, L), clean tokens.
        z: (B, L), noisy ones at times t.
        t: (B,)
        score: (B, L, K), the model's concrete score.

    Returns:
        (B,). Times sigma'(t), or divided by alpha(t) where 1 - alpha is uniform, its mean is the NELBO.
    """
    truth = torch.nn.functional.one_hot(x, process.num_ids).double().log()
    return entropy_integrand(process.rates_into(z), score.double(), process.score(z, truth, t)).sum(-1)


class ScoreDenoiser(NetworkDenoiser):
    """A network that gives log-scores, as a denoiser. Trained by `train/score`."""

    def __init__(self, process: Process, network: DiT, banned: tuple[int, ...] = ()) -> None:
        """Wraps a time-conditioned network with one log-score for each of the K ids."""
        super().__init__(process, network, banned)
        if not network.time_conditioned:
            raise ValueError("a concrete score depends on the time: give the network time_conditioned=True")

    def forward(self, z: Tensor, t: Tensor | None = None, positions: Tensor | None = None) -> Prediction:
        if t is None:
            raise ValueError("a score depends on the time: pass t")
        log_score, tokens, hidden = self.outputs(z, t, positions)
        score = log_score.scatter(-1, tokens.unsqueeze(-1), 0.0).exp()
        score = score.masked_fill(self.ban == -torch.inf, 0.0).double()
        log_probs = self.process.mean(tokens, score, t).float()
        return Prediction(log_probs, hidden, score=score, readout=self.network.head.weight)
