"""Parallelism applied from outside to the trainable decoder, by a layout.

mesh = make_mesh(layout, "cpu")
parallelize(model, layout, mesh)
ids, labels, positions = local_batch(ids_BT, shift_labels(ids_BT), layout, mesh)
total, valid = model.loss(ids, labels, positions)
loss = total / global_sum(valid, mesh)
loss.backward()
norm = clip_grad_norm(model.parameters(), 1.0)
"""

from torchwright.train.parallel.apply import check_fits, parallelize
from torchwright.train.parallel.batch import global_sum, local_batch
from torchwright.train.parallel.gradients import by_mesh, clip_grad_norm, grad_norm
from torchwright.train.parallel.mesh import make_mesh

__all__ = [
    "by_mesh",
    "check_fits",
    "clip_grad_norm",
    "global_sum",
    "grad_norm",
    "local_batch",
    "make_mesh",
    "parallelize",
]
