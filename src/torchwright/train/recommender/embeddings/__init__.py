"""Embedding tables of recommenders in two dimensions: shared out inside groups, replicated across them.

Pure PyTorch, on CPUs (gloo) and GPUs (NCCL). `planner` cuts the tables, `collection` looks them up, an optimizer of
`optimizers` is fused into the backward pass.
"""

from torchwright.train.recommender.embeddings.collection import ShardedEmbeddings
from torchwright.train.recommender.embeddings.optimizers import SGD, Adam, RowOptimizer, RowWiseAdagrad
from torchwright.train.recommender.embeddings.planner import Shard, ShardPlan, cut, measure, plan
from torchwright.train.recommender.embeddings.tables import EmbeddingError, Inputs, Jagged, Table
from torchwright.train.recommender.embeddings.topology import Groups, Topology

__all__ = [
    "SGD",
    "Adam",
    "EmbeddingError",
    "Groups",
    "Inputs",
    "Jagged",
    "RowOptimizer",
    "RowWiseAdagrad",
    "Shard",
    "ShardPlan",
    "ShardedEmbeddings",
    "Table",
    "Topology",
    "cut",
    "measure",
    "plan",
]
