"""A sentence encoder that is served: texts in, embeddings out, one message at a time."""

from __future__ import annotations

from pathlib import Path

from torchwright.errors import TorchwrightError
from torchwright.paths import file_digest
from torchwright.plan import artifact
from torchwright.serve.messages import Embed, Embedded, Failed, Ready
from torchwright.workloads.encoding import Encoder


class ServedEncoder:
    """An encoder artifact and its tokenizer; raises `ModelError` where it has none."""

    def __init__(self, folder: Path, encoder: Encoder, notices: list[str]) -> None:
        layout = encoder.layout
        self._encoder = encoder
        self.ready = Ready(
            kind="encoder",
            vocabulary=encoder.tokens.tokenizer.get_vocab_size(),
            context=layout.tokens,
            pages=0,
            page_tokens=0,
            stop_ids=[],
            weight_bytes=sum(file.stat().st_size for file in folder.rglob("*.safetensors")),
            kv_bytes=0,
            fingerprint=file_digest(folder / artifact.MANIFEST)[:24],
            notices=notices,
        )

    def embed(self, message: Embed) -> Embedded | Failed:
        """The embeddings, or what is wrong with the texts."""
        if not message.texts or not all(message.texts):
            return Failed(id=message.id, text="there is nothing to embed, or one of the texts is empty")
        inputs = self._encoder.tokens.of(message.texts)
        try:
            vectors_NE = self._encoder(**inputs)
        except TorchwrightError as error:
            return Failed(id=message.id, text=str(error))
        return Embedded(
            id=message.id, vectors=vectors_NE.tolist(), tokens=int(inputs["attention_mask"].sum())
        )
