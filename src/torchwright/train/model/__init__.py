"""The trainable decoder: the native decoder's families in plain PyTorch, with no parallelism or precision inside.

model = Transformer(read_decoder_config(folder))
load_weights(model, folder)            # or model.reset_parameters(seed)
logits_BTV = model(ids_BT)
save_folder(model, model.config, out, source=folder)
"""

from torchwright.train.model.attention import Attend, Scores, explicit_attention, fused_attention
from torchwright.train.model.transformer import Transformer
from torchwright.train.model.weights import check_shapes, load_weights, save_folder

__all__ = [
    "Attend",
    "Scores",
    "Transformer",
    "check_shapes",
    "explicit_attention",
    "fused_attention",
    "load_weights",
    "save_folder",
]
