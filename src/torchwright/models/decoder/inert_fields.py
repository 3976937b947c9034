"""Fields of config.json that cannot change a decoder's logits, and the refusal of all others that no family reads.

A family reads the fields that it honours. A field that is not read and not listed here may mean another computation:
it is refused by name, unless its value says that the feature is off.
"""

from __future__ import annotations

import re

from torchwright.core.errors import ModelError
from torchwright.hub.fields import Fields, is_off

BOOKKEEPING = {
    "architectures",
    "auto_map",
    "custom_pipelines",
    "is_decoder",
    "is_llama_config",
    "model_max_length",
    "max_seq_len",
    "max_sequence_length",
    "model_name",
    "model_type",
    "name_or_path",
    "quantization_config",
    "seq_length",
    "tokenizer_class",
    "torch_dtype",
    "torchscript",
    "transformers.js_config",
    "unsloth_fixed",
    "use_bfloat16",
    "dtype",
    "neuron",
    "onnx",
}
"""Names, sizes and types of files; `quantization_config` is read with the checkpoint."""
OUTPUTS = {
    "chunk_size_feed_forward",
    "finetuning_task",
    "id2label",
    "keys_to_ignore_at_inference",
    "label2id",
    "num_labels",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "problem_type",
    "return_dict",
    "return_dict_in_generate",
    "task_specific_params",
    "tie_last_hidden_states",
    "use_cache",
    "use_return_dict",
}
"""Which results a call returns, and the names of a classifier's classes."""
TRAINING = {
    "gradient_checkpointing",
    "initializer_range",
    "neftune_noise_alpha",
    "num_nextn_predict_layers",
    "pretraining_tp",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "router_z_loss_coef",
    "use_router_aux_loss",
}
"""Settings of a training run, and layers that only draft. `pretraining_tp` splits products without changing them."""
GENERATION = {
    "bad_words_ids",
    "begin_suppress_tokens",
    "cache_implementation",
    "diversity_penalty",
    "do_sample",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_scores",
    "remove_invalid_values",
    "repetition_penalty",
    "suppress_tokens",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
}
"""Settings of sampling that older versions of transformers kept in config.json; current ones ignore them there."""
INERT = BOOKKEEPING | OUTPUTS | TRAINING | GENERATION
INERT_NAMES = re.compile(
    r"_.*"  # attributes that a class keeps for itself
    r"|.*(dropout|drop_path|pdrop).*"
    r"|.*_token(_id|_ids|_index)?"
    r"|(.*_)?version(_.*)?"
    r"|(.*_)?(attn|attention|experts)_implementation"
    r"|(use_)?flash_?att(n|ention).*"
)
"""Whole names of fields that are inert in any family: private, tokens, versions, dropout, kernels."""


def refuse_unread(fields: Fields, family: str) -> None:
    """Raise `ModelError`, naming it, for a field that was not read and may change the logits."""
    for name, value in fields.unread():
        if name in INERT or INERT_NAMES.fullmatch(name) or is_off(name, value):
            continue
        raise ModelError(
            f"{fields.path}: '{name}' is not honoured by the native {family}",
            found=f"{value!r}"[:300],
            allowed="a field that the family reads, or a value that switches the feature off",
            next="`torchwright optimize` runs the model on transformers' own code; if the field is only a note, "
            "remove it from config.json",
        )
