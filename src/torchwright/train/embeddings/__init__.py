"""Embedding tables of recommenders in two dimensions: shared out inside groups, replicated across them.

Pure PyTorch, on CPUs (gloo) and GPUs (NCCL). `planner` cuts the tables, `collection` looks them up, an optimizer of
`optimizers` is fused into the backward pass.
"""

from torchwright.train.embeddings.collection import ShardedEmbeddings
from torchwright.train.embeddings.optimizers import SGD, Adam, RowOptimizer, RowWiseAdagrad
from torchwright.train.embeddings.planner import Plan, Shard, cut, measure, plan
from torchwright.train.embeddings.tables import EmbeddingError, Inputs, Jagged, Table
from torchwright.train.embeddings.topology import Groups, Topology

__all__ = [
    "SGD",
    "Adam",
    "EmbeddingError",
    "Groups",
    "Inputs",
    "Jagged",
    "Plan",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Shard",
    "ShardedEmbeddings",
    "Table",
    "Topology",
    "cut",
    "measure",
    "plan",
]
