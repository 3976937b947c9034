"""The native decoder: decoder-only language models over a paged key-value cache.

model = load_decoder("path/to/folder")
model.logits(ids_BT); model.generate("Once upon a time"); model.stream("Once")
"""

from torchwright.models.decoder.cache import PAGE, CacheFull, PagedCache
from torchwright.models.decoder.config import DecoderConfig, UnsupportedArchitecture
from torchwright.models.decoder.families import read_decoder_config
from torchwright.models.decoder.generation.generate import LoadedDecoder
from torchwright.models.decoder.generation.sampling import Sampler, Sampling
from torchwright.models.decoder.load import load_decoder
from torchwright.models.decoder.model import Decoder
from torchwright.models.decoder.seq2seq.load import load_seq2seq
from torchwright.models.decoder.seq2seq.translator import LoadedSeq2Seq

__all__ = [
    "PAGE",
    "CacheFull",
    "Decoder",
    "DecoderConfig",
    "LoadedDecoder",
    "LoadedSeq2Seq",
    "PagedCache",
    "Sampler",
    "Sampling",
    "UnsupportedArchitecture",
    "load_decoder",
    "load_seq2seq",
    "read_decoder_config",
]
