"""NumPy against ``tw.compile_numpy``: one k-means step on 2 M points, and three functions that are less easy.

    python -m benchmarks.optimize.numpy_kmeans            # all functions, on one thread and on all cores
    python -m benchmarks.optimize.numpy_kmeans --points 200000 --rounds 5

Every ratio comes from rounds in which NumPy and the compiled function run in turn; it is the median of the
paired ratios with a 95% interval. Each result is compared with NumPy's before and after the timing.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.harness import run
from benchmarks.harness.turns import seconds
from torchwright.hardware.measure.clock import paired_speedup
from torchwright.optimization.numpy import compile_numpy

COLUMNS = ("function / NumPy baseline", "type", "threads", "NumPy, ms", "ours, ms", "ratio", "runs as")


def kmeans_step(X_ND, means_KD):
    """Label every point by its nearest mean, then move each mean to the centre of its points."""
    labels_N = np.argmin(np.linalg.norm(X_ND - means_KD[:, None], axis=2), axis=0)
    members = [labels_N == k for k in range(len(means_KD))]
    means = np.stack([(X_ND * mask[:, None]).sum(axis=0) / mask.sum() for mask in members])
    return means, labels_N


def kmeans_step_indexed(X_ND, means_KD):
    """Step with boolean indexing: quicker in NumPy, harder for a compiler (sizes depend on the data)."""
    labels_N = np.argmin(np.linalg.norm(X_ND - means_KD[:, None], axis=2), axis=0)
    return np.stack([X_ND[labels_N == k].mean(axis=0) for k in range(len(means_KD))]), labels_N


def rolling_mean_residual(x):
    """Each sample minus the mean of the five around it, with the ends left out."""
    mean = (x[:-4] + x[1:-3] + x[2:-2] + x[3:-1] + x[4:]) / 5
    return x[2:-2] - mean


def pairwise_softmax(A_ND, B_MD):
    """Soft assignment of rows of A to rows of B by squared distance."""
    distance = ((A_ND[:, None, :] - B_MD[None, :, :]) ** 2).sum(axis=-1)
    weight = np.exp(distance.min(axis=1, keepdims=True) - distance)
    return weight / weight.sum(axis=1, keepdims=True)


def one_matmul(A, B):
    """Multiply matrices: NumPy's BLAS already does all there is to do."""
    return A @ B


def require_agreement(result: Any, expected: Any, rtol: float) -> None:
    if isinstance(expected, tuple):
        for one, other in zip(result, expected, strict=True):
            require_agreement(one, other, rtol)
        return
    if result.dtype != expected.dtype or result.shape != expected.shape:
        raise SystemExit(f"disagreement: {result.dtype}{result.shape} for {expected.dtype}{expected.shape}")
    if expected.dtype.kind in "iub":
        np.testing.assert_array_equal(result, expected)
    else:
        np.testing.assert_allclose(result, expected, rtol=rtol, atol=1e-12 + rtol * np.abs(expected).max())


def bench(
    rows: run.Rows, fn: Callable, args: tuple, threads: int, rounds: int, baseline: Callable | None = None
) -> None:
    """Compare and time a function; ``baseline`` is another NumPy function with the same results, if that is quicker."""
    compiled = compile_numpy(fn, threads=threads)
    expected = (baseline or fn)(*args)
    # NumPy's own float32 sum over 2 M rows is off by 1e-5; the compiled one by 1e-7.
    rtol = 1e-4 if args[0].dtype == np.float32 else 1e-10
    compiled(*args)
    require_agreement(compiled(*args), expected, rtol)
    both = (lambda: (baseline or fn)(*args)), (lambda: compiled(*args))
    numpy_s, compiled_s = zip(*([seconds(call) for call in both] for _ in range(rounds)), strict=True)
    require_agreement(compiled(*args), expected, rtol)
    report, ratio = compiled.report, paired_speedup(numpy_s, compiled_s)
    name = fn.__name__ + (f" / {baseline.__name__}" if baseline else "")
    ms = [1e3 * statistics.median(times) for times in (numpy_s, compiled_s)]
    status = f"{report.status} ({report.threads} thr), compile {report.compile_seconds:.1f} s"
    status += f": {report.reason}" if report.status == "original" else ""
    row = {"function": name, "type": str(args[0].dtype), "threads": threads, "ms": ms}
    cells = (name, args[0].dtype, threads, *(f"{each:.2f}" for each in ms), run.times(ratio), status)
    rows.add(row | {"ratio": run.triple(ratio), "status": status}, cells)


def main() -> None:
    options = run.options(__doc__, points=2_000_000, rounds=11)
    cores = len(os.sched_getaffinity(0))
    rows = run.Rows(options.json, COLUMNS, note=f"{cores} cores; NumPy {np.__version__}")
    rng = np.random.default_rng(0)
    half = options.points // 2
    X = np.concatenate([rng.normal(5, 1, (half, 2)), rng.normal(10, 1, (half, 2))])
    means = np.array([[5.0, 5.0], [10.0, 10.0]])
    wave = rng.normal(size=options.points)
    A, B = rng.normal(size=(options.points // 100, 8)), rng.normal(size=(32, 8))
    square = rng.normal(size=(1024, 1024))
    for threads in sorted({1, cores}):
        torch.set_num_threads(threads)
        for dtype in (np.float64, np.float32):
            points = (X.astype(dtype), means.astype(dtype))
            bench(rows, kmeans_step, points, threads, options.rounds)
            if dtype is np.float64:
                bench(rows, kmeans_step, points, threads, options.rounds, baseline=kmeans_step_indexed)
                bench(rows, kmeans_step_indexed, points, threads, options.rounds)
        bench(rows, rolling_mean_residual, (wave,), threads, options.rounds)
        bench(rows, pairwise_softmax, (A, B), threads, options.rounds)
        bench(rows, one_matmul, (square, square), threads, options.rounds)


if __name__ == "__main__":
    main()
