"""The objectives as their papers write them: one response and one token after the other, in float64.

Shares no code with the package. Rewards and lengths are lists, the log-probabilities of the policy
0-dimensional tensors, so that autograd gives the gradient of every token.
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from torchrl_grpo.config.schema import PolicyConfig


def k_by_hand(kind: str, new: Any, ref: Any) -> Any:
    exp = torch.exp if isinstance(new, Tensor) else math.exp
    d = ref - new
    return {"k1": new - ref, "k2": 0.5 * d**2, "k3": exp(d) - d - 1}[kind]


def penalized(cfg: PolicyConfig, length: int, longest: int) -> float:
    """DAPO, eq. 13, case by case."""
    if cfg.overlong != "penalise":
        return 0.0
    buffer = cfg.overlong_buffer or max(1, longest // 5)
    if length <= longest - buffer:
        return 0.0
    if length <= longest:
        return ((longest - buffer) - length) / buffer
    return -1.0


def shaped(cfg: PolicyConfig, reward: float) -> float:
    value = (reward + cfg.reward_shift) * cfg.reward_scale
    return value if cfg.reward_clip is None else max(-cfg.reward_clip, min(cfg.reward_clip, value))


def normalized(cfg: PolicyConfig, group: list[float], everything: list[float]) -> list[float]:
    """Advantages of one group."""
    if max(group) == min(group) or cfg.advantage_estimator == "none":
        return [0.0] * len(group)
    out = []
    for i, reward in enumerate(group):
        others = group[:i] + group[i + 1 :]
        baseline = statistics.fmean(others if cfg.advantage_estimator == "leave_one_out" else group)
        scale = {
            "unbiased": lambda: statistics.stdev(group) + cfg.advantage_eps,
            "population": lambda: statistics.pstdev(group) + cfg.advantage_eps,
            "batch": lambda: statistics.stdev(everything) + cfg.advantage_eps,
            "none": lambda: 1.0,
        }[cfg.advantage_std]()
        out.append((reward - baseline) / scale)
    return out


def maxent(cfg: PolicyConfig, utilities: list[float], ref: list[float]) -> list[float]:
    K = len(utilities)
    p = [math.exp(u / cfg.q_temperature) for u in utilities]
    p = [value / sum(p) for value in p]
    q = [value * (1 - K * cfg.q_epsilon) + cfg.q_epsilon for value in p]
    q = [value / sum(q) for value in q]
    beta = cfg.kl_coef
    logits = [(math.log(a) + beta * b) / (cfg.tau + beta) for a, b in zip(q, ref, strict=True)]
    w = [math.exp(value - max(logits)) for value in logits]
    w = [value / sum(w) for value in w]
    return [K * value for value in w] if cfg.surrogate == "log_likelihood" else [value - 1 / K for value in w]


def advantages_by_hand(cfg: PolicyConfig, batch: TensorDict, longest: int) -> list[list[float]]:
    mask = batch["masks", "response"]
    P, G, T = mask.shape
    logs = {key: batch["log_probs", key].double().tolist() for key in ("response", "reference")}
    totals = []
    for p in range(P):
        row = []
        for s in range(G):
            kept = [t for t in range(T) if mask[p, s, t]]
            reward = shaped(cfg, float(batch["next", "reward"][p, s, 0].double()))
            reward += penalized(cfg, len(kept), longest)
            if cfg.kl_in == "reward":
                reward -= cfg.kl_coef * sum(
                    k_by_hand(cfg.kl_estimator, logs["response"][p][s][t], logs["reference"][p][s][t])
                    for t in kept
                )
            row.append(reward)
        totals.append(row)
    if cfg.advantage_estimator == "maxent":
        advantages = []
        for p in range(P):
            ref = []
            for s in range(G):
                kept = [t for t in range(T) if mask[p, s, t]]
                total = sum(logs["reference"][p][s][t] for t in kept)
                ref.append(total / len(kept) if cfg.length_normalize_ref else total)
            advantages.append(maxent(cfg, totals[p], ref))
        return advantages
    everything = [reward for row in totals for reward in row]
    return [normalized(cfg, row, everything) for row in totals]


def counted(cfg: PolicyConfig, batch: TensorDict) -> list[list[list[bool]]]:
    """Which tokens the loss counts."""
    mask: list[list[list[bool]]] = batch["masks", "response"].tolist()
    for p, row in enumerate(mask):
        totals = [shaped(cfg, float(reward)) for reward in batch["next", "reward"][p, :, 0]]
        flat = max(totals) == min(totals) and cfg.constant_groups != "keep"
        for s, tokens in enumerate(row):
            if flat or (cfg.overlong == "mask" and bool(batch["truncated"][p, s, 0])):
                row[s] = [False] * len(tokens)
    return mask


def surrogate_by_hand(cfg: PolicyConfig, r: Tensor, log_prob: Tensor, A: float) -> Tensor:
    """The objective of one token whose ratio is ``r``."""
    low = 1 - cfg.clip_epsilon
    high = 1 + (cfg.clip_epsilon if cfg.clip_epsilon_high is None else cfg.clip_epsilon_high)
    if cfg.surrogate == "clip":
        objective = torch.min(r * A, torch.clamp(r, low, high) * A)
        if cfg.dual_clip is not None and A < 0:
            objective = torch.max(objective, torch.tensor(cfg.dual_clip * A, dtype=torch.float64))
        return objective
    if cfg.surrogate == "cispo":
        return min(max(float(r.detach()), low), high) * A * log_prob
    if cfg.surrogate == "log_likelihood":
        return A * log_prob
    assert cfg.surrogate == "sapo"
    options = {"temperature_positive": 1.0, "temperature_negative": 1.05, **cfg.surrogate_args}
    t = options["temperature_positive" if A > 0 else "temperature_negative"]
    return 4 / t / (1 + torch.exp(-t * (r - 1))) * A


def corrected(cfg: PolicyConfig, w: float) -> float:
    if cfg.correction == "none":
        return 1.0
    if cfg.correction == "truncate":
        return min(w, cfg.correction_cap)
    return w if cfg.correction_floor <= w <= cfg.correction_cap else 0.0


def level(kind: str, own: Any, values: list[Any]) -> Any:
    """A token's log-ratio, the mean over its response, or the sum."""
    return {"token": own, "sequence": sum(values) / len(values), "trajectory": sum(values)}[kind]


def loss_by_hand(cfg: PolicyConfig, batch: TensorDict, new: Tensor, longest: int) -> Tensor:
    """The loss of log-probabilities ``new`` ``[P, G, T]`` (float64); advantages are computed here as well."""
    advantages = advantages_by_hand(cfg, batch, longest)
    mask = counted(cfg, batch)
    P, G, _ = new.shape
    tokens = sum(flag for row in mask for flags in row for flag in flags)
    sequences = sum(any(flags) for row in mask for flags in row)
    engine, ref = batch["log_probs", "response"].double(), batch["log_probs", "reference"].double()
    proximal = batch["log_probs", "proximal"].double() if cfg.proximal == "trainer" else engine
    loss = torch.zeros((), dtype=torch.float64)
    for p in range(P):
        for s in range(G):
            kept = [t for t, flag in enumerate(mask[p][s]) if flag]
            ratios = [new[p, s, t] - proximal[p, s, t] for t in kept]
            gaps = [float(proximal[p, s, t] - engine[p, s, t]) for t in kept]
            for i, t in enumerate(kept):
                r = torch.exp(level(cfg.ratio, ratios[i], ratios))
                w = corrected(cfg, math.exp(level(cfg.correction_level, gaps[i], gaps)))
                # A teacher finds the token more or less probable than the policy does.
                own = advantages[p][s] + cfg.distill_coef * float(ref[p, s, t] - new[p, s, t])
                term = -w * surrogate_by_hand(cfg, r, new[p, s, t], own)
                if cfg.kl_in == "loss" and cfg.kl_coef:
                    term = term + cfg.kl_coef * k_by_hand(cfg.kl_estimator, new[p, s, t], ref[p, s, t])
                if cfg.kl_inference_coef:
                    term = term + cfg.kl_inference_coef * k_by_hand("k3", new[p, s, t], engine[p, s, t])
                share = {
                    "token": 1 / tokens,
                    "sequence": 1 / (sequences * len(kept)),
                    "constant": 1 / (sequences * (cfg.aggregation_length or longest)),
                }[cfg.aggregation]
                loss = loss + share * term
    return loss
