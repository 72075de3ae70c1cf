"""Distances that make a batch distinctive: each pick is away from what is measured and from the other picks.

Read first: `spread_out` (a space-filling start) and `pick` (score × novelty).
"""

from __future__ import annotations

import numpy as np


def nearest(points: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Distance (n,) of each of points (n, d) to the nearest of others (m, d); infinity when there is none."""
    if not len(others):
        return np.full(len(points), np.inf)
    square = (points**2).sum(1)[:, None] + (others**2).sum(1)[None] - 2 * points @ others.T
    out: np.ndarray = np.sqrt(np.maximum(square.min(axis=1), 0.0))
    return out


def spread_out(points: np.ndarray, n: int, distance: np.ndarray) -> list[int]:
    """Indices of `n` of points (m, d), each the farthest from those before it (max-min, a Latin-like start).

    distance: (m,) of each point to what is already taken, infinity without.  The first point is the first where all are as far.
    """
    distance, out = distance.copy(), []
    for _ in range(min(n, len(points))):
        i = int(np.argmax(distance))
        out.append(i)
        distance = np.minimum(distance, nearest(points, points[i : i + 1]))
        distance[i] = -1.0
    return out


def pick(scores: np.ndarray, points: np.ndarray, n: int, distance: np.ndarray, weight: float) -> list[int]:
    """Indices of `n` of points (m, d), picked greedily by score × novelty^weight.

    scores: (m,), any scale; they are brought to [0, 1].  distance: (m,) to what is already taken.  weight: 0 ignores novelty; 1
    lets a candidate twice as far make up for half the score.  Novelty is the distance to the nearest taken or picked candidate,
    relative to the largest.
    """
    spread = float(np.ptp(scores)) if len(scores) else 0.0
    # Without any knowledge all scores are 1, and novelty alone decides.
    merit = (scores - scores.min()) / spread if spread > 0 else np.ones(len(scores))
    distance, out = distance.copy(), []
    free = np.ones(len(scores), dtype=bool)
    for _ in range(min(n, len(points))):
        finite = distance[free & np.isfinite(distance)]
        largest = float(finite.max()) if len(finite) else 0.0
        novelty = np.minimum(distance / largest, 1.0) if largest > 0 else np.ones(len(distance))
        value = np.where(free, merit * novelty**weight, -1.0)
        i = int(np.argmax(value))
        out.append(i)
        free[i] = False
        distance = np.minimum(distance, nearest(points, points[i : i + 1]))
    return out
