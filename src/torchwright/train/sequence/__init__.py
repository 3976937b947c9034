"""Sequence parallelism by a pass: any model's graph rewritten so that processes share each sequence.

parallel = tw.sequence_parallel(model, mesh)
parallel(input_ids=ids, labels=labels).backward()
print(parallel.report)
"""

from torchwright.train.sequence.model import SequenceParallel, sequence_parallel
from torchwright.train.sequence.report import RewriteReport, SequenceParallelError

__all__ = ["RewriteReport", "SequenceParallel", "SequenceParallelError", "sequence_parallel"]
